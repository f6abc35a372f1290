"""What the daemon says on stderr: a line each, for people on a terminal, else in JSON."""

from __future__ import annotations

import json
import logging
import os
import queue
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..model.event import Event
    from ..sessions.events import Events

LEVELS = ("debug", "info", "warning", "error")
FACTS = "facts"
"""The attribute of a record that has its ids and numbers: `logger.info(text, extra={FACTS: {...}})`."""

_MOST_LINES = 10_000
_MOMENT_S = 1.0

_events = logging.getLogger("ringfence.sandboxes")


class JsonLines(logging.Formatter):
    """One object a line; JSON escapes whatever a client or a guest chose."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        form = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FACTS, {}),
        }
        if record.exc_info:
            form["error"] = self.formatException(record.exc_info)
        return json.dumps(form, separators=(",", ":"), default=str)


class Readable(logging.Formatter):
    """Time, level, text, and the facts behind it; control characters escaped."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        now = time.strftime("%H:%M:%S", time.localtime(record.created))
        facts = " ".join(f"{key}={value!s}" for key, value in getattr(record, FACTS, {}).items())
        line = f"{now} {record.levelname.lower():<7} {record.getMessage()} {facts}".rstrip()
        line = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in line)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class Aside(logging.Handler):
    """Writes to stderr from a thread of its own: a reader that does not read stops nobody else.

    What is more than it holds is dropped, and counted in the next line that is not.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines: queue.Queue[str | None] = queue.Queue(_MOST_LINES)
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="ringfence-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler.emit`."""
        try:
            if self._dropped:
                setattr(record, FACTS, {**getattr(record, FACTS, {}), "dropped": self._dropped})
            self._lines.put_nowait(self.format(record) + "\n")
            self._dropped = 0
        except queue.Full:
            self._dropped += 1

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                os.write(2, line.encode("utf-8", "backslashreplace"))
            except OSError:
                pass  # nobody reads any more

    def flush(self) -> None:
        """Everything said so far is written, or is too much for its reader within a moment."""
        try:
            self._lines.put(None, timeout=_MOMENT_S)
        except queue.Full:
            return
        self._thread.join(_MOMENT_S)
        if not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="ringfence-log", daemon=True)
            self._thread.start()


def set_up(level: str) -> None:
    """Say everything of at least that level on stderr."""
    handler = Aside()
    handler.setFormatter(Readable() if sys.stderr.isatty() else JsonLines())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    # What uvicorn says of each connection is said better by the requests' own lines.
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, root.level))


def follow(events: Events) -> None:
    """Say what happens to sandboxes, where anybody hears it."""
    if _events.isEnabledFor(logging.INFO):
        events.listen(_say)


def _say(event: Event) -> None:
    facts = {"sandbox": event.sandbox_id, "session": event.session_id, "client": event.client_id}
    if event.reason:
        facts["reason"] = event.reason
    _events.info("sandbox %s", event.kind, extra={FACTS: {**facts, **event.details}})
