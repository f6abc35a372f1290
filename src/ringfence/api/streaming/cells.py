"""Cells of contexts: requests to a kernel, and its frames read from the spool as events.

Nothing is remembered of a cell: its id begins with the offset of the output at which its frames can
come first. So a server that was restarted finds them, and a cursor is an offset of that output.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from ...contexts.context import BASH, GRACE_S, START_S
from ...contexts.execution import Cell, CellError
from ...contexts.frames import BrokenFrameError, Reader, kernel_of, language_of, request
from ...errors import ExecError, ExecNotFound, RingfenceError
from ...execs.run import Run
from ...spool.order import ERR, OUT
from ...spool.reader import Reader as SpoolReader
from ..exec_bodies import append
from ..service import Service
from ..thread_pools import BODIES
from .runs import Bell, Watching

_PIECE = 64 << 10
_INLINE, _INLINE_S = 8 << 10, 0.001  # bytes that cost less here than a thread: about so much
_SEND_S, _IDLE_S = 30.0, 2.0
_BASH_IDLE_S = 10.0  # it ends its bash first: see `contexts.bash`
_tasks: set[asyncio.Task[None]] = set()


class Sending:
    """Requests to contexts, one at a time for each: two must not be interleaved."""

    def __init__(self) -> None:
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    async def send(self, run: Run, data: bytes) -> None:
        """Write a request.

        Raises:
            ExecError: The kernel does not read.
        """
        try:
            async with asyncio.timeout(_SEND_S), self.hold(run):
                await append(run, data)
        except TimeoutError:
            message = "the context does not read its requests"
            raise ExecError(message, hint="restart it") from None

    @asynccontextmanager
    async def hold(self, run: Run) -> AsyncIterator[None]:
        """Keep others from sending meanwhile."""
        lock, users = self._locks.get(run.id, (asyncio.Lock(), 0))
        self._locks[run.id] = lock, users + 1
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks.pop(run.id)
            if users > 1:
                self._locks[run.id] = lock, users - 1


def sending_of(service: Service) -> Sending:
    """Return the one that all routes of a service share."""
    found: Sending = service.__dict__.setdefault("sending", Sending())
    return found


async def begin(service: Service, run: Run) -> None:
    """Send the kernel, and wait until it is ready.

    Raises:
        ExecError: It did not start; the exec is killed.
    """
    try:
        with Bell(run) as bell, SpoolReader(run.spool.tracks[OUT], 0) as spool:
            await sending_of(service).send(run, kernel_of(language_of(run.view().argv)))
            if await _says_hello(service, run, bell, spool, Reader(), START_S):
                return
        said = run.spool.tracks[ERR].ends(500)[0].decode("utf-8", "replace").strip()
        raise ExecError(f"the context did not start: {said or 'its interpreter does not answer'}")
    except BrokenFrameError as exc:
        run.kill()
        raise ExecError(f"the context did not start: {exc}") from exc
    except BaseException:
        run.kill()
        raise


async def _says_hello(
    service: Service, run: Run, bell: Bell, spool: SpoolReader, reader: Reader, most_s: float
) -> bool:
    until = time.monotonic() + most_s
    while time.monotonic() < until:
        bell.clear()
        is_over = run.done.done()
        # A program of the sandbox may send frames without end.
        await service.share.take(_INLINE_S)
        if piece := spool.next(_INLINE):
            if any(kind == "hello" for kind, *_ in reader.feed(piece.data)):
                return True
        elif is_over:
            break
        else:
            await bell.wait(until - time.monotonic())
    return False


async def is_idle(service: Service, run: Run) -> bool:
    """Ask a kernel whether it runs a cell: then it does not answer at once. Precondition: `Sending.hold`."""
    track = run.spool.tracks[OUT]
    most_s = _BASH_IDLE_S if language_of(run.view().argv) == BASH else _IDLE_S
    try:
        async with asyncio.timeout(most_s):
            with Bell(run) as bell, SpoolReader(track, track.total) as spool:
                await append(run, request("ping"))
                reader = Reader(in_the_middle=True)
                return await _says_hello(service, run, bell, spool, reader, most_s)
    except (TimeoutError, BrokenFrameError, RingfenceError):
        return False


def new_cell(run: Run) -> str:
    """Return an id for a cell that is about to be sent."""
    return f"{run.spool.tracks[OUT].total:016x}{secrets.token_hex(8)}"


def cell_offset(run: Run, cell_id: str) -> int:
    """Return the offset of the output at which the cell's frames can come first.

    Raises:
        ExecNotFound: The output has not come so far.
    """
    offset = int(cell_id[:16], 16)
    if offset > run.spool.tracks[OUT].total:
        raise ExecNotFound(f"no cell {cell_id} in context {run.id}")
    return offset


class Events:
    """Events of one cell from an offset on. Holds one frame and one result at most.

    Args:
        offset: Cursor of the last event, or where the cell began.
        timeout_s: From now; then the cell is interrupted, and its context killed if that is in vain.
    """

    def __init__(
        self,
        service: Service,
        sending: Sending,
        run: Run,
        cell_id: str,
        offset: int,
        timeout_s: float | None = None,
    ) -> None:
        self._service, self._sending, self._run = service, sending, run
        self._cell, self._timeout_s = Cell(cell_id, forgets=True), timeout_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._was_interrupted = self._was_killed = False
        self._spool = SpoolReader(run.spool.tracks[OUT], offset)
        self._base, self._cursor = offset, offset
        self._reader, self._has_gap = Reader(in_the_middle=True), False

    async def stream(self, heartbeat_s: float) -> AsyncIterator[bytes]:
        """Yield lines of JSON until the cell is over. Left early, its time limit stays in force."""
        try:
            yield self._line("start", cell=self._cell.id)
            async for lines in self._lines(heartbeat_s):
                yield lines
        finally:
            if self._deadline is not None and not self._cell.is_done:
                task = asyncio.get_running_loop().create_task(self._watch())
                _tasks.add(task)
                task.add_done_callback(_tasks.discard)
            else:
                self._spool.close()

    async def _watch(self) -> None:
        async for _ in self._lines(3600.0):
            pass
        self._spool.close()

    async def _lines(self, heartbeat_s: float) -> AsyncIterator[bytes]:
        run, cell = self._run, self._cell
        with Bell(run) as bell, Watching(self._service, run.sandbox_id):
            while True:
                bell.clear()
                is_over = run.done.done()
                await self._service.share.take()
                if self._spool.track.total - self._spool.offset > _INLINE:
                    text, came = await self._service.thread_pools.call(self._batch, pool=BODIES)
                else:
                    text, came = self._batch()
                if not came and is_over and not cell.is_done:
                    cell.fail(CellError("ContextEnded", f"{_ending(run)}; its variables are lost"))
                if cell.is_done:
                    yield text + self._end()
                    return
                if text:
                    yield text
                elif not came:
                    left = await self._left()
                    if not await bell.wait(min(heartbeat_s, left)) and left > heartbeat_s:
                        yield self._line("heartbeat")

    async def _left(self) -> float:
        """Return the seconds to the cell's deadline; past it, stop the cell."""
        if self._deadline is None:
            return 1e9
        left = self._deadline - time.monotonic()
        if left > 0:
            return left
        if self._was_interrupted:
            self._deadline, self._was_killed = None, True
            await self._service.thread_pools.call(self._run.kill, key=self._run.sandbox_id)
            return 1e9
        self._was_interrupted, self._deadline = True, time.monotonic() + GRACE_S
        try:
            await self._sending.send(self._run, request("interrupt", cell=self._cell.id))
        except RingfenceError:
            pass  # it is killed when the grace is over
        return GRACE_S

    def _batch(self) -> tuple[bytes, bool]:
        """Read what is there, up to a bound: its lines, and whether anything had come."""
        piece = self._spool.next(_PIECE)
        if piece is None:
            return b"", False
        lines: list[bytes] = []
        if piece.dropped_bytes:
            self._base, self._has_gap = piece.offset, True
            self._reader = Reader(in_the_middle=True)
            lines.append(self._line("dropped", bytes=piece.dropped_bytes))
        try:
            for kind, cell_id, name, payload in self._reader.feed(piece.data):
                if cell_id == self._cell.id:
                    self._cell.take(kind, name, payload)
                elif self._has_gap and len(cell_id) == 32 and cell_id > self._cell.id:
                    # A later cell began: the end of this one was among what was dropped.
                    self._cell.fail(CellError("OutputDropped", "the end of the cell was dropped"))
                if self._cell.is_whole:
                    self._cursor = self._base + self._reader.consumed
                lines += self._news()
                if self._cell.is_done:
                    break
        except BrokenFrameError as exc:
            self._was_killed = True
            self._run.kill()
            self._cell.fail(CellError("ContextEnded", f"its output is damaged ({exc})"))
        return b"".join(lines), True

    def _news(self) -> list[bytes]:
        logs, results, prompts = self._cell.wait(0, wants_pieces=True)
        return [
            *(self._line(each.stream, text=each.text) for each in logs),
            *(self._line("result", **each.to_json()) for each in results),
            *(self._line("input", prompt=each) for each in prompts),
        ]

    def _end(self) -> bytes:
        cell = self._cell
        is_alive = self._run.running and not self._was_killed
        if self._was_interrupted:
            cell.time_out(self._timeout_s, is_alive=is_alive)
        form = {**cell.execution.to_json(), "running": is_alive}
        del form["results"], form["logs"]
        return self._line("end", **form)

    def _line(self, kind: str, **fields: Any) -> bytes:
        form = {"type": kind, **fields, "cursor": self._cursor}
        return json.dumps(form, separators=(",", ":")).encode() + b"\n"


def _ending(run: Run) -> str:
    view = run.view()
    if view.problem is not None:
        return f"its process failed: {view.problem.error()}"
    status = view.status
    if status is None or status.exit_code is None:
        return "its process was killed"
    if status.oom_killed:
        return "its process ran out of memory"
    return f"its process exited with code {status.exit_code}"
