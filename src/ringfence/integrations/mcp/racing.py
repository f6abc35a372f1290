"""Commands in forks of a client's sandbox, of which the first to succeed takes its place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from ...errors import RingfenceError
from ...model.base.ids import derived_id
from .. import outcome
from .results import CommandAnswer, RaceAnswer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...sandbox import AsyncSandbox
    from ...sandbox.aio_process import AsyncProcess
    from .sandboxes import Held

MOST_BRANCHES = 8
_OUTPUT_BYTES = 32 << 10  # of each stream


async def race(held: Held, commands: Sequence[str], timeout_s: float) -> RaceAnswer:
    """Run the commands; see `Tools.race_commands`."""
    assert held.sandbox is not None
    branches = await held.sandbox.fork(len(commands))
    outputs = [""] * len(commands)
    winners: list[int] = []
    failures: list[Exception] = []

    async def attempt(index: int, branch: AsyncSandbox) -> None:
        argv = outcome.shell_argv(commands[index])
        done = await branch.exec(argv, timeout_s=timeout_s, max_output_bytes=_OUTPUT_BYTES)
        outputs[index] = CommandAnswer.of("", done).text()
        if done.ok and not winners:
            winners.append(index)
            group.cancel_scope.cancel()

    try:
        async with anyio.create_task_group() as group:
            for index, branch in enumerate(branches):
                group.start_soon(attempt, index, branch)
        if winners:
            old, held.sandbox = held.sandbox, branches.pop(winners[0])
            branches.append(old)
            known, held.processes = held.processes, {}
            held.processes = await _going_on(held.sandbox, known)
    except* RingfenceError as errors:
        failures += errors.exceptions  # raised here, Python 3.11.3 and older would wrap it
    finally:
        with anyio.CancelScope(shield=True):
            for branch in branches:
                await branch.terminate()
    if failures:
        raise failures[0]
    return RaceAnswer(sandbox=held.name, winner=winners[0] if winners else None, outputs=outputs)


async def _going_on(fork: AsyncSandbox, known: dict[str, AsyncProcess]) -> dict[str, AsyncProcess]:
    """Find the background processes that go on in a fork, by their names."""
    report = fork.fork_report
    found: dict[str, AsyncProcess] = {}
    for name, process in known.items():
        for id in (process.id, derived_id(process.id, fork.id)):  # here; of a server
            if report is not None and id in report.processes:
                found[name] = await fork.process(id)
    return found
