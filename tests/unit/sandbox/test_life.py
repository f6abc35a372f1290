"""A sandbox object from its creation to its end: what it gives back, follows and refuses on each way."""

from __future__ import annotations

import json
import os
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.client.scripted import Request, as_json, problem, served
from tests.client.test_asked_again import sandbox_view
from tests.native.outside import same_descriptors

from ringfence import Sandbox
from ringfence.client import Client
from ringfence.errors import (
    ExecNotFound,
    FileError,
    InvalidRequest,
    IoError,
    LifecycleError,
    ResourceExhausted,
    Unsupported,
)
from ringfence.model.net.network import NetworkPolicy
from ringfence.model.spec import LINEAGE, SandboxSpec
from ringfence.sandbox import looking, marks, remote
from ringfence.sandbox.looking import Watch, ask

pytestmark = pytest.mark.anyone

PATIENCE_S = 60.0


class Inner:
    """A sandbox of a backend, which notes what is asked of it."""

    def __init__(self, name: str = "sbx-1") -> None:
        self.state, self.name, self.asked = "running", name, list[str]()
        self.spec, self.files = SandboxSpec(), SimpleNamespace(of=name)
        self.ended = threading.Event()

    @property
    def session(self) -> Any:
        return SimpleNamespace(id=self.name, backend="plain", state=self.state, mounts=(self.name,))

    def snapshot(self, metadata: Any) -> Any:
        self.asked.append("snapshot")
        return SimpleNamespace(id=f"snap-{self.name}", metadata=metadata)

    def forward(self, port: int, client: socket.socket) -> None:
        with client:
            client.sendall(f"{self.name} {port}".encode())

    def terminate(self) -> None:
        self.asked.append("terminate")
        self.state = "terminated"
        self.ended.set()


class Home:
    """Its backend.

    Attributes:
        fails: At which restore there is no more room; 0: at none.
    """

    def __init__(self, fails: int = 0) -> None:
        self.made, self.deleted, self.fails = list[Inner](), list[str](), fails

    def snapshots(self) -> list[Any]:
        return []

    def restore(self, snapshot_id: str, spec: Any, **_: Any) -> Inner:
        assert snapshot_id not in self.deleted
        if self.fails == len(self.made) + 1:
            raise ResourceExhausted("no room")
        self.made.append(Inner(spec.id or f"fork-{len(self.made)}"))
        self.made[-1].spec = spec
        return self.made[-1]

    def delete_snapshot(self, snapshot_id: str) -> None:
        self.deleted.append(snapshot_id)


def sandbox_of(inner: Inner, home: Home | None = None, **spec: Any) -> Sandbox:
    made = Sandbox(inner, SandboxSpec(**spec))  # type: ignore[arg-type]
    made._home = home or Home()  # type: ignore[assignment]
    made._template.append(os.open("/", os.O_PATH))
    return made


def said(exposure: Any) -> str:
    with socket.create_connection(exposure.address, PATIENCE_S) as client:
        return client.recv(100).decode()


# -- the end ---------------------------------------------------------------------------------------


def test_an_end_gives_everything_back_however_often_it_is_asked_for() -> None:
    with same_descriptors():
        inner = Inner()
        sandbox = sandbox_of(inner, ttl_s=600.0)
        exposures = [sandbox.expose(80), sandbox.expose(81)]
        assert ["sbx-1 80", "sbx-1 81"] == [said(each) for each in exposures]
        timer = sandbox._timer
        assert timer is not None
        for _ in range(2):
            sandbox.terminate()
        assert timer.finished.is_set()
        for each in exposures:
            with pytest.raises(ConnectionRefusedError):
                said(each)
        for use in (lambda: sandbox.expose(80), sandbox.fork, sandbox.mark):
            with pytest.raises(LifecycleError, match="terminated"):
                use()
        with pytest.raises(InvalidRequest):
            sandbox.expose(0)


def test_a_time_to_live_ends_it_and_leaving_it_does() -> None:
    inner = Inner()
    with same_descriptors():
        sandbox = Sandbox(inner, SandboxSpec(ttl_s=0.001))  # type: ignore[arg-type]
        assert sandbox._timer is not None
        sandbox._timer.join(PATIENCE_S)
        assert inner.ended.is_set()
        with sandbox_of(other := Inner()):
            pass
        assert ["terminate"] == other.asked


def test_one_whose_time_nobody_could_count_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_timer: threading.Timer) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Timer, "start", refuse)
    inner, timeless = Inner(), Inner()
    with pytest.raises(RuntimeError, match="thread"):
        Sandbox(inner, SandboxSpec(ttl_s=600.0))  # type: ignore[arg-type]
    assert "terminated" == inner.state
    with Sandbox(timeless, SandboxSpec()):  # type: ignore[arg-type]
        assert "running" == timeless.state


def test_a_copy_in_another_process_ends_nothing() -> None:
    inner = Inner()
    sandbox = sandbox_of(inner)
    sandbox._maker += 1
    with sandbox:
        pass
    sandbox.__del__()
    assert [] == inner.asked
    sandbox._maker -= 1
    with pytest.warns(ResourceWarning, match="never terminated"):
        sandbox.__del__()
    assert ["terminate"] == inner.asked
    sandbox.__del__()
    assert ["terminate"] == inner.asked


def test_a_template_is_let_go_of_where_the_sandbox_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ringfence.environments import apply

    def applied(spec: SandboxSpec) -> tuple[SandboxSpec, int]:
        return spec, os.open("/", os.O_PATH)

    monkeypatch.setattr(apply, "apply", applied)
    inner = Inner()

    def provision(_spec: Any) -> Inner:
        if inner.asked:
            raise ResourceExhausted("no room")
        return inner

    backend: Any = SimpleNamespace(provision=provision, name="plain")
    with same_descriptors():
        Sandbox.create(template="t", backend=backend).terminate()
        with pytest.raises(ResourceExhausted):
            Sandbox.create(template="t", backend=backend)


# -- forks and marks -------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _no_marks_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks, "_kept", set())


def test_each_fork_keeps_its_template_for_itself() -> None:
    with same_descriptors():
        home, inner = Home(), Inner()
        sandbox = sandbox_of(inner, home)
        forks = sandbox.fork(3, processes="none", labels={"k": "v"})
        sandbox.terminate()
        assert [1, 1, 1] == [len(each._template) for each in forks]
        assert all(os.fstat(fd) for each in forks for fd in each._template)
        assert ["snap-sbx-1"] == home.deleted
        assert all(each._home is home for each in forks)  # type: ignore[comparison-overlap]
        assert {"v"} == {each.spec.labels["k"] for each in forks}
        assert {("sbx-1",)} == {each.lineage() for each in forks}
        assert {"sbx-1"} == {each.parent for each in forks}
        for each in forks:
            each.terminate()


@pytest.mark.parametrize(("asked", "hosts"), [(None, ("now.example",)), ("none", ())])
def test_a_fork_has_the_network_that_holds_now_unless_another_is_asked_for(
    asked: str | None, hosts: tuple[str, ...]
) -> None:
    home, inner = Home(), Inner()
    sandbox = sandbox_of(inner, home, secrets={"s": "secret"})
    inner.spec = inner.spec.altered(network=NetworkPolicy(allowed_hosts=("now.example",)))
    (fork,) = sandbox.fork(processes="none", network=asked)
    assert hosts == fork.spec.network.allowed_hosts == home.made[0].spec.network.allowed_hosts
    assert {"s": "secret"} == fork.spec.secrets == home.made[0].spec.secrets
    for each in (sandbox, fork):
        each.terminate()


@pytest.mark.parametrize("fails", [1, 2, 3])
def test_forks_of_which_one_fails_leave_nothing(fails: int) -> None:
    with same_descriptors():
        home = Home(fails)
        sandbox = sandbox_of(Inner(), home)
        with pytest.raises(ResourceExhausted):
            sandbox.fork(3, processes="none")
        assert {"terminated"} >= {each.state for each in home.made}
        assert ["snap-sbx-1"] == home.deleted
        assert "running" == sandbox.state
        sandbox.terminate()


def test_a_fork_from_a_mark_keeps_the_mark_and_needs_its_own_sandbox() -> None:
    home = Home()
    sandbox, other = sandbox_of(Inner(), home), sandbox_of(Inner("sbx-2"), home)
    mark = sandbox.mark(processes="none")
    for use in (lambda: other.fork(at=mark), lambda: other.rewind(mark)):
        with pytest.raises(InvalidRequest, match="another sandbox"):
            use()
    with pytest.raises(InvalidRequest, match="must be a Mark"):
        sandbox.rewind("snap-sbx-1")  # type: ignore[arg-type]
    assert [] == home.made
    sandbox.terminate()
    for _ in range(2):
        (fork,) = sandbox.fork(at=mark)
        fork.terminate()
    assert [] == home.deleted
    mark.close()
    with pytest.raises(LifecycleError, match="closed"):
        sandbox.fork(at=mark)
    other.terminate()
    assert ["snap-sbx-1"] == home.deleted


def test_going_back_is_to_the_same_object_with_all_that_leads_to_it() -> None:
    with same_descriptors():
        home, inner = Home(), Inner()
        sandbox = sandbox_of(inner, home, secrets={"s": "secret"}, labels={"k": "v"})
        inner.spec = SandboxSpec(labels={"k": "v"})
        exposure = sandbox.expose(80)
        mark = sandbox.mark(processes="none")
        sandbox._started = {"exec-1": SimpleNamespace(running=True)}  # type: ignore[dict-item]
        for number in (1, 2):
            before: Any = sandbox._inner
            sandbox.rewind(mark)
            assert (number, "terminated") == (len(home.made), before.state)
            made: Any = home.made[-1]
            assert made is sandbox._inner
            assert ("sbx-1", "secret", "v") == (
                sandbox.id,
                made.spec.secrets["s"],
                made.spec.labels["k"],
            )
            assert "" == made.spec.labels[LINEAGE], "what is restored in its place is no fork"
            assert sandbox.files._inner is made.files
            assert ("sbx-1",) == tuple(sandbox.files._mounts())  # type: ignore[comparison-overlap]
            assert exposure._sandbox is made
            with pytest.raises(ExecNotFound):
                sandbox.process("exec-1")
        mark.close()
        with pytest.raises(LifecycleError):
            sandbox.rewind(mark)
        assert "running" == sandbox.state
        sandbox.terminate()


def test_one_that_cannot_go_on_from_its_mark_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with same_descriptors():
        home = Home()
        sandbox = sandbox_of(Inner(), home)
        with sandbox.mark(processes="none") as mark:

            def fail(*_: Any) -> None:
                raise Unsupported("it does not answer")

            monkeypatch.setattr(mark, "put_back", fail)
            with pytest.raises(Unsupported):
                sandbox.rewind(mark)
            assert ("terminated", []) == (sandbox.state, home.deleted)
            monkeypatch.setattr(mark, "wait", fail)
            alive = sandbox_of(Inner(), home)
            with pytest.raises(Unsupported):
                alive.rewind(mark)
            assert "running" == alive.state, "nothing has happened"
            alive.terminate()


def test_a_process_is_found_while_it_runs_and_the_last_one_after_its_end() -> None:
    sandbox = sandbox_of(Inner())
    execs: list[Any] = [SimpleNamespace(id=f"exec-{n}", running=True) for n in range(4)]
    for number, each in enumerate(execs):
        begun: Any = sandbox._began(each)
        assert each is begun
        if number != 1:
            each.running = False
    assert ["exec-1", "exec-3"] == sorted(sandbox._started)
    assert execs[1] is sandbox.process("exec-1")
    for gone in ("exec-0", "exec-2", "none"):
        with pytest.raises(ExecNotFound):
            sandbox.process(gone)
    sandbox.terminate()


# -- elsewhere -------------------------------------------------------------------------------------


def test_a_client_made_for_a_call_is_closed_and_one_of_the_caller_is_not(tmp_path: Path) -> None:
    """With the call where it failed, with the sandbox where it was made."""

    def script(request: Request) -> Any:
        if request.method == "POST" and request.form.get("name") == "refused":
            return problem(403, "forbidden")
        if request.path == "/v1/snapshots":
            return as_json({"items": [], "next_cursor": None})
        return as_json(sandbox_view().to_json())

    with served(tmp_path / "s", script) as (mine, _server):
        address = f"unix:{tmp_path}/s"
        for server, is_ours in ((address, True), (mine, False)):
            made = remote.make(server, "create")
            transport = made._transport
            assert is_ours == made.owns_transport
            assert not transport._is_released
            made.terminate()
            assert is_ours == transport._is_released
            with remote.opened(server) as client:
                assert [] == client.snapshots()
            assert is_ours == client._transport._is_released
        made_here: list[Client] = []
        plain = remote._client

        def seen(server: Any) -> tuple[Client, bool]:
            client, is_ours = plain(server)
            made_here.append(client)
            return client, is_ours

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(remote, "_client", seen)
            for server, is_ours in ((address, True), (mine, False)):
                with pytest.raises(Exception, match="so it is"):
                    remote.make(server, "create", name="refused")
                assert is_ours == made_here[-1]._transport._is_released


# -- helpers inside --------------------------------------------------------------------------------


class Task:
    """A helper process of which this is the output, in pieces that a pipe passes on."""

    def __init__(self, data: bytes, error: Exception | None = None) -> None:
        self.stream, self._writing = os.pipe()
        self.did, self.error = list[str](), error
        self.say(data)

    def say(self, data: bytes) -> None:
        os.write(self._writing, data)

    def end(self) -> None:
        os.close(self._writing)

    def abandon(self) -> None:
        self.did.append("abandon")
        os.close(self.stream)

    def finish(self, path: str) -> None:
        self.did.append(f"finish {path}")
        os.close(self.stream)
        if self.error is not None:
            raise self.error


def starting(task: Task, what: str, path: str) -> Any:
    def start_helper(*asked: str) -> Task:
        assert (what, path) == asked[:2]
        json.loads(asked[2])
        return task

    return SimpleNamespace(start_helper=start_helper)


def change(name: str) -> bytes:
    return json.dumps({"kind": "created", "path": name}).encode()


def test_changes_are_whole_whatever_the_pieces() -> None:
    with same_descriptors():
        task = Task(change("begun") + b"\n" + change("a") + b"\n" + change("b")[:7])
        watch = Watch(starting(task, "watch", "d"), "d", recursive=True)
        assert ["a"] == [each.path for each in watch.early]
        assert task.stream == watch.stream
        task.say(change("b")[7:] + b"\n" + change("c") + b"\n")
        assert ["b", "c"] == [each.path for each in watch.read()]
        task.end()
        assert [[], []] == [watch.read(), watch.read()]
        assert -1 == watch.stream
        for _ in range(2):
            watch.close()
        assert ["finish d"] == task.did


def test_a_watch_that_is_closed_or_cannot_begin_ends_its_helper_once() -> None:
    with same_descriptors():
        task = Task(change("begun") + b"\n")
        watch = Watch(starting(task, "watch", "d"), "d", recursive=False)
        for _ in range(2):
            watch.close()
        assert ([], ["abandon"]) == (watch.read(), task.did)
        task.end()
        broken = Task(b"no JSON\n")
        with pytest.raises(Exception, match=r"."):
            Watch(starting(broken, "watch", "d"), "d", recursive=False)
        broken.end()
        assert ["abandon"] == broken.did
        refused = Task(b"", FileError("not there"))
        refused.end()
        with pytest.raises(FileError, match="not there"):
            Watch(starting(refused, "watch", "d"), "d", recursive=False)
        assert ["finish d"] == refused.did


@pytest.mark.parametrize("over", [0, 1])
def test_an_answer_is_bounded(over: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = b'{"x": 1}\n{"done": true, "truncated": true}\n'
    monkeypatch.setattr(looking, "MOST_FOUND_BYTES", len(text) - over)
    monkeypatch.setattr(looking, "_CHUNK", 4)
    with same_descriptors():
        task = Task(text)
        task.end()
        files = starting(task, "find", "d")
        if over:
            with pytest.raises(InvalidRequest, match="too large"):
                ask(files, "find", "d", {})
        else:
            assert {"items": [{"x": 1}], "truncated": True} == ask(files, "find", "d", {})
        assert ["abandon" if over else "finish d"] == task.did


def test_an_answer_that_is_not_whole_is_none() -> None:
    with same_descriptors():
        done = b'{"done": true}\n'
        for text in (
            b"",
            b"\n",
            b'{"x": 1}\n',
            b'{"x": 1',
            done + b'{"x": 1',
            done + b"5\n",
            b"[]\n" + done,
        ):
            task = Task(text)
            task.end()
            with pytest.raises(IoError, match="killed"):
                ask(starting(task, "find", "d"), "find", "d", {})
            assert ["finish d"] == task.did
        refused = Task(b"", FileError("not there"))
        refused.end()
        with pytest.raises(FileError, match="not there"):
            ask(starting(refused, "find", "d"), "find", "d", {})
