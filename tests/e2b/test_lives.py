"""Lives of a sandbox by E2B's rules, without a server: deadlines, pauses, and starts from files alone."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence import Limits, NetworkPolicy, SandboxSpec
from ringfence.api.access.caller import ADMIN, USER, Caller
from ringfence.api.access.ceilings import Ceilings
from ringfence.api.access.permissions import Permissions
from ringfence.api.service import Service, Settings
from ringfence.backends.optional import BootIdentity, Clearable
from ringfence.e2b import lives
from ringfence.e2b.call import ApiError
from ringfence.e2b.codec import RpcError
from ringfence.e2b.notes import Notes, notes_of
from ringfence.errors import ExecError, Forbidden, InvalidRequest, LifecycleError, Unsupported
from ringfence.execs.execs import Execs
from ringfence.model import capabilities as can
from ringfence.model.client_session import SUSPEND, TERMINATE, SessionState
from ringfence.model.execs.exec import ExecRequest
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.forks import Carry
from ringfence.sessions.live import Live
from ringfence.sessions.manager import SessionManager
from ringfence.testing.unconfined import processes
from ringfence.testing.unconfined.sandbox import UnconfinedSandbox
from tests.unconfined import Unconfined

pytestmark = pytest.mark.anyone

YEAR_S = 365 * 86_400.0
NO_POOL = ManagerConfig(pool=PoolConfig(enabled=False))
ADMINISTRATOR, ANN = Caller("ops", ADMIN), Caller("ann", USER, key="key-ann")


class Cleared(UnconfinedSandbox, Clearable):
    """A sandbox that can end all that runs in it, unless `refuses`."""

    refuses = False

    def end_processes(self) -> None:
        if self.refuses:
            raise ExecError("some could not be ended in time")
        if self._started:
            processes.send_all(self._scope, signal.SIGKILL)


class Renewed(Cleared, BootIdentity):
    """A sandbox with a boot id of its own."""

    renewed = 0

    def renew_boot_id(self) -> None:
        self.renewed += 1


class Backend(Unconfined):
    """Sandboxes of a class; limits may be asked for, as clients of E2B do."""

    def __init__(self, kind: type[UnconfinedSandbox]) -> None:
        super().__init__()
        self.kind = kind

    lacks = {  # noqa: RUF012
        name: why for name, why in Unconfined.lacks.items() if name not in can.LIMITED_BY.values()
    }

    def _make(self, spec: SandboxSpec, content: str | None) -> UnconfinedSandbox:
        made = super()._make(spec, content)
        made.__class__ = self.kind
        return made


class Scene:
    """A service, its execs, and sandboxes of clients of E2B."""

    def __init__(self, stack: ExitStack, kind: type[UnconfinedSandbox], **options: Any) -> None:
        self.backend = Backend(kind)
        stack.callback(self.backend.close)  # snapshots outlive their manager
        self.manager = stack.enter_context(
            SessionManager(NO_POOL, backends=[self.backend], background=False, **options)
        )
        most = Ceilings(Limits(idle_timeout_s=1000.0, pids=50), ttl_s=5000.0)
        self.service = Service(self.manager, Settings(permissions=Permissions(most=most)))
        stack.callback(self.service.thread_pools.close)
        self.execs = stack.enter_context(closing(Execs(self.manager)))

    def create(
        self, caller: Caller = ANN, *, timeout_s: float = 60, auto_pause: bool = False, **more: Any
    ) -> Live:
        notes = more.pop("notes", Notes())
        spec = more.pop("spec", SandboxSpec())
        return lives.create(
            self.service,
            caller,
            spec,
            notes,
            more.pop("metadata", {}),
            timeout_s=timeout_s,
            auto_pause=auto_pause,
            **more,
        )

    def left_s(self, live: Live) -> float:
        left = live.left_s(self.manager.clock.now())
        assert left is not None
        return left

    def wake(self, live: Live, *args: Any, **more: Any) -> bool:
        return lives.wake(self.manager, self.execs, live, *args, **more)

    def pause(self, live: Live, **more: Any) -> bool:
        return lives.pause(self.manager, self.execs, live, **more)


Make = Callable[..., Scene]


@pytest.fixture
def make() -> Iterator[Make]:
    with ExitStack() as stack:

        def made(kind: type[UnconfinedSandbox] = UnconfinedSandbox, **options: Any) -> Scene:
            return Scene(stack, kind, **options)

        yield made


# -- pausing and waking --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "error"), [(UnconfinedSandbox, Unsupported), (Cleared, ExecError)]
)
def test_a_start_from_files_that_fails_leaves_a_paused_sandbox_paused(
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[UnconfinedSandbox],
    error: type[Exception],
) -> None:
    """Else it would run, with all that ran in it, while its client has been told that it does not."""
    scene = make(kind)
    live = scene.create()
    scene.pause(live)
    monkeypatch.setattr(Cleared, "refuses", True)

    for _ in range(2):
        with pytest.raises(error):
            scene.wake(live, keeps_memory=False)
        assert (SessionState.SUSPENDED, "suspended") == (live.state, live.inner.session.state)

    assert scene.wake(live), "the control: with its memory it is woken"
    assert (SessionState.ACTIVE, "running") == (live.state, live.inner.session.state)


@pytest.mark.parametrize(
    ("kind", "error"), [(UnconfinedSandbox, Unsupported), (Cleared, ExecError)]
)
def test_a_pause_without_memory_that_fails_pauses_nothing(
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[UnconfinedSandbox],
    error: type[Exception],
) -> None:
    scene = make(kind)
    live = scene.create()
    monkeypatch.setattr(Cleared, "refuses", True)

    with pytest.raises(error):
        scene.pause(live, keeps_memory=False)

    assert (SessionState.ACTIVE, True) == (live.state, scene.left_s(live) <= 60)
    assert scene.pause(live), "the control"
    assert SessionState.SUSPENDED == live.state


def deadline_kept(scene: Scene, live: Live) -> int | None:
    """The deadline as the next server would find it."""
    record = scene.manager.store.sandbox(live.sandbox_id)
    assert record is not None
    return record.expires_ns


@pytest.mark.parametrize("step", ["resume", "start from files"])
def test_what_could_not_be_woken_stays_paused_for_as_long_as_before(
    make: Make, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """With the deadline of one that runs it would end in minutes, and its client was told nothing of that."""
    scene = make(Cleared)
    live = scene.create()
    scene.pause(live)
    with monkeypatch.context() as patch:
        if step == "resume":
            patch.setattr(type(live.inner), "resume", cannot)
        else:
            patch.setattr(Cleared, "refuses", True)
        with pytest.raises(ExecError):
            scene.wake(live, 30.0, keeps_memory=step == "resume")
    assert SessionState.SUSPENDED == live.state
    assert scene.left_s(live) > YEAR_S - 60
    assert live.expires is not None
    assert int(live.expires * 1e9) == deadline_kept(scene, live)
    assert scene.wake(live, 30.0), "the control"
    assert scene.left_s(live) <= 30


def test_what_could_not_be_paused_ends_when_it_was_to(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = make()
    live, endless = scene.create(timeout_s=60), scene.create()
    before, endless.expires = deadline_kept(scene, live), None
    deadline, told = live.expires, list[tuple[Live, float | None]]()
    with monkeypatch.context() as patch:
        patch.setattr(type(live.inner), "suspend", cannot)
        patch.setattr(scene.manager.reaper, "expect", lambda of: told.append((of, of.expires)))
        for each in (live, endless):
            with pytest.raises(ExecError):
                scene.pause(each)
    assert (SessionState.ACTIVE, True) == (live.state, scene.left_s(live) <= 60)
    assert (before, None, None) == (
        deadline_kept(scene, live),
        endless.expires,
        deadline_kept(scene, endless),
    )
    assert [deadline, None] == [
        [expires for of, expires in told if of is each][-1] for each in (live, endless)
    ], "who ends it knows when"
    assert scene.pause(live), "the control"
    assert scene.left_s(live) > YEAR_S - 60


def test_nobody_else_changes_a_sandbox_between_two_steps_of_a_pause_or_a_wake(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = make()
    live = scene.create()
    lock: Any = live.lock
    manager, held = scene.manager, dict[str, bool]()

    def watch(name: str) -> None:
        real = getattr(manager, name)

        def step(*args: Any) -> Any:
            held[name] = lock._is_owned()
            return real(*args)

        monkeypatch.setattr(manager, name, step)

    for name in ("suspend", "resume", "extend"):
        watch(name)
    assert scene.pause(live)
    assert {"suspend": True, "extend": True} == held
    held.clear()
    assert scene.wake(live, 30.0)
    assert {"resume": True, "extend": True} == held
    held.clear()
    assert not scene.wake(live, 90.0)
    assert {"extend": True} == held
    assert not lock._is_owned()


def cannot(*_: object) -> None:
    raise ExecError("it cannot be done now")


def sleeping(scene: Scene, live: Live) -> Any:
    return scene.execs.start(live, ExecRequest(("sleep", "1000")))


@pytest.mark.parametrize("by", ["pause", "wake", "deadline"])
def test_without_memory_nothing_that_ran_goes_on(make: Make, by: str) -> None:
    scene = make(Cleared)
    live = scene.create(auto_pause=True, notes=Notes(keeps_memory=by != "deadline"))
    running = sleeping(scene, live)
    if by == "deadline":
        live.expires = scene.manager.clock.now() - 1
        scene.manager.suspend(live.id)
    else:
        scene.pause(live, keeps_memory=by != "pause")

    assert scene.wake(live, keeps_memory=by != "wake")

    assert [] == scene.execs.running_of(live.sandbox_id)
    assert running.done.result(30) is None or running.done.done()
    assert 1 == notes_of(live.metadata).boots


@pytest.mark.parametrize("by", ["pause", "deadline", "own pause"])
def test_with_memory_all_that_ran_goes_on(make: Make, by: str) -> None:
    """That a sandbox keeps no memory is about its deadline: a client's own pause keeps it."""
    scene = make(Cleared)
    live = scene.create(auto_pause=True, notes=Notes(keeps_memory=by != "own pause"))
    running = sleeping(scene, live)
    if by == "deadline":
        live.expires = scene.manager.clock.now() - 1
        scene.manager.suspend(live.id)
    else:
        scene.pause(live)

    assert scene.wake(live)

    assert [running.id] == [each.id for each in scene.execs.running_of(live.sandbox_id)]
    assert 0 == notes_of(live.metadata).boots


def test_a_start_is_counted_and_the_count_outlives_the_server(make: Make, tmp_path: Path) -> None:
    """Programs tell by the boot id; where the kernel has none for the sandbox, it follows from the count."""
    scene = make(Cleared, state_dir=str(tmp_path))
    live = scene.create(metadata={"mine": "kept"}, notes=Notes(template="t", key="k"))
    for boots in (1, 2):
        scene.pause(live, keeps_memory=False)
        scene.wake(live)
        found = notes_of(live.metadata)
        assert (boots, "t", "k") == (found.boots, found.template, found.key)
        assert "kept" == live.metadata["mine"]
    record = scene.manager.store.session(live.id)
    assert record is not None
    assert dict(live.metadata) == json.loads(record.metadata)


def test_a_sandbox_with_a_boot_id_of_its_own_gets_another(make: Make) -> None:
    scene = make(Renewed)
    live = scene.create()
    assert isinstance(live.inner, Renewed)
    scene.pause(live, keeps_memory=False)
    assert (1, 0) == (live.inner.renewed, notes_of(live.metadata).boots)
    scene.wake(live)
    assert 1 == live.inner.renewed
    scene.pause(live)
    scene.wake(live, keeps_memory=False)
    assert 2 == live.inner.renewed


def test_a_command_whose_end_is_not_known_keeps_the_sandbox_paused(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = make(Cleared)
    live = scene.create()
    sleeping(scene, live)
    scene.pause(live)
    monkeypatch.setattr(lives, "_KNOWN_S", 0.0)
    monkeypatch.setattr(Cleared, "end_processes", lambda _self: None)

    with pytest.raises(ExecError, match="not reported") as refused:
        scene.wake(live, keeps_memory=False)

    assert refused.value.retryable
    assert SessionState.SUSPENDED == live.state


@pytest.mark.parametrize(
    ("timeout_s", "left_s"), [(None, lives.WOKEN_S), (700.0, 700.0), (5.0, 5.0)]
)
def test_what_is_woken_has_its_time_from_now(
    make: Make, timeout_s: float | None, left_s: float
) -> None:
    scene = make()
    live = scene.create(timeout_s=60)
    assert scene.pause(live)
    assert not scene.pause(live), "it is paused already"
    assert scene.wake(live, timeout_s)
    assert left_s - 10 < scene.left_s(live) <= left_s


@pytest.mark.parametrize("auto_pause", [False, True])
def test_what_is_woken_past_its_deadline_has_another_before_it_runs(
    make: Make, monkeypatch: pytest.MonkeyPatch, auto_pause: bool
) -> None:
    """The reaper would pause it again, or end it."""
    scene = make()
    live = scene.create(timeout_s=60, auto_pause=auto_pause)
    scene.pause(live)
    live.expires = scene.manager.clock.now() - 1
    resume, left = scene.manager.resume, list[float]()

    def look(any_id: str) -> Any:
        left.append(scene.left_s(live))
        return resume(any_id)

    monkeypatch.setattr(scene.manager, "resume", look)
    assert scene.wake(live, 30.0)
    assert 20 < left[0] <= 30


def test_the_deadline_of_one_that_runs_is_never_brought_closer(make: Make) -> None:
    scene = make()
    live = scene.create(timeout_s=600)
    for timeout_s, most in ((None, 600), (5.0, 600), (900.0, 900), (601.0, 900)):
        assert not scene.wake(live, timeout_s)
        assert most - 30 < scene.left_s(live) <= most


@pytest.mark.parametrize("auto_pause", [False, True])
def test_the_deadline_of_a_paused_one_waits(make: Make, auto_pause: bool) -> None:
    """Of one that is to end in time it is put off for a year; the other is paused by it anyway."""
    scene = make()
    live = scene.create(auto_pause=auto_pause)
    assert (SUSPEND if auto_pause else TERMINATE) == live.timeouts.on_expiry
    scene.pause(live)
    assert (scene.left_s(live) > YEAR_S - 60) != auto_pause


# -- making --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("caller", "idle_s"), [(ADMINISTRATOR, None), (ANN, 1000.0)])
@pytest.mark.parametrize("auto_pause", [False, True])
def test_a_sandbox_ends_or_is_paused_at_its_deadline_used_or_not(
    make: Make, caller: Caller, idle_s: float | None, auto_pause: bool
) -> None:
    scene = make()
    live = scene.create(caller, timeout_s=77, auto_pause=auto_pause, metadata={"a": "b"})
    then = SUSPEND if auto_pause else TERMINATE
    found = live.timeouts

    assert (then, then) == (found.on_idle, found.on_expiry)
    assert (idle_s,) * 3 == (found.idle_s, found.detach_s, found.suspend_s)
    assert caller.client == live.client_id
    assert 67 < scene.left_s(live) <= 77
    assert "b" == live.metadata["a"]
    assert notes_of(live.metadata).is_public


def test_the_shortest_life_is_a_second(make: Make) -> None:
    scene = make()
    live = scene.create(timeout_s=0)
    assert 0 < scene.left_s(live) <= 1


def test_the_id_is_the_servers_and_a_key_gives_the_same_sandbox_to_its_client_alone(
    make: Make,
) -> None:
    scene = make()
    spec = SandboxSpec(id="of-the-template")
    first = scene.create(spec=spec, key="k")
    assert "of-the-template" != first.sandbox_id
    assert first is scene.create(spec=spec, key="k")
    assert first is not scene.create(spec=spec)
    assert first is not scene.create(Caller("bob", USER), spec=spec, key="k")


def test_a_clients_own_quota_counts(make: Make) -> None:
    scene = make()
    few = replace(ANN, max_sandboxes=1)
    scene.create(few)
    with pytest.raises(Exception, match="sandbox"):
        scene.create(few)
    scene.create(ADMINISTRATOR)


def test_metadata_may_not_be_that_of_the_notes(make: Make) -> None:
    with pytest.raises(InvalidRequest) as refused:
        make().create(metadata={"e2b": "{}"})
    assert "metadata" == refused.value.field


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (SandboxSpec(profile="own_root"), ""),
        (SandboxSpec(python_env=True), ""),
        (SandboxSpec(allow_degraded=("*",)), ""),
        (SandboxSpec(memory_dir="/etc"), ""),
        (SandboxSpec(limits=Limits(pids=50)), ""),
        (SandboxSpec(limits=Limits(pids=51)), "limits.pids"),
        (SandboxSpec(ttl_s=5001), "ttl_s"),
        (SandboxSpec(network=NetworkPolicy.parse("127.0.0.1:80")), "network.allowed_hosts[0]"),
    ],
)
def test_what_a_template_has_is_the_operators_word_and_the_rest_is_judged(
    make: Make, spec: SandboxSpec, field: str
) -> None:
    service = make().service
    if not field:
        found = lives.judged(service, ANN, spec)
        for name in ("profile", "python_env", "allow_degraded", "mounts", "memory_dir"):
            assert getattr(spec, name) == getattr(found, name)
        assert 50 == found.limits.pids, "what is left out is bounded too"
        return
    assert spec == lives.judged(service, ADMINISTRATOR, spec)
    with pytest.raises(Forbidden) as refused:
        lives.judged(service, ANN, spec)
    assert field == refused.value.field


@pytest.mark.parametrize(
    ("offered", "asked", "found"),
    [
        (["light"], "light", "light"),
        (["light", "strong"], "light", "light"),
        (["strong"], "light", "strong"),
        (["strong"], "strong", "strong"),
        ([], "light", "light"),
        (["light"], "strong", "strong"),
    ],
)
def test_the_tier_is_the_servers(offered: list[str], asked: str, found: str) -> None:
    backends = {"one": SimpleNamespace(tiers=tuple(offered))}
    service: Any = SimpleNamespace(
        manager=SimpleNamespace(maker=SimpleNamespace(backends=backends))
    )
    assert found == lives.tiered(service, SandboxSpec(tier=asked)).tier


# -- timeouts ------------------------------------------------------------------------------------


def timeout(service: Service, caller: Caller, form: dict[str, Any], *default: Any) -> int:
    call: Any = SimpleNamespace(service=service, caller=caller)
    return lives.timeout_of(call, form, *default)


def test_a_timeout_is_from_nothing_to_a_year_and_up_to_the_ceiling(make: Make) -> None:
    service, year = make().service, 366 * 86_400

    assert 300 == timeout(service, ANN, {})
    for given in (0, 1, 5000):
        assert given == timeout(service, ANN, {"timeout": given})
    assert year == timeout(service, ADMINISTRATOR, {"timeout": year})
    for caller, given, status, words in (
        (ANN, 5001, 403, "timeout"),
        (ADMINISTRATOR, year + 1, 400, f"{year + 1} seconds"),
        (ANN, -1, 400, "-1 seconds"),
    ):
        with pytest.raises(ApiError, match=words) as refused:
            timeout(service, caller, {"timeout": given})
        assert status == refused.value.status
        assert "ttl_s" not in str(refused.value), "the client has never heard of it"
    with pytest.raises(ApiError, match="missing") as refused:
        timeout(service, ANN, {}, None)
    assert 400 == refused.value.status
    with pytest.raises(RpcError, match="timeout"):
        timeout(service, ANN, {"timeout": "soon"})


# -- forks ---------------------------------------------------------------------------------------


class Carried(Carry):
    """Counts; fails where it is told to."""

    def __init__(self, *fails: Exception | None) -> None:
        self.fails = list(fails)
        self.told: list[str] = []
        self.steps: list[str] = []

    def release(self) -> None:
        self.steps.append("release")

    def load(self) -> None:
        self.steps.append("load")

    def put_into(self, fork: Live) -> None:
        error = self.fails.pop(0) if self.fails else None
        if error is not None:
            raise error

    def leave_out(self, reason: str) -> None:
        self.told.append(reason)

    def close(self) -> None:
        self.steps.append("close")


class Whole(Carried):
    """A snapshot with memory: what cannot go on makes no fork."""

    is_whole = True


def no_kernel() -> Unsupported:
    return Unsupported("no kernel for it", backend="x", operation="fork")


@pytest.mark.parametrize(
    ("carry", "outcomes", "told"),
    [
        (Carried(), ["made", "made", "made"], []),
        (Carried(None, no_kernel()), ["made", "made", "made"], ["no kernel for it"]),
        (Carried(ExecError("no")), ["ExecError", "made", "made"], []),
        (Carried(LifecycleError("no"), None, ExecError("no")), ["LifecycleError", "made", "ExecError"], []),
        (Carried(KeyError("a bug")), ["raised"], []),
    ],
)  # fmt: skip
def test_of_forks_that_fail_nothing_is_left(
    make: Make, carry: Carried, outcomes: list[str], told: list[str]
) -> None:
    scene = make()
    live = scene.create()

    def create(snapshot_id: str) -> Live:
        return scene.create(snapshot_id=snapshot_id)

    found: list[str] = []
    try:
        for each in lives.forks(scene.manager, live, 3, carry, create):
            found.append("made" if isinstance(each, Live) else type(each).__name__)
    except KeyError:
        found.append("raised")

    assert outcomes == found
    assert told == carry.told
    assert ["release", "load", "close"] == carry.steps
    assert 1 + found.count("made") == len(scene.manager.index.all()) == len(scene.backend.sandboxes)
    assert [] == list(scene.manager.snapshots()) == scene.backend.snapshots()


def test_forks_that_cannot_be_made_are_told_of_and_leave_no_snapshot(make: Make) -> None:
    scene = make()
    live = scene.create(replace(ANN, max_sandboxes=2))

    def create(snapshot_id: str) -> Live:
        return scene.create(replace(ANN, max_sandboxes=2), snapshot_id=snapshot_id)

    carry = Carried()
    made = list(lives.forks(scene.manager, live, 3, carry, create))

    assert [True, False, False] == [isinstance(each, Live) for each in made]
    assert "close" == carry.steps[-1]
    assert [] == scene.backend.snapshots()


def test_a_client_that_asks_for_no_more_forks_leaves_no_snapshot(make: Make) -> None:
    """The answer may break off after the first."""
    scene = make()
    live = scene.create()
    carry = Carried()
    forks = lives.forks(
        scene.manager, live, 3, carry, lambda snapshot_id: scene.create(snapshot_id=snapshot_id)
    )
    next(iter(forks))
    assert 1 == len(scene.backend.snapshots())
    forks.close()  # type: ignore[attr-defined]

    assert (["release", "load", "close"], []) == (carry.steps, scene.backend.snapshots())


def test_a_fork_is_never_of_files_alone_where_the_snapshot_has_memory(make: Make) -> None:
    scene = make()
    carry = Whole(no_kernel())

    def create() -> Live:
        return scene.create()

    with pytest.raises(Unsupported):
        lives._with_all(scene.manager, carry, create)

    assert ([], []) == (carry.told, scene.manager.index.all())
    assert isinstance(lives._with_all(scene.manager, carry, create), Live), "the control"
