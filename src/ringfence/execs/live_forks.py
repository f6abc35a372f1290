"""Execs of a server's sandbox that go on in its forks; see `sandbox.live_fork` for those of the library."""

from __future__ import annotations

import os
import time

from ..backends.optional import Continuable, Forkable
from ..contexts.frames import language_of
from ..contexts.frames import request as request_to
from ..errors import Unsupported
from ..fork.branches import copied_processes
from ..model.base.ids import derived_id
from ..model.execs.exec import ExecRequest
from ..model.execs.exec_view import ExecView
from ..model.fork import CopiedProcess, ForkReport
from ..sessions.forks import Carry
from ..sessions.maker import for_backend

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from ..backends.optional import ProcessTemplate, WaitingCopy
    from ..backends.protocol import BackendSandbox
    from ..model.spec import SandboxSpec
    from ..sessions.live import Live
    from .execs import Execs
    from .run import Run


class LiveForks(Carry):
    """Execs of a sandbox, as its forks take them along: all contexts or none, and others one by one.

    Where the backend saves a sandbox as a whole, all of them or none.

    Args:
        busy: Id of a context that runs a cell; empty: none does, and none begins one until `release`.
        going_on: Called once the sandbox goes on.

    Attributes:
        report: What goes along, by the ids that it has in the sandbox.
        execs: Of each fork, in their order: the ids of what goes on, by those in the sandbox.
    """

    def __init__(self, execs: Execs, parent: str, busy: str, going_on: Callable[[], None]) -> None:
        self._execs, self._busy, self._going_on = execs, busy, going_on
        self._held: list[tuple[ExecView, ProcessTemplate]] = []
        self._inner: Continuable | None = None
        self.report = ForkReport(parent)
        self.execs: list[dict[str, str]] = []

    def stop(self, processes: str, live: Live, spec: SandboxSpec) -> None:
        parent = self.report.parent
        try:
            if processes != "none":
                self._stop(live, spec, is_required=processes == "required")
        except BaseException as exc:
            self.close()
            if processes == "required" or not isinstance(exc, Unsupported):
                raise
            self.report = ForkReport(parent, reason=exc.message)

    def _stop(self, live: Live, spec: SandboxSpec, *, is_required: bool) -> None:
        inner = live.inner
        if not isinstance(inner, Forkable | Continuable):
            raise _refused(f"the {live.backend} backend copies files only", live)
        if self._busy:
            raise _refused(f"context {self._busy} runs a cell", live)
        left_out: dict[str, str] = {}
        if isinstance(inner, Continuable):
            if not inner.running() and not live.inner.stats().pids:
                return
            inner.check_copy(for_backend(spec, live.sandbox_id))
            is_required = True  # what cannot go along cannot stay behind either
        else:
            names = inner.left_behind()
            left_out = {
                each: f"{each} runs in the background and belongs to no exec" for each in names
            }
        if left_out and is_required:
            raise _refused("; ".join(left_out.values()), live)
        contexts, processes = self._hold(live, inner, left_out, is_required=is_required)
        if isinstance(inner, Continuable):
            inner.hold([template for _, template in self._held])
            self._inner, self.is_whole = inner, True
        self.report = ForkReport(
            self.report.parent,
            self.is_whole or bool(self._held),
            "; ".join(left_out.values()),
            contexts,
            processes,
            tuple(left_out),
            tuple(copy for view, _ in self._held for copy in _copied(view.id, view.argv)),
        )

    def _hold(
        self,
        live: Live,
        inner: Forkable | Continuable,
        left_out: dict[str, str],
        *,
        is_required: bool,
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Stop every exec that can be copied: ids of contexts, and of others; why others cannot is added."""
        contexts: list[str] = []
        processes: list[str] = []
        for run in self._execs.running_of(live.sandbox_id):
            view, begun = run.view(), run.begun
            is_context = bool(language_of(view.argv))
            try:
                if begun is None:
                    continue  # it has just ended
                template = inner.template(begun)
            except Unsupported as exc:
                if is_context or is_required:
                    raise _refused(f"{exc.message} ({run.id})", live) from exc
                left_out[run.id] = exc.message
                continue
            self._held.append((view, template))
            (contexts if is_context else processes).append(run.id)
        return tuple(contexts), tuple(processes)

    def move(self, before: BackendSandbox, inner: BackendSandbox) -> None:
        """See `Carry`."""
        assert isinstance(before, Continuable)
        before.move([template for _, template in self._held], inner)

    def release(self) -> None:
        try:
            for _, template in self._held:
                template.release()
        finally:
            self._going_on()

    def load(self) -> None:
        for _, template in self._held:
            template.load()

    def put_into(self, fork: Live) -> None:
        """Make a copy of each exec in a fork. None runs before all are locked down."""
        taken = [number for _, template in self._held for number in template.ids]
        waiting: list[WaitingCopy] = []
        try:
            self._put_into(fork, taken, waiting)
        finally:
            for copy in waiting:
                copy.close()

    def _put_into(self, fork: Live, taken: list[int], waiting: list[WaitingCopy]) -> None:
        made: list[Run] = []
        for view, template in self._held:
            request = ExecRequest(
                view.argv, timeout_s=view.timeout_s, stream_stdin=view.stream_stdin
            )

            def begin(label: str, template: Any = template, request: Any = request) -> Any:
                waiting.append(template.copy(fork.inner, request, taken, label))
                return waiting[-1].run

            own = ExecView(
                id=derived_id(view.id, fork.sandbox_id),
                sandbox_id=fork.sandbox_id,
                state=view.state,
                argv=view.argv,
                created_at=time.time(),
                cwd=view.cwd,
                user=view.user,
                timeout_s=view.timeout_s,
                stream_stdin=view.stream_stdin,
                max_output_bytes=view.max_output_bytes,
                kept_bytes=view.kept_bytes,
            )
            made.append(self._execs.go_on(fork, own, request, begin))
        for copy in waiting:
            copy.go_on()
        for run in made:
            if language_of(run.view().argv):
                run.append(memoryview(request_to("copied")))
        self.execs.append(
            {view.id: run.id for (view, _), run in zip(self._held, made, strict=True)}
        )

    def leave_out(self, reason: str) -> None:
        self.execs.append({})
        self.report = ForkReport(self.report.parent, reason=reason)

    def remember(self, fork: Live) -> None:
        ids = [view.id for view in self._execs.list(self.report.parent, limit=1000)]
        there = {view.id for view in self._execs.list(fork.sandbox_id, limit=1000)}
        pairs = {id: derived_id(id, fork.sandbox_id) for id in ids}
        self.execs.append({id: own for id, own in pairs.items() if own in there})
        if not self.report.has_processes and self.execs[0]:
            runs = [self._execs.find(self.report.parent, id) for id in self.execs[0]]
            is_context = {run.id: bool(language_of(run.view().argv)) for run in runs}
            self.report = ForkReport(
                self.report.parent,
                has_processes=True,
                contexts=tuple(id for id in is_context if is_context[id]),
                processes=tuple(id for id in is_context if not is_context[id]),
                copies=tuple(copy for run in runs for copy in _copied(run.id, run.view().argv)),
            )

    def close(self) -> None:
        """See `Carry`; copies live on, and what stands still goes on."""
        held, self._held = self._held, []
        try:
            for _, template in held:
                template.close()
        finally:
            self._going_on()


def _copied(id: str, argv: Sequence[str]) -> list[CopiedProcess]:
    """Report an exec alone: what was copied with it is not written down, and asking again gives the same."""
    return copied_processes(id, os.path.basename(argv[0]), language_of(argv), ())


def _refused(reason: str, live: Live) -> Unsupported:
    return Unsupported(
        reason,
        backend=live.backend,
        operation="fork with processes",
        hint='processes="auto" or "none" copies the files',
    )
