"""Connecting to the first address that answers."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator

import pytest

from ringfence.egress import dial
from ringfence.egress.dial import connect
from ringfence.egress.io.loop import Deadline, Loop, sleep

pytestmark = pytest.mark.anyone


@pytest.fixture(name="loop")
def fixture_loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture(name="server")
def fixture_server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture(name="full")
def fixture_full(server: socket.socket) -> Iterator[str]:
    """An address where connections are neither taken nor refused: its queue is full."""
    port = server.getsockname()[1]
    with socket.socket() as full:
        full.bind(("127.0.0.9", port))
        full.listen(0)
        with socket.create_connection(("127.0.0.9", port)):
            yield "127.0.0.9"


def v4(*addresses: str) -> list[tuple[int, str]]:
    return [(socket.AF_INET, address) for address in addresses]


def test_the_first_that_answers(loop: Loop, server: socket.socket) -> None:
    port = server.getsockname()[1]
    sock, address = loop.run_until_done(connect(v4("127.0.0.5", "127.0.0.1"), port))
    peer = sock.getpeername()
    sock.close()
    assert "127.0.0.1" == address
    assert (address, port) == peer


def test_nobody_answers(loop: Loop) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]

    with pytest.raises(OSError, match="refused") as caught:
        loop.run_until_done(connect(v4("127.0.0.1", "127.0.0.2"), port))
    assert errno.ECONNREFUSED == caught.value.errno


def test_nowhere_to_go(loop: Loop) -> None:
    with pytest.raises(OSError, match="No route"):
        loop.run_until_done(connect([], 80))


def test_one_that_is_silent_does_not_hold_up_the_next(
    loop: Loop, server: socket.socket, full: str
) -> None:
    started = time.monotonic()
    port = server.getsockname()[1]

    sock, address = loop.run_until_done(connect(v4(full, "127.0.0.1"), port))

    sock.close()
    assert "127.0.0.1" == address
    assert time.monotonic() - started > 0.2


def test_after_one_that_refuses_the_next_is_tried_at_once(
    loop: Loop, server: socket.socket, full: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while an earlier one is still silent."""
    wait = dial._wait
    monkeypatch.setattr(dial, "_STAGGER_S", 0.05)

    async def noted(seconds: float | None) -> None:
        monkeypatch.setattr(dial, "_STAGGER_S", 60.0)  # for all but the first
        await wait(seconds)

    monkeypatch.setattr(dial, "_wait", noted)

    async def main() -> str:
        with Deadline(20.0):
            places = v4(full, "127.0.0.5", "127.0.0.1")
            sock, address = await connect(places, server.getsockname()[1])
        sock.close()
        return address

    assert "127.0.0.1" == loop.run_until_done(main())


def test_a_deadline_leaves_nothing_open(loop: Loop, server: socket.socket, full: str) -> None:
    before = len(os.listdir("/proc/self/fd"))

    async def main() -> None:
        with pytest.raises(TimeoutError), Deadline(0.6):
            await connect(v4(full, full, full), server.getsockname()[1])
        await sleep(0)

    loop.run_until_done(main())
    assert before == len(os.listdir("/proc/self/fd"))
