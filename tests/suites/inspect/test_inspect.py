"""Inspect's own checks of sandboxes, and what they leave open."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from inspect_ai import Task
from inspect_ai import eval as evaluate
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver, use_tools
from inspect_ai.tool import bash
from inspect_ai.util import (
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentSpec,
    sandbox,
)
from inspect_ai.util._sandbox import self_check
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

from ringfence.backends.local.host import ranges
from ringfence.integrations.inspect_ai import RingfenceConfig, RingfenceEnvironment
from ringfence.model.spec import OWN_ROOT
from ringfence.sandbox import AsyncSandbox
from tests.suites import at_once, imports, left
from tests.suites.examples import output_of
from tests.suites.places import backend, options
from tests.suites.remote import serving


def has_several_users() -> bool:
    """As root, and natively where this user's account has a range of ids: `tools/suites.sh` sees to that."""
    if os.getuid() == 0:
        return True
    try:
        ranges.find()
    except ranges.NoRangeError:
        return False
    return not backend()


SEVERAL_USERS = has_several_users()
# A stream of events that Inspect 0.3.285 (hooks/_hooks.py) makes for each evaluation and does not close.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <function MemoryObjectReceiveStream"
    ":pytest.PytestUnraisableExceptionWarning"
)


async def make(**more: object) -> RingfenceEnvironment:
    made = await RingfenceEnvironment.sample_init("task", RingfenceConfig(**options(**more)), {})
    return made["default"].as_type(RingfenceEnvironment)


async def end(environment: SandboxEnvironment) -> None:
    await RingfenceEnvironment.sample_cleanup("task", None, {"default": environment}, False)


@pytest.fixture
async def sandbox_env(request: pytest.FixtureRequest) -> AsyncIterator[SandboxEnvironment]:
    if SEVERAL_USERS:
        # One test adds a user, as root inside: that takes a root with rights of its own.
        environment = await make(profile=OWN_ROOT)
    else:
        if backend() and getattr(request.node, "originalname", "") == "test_exec_as_user":
            reason = "where an ordinary user made the sandbox gVisor has no second user inside"
            request.node.add_marker(pytest.mark.xfail(strict=True, reason=reason))
        environment = await make()
    yield environment
    await end(environment)


def test_it_is_the_whole_suite() -> None:
    assert 44 == len(self_check.__all__)


async def test_cancelled_it_leaves_no_process(sandbox_env: SandboxEnvironment) -> None:
    command = ["sh", "-c", "echo > began; setsid sleep 4342 & wait"]
    task = asyncio.create_task(sandbox_env.exec(command))
    while not (await sandbox_env.exec(["test", "-e", "began"])).success:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while "none\n" != (await sandbox_env.exec(["sh", "-c", left.look(4342)])).stdout:
        await asyncio.sleep(0.01)


async def test_output_is_whole_or_an_error(sandbox_env: SandboxEnvironment) -> None:
    whole = await sandbox_env.exec(["head", "-c", str(10 << 20), "/dev/zero"])
    assert 10 << 20 == len(whole.stdout)
    with pytest.raises(OutputLimitExceededError):
        await sandbox_env.exec(["head", "-c", str((10 << 20) + 1), "/dev/zero"])


async def test_a_configuration_comes_back_from_a_log() -> None:
    config = RingfenceConfig(network="none", limits={"pids": 64})
    assert config == RingfenceEnvironment.config_deserialize(config.model_dump(mode="json"))


async def test_a_configuration_file(tmp_path: Path) -> None:
    path = tmp_path / "sandbox.toml"
    path.write_text('network = "none"\n[env]\nCOLOUR = "blue"\n')
    made = await RingfenceEnvironment.sample_init("task", str(path), {})
    answer = await made["default"].exec(["printenv", "COLOUR"])
    await end(made["default"])

    assert "blue\n" == answer.stdout


def test_a_task_finds_it_by_name(tmp_path: Path) -> None:
    """A whole evaluation with a scripted model; Inspect's own tools are injected, and run inside."""

    @solver
    def look() -> Solver:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            del generate
            plain = await sandbox().exec(["cat", "given.txt"])
            remote = await sandbox().exec_remote(["id", "-un"], stream=False)
            state.output = ModelOutput.from_content("mockllm", plain.stdout + remote.stdout)
            return state

        return solve

    task = Task(
        dataset=[Sample(input="look", target="a file sandbox", files={"given.txt": "a file "})],
        solver=look(),
        scorer=includes(),
        sandbox=SandboxEnvironmentSpec("ringfence", RingfenceConfig(**options())),
    )
    (log,) = evaluate(task, model="mockllm/model", log_dir=str(tmp_path), display="none")

    assert "success" == log.status, log.error
    assert log.results is not None
    assert 1.0 == log.results.scores[0].metrics["accuracy"].value


def test_an_agents_loop(tmp_path: Path) -> None:
    """A tool call that takes too long, then one in which the sample's own time ends."""
    calls = ["setsid sleep 4343 & wait", left.look(4343), "sleep 4344"]
    outputs = [
        ModelOutput.for_tool_call("mockllm/model", "bash", {"command": each}) for each in calls
    ]
    for output in outputs:
        output.usage = ModelUsage()  # else Inspect counts tokens, with a table from the internet
    task = Task(
        dataset=[Sample("work")],
        solver=[use_tools(bash(timeout=4)), generate()],
        sandbox=SandboxEnvironmentSpec("ringfence", RingfenceConfig(**options())),
    )
    model = get_model("mockllm/model", custom_outputs=outputs)
    (log,) = evaluate(task, model=model, log_dir=str(tmp_path), display="none", message_limit=6)

    assert log.samples
    said = [each for each in log.samples[0].messages if each.role == "tool"]
    assert said[0].error is not None
    assert ("timeout", "none") == (said[0].error.type, said[1].text.strip())


def test_a_sample_whose_time_ends_leaves_no_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends while a command runs."""
    made: list[AsyncSandbox] = []
    real = RingfenceEnvironment.__init__

    def remember(self: RingfenceEnvironment, sandbox: AsyncSandbox) -> None:
        made.append(sandbox)
        real(self, sandbox)

    @solver
    def wait() -> Solver:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            del generate
            await sandbox().exec(["sleep", "4345"])
            return state

        return solve

    monkeypatch.setattr(RingfenceEnvironment, "__init__", remember)
    where = SandboxEnvironmentSpec("ringfence", RingfenceConfig(**options()))
    task = Task(dataset=[Sample("wait")], solver=wait(), sandbox=where, time_limit=4)
    (log,) = evaluate(task, model="mockllm/model", log_dir=str(tmp_path), display="none")

    assert log.samples
    assert log.samples[0].limit is not None
    assert ["time", "terminated"] == [log.samples[0].limit.type, made[0].state]


@pytest.mark.once
async def test_fifty_at_once(tmp_path: Path) -> None:
    async def one(number: int) -> int:
        environment = await make(mounts=[at_once.mount(tmp_path)])
        try:
            return (await environment.exec(["sh", "-c", at_once.script(number)])).returncode
        finally:
            await end(environment)

    crowd = range(at_once.CROWD)
    assert [0 for _ in crowd] == await asyncio.gather(*(one(number) for number in crowd))


@pytest.mark.once
def test_the_example(tmp_path: Path) -> None:
    assert "5891b5b5 1.0\n" == output_of("inspect_task", tmp_path)


@pytest.mark.once
async def test_over_a_server(tmp_path: Path) -> None:
    with serving() as server:
        made = await RingfenceEnvironment.sample_init("task", RingfenceConfig(server=server), {})
        environment = made["default"]
        await environment.write_file("a/b", "there")

        assert "there" == await environment.read_file("a/b")
        answer = await environment.exec(["cat"], input="in and out")
        assert "in and out" == answer.stdout
        with pytest.raises(FileNotFoundError):
            await environment.read_file("nothing")
        await end(environment)


@pytest.mark.once
def test_importing_it_is_cheap() -> None:
    imports.assert_cheap("inspect_ai")
