# Made by tools/make_sync_client.py of the file of the same name in _async; change that one.
"""The files of a sandbox of a server."""

from __future__ import annotations

import posixpath
from contextlib import closing, contextmanager

from ...errors import FileError, FileNotFound, NotADirectory, ServerUnreachable
from ...model.base import checks
from ...model.base.helpful import helpful
from ...model.base.jsonform import loads
from ...model.files import MOST_READ, FileInfo, too_long
from ...model.found import AllReplaced, FileChange, FoundFiles, FoundLines
from .. import copies
from .pauses import blocking, pause
from .transport import Transport

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence
    from typing import Any, BinaryIO

    from ..copies import Progress

    Infos = list[FileInfo]  # `list` is a method here

_PAGE = 10_000
_MOST_LINKS = 40  # include/linux/namei.h MAXSYMLINKS


@helpful
class RemoteFiles:
    """`sandbox.files`; see `Files`."""

    def __init__(self, transport: Transport, sandbox_at: str) -> None:
        self._transport, self._at = transport, f"{sandbox_at}/files"

    def read(self, path: str, *, offset: int = 0, max_bytes: int | None = None) -> bytes:
        """The whole file, of at most 1 GiB; or at most `max_bytes` of it from `offset` on."""
        checks.part_of_file(offset, max_bytes)
        if offset and 0 < (self.stat(path, follow=True)).size_bytes <= offset:
            return b""  # HTTP has no range for nothing
        found, reader = bytearray(), copies.FileReader(path, offset)
        while not reader.is_over:
            try:
                with self._transport.stream(f"{self._at}/content", **reader.request()) as got:
                    if reader.begin(got.status_code, got.headers):
                        found.clear()
                    for chunk in got.iter_raw():
                        found += reader.take(chunk)
                        if max_bytes is not None and len(found) >= max_bytes:
                            return bytes(found[:max_bytes])
                        if max_bytes is None and len(found) > MOST_READ:
                            raise too_long(path)
                    reader.is_over = True
            except ServerUnreachable as exc:
                pause(reader.broken(exc))
        return bytes(found)

    def read_text(self, path: str) -> str:
        """The whole file as text, bad bytes replaced."""
        return (self.read(path)).decode("utf-8", "replace")

    def write(
        self,
        path: str,
        data: bytes | str,
        *,
        append: bool = False,
        mode: int = 0o644,
        parents: bool = False,
    ) -> None:
        """Write a file, creating or replacing it; with `parents` its directories too."""
        content = data.encode() if isinstance(data, str) else checks.binary(data, "data")
        try:
            self._write(path, content, append, mode)
        except FileNotFound:
            directory = path.rpartition("/")[0]
            if not parents or not directory:
                raise
            self.make_dir(directory)
            self._write(path, content, append, mode)

    def _write(self, path: str, content: bytes, append: bool, mode: int) -> None:
        self._transport.request(
            "PUT",
            f"{self._at}/content",
            params=copies.write_params(path, append=append, mode=mode),
            content=content,
            timeout_s=copies.CONTENT_S,
            repeat=not append,  # the same content once more is the same file
        )

    def open_read(self, path: str) -> BinaryIO:
        """A file of this machine with the content of one of the sandbox."""
        return blocking(copies.open_read, self._transport.blocking, self._at, path)

    def open_write(self, path: str, *, append: bool = False, mode: int = 0o644) -> BinaryIO:
        """A file of this machine that becomes one of the sandbox when it is closed."""
        return copies.open_write(self._transport.blocking, self._at, path, append=append, mode=mode)

    def list(self, path: str = ".") -> list[FileInfo]:
        """The entries of a directory, by name."""
        found: Infos = []
        cursor = None
        while True:
            page = self._json("GET", "list", path=path, limit=_PAGE, cursor=cursor)
            found += [FileInfo.from_json(each) for each in page["items"]]
            cursor = page["next_cursor"]
            if cursor is None:
                return found

    def stat(self, path: str, *, follow: bool = False) -> FileInfo:
        """Stat one path; the symlink itself, or with `follow` its final target.

        Raises:
            FileError: Symlinks lead in a circle.
        """
        for _ in range(_MOST_LINKS):
            info = FileInfo.from_json(self._json("GET", "stat", path=path))
            if not follow or info.link_target is None:
                return info
            path = posixpath.join(posixpath.dirname(info.path), info.link_target)
        raise FileError(f"{path}: too many levels of symbolic links", path=path)

    def exists(self, path: str) -> bool:
        """Return whether the path exists; a dangling symlink exists."""
        try:
            self.stat(path)
        except (FileNotFound, NotADirectory):
            return False
        return True

    def make_dir(self, path: str, *, parents: bool = True) -> None:
        """Create a directory, with its parents unless told otherwise."""
        body = {"path": path, "parents": parents}
        self._transport.json("POST", f"{self._at}/dirs", body=body, repeat=parents)

    def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file or an empty directory; a whole tree when `recursive`."""
        params = {"path": path, "recursive": recursive}
        # Not repeated when the answer is lost: the second answer would be that nothing is there.
        self._transport.request("DELETE", self._at, params=params, repeat=False)

    def move(self, src: str, dst: str) -> None:
        """Rename, replacing a file at `dst`."""
        self._transport.json("POST", f"{self._at}/move", body={"source": src, "target": dst})

    def upload(self, local: str, remote: str, *, progress: Progress | None = None) -> None:
        """Copy a file or tree of this machine into the sandbox; `remote` is the copy's own path."""
        blocking(copies.upload, self._transport.blocking, self._at, local, remote, progress)

    def download(
        self, remote: str, local: str, *, overwrite: bool = False, progress: Progress | None = None
    ) -> None:
        """Copy a file or tree out of the sandbox to this machine; `local` is the copy's own path.

        Raises:
            FileExists: A file that the copy would replace is there, and `overwrite` is not set.
        """
        transport, at = self._transport.blocking, self._at
        blocking(
            lambda: copies.download(transport, at, remote, local, progress, overwrite=overwrite)
        )

    # -- looking through them --------------------------------------------------------------------

    def glob(self, pattern: str, path: str = ".", *, limit: int = 1000) -> FoundFiles:
        """Paths below `path` that match: `*` within a name, `**` any number of directories."""
        found = self._json("GET", "glob", pattern=pattern, path=path, limit=limit)
        return FoundFiles.from_json(found)

    def search(
        self,
        pattern: str,
        path: str = ".",
        *,
        regex: bool = False,
        ignore_case: bool = False,
        glob: str = "",
        limit: int = 1000,
    ) -> FoundLines:
        """Lines of text files below `path` in which `pattern` is found; see `Files.search`."""
        asked = {"pattern": pattern, "regex": regex, "ignore_case": ignore_case}
        found = self._json("GET", "search", path=path, glob=glob, limit=limit, **asked)
        return FoundLines.from_json(found)

    def replace(
        self,
        paths: Sequence[str],
        pattern: str,
        replacement: str,
        *,
        regex: bool = False,
        ignore_case: bool = False,
    ) -> AllReplaced:
        """Replace text in files; each is put in place whole, or left as it was."""
        asked = {"pattern": pattern, "regex": regex, "ignore_case": ignore_case}
        body = {**asked, "paths": [*paths], "replacement": replacement}
        found = self._transport.json("POST", f"{self._at}/replace", body=body)
        return AllReplaced.from_json(found)

    @contextmanager
    def watch(self, path: str = ".", *, recursive: bool = False) -> Iterator[Iterator[FileChange]]:
        """Watch `path` and everything below it for changes until the block ends.

        Raises:
            ServerUnreachable: The stream broke off; what changed since is not known.
        """
        with closing(self._watch(path, recursive)) as changes:
            changes.__next__()  # the watch is active from here on
            yield changes

    def _watch(self, path: str, recursive: bool) -> Generator[FileChange, None, None]:
        params = {"path": path, "recursive": recursive}
        with self._transport.stream(f"{self._at}/watch", params=params) as response:
            for line in response.iter_lines():
                if line.startswith("data:"):
                    yield FileChange.from_json(loads(line[5:]))

    def _json(self, method: str, verb: str, **params: Any) -> Any:
        return self._transport.json(method, f"{self._at}/{verb}", params=params)
