"""Descriptors over a stream of bytes: two carriers, and one against what is no carrier."""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from ringfence.guest.channels import CLOCK, Carrier
from ringfence.launcher import wire
from ringfence.launcher.link import line

pytestmark = pytest.mark.anyone

PATIENCE_S = 60.0
MORE_THAN_FITS = 3_000_000
MOST_BYTES = 16 << 20


class Ends:
    """The host's socket of requests, and the guest's, with a line and two carriers between."""

    def __init__(self) -> None:
        self.near, self.far = socket.socketpair()
        self.host, ours = wire.socketpair()
        self.guest, theirs = wire.socketpair()
        for each in (self.host, self.guest):
            each.settimeout(PATIENCE_S)
        self.clock: list[int] = []
        self.told = threading.Event()
        carriers = (
            Carrier(self.near.fileno(), ours, is_host=True),
            Carrier(self.far.fileno(), theirs, is_host=False, on_clock=self._set),
        )
        self.threads = [
            threading.Thread(target=self._run, args=each)
            for each in zip(carriers, (ours, theirs), (self.near, self.far), strict=True)
        ]
        for thread in self.threads:
            thread.start()

    def _set(self, now_ns: int) -> None:
        self.clock.append(now_ns)
        self.told.set()

    def _run(self, carrier: Carrier, control: wire.Socket, line: socket.socket) -> None:
        carrier.run()
        control.close()
        line.close()

    def sent(self, *fds: int) -> list[int]:
        """Send descriptors through, ours no longer; what they are like on the other side."""
        wire.send(self.host, "request", fds)
        for fd in fds:
            os.close(fd)
        message, likenesses = wire.receive(self.guest)
        assert "request" == message
        return likenesses

    def close(self) -> None:
        self.host.close()
        self.guest.close()
        for thread in self.threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def test_what_is_written_into_a_pipe_comes_out_whole_and_ends(ends: Ends) -> None:
    read, write = os.pipe()
    [theirs] = ends.sent(write)
    data = os.urandom(MORE_THAN_FITS)

    def produce() -> None:
        with open(theirs, "wb") as pipe:
            pipe.write(data)

    thread = threading.Thread(target=produce)
    thread.start()
    with open(read, "rb") as pipe:
        found = pipe.read()

    thread.join(PATIENCE_S)
    assert data == found


def test_a_reader_on_the_other_side_gets_what_the_host_writes(ends: Ends) -> None:
    read, write = os.pipe()
    [theirs] = ends.sent(read)
    data = os.urandom(MORE_THAN_FITS)

    def produce() -> None:
        with open(write, "wb") as pipe:
            pipe.write(data)

    thread = threading.Thread(target=produce)
    thread.start()
    with open(theirs, "rb") as pipe:
        found = pipe.read()

    thread.join(PATIENCE_S)
    assert data == found


def test_an_end_that_nobody_waits_for_finds_all_output_in_the_pipe(ends: Ends) -> None:
    """Who has read that a process ended reads what is in its pipes, and no further: these grow."""
    ours, reply = wire.socketpair()
    read, write = os.pipe()
    output, answers = ends.sent(write, reply.detach())
    data = os.urandom(700_000)  # more than a pipe holds, and than the line lets through
    with open(output, "wb") as pipe, socket.socket(fileno=answers) as theirs:
        fcntl.fcntl(output, fcntl.F_SETPIPE_SZ, 1 << 20)
        pipe.write(data)
        pipe.flush()
        theirs.send(b"ended")  # and the pipe stays open
        ours.settimeout(PATIENCE_S)

        assert b"ended" == ours.recv(100)

        assert data == _read_what_is_there(read)
    ours.close()
    os.close(read)


def test_where_there_is_no_room_an_end_waits_for_its_reader(ends: Ends) -> None:
    """A socket does not grow, as a pipe of a user's who has too many does not."""
    ours, reply = wire.socketpair()
    near, far = socket.socketpair()
    output, answers = ends.sent(far.detach(), reply.detach())
    data = os.urandom(MORE_THAN_FITS)
    writer = threading.Thread(target=_write_and_answer, args=(output, answers, data, b"ended"))
    writer.start()
    found, poll = b"", select.poll()
    poll.register(ours, select.POLLIN)
    poll.register(near, select.POLLIN)

    while ours.fileno() not in dict(poll.poll(PATIENCE_S * 1000)):
        found += near.recv(1 << 12)  # little by little
    found += _read_what_is_there(near.fileno())

    assert data == found
    writer.join(PATIENCE_S)
    for each in (ours, near):
        each.close()


def test_where_nobody_reads_any_more_an_end_waits_for_nobody(ends: Ends) -> None:
    ours, reply = wire.socketpair()
    near, far = socket.socketpair()
    output, answers = ends.sent(far.detach(), reply.detach())
    writer = threading.Thread(
        target=_write_and_answer, args=(output, answers, bytes(MORE_THAN_FITS), b"killed")
    )
    writer.start()
    ours.settimeout(PATIENCE_S)

    near.close()

    assert b"killed" == ours.recv(100)
    writer.join(PATIENCE_S)
    ours.close()


def _write_and_answer(output: int, answers: int, data: bytes, word: bytes) -> None:
    with socket.socket(fileno=output) as sock, socket.socket(fileno=answers) as reply:
        try:
            sock.sendall(data)
        except BrokenPipeError:
            pass
        reply.send(word)


def _read_what_is_there(fd: int) -> bytes:
    os.set_blocking(fd, False)
    found = b""
    try:
        while piece := os.read(fd, 1 << 20):
            found += piece
    except BlockingIOError:
        pass
    return found


@pytest.mark.parametrize("closes", ["host", "guest"])
def test_who_writes_hears_that_nobody_reads(ends: Ends, closes: str) -> None:
    read, write = os.pipe()
    [theirs] = ends.sent(read if closes == "guest" else write)
    reader, writer = (theirs, write) if closes == "guest" else (read, theirs)

    os.close(reader)

    with pytest.raises(BrokenPipeError):
        _write_for_ever(writer)  # until it is known on this side
    os.close(writer)


def _write_for_ever(fd: int) -> None:
    while True:
        os.write(fd, b"anybody?" * 1000)


def test_a_connection_is_closed_one_way_at_a_time(ends: Ends) -> None:
    near, far = socket.socketpair()
    [fd] = ends.sent(far.detach())
    with near, socket.socket(fileno=fd) as theirs:
        for each in (near, theirs):
            each.settimeout(PATIENCE_S)
        near.sendall(b"question")
        near.shutdown(socket.SHUT_WR)
        with theirs.makefile("rb") as file:
            asked = file.read()
        theirs.sendall(b"answer")
        theirs.close()
        with near.makefile("rb") as file:
            answered = file.read()

    assert (b"question", b"answer") == (asked, answered)


def test_answers_keep_their_boundaries(ends: Ends) -> None:
    ours, theirs = wire.socketpair()
    ours.settimeout(PATIENCE_S)
    [fd] = ends.sent(theirs.detach())
    reply = wire.adopt(fd)
    for word in (b"Oone", b"Otwo"):
        wire.send_raw(reply, word)
    reply.close()

    found = [wire.receive_raw(ours)[0] for _ in range(3)]
    ours.close()

    assert [b"Oone", b"Otwo", b""] == found


def test_a_file_is_filled_before_the_answer_says_so(ends: Ends) -> None:
    ours, theirs = wire.socketpair()
    ours.settimeout(PATIENCE_S)
    body = os.memfd_create("body")
    reply, file = ends.sent(theirs.detach(), os.dup(body))
    data = os.urandom(MORE_THAN_FITS)
    with open(file, "wb") as likeness:
        likeness.write(data)

    sock = wire.adopt(reply)
    wire.send_raw(sock, b"O")
    wire.receive_raw(ours)

    for each in (sock, ours):
        each.close()
    assert data == os.pread(body, len(data) + 1, 0)
    os.close(body)


def test_a_long_request_arrives_whole(ends: Ends) -> None:
    message = {"argv": ["x" * 200_000]}

    wire.send(ends.host, message)

    assert (message, []) == wire.receive(ends.guest)


def test_one_that_nobody_reads_stops_no_other(ends: Ends) -> None:
    stalled, write = os.pipe()
    read, other = os.pipe()
    first, second = ends.sent(write, other)
    for _ in range(5):  # more than the other side's window: the rest lies in pipes
        os.write(first, bytes(1 << 16))

    os.write(second, b"past it")

    assert b"past it" == os.read(read, 100)
    for fd in (stalled, read, first, second):
        os.close(fd)


def test_the_time_is_told(ends: Ends) -> None:
    wire.send_raw(ends.host, CLOCK + b"12345")

    assert ends.told.wait(PATIENCE_S)
    assert [12345] == ends.clock


HEAD = line.frame(line.DATA, 7, b"")
NONSENSE = {
    "noise": bytes(range(256)),
    "a channel that never was": HEAD,
    "a frame that is too long": line.frame(line.DATA, 0, bytes(1 << 17)),
    "a request from a guest": line.frame(line.MESSAGE, 0, b"\0\0M"),
    "an unknown kind": line.frame(b"?", 0, b""),
}


@pytest.mark.parametrize("said", NONSENSE.values(), ids=list(NONSENSE))
def test_a_guest_that_breaks_the_rules_is_not_heard_again(said: bytes) -> None:
    """The host's socket of requests closes, which is what a sandbox that is lost looks like."""
    near, far = socket.socketpair()
    host, ours = wire.socketpair()
    host.settimeout(PATIENCE_S)
    carrier = Carrier(near.fileno(), ours, is_host=True)

    with near, far:
        far.sendall(said)
        far.shutdown(socket.SHUT_WR)
        carrier.run()
        ours.close()

        assert (b"", []) == wire.receive_raw(host)
    host.close()


@pytest.mark.parametrize(
    "frames",
    [
        line.frame(line.DATA, 1, bytes(1 << 15)) * 11,
        line.frame(line.ROOM, 1, b"1"),
        line.frame(line.ROOM, 1, b"many"),
        line.frame(line.LAST, 1, b"-1"),
    ],
    ids=["more than there is room for", "more room than there is", "no number", "less than none"],
)
def test_a_guest_that_cheats_with_room_is_not_heard_again(frames: bytes) -> None:
    near, far = socket.socketpair()
    host, ours = wire.socketpair()
    host.settimeout(PATIENCE_S)
    carrier = Carrier(near.fileno(), ours, is_host=True)
    thread = threading.Thread(target=_carry, args=(carrier, ours))
    thread.start()
    read, write = os.pipe()
    wire.send(host, "request", [write])
    os.close(write)
    with near, far:
        far.recv(1 << 16)  # the channel is there

        far.sendall(frames)

        assert (b"", []) == wire.receive_raw(host)
    thread.join(PATIENCE_S)
    host.close()
    os.close(read)


def _carry(carrier: Carrier, control: wire.Socket) -> None:
    carrier.run()
    control.close()


def send_each(sock: wire.Socket, request: bytes, counts: Iterator[int]) -> None:
    for _ in counts:
        wire.send_raw(sock, request)


@pytest.mark.full
def test_a_guest_that_does_not_read_gets_a_bounded_number_of_requests() -> None:
    """The host's end keeps few MiB for it; whoever asks more is told so by the socket."""
    ours, theirs = wire.socketpair()
    near, far = socket.socketpair()
    carrier = Carrier(near.fileno(), theirs, is_host=True)
    thread = threading.Thread(target=carrier.run)
    thread.start()
    request = b"M" + bytes(15_000)
    most = MOST_BYTES // len(request)
    fds, counts = [ours, theirs, near, far], iter(range(3 * most))
    try:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("=qq", 2, 0))
        with pytest.raises(BlockingIOError):
            send_each(ours, request, counts)
        taken = next(counts) - 1
        assert taken < most

        # The control: one that reads gets all of it, and the host's end takes requests again.
        heard = bytearray()
        while len(heard) < taken * len(request):
            heard += far.recv(1 << 16)
        wire.send_raw(ours, request)
    finally:
        far.close()
        thread.join()
        for each in fds:
            each.close()
