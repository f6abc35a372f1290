"""Reading what comes back from the launcher and from agents inside sandboxes."""

from __future__ import annotations

import _socket as socket
import _struct as struct
import errno
import os

from ...errors import IsolationError, SandboxLost
from ...launcher import wire
from .host.facts import out_of_files

SEND_S = 10.0
"""An agent always reads. One that a guest has stopped or replaced must not keep the host's threads."""


def bound_sends(sock: wire.Socket) -> None:
    """Let a send fail with EAGAIN when the other end does not read for `SEND_S`: socket(7)."""
    limit = struct.pack("=qq", int(SEND_S), 0)  # struct timeval
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


class Refused(OSError):  # noqa: N818  (it says what happened)
    """Refusal by the launcher or agent: errno, and a text that names the step."""


def answer(sock: wire.Socket, timeout_s: float | None) -> tuple[bytes, list[int]]:
    """Read one answer: the body behind "O", and its descriptors.

    Raises:
        Refused: It was "E".
        ResourceExhausted: It was "E", for the descriptors that the guests of this user have in flight.
        SandboxLost: The other end closed without an answer, or sent nonsense.
        IsolationError: Nothing came in time.
    """
    sock.settimeout(timeout_s)
    try:
        data, fds = wire.receive_raw(sock)
    except TimeoutError as exc:
        raise IsolationError(
            f"no answer within {timeout_s} s", hint="the host may be overloaded"
        ) from exc
    if data[:1] == b"O":
        return data[1:], fds
    if data[:5] == b"READY":
        return data[5:], fds
    for fd in fds:
        os.close(fd)
    if data[:1] == b"E":
        number, _, text = data[1:].partition(b" ")
        prefix = b"[Errno %b] " % number  # of an OSError's own words, which it gets again
        refusal = Refused(int(number), text.replace(prefix, b"", 1).decode("utf-8", "replace"))
        if refusal.errno == errno.ETOOMANYREFS and (problem := out_of_files(refusal)):
            raise problem from refusal
        raise refusal
    raise SandboxLost("the process of the sandbox has ended", hint="create a new sandbox")
