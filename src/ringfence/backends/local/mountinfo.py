"""What is mounted where: proc_pid_mountinfo(5)."""

from __future__ import annotations


class MountLine:
    """One line of mountinfo: proc_pid_mountinfo(5)."""

    def __init__(self, line: str) -> None:
        left, _, right = line.partition(" - ")
        fields = left.split(" ")
        self.device, self.target = fields[2], unescaped(fields[4])
        self.options = frozenset(fields[5].split(","))
        self.kind = right.partition(" ")[0]

    def is_of_the_host(self, root_device: str) -> bool:
        """Whether it shows something that is not the sandbox's own."""
        return self.device != root_device and self.kind not in ("proc", "devpts")


def read_text(path: str) -> str:
    """A whole file of /proc or /sys."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def unescaped(word: str) -> str:
    """A path of mountinfo, in which space, tab, newline and backslash are octal escapes."""
    head, *rest = word.split("\\")
    return head + "".join(chr(int(part[:3], 8)) + part[3:] for part in rest)
