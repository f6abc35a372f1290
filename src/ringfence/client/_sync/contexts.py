"""Contexts of a sandbox of a server: the counterpart of `_async.contexts`.

Kept separate: written by hand, while the files beside it are made.
"""

from __future__ import annotations

import json
from functools import partial

from ...contexts import Context, Contexts
from ...contexts.context import answers, check_callables, check_cell, tell
from ...contexts.execution import Cell, CellError, Execution, Result
from ...errors import LifecycleError, RingfenceError, ServerUnreachable
from ...model.base import checks
from ..answers import as_json, pause_s
from .pauses import pause
from .transport import segment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Any, Unpack

    from ...contexts.context import CellParts, Turn
    from .sandbox import RemoteSandbox
    from .transport import Transport

_PATIENCE = 3  # connections in a row that bring nothing
_START_S = 90.0
_JSON = {"content-type": "application/json"}


class RemoteContext(Context):
    """A context of a server. It outlives the client, and a restart of the server.

    Attributes:
        running: False once this object has heard that the interpreter has ended.
    """

    running = True

    def __init__(
        self,
        transport: Transport,
        at: str,
        language: str = "python",
        *,
        cwd: Any = None,
        env: Mapping[str, str] | None = None,
        form: Mapping[str, Any] | None = None,
    ) -> None:
        self._transport, self._all = transport, f"{at}/contexts"
        path = None if cwd is None else checks.path(cwd, "cwd")
        self._body = {"language": language, "cwd": path, "env": dict(env or {})}
        self._know(form or transport.json("POST", self._all, body=self._body, timeout_s=_START_S))

    def _know(self, form: Mapping[str, Any]) -> None:
        self.id, self.language, self.running = form["id"], form["language"], form["running"]
        self._body["language"] = self.language
        self._at = f"{self._all}/{segment(self.id)}"

    def follow(self, turn: Turn, code: str, **options: Unpack[CellParts]) -> Execution:
        """Run a cell that `abandon` can end from another thread; otherwise as `run`."""
        check_cell(code, timeout_s := options.get("timeout_s"))
        check_callables(options)
        answer = options.get("on_input") or answers(options.get("stdin"))
        callbacks = (options.get("on_stdout"), options.get("on_stderr"), options.get("on_result"))
        body = {"code": code, "timeout_s": timeout_s, "input": answer is not None}
        cell = Cell("")
        if turn.is_abandoned:
            return cell.execution
        try:
            for event in self._events(cell, body):
                if event["type"] == "start":
                    turn.cell = cell
                    if turn.is_abandoned:
                        self._interrupt(cell)
                elif event["type"] == "input":
                    line = answer(event["prompt"]) if answer else None
                    self._transport.json("POST", f"{self._at}/input", body={"text": line})
                else:
                    self._take(cell, event)
                    tell(*cell.wait(0, wants_pieces=any(callbacks))[:2], callbacks)
        except LifecycleError:
            self.running = False
            raise
        except BaseException:  # of a callback, or Ctrl-C
            if cell.id and not cell.is_done:
                self._interrupt(cell)
            raise
        on_error = options.get("on_error")
        if cell.execution.error is not None and on_error:
            on_error(cell.execution.error)
        return cell.execution

    def _take(self, cell: Cell, event: Mapping[str, Any]) -> None:
        """Add an event to a cell, which bounds what it keeps."""
        kind, execution = event["type"], cell.execution
        if kind in ("stdout", "stderr"):
            cell.take(kind[3:], "", event["text"].encode("utf-8", "replace"))
        elif kind == "result":
            result = Result.from_json(event)
            for mime, data in result.data.items():
                cell.take("part", mime, data)
            cell.take("main" if result.is_main else "display", "", b"")
        elif kind == "dropped":
            execution.dropped_bytes += event["bytes"]
        elif kind == "end":
            execution.error = CellError(**event["error"]) if event["error"] else None
            execution.execution_count = event["execution_count"]
            execution.timed_out = event["timed_out"]
            execution.dropped_bytes += event["dropped_bytes"]
            execution.dropped_results += event["dropped_results"]
            self.running = event["running"]
            cell.take("done", "", b"")

    def _events(self, cell: Cell, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Run a cell, and yield each of its events once, over as many connections as needed."""
        cells, cursor, failures = f"{self._at}/cells", 0, 0
        ask = partial(
            self._transport.stream, cells, method="POST", content=as_json(body), headers=_JSON
        )
        while True:
            try:
                with ask() as response:
                    for line in _lines(response.iter_raw()):
                        event = json.loads(line)
                        if event["type"] == "start":
                            if cell.id:
                                continue
                            cell.id = event["cell"]
                        elif event["cursor"] > cursor:
                            failures = 0
                        cursor = event["cursor"]
                        yield event
                if cell.is_done:
                    return
                raise ServerUnreachable("the events of the cell broke off")
            except ServerUnreachable:
                failures += 1
                if cell.is_done:
                    return
                if not cell.id or failures > _PATIENCE:
                    raise
                pause(pause_s(failures, {}))
            at = f"{cells}/{cell.id}"
            ask = partial(self._transport.stream, at, params={"cursor": cursor})

    def variables(self, *, timeout_s: float = 30.0) -> list[dict[str, str]]:
        """List the variables of the cells; see `Context.variables`."""
        form = self._transport.json("GET", f"{self._at}/variables", timeout_s=timeout_s)
        items: list[dict[str, str]] = form["items"]
        return items

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the cell that runs, whoever began it. Nothing if none runs."""
        self._transport.json("POST", f"{self._at}/interrupt")

    def _interrupt(self, cell: Cell) -> None:
        params = {"cell_id": cell.id}
        try:
            self._transport.json("POST", f"{self._at}/interrupt", params=params)
        except RingfenceError:
            pass  # it has ended

    def restart(self) -> None:
        """End the interpreter with all that it started, and begin a fresh one."""
        at = f"{self._at}/restart"
        self._know(self._transport.json("POST", at, body=self._body, timeout_s=_START_S))

    def _kill(self) -> None:
        self.running = False
        try:
            self._transport.json("DELETE", self._at)
        except RingfenceError:
            pass  # its sandbox has ended, and it with it


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    pieces: list[bytes] = []
    for chunk in chunks:
        *whole, rest = chunk.split(b"\n")
        for line in whole:
            yield b"".join([*pieces, line])
            pieces = []
        pieces.append(rest)


def contexts_of(sandbox: RemoteSandbox) -> Contexts:
    """The contexts that were opened through this object."""
    if sandbox._contexts is None:
        transport, at = sandbox._transport, sandbox._at

        def find(id: str) -> Context:
            form = transport.json("GET", f"{at}/contexts/{segment(id)}")
            return RemoteContext(transport, at, form=form)

        sandbox._contexts = Contexts(partial(RemoteContext, transport, at), find)
        for id in sandbox._carried:
            sandbox._contexts.add(find(id), is_default=True)
    return sandbox._contexts


def open_context(sandbox: RemoteSandbox, language: str, **options: Any) -> Context:
    """Begin or find a context of a sandbox."""
    return contexts_of(sandbox).open(language, **options)


def default_context(sandbox: RemoteSandbox, language: str) -> Context:
    """The context of `run_code`."""
    return contexts_of(sandbox).default(language)
