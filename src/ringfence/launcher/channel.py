"""One channel of a line: which descriptor of ours it ends in, and how much may be sent on it."""

from __future__ import annotations

WINDOW = 1 << 18

# What a descriptor is, seen by the host.
PACKETS, BYTES, READ, WRITE, BLOB = b"p", b"b", b"r", b"w", b"f"


class Channel:
    """One descriptor of ours that the other side has the likes of.

    Attributes:
        source, sink: What we read and send; where we write what comes. -1: it goes the other way only.
        room: So many bytes may be sent.
        outputs: Channels whose data an answer on this one comes after: who reads that a process has ended
            reads no further.
        passed: So many bytes were passed on, to the other side or to the sink.
    """

    def __init__(self, number: int, kind: bytes, *, source: int = -1, sink: int = -1) -> None:
        self.number, self.kind = number, kind
        self.source, self.sink = source, sink
        self.room = self.allowed = WINDOW
        self.waiting = bytearray()
        self.packets: list[bytes] = []
        self.ends = False  # the other side has said all
        self.beside: list[Channel] = []  # blobs that go back before the first answer
        self.outputs: list[Channel] = []
        self.passed = 0

    @property
    def has_waiting(self) -> bool:
        return bool(self.packets or self.waiting)


class Held:
    """An answer that waits for output which came before it.

    However long that takes: else who reads that a process has ended would never read it. What nobody
    reads finds room in its pipe, where that may grow; see `channels.LineEnd`.

    Args:
        due: Channels, and what each is to have `passed` by then.
    """

    def __init__(self, due: list[tuple[Channel, int]], *, is_host: bool) -> None:
        self.due, self._is_host = due, is_host

    def is_over(self) -> bool:
        """Whether all of it was passed on, or can be no more."""
        return all(out.passed >= count or self._is_closed(out) for out, count in self.due)

    def _is_closed(self, out: Channel) -> bool:
        return (out.sink if self._is_host else out.source) < 0
