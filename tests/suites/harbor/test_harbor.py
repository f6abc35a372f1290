"""Whole trials of tasks that need no network: the oracle solves them, an agent that does nothing does not."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy
from harbor.models.trial.paths import TrialPaths

from ringfence.errors import FileError
from ringfence.integrations.harbor import OUTPUT_BYTES, RingfenceEnvironment
from tests.suites import at_once, imports, left
from tests.suites.examples import output_of, status_of
from tests.suites.places import options
from tests.suites.remote import serving

# On a busy machine the framework alone takes minutes to import.
pytestmark = pytest.mark.timeout(300)
# Nothing is told or asked of the internet.
QUIET = {"HARBOR_TELEMETRY": "off", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
TASKS = Path(__file__).parent / "tasks"


def trials(agent: str, where: Path, *more: str) -> dict[str, Any]:
    """The reward of each task, or what went wrong."""
    kwargs = ["image=default", *(f"{key}={value}" for key, value in options().items())]
    with mock.patch.dict(os.environ, QUIET):
        status, said = status_of(
            *("harbor", "run", "-p", str(TASKS), "-a", agent, "-o", str(where), "-n", "3"),
            *("-e", "ringfence.integrations.harbor:RingfenceEnvironment"),
            *(word for each in (*kwargs, *more) for word in ("--ek", each)),
        )
    assert 0 == status, said[-3000:]
    found = {}
    for path in where.glob("*/*/result.json"):
        result = json.loads(path.read_text())
        rewards = (result.get("verifier_result") or {}).get("rewards") or {}
        found[result["task_name"]] = result["exception_info"] or rewards.get("reward")
    return found


def test_the_oracle(tmp_path: Path) -> None:
    found = trials("oracle", tmp_path)
    assert ([1.0] * 3, 3) == (list(found.values()), len(list(TASKS.iterdir())))


@pytest.mark.once
def test_nobody(tmp_path: Path) -> None:
    """The control: without a solution no task is solved."""
    assert [0.0] * 3 == list(trials("nop", tmp_path).values())


def environment(
    where: Path, kind: type[RingfenceEnvironment] = RingfenceEnvironment, **more: Any
) -> RingfenceEnvironment:
    """One trial's, without a trial."""
    directory = where / "environment"
    directory.mkdir(exist_ok=True)
    return kind(
        environment_dir=directory,
        environment_name="task",
        session_id="task__1__env",
        trial_paths=TrialPaths(where / "trial"),
        task_env_config=EnvironmentConfig(docker_image="none"),
        network_policy=NetworkPolicy(network_mode=NetworkMode.NO_NETWORK),
        image="default",
        **(more or options()),
    )


async def test_a_trial_by_hand(tmp_path: Path) -> None:
    made = environment(tmp_path)
    await made.start(force_build=False)
    try:
        tree = tmp_path / "tree"
        (tree / "sub").mkdir(parents=True)
        (tree / "sub" / "file").write_text("new")
        await made.exec("mkdir -p /app/tree/sub; echo kept > /app/tree/sub/kept")
        await made.upload_dir(tree, "/app/tree")
        listed = await made.exec("cat tree/sub/kept tree/sub/file", cwd="/app")
        (tmp_path / "out").mkdir()
        await made.download_dir("/app/tree", tmp_path / "out")
        late = await made.exec("setsid sleep 4381 & wait", timeout_sec=1)
        gone = await made.exec(left.look(4381))
    finally:
        await made.stop(delete=True)

    assert "kept\nnew" == listed.stdout
    assert "new" == (tmp_path / "out" / "sub" / "file").read_text()
    assert (124, "none\n") == (late.return_code, gone.stdout)


def test_an_agents_loop(tmp_path: Path) -> None:
    """An agent whose time ends while a command runs: its sandbox goes with the trial."""
    made: list[Any] = []
    real = RingfenceEnvironment.start

    async def start(self: RingfenceEnvironment, force_build: bool) -> None:
        await real(self, force_build)
        made.append(self.sandbox)

    solution = "echo begun > /app/begun; sleep 4383"
    with (
        mock.patch.object(RingfenceEnvironment, "start", start),
        mock.patch(f"{__name__}.TASKS", _slow_task(tmp_path / "tasks", solution)),
    ):
        (answer,) = trials("oracle", tmp_path / "jobs").values()

    assert ("AgentTimeoutError", "terminated") == (answer["exception_type"], made[0].state)


def _slow_task(where: Path, solution: str) -> Path:
    """One task as the others, whose solution takes longer than its agent may."""
    shutil.copytree(TASKS / "sum-column", where / "slow")
    (where / "slow" / "solution" / "solve.sh").write_text(solution)
    config = where / "slow" / "task.toml"
    config.write_text(
        config.read_text().replace("[agent]\ntimeout_sec = 60.0", "[agent]\ntimeout_sec = 3.0")
    )
    return where


@pytest.mark.once  # gVisor gets no way out that it had not at its start
async def test_the_network_changes_under_it(tmp_path: Path) -> None:
    made = environment(tmp_path)
    await made.start(force_build=False)
    try:
        resolve = "getent hosts allowed.example >/dev/null"
        before = await made.exec(resolve)
        hosts = NetworkPolicy(network_mode=NetworkMode.ALLOWLIST, allowed_hosts=["allowed.example"])
        await made.set_network_policy(hosts)
        after = await made.exec(resolve)
        other = await made.exec("getent hosts other.example >/dev/null")
    finally:
        await made.stop(delete=True)

    assert (2, 0, 2) == (before.return_code, after.return_code, other.return_code)


async def test_cancelled_it_leaves_no_process(tmp_path: Path) -> None:
    made = environment(tmp_path)
    await made.start(force_build=False)
    try:
        task = asyncio.create_task(made.exec("echo > /app/began; setsid sleep 4382 & wait"))
        while (await made.exec("test -e /app/began")).return_code:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while "none\n" != (await made.exec(left.look(4382))).stdout:
            await asyncio.sleep(0.01)
    finally:
        await made.stop(delete=True)


async def test_too_much_output_is_cut_and_says_so(tmp_path: Path) -> None:
    made = environment(tmp_path)
    await made.start(force_build=False)
    try:
        whole = await made.exec(f"head -c {OUTPUT_BYTES // 2} /dev/zero")
        cut = await made.exec(f"head -c {OUTPUT_BYTES + 1} /dev/zero")
    finally:
        await made.stop(delete=True)

    assert (OUTPUT_BYTES // 2, "") == (len(whole.stdout), whole.stderr)
    assert len(cut.stdout) <= OUTPUT_BYTES
    assert "was cut" in cut.stderr


@pytest.mark.once
async def test_fifty_at_once(tmp_path: Path) -> None:
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    mount = at_once.mount(meeting)

    class Meeting(RingfenceEnvironment):
        def _arguments(self) -> dict[str, Any]:
            arguments = super()._arguments()
            return {**arguments, "mounts": [*arguments["mounts"], mount]}

    async def one(number: int) -> int:
        where = tmp_path / str(number)
        where.mkdir()
        made = environment(where, Meeting)
        await made.start(force_build=False)
        try:
            return (await made.exec(at_once.script(number))).return_code
        finally:
            await made.stop(delete=True)

    crowd = range(at_once.CROWD)
    assert [0 for _ in crowd] == await asyncio.gather(*(one(number) for number in crowd))


@pytest.mark.once
def test_the_example(tmp_path: Path) -> None:
    assert "reward 1.0\n" == output_of("harbor_trial", tmp_path)


@pytest.mark.once
async def test_over_a_server(tmp_path: Path) -> None:
    (tmp_path / "given").write_text("there")
    with serving() as server:
        made = environment(tmp_path, server=server)
        await made.start(force_build=False)
        await made.upload_file(tmp_path / "given", "/app/new/given")
        answer = await made.exec("cat new/given; exit 3", cwd="/app")
        await made.download_dir("/app/new", tmp_path / "back")
        await made.stop(delete=True)

    assert ("there", 3) == (answer.stdout, answer.return_code)
    assert "there" == (tmp_path / "back" / "given").read_text()


@pytest.mark.once
def test_what_would_have_to_be_built_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "environment"
    directory.mkdir()
    (directory / "Dockerfile").write_text("FROM debian\nRUN apt-get install everything\n")
    with pytest.raises(Exception, match="builds no images"):
        RingfenceEnvironment(
            environment_dir=directory,
            environment_name="task",
            session_id="task__1__env",
            trial_paths=TrialPaths(tmp_path / "trial"),
            task_env_config=EnvironmentConfig(),
        )


@pytest.mark.once
def test_importing_it_is_cheap() -> None:
    imports.assert_cheap("harbor")


async def test_what_is_copied_out_twice_goes_through_no_link(tmp_path: Path) -> None:
    """The first copy brings a link, the second a directory of that name with a file in it."""
    outside, out = tmp_path / "outside", tmp_path / "out"
    outside.mkdir()
    made = environment(tmp_path)
    await made.start(force_build=False)
    try:
        await made.exec(f"mkdir -p /app/tree; ln -s {outside} /app/tree/a")
        await made.download_dir("/app/tree", out)
        await made.exec("cd /app/tree; rm a; mkdir a; echo x > a/file")
        with pytest.raises(FileError):
            await made.download_dir("/app/tree", out)
    finally:
        await made.stop(delete=True)

    assert [] == list(outside.iterdir())
