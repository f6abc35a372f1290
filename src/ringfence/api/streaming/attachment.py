"""A WebSocket on an exec: its output and input, a terminal's size, signals, and its end.

Binary messages begin with a byte that says which stream they are of: 0 for input, 1 and 2 for standard
output and error. Text messages are JSON objects with a `type`. Positions are counted by both sides, as
WebSocket messages neither get lost nor change places: `attached` says where they begin.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from typing import Any
from weakref import WeakKeyDictionary

from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from ...errors import InvalidRequest, RingfenceError
from ...execs.run import Run
from ...model.base import checks, jsonform
from ...spool.order import OUT
from ...spool.spool import NAMES, Event
from ..exec_bodies import append, signal_number
from ..service import Service
from .lines import cursor_of, place_of
from .runs import Bell, Watching

IN_BYTE, OUT_BYTE, ERR_BYTE = b"\x00", b"\x01", b"\x02"
NOW = "now"
_NORMAL = 1000  # RFC 6455 7.4.1
_PIECE = 128 << 10
_MOST_INPUT = 256 << 10  # bytes that wait for one process which does not read
_LONGEST_ORDER = 4096  # characters
_OVERHEAD = 128  # of a message that waits


class _Room:
    """Bytes of input waiting to be read by one process, over all attached clients."""

    def __init__(self) -> None:
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self, size: int) -> None:
        """Wait until there is room; a message larger than the whole bound waits until all is free."""
        while self._taken and self._taken + size > _MOST_INPUT:
            freed = asyncio.get_running_loop().create_future()
            self._waiting.append(freed)
            await freed
        self._taken += size

    def give(self, size: int) -> None:
        self._taken -= size
        waiting, self._waiting = self._waiting, deque()
        for each in waiting:
            if not each.done():
                each.set_result(None)


_rooms: WeakKeyDictionary[Run, _Room] = WeakKeyDictionary()


class Attachment:
    """A client attached to an exec; an exec may have several.

    Args:
        cursor: Start of its output: a cursor of the events of both streams, or `now`.

    Raises:
        InvalidRequest: `cursor` is not a cursor.
    """

    def __init__(self, service: Service, run: Run, socket: WebSocket, cursor: str) -> None:
        self._service, self._run, self._socket = service, run, socket
        self._place = run.spool.totals if cursor == NOW else place_of(run, cursor)
        self._input: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._room, self._held = _rooms.setdefault(run, _Room()), 0

    async def serve(self) -> None:
        """Relay until the exec has ended and all output is sent, or the client disconnects."""
        await self._say("attached", cursor=cursor_of(self._place), exec=self._run.view().to_json())
        sending, receiving, feeding = (
            asyncio.ensure_future(each) for each in (self._send(), self._receive(), self._feed())
        )
        try:
            await asyncio.wait((sending, receiving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, receiving, feeding):
                task.cancel()
            ends = await asyncio.gather(sending, receiving, feeding, return_exceptions=True)
            self._room.give(self._held)
        for end in ends:
            if isinstance(end, Exception) and not self._is_gone(end):
                raise end

    def _is_gone(self, end: Exception) -> bool:
        """Return whether `end` is merely the client's disconnection."""
        states = self._socket.client_state, self._socket.application_state
        return isinstance(end, WebSocketDisconnect) or WebSocketState.DISCONNECTED in states

    # -- going out ------------------------------------------------------------------------------

    async def _send(self) -> None:
        run, call, share = self._run, self._service.thread_pools.call, self._service.share
        with (
            run.spool.follow(self._place) as follower,
            Bell(run) as bell,
            Watching(self._service, run.sandbox_id),
        ):
            while True:
                bell.clear()
                over = run.done.done()
                await share.take()
                event = await call(follower.next, _PIECE)
                if event is not None:
                    await self._send_event(event)
                elif not over:
                    await bell.wait(None)
                else:
                    cursor = cursor_of(follower.place)
                    await self._say("end", cursor=cursor, exec=run.view().to_json())
                    await self._socket.close(_NORMAL)
                    return

    async def _send_event(self, event: Event) -> None:
        if dropped := event.dropped_bytes:
            name, offset = NAMES[event.stream], event.offset - dropped
            await self._say("dropped", stream=name, offset=offset, bytes=dropped)
        if event.data:
            byte = OUT_BYTE if event.stream == OUT else ERR_BYTE
            await self._socket.send_bytes(byte + event.data)

    async def _say(self, kind: str, **fields: Any) -> None:
        await self._socket.send_text(json.dumps({"type": kind, **fields}))

    # -- coming in ------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                return
            await self._service.share.take()
            try:
                await self._obey(message)
            except RingfenceError as exc:
                await self._say("error", **exc.to_json())

    async def _obey(self, message: Message) -> None:
        data = message.get("bytes")
        if data is None:
            text = message.get("text") or ""
            if len(text) > _LONGEST_ORDER:
                raise InvalidRequest(f"has over {_LONGEST_ORDER} characters", field="message")
            await self._order(jsonform.loads(text))
        elif data[:1] == IN_BYTE:
            await self._keep(data[1:])
        else:
            raise InvalidRequest("input begins with a zero byte", field="message")

    async def _order(self, given: object) -> None:
        order, run = jsonform.json_object(given, "a message"), self._run
        kind = order.get("type")
        if kind == "resize":
            rows, columns = (
                checks.integer(order.get(name), name, 1, 65_535) for name in ("rows", "cols")
            )
            await self._service.thread_pools.call(run.resize, rows, columns, key=run.sandbox_id)
        elif kind == "signal":
            number = signal_number(order.get("signal"))
            group = checks.flag(order.get("group", False), "group")
            await self._service.thread_pools.call(
                run.signal, number, group=group, key=run.sandbox_id
            )
        elif kind == "kill":
            await self._service.thread_pools.call(run.kill, key=run.sandbox_id)
        elif kind == "eof":
            await self._keep(None)
        else:
            raise InvalidRequest("must be resize, signal, kill or eof", field="type")

    async def _keep(self, data: bytes | None) -> None:
        """Keep input until it is fed; while there is no room for it, nothing more is received."""
        size = len(data or b"") + _OVERHEAD
        await self._room.take(size)
        self._held += size
        self._input.put_nowait(data)

    async def _feed(self) -> None:
        """Input has a queue of its own: a process that does not read it can still be signalled."""
        while True:
            data = await self._input.get()
            try:
                if data is None:
                    self._run.end_input()
                else:
                    await append(self._run, data)
                await self._say("input", offset=self._run.view().stdin_bytes, eof=data is None)
            except RingfenceError as exc:
                await self._say("error", **exc.to_json())
            size = len(data or b"") + _OVERHEAD
            self._held -= size
            self._room.give(size)
