"""The serial line to one machine's agent, and the thread that carries requests over it."""

from __future__ import annotations

import select
import socket
import threading
import time

from ...errors import IsolationError
from ...guest.channels import Carrier
from ...launcher import wire
from ...launcher.link.line import CONTROL, MESSAGE, frame, split
from ..local.answers import Refused

_JOIN_S = 30.0
_PIECE = 1 << 16


class Line:
    """The host's end. The emulator has the other, as its standard input."""

    def __init__(self) -> None:
        kind = socket.SOCK_STREAM | socket.SOCK_CLOEXEC
        self._sock, self.far = socket.socketpair(socket.AF_UNIX, kind)
        self._data = b""
        self._thread: threading.Thread | None = None

    def say(self, message: bytes) -> None:
        """Send a request without descriptors, before the relay thread starts; `first_word` reports
        a lost machine.
        """
        data = b"\0\0" + message
        try:
            self._sock.sendall(frame(MESSAGE, CONTROL, data))
        except ConnectionError:
            pass

    def first_word(self, pidfd: int, timeout_s: float) -> bytes:
        """Read the machine's next message, before the relay thread starts.

        Raises:
            Refused: The jail was not built.
            IsolationError: Nothing came in time, or the emulator has ended: then without a text.
        """
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(pidfd, select.POLLIN)
        while not (found := split(self._data)):
            if self._data[:1] == b"E" and self._data[1:2].isdigit():
                number, _, text = self._data[1:].partition(b" ")
                raise Refused(int(number), text.decode("utf-8", "replace"))
            ready = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
            if not ready:
                raise IsolationError(f"the machine sent no message within {timeout_s:.0f} s")
            piece = self._heard() if self._sock.fileno() in ready else b""
            if not piece:
                raise IsolationError("")
            self._data += piece
        word, self._data = found
        return word

    def _heard(self) -> bytes:
        """Nothing where the emulator has ended, also with something of ours unread."""
        try:
            return self._sock.recv(_PIECE)
        except ConnectionResetError:
            return b""

    def carry(self) -> wire.Socket:
        """From now on requests with descriptors go through; the socket to send them on."""
        ours, theirs = wire.socketpair()
        carrier = Carrier(self._sock.fileno(), theirs, is_host=True)
        carrier.feed(self._data)
        self._thread = threading.Thread(
            target=self._run, args=(carrier, theirs), name="ringfence-line", daemon=True
        )
        self._thread.start()
        return ours

    def _run(self, carrier: Carrier, control: wire.Socket) -> None:
        try:
            carrier.run()
        finally:
            control.close()
            self._sock.close()

    def close(self) -> None:
        """Wait for the thread, whose sockets are closed; or close what nobody carries."""
        if self._thread is None:
            self._sock.close()
        elif self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
