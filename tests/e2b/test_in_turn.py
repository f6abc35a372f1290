"""What has no end, or is compressed, is read in its turn or in a thread: never on the loop for long."""

from __future__ import annotations

import asyncio
import gzip
import threading
import zlib
from collections.abc import AsyncIterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.requests import Request

from ringfence.api import loop_share
from ringfence.api.access.caller import USER, Caller
from ringfence.api.loop_share import LoopShare
from ringfence.api.thread_pools import ThreadPools
from ringfence.e2b import call as call_module
from ringfence.e2b import processes
from ringfence.e2b.call import Call, Shared
from ringfence.e2b.codec import MOST_FRAME_BYTES, Frames, RpcError, inflated, json_object
from ringfence.e2b.envd import _deflated
from ringfence.execs.run import Run
from ringfence.sessions.live import Live
from ringfence.spool.order import OUT

pytestmark = pytest.mark.anyone


def frame(text: bytes, flags: int = 1) -> bytes:
    return bytes([flags]) + len(text).to_bytes(4, "big") + text


def call_of(*pieces: bytes) -> Call:
    """A request whose compressed body comes in these pieces, at a server with nothing else to do."""

    async def stream() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    service = SimpleNamespace(thread_pools=ThreadPools(), share=LoopShare())
    request = SimpleNamespace(headers={"content-encoding": "gzip"}, stream=stream)
    shared = cast(Shared, SimpleNamespace(service=service))
    live = cast(Live, SimpleNamespace(sandbox_id="sbx-1"))
    return Call(shared, cast(Request, request), Caller("ann", USER), live)


def test_messages_are_taken_one_at_a_time_and_not_undone() -> None:
    """A piece of 64 KiB may hold sixteen that are 4 MiB each."""
    frames, text = Frames(is_gzip=True), gzip.compress(b"{}")
    found = frames.feed(frame(text) + frame(b"{}", 0) + frame(text) + frame(text)[:3])

    assert (text, True) == next(found)
    with pytest.raises(RpcError):
        frames.finish()
    assert [(b"{}", False), (text, True)] == list(found)


def test_a_message_is_undone_up_to_its_bound() -> None:
    assert MOST_FRAME_BYTES == len(inflated(gzip.compress(bytes(MOST_FRAME_BYTES))))
    with pytest.raises(RpcError, match="too long"):
        inflated(gzip.compress(bytes(MOST_FRAME_BYTES + 1)))
    with pytest.raises(RpcError, match="by gzip only"):
        next(Frames().feed(frame(gzip.compress(b"{}"))))


@pytest.mark.parametrize("is_compressed", [True, False])
async def test_a_compressed_message_is_read_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, is_compressed: bool
) -> None:
    """Be it ever so short: how long it is uncompressed is not known. A short plain one is read at once."""
    threads: list[threading.Thread] = []
    real = json_object

    def record(text: bytes) -> Any:
        threads.append(threading.current_thread())
        return real(text)

    monkeypatch.setattr(call_module, "json_object", record)
    call, text = call_of(), b'{"a":1}'
    try:
        found = await call.read(
            gzip.compress(text) if is_compressed else text, is_compressed=is_compressed
        )
    finally:
        call.service.thread_pools.close()

    assert {"a": 1} == found
    assert is_compressed == (threads[0] is not threading.current_thread())


async def test_each_piece_of_a_compressed_body_waits_for_its_turn() -> None:
    call = call_of(gzip.compress(bytes(1 << 20)))
    body = call.stream()
    assert await asyncio.wait_for(anext(body), 10)
    call.service.share.charge(3600)

    waiting = asyncio.ensure_future(anext(body))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(waiting, 0.1)
    call.service.thread_pools.close()


async def test_the_time_that_it_takes_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100, 200))
    monkeypatch.setattr(loop_share, "time", SimpleNamespace(monotonic=lambda: next(now)))
    call = call_of(gzip.compress(b"x" * 1000))
    charged: list[float] = []
    monkeypatch.setattr(call.service.share, "charge", charged.append)

    assert b"x" * 1000 == b"".join([piece async for piece in call.stream()])
    assert charged
    assert {1} == set(charged)
    call.service.thread_pools.close()


async def test_output_without_end_is_read_in_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    call, read = call_of(), list[int]()

    class Following(nullcontext[None]):
        def next(self, size: int) -> Any:
            read.append(size)
            return SimpleNamespace(stream=OUT, data=b"x")

    async def number(*_: Any) -> int:
        return 7

    spool = SimpleNamespace(follow=lambda *_: Following())
    view = SimpleNamespace(pty=None)
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    run = SimpleNamespace(spool=spool, view=lambda: view, done=done, sandbox_id="sbx-1")
    bell = SimpleNamespace(clear=lambda: None)
    monkeypatch.setattr(processes, "_number", number)
    monkeypatch.setattr(processes, "Bell", lambda _run: nullcontext(bell))
    monkeypatch.setattr(processes, "Watching", lambda *_: nullcontext())
    events = processes._events(call, cast(Run, run), (0, 0))
    assert {"pid": 7} == (await anext(events))["event"]["start"]
    assert {"stdout": "eA=="} == (await asyncio.wait_for(anext(events), 10))["event"]["data"]
    assert 1 == len(read)
    call.service.share.charge(3600)

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(events), 0.1)
    assert 1 == len(read)
    call.service.thread_pools.close()


async def test_a_download_is_compressed_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    class Deflate:
        """As zlib's, and tells where it works."""

        def __init__(self, **more: Any) -> None:
            self._real = real(**more)
            self.flush = self._real.flush

        def compress(self, data: bytes) -> bytes:
            threads.append(threading.current_thread())
            return self._real.compress(data)

    real = zlib.compressobj
    monkeypatch.setattr("zlib.compressobj", lambda level, **more: Deflate(level=level, **more))
    call, content = call_of(), [bytes([number]) * 100_000 for number in range(3)]

    async def pieces() -> AsyncIterator[bytes]:
        for each in content:
            yield each

    sent = b"".join([each async for each in _deflated(call, pieces())])
    call.service.thread_pools.close()

    assert b"".join(content) == gzip.decompress(sent)
    assert 3 == len(threads)
    assert threading.current_thread() not in threads
