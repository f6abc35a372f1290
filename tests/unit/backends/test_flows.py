"""A terminal's output, as the agent of a guest with a kernel of its own passes it on."""

from __future__ import annotations

import os
import socket

from ringfence.guest.flows import Pair

SHOWN = b"0123456789abcdef" * 5_000


def test_what_a_terminal_shows_is_passed_on_before_its_end() -> None:
    """Once there is room for it."""
    near, host = socket.socketpair()
    program, guest = socket.socketpair()
    pair = Pair(guest.detach(), host.detach(), ends_at_once=True)
    with near, program:
        filled = _fill(pair.host)
        program.sendall(SHOWN)

        assert not pair.settle()

        found = b""
        while not pair.settle():
            found += near.recv(1 << 20)
        near.setblocking(False)
        while len(found) < filled + len(SHOWN):
            found += near.recv(1 << 20)
    assert SHOWN == found[filled:]
    pair.close()


def test_who_shows_more_and_more_keeps_no_end_away() -> None:
    """Such as a child in the background, which has the terminal too."""
    near, host = socket.socketpair()
    program, guest = socket.socketpair()
    pair = Pair(guest.detach(), host.detach(), ends_at_once=True)
    with near, program:
        near.setblocking(False)
        program.setblocking(False)
        for _ in range(10_000):
            _fill(program.fileno())
            if pair.settle():
                break
            near.recv(1 << 20)
        else:
            raise AssertionError("it waits for ever")
    pair.close()


def test_nobody_waits_for_who_does_not_listen() -> None:
    near, host = socket.socketpair()
    program, guest = socket.socketpair()
    pair = Pair(guest.detach(), host.detach(), ends_at_once=True)
    with near, program:
        _fill(pair.host)
        program.sendall(SHOWN)
        assert not pair.settle()

        near.close()

        assert pair.settle()
    pair.close()


def _fill(fd: int) -> int:
    """Until there is no more room; how many bytes that took."""
    count = 0
    try:
        while True:
            count += os.write(fd, bytes(1 << 16))
    except BlockingIOError:
        return count
