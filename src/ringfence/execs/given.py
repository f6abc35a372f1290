"""How much input an exec was given, remembered so that nothing is ever given twice."""

from __future__ import annotations

import os
import struct

from ..errors import ExecError, LifecycleError, StorageFull

_PAIR = struct.Struct("<QQ")  # what may have been given, what has been


class Given:
    """A count of bytes in a file of its own.

    Before each write it says how far that may get, and after it how far it got. Of a process that was
    killed in between nobody knows; then no more input is taken, rather than some of it twice.

    Args:
        least: Bytes that were given where it ran before.

    Attributes:
        count: Bytes given so far.
    """

    def __init__(self, path: str, least: int = 0) -> None:
        self._path = path
        self._fd = -1
        self._most = self.count = 0
        try:
            with open(path, "rb") as file:
                self._most, self.count = _PAIR.unpack(file.read(_PAIR.size))
        except (FileNotFoundError, struct.error):
            pass
        if self.count < least:
            self._most = self.count = least

    def open(self) -> None:
        """Make the file, before anything is given: to write in it needs no more room then.

        Raises:
            StorageFull: There is none.
        """
        if self._fd >= 0:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            os.makedirs(os.path.dirname(self._path), mode=0o700, exist_ok=True)
            self._fd = os.open(self._path, flags, 0o600)
            self._write()
        except OSError as exc:
            self.close()
            raise StorageFull(
                f"no room to count input in {self._path}: {exc.strerror}",
                hint="free space or inodes there",
            ) from exc

    def accept(self, offset: int, size: int) -> int:
        """How many bytes of a piece of input have been given before.

        Raises:
            LifecycleError: There is a gap before it; `hint` says where to go on.
            ExecError: An earlier process was killed while it wrote.
        """
        if self._most != self.count:
            raise ExecError(
                f"a restart came while bytes {self.count} to {self._most} of its input were written",
                hint="how many arrived is unknown: start the command again",
            )
        if offset > self.count:
            raise LifecycleError(
                f"input continues at {self.count}, not at {offset}",
                field="offset",
                hint=f"send again from offset {self.count}",
            )
        return min(size, self.count - offset)

    def begin(self, size: int) -> None:
        """Up to `size` bytes are written next."""
        self._most = self.count + size
        self._write()

    def end(self, size: int) -> None:
        self.count += size
        self._most = self.count
        self._write()

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _write(self) -> None:
        os.pwrite(self._fd, _PAIR.pack(self._most, self.count), 0)
