"""Sandboxes in Ray programs, over a stand-in for Ray: who reaches them, what is tried again, what ends them."""

from __future__ import annotations

import importlib
import os
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ringfence.errors import (
    ImageNotFound,
    InvalidRequest,
    RingfenceError,
    SandboxLost,
    SandboxNotFound,
    Unsupported,
)
from ringfence.model.execs.exec import ExecResult

pytestmark = pytest.mark.anyone


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: Any) -> None:
        super().__init__("a task failed")
        self.cause = cause


class RayActorError(RayError):
    pass


class Ref:
    """What will be there once it is asked for."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.run = run


class Actor:
    """An object in another process."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.is_dead = inner, False

    def __getattr__(self, name: str) -> Any:
        def remote(*parts: Any) -> Ref:
            def run() -> Any:
                if self.is_dead:
                    raise RayActorError("it is dead")
                return getattr(self.inner, name)(*parts)

            return Ref(run)

        return SimpleNamespace(remote=remote)


class Ray(ModuleType):
    """As much of Ray as is used; a task runs when its result is asked for."""

    __version__ = "2.60.1"
    WORKER_MODE = 1

    def __init__(self) -> None:
        super().__init__("ray")
        self.__path__: list[str] = []
        self.node, self.task, self.actor, self.mode = "node-a", "task-1", "", 1
        self.joined = True
        self.sizes, self.cpus = [4.0], 4.0
        self.cancelled: list[Any] = []
        self.waited: list[int] = []
        self.actors: dict[str, Actor] = {}
        self.asked: list[Any] = []
        self.util = SimpleNamespace(
            list_named_actors=lambda all_namespaces: [
                {"namespace": "ringfence", "name": name} for name in self.actors
            ]
            + [{"namespace": "other", "name": "sandboxes-of-x"}],
            scheduling_strategies=SimpleNamespace(
                NodeAffinitySchedulingStrategy=lambda node, soft: (node, soft)
            ),
        )

    def is_initialized(self) -> bool:
        return self.joined

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(
            get_node_id=lambda: self.node, get_task_id=lambda: self.task,
            get_actor_id=lambda: self.actor, worker=SimpleNamespace(mode=self.mode),
        )  # fmt: skip

    def put(self, value: Any) -> Ref:
        return Ref(lambda: value)

    def get(self, ref: Any) -> Any:
        return [each.run() for each in ref] if isinstance(ref, list) else ref.run()

    def wait(self, refs: list[Ref], num_returns: int) -> tuple[list[Ref], list[Ref]]:
        assert 1 == num_returns
        self.waited.append(len(refs))
        return refs[-1:], refs[:-1]  # the newest is done first

    def cancel(self, ref: Ref, force: bool) -> None:
        self.cancelled.append((ref, force))

    def nodes(self) -> list[Any]:
        return [{"Alive": True, "Resources": {"CPU": size}} for size in self.sizes] + [
            {"Alive": False, "Resources": {"CPU": 64.0}}
        ]

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": self.cpus}

    def get_actor(self, name: str, namespace: str) -> Actor:
        assert "ringfence" == namespace
        try:
            return self.actors[name]
        except KeyError:
            raise ValueError("no such actor") from None

    def remote(self, *given: Any, **options: Any) -> Any:
        if given:
            return self._actor_of(*given)

        def of(fn: Any) -> Any:
            self.asked.append(options)

            def start(*parts: Any) -> Ref:
                def run() -> Any:
                    plain = [each.run() if isinstance(each, Ref) else each for each in parts]
                    try:
                        return fn(*plain)
                    except RayError:
                        raise
                    except Exception as exc:
                        raise RayTaskError(exc) from exc

                return Ref(run)

            return SimpleNamespace(remote=start)

        return of

    def _actor_of(self, cls: Any) -> Any:
        def options(**how: Any) -> Any:
            def start() -> Actor:
                self.asked.append(how)
                return self.actors.setdefault(how["name"], Actor(cls()))

            return SimpleNamespace(remote=start)

        return SimpleNamespace(options=options)


class Complaint(Exception):
    pass


def _modules(ray: Ray) -> dict[str, ModuleType]:
    place = "ray.experimental.sandbox"
    contents: dict[str, dict[str, Any]] = {
        "ray.exceptions": {"RayError": RayError, "RayTaskError": RayTaskError, "RayActorError": RayActorError},
        "ray.data": {"from_items": lambda rows: ("dataset", rows)},
        "ray.experimental": {}, place: {}, f"{place}.backend": {}, f"{place}.runtime": {},
        f"{place}.backend.base": {
            "BaseSandboxBackend": type("BaseSandboxBackend", (), {"__init__": lambda self, images: setattr(self, "image_manager", images)}),
            "ExecResult": lambda *given: given,
            "SandboxStatus": SimpleNamespace(RUNNING="running", TERMINATED="terminated"),
        },
        f"{place}.config": {"SandboxConfig": object, "parse_memory_bytes": lambda text: text and int(text)},
        f"{place}.exceptions": {
            name: type(name, (Complaint,), {})
            for name in ("SandboxCreationError", "SandboxError", "SandboxExecError", "SandboxNotFoundError", "SandboxTimeoutError")
        },
    }  # fmt: skip
    found: dict[str, ModuleType] = {"ray": ray}
    for name, content in contents.items():
        found[name] = ModuleType(name)
        found[name].__path__ = []
        vars(found[name]).update(content)
        above, _, last = name.rpartition(".")
        setattr(found[above], last, found[name])
    return found


@pytest.fixture(name="ray")
def fixture_ray() -> Iterator[Ray]:
    made = Ray()
    before = {name: each for name, each in sys.modules.items() if name.split(".")[0] == "ray"}
    stand_ins = _modules(made)
    sys.modules.update(stand_ins)
    try:
        yield made
    finally:
        for name in [*sys.modules]:
            if name in stand_ins or name.startswith("ringfence.ray"):
                del sys.modules[name]
        sys.modules.update(before)


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
        self.files = SimpleNamespace(read=lambda path: f"content of {path}", open_read=lambda path: 1)

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
    for method in ("start", "open_read", "files.open_read", "files.exec", "__class__", "files.__class__", "read", "", "files."):
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
        (Local(), (["fail"],), InvalidRequest), (None, (["ls"],), SandboxNotFound), (Local(), (), InvalidRequest),
    ):  # fmt: skip
        answer = calls.perform(sandbox, "exec", parts, {})
        with pytest.raises(error):
            calls.result_of(answer)
    assert 3 == calls.result_of((True, 3))


@pytest.fixture
def door(calls: Any) -> Iterator[Any]:
    sandbox = Local()
    made = calls.Door({"sbx-1": sandbox}.get)
    yield made
    # Closing alone would not wake the thread that waits for callers; this one ends with the process.


def test_only_who_knows_the_key_is_listened_to(calls: Any, door: Any) -> None:
    call = ("sbx-1", "exec", (["ls"],), {})
    assert (["ls"], {}) == calls.result_of(calls.by_socket(door.name, door.key, call))
    for _ in range(calls._MOST_CALLERS + 1):
        with pytest.raises(AuthenticationError):
            calls.by_socket(door.name, b"x" * 32, call)
    assert (["ls"], {}) == calls.result_of(calls.by_socket(door.name, door.key, call)), "none is left"
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
    near, far = socket.socketpair()
    with near, far:
        assert os.geteuid() == calls._peer_uid(near)
    monkeypatch.setattr(calls, "_peer_uid", lambda _accepted: os.geteuid() + 1)
    with pytest.raises((EOFError, OSError)), Client(f"\0{door.name}", "AF_UNIX", authkey=door.key):
        pass
    monkeypatch.undo()
    assert calls.by_socket(door.name, door.key, ("sbx-1", "state", (), {}))[0]


# -- sandboxes and handles -------------------------------------------------------------------------


def test_a_handle_calls_its_owner_and_says_where_it_is_when_that_is_gone(ray: Ray, sandboxes: Any) -> None:
    owner = Actor(sandboxes._Owner())
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
    assert not hasattr(handle.files, "__deepcopy__")
    arrive, (ticket,) = handle.__reduce__()
    assert ticket == arrive(ticket)._ticket
    owner.is_dead = True
    with pytest.raises(SandboxLost, match="node-b") as lost:
        handle.exec(["ls"])
    assert lost.value.retryable
    ray.actors.clear()
    with pytest.raises(SandboxLost):
        sandboxes.Handle(ticket).exec(["ls"])


def test_a_process_of_another_node_is_not_reached_by_its_socket(ray: Ray, sandboxes: Any, door: Any) -> None:
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
        for name in ("name", "namespace", "lifetime", "get_if_exists", "num_cpus", "scheduling_strategy")
    )
    with pytest.raises(InvalidRequest) as refusal:
        sandboxes.Sandbox.create(detached=True, network="bad")
    assert "network" == refusal.value.field
    other = sandboxes.Sandbox.create(detached=True)
    ray.actors["sandboxes-of-node-b"] = dead = Actor(sandboxes._Owner())
    dead.is_dead = True
    ray.actors["somebody-elses"] = Actor(SimpleNamespace(ids=lambda: ["x"]))
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


def test_a_task_ends_the_sandboxes_of_tasks_before_it_in_the_same_process(ray: Ray, sandboxes: Any) -> None:
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


def test_each_item_has_a_sandbox_of_its_own_and_its_result_its_place(ray: Ray, rollouts: Any) -> None:
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
        (KeyError("x"), LookupError, 3), (RayError("x"), (), 3), (KeyError("x"), (ValueError,), 1),
    ],
)  # fmt: skip
def test_what_was_lost_is_tried_again_and_a_mistake_is_not(
    ray: Ray, rollouts: Any, error: Exception, retry_on: Any, tries: int
) -> None:
    tried: list[Any] = []

    def fail(_sandbox: Any, item: Any) -> Any:
        tried.append(item)
        raise error

    seen: list[Any] = []
    found = rollouts.map_sandboxes(
        fail, "ab", on_error="return", retry_on=retry_on, progress=seen.append, concurrency=1
    )
    assert ["x"] * 2 == [str(each).strip("'") for each in found]
    assert tries == tried.count("a") == tried.count("b")
    assert (2, 2, 2 * (tries - 1)) == (seen[-1].done, seen[-1].failed, seen[-1].retried)
    tried.clear()
    with pytest.raises(type(error)):
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


# -- below Ray's own API ---------------------------------------------------------------------------


@pytest.fixture
def module(ray: Ray) -> Any:
    return importlib.import_module("ringfence.ray.backend")


def config(**changes: Any) -> Any:
    facts = {
        "image": "debian", "cpu": 0.5, "memory": "1024", "env": {"A": "b"}, "network": "none", "dns": None,
        "workdir": "/w", "shell": "bash",
    }  # fmt: skip
    return SimpleNamespace(**{**facts, **changes})


def test_a_sandbox_is_made_as_the_job_and_the_request_say(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    asked: list[Any] = []

    def create(**parts: Any) -> Any:
        asked.append(parts)
        sandbox: Any = Local()
        sandbox.files = SimpleNamespace(make_dir=made.append)
        return sandbox

    monkeypatch.setattr(module.Sandbox, "create", create)
    options = module.Options(tier="strong", allow_degraded=["cpu_limit"], public=["a.test"])
    backend = module.Backend(options=options)
    name = backend.create_sandbox(config())
    assert {
        "image": "debian", "network": "none", "limits": {"cpus": 0.5, "memory_bytes": 1024},
        "env": {"A": "b"}, "tier": "strong", "allow_degraded": ["cpu_limit"],
    } == asked[-1]  # fmt: skip
    assert ["/w"] == made
    backend.create_sandbox(config(image=module.HOST, cpu=None, memory=None, env={}, network="public", workdir=""))
    assert {"network": ["a.test"], "tier": "strong", "allow_degraded": ["cpu_limit"]} == asked[-1]
    assert 1 == len(made)
    for network, dns, said in (("public", ["1.1.1.1"], "leave dns out"), ("host", None, "named hosts alone")):
        with pytest.raises(module.SandboxCreationError, match=said):
            backend.create_sandbox(config(network=network, dns=dns))
    with pytest.raises(module.SandboxCreationError, match="named hosts alone"):
        module.Backend(options=module.Options()).create_sandbox(config(network="public"))
    assert {"config"} == {*backend._sandbox_metadata[name]}
    sandbox = backend._sandboxes[name]
    assert "running" == backend.get_status(name)
    backend.delete_sandbox(name)
    backend.delete_sandbox(name)
    assert (1, "terminated", {}) == (sandbox.ended, backend.get_status(name), backend._sandbox_metadata)
    with pytest.raises(module.SandboxNotFoundError):
        backend.read_file(name, "x")


def test_a_command_has_what_rays_caller_asks_for(module: Any) -> None:
    asked: list[Any] = []
    answers: list[Any] = []

    def run(argv: Any, **how: Any) -> Any:
        asked.append((argv, how))
        if isinstance(answers[0], Exception):
            raise answers.pop(0)
        return answers.pop(0)

    backend = module.Backend(options=module.Options())
    sandbox: Any = SimpleNamespace(exec=run, state=SimpleNamespace(value="terminated"))
    backend._sandboxes["s"] = sandbox
    backend._sandbox_metadata["s"] = {"config": config()}
    answers[:] = [ExecResult(exit_code=3, stdout=b"o", stderr=b"e", duration_s=1.5), ExecResult(signal=9)]
    assert (3, "o", "e", 1.5) == backend.exec_command("s", "echo", timeout=2.0, env={"A": "1"}, user="7")
    assert 137 == backend.exec_command("s", ["a", "b"], cwd="/x", shell="zsh", user="name")[0]
    first, second = asked
    assert (["bash", "-c", "echo"], "/w", 2.0, {"A": "1"}, 7) == (
        first[0], first[1]["cwd"], first[1]["timeout_s"], first[1]["env"], first[1]["user"],
    )  # fmt: skip
    assert (["a", "b"], "/x", "name") == (second[0], second[1]["cwd"], second[1]["user"])
    answers[:] = [ExecResult(signal=9, timed_out=True), SandboxLost("x"), ExecResult(exit_code=0)]
    with pytest.raises(module.SandboxTimeoutError, match=r"2\.0 seconds"):
        backend.exec_command("s", "x", timeout=2.0)
    with pytest.raises(module.SandboxExecError):
        backend.exec_command("s", "x")
    backend.exec_command("s", "x", shell="zsh")
    assert ["zsh", "-c", "x"] == asked[-1][0]
    with pytest.raises(module.SandboxExecError, match="a group cannot be chosen"):
        backend.exec_command("s", "x", user="0:0")
    assert "terminated" == backend.get_status("s")


def test_files_that_cannot_be_had_are_told_in_rays_words(module: Any) -> None:
    asked: list[Any] = []

    def fail(*_: Any, **how: Any) -> Any:
        asked.append(how)
        raise SandboxLost("x")

    backend = module.Backend(options=module.Options())
    backend._sandboxes["s"] = SimpleNamespace(files=SimpleNamespace(read=fail, write=fail))
    for call in (lambda: backend.read_file("s", "x"), lambda: backend.write_file("s", "x", "y", append=True)):
        with pytest.raises(module.SandboxError):
            call()
    assert [{}, {"append": True, "parents": True}] == asked


def test_an_image_that_is_lacking_is_fetched_where_that_is_allowed(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ringfence.images import registry

    fetched: list[str] = []
    found: dict[str, Any] = {"here": "image", "odd": InvalidRequest("odd"), "none": ImageNotFound("none")}

    def find(_store: Any, name: str) -> Any:
        if isinstance(found[name], Exception):
            raise found[name]
        return found[name]

    def pull(name: str) -> None:
        fetched.append(name)
        if len(fetched) > 1:
            raise RingfenceError("no network")

    monkeypatch.setattr(module.ImageStore, "__init__", lambda _store: None)
    monkeypatch.setattr(module.ImageStore, "find", find)
    monkeypatch.setattr(registry, "pull", pull)
    images = module.Images(module.Options())
    for name in (module.HOST, "here", "none"):
        assert name == images.pull_image(name)
    assert ["none"] == fetched
    for images, name in ((images, "none"), (images, "odd"), (module.Images(module.Options(pull=False)), "none")):
        with pytest.raises(module.SandboxCreationError):
            images.pull_image(name)
    assert ["none"] * 2 == fetched


def test_a_jobs_options_reach_its_workers(module: Any, ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = module.runtime_env(tier="strong", public=["a.test"])
    hook, _, function = environment["worker_process_setup_hook"].rpartition(".")
    monkeypatch.setenv(module.SETTING, environment["env_vars"][module.SETTING])
    assert module.Options(tier="strong", public=["a.test"]) == module.Options.of_environment()
    assert "strong" == module.Backend()._options.tier
    getattr(sys.modules[hook], function)()
    runtime: Any = sys.modules["ray.experimental.sandbox.runtime"]
    assert (module.Backend, module.Images) == (runtime.GVisorSandboxBackend, runtime.ImageManager)
    with pytest.raises(TypeError, match="colour"):
        module.runtime_env(colour="blue")
    monkeypatch.delenv(module.SETTING)
    assert module.Options() == module.Options.of_environment()
