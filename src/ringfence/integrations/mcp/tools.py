"""The tools. Their docstrings and parameter descriptions are what a model reads."""

from __future__ import annotations

import base64
import secrets
from typing import TYPE_CHECKING, Annotated, Any

from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import (
    BlobResourceContents,
    EmbeddedResource,
    TextContent,
    TextResourceContents,
    ToolAnnotations,
)
from pydantic import Field

from ...model.mount import OUTPUTS_DIR
from .. import outcome
from .results import (
    ChangeAnswer,
    CommandAnswer,
    Entry,
    FileAnswer,
    ListAnswer,
    ProcessAnswer,
    ResetAnswer,
)
from .watching import keeper_of, look, progress, remember

if TYPE_CHECKING:
    from collections.abc import Callable

    from mcp.server.mcpserver import MCPServer

    from .sandboxes import Held, Sandboxes

OUTPUT_BYTES = 128 << 10
FILE_BYTES = 1 << 20
FETCH_BYTES = 8 << 20
LANGUAGES = {
    "python": ("python3", ".py"),
    "javascript": ("node", ".js"),
    "bash": ("bash", ".sh"),
    "sh": ("sh", ".sh"),
}

Path = Annotated[str, Field(description="Absolute, or relative to the working directory.")]
Name = Annotated[str, Field(description="Empty, unless an earlier answer named one.")]
Timeout = Annotated[
    float, Field(gt=0, le=86_400, description="Seconds; then all it started is killed.")
]
Directory = Annotated[str, Field(description="Where it starts; empty: the working directory.")]


class Tools:
    """Every tool over one server's sandboxes."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes

    async def run_command(
        self,
        ctx: Context[Any, Any],
        command: Annotated[str, Field(description="A shell command line.")],
        cwd: Directory = "",
        stdin: str = "",
        timeout_s: Timeout = 120,
        sandbox: Name = "",
    ) -> CommandAnswer:
        """Run a shell command in the sandbox and wait for it. Files and processes there persist."""
        async with self._sandboxes.serving(ctx, sandbox) as held:
            return await _run(
                ctx, held, outcome.shell_argv(command), cwd=cwd, stdin=stdin, timeout_s=timeout_s
            )

    async def run_code(
        self,
        ctx: Context[Any, Any],
        code: str,
        language: Annotated[str, Field(description="python, javascript, bash or sh.")] = "python",
        timeout_s: Timeout = 120,
        sandbox: Name = "",
    ) -> CommandAnswer:
        """Run a program given as text. Each call is a process of its own: variables do not persist."""
        if language not in LANGUAGES:
            raise ToolError(f"no language {language!r}; one of {', '.join(LANGUAGES)}")
        program, suffix = LANGUAGES[language]
        async with self._sandboxes.serving(ctx, sandbox) as held:
            assert held.sandbox is not None
            path = f"/tmp/code-{secrets.token_hex(8)}{suffix}"
            await held.sandbox.files.write(path, code)
            return await _run(ctx, held, (program, path), timeout_s=timeout_s)

    async def read_file(
        self,
        ctx: Context[Any, Any],
        path: Path,
        offset: Annotated[int, Field(ge=0, description="Bytes to skip.")] = 0,
        sandbox: Name = "",
    ) -> FileAnswer:
        """Read a file: up to 1 MiB from `offset`, as text or else as base64."""
        async with self._sandboxes.serving(ctx, sandbox) as held:
            assert held.sandbox is not None
            files = held.sandbox.files
            info = await files.stat(path, follow=True)
            data: bytes = await files.read(path, offset=offset, max_bytes=FILE_BYTES)
        text, encoding = _readable(data)
        return FileAnswer(
            sandbox=held.name,
            path=path,
            content=text,
            encoding=encoding,
            size_bytes=info.size_bytes,
            complete=offset + len(data) >= info.size_bytes,
        )

    async def write_file(
        self,
        ctx: Context[Any, Any],
        path: Path,
        content: str,
        encoding: Annotated[str, Field(description="utf-8 or base64.")] = "utf-8",
        sandbox: Name = "",
    ) -> ChangeAnswer:
        """Write a file, with the directories it needs; what was there is replaced."""
        data = _bytes_of(content, encoding)
        async with self._sandboxes.serving(ctx, sandbox) as held:
            assert held.sandbox is not None
            await held.sandbox.files.write(path, data, parents=True)
        return ChangeAnswer(sandbox=held.name, path=path, size_bytes=len(data))

    async def edit_file(
        self,
        ctx: Context[Any, Any],
        path: Path,
        old: Annotated[str, Field(min_length=1, description="Text to replace, exactly.")],
        new: str,
        every: Annotated[bool, Field(description="Each occurrence, not the only one.")] = False,
        sandbox: Name = "",
    ) -> ChangeAnswer:
        """Replace text in a file. Without `every`, `old` must occur exactly once."""
        async with self._sandboxes.serving(ctx, sandbox) as held:
            assert held.sandbox is not None
            before: bytes = await held.sandbox.files.read(path)
            count = before.count(old.encode())
            if count == 0 or (count > 1 and not every):
                raise ToolError(f"{path}: the text occurs {count} times")
            after = before.replace(old.encode(), new.encode())
            mode = (await held.sandbox.files.stat(path, follow=True)).mode
            await held.sandbox.files.write(path, after, mode=mode)
        return ChangeAnswer(sandbox=held.name, path=path, size_bytes=len(after))

    async def list_files(
        self, ctx: Context[Any, Any], path: Path = ".", sandbox: Name = ""
    ) -> ListAnswer:
        """List a directory."""
        async with self._sandboxes.serving(ctx, sandbox) as held:
            assert held.sandbox is not None
            entries = await held.sandbox.files.list(path)
        return ListAnswer(
            sandbox=held.name, path=path, entries=[Entry.of(each) for each in entries]
        )

    async def start_process(
        self,
        ctx: Context[Any, Any],
        command: Annotated[str, Field(description="A shell command line.")],
        cwd: Directory = "",
        sandbox: Name = "",
    ) -> ProcessAnswer:
        """Start a process in the background, such as a server; look at it with watch_process."""
        async with self._sandboxes.serving(ctx, sandbox) as held:
            assert held.sandbox is not None
            argv = outcome.shell_argv(command)
            process = await held.sandbox.start(argv, cwd=cwd or None, max_output_bytes=OUTPUT_BYTES)
            try:
                name = remember(held, process)
            except BaseException:
                await process.kill()
                raise
        return ProcessAnswer(sandbox=held.name, process=name, running=True)

    async def watch_process(
        self,
        ctx: Context[Any, Any],
        process: str,
        wait_s: Annotated[float, Field(ge=0, le=300, description="For new output.")] = 1.0,
        sandbox: Name = "",
    ) -> ProcessAnswer:
        """What a background process wrote since the last look, and whether it still runs."""
        async with self._sandboxes.serving(ctx, sandbox) as held:
            return await look(held, process, wait_s)

    async def stop_process(
        self, ctx: Context[Any, Any], process: str, sandbox: Name = ""
    ) -> ProcessAnswer:
        """Kill a background process and everything that it started."""
        async with self._sandboxes.serving(ctx, sandbox) as held:
            if process in held.processes:
                await held.processes[process].kill()
                await held.processes[process].wait()
            return await look(held, process, 0.0)

    async def fetch_outputs(
        self, ctx: Context[Any, Any], sandbox: Name = ""
    ) -> list[TextContent | EmbeddedResource]:
        """The files of the outputs directory (its path is in $RINGFENCE_OUTPUTS_DIR), up to 8 MiB."""
        async with self._sandboxes.serving(ctx, sandbox) as held:
            assert held.sandbox is not None
            files, left = held.sandbox.files, FETCH_BYTES
            found: list[TextContent | EmbeddedResource] = []
            for info in await files.list(OUTPUTS_DIR):
                if info.kind != "file" or info.size_bytes > left:
                    text = f"{info.path}: not fetched ({info.kind}, {info.size_bytes} bytes)"
                    found.append(TextContent(type="text", text=text))
                    continue
                data: bytes = await files.read(info.path, max_bytes=left)
                left -= len(data)
                found.append(_resource(info.path, data))
        note = f"sandbox: {held.name}" if held.name else f"{len(found)} entries"
        return [TextContent(type="text", text=note), *found]

    async def reset(self, ctx: Context[Any, Any], sandbox: Name = "") -> ResetAnswer:
        """End the sandbox with all its files and processes; the next call gets a fresh one."""
        async with self._sandboxes.serving(ctx, sandbox) as held:
            await self._sandboxes.reset(held)
        return ResetAnswer()


def add_tools(server: MCPServer[Any], sandboxes: Sandboxes) -> None:
    """Register every tool, with what clients may want to know before they allow it."""
    tools = Tools(sandboxes)
    reads = ToolAnnotations(read_only_hint=True, open_world_hint=False)
    changes = ToolAnnotations(read_only_hint=False, destructive_hint=True, open_world_hint=False)
    # A command reaches whatever the network policy lets it reach.
    runs = ToolAnnotations(read_only_hint=False, destructive_hint=True, open_world_hint=True)
    known: tuple[tuple[ToolAnnotations, tuple[Callable[..., Any], ...]], ...] = (
        (runs, (tools.run_command, tools.run_code, tools.start_process)),
        (reads, (tools.read_file, tools.list_files, tools.watch_process)),
        (changes, (tools.write_file, tools.edit_file, tools.stop_process, tools.reset)),
    )
    for hints, those in known:
        for tool in those:
            server.add_tool(tool, annotations=hints)
    server.add_tool(tools.fetch_outputs, annotations=reads, structured_output=False)


async def _run(
    ctx: Context[Any, Any],
    held: Held,
    argv: Any,
    *,
    timeout_s: float,
    cwd: str = "",
    stdin: str = "",
) -> CommandAnswer:
    assert held.sandbox is not None
    last: list[str] = []
    async with progress(ctx, "running", last):
        result = await held.sandbox.exec(
            argv,
            cwd=cwd or None,
            stdin=stdin or None,
            timeout_s=timeout_s,
            max_output_bytes=OUTPUT_BYTES,
            on_stdout=keeper_of(last),
        )
    return CommandAnswer.of(held.name, result)


def _readable(data: bytes) -> tuple[str, str]:
    try:
        return data.decode(), "utf-8"
    except UnicodeDecodeError:
        return base64.b64encode(data).decode(), "base64"


def _bytes_of(content: str, encoding: str) -> bytes:
    if encoding == "utf-8":
        return content.encode()
    if encoding != "base64":
        raise ToolError(f"no encoding {encoding!r}; utf-8 or base64")
    try:
        return base64.b64decode(content, validate=True)
    except ValueError as exc:
        raise ToolError(f"content is not base64: {exc}") from exc


def _resource(path: str, data: bytes) -> EmbeddedResource:
    text, encoding = _readable(data)
    uri = f"ringfence://{path}"
    if encoding == "utf-8":
        contents: Any = TextResourceContents(uri=uri, mime_type="text/plain", text=text)
    else:
        contents = BlobResourceContents(uri=uri, mime_type="application/octet-stream", blob=text)
    return EmbeddedResource(type="resource", resource=contents)
