"""Kernel facts about a live sandbox. Decides nothing: `report.py` judges."""

from __future__ import annotations

import os

from ...linux.namespaces import parse_id_map
from ..local.host.mountinfo import MountLine, read_text
from ..local.netns import NetworkTables

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .live import LiveSandbox


class Inspection:
    """Readings of one sandbox; each is taken once.

    From outside, by the pid of its PID 1, where the kernel lets the caller; files that only the
    process itself may open come as descriptors from PID 1, and are read here.
    """

    def __init__(self, sandbox: LiveSandbox) -> None:
        self.sandbox = sandbox
        self._texts: dict[str, str] = {}

    def outside(self, name: str) -> str:
        """The text of /proc/PID/`name`, with the host's pid.

        Raises:
            OSError: It cannot be read, or the sandbox has ended.
        """
        return self._once(f"/proc/{self.sandbox.pid}/{name}", read_text)

    def inside(self, path: str) -> str:
        """The text of a file as PID 1 sees it."""
        return self._once(f"inside:{path}", lambda _key: self._read_inside(path))

    def _once(self, key: str, read: Callable[[str], str]) -> str:
        if key not in self._texts:
            self._texts[key] = read(key)
        return self._texts[key]

    def _read_inside(self, path: str) -> str:
        fd = self._open_inside(path)
        with open(fd, encoding="utf-8", errors="replace") as file:
            return file.read()

    def _open_inside(self, path: str) -> int:
        _body, fds = self.sandbox.ask_files("open", path, os.O_RDONLY, 0)
        return fds[0]

    @property
    def status(self) -> dict[str, str]:
        """proc_pid_status(5) of PID 1, which every process inside inherits from."""
        lines = self.outside("status").splitlines()
        return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}

    def limit(self, name: str) -> str:
        """The hard limit `Max ...` of proc_pid_limits(5)."""
        for line in self.outside("limits").splitlines():
            if line.startswith(name):
                return line[len(name) :].split()[1]
        return "unlimited"

    def id_map(self, name: str) -> list[tuple[int, int, int]]:
        """(inside, outside, count) of `uid_map` or `gid_map`."""
        return parse_id_map(self.outside(name))

    def has_own_namespace(self, name: str) -> bool:
        """Return whether its namespace differs from ours, by the inode of its descriptor."""
        fd = self._open_inside(f"/proc/self/ns/{name}")
        try:
            theirs = os.fstat(fd)
        finally:
            os.close(fd)
        ours = os.stat(f"/proc/self/ns/{name}")
        return (theirs.st_dev, theirs.st_ino) != (ours.st_dev, ours.st_ino)

    @property
    def borrows_proc(self) -> bool:
        """Tell whether its /proc is of a PID namespace above its own: then PID 1 has a number in each."""
        numbers = self.inside("/proc/self/status").partition("\nNSpid:")[2].partition("\n")[0]
        return len(numbers.split()) > 1

    @property
    def mounts(self) -> list[MountLine]:
        """Every mount inside."""
        return [MountLine(line) for line in self.inside("/proc/self/mountinfo").splitlines()]

    def mount_at(self, target: str) -> MountLine | None:
        """The mount that is visible at `target`; the last one covers those below it."""
        return next((each for each in reversed(self.mounts) if each.target == target), None)

    @property
    def root_device(self) -> str:
        root = self.mount_at("/")
        return root.device if root else ""

    @property
    def network(self) -> NetworkTables:
        return NetworkTables(lambda name: self.inside(f"/proc/self/net/{name}"))

    def disk(self) -> tuple[int, int]:
        """(bytes, inodes) that its root file system can hold."""
        _body, fds = self.sandbox.ask_files("disk")
        try:
            info = os.fstatvfs(fds[0])
        finally:
            os.close(fds[0])
        return info.f_blocks * info.f_frsize, info.f_files
