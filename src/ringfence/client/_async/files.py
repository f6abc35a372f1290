"""The files of a sandbox of a server."""

from __future__ import annotations

import posixpath
from contextlib import aclosing, asynccontextmanager

from ...errors import FileError, FileNotFound, NotADirectory, ServerUnreachable
from ...model.base import checks
from ...model.base.helpful import helpful
from ...model.base.jsonform import loads
from ...model.files import MOST_READ, FileInfo, too_long
from ...model.found import AllReplaced, FileChange, FoundFiles, FoundLines
from .. import copies
from .pauses import blocking, pause
from .transport import AsyncTransport

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence
    from typing import Any, BinaryIO

    from ..copies import Progress

    Infos = list[FileInfo]  # `list` is a method here

_PAGE = 10_000
_MOST_LINKS = 40  # include/linux/namei.h MAXSYMLINKS


@helpful
class AsyncRemoteFiles:
    """`sandbox.files`; see `Files`."""

    def __init__(self, transport: AsyncTransport, sandbox_at: str) -> None:
        self._transport, self._at = transport, f"{sandbox_at}/files"

    async def read(self, path: str, *, offset: int = 0, max_bytes: int | None = None) -> bytes:
        """The whole file, of at most 1 GiB; or at most `max_bytes` of it from `offset` on."""
        checks.part_of_file(offset, max_bytes)
        if offset and 0 < (await self.stat(path, follow=True)).size_bytes <= offset:
            return b""  # HTTP has no range for nothing
        found, reader = bytearray(), copies.FileReader(path, offset)
        while not reader.is_over:
            try:
                async with self._transport.stream(f"{self._at}/content", **reader.request()) as got:
                    if reader.begin(got.status_code, got.headers):
                        found.clear()
                    async for chunk in got.aiter_raw():
                        found += reader.take(chunk)
                        if max_bytes is not None and len(found) >= max_bytes:
                            return bytes(found[:max_bytes])
                        if max_bytes is None and len(found) > MOST_READ:
                            raise too_long(path)
                    reader.is_over = True
            except ServerUnreachable as exc:
                await pause(reader.broken(exc))
        return bytes(found)

    async def read_text(self, path: str) -> str:
        """The whole file as text, bad bytes replaced."""
        return (await self.read(path)).decode("utf-8", "replace")

    async def write(
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
            await self._write(path, content, append, mode)
        except FileNotFound:
            directory = path.rpartition("/")[0]
            if not parents or not directory:
                raise
            await self.make_dir(directory)
            await self._write(path, content, append, mode)

    async def _write(self, path: str, content: bytes, append: bool, mode: int) -> None:
        await self._transport.request(
            "PUT",
            f"{self._at}/content",
            params=copies.write_params(path, append=append, mode=mode),
            content=content,
            timeout_s=copies.CONTENT_S,
            repeat=not append,  # the same content once more is the same file
        )

    async def open_read(self, path: str) -> BinaryIO:
        """A file of this machine with the content of one of the sandbox."""
        return await blocking(copies.open_read, self._transport.blocking, self._at, path)

    async def open_write(self, path: str, *, append: bool = False, mode: int = 0o644) -> BinaryIO:
        """A file of this machine that becomes one of the sandbox when it is closed."""
        return copies.open_write(self._transport.blocking, self._at, path, append=append, mode=mode)

    async def list(self, path: str = ".") -> list[FileInfo]:
        """The entries of a directory, by name."""
        found: Infos = []
        cursor = None
        while True:
            page = await self._json("GET", "list", path=path, limit=_PAGE, cursor=cursor)
            found += [FileInfo.from_json(each) for each in page["items"]]
            cursor = page["next_cursor"]
            if cursor is None:
                return found

    async def stat(self, path: str, *, follow: bool = False) -> FileInfo:
        """Stat one path; the symlink itself, or with `follow` its final target.

        Raises:
            FileError: Symlinks lead in a circle.
        """
        for _ in range(_MOST_LINKS):
            info = FileInfo.from_json(await self._json("GET", "stat", path=path))
            if not follow or info.link_target is None:
                return info
            path = posixpath.join(posixpath.dirname(info.path), info.link_target)
        raise FileError(f"{path}: too many levels of symbolic links", path=path)

    async def exists(self, path: str) -> bool:
        """Return whether the path exists; a dangling symlink exists."""
        try:
            await self.stat(path)
        except (FileNotFound, NotADirectory):
            return False
        return True

    async def make_dir(self, path: str, *, parents: bool = True) -> None:
        """Create a directory, with its parents unless told otherwise."""
        body = {"path": path, "parents": parents}
        await self._transport.json("POST", f"{self._at}/dirs", body=body, repeat=parents)

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file or an empty directory; a whole tree when `recursive`."""
        params = {"path": path, "recursive": recursive}
        # Not repeated when the answer is lost: the second answer would be that nothing is there.
        await self._transport.request("DELETE", self._at, params=params, repeat=False)

    async def move(self, src: str, dst: str) -> None:
        """Rename, replacing a file at `dst`."""
        await self._transport.json("POST", f"{self._at}/move", body={"source": src, "target": dst})

    async def upload(self, local: str, remote: str, *, progress: Progress | None = None) -> None:
        """Copy a file or tree of this machine into the sandbox; `remote` is the copy's own path."""
        await blocking(copies.upload, self._transport.blocking, self._at, local, remote, progress)

    async def download(
        self, remote: str, local: str, *, overwrite: bool = False, progress: Progress | None = None
    ) -> None:
        """Copy a file or tree out of the sandbox to this machine; `local` is the copy's own path.

        Raises:
            FileExists: A file that the copy would replace is there, and `overwrite` is not set.
        """
        transport, at = self._transport.blocking, self._at
        await blocking(
            lambda: copies.download(transport, at, remote, local, progress, overwrite=overwrite)
        )

    # -- looking through them --------------------------------------------------------------------

    async def glob(self, pattern: str, path: str = ".", *, limit: int = 1000) -> FoundFiles:
        """Paths below `path` that match: `*` within a name, `**` any number of directories."""
        found = await self._json("GET", "glob", pattern=pattern, path=path, limit=limit)
        return FoundFiles.from_json(found)

    async def search(
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
        found = await self._json("GET", "search", path=path, glob=glob, limit=limit, **asked)
        return FoundLines.from_json(found)

    async def replace(
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
        found = await self._transport.json("POST", f"{self._at}/replace", body=body)
        return AllReplaced.from_json(found)

    @asynccontextmanager
    async def watch(
        self, path: str = ".", *, recursive: bool = False
    ) -> AsyncIterator[AsyncIterator[FileChange]]:
        """Watch `path` and everything below it for changes until the block ends.

        Raises:
            ServerUnreachable: The stream broke off; what changed since is not known.
        """
        async with aclosing(self._watch(path, recursive)) as changes:
            await changes.__anext__()  # the watch is active from here on
            yield changes

    async def _watch(self, path: str, recursive: bool) -> AsyncGenerator[FileChange, None]:
        params = {"path": path, "recursive": recursive}
        async with self._transport.stream(f"{self._at}/watch", params=params) as response:
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    yield FileChange.from_json(loads(line[5:]))

    async def _json(self, method: str, verb: str, **params: Any) -> Any:
        return await self._transport.json(method, f"{self._at}/{verb}", params=params)
