"""Processes that an agent polls repeatedly: their output is gathered while they run."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agents.sandbox.session.pty_output import collect_pty_output
from agents.sandbox.session.pty_types import (
    PTY_PROCESSES_MAX,
    PtyExecUpdate,
    allocate_pty_process_id,
    clamp_pty_yield_time_ms,
    process_id_to_prune_from_meta,
    resolve_pty_write_yield_time_ms,
)

from ...errors import RingfenceError
from .. import outcome

if TYPE_CHECKING:
    from ...sandbox.aio_process import AsyncProcess, AsyncStream

_FIRST_YIELD_S = 10.0
_YIELD_S = 0.25


@dataclass(eq=False)
class Entry:
    """A process. `closed` is set when it has ended and all its output is in `chunks`."""

    process: AsyncProcess
    tty: bool
    chunks: deque[bytes] = field(default_factory=deque)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    notify: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    exit_code: int | None = None
    last_used: float = field(default_factory=time.monotonic)
    gathering: asyncio.Task[None] | None = None

    async def gather(self) -> None:
        """Read both streams to their end, then how it ended."""
        try:
            streams = (self.process.stdout, self.process.stderr)
            await asyncio.gather(*(self._read(stream) for stream in streams))
            self.exit_code = outcome.exit_code(await self.process.wait())
        except RingfenceError:
            self.exit_code = outcome.TIMED_OUT + 1  # lost with its sandbox: 125, as env(1) has it
        self.closed.set()
        self.notify.set()

    async def _read(self, stream: AsyncStream) -> None:
        async for chunk in stream:
            async with self.lock:
                self.chunks.append(chunk)
            self.notify.set()

    async def end(self) -> None:
        """Kill it and everything it started."""
        await self.process.kill()
        if self.gathering is not None:
            await asyncio.gather(self.gathering, return_exceptions=True)


class Processes:
    """Processes of a session, by the number that the framework gave them."""

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}

    async def begin(
        self, process: AsyncProcess, tty: bool, yield_s: float | None, most_tokens: int | None
    ) -> PtyExecUpdate:
        """Gather from now on; what came until it ended, or `yield_s` was over."""
        entry = Entry(process, tty)
        entry.gathering = asyncio.create_task(entry.gather())
        try:
            await self._make_room()
            number = allocate_pty_process_id(set(self.entries))
            self.entries[number] = entry
            wait_ms = clamp_pty_yield_time_ms(_ms(yield_s, _FIRST_YIELD_S))
            return await self._update(number, entry, wait_ms, most_tokens)
        except BaseException:
            # The caller never got its number, so it could not end it.
            self.entries = {n: each for n, each in self.entries.items() if each is not entry}
            await asyncio.shield(entry.end())
            raise

    async def write(
        self, number: int, entry: Entry, chars: str, yield_s: float | None, most_tokens: int | None
    ) -> PtyExecUpdate:
        """Type `chars`, if any; what came then."""
        if chars:
            if not entry.tty or entry.process.stdin is None:
                raise RuntimeError("stdin is not available for this process")
            await entry.process.stdin.write(chars.encode())
        wait_ms = resolve_pty_write_yield_time_ms(
            yield_time_ms=_ms(yield_s, _YIELD_S), input_empty=not chars
        )
        entry.last_used = time.monotonic()
        return await self._update(number, entry, wait_ms, most_tokens)

    async def end_all(self) -> None:
        """Kill all of them."""
        entries, self.entries = list(self.entries.values()), {}
        for entry in entries:
            await entry.end()

    async def _update(
        self, number: int, entry: Entry, wait_ms: int, most_tokens: int | None
    ) -> PtyExecUpdate:
        output, tokens, closed = await collect_pty_output(
            output_chunks=entry.chunks,
            output_lock=entry.lock,
            output_notify=entry.notify,
            is_done=entry.closed.is_set,
            yield_time_ms=wait_ms,
            max_output_tokens=most_tokens,
        )
        if closed:
            self.entries.pop(number, None)
        return PtyExecUpdate(
            process_id=None if closed else number,
            output=output,
            exit_code=entry.exit_code if closed else None,
            original_token_count=tokens,
        )

    async def _make_room(self) -> None:
        if len(self.entries) < PTY_PROCESSES_MAX:
            return
        ages = [(n, each.last_used, each.closed.is_set()) for n, each in self.entries.items()]
        number = process_id_to_prune_from_meta(ages)
        if number is not None:
            await self.entries.pop(number).end()


def _ms(seconds: float | None, default: float) -> int:
    return int((default if seconds is None else seconds) * 1000)
