"""Mount table of a process: proc_pid_mountinfo(5)."""

from __future__ import annotations


class MountLine:
    """A line of mountinfo: proc_pid_mountinfo(5)."""

    def __init__(self, line: str) -> None:
        left, _, right = line.partition(" - ")
        fields = left.split(" ")
        self.device, self.target = fields[2], unescaped(fields[4])
        self.options = frozenset(fields[5].split(","))
        self.kind, _, settings = right.partition(" ")
        self.settings = frozenset(settings.rpartition(" ")[2].split(","))  # of the file system

    def is_of_the_host(self, root_device: str) -> bool:
        """Return whether it shows files that are not the sandbox's own."""
        return self.device != root_device and self.kind not in ("proc", "devpts")


def kind_at(path: str) -> str:
    """The kind of file system that `path`, absolute and without symlinks, is on here; empty: not known."""
    found = ""
    depth = 0
    try:
        lines = [MountLine(line) for line in read_text("/proc/self/mountinfo").splitlines()]
    except OSError:
        return ""
    for line in lines:
        top = line.target.rstrip("/")
        # Of several at one place, the last is seen.
        if (path == top or path.startswith(f"{top}/")) and len(top) >= depth:
            found, depth = line.kind, len(top)
    return found


# Directories of /proc that are always empty: what is mounted there hides nothing.
_HIDES_NOTHING = ("/proc/sys/fs/binfmt_misc", "/proc/fs/nfsd", "/proc/openprom")


def masks_of_proc() -> tuple[str, ...]:
    """List the mounts below /proc for which the kernel refuses a new one in a user namespace; empty: none.

    One whole and writable /proc anywhere is enough for it, as LXC has. Source: fs/namespace.c,
    mnt_already_visible.
    """
    if not _masks:
        try:
            _masks.append(masks_in(read_text("/proc/self/mountinfo").splitlines()))
        except OSError:
            _masks.append(())
    return _masks[0]


_masks: list[tuple[str, ...]] = []  # asked for with every start that may do without a new /proc


def masks_in(lines: list[str]) -> tuple[str, ...]:
    """List those of a mount table."""
    mounts = [(line.split(" ", 4), MountLine(line)) for line in lines]
    hidden = {fields[1] for fields, on in mounts if on.target not in _HIDES_NOTHING}
    for fields, on in mounts:
        is_whole = on.kind == "proc" and fields[3] == "/" and fields[0] not in hidden
        if is_whole and "rw" in on.options:
            return ()
    return tuple(sorted({on.target for _, on in mounts if on.target.startswith("/proc/")}))


def read_text(path: str) -> str:
    """A whole file of /proc or /sys."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def unescaped(word: str) -> str:
    """A path of mountinfo, in which space, tab, newline and backslash are octal escapes."""
    head, *rest = word.split("\\")
    return head + "".join(chr(int(part[:3], 8)) + part[3:] for part in rest)
