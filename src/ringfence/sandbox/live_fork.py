"""Contexts that go on in the forks of a sandbox of this process."""

from __future__ import annotations

from ..backends.optional import Forkable
from ..contexts.frames import argv_of
from ..errors import ExecError, Unsupported
from ..model.calls import make_request
from ..model.fork import ForkReport
from .process import Process
from .pump import Pump

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..backends.optional import ProcessTemplate
    from ..contexts import Context
    from .sync import Sandbox


class LiveFork:
    """The contexts of a sandbox, as its forks take them along: every one, or none.

    From `stop` to `release` the contexts stand still, so that files can be saved of the same moment.

    Args:
        sandbox: Its contexts are those that were opened through this object.
    """

    def __init__(self, sandbox: Sandbox) -> None:
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
            self._templates.append(inner.template(context.process.run))
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

    def put_into(self, fork: Sandbox) -> None:
        """Make a copy of each context in a fork. None runs before all are locked down."""
        taken = [number for template in self._templates for number in template.ids]
        request = make_request(argv_of("python"), stream_stdin=True, max_output_bytes=1 << 16)
        ready = [template.copy(fork._inner, request, taken) for template in self._templates]
        for (context, is_default), (run, go_on) in zip(self._held, ready, strict=True):

            def start(feed: Callable[[bytes], None], run=run, go_on=go_on) -> Process:  # type: ignore[no-untyped-def]
                go_on()
                pump = Pump(run, request, fork.spec.limits, feed, None)
                return Process(pump, stdin_open=True)

            try:
                copied = context.copied(fork, start)
            except ExecError as exc:
                raise _refused(str(exc)) from exc
            fork._its_contexts.add(copied, is_default=is_default)

    def close(self) -> None:
        """Let go of all that is kept; copies live on, and what stands still goes on. Idempotent."""
        try:
            self.release()
        finally:
            templates, self._templates = self._templates, []
            for template in templates:
                template.close()


def _refused(reason: str, backend: str = "native") -> Unsupported:
    return Unsupported(
        reason,
        backend=backend,
        operation="fork with processes",
        hint='processes="auto" or "none" copies the files',
    )
