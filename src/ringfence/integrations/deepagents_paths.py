"""File tools of deepagents where a sandbox's own directories lie at other paths than their names.

deepagents names paths inside scripts. A sandbox without a mount namespace maps whole arguments of a command
only: so each tool gets the path that the sandbox tells, and its answer gets the name back.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from deepagents.backends.sandbox import BaseSandbox

from ..model.mount import MEMORY_DIR
from ..sandbox.waiting import copying

if TYPE_CHECKING:
    from ..sandbox import Sandbox

OFFLOADED = ("/large_tool_results", "/conversation_history")
"""Where deepagents writes what is too long for a model."""
_NAMES = ("/home/sandbox", "/tmp", "/mnt/session", MEMORY_DIR, *OFFLOADED)


class NamedPaths(BaseSandbox):
    """A deepagents backend whose tools take and give the names of other sandboxes."""

    sandbox: Sandbox

    @cached_property
    def _places(self) -> list[tuple[str, str]]:
        """Names, and where they are, as far as these differ; no name twice."""
        mounts = [mount.target for mount in self.sandbox.spec.mounts]
        names = [*dict.fromkeys((*_NAMES, *mounts))]
        told = self.sandbox.exec(["printf", "%s\\n", *names]).text.splitlines()
        pairs = zip(names, told, strict=False)
        return [(name, place) for name, place in pairs if name != place]

    @property
    def enable_capture_offload(self) -> bool:
        """deepagents 0.7: long output stays inside, in a file that the command's script names."""
        return not self._places

    def _at(self, path: str) -> str:
        for name, place in self._places:
            if path == name or path.startswith(f"{name}/"):
                return place + path[len(name) :]
        return path

    def _named(self, result: Any) -> Any:
        for each in (getattr(result, "entries", None) or getattr(result, "matches", None)) or ():
            each["path"] = self._name(each["path"])
        for field in ("path", "error"):
            if text := getattr(result, field, None):
                setattr(result, field, self._name(text))
        return result

    def _name(self, text: str) -> str:
        for name, place in self._places:
            text = text.replace(place, name)
        return text

    def ls(self, path: str) -> Any:
        return self._named(super().ls(self._at(path)))

    def read(self, file_path: str, offset: int = 0, limit: int = 2000) -> Any:
        return self._named(super().read(self._at(file_path), offset, limit))

    def write(self, file_path: str, content: str) -> Any:
        return self._named(super().write(self._at(file_path), content))

    def edit(
        self, file_path: str, old_string: str, new_string: str, replace_all: bool = False
    ) -> Any:
        return self._named(super().edit(self._at(file_path), old_string, new_string, replace_all))

    def grep(self, pattern: str, path: str | None = None, glob: str | None = None) -> Any:
        return self._named(super().grep(pattern, path and self._at(path), glob))

    def glob(self, pattern: str, path: str | None = None) -> Any:
        return self._named(super().glob(self._at(pattern), path and self._at(path)))

    async def als(self, path: str) -> Any:
        return self._named(await super().als(await self._aat(path)))

    async def aread(self, file_path: str, offset: int = 0, limit: int = 2000) -> Any:
        return self._named(await super().aread(await self._aat(file_path), offset, limit))

    async def awrite(self, file_path: str, content: str) -> Any:
        return self._named(await super().awrite(await self._aat(file_path), content))

    async def aedit(
        self, file_path: str, old_string: str, new_string: str, replace_all: bool = False
    ) -> Any:
        place = await self._aat(file_path)
        return self._named(await super().aedit(place, old_string, new_string, replace_all))

    async def agrep(self, pattern: str, path: str | None = None, glob: str | None = None) -> Any:
        place = await self._aat(path) if path else path
        return self._named(await super().agrep(pattern, place, glob))

    async def aglob(self, pattern: str, path: str | None = None) -> Any:
        place = await self._aat(path) if path else path
        return self._named(await super().aglob(await self._aat(pattern), place))

    async def _aat(self, path: str) -> str:
        """As `_at`; the first one asks the sandbox, without blocking the event loop."""
        return await copying(self._at, path)
