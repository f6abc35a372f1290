"""A channel of a serial link: its local descriptor, and its flow control."""

from __future__ import annotations

WINDOW = 1 << 18

# Kinds of descriptors, from the host's side.
PACKETS, BYTES, READ, WRITE, BLOB = b"p", b"b", b"r", b"w", b"f"


class Channel:
    """A local descriptor with a counterpart on the other side.

    Attributes:
        source, sink: Descriptors to read and send, and to write received data to. -1: the other direction only.
        room: Bytes that may be sent.
        outputs: Channels whose data must arrive before an answer on this one: the reader of a process's end
            reads no further.
        passed: Bytes passed on, to the other side or to the sink.
    """

    def __init__(self, number: int, kind: bytes, *, source: int = -1, sink: int = -1) -> None:
        self.number, self.kind = number, kind
        self.source, self.sink = source, sink
        self.room = self.allowed = WINDOW
        self.waiting = bytearray()
        self.packets: list[bytes] = []
        self.ends = False  # the other side has sent all
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
        """Return whether all data was passed on, or none can be any more."""
        return all(out.passed >= count or self._is_closed(out) for out, count in self.due)

    def _is_closed(self, out: Channel) -> bool:
        return (out.sink if self._is_host else out.source) < 0
