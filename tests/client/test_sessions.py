"""`client.sessions`: the verbs of a session manager, at a server."""

from __future__ import annotations

import pytest

from ringfence.client import AsyncClient, Client
from ringfence.errors import Forbidden, InvalidRequest, LifecycleError, SandboxNotFound
from tests.api.conftest import Daemon, StartDaemon

pytestmark = pytest.mark.anyone


@pytest.fixture(scope="module")
def daemon(start_daemon: StartDaemon) -> Daemon:
    return start_daemon("--listen", "127.0.0.1:0")


def test_a_session_from_beginning_to_end(client: Client) -> None:
    sessions = client.sessions
    asked = {"metadata": {"why": "test"}, "timeouts": {"idle_s": 70}}
    with sessions.acquire({"labels": {"a": "b"}}, asked) as lease:
        assert (True, "active") == (lease.newly_created, lease.session.state)
        assert (70, "test") == (lease.session.timeouts.idle_s, lease.session.metadata["why"])
        assert "hello\n" == lease.sandbox.exec(["echo", "hello"]).text
        assert lease.capabilities().syscall_filter_active
        assert 0 < (lease.session.time_remaining_s or 0) <= 70

        for named in (lease, lease.session, lease.sandbox, lease.id, lease.session.sandbox_id):
            assert "detached" == sessions.detach(named).state
            again = sessions.attach({"sandbox_id": lease.session.sandbox_id})
            assert (lease.id, False) == (again.id, again.newly_created)
        assert "suspended" == sessions.suspend(lease).state
        assert "active" == sessions.resume(lease).state
        assert "active" == sessions.touch(lease).state
        assert 500 < (sessions.extend(lease, 600).expires_in_s or 0)
        assert [lease.id] == [each.session_id for each in sessions.list(labels={"a": "b"})]
        assert [] == sessions.list(states=("suspended",))
        assert sessions.sandbox(lease).exec(["true"]).ok
        assert sessions.capabilities(lease).can_write_filesystem

        chosen = sessions.set_default_sandbox(lease)
        assert [lease.id] * 2 == [
            each.session_id for each in (chosen, sessions.default_sandbox()) if each
        ]
        assert sessions.set_default_sandbox(None) is None
        assert sessions.default_sandbox() is None
    assert ("terminated", "released") == (lease.session.state, lease.session.reason)
    assert sessions.get(lease).is_timed_out
    assert "terminated" == sessions.terminate(lease).state
    with pytest.raises(LifecycleError):
        sessions.touch(lease)


def test_what_names_no_session_is_refused_here(client: Client) -> None:
    with pytest.raises(SandboxNotFound):
        client.sessions.get("sess-nothing")
    with pytest.raises(SandboxNotFound):
        client.sessions.attach({"sandbox_id": "sbx-nothing"})
    for wrong in (7, None, {"id": 7}):
        with pytest.raises(InvalidRequest, match="must be a session or its id"):
            client.sessions.detach(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest) as refusal:
        client.sessions.acquire({"lables": {}})
    assert "spec.lables" == refusal.value.field


def test_one_key_is_one_session_and_one_client(daemon: Daemon, client: Client) -> None:
    made = client.make_key("ann", scope="user")["key"]
    with Client(daemon.tcp, key=made) as ann:
        lease = ann.sessions.acquire(options={"key": "k"})
        assert "ann" == lease.session.client_id
        assert lease.id == ann.sessions.acquire(options={"key": "k"}, client_id="ann").id
        assert lease.id == ann.sessions.attach({"sandbox_id": lease.id}).id
        with pytest.raises(Forbidden):
            ann.sessions.acquire(client_id="bob")
        with pytest.raises(Forbidden):
            ann.sessions.attach({"sandbox_id": "x", "client_id": "bob"})

        bobs = client.sessions.acquire(client_id="bob")  # an admin may
        assert "bob" == bobs.session.client_id
        with pytest.raises(SandboxNotFound):
            ann.sessions.detach(bobs)
        assert bobs.id == client.sessions.attach({"sandbox_id": bobs.id, "client_id": "bob"}).id
        ann.sessions.release(lease, keep_alive=True)
    bobs.release()


async def test_and_awaited(async_client: AsyncClient) -> None:
    sessions = async_client.sessions
    async with await sessions.acquire() as lease:
        assert (await lease.sandbox.exec(["true"])).ok
        assert "detached" == (await sessions.detach(lease)).state
        again = await sessions.attach({"sandbox_id": lease.session.sandbox_id})
        assert again.id == lease.id
        assert lease.id in [each.session_id for each in await sessions.list()]
    assert "released" == (await sessions.get(lease)).reason
