"""The tools. Their docstrings and parameter descriptions are what a model reads."""

from __future__ import annotations

import base64
import secrets
from typing import TYPE_CHECKING, Annotated, Any

from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import (
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    TextContent,
    TextResourceContents,
    ToolAnnotations,
)
from pydantic import Field

from ... import contexts
from ...model.mount import OUTPUTS_DIR
from .. import outcome
from .racing import MOST_BRANCHES, race
from .results import (
    ChangeAnswer,
    CommandAnswer,
    Entry,
    FileAnswer,
    ListAnswer,
    ProcessAnswer,
    RaceAnswer,
    ResetAnswer,
)
from .strict import StrictTool, answered
from .watching import jailer_of, look, progress, remember

if TYPE_CHECKING:
    from collections.abc import Callable

    from .sandboxes import Held, Sandboxes

OUTPUT_BYTES = 32 << 10  # of each stream: some 8,000 tokens
PROCESS_BYTES = 128 << 10  # kept between two looks at a background process
READ_BYTES = 64 << 10
FILE_BYTES = 1 << 20
IMAGE_BYTES = 4 << 20
FETCH_BYTES = 8 << 20
MOST_ENTRIES = 1000
SETTLING_S = 0.2
LANGUAGES = {"sh": ("sh", ".sh")}
_CONTEXTS = {"javascript": "node", **{each: each for each in contexts.LANGUAGES}}
_IMAGES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
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
        language: Annotated[
            str, Field(description="python, bash, javascript, r, java or sh.")
        ] = "python",
        timeout_s: Timeout = 120,
        sandbox: Name = "",
    ) -> Annotated[CallToolResult, CommandAnswer]:
        """Run code. All but sh keep variables between calls, as in a notebook."""
        if language not in (*LANGUAGES, *_CONTEXTS):
            raise ToolError(
                f"no language {language!r}; one of {', '.join((*_CONTEXTS, *LANGUAGES))}"
            )
        async with self._sandboxes.serving(ctx, sandbox) as held:
            assert held.sandbox is not None
            if language in _CONTEXTS:
                return await _run_cell(ctx, held, code, _CONTEXTS[language], timeout_s)
            program, suffix = LANGUAGES[language]
            path = f"/tmp/code-{secrets.token_hex(8)}{suffix}"
            await held.sandbox.files.write(path, code)
            return answered(await _run(ctx, held, (program, path), timeout_s=timeout_s))

    async def read_file(
        self,
        ctx: Context[Any, Any],
        path: Path,
        offset: Annotated[int, Field(ge=0, description="Bytes to skip.")] = 0,
        limit: Annotated[int, Field(ge=1, le=FILE_BYTES, description="Bytes.")] = READ_BYTES,
        sandbox: Name = "",
    ) -> Annotated[CallToolResult, FileAnswer]:
        """Read up to `limit` bytes of a file: as text, an image as such, else as base64."""
        async with self._sandboxes.serving(ctx, sandbox) as held:
            assert held.sandbox is not None
            files = held.sandbox.files
            info = await files.stat(path, follow=True)
            data: bytes = await files.read(path, offset=offset, max_bytes=limit)
            size = max(info.size_bytes, offset + len(data))
            image = _image_type(data) if offset == 0 and size <= IMAGE_BYTES else ""
            if image:
                data += await files.read(path, offset=len(data), max_bytes=IMAGE_BYTES)
                answer = FileAnswer(
                    sandbox=held.name, path=path, encoding=image, size_bytes=size, next_offset=None
                )
                return answered(answer, _image(data, image))
        text, encoding, used = _readable(data, is_whole=offset + len(data) >= size)
        end = offset + used
        return answered(
            FileAnswer(
                sandbox=held.name,
                path=path,
                content=text,
                encoding=encoding,
                size_bytes=size,
                next_offset=end if end < size else None,
            )
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
            sandbox=held.name,
            path=path,
            entries=[Entry.of(each) for each in entries[:MOST_ENTRIES]],
            left_out=max(0, len(entries) - MOST_ENTRIES),
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
            if cwd:  # `start` does not wait for the start: what would prevent it is found here
                await held.sandbox.exec(["true"], cwd=cwd)
            argv = outcome.shell_argv(command)
            process = await held.sandbox.start(
                argv, cwd=cwd or None, max_output_bytes=PROCESS_BYTES
            )
            try:
                name = remember(held, process)
            except BaseException:
                await process.kill()
                raise
            try:
                await process.wait(SETTLING_S)
            except TimeoutError:
                return ProcessAnswer(sandbox=held.name, process=name, running=True)
            return await look(held, name, 0.0)

    async def watch_process(
        self,
        ctx: Context[Any, Any],
        process: str,
        wait_s: Annotated[float, Field(ge=0, le=300, description="For new output.")] = 1.0,
        sandbox: Name = "",
    ) -> ProcessAnswer:
        """Return the output of a background process since the last look, and whether it is still running."""
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
    ) -> list[TextContent | ImageContent | EmbeddedResource]:
        """The files of the outputs directory (its path is in $RINGFENCE_OUTPUTS_DIR), up to 8 MiB."""
        async with self._sandboxes.serving(ctx, sandbox) as held:
            assert held.sandbox is not None
            files, left = held.sandbox.files, FETCH_BYTES
            found: list[TextContent | ImageContent | EmbeddedResource] = []
            for info in await files.list(OUTPUTS_DIR):
                if info.kind != "file" or info.size_bytes > left:
                    text = f"{info.path}: not fetched ({info.kind}, {info.size_bytes} bytes)"
                    found.append(TextContent(type="text", text=text))
                    continue
                data: bytes = await files.read(info.path, max_bytes=left)
                left -= len(data)
                image = _image_type(data) if len(data) <= IMAGE_BYTES else ""
                if image:
                    found += [TextContent(type="text", text=info.path), _image(data, image)]
                else:
                    found.append(_resource(info.path, data))
        note = f"sandbox: {held.name}" if held.name else f"{len(found)} entries"
        return [TextContent(type="text", text=note), *found]

    async def race_commands(
        self,
        ctx: Context[Any, Any],
        commands: Annotated[
            list[str],
            Field(min_length=1, max_length=MOST_BRANCHES, description="Shell command lines."),
        ],
        timeout_s: Timeout = 120,
        sandbox: Name = "",
    ) -> RaceAnswer:
        """Run commands at once, each in a copy of the sandbox's files. The sandbox goes on as the copy of the
        first that exits with 0. If none does, nothing changes. Processes and
        variables of the sandbox end when a copy takes its place.
        """
        async with self._sandboxes.serving(ctx, sandbox) as held:
            return await race(held, commands, timeout_s)

    async def reset(self, ctx: Context[Any, Any], sandbox: Name = "") -> ResetAnswer:
        """End the sandbox with all its files and processes; the next call gets a fresh one."""
        async with self._sandboxes.serving(ctx, sandbox) as held:
            await self._sandboxes.reset(held)
        return ResetAnswer(ended=True)


def tools_of(sandboxes: Sandboxes) -> list[StrictTool]:
    """Every tool, with what clients may want to know before they allow it."""
    tools = Tools(sandboxes)
    reads = ToolAnnotations(read_only_hint=True, open_world_hint=False)
    changes = ToolAnnotations(read_only_hint=False, destructive_hint=True, open_world_hint=False)
    # A command reaches whatever the network policy lets it reach.
    runs = ToolAnnotations(read_only_hint=False, destructive_hint=True, open_world_hint=True)
    known: tuple[tuple[ToolAnnotations, tuple[Callable[..., Any], ...]], ...] = (
        (runs, (tools.run_command, tools.run_code, tools.start_process, tools.race_commands)),
        (reads, (tools.read_file, tools.list_files, tools.watch_process)),
        (changes, (tools.write_file, tools.edit_file, tools.stop_process, tools.reset)),
    )
    made = [StrictTool.of(tool, hints) for hints, those in known for tool in those]
    made.append(StrictTool.of(tools.fetch_outputs, reads))
    if sandboxes.are_one:
        for tool in made:
            del tool.parameters["properties"]["sandbox"]
    return made


async def _run_cell(
    ctx: Context[Any, Any], held: Held, code: str, language: str, timeout_s: float
) -> CallToolResult:
    assert held.sandbox is not None
    last: list[str] = []
    keep = jailer_of(last)
    async with progress(ctx, "running", last):
        cell = await held.sandbox.run_code(
            code, language=language, timeout_s=timeout_s, on_stdout=lambda text: keep(text.encode())
        )
    images, left = [], IMAGE_BYTES
    for each in cell.results:
        if each.png is not None and len(each.png) <= left:
            left -= len(each.png)
            images.append(_image(each.png, "image/png"))
    return answered(CommandAnswer.of_cell(held.name, cell, OUTPUT_BYTES), *images)


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
            on_stdout=jailer_of(last),
        )
    return CommandAnswer.of(held.name, result)


def _readable(data: bytes, *, is_whole: bool = True) -> tuple[str, str, int]:
    """As text or base64, its encoding, and how many bytes that are.

    Of a part of a file the last character may be cut: it belongs to the next part.
    """
    try:
        return data.decode(), "utf-8", len(data)
    except UnicodeDecodeError as exc:
        if not is_whole and 0 < exc.start and len(data) - exc.start < 4:
            return data[: exc.start].decode(), "utf-8", exc.start
        return base64.b64encode(data).decode(), "base64", len(data)


def _image_type(data: bytes) -> str:
    """The media type of an image that models take, by its first bytes; else nothing."""
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for start, kind in _IMAGES.items() if data.startswith(start)), "")


def _image(data: bytes, kind: str) -> ImageContent:
    return ImageContent(type="image", data=base64.b64encode(data).decode(), mime_type=kind)


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
    text, encoding, _ = _readable(data)
    uri = f"ringfence://{path}"
    if encoding == "utf-8":
        contents: Any = TextResourceContents(uri=uri, mime_type="text/plain", text=text)
    else:
        contents = BlobResourceContents(uri=uri, mime_type="application/octet-stream", blob=text)
    return EmbeddedResource(type="resource", resource=contents)
