"""A live interpreter in a sandbox: cells share its variables, functions and working directory."""

from __future__ import annotations

import os
import re
import secrets
import select
import threading
import time
from typing import Protocol

from ..errors import ExecError, InvalidRequest, LifecycleError, RingfenceError, Unsupported
from ..model.base import checks
from ..model.base.helpful import helpful
from .execution import Cell, CellError, Execution
from .frames import JUPYTER, BrokenFrameError, Reader, argv_of, kernel_of, request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import Any, TypedDict, Unpack

    from .execution import Log, Result

    class Hosting(Protocol):
        """A sandbox, of this machine or of a server."""

        @property
        def start(self) -> Callable[..., Any]:
            """As `Sandbox.start`."""
            ...

    Text = Callable[[str], object]
    Callbacks = tuple[Text | None, Text | None, Callable[[Result], object] | None]

    class CellParts(TypedDict, total=False):
        """Options of `Context.run`."""

        timeout_s: float | None
        stdin: str | Iterable[str] | None
        on_stdout: Text | None
        on_stderr: Text | None
        on_result: Callable[[Result], object] | None
        on_error: Callable[[CellError], object] | None
        on_input: Callable[[str], str | None] | None


PYTHON = "python"
BASH = "bash"
NODE = "node"
R = "r"
JAVA = "java"
LANGUAGES = (PYTHON, BASH, NODE, R, JAVA)
LANGUAGE = re.compile(f"({'|'.join(LANGUAGES)})|{JUPYTER}[A-Za-z0-9._+-]{{1,100}}")
LANGUAGE_WORDS = f"{', '.join(LANGUAGES)} or {JUPYTER}KERNEL"
_ALSO = {
    "js": NODE,
    "javascript": NODE,
    "nodejs": NODE,
    "sh": BASH,
    "shell": BASH,
    "rscript": R,
    "jshell": JAVA,
    "py": PYTHON,
    "python3": PYTHON,
}
LISTS_VARIABLES = (PYTHON, NODE)
MOST_VARIABLES_BYTES = 2 << 20
OPTIONS = {"timeout_s", "stdin", "on_stdout", "on_stderr", "on_result", "on_error", "on_input"}
START_S = 60.0
GRACE_S = 3.0  # from an interrupt to the kill
_LONGEST_S = 86_400.0  # poll(2) takes milliseconds as an int: 24 days
_SEND_S = 30.0
_KEPT_BYTES = 1 << 16  # of its output, beside what its cells have


@helpful
class Context:
    """An interpreter that waits for its next cell. A context manager: leaving it ends it.

    Every method may be called from any thread; cells run one after the other.

    Attributes:
        id: Of the exec that runs it. `restart` changes it.
        language: `python`, `bash`, `node`, `r` or `java`; `jupyter:NAME` of a kernel of Jupyter's.
    """

    def __init__(
        self,
        sandbox: Hosting,
        language: str = PYTHON,
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        if not isinstance(language, str) or not LANGUAGE.fullmatch(language):
            if meant := _ALSO.get(str(language).lower()):
                checks.refuse(
                    "language", f"must be {LANGUAGE_WORDS}, not {language!r}", f"use {meant}"
                )
            checks.choice(language, "language", LANGUAGES, LANGUAGE_WORDS)
        self.language: str = language
        self._sandbox = sandbox
        self._options = {"cwd": cwd, "env": env}
        self._turn = threading.Lock()
        self._sending = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        inbox = _Inbox()
        process = self._sandbox.start(
            argv_of(self.language),
            stream_stdin=True,
            on_stdout=inbox.feed,
            max_output_bytes=_KEPT_BYTES,
            **self._options,
        )
        self._process, self._inbox = process, inbox
        self.id: str = process.id
        _at_end(process, inbox.end)
        try:
            try:
                self._send(kernel_of(self.language))
            except RingfenceError:
                if not inbox.ready.wait(GRACE_S):  # it has ended, and says why
                    raise
            if not inbox.ready.wait(START_S):
                raise ExecError(f"the context did not start within {START_S:.0f} s")
            if inbox.reason:
                raise ExecError(f"the context did not start: {inbox.reason}")
        except BaseException as exc:
            self._kill()
            if isinstance(exc, ExecError):
                process.wait(START_S)  # raises what kept it from starting, such as its `cwd`
            raise

    # -- copies in forks ------------------------------------------------------------------------

    def hold(self) -> bool:
        """Keep cells from beginning until `let_go`; False: one runs."""
        return self._turn.acquire(blocking=False)

    def let_go(self) -> None:
        """See `hold`."""
        self._turn.release()

    def copied(self, sandbox: Hosting, start: Callable[[Callable[[bytes], None]], Any]) -> Context:
        """Return the context of a copy of this one's process.

        Args:
            sandbox: Where it is.
            start: Lets the copy run, its output given to a callback; returns the process.

        Raises:
            ExecError: The copy does not answer.
        """
        context = object.__new__(Context)
        context.language, context._options = self.language, self._options
        context._sandbox = sandbox
        context._turn, context._sending = threading.Lock(), threading.Lock()
        context.go_on_as(start)
        return context

    def go_on_as(self, start: Callable[[Callable[[bytes], None]], Any]) -> None:
        """Take a copy of a process of this context, made at an earlier moment, for its own.

        Args:
            start: See `copied`.

        Raises:
            ExecError: The copy does not answer.
        """
        with self._turn:
            inbox = _Inbox()
            process = start(inbox.feed)
            self._process, self._inbox, self.id = process, inbox, process.id
            _at_end(process, inbox.end)
            try:
                self._send(request("copied"))
                if not inbox.ready.wait(START_S) or inbox.reason:
                    raise ExecError(f"the copy of a context did not answer: {inbox.reason}")
            except BaseException:
                self._kill()
                raise

    # -- running ------------------------------------------------------------------------------

    def run(
        self,
        code: str,
        *,
        timeout_s: float | None = None,
        stdin: str | Iterable[str] | None = None,
        on_stdout: Text | None = None,
        on_stderr: Text | None = None,
        on_result: Callable[[Result], object] | None = None,
        on_error: Callable[[CellError], object] | None = None,
        on_input: Callable[[str], str | None] | None = None,
    ) -> Execution:
        """Run a cell to its end. An exception in it is a result, not an error.

        Args:
            timeout_s: Then the cell is interrupted, and variables are kept. A cell that does not
                react within 3 s is killed with its context, and `error` says so.
            stdin: Lines for `input()`.
            on_stdout, on_stderr, on_result, on_error: Called in this thread as it happens.
            on_input: Called with the prompt of `input()`; returns the line, None for its end.

        Raises:
            InvalidRequest: An argument is malformed; nothing ran.
            LifecycleError: The context has ended.
        """
        return self.follow(
            Turn(),
            code,
            timeout_s=timeout_s,
            stdin=stdin,
            on_stdout=on_stdout,
            on_stderr=on_stderr,
            on_result=on_result,
            on_error=on_error,
            on_input=on_input,
        )

    def follow(self, turn: Turn, code: str, **options: Unpack[CellParts]) -> Execution:
        """Run a cell that `abandon` can end from another thread; otherwise as `run`."""
        check_cell(code, timeout_s := options.get("timeout_s"))
        check_callables(options)
        answer = options.get("on_input") or answers(options.get("stdin"))
        callbacks = (options.get("on_stdout"), options.get("on_stderr"), options.get("on_result"))
        with self._turn:
            if turn.is_abandoned:
                return Execution()
            if getattr(self._sandbox, "state", "") == "suspended":
                raise LifecycleError("run: the sandbox is suspended", hint="resume it first")
            cell = turn.cell = self._open()
            self._send(request("run", cell=cell.id, code=code, input=answer is not None))
            if turn.is_abandoned:
                self._interrupt(cell)
            try:
                self._follow(cell, timeout_s, callbacks, answer)
            except BaseException:  # of a callback, or Ctrl-C
                self._stop(cell)
                raise
            finally:
                self._inbox.cell = None
        on_error = options.get("on_error")
        if cell.execution.error is not None and on_error:
            on_error(cell.execution.error)
        return cell.execution

    def abandon(self, turn: Turn) -> None:
        """Interrupt a cell whose caller has gone, or do not run it at all."""
        turn.is_abandoned = True
        if turn.cell is not None and not turn.cell.is_done:
            self._interrupt(turn.cell)

    def _open(self) -> Cell:
        if self._inbox.reason:
            raise LifecycleError(
                f"the context has ended: {self._inbox.reason}",
                hint="restart() gives it a fresh interpreter",
            )
        cell = Cell(secrets.token_hex(8))
        self._inbox.cell = cell
        if self._inbox.reason:  # it ended meanwhile
            cell.fail(CellError("ContextEnded", self._inbox.reason))
        return cell

    def _follow(
        self,
        cell: Cell,
        timeout_s: float | None,
        callbacks: Callbacks,
        answer: Callable[[str], str | None] | None,
    ) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            is_over = cell.is_done
            logs, results, prompts = cell.wait(left, wants_pieces=any(callbacks))
            tell(logs, results, callbacks)
            self._answer(prompts, answer, deadline)
            if is_over:
                return
            if deadline is not None and time.monotonic() >= deadline and not cell.is_done:
                deadline = None
                self._time_out(cell, timeout_s)

    def _answer(
        self, prompts: list[str], answer: Callable[[str], str | None] | None, deadline: float | None
    ) -> None:
        """Answer prompts, until the deadline at most: a program that asks need not read answers."""
        for prompt in prompts:
            text = answer(prompt) if answer else None
            left = _SEND_S if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                self._send(request("answer", text=text), min(_SEND_S, left))
            except ExecError:
                if deadline is None or time.monotonic() < deadline:
                    raise
                return

    def _time_out(self, cell: Cell, timeout_s: float | None) -> None:
        cell.time_out(timeout_s, is_alive=self._stop(cell))

    def _stop(self, cell: Cell) -> bool:
        """Interrupt a cell, and kill the context if that does not end it; whether it still lives."""
        self._interrupt(cell)
        until = time.monotonic() + GRACE_S
        while not cell.is_done and time.monotonic() < until:
            cell.wait(until - time.monotonic(), wants_pieces=False)
        if cell.is_done and not self._inbox.reason:
            return True
        self._kill()
        cell.fail(CellError("ContextEnded", "the context was killed"))
        return False

    def variables(self, *, timeout_s: float = 30.0) -> list[dict[str, str]]:
        """List the variables of the cells: `name`, `type` and a short `value`.

        Raises:
            LifecycleError: The context has ended.
            ExecError: A `repr` failed or took too long.
            Unsupported: The language is neither Python nor Node.
        """
        if self.language not in LISTS_VARIABLES:
            raise Unsupported(
                f"variables of {self.language} are not listed", hint="a cell can print them"
            )
        with self._turn:
            cell = self._open()
            self._send(request("variables", cell=cell.id))
            try:
                self._follow(cell, timeout_s, (None, None, None), None)
            finally:
                self._inbox.cell = None
        error, results = cell.execution.error, cell.execution.results
        if error is not None or not results:
            raise ExecError(f"variables cannot be listed: {error.value if error else 'no answer'}")
        if len(results[-1].data.get("application/json", b"")) > MOST_VARIABLES_BYTES:
            raise ExecError(f"the list of variables is over {MOST_VARIABLES_BYTES} bytes long")
        return variables_of(results[-1].json)

    # -- ending -------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the cell that runs; variables are kept. Nothing if none runs."""
        cell = self._inbox.cell
        if cell is not None:
            self._interrupt(cell)

    def _interrupt(self, cell: Cell) -> None:
        try:
            self._send(request("interrupt", cell=cell.id), GRACE_S)
        except RingfenceError:
            pass  # it has ended, or does not read: whoever waits kills it

    def restart(self) -> None:
        """End the interpreter with all that it started, and begin a fresh one."""
        self._kill()
        with self._turn:  # the cell that ran has ended by that
            self._begin()

    def close(self) -> None:
        """End it with everything that it started; idempotent."""
        self._kill()

    def _kill(self) -> None:
        process = self._process
        self._inbox.end("it was closed")
        try:
            process.kill()
            process.wait(START_S)
        except (RingfenceError, TimeoutError):
            pass  # its sandbox has ended, and it with it

    @property
    def running(self) -> bool:
        """True until the interpreter has ended."""
        return not self._inbox.reason

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Context {self.language} {self.id}>"

    # -- the wire -----------------------------------------------------------------------------

    def _send(self, data: bytes, most_s: float = _SEND_S) -> None:
        """Write a request, waiting for so long at most: a program inside may have stopped reading.

        Raises:
            ExecError: It does not read.
        """
        if not self._sending.acquire(timeout=most_s):
            raise ExecError("the context does not read its requests", hint="restart() it")
        try:
            _write_within(self._process.stdin, data, time.monotonic() + most_s)
        finally:
            self._sending.release()


def check_options(options: Mapping[str, object]) -> None:
    """Refuse keywords that `run_code` does not have.

    Raises:
        InvalidRequest: There is one; the hint names what is meant.
    """
    if not options.keys() <= OPTIONS:
        from ..model import mistakes

        mistakes.refuse_names(
            "run_code", [each for each in options if each not in OPTIONS], OPTIONS
        )


def check_cell(code: str, timeout_s: float | None, field: str = "timeout_s") -> None:
    """Check what every kind of context is given to run.

    Raises:
        InvalidRequest: An argument is malformed.
    """
    checks.text(code, "code")
    if timeout_s is not None:
        checks.number(timeout_s, field, 0.001, 366 * 86_400)


def check_callables(options: Mapping[str, object]) -> None:
    """Refuse what cannot be called before the cell runs."""
    for name, given in options.items():
        if name.startswith("on_") and given is not None and not callable(given):
            what = f"must be callable, not {type(given).__name__}"
            checks.refuse(name, what, "a function of one argument")


class Turn:
    """The cell of one caller, before and while it runs."""

    def __init__(self) -> None:
        self.cell: Cell | None = None
        self.is_abandoned = False


class _Inbox:
    """Frames of a kernel, on their way to the cell that runs. Never blocks, holds one frame."""

    def __init__(self) -> None:
        self._reader = Reader()
        self.ready = threading.Event()
        self.reason = ""  # for the end, once it has ended
        self.cell: Cell | None = None

    def feed(self, data: bytes) -> None:
        """Take what the kernel wrote."""
        if self.reason:
            return
        try:
            for kind, cell_id, name, payload in self._reader.feed(data):
                cell = self.cell
                if kind == "hello":
                    self.ready.set()
                elif cell is not None and cell.id == cell_id:
                    cell.take(kind, name, payload)
        except BrokenFrameError as exc:
            self.end(f"its output is damaged ({exc}); a program inside may have written it")

    def end(self, reason: str) -> None:
        """It has ended: tell the cell that runs."""
        self.reason = self.reason or reason
        self.ready.set()
        cell = self.cell
        if cell is not None:
            cell.fail(CellError("ContextEnded", f"{self.reason}; its variables are lost"))


def _at_end(process: Any, tell: Callable[[str], None]) -> None:
    """Call `tell` with the reason once the process has ended."""

    def told(result: Callable[[], Any]) -> None:
        try:
            ended = result()
        except Exception as exc:  # noqa: BLE001  of the exec, told to whoever runs a cell
            tell(f"its process failed: {exc}")
            return
        how = "was killed" if ended.exit_code is None else f"exited with code {ended.exit_code}"
        if ended.oom_killed:
            how = "ran out of memory"
        last = ended.stderr[-500:].decode("utf-8", "replace").strip()
        tell(f"its process {how}{': ' + last if last else ''}")

    process.future.add_done_callback(lambda done: told(done.result))


def _write_within(stdin: Any, data: bytes, deadline: float) -> None:
    view = memoryview(data)
    while view := view[stdin.write_some(view) :]:
        fd = stdin.duplicate()
        try:
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            if not poll.poll(max(0.0, min(deadline - time.monotonic(), _LONGEST_S)) * 1000):
                raise ExecError("the context does not read its requests", hint="restart() it")
        finally:
            os.close(fd)


def variables_of(form: object) -> list[dict[str, str]]:
    """Read the JSON list that a kernel sent as a result."""
    return [
        {key: str(each.get(key, "")) for key in ("name", "type", "value")}
        for each in (form if isinstance(form, list) else ())
        if isinstance(each, dict)
    ]


def tell(logs: list[Log], results: list[Result], callbacks: Callbacks) -> None:
    """Call the callbacks of a cell: for stdout, stderr and results."""
    on_stdout, on_stderr, on_result = callbacks
    for log in logs:
        callback = on_stdout if log.stream == "stdout" else on_stderr
        if callback:
            callback(log.text)
    for result in results:
        if on_result:
            on_result(result)


def answers(stdin: str | Iterable[str] | None) -> Callable[[str], str | None] | None:
    """Return a function that gives one line after the other; None without lines."""
    if stdin is None:
        return None
    lines: Iterator[str] = iter(stdin.splitlines() if isinstance(stdin, str) else stdin)

    def answer(_prompt: str) -> str | None:
        line = next(lines, None)
        if line is not None and not isinstance(line, str):
            raise InvalidRequest("lines of stdin must be text", field="stdin")
        return line

    return answer
