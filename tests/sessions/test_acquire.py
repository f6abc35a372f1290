"""Every option of acquire is honoured, on real sandboxes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ringfence import Limits, Mount, SandboxSpec
from ringfence.backends.native.backend import NativeBackend
from ringfence.errors import (
    BackendUnavailable,
    InvalidRequest,
    LifecycleError,
    SandboxNotFound,
    Unsupported,
)
from ringfence.model.acquire import AcquireOptions, AttachRequest, RequiredCapabilities
from ringfence.model.base.ids import check_id
from ringfence.model.client_session import SessionTimeouts
from ringfence.sessions.config import PoolConfig
from ringfence.sessions.manager import SessionManager
from tests.sessions.conftest import MakeManager
from tests.unconfined import Unconfined

pytestmark = pytest.mark.anyone

MIB = 1 << 20


def test_what_a_session_is(manager: SessionManager) -> None:
    options = AcquireOptions(metadata={"why": "test"})

    lease = manager.acquire(options=options, client_id="ann")

    session = lease.session
    assert session.session_id.startswith("sess-")
    assert session.sandbox_id.startswith("sbx-")
    assert session.sandbox_id == check_id(session.sandbox_id) == lease.sandbox.id
    assert ("ann", "active", "native") == (session.client_id, session.state, session.backend)
    assert session.created_at <= session.last_active_at
    assert {"why": "test"} == session.metadata
    assert SessionTimeouts() == session.timeouts
    assert session == type(session).from_json(session.to_json())
    assert 0 == lease.sandbox.exec(["true"]).exit_code


def test_a_lease_is_released_at_the_end_of_its_block(manager: SessionManager) -> None:
    with manager.acquire(client_id="ann") as lease:
        sandbox = lease.sandbox
        assert sandbox.exec(["true"]).ok

    assert ("terminated", "released") == (lease.session.state, lease.session.reason)
    assert "terminated" == sandbox.state
    with pytest.raises(LifecycleError):
        sandbox.exec(["true"])
    assert "terminated" == manager.release(lease.id).state  # twice is once


@pytest.mark.parametrize("client", ["", "a\nb", "x" * 256])
def test_a_client_has_a_name(manager: SessionManager, client: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        manager.acquire(client_id=client)

    assert "client_id" == refusal.value.field


# -- preferred id, fresh -------------------------------------------------------------------------


def test_a_preferred_id_is_given_to_a_new_sandbox(manager: SessionManager) -> None:
    lease = manager.acquire(options=AcquireOptions(preferred_id="my-box"), client_id="ann")

    assert "my-box" == lease.session.sandbox_id == lease.sandbox.id


def test_the_client_s_own_sandbox_is_taken_again(manager: SessionManager) -> None:
    options = AcquireOptions(preferred_id="my-box")
    first = manager.acquire(options=options, client_id="ann")
    first.sandbox.files.write("note", b"mine")
    manager.detach(first.id)

    again = manager.acquire(options=options, client_id="ann")

    assert (first.id, False) == (again.id, again.newly_created)
    assert "active" == again.session.state
    assert b"mine" == again.sandbox.files.read("note")
    assert 1 == manager.stats().created == manager.stats().active_sessions


def test_another_client_never_gets_it(manager: SessionManager) -> None:
    options = AcquireOptions(preferred_id="my-box")
    first = manager.acquire(options=options, client_id="ann")
    first.sandbox.files.write("note", b"mine")

    theirs = manager.acquire(options=options, client_id="bob")
    assert "my-box" != theirs.session.sandbox_id
    assert not theirs.sandbox.files.exists("note")

    first.release()
    later = manager.acquire(options=options, client_id="bob")
    assert "my-box" != later.session.sandbox_id


def test_a_fresh_one_is_a_new_one(manager: SessionManager) -> None:
    first = manager.acquire(options=AcquireOptions(preferred_id="my-box"), client_id="ann")

    options = AcquireOptions(preferred_id="my-box", require_fresh=True)
    fresh = manager.acquire(options=options, client_id="ann")

    assert fresh.newly_created
    assert first.session.sandbox_id != fresh.session.sandbox_id


def test_the_spec_does_not_name_it(manager: SessionManager) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        manager.acquire(SandboxSpec(id="here"), client_id="ann")

    assert "spec.id" == refusal.value.field


# -- labels --------------------------------------------------------------------------------------


def test_required_labels_choose_what_is_taken_again(manager: SessionManager) -> None:
    spec = SandboxSpec(labels={"team": "red"})
    first = manager.acquire(spec, AcquireOptions(preferred_id="my-box"), client_id="ann")

    same = AcquireOptions(preferred_id="my-box", required_labels={"team": "red"})
    other = AcquireOptions(preferred_id="my-box", required_labels={"team": "blue"})
    again = manager.acquire(options=same, client_id="ann")
    new = manager.acquire(options=other, client_id="ann")

    assert first.id == again.id
    assert first.id != new.id
    assert "blue" == new.sandbox.session.metadata["team"]
    assert [new.id] == [s.session_id for s in manager.list(labels={"team": "blue"})]


def test_labels_that_contradict_the_spec_are_refused(manager: SessionManager) -> None:
    options = AcquireOptions(required_labels={"team": "blue"})
    with pytest.raises(InvalidRequest) as refusal:
        manager.acquire(SandboxSpec(labels={"team": "red"}), options, client_id="ann")

    assert "required_labels.team" == refusal.value.field
    assert 0 == manager.slots.taken


# -- required capabilities -----------------------------------------------------------------------


def required(**what: Any) -> AcquireOptions:
    return AcquireOptions(required=RequiredCapabilities(**what))


def test_what_is_there_is_found_to_be_there(manager: SessionManager, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "rw").mkdir(mode=0o755)
    spec = SandboxSpec(
        mounts=(Mount("/data", str(tmp_path)), Mount("/work", str(tmp_path / "rw"), "read_write")),
        limits=Limits(memory_bytes=256 * MIB),
    )
    options = required(
        write_access=True,
        minimum_memory_bytes=200 * MIB,
        readable_paths=("/data", "/usr/bin"),
        writable_paths=("/work", "/tmp/below"),
    )

    assert manager.acquire(spec, options, client_id="ann").sandbox.exec(["true"]).ok


@pytest.mark.parametrize(
    ("what", "field"),
    [
        ({"writable_paths": ("/data",)}, "required.writable_paths"),
        ({"writable_paths": ("/usr",)}, "required.writable_paths"),
        ({"minimum_memory_bytes": 1 << 46}, "required.minimum_memory_bytes"),
    ],
)
def test_what_is_not_there_ends_it(
    manager: SessionManager, tmp_path: Path, what: dict[str, Any], field: str
) -> None:
    """Found out by looking at what was made, which is gone again then."""
    tmp_path.chmod(0o755)
    spec = SandboxSpec(mounts=(Mount("/data", str(tmp_path)),))

    with pytest.raises(Unsupported) as refusal:
        manager.acquire(spec, required(**what), client_id="ann")

    assert field == refusal.value.field
    assert (0, 0) == (manager.slots.taken, manager.stats().active_sandboxes)
    assert manager.acquire(spec, client_id="ann").sandbox.exec(["true"]).ok  # the control


@pytest.mark.parametrize(
    ("what", "spec", "field"),
    [
        ({"network": True}, SandboxSpec(), "required.network"),
        (
            {"minimum_memory_bytes": 200 * MIB},
            SandboxSpec(limits=Limits(memory_bytes=100 * MIB)),
            "required.minimum_memory_bytes",
        ),
    ],
)
def test_what_the_request_rules_out_itself_is_refused_at_once(
    manager: SessionManager, what: dict[str, Any], spec: SandboxSpec, field: str
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        manager.acquire(spec, required(**what), client_id="ann")

    assert field == refusal.value.field
    assert [] == manager.store.unended_sandboxes()


def test_what_will_not_do_is_not_taken_again(manager: SessionManager) -> None:
    first = manager.acquire(options=AcquireOptions(preferred_id="my-box"), client_id="ann")
    wanted = RequiredCapabilities(writable_paths=("/work",))
    spec = SandboxSpec(mounts=(Mount("/work", "", "read_write"),))

    second = manager.acquire(
        spec, AcquireOptions(preferred_id="my-box", required=wanted), client_id="ann"
    )

    assert first.id != second.id


# -- backends ------------------------------------------------------------------------------------


def test_the_first_backend_that_can_is_taken(
    make_manager: MakeManager, native: NativeBackend
) -> None:
    manager = make_manager(backends=(Unconfined(), native))

    plain = manager.acquire(client_id="ann")
    limited = manager.acquire(SandboxSpec(limits=Limits(memory_bytes=64 * MIB)), client_id="ann")

    assert ("unconfined", "native") == (plain.session.backend, limited.session.backend)


def test_a_preferred_one_and_no_other(make_manager: MakeManager, native: NativeBackend) -> None:
    manager = make_manager(backends=(native, Unconfined()))
    options = AcquireOptions(preferred_backend="unconfined")

    assert "unconfined" == manager.acquire(options=options, client_id="ann").session.backend
    with pytest.raises(BackendUnavailable) as refusal:
        manager.acquire(SandboxSpec(limits=Limits(memory_bytes=64 * MIB)), options, client_id="ann")
    assert "memory_limit" in str(refusal.value)
    assert "native: not tried" in str(refusal.value)
    with pytest.raises(InvalidRequest) as unknown:
        manager.acquire(options=AcquireOptions(preferred_backend="gvisor"), client_id="ann")
    assert "preferred_backend" == unknown.value.field


def test_when_none_can_each_says_why(make_manager: MakeManager, native: NativeBackend) -> None:
    manager = make_manager(backends=(native, Unconfined()))
    spec = SandboxSpec(tier="strong", limits=Limits(io_bytes_per_s=1000))

    with pytest.raises(BackendUnavailable) as refusal:
        manager.acquire(spec, client_id="ann")

    text = str(refusal.value)
    for said in ("native: tier strong", "unconfined: tier strong"):
        assert said in text, text
    with pytest.raises(BackendUnavailable, match="no io_limit: it limits nothing"):
        manager.acquire(
            SandboxSpec(limits=Limits(io_bytes_per_s=1000)),
            AcquireOptions(preferred_backend="unconfined"),
            client_id="ann",
        )
    assert 0 == manager.slots.taken


# -- keys ----------------------------------------------------------------------------------------


def test_asking_again_under_a_key_gives_the_same(manager: SessionManager) -> None:
    spec, options = SandboxSpec(env={"A": "1"}), AcquireOptions(key="job-7")
    first = manager.acquire(spec, options, client_id="ann")

    again = manager.acquire(spec, options, client_id="ann")
    theirs = manager.acquire(spec, options, client_id="bob")

    assert (first.id, False) == (again.id, again.newly_created)
    assert first.id != theirs.id
    with pytest.raises(InvalidRequest) as refusal:
        manager.acquire(SandboxSpec(env={"A": "2"}), options, client_id="ann")
    assert "key" == refusal.value.field
    first.release()
    assert manager.acquire(spec, options, client_id="ann").newly_created


# -- attach --------------------------------------------------------------------------------------


def test_attach_finds_only_the_client_s_own(manager: SessionManager) -> None:
    lease = manager.acquire(client_id="ann")
    sandbox_id = lease.session.sandbox_id
    manager.detach(lease.id)

    again = manager.attach(AttachRequest(sandbox_id, "ann"))

    assert (lease.id, False, "active") == (again.id, again.newly_created, again.session.state)
    assert sandbox_id == again.capabilities().id
    for request in (
        AttachRequest(sandbox_id, "bob"),
        AttachRequest(sandbox_id, "bob", create_if_missing=True),
        AttachRequest("no-such-thing", "ann"),
    ):
        with pytest.raises(SandboxNotFound):
            manager.attach(request)
    assert 1 == manager.slots.taken


def test_attach_creates_where_it_may(manager: SessionManager) -> None:
    spec = SandboxSpec(env={"A": "1"})
    request = AttachRequest("new-box", "ann", create_if_missing=True, create_spec=spec)

    lease = manager.attach(request)

    assert ("new-box", True) == (lease.session.sandbox_id, lease.newly_created)
    assert "1\n" == lease.sandbox.shell("echo $A").text
    assert not manager.attach(request).newly_created


# -- finding -------------------------------------------------------------------------------------


def test_found_by_session_by_sandbox_and_by_client(manager: SessionManager) -> None:
    anns = [manager.acquire(client_id="ann") for _ in range(2)]
    bobs = manager.acquire(client_id="bob")
    one = anns[0].session

    assert one.session_id == manager.get(one.session_id).session_id
    assert one.session_id == manager.get(one.sandbox_id).session_id
    assert [lease.id for lease in anns] == [s.session_id for s in manager.list("ann")]
    assert 3 == len(manager.list())
    assert manager.sandbox(one.session_id) is manager.sandbox(one.sandbox_id)
    for call in (manager.get, manager.sandbox, manager.detach, manager.suspend, manager.resume):
        with pytest.raises(SandboxNotFound):
            call(bobs.id, "ann")
    with pytest.raises(SandboxNotFound):
        manager.terminate(bobs.id, "ann")
    with pytest.raises(SandboxNotFound):
        manager.extend(bobs.id, 10, "ann")
    assert bobs.sandbox.exec(["true"]).ok


def test_a_default_sandbox(manager: SessionManager) -> None:
    lease, bobs = manager.acquire(client_id="ann"), manager.acquire(client_id="bob")
    assert manager.default_sandbox("ann") is None

    manager.set_default_sandbox("ann", lease.id)

    found = manager.default_sandbox("ann")
    assert found is not None
    assert lease.id == found.session_id
    assert manager.default_sandbox("bob") is None
    with pytest.raises(SandboxNotFound):
        manager.set_default_sandbox("ann", bobs.id)
    manager.set_default_sandbox("ann", None)
    assert manager.default_sandbox("ann") is None
    manager.set_default_sandbox("ann", lease.id)
    lease.release()
    assert manager.default_sandbox("ann") is None


def test_unknown_ids_are_not_found(manager: SessionManager) -> None:
    for call in (manager.resume, manager.suspend, manager.detach, manager.terminate, manager.get):
        with pytest.raises(SandboxNotFound):
            call("sess-nobody")
    with pytest.raises(SandboxNotFound):
        manager.release("sess-nobody")


def test_after_closing_nothing_goes_on(make_manager: MakeManager) -> None:
    manager = make_manager()
    lease = manager.acquire(client_id="ann")

    manager.close()
    manager.close()

    assert "closed" == lease.session.reason
    calls: tuple[Callable[[], object], ...] = (
        partial(manager.acquire, client_id="ann"),
        partial(manager.attach, AttachRequest(lease.session.sandbox_id)),
        manager.list,
        manager.snapshots,
        partial(manager.delete_snapshot, "snap-nothing"),
        partial(manager.default_sandbox, "ann"),
        manager.health,
        partial(manager.change_pool, PoolConfig(enabled=False)),
        manager.cleanup_expired,
        manager.fill_pool,
    )
    for call in calls:
        with pytest.raises(LifecycleError, match="is closed"):
            call()
