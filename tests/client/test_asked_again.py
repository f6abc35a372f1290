"""Each method of the client, at a server that takes every request and answers none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ringfence.client import Client, RemoteSandbox
from ringfence.client._sync.process import RemoteProcess, RemoteStdin
from ringfence.errors import ServerUnreachable
from ringfence.model.execs.exec_view import ExecView
from ringfence.model.sandbox import SandboxView
from ringfence.model.spec import SandboxSpec
from tests.client.scripted import served, without_pauses
from tests.client.test_lost_answers import TABLE

pytestmark = pytest.mark.anyone


def sandbox_view(sandbox_id: str = "sbx-a", **changes: Any) -> SandboxView:
    form = {
        "id": sandbox_id,
        "session_id": sandbox_id,
        "owner": "me",
        "state": "running",
        "session_state": "active",
        "backend": "native",
        "created_at": 1.0,
        "last_active_at": 1.0,
    }
    return SandboxView.from_json({**form, **changes})


def exec_view(**changes: Any) -> ExecView:
    form: dict[str, Any] = {"id": "exec-a", "sandbox_id": "sbx-a", "argv": ["cat"]}
    return ExecView.from_json({**form, "state": "running", "created_at": 1.0, **changes})


def sandbox_of(client: Client, name: str = "sbx-a") -> RemoteSandbox:
    """A sandbox that a client knows without having asked."""
    return RemoteSandbox(client._transport, sandbox_view(name), SandboxSpec())


def process_of(client: Client, **changes: Any) -> RemoteProcess:
    return RemoteProcess(client._transport, "/v1/sandboxes/sbx-a", exec_view(**changes))


class _Place:
    """As the place of `test_lost_answers`, at a server that never answers."""

    def __init__(self, client: Client, local: Path) -> None:
        self.client, self.local = client, local
        self.box, self.kept = sandbox_of(client), sandbox_of(client, "sbx-b")
        self.files = self.box.files
        self.process = self.over = process_of(client, stream_stdin=True)

    def on_sessions(self, verb: str) -> None:
        getattr(self.client.sessions, verb)(self.kept)

    @property
    def stdin(self) -> RemoteStdin:
        assert self.process.stdin is not None
        return self.process.stdin


OTHERWISE: dict[str, Callable[[Any], Any]] = {
    "RemoteProcess.resize": lambda p: p.process.resize(3, 3)
}


@pytest.mark.parametrize("name", TABLE)
def test_a_request_without_an_answer_is_sent_again_only_where_that_is_safe(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the table says: the last request once where it is not to be repeated, else more often."""
    without_pauses(monkeypatch)
    call, is_repeated = TABLE[name]
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "file").write_bytes(b"here")
    with served(tmp_path / "s", lambda _: None) as (client, server):
        place: Any = _Place(client, tmp_path / "local")
        ask: Callable[[Any], Any] = OTHERWISE.get(name, call)
        with pytest.raises(ServerUnreachable):
            ask(place)
        asked = server.requests
    assert is_repeated == (len(asked) > 1), server.asked
    assert 1 == len({(each.method, each.path) for each in asked})
    keys = {each.headers.get("idempotency-key") for each in asked}
    assert 1 == len(keys), "the second attempt has the key of the first"
    assert 1 == len({each.body for each in asked}), "and its body"
    if is_repeated and asked[0].method == "POST":
        assert keys != {None} or asked[0].path.rpartition("/")[2] in HARMLESS, server.asked


# Doing these twice is the same as doing them once; every other POST that is repeated has a key.
HARMLESS = {
    *("suspend", "resume", "extend", "kill", "resize", "dirs"),
    *("sessions", "attach", "detach", "touch", "release", "terminate"),
}
