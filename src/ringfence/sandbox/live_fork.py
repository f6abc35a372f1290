"""Contexts that go on in the forks of a sandbox of this process."""

from __future__ import annotations

from functools import partial

from ..backends.optional import Forkable
from ..contexts.frames import argv_of
from ..errors import ExecError, Unsupported
from ..model.calls import make_request
from ..model.fork import ForkReport
from .process import Process
from .pump import Pump

_KEPT_BYTES = 1 << 16  # of output, beside what cells have
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ..backends.optional import ProcessTemplate
    from ..backends.protocol import BackendExec
    from ..contexts import Context


class LiveFork:
    """The contexts of a sandbox, as its forks take them along: every one, or none.

    From `stop` to `release` the contexts stand still, so that files can be saved of the same moment.

    Args:
        sandbox: Its contexts are those that were opened through this object.
    """

    def __init__(self, sandbox: Any) -> None:
        self._sandbox = sandbox
        self._held: list[tuple[Context, bool]] = []
        self._templates: list[ProcessTemplate] = []
        self._is_stopped = False

    def stop(self, processes: str) -> ForkReport:
        """Stop all contexts; what goes along.

        Args:
            processes: See `Sandbox.fork`.

        Raises:
            Unsupported: Something that is required cannot be copied; all goes on.
        """
        parent = self._sandbox.id
        if processes == "none":
            return ForkReport(parent)
        try:
            return self._stop(parent, is_required=processes == "required")
        except Unsupported as exc:
            self.close()
            self._held = []
            if processes == "required":
                raise
            return ForkReport(parent, reason=exc.message)
        except BaseException:
            self.close()
            raise

    def _stop(self, parent: str, *, is_required: bool) -> ForkReport:
        inner = self._sandbox._inner
        if not isinstance(inner, Forkable):
            name = self._sandbox.session.backend
            raise _refused(f"the {name} backend copies files only, and no running processes", name)
        running = dict(inner.running())
        self._is_stopped = True
        for context, is_default in self._sandbox._its_contexts.running():
            running.pop(context.id, None)
            if not context.hold():
                raise _refused(f"context {context.id} runs a cell")
            self._held.append((context, is_default))
            self._templates.append(inner.template(context._process._pump.run))
        left_out = tuple(f"{id} ({command})" for id, command in running.items())
        reason = "only contexts are copied" if left_out else ""
        if left_out and is_required:
            raise _refused(f"{reason}, and other commands run: {', '.join(left_out)}")
        contexts = tuple(context.id for context, _ in self._held)
        return ForkReport(parent, bool(contexts), reason, contexts, left_out)

    def release(self) -> None:
        """Let them go on; idempotent."""
        if self._is_stopped:
            self._is_stopped = False
            try:
                for template in self._templates:
                    template.release()
            finally:
                for context, _ in self._held:
                    context.let_go()

    def load(self) -> None:
        """Let them go on, and copy the memory that they had."""
        self.release()
        for template in self._templates:
            template.load()

    def put_into(self, fork: Any) -> None:
        """Make a copy of each context in a fork. None runs before all are locked down."""
        contexts = fork._its_contexts
        for context, is_default, start in self._copies(fork):
            copied = _answering(partial(context.copied, fork, start))
            contexts.add(copied, is_default=is_default)

    def put_back(self, sandbox: Any) -> None:
        """Have each context go on in its sandbox, which was restored, from where it was stopped."""
        for context, _, start in self._copies(sandbox):
            _answering(partial(context.go_on_as, start))

    def _copies(self, sandbox: Any) -> list[tuple[Context, bool, Callable[..., Process]]]:
        """Make copies that wait: of which context, whether it is the default one, what lets it run."""
        taken = [number for template in self._templates for number in template.ids]
        request = make_request(argv_of("python"), stream_stdin=True, max_output_bytes=_KEPT_BYTES)
        limits = sandbox.spec.limits
        ready = [template.copy(sandbox._inner, request, taken) for template in self._templates]

        def start(
            run: BackendExec, go_on: Callable[[], None], feed: Callable[[bytes], None]
        ) -> Process:
            go_on()
            return Process(Pump(run, request, limits, feed, None), stdin_open=True)

        pairs = zip(self._held, ready, strict=True)
        return [(*held, partial(start, *each)) for held, each in pairs]

    def close(self) -> None:
        """Let go of all that is kept; copies live on, and what stands still goes on. Idempotent."""
        try:
            self.release()
        finally:
            templates, self._templates = self._templates, []
            for template in templates:
                template.close()


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
