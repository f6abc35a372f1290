"""Outcome of a cell: output, results by MIME type, error. Everything is bounded as it comes in."""

from __future__ import annotations

import base64
import codecs
import json
import threading
import time
from dataclasses import dataclass, field

from ..errors import InvalidRequest
from ..model.base.helpful import helpful

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MOST_OUTPUT_BYTES = 16 << 20
MOST_LOGS = 20_000
MOST_RESULTS = 1_000
MOST_RESULT_BYTES = 64 << 20
MOST_PROMPTS = 100  # that wait for an answer: each thread of a program asks one at a time
MOST_PARTS = 32
MOST_PART_BYTES = 32 << 20  # of one result
_PIECE_CHARS = 1 << 16
CHART = "application/vnd.ringfence.chart+json"
_BINARY = ("image/png", "image/jpeg", "application/pdf")


@dataclass(frozen=True)
class Result:
    """A value that a cell showed, in every MIME type that it has.

    Attributes:
        data: Bytes by MIME type.
        is_main: Value of the cell's last expression; otherwise shown by `display` or a figure.
    """

    data: dict[str, bytes] = field(repr=False)
    is_main: bool = False

    def _text_of(self, mime: str) -> str | None:
        data = self.data.get(mime)
        return None if data is None else data.decode("utf-8", "replace")

    @property
    def text(self) -> str | None:
        """`text/plain`: the `repr`."""
        return self._text_of("text/plain")

    @property
    def html(self) -> str | None:
        """`text/html`, such as a table of pandas."""
        return self._text_of("text/html")

    @property
    def markdown(self) -> str | None:
        """`text/markdown`."""
        return self._text_of("text/markdown")

    @property
    def latex(self) -> str | None:
        """`text/latex`."""
        return self._text_of("text/latex")

    @property
    def svg(self) -> str | None:
        """`image/svg+xml`."""
        return self._text_of("image/svg+xml")

    @property
    def javascript(self) -> str | None:
        """`application/javascript`."""
        return self._text_of("application/javascript")

    @property
    def png(self) -> bytes | None:
        """`image/png`, such as a figure of matplotlib."""
        return self.data.get("image/png")

    @property
    def jpeg(self) -> bytes | None:
        """`image/jpeg`."""
        return self.data.get("image/jpeg")

    @property
    def json(self) -> Any:
        """`application/json`, decoded; None where there is none.

        Raises:
            InvalidRequest: The sandbox sent something else under that name.
        """
        return self._json_of("application/json")

    @property
    def chart(self) -> Any:
        """Data of a matplotlib figure: `type`, `title`, `elements`, axes; None where there is none.

        Raises:
            InvalidRequest: The sandbox sent something else under that name.
        """
        return self._json_of(CHART)

    def _json_of(self, mime: str) -> Any:
        data = self.data.get(mime)
        try:
            return None if data is None else json.loads(data)
        except (ValueError, RecursionError) as exc:
            raise InvalidRequest(f"the result's JSON cannot be decoded: {exc}") from exc

    @classmethod
    def from_json(cls, form: Any) -> Result:
        """Read the form of `to_json`."""
        data = {
            mime: base64.b64decode(text) if mime in _BINARY else text.encode("utf-8", "replace")
            for mime, text in form["data"].items()
        }
        return cls(data, is_main=form["is_main"])

    def to_json(self) -> dict[str, Any]:
        """Its JSON form: text as it is, images in base64."""
        data = {
            mime: base64.b64encode(each).decode()
            if mime in _BINARY
            else each.decode("utf-8", "replace")
            for mime, each in self.data.items()
        }
        return {"data": data, "is_main": self.is_main}

    def __repr__(self) -> str:
        return f"<Result {self.text!r:.200} {sorted(self.data)}>"


@dataclass(frozen=True)
class CellError:
    """Exception that ended a cell, or what ended its kernel."""

    name: str
    value: str
    traceback: str = field(default="", repr=False)


@dataclass
class Log:
    """A piece of output: `stream` is `stdout` or `stderr`."""

    stream: str
    text: str


@helpful
@dataclass
class Execution:
    """How a cell went.

    Attributes:
        logs: Output in the order in which it was written.
        error: None if the cell ended normally.
        execution_count: How many cells the kernel has run, this one included; None if the kernel
            did not get to its end.
        dropped_bytes: Output beyond the limit, which was not kept.
        dropped_results: Results beyond the limit.
        timed_out: The cell took longer than `timeout_s`; `error` says whether variables are kept.
    """

    results: list[Result] = field(default_factory=list)
    logs: list[Log] = field(default_factory=list)
    error: CellError | None = None
    execution_count: int | None = None
    duration_s: float = 0.0
    dropped_bytes: int = 0
    dropped_results: int = 0
    timed_out: bool = False

    @property
    def text(self) -> str | None:
        """Text of the last expression's value; None if it has none."""
        return next((each.text for each in reversed(self.results) if each.is_main), None)

    @property
    def stdout(self) -> str:
        """All that was kept of standard output."""
        return "".join(each.text for each in self.logs if each.stream == "stdout")

    @property
    def stderr(self) -> str:
        """All that was kept of standard error."""
        return "".join(each.text for each in self.logs if each.stream == "stderr")

    def to_json(self) -> dict[str, Any]:
        """Its JSON form."""
        return {
            "results": [each.to_json() for each in self.results],
            "logs": [{"stream": each.stream, "text": each.text} for each in self.logs],
            "error": None if self.error is None else dict(vars(self.error)),
            "execution_count": self.execution_count,
            "duration_s": self.duration_s,
            "dropped_bytes": self.dropped_bytes,
            "dropped_results": self.dropped_results,
            "timed_out": self.timed_out,
        }


class Cell:
    """A cell that runs. One thread brings frames, another one follows.

    Args:
        forgets: Logs and results are dropped once the follower has them.

    Attributes:
        execution: Complete once `is_done`.
    """

    def __init__(self, cell_id: str, *, forgets: bool = False) -> None:
        self.id, self._forgets = cell_id, forgets
        self.execution = Execution()
        self.is_done = False
        self._changed = threading.Condition()
        self._began = time.monotonic()
        self._decoders = {
            name: codecs.getincrementaldecoder("utf-8")("replace") for name in ("out", "err")
        }
        self._parts: dict[str, bytes] = {}
        self._part_bytes = self._output_bytes = self._result_bytes = 0
        self._prompts: list[str] = []
        self._told = [0, 0]  # logs and results that the follower has

    def take(self, kind: str, name: str, payload: bytes) -> None:
        """Add a frame. Unknown kinds are passed over."""
        with self._changed:
            if self.is_done:
                return
            if kind in self._decoders:
                self._add_output(kind, payload)
            elif kind == "part":
                self._part_bytes += len(payload)
                if len(self._parts) < MOST_PARTS and self._part_bytes <= MOST_PART_BYTES:
                    self._parts[name] = payload
            elif kind in ("main", "display", "error"):
                self._add_result(kind)
            elif kind == "input" and len(self._prompts) < MOST_PROMPTS:
                self._prompts.append(payload[:_PIECE_CHARS].decode("utf-8", "replace"))
            elif kind == "done":
                self._finish(payload)
            self._changed.notify_all()

    def _add_output(self, kind: str, payload: bytes) -> None:
        execution = self.execution
        room = MOST_OUTPUT_BYTES - self._output_bytes
        logs = execution.logs
        if room <= 0 or len(logs) >= MOST_LOGS:
            execution.dropped_bytes += len(payload)
            return
        execution.dropped_bytes += max(0, len(payload) - room)
        self._output_bytes += len(payload)
        text = self._decoders[kind].decode(payload[:room])
        stream = f"std{kind}"
        untold = len(logs) > self._told[0]
        if untold and logs[-1].stream == stream and len(logs[-1].text) < _PIECE_CHARS:
            logs[-1].text += text
        elif text:
            logs.append(Log(stream, text))

    def _add_result(self, kind: str) -> None:
        parts, self._parts, size, self._part_bytes = self._parts, {}, self._part_bytes, 0
        execution = self.execution
        if kind == "error":
            text = {key: parts.get(key, b"").decode("utf-8", "replace") for key in _ERROR}
            execution.error = CellError(**text)
            return
        self._result_bytes += size
        if len(execution.results) >= MOST_RESULTS or self._result_bytes > MOST_RESULT_BYTES:
            execution.dropped_results += 1
            return
        execution.results.append(Result(parts, is_main=kind == "main"))

    def _finish(self, payload: bytes) -> None:
        count, _, dropped = payload[:40].partition(b" ")
        if count.isdigit() and dropped.isdigit():
            self.execution.execution_count = int(count)
            self.execution.dropped_bytes += int(dropped)
        self._end()

    def _end(self) -> None:
        self.is_done = True
        self.execution.duration_s = time.monotonic() - self._began

    @property
    def is_whole(self) -> bool:
        """True if no part of a result waits for the rest."""
        return not self._parts

    def time_out(self, timeout_s: float | None, *, is_alive: bool) -> None:
        """Set the error of a cell that was stopped after `timeout_s`.

        Args:
            is_alive: The interrupt was enough; otherwise its context was killed.
        """
        value = f"the cell took longer than {timeout_s} s"
        if is_alive:
            value += " and was interrupted; variables are kept"
        else:
            value += (
                " and did not react to an interrupt: the context was killed, variables are lost"
            )
        self.execution.timed_out = True
        trace = self.execution.error.traceback if self.execution.error else ""
        self.execution.error = CellError("CellTimeout", value, trace)

    def fail(self, error: CellError) -> None:
        """End the cell from outside; one that is done stays as it is."""
        with self._changed:
            if not self.is_done:
                self.execution.error = error
                self._end()
                self._changed.notify_all()

    def wait(
        self, seconds: float | None, *, wants_pieces: bool
    ) -> tuple[list[Log], list[Result], list[str]]:
        """Wait for something new or the end; return the logs, results and prompts that are new.

        Args:
            wants_pieces: Output and results end the wait too, not only prompts and the end.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._has_news(wants_pieces), seconds)
            logs, results = self.execution.logs, self.execution.results
            news = logs[self._told[0] :], results[self._told[1] :]
            if self._forgets:
                self.execution.logs, self.execution.results = [], []
            elif wants_pieces or self.is_done:
                self._told = [len(logs), len(results)]
            prompts, self._prompts = self._prompts, []
            return *news, prompts

    def _has_news(self, wants_pieces: bool) -> bool:
        execution, (logs, results) = self.execution, self._told
        has_pieces = len(execution.logs) > logs or len(execution.results) > results
        return self.is_done or bool(self._prompts) or (wants_pieces and has_pieces)


_ERROR = ("name", "value", "traceback")
