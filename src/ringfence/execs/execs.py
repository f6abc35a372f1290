"""Every exec that the server's clients start, and those of the servers before it."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
import time
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

from ..backends.optional import DurableSandbox
from ..errors import (
    ExecNotFound,
    ExecNotStarted,
    InvalidRequest,
    RingfenceError,
    SandboxLost,
    TaskFailed,
)
from ..model.base.ids import new_id
from ..model.execs.exec import ExecRequest
from ..model.execs.exec_view import ExecState, ExecView
from ..sandbox.pump import run_for
from ..sandbox.reactor import Reactor
from ..sandbox.stream import DEFAULT_OUTPUT_BYTES
from ..sessions.keys import digest
from ..spool.spool import Spool
from ..spool.track import Budget
from ..store.execs import ExecRecord
from . import told
from .counts import Counts
from .pump import SpooledPump
from .retention import Retention
from .run import Run

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..backends.protocol import BackendExec
    from ..model.execs.exec import ExecStatus
    from ..sessions.live import Live
    from ..sessions.manager import SessionManager

EXEC = "exec"
SPOOL = "spool"
KEPT_BYTES = 64 << 20
MOST_BYTES = 8 << 30
MOST_RUNNING_BYTES = 8 << 30
MOST_RECORDS = 20_000
_SETTLING_S = 5.0


_as_json = json.JSONEncoder().encode


def _nothing() -> None:
    """There is nothing to let go of."""


class Execs:
    """Starts execs, finds them again, and knows how they ended. Thread-safe.

    Args:
        manager: Whose sandboxes they run in; its store remembers them.
        kept_bytes: Of each stream on disk, where neither request nor sandbox says.
        most_bytes: On disk, of all together; beyond it the output that ended first goes first.
        most_records: Of execs that have ended.
        most_running_bytes: On disk, of all that run together; beyond it their output is dropped and counted.
    """

    def __init__(
        self,
        manager: SessionManager,
        kept_bytes: int = KEPT_BYTES,
        *,
        most_bytes: int = MOST_BYTES,
        most_records: int = MOST_RECORDS,
        most_running_bytes: int = MOST_RUNNING_BYTES,
    ) -> None:
        self._budget = Budget(most_running_bytes)
        self._manager, self._records = manager, manager.store.execs
        self._kept_bytes = kept_bytes
        directory = manager.store.directory
        self._temporary = "" if directory else tempfile.mkdtemp(prefix="ringfence-spool-")
        self.directory = directory.file(SPOOL) if directory else self._temporary
        self.counts = Counts()
        self._lock = threading.Lock()
        self._runs: dict[str, Run] = {}  # running, or ended and not written down
        self._beginning: set[str] = set()  # written down, and not running yet: nobody sees them
        self._unwritten: list[tuple[ExecView, Callable[[], None]]] = []
        self._reactor = Reactor()
        self._retention = Retention(
            manager.store, self.directory, most_bytes, most_records, self._write_rest
        )
        self._recover()
        manager.before_store_closes.append(self._settle)

    # -- starting -----------------------------------------------------------------------------

    def start(
        self, live: Live, request: ExecRequest, *, attend_s: float = 0.0, is_forked: bool = True
    ) -> Run:
        """Begin an exec; whoever asked may go away.

        Args:
            attend_s: Stay with it for so long at most: most commands are over sooner, and to have
                another thread wait for their end takes longer than they do.
            is_forked: It may go on in forks, where its backend can do that. What is attended to does not.

        Raises:
            RingfenceError: As the sandbox's own `start`; nothing runs, and nothing is remembered.
        """
        request = _with_input(request)
        run = self._new_run(live, request)
        with self._hidden(run):
            self._put(run.view())
            begin = partial(_start, live, run, request, is_forked=is_forked and not attend_s)
            pump = self._begin(live, run, request, begin)
        self._drive(run, pump, attend_s)
        return run

    def start_once(
        self, live: Live, request: ExecRequest, key: str, *, attend_s: float = 0.0
    ) -> tuple[Run, bool]:
        """`start`, but what was asked for under `key` before is not started again; whether it is new.

        Keys are a sandbox's own, and kept as long as the exec can be found.

        Raises:
            InvalidRequest: The key was used for another request.
        """
        request = _with_input(request)
        asked = digest(request.to_json())
        with self._manager.keys.turn(f"exec in {live.sandbox_id}", key):
            run = self._new_run(live, request)
            with self._hidden(run):
                if not self._records.add_under_key(_record(run.view()), key, asked):
                    run.spool.close()
                    known, was_asked = self._records.under_key(live.sandbox_id, key) or ("", "")
                    if was_asked != asked:
                        raise InvalidRequest(
                            "this idempotency key was used for another request", field="key"
                        )
                    return self.find(live.sandbox_id, known), False
                begin = partial(_start, live, run, request, is_forked=not attend_s)
                pump = self._begin(live, run, request, begin)
        self._drive(run, pump, attend_s)
        return run, True

    def go_on(
        self, live: Live, view: ExecView, request: ExecRequest, begin: Callable[[str], BackendExec]
    ) -> Run:
        """Attend to an exec that goes on here after it began in another sandbox.

        Args:
            view: Its facts, with the id that it has here.
            begin: Makes it, under a label by which a later process knows it.

        Raises:
            RingfenceError: As `begin`; nothing is remembered.
        """
        run = Run(view, self._spool(view))
        with self._hidden(run):
            self._put(run.view())
            pump = self._begin(live, run, request, lambda: live.watched.adopt(begin(run.id)))
        self._drive(run, pump)
        return run

    def lose(self, view: ExecView, error: RingfenceError) -> None:
        """Remember an exec of another node that does not go on here, and why."""
        run = Run(view, self._spool(view))
        run.spool.close()
        self._end(run, run.problem(error))

    @contextmanager
    def _hidden(self, run: Run) -> Iterator[None]:
        """Until it has begun: who saw it before could neither write to it nor kill it."""
        with self._lock:
            self._beginning.add(run.id)
        try:
            yield
        finally:
            with self._lock:
                self._beginning.discard(run.id)

    def _begin(
        self, live: Live, run: Run, request: ExecRequest, start: Callable[[], BackendExec]
    ) -> SpooledPump:
        try:
            run.prepare()
            begun = start()
        except BaseException:
            run.discard()
            with suppress(RingfenceError):
                self._records.remove(run.id)
            raise
        self.counts.began()
        told.began(run.view())
        return self._attend(live, run, begun, request)

    def _new_run(self, live: Live, request: ExecRequest) -> Run:
        most = request.max_output_bytes
        if most is None:
            most = live.spec.limits.output_bytes
        view = ExecView(
            id=new_id(EXEC),
            sandbox_id=live.sandbox_id,
            state=ExecState.RUNNING,
            argv=request.argv,
            created_at=time.time(),
            cwd=request.cwd,
            user=request.user,
            pty=request.pty,
            stream_stdin=request.stream_stdin,
            timeout_s=request.timeout_s,
            max_output_bytes=DEFAULT_OUTPUT_BYTES if most is None else most,
            kept_bytes=self._kept_bytes if most is None else most,
        )
        return Run(view, self._spool(view))

    def _spool(self, view: ExecView) -> Spool:
        place = os.path.join(self.directory, view.sandbox_id, view.id)
        budget = self._budget if view.running else None
        return Spool(place, view.kept_bytes, (view.stdout_bytes, view.stderr_bytes), budget)

    def _attend(
        self, live: Live, run: Run, begun: BackendExec, request: ExecRequest
    ) -> SpooledPump:
        """Make the pump that moves the exec's bytes; the caller drives it."""

        def ended(status: ExecStatus, cut: bool) -> bool:
            view = run.final(ExecState.ENDED, status=status, truncated=cut)
            return self._end(run, view, pump.release)

        pump = SpooledPump(begun, request, live.spec.limits, run.spool, ended)
        run.attend(pump)
        with self._lock:
            self._runs[run.id] = run
        return pump

    def _drive(self, run: Run, pump: SpooledPump, attend_s: float = 0.0) -> None:
        try:
            if attend_s and run_for(pump, attend_s) is not None:
                return
        except Exception as exc:  # noqa: BLE001  of the exec, not of who started it
            self._failed(run, pump, exc)
            return
        driven = self._reactor.drive(pump)
        driven.add_done_callback(lambda future: self._failed(run, pump, future.exception()))

    def _failed(self, run: Run, pump: SpooledPump, error: BaseException | None) -> None:
        if error is None:
            return
        if not isinstance(error, RingfenceError):
            error = TaskFailed(f"its output could not be moved: {error!r}")
        if not run.running or self._end(run, run.problem(error), pump.release):
            pump.release()

    def _end(self, run: Run, view: ExecView, release: Callable[[], None] = _nothing) -> bool:
        """It is over; whether that is written down. If not, `release` is called once it is."""
        written = True
        try:
            self._put(view)
        except RingfenceError as exc:
            written = False  # the disk is full: it is remembered here, and written later
            told.unwritten(view, exc)
            with self._lock:
                self._unwritten.append((view, release))
        self.counts.ended(view)
        told.ended(view)
        run.spool.settle()
        run.end(view)
        if written:
            self._forget(view.id)
        self._retention.came(sum(track.kept_bytes for track in run.spool.tracks))
        return written

    def _write_rest(self) -> None:
        with self._lock:
            waiting, self._unwritten = self._unwritten, []
        while waiting:
            view, release = waiting[0]
            try:
                self._put(view)
            except RingfenceError:
                with self._lock:
                    self._unwritten += waiting
                return
            release()
            self._forget(view.id)
            del waiting[0]

    def _forget(self, exec_id: str) -> None:
        with self._lock:
            self._runs.pop(exec_id, None)

    def _put(self, view: ExecView) -> None:
        self._records.put(_record(view))

    # -- finding ------------------------------------------------------------------------------

    def find(self, sandbox_id: str, exec_id: str) -> Run:
        """An exec of a sandbox, running or over.

        Raises:
            ExecNotFound: There is none.
        """
        run, record = self._known(exec_id), None
        if run is None and exec_id not in self._beginning:
            record = self._records.get(exec_id)
            if record is not None and record.state == ExecState.RUNNING:
                # It has begun since we looked, and perhaps ended, too.
                run, record = self._known(exec_id), self._records.get(exec_id)
        if run is None and record is not None:
            run = self._over(record)
        if run is None or run.sandbox_id != sandbox_id:
            raise ExecNotFound(f"no exec {exec_id!r} in sandbox {sandbox_id}")
        return run

    def _known(self, exec_id: str) -> Run | None:
        with self._lock:
            return self._runs.get(exec_id)

    @property
    def live_count(self) -> int:
        with self._lock:
            return sum(run.running for run in self._runs.values())

    def running(self, sandbox_id: str, exec_id: str) -> Run | None:
        """An exec of a sandbox that runs, without waiting for anything."""
        run = self._known(exec_id)
        return run if run is not None and run.sandbox_id == sandbox_id else None

    def running_of(self, sandbox_id: str) -> list[Run]:
        """Return the execs of a sandbox that run, oldest first."""
        with self._lock:
            runs = [each for each in self._runs.values() if each.sandbox_id == sandbox_id]
            return sorted((each for each in runs if each.running), key=lambda each: each.id)

    def count(self, sandbox_id: str) -> int:
        """How many of a sandbox are still known."""
        return self._records.count_of_sandbox(sandbox_id)

    def list(self, sandbox_id: str, after: str = "", limit: int = 100) -> list[ExecView]:
        """Execs of a sandbox with ids beyond `after`, oldest first."""
        texts = self.texts(sandbox_id, after, limit)
        return [ExecView.from_json(json.loads(text)) for text in texts.values()]

    def texts(self, sandbox_id: str, after: str = "", limit: int = 100) -> dict[str, str]:
        """The same by their ids, as JSON. It was written when they ended: to read it and write it
        again takes ten times as long.
        """
        texts: dict[str, str] = {}
        while len(texts) < limit:
            wanted = limit - len(texts)
            records = self._records.of_sandbox(sandbox_id, after, wanted)
            for record in records:
                with suppress(ExecNotFound):  # it is about to begin
                    texts[record.id] = self._text_of(record)
            if len(records) < wanted:
                break
            after = records[-1].id
        return texts

    def _text_of(self, record: ExecRecord) -> str:
        if record.state == ExecState.RUNNING:
            return _as_json(self.find(record.sandbox, record.id).view().to_json())
        return record.view

    def _over(self, record: ExecRecord) -> Run:
        view = ExecView.from_json(json.loads(record.view))
        spool = self._spool(view)
        spool.close()
        return Run(view, spool)

    # -- going on -----------------------------------------------------------------------------

    def _recover(self) -> None:
        """Go on with what an earlier process left, as far as its sandboxes live."""
        for record in self._records.unended():
            view = ExecView.from_json(json.loads(record.view))
            run = Run(view, self._spool(view))
            live = self._manager.index.find(view.sandbox_id)
            inner = live.inner if live else None
            kept = inner.adopted_execs() if isinstance(inner, DurableSandbox) else None
            begun = kept.get(view.id) if kept else None
            why: RingfenceError = SandboxLost("its sandbox has ended")
            if kept is not None and begun is None:
                # A backend that keeps execs has every one that has begun, until its end is written down.
                self._records.forget_key(view.id)
                why = ExecNotStarted("the server was killed before the start")
            elif live and begun is None:
                why = SandboxLost(
                    "the result is unknown: the backend does not keep execs over a restart"
                )
            takes_input = view.stream_stdin or view.pty is not None
            if begun is not None and begun.stdin is not None and not takes_input:
                begun.kill()
                begun.close()
                begun = None
                why = SandboxLost("the rest of the input was lost when the server ended")
            if live is None or begun is None:
                run.spool.close()
                self._end(run, run.problem(why))
                continue
            with suppress(RingfenceError):
                run.prepare()
            request = ExecRequest(
                view.argv, timeout_s=view.timeout_s, pty=view.pty, stream_stdin=takes_input
            )
            self._drive(run, self._attend(live, run, live.watched.adopt(begun), request))

    def _settle(self) -> None:
        """Every sandbox has ended: wait until the ends of their execs are written down."""
        with self._lock:
            runs = list(self._runs.values())
        wait([run.done for run in runs], _SETTLING_S)

    def close(self) -> None:
        """Remove nothing more; forget what is not on disk. What runs is not touched."""
        self._retention.close()
        self._reactor.close()
        self._write_rest()
        if self._temporary:
            shutil.rmtree(self._temporary, ignore_errors=True)


def _start(live: Live, run: Run, request: ExecRequest, *, is_forked: bool) -> BackendExec:
    # What is not forked in the middle has nothing between it and its streams.
    start = live.watched.start if is_forked else live.watched.start_attended
    return start(request, label=run.id)


def _with_input(request: ExecRequest) -> ExecRequest:
    """At a terminal somebody types."""
    if request.pty is not None and not request.stream_stdin and request.stdin is None:
        return replace(request, stream_stdin=True)
    return request


def _record(view: ExecView) -> ExecRecord:
    text, state = _as_json(view.to_json()), str(view.state)
    return ExecRecord(view.id, view.sandbox_id, state, text, view.created_at, view.ended_at)
