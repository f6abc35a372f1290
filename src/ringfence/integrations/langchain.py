"""LangChain deepagents: a sandbox backend, and the provider for its command line.

    from deepagents import create_deep_agent
    from ringfence.integrations.langchain import RingfenceBackend

    with RingfenceBackend(limits={"memory_bytes": 2**30}) as backend:
        agent = create_deep_agent(model=..., backend=backend)

Listing, reading, editing and searching are deepagents' own, by way of `execute`.

Source: deepagents.backends.protocol (0.6 and 0.7).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, cast

from deepagents.backends.protocol import ExecuteResponse, FileDownloadResponse, FileUploadResponse

from ..errors import (
    FileError,
    FileNotFound,
    InvalidRequest,
    IsADirectory,
    NotADirectory,
    PermissionDenied,
    RingfenceError,
)
from ..model.calls import parse_mount
from ..model.mount import READ_WRITE, Mount
from ..sandbox import AsyncSandbox, Sandbox
from ..sandbox.waiting import copying
from . import outcome
from .deepagents_paths import OFFLOADED, NamedPaths
from .origin import Origin

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..model.execs.exec import ExecResult
    from ..model.spec import SandboxSpec

DEFAULT_TIMEOUT_S = 30 * 60
_OUTPUT_BYTES = 4 << 20  # deepagents 0.6 offloads what is too long for a model once it has arrived
_CODES = {
    FileNotFound: "file_not_found",
    NotADirectory: "file_not_found",
    PermissionDenied: "permission_denied",
    IsADirectory: "is_directory",
    InvalidRequest: "invalid_path",
}


class RingfenceBackend(NamedPaths):
    """A sandbox as a deepagents backend; a context manager that ends it.

    Args:
        sandbox: A running sandbox, which its owner ends; None makes one.
        server, make, options: See `Origin`.
        timeout_s: Of each command without its own; 0 is no limit.
    """

    def __init__(
        self,
        sandbox: Sandbox | None = None,
        *,
        server: str | None = None,
        make: Callable[[], Sandbox] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        **options: Any,
    ) -> None:
        self._owned = sandbox is None
        self._origin = Origin(options if make else _with_places(options), server, make)
        self.sandbox = self._origin.sandbox() if sandbox is None else sandbox
        self._timeout_s = timeout_s

    @classmethod
    async def create(cls, **arguments: Any) -> Self:
        """As the constructor, without blocking the event loop."""
        return await copying(cls, **arguments)

    @property
    def id(self) -> str:
        """The sandbox's own."""
        return self.sandbox.id

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Run a command line, standard error among the output as on a terminal."""
        return _response(self.sandbox.exec(**self._request(command, timeout)))

    async def aexecute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """The same without a thread of its own; cancelled, it kills what it started."""
        if isinstance(self.sandbox, Sandbox):
            return _response(
                await AsyncSandbox(self.sandbox).exec(**self._request(command, timeout))
            )
        from ..client import AsyncClient

        # Connections belong to an event loop, and there may be another one by now: each command has a
        # client of its own, which costs one connection and one request more.
        server, key, timeout_s, retries = cast("Any", self.sandbox)._transport.arguments
        async with AsyncClient(server, key=key, timeout_s=timeout_s, retries=retries) as client:
            remote = await client.get(self.id)
            return _response(await remote.exec(**self._request(command, timeout)))

    def _request(self, command: str, timeout: float | None) -> dict[str, Any]:
        wanted = self._timeout_s if timeout is None else timeout
        return {
            "argv": outcome.shell_argv(f"exec 2>&1\n{command}"),
            "timeout_s": wanted or None,
            "max_output_bytes": _OUTPUT_BYTES,
        }

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        """Write files, with the directories they need."""
        return [self._upload(path, content) for path, content in files]

    def _upload(self, path: str, content: bytes) -> FileUploadResponse:
        try:
            self.sandbox.files.write(_absolute(path), content, parents=True)
        except (FileError, InvalidRequest) as exc:
            return FileUploadResponse(path=path, error=_code(exc))
        return FileUploadResponse(path=path, error=None)

    async def aupload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        """As `upload_files`; how many threads the event loop has does not matter."""
        return await copying(self.upload_files, files)

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        """Whole files."""
        return [self._download(path) for path in paths]

    def _download(self, path: str) -> FileDownloadResponse:
        try:
            content = self.sandbox.files.read(_absolute(path))
        except (FileError, InvalidRequest) as exc:
            return FileDownloadResponse(path=path, content=None, error=_code(exc))
        return FileDownloadResponse(path=path, content=content, error=None)

    async def adownload_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        """As `download_files`."""
        return await copying(self.download_files, paths)

    def terminate(self) -> None:
        """End the sandbox, if this made it."""
        if self._owned:
            self.sandbox.terminate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.terminate()


def _response(result: ExecResult) -> ExecuteResponse:
    note = outcome.ended_early(result)
    text = result.stdout_text + result.stderr_text  # the latter: why nothing could start
    return ExecuteResponse(
        output=f"{text}\n{note}".lstrip("\n") if note else text,
        exit_code=outcome.exit_code(result),
        truncated=result.truncated,
    )


def _with_places(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, and directories for what deepagents offloads: the root is not the sandbox's to write."""
    spec: SandboxSpec | None = options.get("spec")
    mounts = [parse_mount(each) for each in (spec.mounts if spec else options.get("mounts") or ())]
    taken = {mount.target for mount in mounts}
    mounts += [Mount(path, "", READ_WRITE, protect=()) for path in OFFLOADED if path not in taken]
    if spec is not None:
        return {**options, "spec": replace(spec, mounts=tuple(mounts))}
    return {**options, "mounts": mounts}


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        raise InvalidRequest(f"{path!r} is not absolute", field="path")
    return path


def _code(exc: RingfenceError) -> str:
    """deepagents' word for it; the whole sentence where it has none."""
    return next((code for cls, code in _CODES.items() if isinstance(exc, cls)), str(exc))
