"""Sandboxes in Ray programs: who may use them, how long they last, and a function over many items."""

from __future__ import annotations

import builtins
import os
import runpy
import warnings
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import Any

import pytest
import ray

from ringfence.errors import InvalidRequest, SandboxLost, SandboxNotFound, Unsupported
from ringfence.ray import Handle, Progress, Sandbox, calls, detached, map_sandboxes
from tests.suites.ray.conftest import node_options


def _use_for_ever(handle: Handle) -> None:
    while True:
        handle.exec(["true"])


class Owner:
    """An actor that owns a sandbox."""

    def __init__(self) -> None:
        self._sandbox = Sandbox.create()

    def share(self) -> list[Any]:
        return [self._sandbox]

    def is_its_own(self, shared: list[Any]) -> bool:
        return shared[0] is self._sandbox

    def die(self) -> None:
        os._exit(1)


@ray.remote(num_cpus=0)
def use(shared: list[Any], text: str) -> str:
    shared[0].files.write("note", text)
    printed: str = shared[0].exec(["cat", "note"]).stdout_text
    return printed


@ray.remote(num_cpus=0)
def attempt(shared: list[Any]) -> str:
    try:
        return str(shared[0].exec(["echo", "reached"]).stdout_text)
    except Unsupported as exc:
        return str(exc)


def test_handles_are_passed_between_tasks_of_a_node(cluster: Any) -> None:
    owner = ray.remote(num_cpus=0)(Owner).remote()
    (handle,) = shared = ray.get(owner.share.remote())

    assert isinstance(handle, Handle)
    assert "by a task" == ray.get(use.remote(shared, "by a task"))
    assert "by a task" == handle.files.read_text("note")
    assert 3 == handle.exec(["sh", "-c", "exit 3"]).exit_code
    assert ray.get(owner.is_its_own.remote(shared))
    with pytest.raises(Unsupported, match=r"start\(\) works only in the process that created the"):
        handle.start(["sleep", "1"])
    with pytest.raises(InvalidRequest, match="argv"):
        handle.exec("not a list")

    owner.die.remote()
    with pytest.raises(SandboxLost, match="create with detached=True"):
        _use_for_ever(handle)


def test_only_who_knows_the_key_is_listened_to(cluster: Any) -> None:
    with Sandbox.create() as sandbox:
        ticket = sandbox.__reduce__()[1][0]
        call: tuple[Any, ...] = (sandbox.id, "exec", (["echo", "known"],), {})

        assert (
            "known\n" == calls.result_of(calls.by_socket(ticket.door, ticket.key, call)).stdout_text
        )
        with pytest.raises(AuthenticationError):
            calls.by_socket(ticket.door, b"x" * 32, call)
        with pytest.raises(Unsupported, match="__class__"):
            calls.result_of(
                calls.by_socket(ticket.door, ticket.key, (sandbox.id, "__class__", (), {}))
            )


def test_another_node_reaches_detached_sandboxes_alone(far: dict[str, float]) -> None:
    there = attempt.options(resources=far)
    with Sandbox.create() as own, Sandbox.create(detached=True) as lasting:
        assert "reached\n" == ray.get(attempt.remote([own]))
        assert "detached=True, or run this task on its node" in ray.get(there.remote([own]))
        assert "reached\n" == ray.get(there.remote([lasting]))
        assert lasting.id in [handle.id for handle in detached()]
        assert lasting.id == lasting.session.id
    assert lasting.id not in [handle.id for handle in detached()]
    with pytest.raises(InvalidRequest, match="network"):
        Sandbox.create(detached=True, network="everything there is")


def _global_of_process() -> list[Any]:
    """A global of the worker process: Ray sends a function with copies of its own globals."""
    left: list[Any] = vars(builtins).setdefault("left_by_tests", [])
    return left


@ray.remote(num_cpus=0)
def create(keeps: bool) -> Any:
    sandbox = Sandbox.create()
    if keeps:
        _global_of_process().append(sandbox)
    return os.getpid(), [sandbox]


@ray.remote(num_cpus=0)
def look_at(pid: int, again: bool) -> Any:
    if again:
        Sandbox.create().terminate()
    return os.getpid() == pid, [each.state.value for each in _global_of_process()]


def test_a_sandbox_ends_with_its_task(cluster: Any) -> None:
    """Although Ray uses the process again, and although a global refers to it."""
    _, (returned,) = ray.get(create.remote(keeps=False))
    with pytest.raises((SandboxNotFound, SandboxLost), match="ended"):
        returned.exec(["true"])

    pid, _ = ray.get(create.remote(keeps=True))
    while True:
        is_same, states = ray.get(look_at.remote(pid, again=True))
        if is_same:
            break
    assert ["terminated"] == states


def test_a_lost_node_loses_its_sandboxes_and_says_so(cluster: Any) -> None:
    node = cluster.add_node(**node_options(), resources={"doomed": 1.0})
    handle = ray.get(_create_detached.options(resources={"doomed": 0.1}).remote())

    assert "here\n" == handle.exec(["echo", "here"]).stdout_text
    cluster.remove_node(node, allow_graceful=False)
    with pytest.raises(SandboxLost, match="is lost: node") as caught:
        _use_for_ever(handle)
    assert caught.value.retryable


@ray.remote(num_cpus=0)
def _create_detached() -> Any:
    return Sandbox.create(detached=True)


def _square(sandbox: Sandbox, number: int) -> int:
    return int(sandbox.exec(["sh", "-c", f"echo $(({number} * {number}))"]).stdout_text)


def _flaky(sandbox: Sandbox, item: tuple[str, int]) -> int:
    """Lose the process once, then fail with an error that may be tried again, then for good."""
    directory, number = item
    tries = len(os.listdir(directory))
    Path(directory, str(tries)).touch()
    if number == 1 and tries == 0:
        os._exit(1)
    if number == 1 and tries == 1:
        raise OSError("try again")
    if number == 2:
        raise ValueError("for good")
    return tries


def test_a_function_over_many_items(cluster: Any, tmp_path: Path) -> None:
    seen: list[Progress] = []
    results = map_sandboxes(
        _square, range(7), concurrency=3, progress=seen.append, sandbox={"ttl_s": 60}
    )

    assert [number * number for number in range(7)] == results
    assert list(range(1, 8)) == [each.done for each in seen]
    assert Progress(7, 0, 0, 7) == seen[-1]

    items = [(str(tmp_path / str(number)), number) for number in range(3)]
    for directory, _ in items:
        os.mkdir(directory)
    mixed = map_sandboxes(
        _flaky, items, retry_on=(OSError,), progress=seen.append, on_error="return"
    )
    assert [0, 2] == mixed[:2]
    assert isinstance(mixed[2], ValueError)
    assert Progress(3, 1, 2, 3) == seen[-1]
    with pytest.raises(ValueError, match="for good"):
        map_sandboxes(_flaky, items[2:], retries=0)
    with pytest.raises(InvalidRequest, match="on_error: 'ignore' is not one of raise, return"):
        map_sandboxes(_flaky, items, on_error="ignore")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concurrency": 0}, "concurrency: must be between 1"),
        ({"concurrency": -1}, "concurrency: must be between 1"),
        ({"retries": -1}, "retries: must be between 0"),
        ({"num_cpus": -1}, "num_cpus: must be between 0"),
        ({"retry_on": ["OSError"]}, "retry_on: 'OSError' is no class of exceptions"),
        ({"progress": 5}, "progress: is not callable"),
        ({"sandbox": 5}, "sandbox: must be a dict"),
    ],
)
def test_a_mistaken_option_is_refused_before_anything_runs(
    cluster: Any, options: dict[str, Any], message: str
) -> None:
    """With fewer than one item at once it waited for ever."""
    with pytest.raises(InvalidRequest, match=message):
        map_sandboxes(lambda _sandbox, item: item, [1], **options)


def test_a_wait_for_a_node_that_is_not_there_is_announced(cluster: Any) -> None:
    """Ray itself says it in a log, if at all."""
    message = r"num_cpus: no node has 9 CPUs, the largest has 2: the items wait until Ray adds one"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=message):
            map_sandboxes(_square, [1], num_cpus=9)
    assert [4] == map_sandboxes(_square, [2], num_cpus=2)


def test_one_class_of_errors_is_tried_again(cluster: Any, tmp_path: Path) -> None:
    def fails_once(_sandbox: Any, path: Path) -> str:
        if not path.exists():
            path.touch()
            raise OSError
        return "done"

    assert ["done"] == map_sandboxes(fails_once, [tmp_path / "tried"], retry_on=OSError)


def test_results_as_a_dataset(cluster: Any) -> None:
    dataset = map_sandboxes(_square, [2, 3], results="dataset")

    assert [4, 9] == [row["result"] for row in dataset.take_all()]


def test_the_example(cluster: Any) -> None:
    """With the session's cluster in place of one of its own: starting another takes seconds."""
    path = Path(__file__).parents[3] / "examples" / "ray_rollout.py"
    example = runpy.run_path(str(path))

    rewards = map_sandboxes(example["reward"], example["ANSWERS"], concurrency=2, retries=2)
    assert [1.0, 1.0, 0.0, 0.0] == rewards
