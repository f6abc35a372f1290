"""Contexts that go on in the forks of a sandbox of this process."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import partial

from ..backends.optional import Continuable, Forkable
from ..errors import ExecError, Unsupported
from ..fork.branches import copied_processes
from ..model.calls import make_request
from ..model.fork import ForkReport
from .process import Process
from .pump import Pump

_KEPT_BYTES = 1 << 16  # of output, beside what cells have
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from ..backends.optional import ProcessTemplate, WaitingCopy
    from ..contexts import Context
    from ..model.execs.exec import ExecRequest
    from ..model.limits import Limits
    from ..model.spec import SandboxSpec


class _Held:
    """A process that stands still, and its template.

    Attributes:
        context, is_default: The context that it runs, or None.
        has_stdin: Its standard input is written by the caller.
        timeout_s: That it was started with; a copy has it anew.
    """

    context: Context | None = None
    is_default = False
    timeout_s: float | None = None

    def __init__(self, id: str, command: str, template: ProcessTemplate, has_stdin: bool) -> None:
        self.id, self.command, self.template, self.has_stdin = id, command, template, has_stdin


class LiveFork:
    """Processes of a sandbox, as its forks take them along: all contexts or none, and others one by one.

    From `stop` to `release` it stands still, so that files can be saved of the same moment.

    Args:
        sandbox: Its contexts and processes are those that were begun through this object.

    Attributes:
        is_whole: Its snapshot saves its memory too and ends it; `move` lets it go on in another one's place.
    """

    def __init__(self, sandbox: Any) -> None:
        self.is_whole = False
        self._sandbox = sandbox
        self._held: list[_Held] = []
        self._waiting: list[Context] = []  # contexts that begin no cell meanwhile

    def stop(self, processes: str, spec: SandboxSpec | None = None) -> ForkReport:
        """Stop all of it; what goes along.

        Args:
            processes: See `Sandbox.fork`.
            spec: Of the copies; None: as it is.

        Raises:
            Unsupported: Something that is required cannot be copied; all goes on.
        """
        parent = self._sandbox.id
        if processes == "none":
            return ForkReport(parent)
        try:
            return self._stop(parent, spec, is_required=processes == "required")
        except Unsupported as exc:
            self.close()
            if processes == "required":
                raise
            return ForkReport(parent, reason=exc.message)
        except BaseException:
            self.close()
            raise

    def _stop(self, parent: str, spec: SandboxSpec | None, *, is_required: bool) -> ForkReport:
        inner, name = self._sandbox._inner, self._sandbox.session.backend
        if isinstance(inner, Continuable):
            if not self._sandbox._can_move:
                raise _refused(f"a manager's session in the {name} backend copies files only", name)
            if not inner.running() and not self._sandbox.stats().pids:
                return ForkReport(parent)
            if spec is not None:
                inner.check_copy(spec)
            self._hold_all(
                inner, is_required=True
            )  # what cannot go along cannot stay behind either
            inner.hold([each.template for each in self._held])
            self.is_whole = True
            left_out: dict[str, str] = {}
        elif isinstance(inner, Forkable):
            left_out = _background(inner, is_required=is_required)
            left_out |= self._hold_all(inner, is_required=is_required)
        else:
            raise _refused(f"the {name} backend copies files only, and no running processes", name)
        contexts = tuple(each.id for each in self._held if each.context is not None)
        processes = tuple(each.id for each in self._held if each.context is None)
        goes_on = self.is_whole or bool(self._held)
        reason = "; ".join(left_out.values())
        copies = tuple(
            copy
            for each in self._held
            for copy in copied_processes(
                each.id,
                each.command,
                each.context.language if each.context else "",
                each.template.processes,
            )
        )
        return ForkReport(parent, goes_on, reason, contexts, processes, tuple(left_out), copies)

    def _hold_all(self, inner: Forkable | Continuable, *, is_required: bool) -> dict[str, str]:
        """Stop every exec that can be copied; why others cannot."""
        running = self._sandbox._its_contexts.running()
        contexts = {each.id: (each, default) for each, default in running}
        left_out: dict[str, str] = {}
        for id, command in inner.running().items():  # in the order in which they began
            if id in contexts:
                self._hold_context(inner, command, *contexts[id])
                continue
            process = self._sandbox._started.get(id)
            try:
                if process is None:
                    raise _refused(f"{id} cannot be copied: nobody would read its output")
                template = inner.template(process._pump.run)
                held = _Held(id, command, template, process.stdin is not None)
                held.timeout_s = process._pump.timeout_s
                self._held.append(held)
            except Unsupported as exc:
                if is_required:
                    raise _refused(f"{exc.message} ({command})") from exc
                left_out[f"{id} ({command})"] = exc.message
        return left_out

    def _hold_context(
        self, inner: Forkable | Continuable, command: str, context: Context, is_default: bool
    ) -> None:
        if not context.hold():
            raise _refused(f"context {context.id} runs a cell")
        self._waiting.append(context)
        template = inner.template(context._process._pump.run)
        held = _Held(context.id, command, template, has_stdin=True)
        held.context, held.is_default = context, is_default
        self._held.append(held)

    def release(self) -> None:
        """Let it go on; idempotent."""
        try:
            for held in self._held:
                held.template.release()
        finally:
            waiting, self._waiting = self._waiting, []
            for context in waiting:
                context.let_go()

    def move(self, inner: Any) -> None:
        """Have all go on, as the same objects, in the sandbox that was restored in its sandbox's place."""
        before = self._sandbox._inner
        self._sandbox._take_place(inner)
        before.move([held.template for held in self._held], inner)

    def load(self) -> None:
        """Let it go on, and begin to copy the memory that it had."""
        self.release()
        for held in self._held:
            held.template.load()

    def wait(self) -> None:
        """Wait until the memory is copied.

        Raises:
            Unsupported: That of one could not be.
        """
        for held in self._held:
            held.template.wait()

    def put_into(self, fork: Any) -> None:
        """Make a copy of each process in a fork. None runs before all are locked down."""
        with self._copies(fork) as copies:
            for held, start in copies:
                if held.context is None:
                    fork._began(start(None))
                else:
                    copied = _answering(partial(held.context.copied, fork, start))
                    fork._its_contexts.add(copied, is_default=held.is_default)

    def put_back(self, sandbox: Any) -> None:
        """Have each go on in its sandbox, which was restored, from where it was stopped."""
        with self._copies(sandbox) as copies:
            for held, start in copies:
                if held.context is None:
                    sandbox._began(start(None))
                else:
                    _answering(partial(held.context.go_on_as, start))

    @contextmanager
    def _copies(self, sandbox: Any) -> Iterator[list[tuple[_Held, Callable[..., Process]]]]:
        """Make copies that wait: of what, and what lets it run. At the end those that still wait end."""
        taken = [number for held in self._held for number in held.template.ids]
        with ExitStack() as stack:
            found: list[tuple[_Held, Callable[..., Process]]] = []
            for held in self._held:
                most = None if held.context is None else _KEPT_BYTES
                request = make_request(
                    [held.command],
                    timeout_s=held.timeout_s,
                    stream_stdin=held.has_stdin,
                    max_output_bytes=most,
                )
                copy = _Copy(held.template.copy(sandbox._inner, request, taken), request)
                stack.callback(copy.close)
                found.append((held, partial(copy.start, sandbox.spec.limits)))
            yield found

    def close(self) -> None:
        """Let go of all that is kept; copies live on, and what stands still goes on. Idempotent."""
        try:
            self.release()
        finally:
            held, self._held = self._held, []
            for each in held:
                each.template.close()


def _background(inner: Forkable, *, is_required: bool) -> dict[str, str]:
    """Why processes that belong to no exec stay behind, where there are some."""
    found = {
        each: f"{each} runs in the background and belongs to no exec"
        for each in inner.left_behind()
    }
    if found and is_required:
        raise _refused("; ".join(found.values()))
    return found


class _Copy:
    """A copy that belongs to no `Process` before `start`."""

    def __init__(self, copy: WaitingCopy, request: ExecRequest) -> None:
        self._copy, self._request, self._is_started = copy, request, False

    def start(self, limits: Limits, feed: Callable[[bytes], None] | None) -> Process:
        """Let it run."""
        self._copy.go_on()
        pump = Pump(self._copy.run, self._request, limits, feed, None)
        self._is_started = True
        return Process(pump, stdin_open=self._request.stream_stdin)

    def close(self) -> None:
        """End it, unless it was started."""
        if not self._is_started:
            self._copy.close()
            self._copy.run.close()


def _answering(begin: Callable[[], object]) -> Any:
    try:
        return begin()
    except ExecError as exc:
        raise _refused(str(exc)) from exc


def _refused(reason: str, backend: str = "native") -> Unsupported:
    return Unsupported(
        reason,
        backend=backend,
        operation="fork with processes",
        hint='processes="auto" or "none" copies the files',
    )
