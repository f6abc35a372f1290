"""Output as events: JSON lines, or server-sent events."""

from __future__ import annotations

import json

from ...errors import InvalidRequest
from ...model.base.jsonform import bytes_to_json
from ...spool.order import ERR, OUT
from ...spool.spool import NAMES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ...execs.run import Run
    from ...spool.order import Place
    from ...spool.spool import Event

NDJSON, SSE = "application/x-ndjson", "text/event-stream"
BOTH = "both"
STREAMS = (OUT, ERR)
_PIECE = 48 << 10
_BATCH = 192 << 10
_MOST_DIGITS = 18


class Lines:
    """Event stream of one reader. Not thread-safe; close it, or use it as a context manager.

    Args:
        stream: `stdout`, `stderr` or `both`.
        cursor: Where to continue: the `cursor` of the last event, or empty.
        kind: `NDJSON` or `SSE`.

    Raises:
        InvalidRequest: It is not a cursor, or lies beyond the output so far.
    """

    def __init__(self, run: Run, stream: str, cursor: str, kind: str) -> None:
        self._run, self._kind = run, kind
        self._wanted = STREAMS if stream == BOTH else (NAMES.index(stream),)
        place = place_of(run, cursor, self._wanted)
        self._follower = run.spool.follow(place, self._wanted)

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._follower.close()

    def batch(self) -> bytes:
        """All that is there now, up to a bound; empty if nothing new has come. May read from disk."""
        lines: list[bytes] = []
        size = 0
        while size < _BATCH and (event := self._follower.next(_PIECE)):
            lines += self._lines_of(event)
            size += len(lines[-1])
        return b"".join(lines)

    def _lines_of(self, event: Event) -> list[bytes]:
        common = {"seq": event.seq, "stream": NAMES[event.stream], "offset": event.offset}
        lines, dropped = [], event.dropped_bytes
        if dropped:
            at = [*event.place]
            at[event.stream] = event.offset
            told = {"seq": event.seq - dropped, "offset": event.offset - dropped, "bytes": dropped}
            lines.append(self._line("dropped", (at[OUT], at[ERR]), **{**common, **told}))
        if event.data:
            data = bytes_to_json("data", event.data)
            lines.append(self._line("output", event.place, **common, **data))
        return lines

    def heartbeat(self) -> bytes:
        """Nothing has come for a while, and the connection is to stay open."""
        if self._kind == SSE:
            return b": heartbeat\n\n"
        return self._line("heartbeat", self._follower.place)

    def last(self) -> bytes:
        """There is no more: the exec is over, or nobody wanted to wait."""
        name = "running" if self._run.running else "end"
        return self._line(name, self._follower.place, exec=self._run.view().to_json())

    def _line(self, name: str, place: Place, **fields: Any) -> bytes:
        cursor = cursor_of(place, self._wanted)
        text = json.dumps({"type": name, **fields, "cursor": cursor}, separators=(",", ":"))
        if self._kind == SSE:
            return f"id: {cursor}\nevent: {name}\ndata: {text}\n\n".encode()
        return text.encode() + b"\n"


# -- cursors ---------------------------------------------------------------------------------------


def cursor_of(place: Place, wanted: tuple[int, ...] = STREAMS) -> str:
    """Where to go on from, as clients are told: `OUT.ERR` for both streams, a number for one."""
    return ".".join(str(place[stream]) for stream in wanted)


def place_of(run: Run, text: str, wanted: tuple[int, ...] = STREAMS) -> Place:
    """Parse a cursor of `cursor_of`; empty is the beginning.

    Raises:
        InvalidRequest: It is not a cursor, or lies beyond the output so far.
    """
    parts = text.split(".") if text not in ("", "0") else ["0"] * len(wanted)
    numbers = [int(each) for each in parts if each.isdecimal() and len(each) <= _MOST_DIGITS]
    if not len(numbers) == len(parts) == len(wanted):
        what = "two numbers and a dot" if len(wanted) == 2 else "a number"
        raise InvalidRequest(f"must be {what}, not {text!r}", field="offset")
    place = dict(zip(wanted, numbers, strict=True))
    totals = run.spool.totals
    if any(offset > totals[stream] for stream, offset in place.items()):
        raise InvalidRequest(
            "is beyond the end of the output",
            field="offset",
            hint=f"the output ends at {cursor_of(totals, wanted)}",
        )
    return place.get(OUT, 0), place.get(ERR, 0)
