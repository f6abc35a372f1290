"""Shared memory, removed files and those in /dev/shm: each copy gets others with that content."""

from __future__ import annotations

import posix as os

from ...linux import on_behalf
from .descriptors import VOLATILE
from .sockets import CannotCopy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from .source import Mapping, Source

_MOST_BYTES = 64 << 20
_PAGE, _PIECE = 4096, 1 << 20

Key = tuple[int, int]  # device and inode


class Objects:
    """Content of all of them.

    Attributes:
        places: By device and inode: where its content begins in `content`, and how many bytes it has.
        paths: Of those that have one.
        content: A descriptor; -1 while there are none.
        size: Of all content, in whole pages.
    """

    def __init__(self) -> None:
        self.places: dict[Key, tuple[int, int]] = {}
        self.paths: dict[Key, str] = {}
        self.content, self.size = -1, 0

    def read(self, processes: Sequence[Source]) -> None:
        """Copy all of it. The processes that change it stand still.

        Raises:
            CannotCopy: It is too much.
        """
        mapped = [(each, m) for each in processes for m in each.mappings if m.is_object]
        opened = self._find(processes, [mapping for _source, mapping in mapped])
        if self.size > _MOST_BYTES:
            most = _MOST_BYTES >> 20
            raise CannotCopy(f"it has more than {most} MiB of shared memory and removed files")
        if not self.size:
            return
        self.content = os.memfd_create("objects", os.MFD_CLOEXEC)
        os.ftruncate(self.content, self.size)
        for key, (pid, number) in opened.items():
            self._read_file(key, pid, number)
        for source, mapping in mapped:
            if mapping.key not in opened and self.places[mapping.key][1]:
                self._read_memory(source.pid, mapping)

    def _find(
        self, processes: Sequence[Source], mapped: list[Mapping]
    ) -> dict[Key, tuple[int, int]]:
        """Lay their content out; pid and descriptor of those that are open."""
        sizes: dict[Key, int] = {}
        opened: dict[Key, tuple[int, int]] = {}
        for source in processes:
            for number, each in source.descriptors.items():
                if key := each.removed or each.made:
                    opened[key], sizes[key] = (source.pid, number), each.size
                    if each.made is not None:
                        self.paths[key] = each.path
        for mapping in mapped:
            path, end = (
                mapping.path.decode("utf-8", "surrogateescape"),
                mapping.offset + mapping.end - mapping.start,
            )
            if path:
                self.paths[mapping.key] = path
            if path and not path.startswith(VOLATILE):
                sizes[mapping.key] = 0  # the fork has that file
            elif mapping.key not in opened:
                sizes[mapping.key] = max(sizes.get(mapping.key, 0), end)
        for key, size in sizes.items():
            self.places[key] = self.size, size
            self.size += -(-size // _PAGE) * _PAGE
        return opened

    def close(self) -> None:
        """Idempotent."""
        fd, self.content = self.content, -1
        if fd >= 0:
            os.close(fd)

    def _read_file(self, key: Key, pid: int, number: int) -> None:
        try:
            fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
        except PermissionError:  # of a mode that keeps others out
            fd = on_behalf.descriptor(pid, number, 0)
        try:
            place, size = self.places[key]
            self._take(fd, 0, place, size)
        except OSError as exc:
            raise CannotCopy(
                f"descriptor {number} is a removed file that cannot be read: {exc.strerror}"
            ) from None
        finally:
            os.close(fd)

    def _read_memory(self, pid: int, mapping: Mapping) -> None:
        fd = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            place, _size = self.places[mapping.key]
            length = mapping.end - mapping.start
            self._take(fd, mapping.start, place + mapping.offset, length)
        except OSError:
            raise CannotCopy("it shares memory that cannot be read") from None
        finally:
            os.close(fd)

    def _take(self, fd: int, at: int, place: int, size: int) -> None:
        while size > 0:
            data = os.pread(fd, min(size, _PIECE), at)
            if not data:
                return  # a file that has become shorter
            if any(data):
                os.pwrite(self.content, data, place)
            at, place, size = at + len(data), place + len(data), size - len(data)
