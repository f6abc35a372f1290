"""What users of other session managers rely on: objects and mappings as arguments, health, selection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from ringfence import NetworkPolicy, Sandbox, SandboxSpec
from ringfence.backends.command.backend import CommandBackend
from ringfence.backends.native.backend import NativeBackend
from ringfence.errors import (
    BackendUnavailable,
    InvalidRequest,
    SandboxNotFound,
    Unsupported,
)
from ringfence.model import capabilities as can
from ringfence.model.acquire import AcquireOptions, RequiredCapabilities
from ringfence.model.client_session import SessionTimeouts
from ringfence.sessions.config import PoolConfig
from ringfence.sessions.manager import SessionManager
from ringfence.sessions.selection import beforehand
from tests.sessions.conftest import MakeManager
from tests.unconfined import Unconfined

pytestmark = pytest.mark.anyone


@pytest.fixture
def unconfined(make_manager: MakeManager) -> SessionManager:
    return make_manager(backends=(Unconfined(),))


VERBS: dict[str, Callable[[SessionManager, Any], object]] = {
    "detach": lambda m, s: m.detach(s),
    "suspend": lambda m, s: m.suspend(s),
    "resume": lambda m, s: m.resume(s, "ann"),
    "touch": lambda m, s: m.touch(s),
    "extend": lambda m, s: m.extend(s, 60),
    "get": lambda m, s: m.get(s),
    "sandbox": lambda m, s: m.sandbox(s),
    "capabilities": lambda m, s: m.capabilities(s),
    "set_default_sandbox": lambda m, s: m.set_default_sandbox("ann", s),
    "snapshot": lambda m, s: m.snapshot(s),
    "release": lambda m, s: m.release(s),
    "terminate": lambda m, s: m.terminate(s),
}


def test_verbs_take_whatever_names_a_session(unconfined: SessionManager) -> None:
    for kind in range(5):
        lease = unconfined.acquire(client_id="ann")
        session = lease.session
        named = (lease, session, lease.sandbox, lease.id, session.sandbox_id)[kind]
        for call in VERBS.values():
            call(unconfined, named)
        assert "terminated" == unconfined.get(named).state


@pytest.mark.parametrize("verb", VERBS)
def test_what_names_no_session_is_refused_with_a_typed_error(
    unconfined: SessionManager, verb: str
) -> None:
    for wrong in (7, None, {"session_id": "x"}, b"sess-1", object()):
        if verb == "set_default_sandbox" and wrong is None:
            continue  # that is: no default
        with pytest.raises(InvalidRequest) as refusal:
            VERBS[verb](unconfined, wrong)
        assert "session" == refusal.value.field
    with Sandbox.create(backend=Unconfined()) as own:
        for unknown in ("nobody", "", own):
            with pytest.raises(SandboxNotFound):
                VERBS[verb](unconfined, unknown)
    with pytest.raises(InvalidRequest):
        VERBS[verb](unconfined, "\ud800")


def test_specs_options_and_requests_may_be_mappings(unconfined: SessionManager) -> None:
    lease = unconfined.acquire({"labels": {"a": "1"}}, {"metadata": {"b": "2"}}, client_id="ann")
    assert ("1", "2") == (lease.sandbox.spec.labels["a"], lease.session.metadata["b"])

    asked = {"sandbox_id": lease.session.sandbox_id, "client_id": "ann"}
    assert lease.id == unconfined.attach(asked).id

    for wrong, field in (
        (lambda: unconfined.acquire({"lables": {}}, client_id="ann"), "spec.lables"),
        (lambda: unconfined.acquire(7, client_id="ann"), "spec"),  # type: ignore[arg-type]
        (lambda: unconfined.acquire(None, ["x"], client_id="ann"), "options"),  # type: ignore[arg-type]
        (lambda: unconfined.attach("sbx-1"), "request"),  # type: ignore[arg-type]
        (lambda: unconfined.attach({"sandbox_id": "x"}), "request.client_id"),
        (lambda: unconfined.default_sandbox({}), "client_id"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidRequest) as refusal:
            wrong()
        assert field == refusal.value.field


def test_a_network_may_be_required_not_to_be_there(make_manager: MakeManager) -> None:
    manager = make_manager()
    none = RequiredCapabilities(network=False, write_access=True)
    assert (
        not manager.acquire(options=AcquireOptions(required=none), client_id="a")
        .capabilities()
        .has_network
    )

    some = SandboxSpec(network=NetworkPolicy(allowed_hosts=("example.com",)))
    with pytest.raises(InvalidRequest) as refusal:
        manager.acquire(some, AcquireOptions(required=none), client_id="a")
    assert "required.network" == refusal.value.field

    no_writing = AcquireOptions(required=RequiredCapabilities(write_access=False))
    with pytest.raises(Unsupported, match="files that can be written"):
        manager.acquire(options=no_writing, client_id="a")
    assert RequiredCapabilities() == RequiredCapabilities.from_json({"network": None})
    assert none == RequiredCapabilities.from_json(none.to_json())


def test_a_session_tells_whether_its_time_is_over(make_manager: MakeManager) -> None:
    manager = make_manager(backends=(Unconfined(),), background=False)
    options = AcquireOptions(timeouts=SessionTimeouts(idle_s=0.001))
    short = manager.acquire(options=options, client_id="ann")
    long = manager.acquire(client_id="ann")
    while not short.session.is_timed_out:
        pass

    assert 0 == short.session.time_remaining_s
    assert not long.session.is_timed_out
    assert 0 < (long.session.time_remaining_s or 0) <= 300
    long.release()
    assert long.session.is_timed_out
    assert manager.get(long).is_timed_out


def test_an_idle_timeout_without_a_manager_says_who_keeps_one(
    native: NativeBackend, make_manager: MakeManager
) -> None:
    with pytest.raises(Unsupported) as refusal:
        Sandbox.create(limits={"idle_timeout_s": 1}, backend=native)

    assert "SessionManager" in refusal.value.hint
    lease = make_manager().acquire({"limits": {"idle_timeout_s": 77}}, client_id="ann")
    assert 77 == lease.session.timeouts.idle_s


class Away(Unconfined):
    name = "away"

    def report(self):  # type: ignore[no-untyped-def]
        return super().report().altered(available=False, reason="no kernel for it")


def test_one_backend_that_serves_is_health(make_manager: MakeManager) -> None:
    manager = make_manager(backends=(Away(), Unconfined()))
    health = manager.health()
    each = {check.name: check for check in health.checks}

    assert health.ok
    assert (False, "no kernel for it") == (each["backend away"].ok, each["backend away"].detail)
    assert each["backend unconfined"].ok
    assert not make_manager(backends=(Away(),)).health().ok


def test_the_default_pool_asks_for_nothing_that_a_backend_lacks(make_manager: MakeManager) -> None:
    class NeverAhead(Unconfined):
        lacks: ClassVar = {**Unconfined.lacks, can.PREWARM: "switched off"}

    for pool, ok in ((PoolConfig(), True), (PoolConfig(min_warm=1), False)):
        manager = make_manager(backends=(NeverAhead(),), pool=pool, background=False)
        manager.fill_pool()
        (check,) = [each for each in manager.health().checks if each.name == "pool"]
        assert ok == check.ok
        assert "prewarm" in check.detail
        assert manager.health().ok


class Rootless(Unconfined):
    name = "rootless"

    def refuses(self, spec: SandboxSpec) -> str:
        return f"no user {spec.user}: it maps one user" if spec.user else ""


class WithOwnRoot(Unconfined):
    name = "with_own_root"
    profile_names = (*Unconfined.profile_names, "own_root")


def test_profile_and_user_choose_the_backend(make_manager: MakeManager) -> None:
    manager = make_manager(backends=(Rootless(), WithOwnRoot()))

    for spec, wanted in (
        ({}, "rootless"),
        ({"user": "sandbox"}, "with_own_root"),
        ({"profile": "own_root"}, "with_own_root"),
    ):
        assert wanted == manager.acquire(spec, client_id="ann").session.backend
    with pytest.raises(BackendUnavailable, match="it maps one user"):
        manager.acquire({"user": "sandbox"}, {"preferred_backend": "rootless"}, client_id="ann")
    with pytest.raises(BackendUnavailable, match="own_root is not one of its profiles"):
        manager.acquire({"profile": "own_root"}, {"preferred_backend": "rootless"}, client_id="ann")
    with pytest.raises(InvalidRequest) as refusal:
        manager.acquire({"profile": "mine"}, client_id="ann")
    assert ("profile", True) == (refusal.value.field, "own_root" in refusal.value.hint)


def test_real_backends_say_beforehand_what_they_never_make(native: NativeBackend) -> None:
    launched = CommandBackend()

    assert "no user root" in str(beforehand(SandboxSpec(user="root"), launched))
    assert "profile own_root is not" in str(beforehand(SandboxSpec(profile="own_root"), launched))
    for spec in (SandboxSpec(), SandboxSpec(user="1000"), SandboxSpec(profile="debug")):
        assert not beforehand(spec, launched) + beforehand(spec, native)
    assert not beforehand(SandboxSpec(user="root"), native)


def test_a_report_names_the_profiles(native: NativeBackend) -> None:
    report = native.report()

    assert {"os_hardened", "own_root", "debug", "unrestricted"} == {*report.profiles}
    assert report == type(report).from_json(report.to_json())
    assert report.can("suspend_on_idle")
