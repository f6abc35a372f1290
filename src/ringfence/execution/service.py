"""`ExecutionService`: commands in, results out, each in a sandbox of its own."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial

from .. import __version__
from ..backends.optional import GuestKernel, ProfileStore
from ..errors import (
    BackendUnavailable,
    ExecNotStarted,
    ExecutionNotFound,
    InvalidRequest,
    LifecycleError,
    ResourceExhausted,
    RingfenceError,
    SandboxLost,
    Unsupported,
)
from ..execs.execs import Execs
from ..model.acquire import check_client
from ..model.base.helpful import helpful
from ..model.base.ids import new_id
from ..model.base.jsonform import loads, within
from ..model.event import CONFIG
from ..model.execution.config import VM_KERNEL
from ..model.execution.execution import ExecutionRequest, ExecutionResult, ExecutionStatus
from ..model.execution.info import ExecutionInfo, ExecutorInfo
from ..model.spec import OS_HARDENED, STRONG, SandboxSpec
from ..policy.seccomp import SeccompPolicy
from ..sessions.selection import needed
from ..store.executions import ExecutionRecord
from . import endings, tiers
from .running import METADATA, Running
from .settings import FILE, Settings
from .specs import PROFILE, TRIAL, check_least, completed, trial

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ..execs.run import Run
    from ..model.capabilities import BackendReport
    from ..model.execution.config import ExecutionConfig
    from ..model.execution.execution import TierSupport
    from ..sessions.manager import SessionManager

EXECUTION = "execution"
_MOST_THREADS = 10_000  # the config's `max_concurrent` is what bounds them
_PRUNE_EVERY_S = 60.0


@helpful
class ExecutionService:
    """Runs commands for clients, one sandbox each. Every method may be called from any thread.

    Args:
        manager: Whose sandboxes they run in, whose pool makes them fast, and whose state directory
            keeps results and config.
        config: What holds where nothing is kept yet.
        execs: What runs commands, and finds those again that an earlier service started; None: one of
            the service's own.

    Raises:
        InvalidRequest: The config that is kept is not valid.
    """

    def __init__(
        self,
        manager: SessionManager,
        config: ExecutionConfig | None = None,
        *,
        execs: Execs | None = None,
    ) -> None:
        self.manager, self._table = manager, manager.store.executions
        self.execs, self._owns_execs = execs or Execs(manager), execs is None
        directory = manager.store.directory
        self._settings = Settings(directory.file(FILE) if directory else None, config)
        self._define_profile(self._settings.now)
        self._hooks: list[Callable[[ExecutionConfig], object]] = []
        self._chose_kernel = False
        self._lock, self._closed = threading.Lock(), False
        self._waiting: deque[tuple[Running, ExecutionRequest]] = deque()
        self._live: dict[str, Running] = {}
        self._running = 0
        self._unsaved: dict[str, Running] = {}
        self._pruned = 0.0
        self._threads = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="ringfence-execution")
        self._use_kernel(self.config)
        self._settle()

    def _settle(self) -> None:
        """Take over or mark as lost every execution whose end an earlier service did not record."""
        for record in self._table.unended():
            result = ExecutionResult.from_json(loads(record.result))
            try:
                run = self._left(result)
            except RingfenceError as exc:
                now = self.manager.clock.wall()
                self.save(replace(result, ended_at=now, **endings.failure(exc)))
                continue
            running = self._live[result.id] = Running(self, record.owner, result)
            self._running += 1
            self._threads.submit(self._occupied, partial(running.go_on, run))
        for session in self.manager.list():
            if session.metadata.get(METADATA, "") not in {"", *self._live}:
                self.manager.terminate(session.session_id)

    def _left(self, result: ExecutionResult) -> Run:
        """The exec of an execution, as an earlier service left it.

        Raises:
            ExecNotStarted: It never began.
            SandboxLost: Nothing is known of it.
        """
        sandbox_id, exec_id = result.sandbox_id, result.exec_id
        if sandbox_id and not exec_id and self.manager.store.sandbox(sandbox_id):
            # The sandbox is written down before its only exec, and that before it begins.
            exec_id = next((view.id for view in self.execs.list(sandbox_id)), "")
            sandbox_id = sandbox_id if exec_id else ""
        if not sandbox_id:
            raise ExecNotStarted("the server was killed before the start")
        try:
            run = self.execs.find(sandbox_id, exec_id)
        except RingfenceError:
            raise SandboxLost("the service ended while it ran; the result is unknown") from None
        problem = run.view().problem
        if problem is not None and problem.code == ExecNotStarted.code:
            raise problem.error()
        return run

    # -- running --------------------------------------------------------------------------------

    def submit(
        self,
        request: ExecutionRequest,
        *,
        client_id: str,
        wait: bool = True,
        most_sandboxes: int | None = None,
    ) -> Future[ExecutionResult]:
        """Take a request; the future resolves to its final result, or at once without `wait`.

        Asking again under the same id, for the same, gives the same execution.

        Args:
            most_sandboxes: That the client may have with the one it runs in.

        Raises:
            InvalidRequest: Malformed, above a maximum, or its id was used for something else.
            SandboxNotSupported: The tier cannot be had here; nothing weaker is taken.
            ResourceExhausted: As many wait as may, or the disk is full. Try again later.
        """
        check_client(client_id)
        config = self.config
        digest = _digest(request)
        named = request.id is not None
        request = replace(completed(request, config), id=request.id or new_id(EXECUTION))
        preferred = config.strong_runtime.get("backend", "") if request.tier == STRONG else ""
        backend = tiers.choose(self.manager, request.tier, preferred)
        check_least(request, self.manager.maker.backends[backend])
        assert request.id is not None
        result = ExecutionResult(
            request.id,
            ExecutionStatus.PENDING,
            tier=request.tier,
            command=request.command,
            created_at=self.manager.clock.wall(),
        )
        running = Running(self, client_id, result, most_sandboxes)
        if not self._enter(running, request, digest, config):
            assert named
            return self._known(request.id, client_id, digest, wait=wait)
        self._prune()
        return running.future if wait else _done(running.result)

    def _enter(
        self, running: Running, request: ExecutionRequest, digest: str, config: ExecutionConfig
    ) -> bool:
        """Write it down and let it wait for its turn; False where its id is taken."""
        with self._lock:
            if self._closed:
                raise LifecycleError("the execution service is closed")
            if self._running >= config.max_concurrent and len(self._waiting) >= config.max_pending:
                raise ResourceExhausted(
                    f"{self._running} executions run and {len(self._waiting)} wait",
                    hint="try again later, or raise max_concurrent or max_pending",
                )
            record = ExecutionRecord(
                running.id,
                running.owner,
                str(running.result.status),
                digest,
                _text(running.result),
                running.result.created_at,
            )
            if not self._table.add(record) and not self._table.begin_again(record):
                return False
            self._live[running.id] = running
            self._waiting.append((running, request))
        self._start_some()
        return True

    def _start_some(self) -> None:
        while True:
            with self._lock:
                config = self.config
                if not self._waiting or self._running >= config.max_concurrent:
                    return
                running, request = self._waiting.popleft()
                self._running += 1
            self._threads.submit(self._occupied, partial(running.run, request, config))

    def _occupied(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            with self._lock:
                self._running -= 1
            self._start_some()

    def _known(
        self, execution_id: str, client_id: str, digest: str, *, wait: bool
    ) -> Future[ExecutionResult]:
        record = self._table.get(execution_id)
        if record is None or record.owner != client_id or record.request != digest:
            raise InvalidRequest("this execution id was used for another request", field="id")
        live = self._live.get(execution_id)
        if live is not None and wait:
            return live.future
        return _done(self.status(execution_id, client_id))

    def execute(self, request: ExecutionRequest, *, client_id: str) -> ExecutionResult:
        return self.submit(request, client_id=client_id).result()

    def kill(self, execution_id: str, client_id: str | None = None) -> Future[ExecutionResult]:
        """End an execution; the future resolves when it has ended. One that has ended stays as it is.

        Raises:
            ExecutionNotFound: There is none, or it is another client's.
        """
        with self._lock:
            live = self._find(execution_id, client_id)
            waits = next((each for each in self._waiting if each[0] is live), None)
            if waits is not None:
                self._waiting.remove(waits)
                self._running += 1
        if live is None:
            return _done(self.status(execution_id, client_id))
        if waits is None:
            self._threads.submit(live.kill)
        else:
            live.kill()
            self._threads.submit(self._occupied, partial(live.run, waits[1], self.config))
        return live.future

    # -- looking --------------------------------------------------------------------------------

    def status(self, execution_id: str, client_id: str | None = None) -> ExecutionResult:
        """An execution as it stands; when it has ended, its result, for `keep_results_secs`.

        Raises:
            ExecutionNotFound: There is none, or it is another client's.
        """
        live = self._find(execution_id, client_id)
        if live is not None:
            return live.result
        record = self._table.get(execution_id)
        if record is None or client_id not in (None, record.owner):
            raise _not_found(execution_id)
        return ExecutionResult.from_json(loads(record.result))

    def _find(self, execution_id: str, client_id: str | None) -> Running | None:
        live = self._live.get(execution_id) or self._unsaved.get(execution_id)
        if live is not None and client_id not in (None, live.owner):
            raise _not_found(execution_id)
        return live

    def tiers(self) -> tuple[TierSupport, ...]:
        """Report for each tier whether this host supports it, with the reason if not."""
        return tiers.all_tiers(self.manager, self.config.strong_runtime.get("backend", ""))

    def seccomp(self) -> dict[str, Any]:
        """The system-call policy in force, as data: a default action, and rules of names and an action."""
        own = self.config.seccomp
        policy = SeccompPolicy.default() if own is None else SeccompPolicy.from_json(dict(own))
        return policy.to_json()

    def info(self, client_id: str | None = None) -> ExecutionInfo:
        """Report capabilities and configuration, and count executions of a client, or of all."""
        maker = self.manager.maker
        reports = [maker.report(name) for name in maker.backends]
        return ExecutionInfo(
            version=__version__,
            tiers=self.tiers(),
            executors=tuple(
                ExecutorInfo(
                    each.backend, each.available, each.reason, each.tiers, self._holds_network(each)
                )
                for each in reports
            ),
            config=self.config,
            seccomp=self.seccomp(),
            supports_network_enabled=any(map(self._holds_network, reports)),
            running=self._count(ExecutionStatus.RUNNING, client_id),
            pending=self._count(ExecutionStatus.PENDING, client_id),
        )

    def _holds_network(self, report: BackendReport) -> bool:
        """Return whether a backend enforces both the network policy of `network_enabled` and no network."""
        specs = (SandboxSpec(network=self.config.network_policy), SandboxSpec())
        return report.available and all(map(report.can, {n for s in specs for n in needed(s)}))

    def _count(self, status: ExecutionStatus, client_id: str | None) -> int:
        every = [*self._live.values()]
        return sum(e.result.status == status and client_id in (None, e.owner) for e in every)

    # -- the config -----------------------------------------------------------------------------

    @property
    def config(self) -> ExecutionConfig:
        return self._settings.now

    def change(self, patch: object) -> ExecutionConfig:
        """Replace some keys of the config: kept, and in force for what runs already too.

        Raises:
            InvalidRequest: The result would not be valid; `field` names the key. Nothing changed.
            ResourceExhausted: It could not be kept; nothing changed.
        """
        self._try_policy(self._settings.now.changed(patch))  # no execution waits for that
        with self._lock:
            config = self._settings.now.changed(patch)
            self._check(config)
            self._settings.write(config)
            return self._adopt(config)

    def reload(self) -> ExecutionConfig:
        """Read the file again; one that is not valid changes nothing.

        Raises:
            InvalidRequest: It is not valid.
        """
        self._try_policy(self._settings.read())
        with self._lock:
            config = self._settings.read()
            self._check(config)
            return self._adopt(config)

    def _adopt(self, config: ExecutionConfig) -> ExecutionConfig:
        """Let `config` hold. `_lock` is held, so that none starts under the old one unnoticed."""
        before, self._settings.now = self._settings.now, config
        self._define_profile(config)
        self._use_kernel(config)
        self._tell(before, config)
        if config.network != before.network:
            for running in list(self._live.values()):
                self._threads.submit(running.apply_network, config.network)
        if config.max_concurrent > before.max_concurrent:
            self._threads.submit(self._start_some)
        return config

    def on_config(self, hook: Callable[[ExecutionConfig], object]) -> Callable[[], None]:
        """Call `hook` with each new config, until the returned function is called.

        In the thread in which it changes, after it holds and was kept: it must not block, and what it
        raises is not heard. To keep it elsewhere too, write it there.
        """
        self._hooks.append(hook)
        return lambda: self._hooks.remove(hook) if hook in self._hooks else None

    def _tell(self, before: ExecutionConfig, config: ExecutionConfig) -> None:
        """Hooks and events of what changed; host paths are in none of them."""
        then, now = before.to_json(), config.to_json()
        changed = [name for name in now if now[name] != then[name]]
        if not changed:
            return
        on = json.dumps(config.network_enabled)
        self.manager.events.add(CONFIG, None, changed=",".join(changed), network_enabled=on)
        for hook in tuple(self._hooks):
            with suppress(Exception):
                hook(config)

    def _use_kernel(self, config: ExecutionConfig) -> None:
        for name, backend in self.manager.maker.backends.items():
            if not isinstance(backend, GuestKernel):
                continue
            if VM_KERNEL in config.strong_runtime or self._chose_kernel:
                backend.use_kernel(config.strong_runtime.get(VM_KERNEL))
                self._chose_kernel = True
                self.manager.maker.forget_report(name)

    def _check(self, config: ExecutionConfig) -> None:
        preferred = config.strong_runtime.get("backend", "")
        if preferred and preferred not in self.manager.maker.backends:
            known = ", ".join(self.manager.maker.backends)
            raise InvalidRequest(
                f"no backend {preferred!r}", field="strong_runtime.backend", hint=f"one of {known}"
            )
        if VM_KERNEL in config.strong_runtime:
            backends = self.manager.maker.backends.values()
            booting = [each for each in backends if isinstance(each, GuestKernel)]
            if not booting:
                hint = "name the microvm backend, as `ringfence serve --backend microvm` does"
                raise InvalidRequest(
                    "no backend of this server boots its own kernel",
                    field=f"strong_runtime.{VM_KERNEL}",
                    hint=hint,
                )
            try:
                for each in booting:
                    each.check_kernel(config.strong_runtime[VM_KERNEL])
            except BackendUnavailable as exc:
                field = f"strong_runtime.{VM_KERNEL}"
                raise InvalidRequest(exc.message, field=field, hint=exc.hint) from exc
        self._policy(config)

    def _policy(self, config: ExecutionConfig) -> SeccompPolicy | None:
        if config.seccomp is None:
            return None
        policy: SeccompPolicy = within("seccomp", SeccompPolicy.from_json, dict(config.seccomp))
        return policy

    def _try_policy(self, config: ExecutionConfig) -> None:
        """Run one command under a new system-call policy, and refuse one under which none runs.

        Raises:
            InvalidRequest: A sandbox without the policy starts, and with it none does.
        """
        policy, now = self._policy(config), self._settings.now.seccomp
        if policy is None or config.seccomp == now:
            return
        for backend in self.manager.maker.backends.values():
            if not isinstance(backend, ProfileStore):
                continue
            backend.define_profile(TRIAL, policy)
            try:
                why = trial(backend, TRIAL)
                if why and not trial(backend, OS_HARDENED):
                    raise InvalidRequest(
                        f"no command runs in a sandbox under this policy: {why}",
                        field="seccomp",
                        hint='allow more, or "extends": "os_hardened" beside the rules',
                    )
            finally:
                backend.define_profile(TRIAL, None)

    def _define_profile(self, config: ExecutionConfig) -> None:
        policy, taken = self._policy(config), False
        for backend in self.manager.maker.backends.values():
            if isinstance(backend, ProfileStore):
                backend.define_profile(PROFILE, policy)
                taken = True
        if policy is not None and not taken:
            raise Unsupported(
                "no backend of this server accepts a system-call policy",
                operation="seccomp",
                field="seccomp",
            )

    # -- what is kept ---------------------------------------------------------------------------

    def note(self, running: Running) -> None:
        """Write down where it is. A disk that is full now stops nothing: the end is what counts."""
        try:
            result = running.result
            self._table.change(running.id, status=str(result.status), result=_text(result))
        except RingfenceError:
            pass

    def ended(self, running: Running) -> None:
        """Keep its result; with a full disk in memory, until there is room."""
        try:
            self.save(running.result)
        except RingfenceError:
            self._unsaved[running.id] = running
        self._live.pop(running.id, None)

    def save(self, result: ExecutionResult) -> None:
        """Write it down.

        Raises:
            ResourceExhausted: The disk is full.
        """
        self._table.change(
            result.id, status=str(result.status), result=_text(result), ended_at=result.ended_at
        )

    def _prune(self) -> None:
        now = self.manager.clock.now()
        if now - self._pruned < _PRUNE_EVERY_S and not self._unsaved:
            return
        self._pruned = now
        try:
            for execution_id, running in list(self._unsaved.items()):
                self.save(running.result)
                self._unsaved.pop(execution_id, None)
            self._table.prune(self.manager.clock.ago(self.config.keep_results_secs))
        except RingfenceError:
            pass  # a full disk: later

    def close(self) -> None:
        """Kill what runs or waits, keep how it ended, and take nothing more; idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            live = list(self._live.values())
        for running in live:
            self.kill(running.id)
        for running in live:
            running.future.result()
        self._threads.shutdown()
        if self._owns_execs:
            self.execs.close()


def _text(result: ExecutionResult) -> str:
    return json.dumps(result.to_json())


def _digest(request: ExecutionRequest) -> str:
    form = json.dumps({**request.to_json(), "id": None}, sort_keys=True)
    return hashlib.blake2b(form.encode(), digest_size=16).hexdigest()


def _done(result: ExecutionResult) -> Future[ExecutionResult]:
    future: Future[ExecutionResult] = Future()
    future.set_result(result)
    return future


def _not_found(execution_id: str) -> ExecutionNotFound:
    return ExecutionNotFound(f"no execution {execution_id!r}")
