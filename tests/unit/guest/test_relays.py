"""Streams of an exec through the agent: what is passed on, what waits, and which ends are closed."""

from __future__ import annotations

import errno
import os
import select

import pytest

from ringfence.guest import relays
from ringfence.guest.flows import Copy, Dial, Pair
from ringfence.guest.relays import OneWay, Relay
from ringfence.launcher import wire

pytestmark = pytest.mark.anyone


class Pipes:
    """A way from one pipe to another, and our ends of both."""

    def __init__(self) -> None:
        source, self.write = os.pipe()
        self.read, sink = os.pipe()
        os.set_blocking(self.read, False)
        self.way = OneWay(source, sink)

    def fill(self) -> None:
        """Write until the way itself holds something that its sink has no room for."""
        os.set_blocking(self.write, False)
        while not self.way.rest:
            os.write(self.write, bytes(1 << 16))
            self.way.settle()

    def received(self) -> bytes:
        found = b""
        try:
            while data := os.read(self.read, 1 << 20):
                found += data
        except BlockingIOError:
            pass
        return found

    def close(self) -> None:
        self.way.close()
        for fd in (self.read, self.write):
            if fd >= 0:
                os.close(fd)
        self.read = self.write = -1


def is_open(fd: int) -> bool:
    return os.path.exists(f"/proc/self/fd/{fd}") or os.path.islink(f"/proc/self/fd/{fd}")


class TestOneWay:
    def test_it_waits_for_the_source_and_with_a_rest_for_the_sink(self) -> None:
        pipes = Pipes()
        way = pipes.way
        assert {way.source: select.POLLIN} == way.wants()
        pipes.fill()

        assert {way.sink: select.POLLOUT} == way.wants()
        assert not way.settle()
        before = len(pipes.received())
        way.ready(way.sink)

        assert b"" == way.rest
        assert before
        assert pipes.received()
        pipes.close()
        assert {} == way.wants()

    @pytest.mark.parametrize("which", ["source", "sink"])
    def test_the_end_of_one_side_closes_both(self, which: str) -> None:
        pipes = Pipes()
        ends = pipes.way.source, pipes.way.sink
        if which == "source":
            os.close(pipes.write)
            pipes.write = -1
        else:
            os.close(pipes.read)
            pipes.read = -1
            os.write(pipes.write, b"nobody reads this")

        pipes.way.ready(0)

        assert pipes.way.is_over
        assert pipes.way.settle()
        assert [False, False] == [*map(is_open, ends)]
        pipes.close()

    def test_a_writer_that_never_stops_keeps_no_end_away(self) -> None:
        read, write = os.pipe()
        zero, null = os.open("/dev/zero", os.O_RDONLY), os.open("/dev/null", os.O_WRONLY)
        way = OneWay(zero, null)

        assert way.settle()
        way.ready(zero)

        way.close()
        os.close(read)
        os.close(write)

    def test_a_rest_is_flushed_as_soon_as_it_is_read_or_given_up(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(relays, "_PATIENCE_S", 0.01)
        pipes = Pipes()
        pipes.fill()
        assert not pipes.way.flush()
        pipes.received()

        assert pipes.way.flush()
        assert b"" == pipes.way.rest
        pipes.close()


class TestRelay:
    def make(self) -> tuple[Relay, dict[int, int]]:
        """Return a relay of three streams, and the host's own ends."""
        stdin, our_stdin = os.pipe()
        our_stdout, stdout = os.pipe()
        our_stderr, stderr = os.pipe()
        return Relay([stdin, stdout, stderr]), {0: our_stdin, 1: our_stdout, 2: our_stderr}

    def test_input_goes_in_and_output_comes_out(self) -> None:
        relay, host = self.make()
        os.write(host[0], b"in")
        os.write(relay.inner[1], b"out")
        os.write(relay.inner[2], b"err")

        assert "" == relay.waiting()

        assert [b"in", b"out", b"err"] == [
            os.read(fd, 9) for fd in (relay.inner[0], host[1], host[2])
        ]
        self.close(relay, host)

    def test_with_two_streams_they_are_output_and_errors(self) -> None:
        read, write = os.pipe()
        relay = Relay([write, os.dup(write)])
        assert [1, 2] == [*relay.streams]
        os.write(relay.inner[1], b"err")
        assert relay.settle()
        assert b"err" == os.read(read, 9)
        self.close(relay, {0: read})

    @pytest.mark.parametrize(
        ("number", "reason"),
        [(0, "input that it does not read"), (1, "output that was not read")],
    )
    def test_what_waits_is_named(
        self, number: int, reason: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(relays, "_PATIENCE_S", 0.01)
        relay, host = self.make()
        entrance = relay.inner[1] if number else host[0]
        os.set_blocking(entrance, False)
        while not relay.streams[number].rest:
            os.write(entrance, bytes(1 << 16))
            relay.streams[number].settle()

        assert reason == relay.waiting()
        assert (number == 0) == relay.settle(), "input that is not read keeps no end away"
        self.close(relay, host)

    def test_letting_go_closes_the_hosts_ends_alone_and_others_take_their_place(self) -> None:
        relay, host = self.make()
        relay.streams[2].close()
        own = [relay.streams[0].sink, relay.streams[1].source]
        hosts = [relay.streams[0].source, relay.streams[1].sink]

        relay.let_go()

        assert [False, False] == [*map(is_open, hosts)]
        assert [True, True] == [*map(is_open, own)]
        assert b"" == os.read(host[1], 1)
        with pytest.raises(BrokenPipeError):
            os.write(host[0], b"x")
        for way in (relay.streams[0], relay.streams[1]):
            assert {} == way.wants()
            assert not way.is_over
        fresh = {number: os.pipe() for number in range(4)}
        ends = {0: fresh[0][0], **{n: fresh[n][1] for n in (1, 2, 3)}}
        going_on = relay.join(ends)

        assert [relay.streams[0], relay.streams[1]] == going_on
        assert [True, True, False, False] == [is_open(fd) for fd in ends.values()]
        assert [False, False] == [os.get_blocking(ends[number]) for number in (0, 1)]
        os.write(fresh[0][1], b"again")
        os.write(relay.inner[1], b"out again")
        assert "" == relay.waiting()
        assert b"again" == os.read(relay.inner[0], 9)
        assert b"out again" == os.read(fresh[1][0], 9)
        for number in range(4):
            os.close(fresh[number][1 if number == 0 else 0])
        self.close(relay, host)

    def close(self, relay: Relay, host: dict[int, int]) -> None:
        relay.close()
        for fd in (*relay.inner, *host.values()):
            os.close(fd)


class TestCopies:
    def copy(self, source: int, sink: int, *, out: bool) -> tuple[Copy, wire.Socket]:
        ours, theirs = wire.socketpair()
        return Copy(source, sink, theirs, out=out), ours

    def test_one_that_is_given_up_is_refused_and_closes_both(self) -> None:
        read, write = os.pipe()
        null = os.open("/dev/null", os.O_RDONLY)
        copy, ours = self.copy(null, write, out=True)
        assert {write: select.POLLOUT} == copy.wants()

        copy.close()
        copy.close()

        assert wire.receive_raw(ours)[0].startswith(b"E%d " % errno.EIO)
        assert wire.receive_raw(ours) == (b"", [])
        assert [False, False] == [is_open(null), is_open(write)]
        assert {} == copy.wants()
        os.close(read)
        ours.close()

    def test_one_whose_reader_leaves_ends_with_its_error(self) -> None:
        read, write = os.pipe()
        os.set_blocking(write, False)
        os.close(read)
        zero = os.open("/dev/zero", os.O_RDONLY)
        copy, ours = self.copy(zero, write, out=True)

        copy.ready(write)

        assert wire.receive_raw(ours)[0].startswith(b"E%d " % errno.EPIPE)
        assert [False, False] == [is_open(zero), is_open(write)]
        ours.close()

    def test_a_slow_reader_gets_all_in_turns(self) -> None:
        data = os.urandom(1 << 20)
        file = os.memfd_create("file")
        os.write(file, data)
        os.lseek(file, 0, os.SEEK_SET)
        read, write = os.pipe()
        os.set_blocking(write, False)
        copy, ours = self.copy(file, write, out=True)
        found = b""
        while copy.wants():
            copy.ready(write)
            if copy.wants():
                found += os.read(read, 1 << 20)
        with open(read, "rb") as rest:
            found += rest.read()

        assert data == found
        assert (b"O", []) == wire.receive_raw(ours)
        ours.close()


def test_a_connection_that_is_given_up_closes_all_of_its_ends() -> None:
    sock, other = wire.socketpair()
    ours, reply = wire.socketpair()
    host, kept = os.pipe()
    begun: list[int] = []
    dial = Dial(sock, reply, host, begun.append)

    dial.close()

    assert {} == dial.wants()
    assert (b"", []) == wire.receive_raw(ours)
    assert (b"", []) == wire.receive_raw(other)
    assert not is_open(host)
    assert [] == begun
    os.close(kept)
    for each in (ours, other):
        each.close()


def test_a_pair_waits_for_no_more_than_it_can_pass_on() -> None:
    left, program = wire.socketpair()
    right, near = wire.socketpair()
    pair = Pair(left.detach(), right.detach(), ends_at_once=True)
    assert {pair.guest: select.POLLIN, pair.host: select.POLLIN} == pair.wants()
    ends = pair.guest, pair.host
    program.close()

    pair.ready(pair.guest)

    assert not pair.is_open
    assert {} == pair.wants()
    assert [False, False] == [*map(is_open, ends)]
    near.close()
