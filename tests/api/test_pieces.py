"""In how many pieces an answer arrives: each is a client woken, most of them for nothing."""

from __future__ import annotations

import asyncio
import socket

import pytest

from ringfence.daemon.protocol import InOnePiece
from tests.api.conftest import Daemon

pytestmark = pytest.mark.anyone

_MOST = 1 << 20


def asked(daemon: Daemon, request: bytes, enough: bytes) -> list[bytes]:
    """What one call of recv(2) each brings, up to and with the piece that has `enough`."""
    pieces: list[bytes] = []
    with socket.socket(socket.AF_UNIX) as ours:
        ours.settimeout(60)
        ours.connect(daemon.socket)
        ours.sendall(request)
        while not any(enough in piece for piece in pieces):
            pieces.append(ours.recv(_MOST))
            assert pieces[-1], pieces
    return pieces


def test_a_short_answer_is_one_piece(daemon: Daemon) -> None:
    """Head and body, of what the daemon has found by itself and of what takes the long way."""
    for path, end in (("/v1/sandboxes?limit=1", b"}"), ("/v1/sandboxes/no-such", b"}")):
        request = f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()

        [piece] = asked(daemon, request, end)

        assert piece.startswith(b"HTTP/1.1 ")


def test_a_head_without_a_body_comes_all_the_same(daemon: Daemon) -> None:
    request = b"HEAD /no/such/place HTTP/1.1\r\nhost: localhost\r\n\r\n"

    [piece] = asked(daemon, request, b"\r\n\r\n")

    assert piece.startswith(b"HTTP/1.1 404")


class Written(asyncio.Transport):
    """Notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.pieces.append(bytes(data))

    def close(self) -> None:
        self.pieces.append(b"closed")


@pytest.mark.parametrize("size", [1, 1 << 16])
def test_what_follows_at_once_goes_along_unless_it_is_large(size: int) -> None:
    async def answer() -> list[bytes]:
        written = Written()
        answer = InOnePiece(written, asyncio.get_running_loop())
        answer.write(b"head")
        answer.write(b"b" * size)
        answer.write(b"more")
        await asyncio.sleep(0)
        return written.pieces

    together = [b"head" + b"b" * size] if size == 1 else [b"head", b"b" * size]
    assert [*together, b"more"] == asyncio.run(answer())


def test_a_stream_that_says_nothing_yet_has_its_head_sent() -> None:
    async def answer() -> list[bytes]:
        written = Written()
        InOnePiece(written, asyncio.get_running_loop()).write(b"head")
        await asyncio.sleep(0)
        return written.pieces

    assert [b"head"] == asyncio.run(answer())


def test_what_is_closed_was_sent_before() -> None:
    async def answer() -> list[bytes]:
        written = Written()
        answer = InOnePiece(written, asyncio.get_running_loop())
        answer.write(b"head")
        answer.close()
        await asyncio.sleep(0)
        return written.pieces

    assert [b"head", b"closed"] == asyncio.run(answer())
