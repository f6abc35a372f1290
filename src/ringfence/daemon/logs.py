"""Log messages of the daemon on stderr: readable lines on a terminal, else JSON lines."""

from __future__ import annotations

import json
import logging
import os
import queue
import sys
import threading
import time
from contextlib import suppress

from ..model.event import CONFIG

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
    """JSON formatter, one object a line; JSON escapes all text from clients and guests."""

    def format(self, record: logging.LogRecord) -> str:
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
        now = time.strftime("%H:%M:%S", time.localtime(record.created))
        facts = " ".join(f"{key}={value!s}" for key, value in getattr(record, FACTS, {}).items())
        line = f"{now} {record.levelname.lower():<7} {record.getMessage()} {facts}".rstrip()
        line = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in line)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class Sparing(logging.Filter):
    """Passes few warnings of each kind that a stranger's requests can cause, and counts the others.

    What was left out is told by the next one of its kind that passes.
    """

    _LOGGERS = ("ringfence.requests", "ringfence.api", "uvicorn")
    _AT_ONCE, _A_SECOND = 20.0, 1.0

    def __init__(self) -> None:
        super().__init__()
        self._left: dict[str, tuple[float, float, int]] = {}  # tokens, when, left out

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING or not record.name.startswith(self._LOGGERS):
            return True
        # The text before its values: there are as many as the code has.
        kind, now = f"{record.name} {record.msg}", record.created
        tokens, before, count = self._left.get(kind, (self._AT_ONCE, now, 0))
        tokens = min(self._AT_ONCE, tokens + max(0.0, now - before) * self._A_SECOND)
        if tokens < 1.0:
            self._left[kind] = tokens, now, count + 1
            return False
        self._left[kind] = tokens - 1.0, now, 0
        if count:
            setattr(record, FACTS, {**getattr(record, FACTS, {}), "left_out": count})
        return True


class Aside(logging.Handler):
    """Writes to stderr from a thread of its own: a reader that does not read stops nobody else.

    What is more than it holds is dropped, and counted in the next line that is not.
    """

    def __init__(self) -> None:
        self._lines: queue.Queue[str | None] = queue.Queue(_MOST_LINES)
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="ringfence-log", daemon=True)
        self._thread.start()
        super().__init__()  # last: from then on it is flushed when Python ends

    def emit(self, record: logging.LogRecord) -> None:
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
            with suppress(
                RuntimeError
            ):  # no thread can be started: whoever flushes is about to end
                self._thread.start()


def set_up(level: str) -> None:
    """Say everything of at least that level on stderr."""
    handler = Aside()
    handler.addFilter(Sparing())
    handler.setFormatter(Readable() if sys.stderr.isatty() else JsonLines())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    # Our access log has more than uvicorn's line for each connection.
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, root.level))


def follow(events: Events) -> None:
    """Log the events of sandboxes, if the level includes them."""
    if _events.isEnabledFor(logging.INFO):
        events.listen(_say)


def _say(event: Event) -> None:
    if event.kind == CONFIG:
        _events.info("config of the execution service changed", extra={FACTS: {**event.details}})
        return
    facts = {"sandbox": event.sandbox_id, "session": event.session_id, "client": event.client_id}
    if event.reason:
        facts["reason"] = event.reason
    _events.info("sandbox %s", event.kind, extra={FACTS: {**facts, **event.details}})
