"""Who waits for the end of an exec is not woken by the ends of its streams; who reads them is told of those."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import suppress

import pytest

from ringfence import AsyncSandbox, Sandbox
from ringfence.backends.native.sandbox import NativeSandbox
from ringfence.model.calls import make_request
from ringfence.sandbox.pump import Pump, begin, run_to_end

pytestmark = pytest.mark.anyone

# Both streams are closed long before the end.
CLOSES_EARLY = ["sh", "-c", "echo out; echo err >&2; exec >&- 2>&-; read line; exit 3"]


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox.create() as made:
        made.exec(["true"])  # what is opened once is open
        yield made


class Counted(Pump):
    """One that knows how often it was woken."""

    woken = 0

    def ready(self, fd: int, events: int) -> bool:
        self.woken += 1
        return super().ready(fd, events)


def inner_of(sandbox: Sandbox) -> NativeSandbox:
    inner = sandbox._inner
    assert isinstance(inner, NativeSandbox)
    return inner


def descriptors() -> set[tuple[str, str]]:
    """What is open, so that what an earlier test lets go of meanwhile does not count."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own, or just closed
            found.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
    return found


def test_who_waits_for_the_end_is_woken_once(sandbox: Sandbox) -> None:
    request, limits = make_request(["true"]), sandbox.spec.limits
    attended = Counted(begin(inner_of(sandbox), request), request, limits)
    plain = Counted(inner_of(sandbox).start(request), request, limits)

    assert run_to_end(attended).ok
    assert run_to_end(plain).ok

    assert 1 == attended.woken
    assert 3 == plain.woken  # the control: two streams, and the end


def test_who_reads_a_stream_is_told_of_its_end_before_that_of_the_program(sandbox: Sandbox) -> None:
    process = sandbox.start(CLOSES_EARLY, stream_stdin=True)

    assert b"out\n" == b"".join(process.stdout)  # would wait for ever, were it open until the end
    assert b"err\n" == b"".join(process.stderr)
    assert process.stdin is not None
    process.stdin.write(b"go on\n")

    assert 3 == process.wait().exit_code


def test_all_that_was_written_is_there(sandbox: Sandbox) -> None:
    script = "exec 2>&-; head -c 300000 /dev/zero; exec >&-; read line; exit 3"

    result = sandbox.exec(["sh", "-c", script], stdin=b"x")

    assert (3, 300_000) == (result.exit_code, len(result.stdout))
    assert not result.truncated


def test_a_program_that_outlives_it_keeps_nobody_waiting(sandbox: Sandbox) -> None:
    result = sandbox.exec(["sh", "-c", "echo first; sleep 60 &"], timeout_s=30)

    assert (0, b"first\n") == (result.exit_code, result.stdout)
    sandbox.exec(["pkill", "sleep"])


@pytest.mark.parametrize("stdin", [None, b"", b"given"])
def test_nothing_stays_open(sandbox: Sandbox, stdin: bytes | None) -> None:
    before = descriptors()

    sandbox.exec(["cat"], stdin=stdin)
    sandbox.exec(["no such program"])
    with pytest.raises(Exception, match=r"/nowhere"):
        sandbox.exec(["true"], cwd="/nowhere")

    assert not descriptors() - before


def test_nothing_stays_open_of_one_that_was_never_waited_for(sandbox: Sandbox) -> None:
    before = descriptors()

    run = begin(inner_of(sandbox), make_request(["sleep", "60"]))
    run.kill()
    run.close()
    forsaken = begin(inner_of(sandbox), make_request(["sleep", "60"]))
    forsaken.close()

    assert not descriptors() - before
    sandbox.exec(["pkill", "sleep"])


def test_nothing_stays_open_of_one_whose_sandbox_ends() -> None:
    with Sandbox.create() as sandbox:
        request = make_request(["sh", "-c", "kill -9 1; sleep 60"])
        run = begin(inner_of(sandbox), request)
        sandbox.terminate()
        ended = run_to_end(Pump(run, request, sandbox.spec.limits))
        assert "terminate" == ended.killed_by

        assert [] == run.kept_open  # type: ignore[attr-defined]


async def _twice() -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    sandbox = await AsyncSandbox.create()
    async with sandbox:
        await sandbox.exec(["true"])
        before = descriptors()
        await sandbox.exec(["true"])
        return before, descriptors()


def test_nothing_stays_open_in_an_event_loop() -> None:
    import asyncio

    before, after = asyncio.run(_twice())

    assert not after - before


def test_an_exec_can_be_closed_after_its_socket(sandbox: Sandbox) -> None:
    """Python finalizes the garbage of a cycle in any order; since 3.13 the socket comes first."""
    before = descriptors()
    run = inner_of(sandbox).start(make_request(["sleep", "60"]))

    run._reply.close()
    run.close()

    assert not descriptors() - before
    assert sandbox.exec(["true"]).ok


@pytest.mark.parametrize("attended", [True, False])
def test_nothing_stays_open_of_one_that_could_not_start(
    sandbox: Sandbox, attended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = inner_of(sandbox)

    def refuse(*_: object) -> None:
        raise OSError("no room to note it")

    monkeypatch.setattr(type(inner.backend.handover), "begin_exec", refuse)
    before = descriptors()
    for _ in range(3):
        with pytest.raises(OSError, match="no room"):
            inner.start(make_request(["true"]), attended=attended)
    gc.collect()
    assert not descriptors() - before
    monkeypatch.undo()
    assert sandbox.exec(["true"]).ok


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_processor_limit_is_back_when_one_that_was_overdue_is_closed(
    sandbox: Sandbox, is_killed: bool
) -> None:
    inner = inner_of(sandbox)
    run = inner.start(make_request(["sleep", "60"]))
    run.overdue()
    assert 1 == inner._hurries
    if is_killed:
        run.kill()
    run.close()

    assert 0 == inner._hurries
    run.overdue()
    assert 0 == inner._hurries, "nobody would take it back"
    sandbox.exec(["pkill", "sleep"])
