"""Uploads: written to a temporary file beside the target and renamed, so that readers never see
half a file.

Blocks; routes call it in thread pools. All of it happens inside the sandbox, by its own user's right.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress

from ...errors import FileError, ResourceExhausted, RingfenceError
from ...model.files import FILE

_BLOCK = 1 << 16
_ZEROS = bytes(_BLOCK)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO

    from ...model.files import FileInfo
    from ...sandbox.files import Files


class Upload:
    """A file being uploaded to `path`.

    An existing file keeps its permissions, and a symlink keeps its target. The file is written in
    place where its directory is not writable, or where it cannot be replaced.

    Args:
        mode: Permission bits of a new file.

    Raises:
        FileError: It cannot be written.
    """

    def __init__(self, files: Files, path: str, *, append: bool, mode: int) -> None:
        self._files, self._path, self._beside = files, path, ""
        self.file = self._open(append, mode)

    def _open(self, append: bool, mode: int) -> BinaryIO:
        there = None if append else self._there()
        if not append and (there is None or there.kind == FILE):
            if there is not None:
                self._path = there.path
                # Without write permission on the file, replacing it must fail too, whatever its
                # directory allows.
                self._files.open_write(self._path, append=True).close()
            parent, slash, _name = self._path.rpartition("/")
            beside = f"{parent}{slash}.ringfence-{os.urandom(8).hex()}"
            try:
                file = self._files.open_write(beside, mode=there.mode if there else mode)
                self._beside = beside
                return file
            except FileError:
                pass  # the path itself says what is wrong with it
            except ResourceExhausted as exc:
                exc.message = exc.message.replace(beside, self._path)
                raise
        return self._files.open_write(self._path, append=append, mode=mode)

    def _there(self) -> FileInfo | None:
        """Stat the final target of the path."""
        with suppress(FileError):
            return self._files.stat(self._path, follow=True)
        with suppress(FileError):
            return self._files.stat(self._path)  # a symlink to nothing
        return None

    def write(self, data: bytes) -> None:
        """Add bytes. Whole blocks of zeros become holes: a sparse file of the client stays sparse."""
        start = 0
        if self._beside and self.file.seekable():
            for at in range(0, len(data), _BLOCK):
                if data[at : at + _BLOCK] == _ZEROS:
                    self.file.write(data[start:at])
                    self.file.seek(_BLOCK, os.SEEK_CUR)
                    start = at + _BLOCK
        self.file.write(data[start:])
        self.file.flush()

    def done(self) -> FileInfo:
        """Put it in its place.

        Raises:
            FileError: It cannot be, and is not.
        """
        if self._beside and self.file.seekable():
            self.file.truncate()  # a hole at the end
        self.file.close()
        if self._beside:
            try:
                self._files.move(self._beside, self._path)
            except FileError:
                self._copy()  # a mount of its own, say: it can be filled and not replaced
                self._files.remove(self._beside)
            self._beside = ""
        return self._files.stat(self._path)

    def _copy(self) -> None:
        with (
            self._files.open_read(self._beside) as source,
            self._files.open_write(self._path) as target,
        ):
            shutil.copyfileobj(source, target, 1 << 20)

    def abandon(self) -> None:
        """Leave what was there as it was; nothing after `done`."""
        with suppress(OSError, RingfenceError):
            self.file.close()
        if self._beside:
            with suppress(RingfenceError):
                self._files.remove(self._beside)
