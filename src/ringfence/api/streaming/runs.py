"""Finding execs for routes, and following their output from the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Annotated

from fastapi import Depends
from starlette.requests import HTTPConnection

from ...errors import SandboxNotFound
from ...execs.execs import Execs
from ...execs.run import Run
from ..service import Caller, Service


async def _execs(connection: HTTPConnection) -> Execs:
    found: Execs = connection.app.state.execs
    return found


TheExecs = Annotated[Execs, Depends(_execs)]


async def sandbox_of(service: Service, caller: Caller, any_id: str) -> str:
    """The id of a sandbox that the caller may see, alive or over.

    Raises:
        SandboxNotFound: There is none, or it is another client's.
    """
    try:
        return service.live(any_id, caller).sandbox_id
    except SandboxNotFound:
        over = await service.thread_pools.call(service.manager.get, any_id, caller.sees)
        if caller.sandbox not in ("", over.sandbox_id):
            raise
        return over.sandbox_id


async def find_run(
    service: Service, execs: Execs, caller: Caller, any_id: str, exec_id: str
) -> Run:
    """An exec that the caller may see, running or over.

    Raises:
        SandboxNotFound, ExecNotFound: There is none, or it is another client's.
    """
    sandbox_id = await sandbox_of(service, caller, any_id)
    run = execs.running(sandbox_id, exec_id)
    return (
        run if run is not None else await service.thread_pools.call(execs.find, sandbox_id, exec_id)
    )


async def wait_for(run: Run, timeout_s: float | None) -> bool:
    """Wait for the end of an exec, `timeout_s` at most; whether it has come."""
    if run.done.done():
        return True
    ended = Signal()
    stop = run.at_end(ended.ring)
    run.waiters += 1
    try:
        return await ended.wait(timeout_s)
    finally:
        run.waiters -= 1
        stop()


class Signal:
    """Tells the event loop that something has happened in another thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event, self._rung = asyncio.Event(), False

    def ring(self) -> None:
        """Wake the waiting reader from any thread; further calls before `clear` do nothing."""
        if not self._rung:
            self._rung = True
            with contextlib.suppress(RuntimeError):  # the loop is over
                self._loop.call_soon_threadsafe(self._event.set)

    def clear(self) -> None:
        """Forget the past: only later output wakes the reader."""
        self._event.clear()
        self._rung = False

    async def wait(self, timeout_s: float | None) -> bool:
        """Wait for a wake-up since `clear`; False at the timeout."""
        try:
            async with asyncio.timeout(timeout_s):  # `wait_for` may swallow a cancellation
                await self._event.wait()
        except TimeoutError:
            return False
        return True


class Bell(Signal):
    """Rings when output or the end of an exec has come. Use it in a `with`."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def __enter__(self) -> Bell:
        self._stops = (self._run.spool.listen(self.ring), self._run.at_end(self.ring))
        return self

    def __exit__(self, *_exc: object) -> None:
        for stop in self._stops:
            stop()


class Watching:
    """An open stream, so that its sandbox counts as in use. Use it in a `with`."""

    closed = False

    def __init__(self, service: Service, sandbox_id: str) -> None:
        self._live = service.manager.index.find(sandbox_id)

    def __enter__(self) -> Watching:
        if self._live is not None:
            self._live.use.opened(self)
        return self

    def __exit__(self, *_exc: object) -> None:
        self.closed = True
        if self._live is not None:
            self._live.touch()
