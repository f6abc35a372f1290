"""Sandboxes in Ray programs, over a stand-in for Ray: who reaches them, what is tried again, what ends them."""

from __future__ import annotations

import importlib
import os
import resource
import socket
import sys
import threading
import warnings
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.errors import (
    InvalidRequest,
    RingfenceError,
    SandboxLost,
    SandboxNotFound,
    Unsupported,
)

pytestmark = pytest.mark.anyone


Ray = Any


@pytest.fixture
def sandboxes(ray: Ray) -> Any:
    return importlib.import_module("ringfence.ray.sandbox")


@pytest.fixture
def calls(ray: Ray) -> Any:
    return importlib.import_module("ringfence.ray.calls")


class Local:
    """A sandbox of this process, as calls see it."""

    def __init__(self, id: str = "sbx-1") -> None:
        self.id, self.ended = id, 0
        self.state = SimpleNamespace(value="running")
        self.session = "a session"
        self.files = SimpleNamespace(
            read=lambda path: f"content of {path}", open_read=lambda path: 1
        )

    def exec(self, argv: Any, **how: Any) -> Any:
        if argv == ["fail"]:
            raise InvalidRequest("no such", field="argv")
        return argv, how

    def start(self, argv: Any) -> None:
        raise AssertionError("nobody may call it from elsewhere")

    def terminate(self) -> None:
        self.ended += 1
        self.state.value = "terminated"


def test_only_a_version_that_was_tried_is_taken(ray: Ray) -> None:
    package: Any = importlib.import_module("ringfence.ray")
    assert callable(package.map_sandboxes)
    with pytest.raises(AttributeError, match="nonesuch"):
        _ = package.nonesuch
    for version in ("3.1.0", "2.6.0", "2.61.0"):
        for name in [each for each in sys.modules if each.startswith("ringfence.ray")]:
            del sys.modules[name]
        ray.__version__ = version
        with pytest.raises(ImportError, match=version):
            importlib.import_module("ringfence.ray")


# -- calls from other processes --------------------------------------------------------------------


def test_what_needs_its_own_process_is_refused_by_both_sides(calls: Any) -> None:
    sandbox = Local()
    for method in (
        *("start", "open_read", "files.open_read", "files.exec", "files.__class__", "__class__"),
        *("read", "files.", "", "other.read", "files.files.read"),
    ):
        with pytest.raises(Unsupported) as refusal:
            calls.check(method)
        assert method == refusal.value.operation
        is_done, error = calls.perform(sandbox, method, (), {})
        assert (False, "unsupported") == (is_done, error["code"])
    assert (True, (["ls"], {"cwd": "/"})) == calls.perform(sandbox, "exec", (["ls"],), {"cwd": "/"})
    assert (True, "content of x") == calls.perform(sandbox, "files.read", ("x",), {})
    assert (True, "a session") == calls.perform(sandbox, "session", (), {})


def test_errors_come_as_what_they_were(calls: Any) -> None:
    for sandbox, parts, error in (
        (Local(), (["fail"],), InvalidRequest), (None, (["ls"],), SandboxNotFound),
        (Local(), (), InvalidRequest),
    ):  # fmt: skip
        answer = calls.perform(sandbox, "exec", parts, {})
        with pytest.raises(error):
            calls.result_of(answer)
    assert 3 == calls.result_of((True, 3))


@pytest.fixture
def door(calls: Any) -> Any:
    sandbox = Local()
    # A thread waits for callers for as long as the process runs.
    return calls.Door({"sbx-1": sandbox}.get)


def test_only_who_knows_the_key_is_listened_to(calls: Any, door: Any) -> None:
    call: tuple[Any, ...] = ("sbx-1", "exec", (["ls"],), {})
    assert (["ls"], {}) == calls.result_of(calls.by_socket(door.name, door.key, call))
    for _ in range(calls._MOST_CALLERS + 1):
        with pytest.raises(AuthenticationError):
            calls.by_socket(door.name, b"x" * 32, call)
    assert (["ls"], {}) == calls.result_of(calls.by_socket(door.name, door.key, call)), (
        "none is left"
    )
    other = calls.Door({}.get)
    assert door.name != other.name
    assert door.key != other.key
    with pytest.raises(SandboxNotFound):
        calls.result_of(calls.by_socket(other.name, other.key, call))
    with pytest.raises(SandboxLost, match="has ended"):
        calls.by_socket("ringfence-ray-nobody", door.key, call)


def test_who_says_nothing_is_shut_out_and_another_user_is_not_heard(
    calls: Any, door: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "_GREETING_S", 0.02)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.settimeout(10)
        silent.connect(f"\0{door.name}")
        said = b"".join(iter(lambda: silent.recv(1 << 16), b""))
    assert b"sbx" not in said
    cancelled: list[bool] = []

    class Timer(threading.Timer):
        def cancel(self) -> None:
            cancelled.append(True)
            super().cancel()

    monkeypatch.setattr(threading, "Timer", Timer)
    assert calls.by_socket(door.name, door.key, ("sbx-1", "state", (), {}))[0]
    assert [True] == cancelled, "who has greeted may take longer"
    near, far = socket.socketpair()
    with near, far:
        assert os.getuid() == calls._peer_uid(near)
    monkeypatch.setattr(calls, "_peer_uid", lambda _accepted: os.getuid() + 1)
    for _ in range(calls._MOST_CALLERS):  # and none of them keeps a place
        with socket.socket(socket.AF_UNIX) as another:
            another.settimeout(10)
            another.connect(f"\0{door.name}")
            assert b"" == another.recv(1)
    with pytest.raises((EOFError, OSError)), Client(f"\0{door.name}", "AF_UNIX", authkey=door.key):
        pass
    monkeypatch.undo()
    assert calls.by_socket(door.name, door.key, ("sbx-1", "state", (), {}))[0]


def test_a_process_that_had_no_descriptor_left_listens_on(
    calls: Any, door: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    waited = threading.Event()

    def sleep(_seconds: float) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        waited.set()

    monkeypatch.setattr(calls, "time", SimpleNamespace(sleep=sleep))
    with socket.socket(socket.AF_UNIX) as caller:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            caller.connect(f"\0{door.name}")
            assert waited.wait(60)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert calls.by_socket(door.name, door.key, ("sbx-1", "state", (), {}))[0]


# -- sandboxes and handles -------------------------------------------------------------------------


def test_a_handle_calls_its_owner_and_says_where_it_is_when_that_is_gone(
    ray: Ray, sandboxes: Any
) -> None:
    owner = ray.owner_of(sandboxes._Owner())
    owner.inner._sandboxes["sbx-1"] = Local()
    ray.actors["sandboxes-of-node-b"] = owner
    handle = sandboxes.Handle(sandboxes.Ticket("sbx-1", "node-b"))
    assert (["ls"], {"cwd": "/"}) == handle.exec(["ls"], cwd="/")
    assert "content of x" == handle.files.read("x")
    assert ("sbx-1", "node-b", "a session") == (handle.id, handle.node_id, handle.session)
    with pytest.raises(InvalidRequest):
        handle.exec(["fail"])
    for name in ("start", "upload"):
        with pytest.raises(Unsupported):
            getattr(handle if name == "start" else handle.files, name)()
    assert not hasattr(handle, "nonesuch")
    assert not hasattr(handle, "_inner")
    assert not hasattr(handle, "_maker"), "nor what a sandbox has for itself"
    assert not hasattr(handle.files, "__deepcopy__")
    arrive, (ticket,) = handle.__reduce__()
    assert ticket == arrive(ticket)._ticket
    with handle:
        pass
    assert 1 == owner.inner._sandboxes["sbx-1"].ended
    owner.is_dead = True
    with pytest.raises(SandboxLost, match="node-b") as lost:
        handle.exec(["ls"])
    assert lost.value.retryable
    ray.actors.clear()
    with pytest.raises(SandboxLost):
        sandboxes.Handle(ticket).exec(["ls"])


def test_a_process_of_another_node_is_not_reached_by_its_socket(
    ray: Ray, sandboxes: Any, door: Any
) -> None:
    ticket = sandboxes.Ticket("sbx-1", "node-a", door.name, door.key)
    handle = sandboxes.Handle(ticket)
    assert (["ls"], {}) == handle.exec(["ls"])
    ray.node = "node-b"
    with pytest.raises(Unsupported, match="node-a") as refusal:
        handle.exec(["ls"])
    assert ("exec", True) == (refusal.value.operation, "detached=True" in refusal.value.hint)
    ray.node = "node-a"
    with handle:
        pass
    ray.joined = False
    with pytest.raises(SandboxNotFound, match="in no Ray cluster"):
        handle.exec(["ls"])


def test_detached_ones_are_the_actors_of_their_node_and_those_that_live_are_listed(
    ray: Ray, sandboxes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Local] = []

    def create(spec: Any, **options: Any) -> Local:
        if options.get("network") == "bad":
            raise InvalidRequest("bad", field="network")
        made.append(Local(f"sbx-{len(made)}"))
        return made[-1]

    monkeypatch.setattr(sandboxes.LocalSandbox, "create", create)
    handle = sandboxes.Sandbox.create(detached=True, network="none")
    assert ("sbx-0", "node-a", "") == (handle.id, handle.node_id, handle._ticket.door)
    asked = ray.asked[-1]
    assert ("sandboxes-of-node-a", "ringfence", "detached", True, 0, ("node-a", False)) == tuple(
        asked[name]
        for name in (
            "name",
            "namespace",
            "lifetime",
            "get_if_exists",
            "num_cpus",
            "scheduling_strategy",
        )
    )
    with pytest.raises(InvalidRequest) as refusal:
        sandboxes.Sandbox.create(detached=True, network="bad")
    assert "network" == refusal.value.field
    other = sandboxes.Sandbox.create(detached=True)
    ray.actors["sandboxes-of-node-b"] = dead = ray.owner_of(sandboxes._Owner())
    dead.is_dead = True
    ray.actors["somebody-elses"] = ray.owner_of(SimpleNamespace(ids=lambda: ["x"]))
    named = ray.util.list_named_actors
    lost = {"namespace": "ringfence", "name": "sandboxes-of-lost"}  # since it was listed
    ray.util.list_named_actors = lambda **how: [lost, *named(**how)]
    assert ["sbx-0", "sbx-1"] == [each.id for each in sandboxes.detached()]
    handle.terminate()
    assert 1 == made[0].ended
    assert ["sbx-1"] == [each.id for each in sandboxes.detached()]
    sandboxes.Sandbox.create(detached=True)
    owner = ray.actors["sandboxes-of-node-a"].inner
    assert {other.id, "sbx-2"} == {*owner._sandboxes}, "one that has ended is not kept"


class Owned(Local):
    """A sandbox of a task."""

    def __init__(self, id: str, task: str) -> None:
        super().__init__(id)
        self._task = task


def test_a_task_ends_the_sandboxes_of_tasks_before_it_in_the_same_process(
    ray: Ray, sandboxes: Any
) -> None:
    earlier, same, actors = Owned("a", "task-0"), Owned("b", "task-1"), Owned("c", "")
    for each in (earlier, same, actors):
        sandboxes._sandboxes[each.id] = each
    for ray.mode, ray.actor, ray.joined in ((0, "", True), (1, "actor-1", True), (1, "", False)):
        assert "" == sandboxes._task_id()
        sandboxes._end_those_of_earlier_tasks()
    assert 0 == earlier.ended, "drivers and actors keep theirs"
    ray.joined = True
    assert "task-1" == sandboxes._task_id()
    sandboxes._end_those_of_earlier_tasks()
    assert [1, 0, 0] == [each.ended for each in (earlier, same, actors)]


def test_a_new_sandbox_is_of_its_task_and_the_first_ends_those_before(
    ray: Ray, sandboxes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mine(sandboxes.Sandbox):  # type: ignore[misc]
        id = "mine"

        def __del__(self) -> None:
            pass

    made: Any = object.__new__(Mine)
    monkeypatch.setattr(sandboxes.LocalSandbox, "create", classmethod(lambda _cls, _spec: made))
    earlier = Owned("a", "task-0")
    sandboxes._sandboxes[earlier.id] = earlier
    assert sandboxes.Sandbox.create() is made
    assert (1, "task-1") == (earlier.ended, made._task)
    assert sandboxes._sandboxes["mine"] is made
    elsewhere = SimpleNamespace(id="remote")
    monkeypatch.setattr(
        sandboxes.LocalSandbox, "create", classmethod(lambda _cls, _spec: elsewhere)
    )
    assert sandboxes.Sandbox.create() is elsewhere
    assert "remote" not in sandboxes._sandboxes


def test_in_its_own_process_a_sandbox_arrives_as_itself(ray: Ray, sandboxes: Any) -> None:
    own = object.__new__(sandboxes.Sandbox)
    own._maker = os.getpid()
    sandboxes._sandboxes["sbx-7"] = own
    ticket = sandboxes.Ticket("sbx-7", "node-a", "door", b"key")
    assert own is sandboxes._arrive(ticket)
    own._maker = os.getpid() + 1
    with pytest.raises(Unsupported, match="forked"):
        own.__reduce__()
    first = sandboxes._open_door()
    assert first is sandboxes._open_door()
    first.name = f"ringfence-ray-{os.getpid() + 1}-x"
    assert first is not sandboxes._open_door(), "that of a parent is not the child's"
    del sandboxes._sandboxes["sbx-7"]
    assert isinstance(sandboxes._arrive(ticket), sandboxes.Handle)


# -- a function over many items --------------------------------------------------------------------


@pytest.fixture
def rollouts(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = importlib.import_module("ringfence.ray.rollouts")
    made: list[Any] = []

    class Made:
        def __enter__(self) -> Made:
            return self

        def __exit__(self, *_exc: object) -> None:
            made.append("ended")

    def create(**options: Any) -> Made:
        made.append(options)
        return Made()

    monkeypatch.setattr(module.Sandbox, "create", create)
    module.made = made
    return module


def test_each_item_has_a_sandbox_of_its_own_and_its_result_its_place(
    ray: Ray, rollouts: Any
) -> None:
    seen: list[Any] = []
    options = {"tier": "strong"}
    found = rollouts.map_sandboxes(
        lambda _sandbox, item: item * 10, range(5), concurrency=2, sandbox=options, num_cpus=0.5,
        progress=seen.append,
    )  # fmt: skip
    assert [0, 10, 20, 30, 40] == found
    assert [options, "ended"] * 5 == rollouts.made
    assert (2, [1, 2, 3, 4, 5]) == (max(ray.waited), [each.done for each in seen])
    assert {(0, 0, 5)} == {(each.failed, each.retried, each.total) for each in seen}
    assert [{"num_cpus": 0.5, "max_retries": 0}] == ray.asked
    ray.waited.clear()
    ray.cpus = 3.0
    assert [1] * 9 == rollouts.map_sandboxes(lambda *_: 1, range(9))
    assert 3 == max(ray.waited), "as many as there are processors"
    ray.cpus = 0.5
    assert [1] == rollouts.map_sandboxes(lambda *_: 1, range(1), num_cpus=0)
    assert [] == rollouts.map_sandboxes(lambda *_: 1, [])


@pytest.mark.parametrize(
    ("error", "retry_on", "tries"),
    [
        (SandboxLost("x"), (), 3), (RingfenceError("x", retryable=True), (), 3), (RingfenceError("x"), (), 1),
        (RingfenceError("x"), RingfenceError, 3), (KeyError("x"), (), 1), (KeyError("x"), (KeyError,), 3),
        (KeyError("x"), LookupError, 3), (None, (), 3), (KeyError("x"), (ValueError,), 1),
    ],
)  # fmt: skip
def test_what_was_lost_is_tried_again_and_a_mistake_is_not(
    ray: Ray, rollouts: Any, error: Exception | None, retry_on: Any, tries: int
) -> None:
    failure = error or ray.exceptions.RayError("x")
    tried: list[Any] = []

    def fail(_sandbox: Any, item: Any) -> Any:
        tried.append(item)
        raise failure

    seen: list[Any] = []
    found = rollouts.map_sandboxes(
        fail, "ab", on_error="return", retry_on=retry_on, progress=seen.append, concurrency=1
    )
    assert ["x"] * 2 == [str(each).strip("'") for each in found]
    assert tries == tried.count("a") == tried.count("b")
    assert (2, 2, 2 * (tries - 1)) == (seen[-1].done, seen[-1].failed, seen[-1].retried)
    tried.clear()
    with pytest.raises(type(failure)):
        rollouts.map_sandboxes(fail, "a", retry_on=retry_on, retries=0)
    assert ["a"] == tried


def test_the_first_error_ends_what_runs(ray: Ray, rollouts: Any) -> None:
    def fail(_sandbox: Any, item: int) -> int:
        if item == 2:
            raise KeyError(item)
        return item

    with pytest.raises(KeyError):
        rollouts.map_sandboxes(fail, range(9), concurrency=3)
    assert [True, True] == [force for _, force in ray.cancelled]
    kind, rows = rollouts.map_sandboxes(fail, range(1, 4), results="dataset", on_error="return")
    assert "dataset" == kind
    assert [(1, 1, None), (2, None, "KeyError: 2"), (3, 3, None)] == [
        (row["item"], row["result"], row["error"]) for row in rows
    ]


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("results", {"results": "tuple"}), ("on_error", {"on_error": "ignore"}),
        ("concurrency", {"concurrency": 0}), ("retries", {"retries": -1}), ("num_cpus", {"num_cpus": -0.5}),
        ("retry_on", {"retry_on": (3,)}), ("retry_on", {"retry_on": (KeyboardInterrupt,)}),
        ("retry_on", {"retry_on": int}), ("progress", {"progress": 3}), ("sandbox", {"sandbox": "native"}),
    ],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused_before_anything_runs(
    ray: Ray, rollouts: Any, field: str, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        rollouts.map_sandboxes(lambda *_: 1, range(3), **options)
    assert (field, [], []) == (refusal.value.field, rollouts.made, ray.asked)


def test_items_that_no_node_can_take_now_are_warned_of(ray: Ray, rollouts: Any) -> None:
    with pytest.warns(UserWarning, match="no node has 8 CPUs, the largest has 4"):
        rollouts.map_sandboxes(lambda *_: 1, [], num_cpus=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rollouts.map_sandboxes(lambda *_: 1, [], num_cpus=4)
