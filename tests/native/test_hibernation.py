"""PID 1 of a sandbox in which nothing runs sleeps in next to no memory, and wakes up as it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from ringfence import ExecResult, Limits, Sandbox
from ringfence.backends.native.backend import NativeBackend
from ringfence.backends.native.profiles import Profile
from ringfence.errors import RingfenceError
from ringfence.policy.seccomp import SeccompPolicy
from tests.features import require
from tests.native.callers import SOURCE, Caller
from tests.native.hibernation import hibernates, is_hibernated
from tests.native.outside import (
    children_of,
    descendants_of,
    init_pid,
    pin,
    survivors,
    until,
)

GONE_WITHIN_S = 10.0


@pytest.mark.full
def test_it_wakes_for_whatever_is_asked(sandbox: Sandbox, tmp_path: Path) -> None:
    """Each after it has slept: commands, files, background processes, limits and statistics."""
    assert hibernates(sandbox)
    done = sandbox.exec(["sh", "-c", "echo one; exit 3"])
    assert (b"one\n", 3) == (done.stdout, done.exit_code)

    for _ in range(2):  # the second after its PID 1 had mapped code of its own, and slept
        assert hibernates(sandbox)
        assert 3 == sandbox.exec(["setsid", "sh", "-c", "exit 3"], session_leader=False).exit_code

    assert hibernates(sandbox)
    sandbox.files.write("/tmp/kept.txt", b"kept")
    assert hibernates(sandbox)
    assert b"kept" == sandbox.files.read("/tmp/kept.txt")

    assert hibernates(sandbox)
    late = sandbox.exec(["sh", "-c", "setsid sleep 60 & sleep 60"], timeout_s=0.2)
    assert late.timed_out

    assert hibernates(sandbox)
    process = sandbox.start(["sleep", "60"])
    process.send_signal(signal.SIGTERM)
    assert signal.SIGTERM == process.wait().signal

    assert hibernates(sandbox)
    usage = sandbox.stats()
    assert usage.cpu_ns
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "file").write_bytes(b"mounted")
    sandbox.mount(f"{tmp_path / 'more'}:/mnt/more:ro")
    assert b"mounted" == sandbox.exec(["cat", "/mnt/more/file"]).stdout


def test_nothing_inside_reaches_who_has_slept(sandbox: Sandbox) -> None:
    """Having run a program, it is of another user namespace than before; a process's own is the control."""
    assert hibernates(sandbox)
    done = sandbox.exec(["sh", "-c", _REACH])
    assert b"self maps fd/0 exe root\n1\n" == done.stdout


def test_what_an_exec_used_is_counted_as_before(sandbox: Sandbox) -> None:
    """Its bytes and its memory are its own, not of PID 1, which has read its own memory to wake."""
    script = "import sys; sys.stdout.write('x' * 100_000); b = bytearray(30 << 20)"
    before = sandbox.exec(["python3", "-c", script])
    assert hibernates(sandbox)
    after = sandbox.exec(["python3", "-c", script])
    (was, peak), (now, other_peak) = (_read_and_peak(done) for done in (before, after))
    assert abs(was - now) < 1 << 20
    assert all(30 << 20 < each < 120 << 20 for each in (peak, other_peak))


def _read_and_peak(done: ExecResult) -> tuple[int, int]:
    usage = done.resource_usage
    assert usage.io_read_bytes is not None
    assert usage.peak_memory_bytes is not None
    return usage.io_read_bytes, usage.peak_memory_bytes


@pytest.mark.full
def test_where_something_runs_it_stays_awake_and_sleeps_when_that_has_ended(
    sandbox: Sandbox,
) -> None:
    sandbox.exec(["sh", "-c", "sleep 2.5 & :"])
    time.sleep(
        1.8
    )  # a second of rest is what it sleeps after: nothing can be awaited that never comes
    assert not is_hibernated(init_pid(sandbox))
    assert hibernates(sandbox)


def test_the_tags_of_execs_go_on_where_they_were(sandbox: Sandbox) -> None:
    """A process left behind by one exec is not killed with another, before and after it has slept."""
    assert hibernates(sandbox)
    sandbox.exec(["sh", "-c", "setsid sleep 61 & :"])
    assert sandbox.exec(["sleep", "60"], timeout_s=0.2).timed_out
    assert b"sleep" in sandbox.exec(["sh", "-c", "cat /proc/[0-9]*/comm"]).stdout


@pytest.mark.full
def test_a_full_memory_is_no_reason_not_to_wake() -> None:
    """Files in memory up to the limit: what it gave up, it gets again."""
    with Sandbox.create(limits=Limits(memory_bytes=64 << 20), allow_degraded=("*",)) as sandbox:
        filled = sandbox.exec(["sh", "-c", "head -c 100M /dev/zero > /tmp/full; ls -s /tmp/full"])
        assert filled.exit_code is not None
        assert hibernates(sandbox)
        assert sandbox.exec(["rm", "-f", "/tmp/full"]).ok
        assert hibernates(sandbox)
        assert b"on\n" == sandbox.exec(["echo", "on"]).stdout


@pytest.mark.full
def test_many_wake_at_once_and_each_is_its_own() -> None:
    sandboxes = [Sandbox.create(env={"WHO": str(number)}) for number in range(5)]
    try:
        for sandbox in sandboxes:
            assert hibernates(sandbox)
        started = [sandbox.start(["sh", "-c", "echo $WHO"]) for sandbox in sandboxes]
        assert [f"{n}\n".encode() for n in range(5)] == [each.stdout.read() for each in started]
    finally:
        for sandbox in sandboxes:
            sandbox.terminate()


def test_it_ends_while_it_sleeps() -> None:
    """Ended by its owner; its process is gone then."""
    with Sandbox.create() as sandbox:
        pid = init_pid(sandbox)
        assert hibernates(sandbox)
    assert until(lambda: not os.path.exists(f"/proc/{pid}"))


def test_under_a_users_own_filter_it_stays_awake(tmp_path: Path) -> None:
    """That filter may kill who calls execveat(2)."""
    policy = SeccompPolicy.from_json(
        {"default_action": "allow", "rules": [{"names": ["execveat"], "action": "kill"}]}
    )
    backend = NativeBackend(
        profiles={"own": Profile("own", policy=policy)}, state_dir=str(tmp_path)
    )
    try:
        with (
            Sandbox.create(profile="own", backend=backend) as own,
            Sandbox.create(backend=backend) as other,
        ):
            assert hibernates(other)
            assert not is_hibernated(init_pid(own))
            assert own.exec(["true"]).ok
    finally:
        backend.close()


def test_one_that_signals_other_users_inside_stays_awake() -> None:
    """By execve(2) it would lose the capability for that, and could end their programs no more."""
    require("root")  # an ordinary user's root inside belongs to a range of ids, and stays awake too
    with Sandbox.create(profile="own_root", user="root") as own:
        for _ in range(2):  # the second begins its rest when the first sleeps
            with Sandbox.create() as other:
                assert hibernates(other)
        assert not is_hibernated(init_pid(own))


@pytest.mark.full
@pytest.mark.parametrize("suspends", [False, True])
def test_it_can_be_suspended_asleep(sandbox: Sandbox, suspends: bool) -> None:
    assert hibernates(sandbox)
    if suspends:
        sandbox.suspend()
        sandbox.resume()
    assert sandbox.exec(["true"]).ok


@pytest.mark.full
@pytest.mark.parametrize("delay_s", [0.0, 0.005, 0.02, 0.05, 0.1])
def test_who_makes_what_they_sleep_in_ends_with_the_zygote(tmp_path: Path, delay_s: float) -> None:
    """Killed in the middle of it, at any moment: neither it nor the program it traces is left."""
    backend = NativeBackend(state_dir=str(tmp_path))
    try:
        with suppress(RingfenceError), Sandbox.create(backend=backend) as sandbox:
            zygote, first = backend.zygote().pid, {init_pid(sandbox)}
            assert until(lambda: first != set(children_of(zygote)))
            time.sleep(delay_s)  # not awaited: whatever it does then is what is tested
            family = pin(descendants_of(zygote))
            os.kill(zygote, signal.SIGKILL)
            assert [] == survivors(family, GONE_WITHIN_S)
    finally:
        backend.close()


@pytest.mark.parametrize(("says", "status"), [(b"", 0), (b"?", 1)], ids=["closes", "asks"])
def test_when_its_owner_is_gone_it_ends_without_waking(says: bytes, status: int) -> None:
    """Here it knows nothing: an interpreter that wakes to that fails."""
    program = subprocess.run(
        [sys.executable, "-c", _HIBERNATED, SOURCE, says.decode()],
        check=False,
        capture_output=True,
        timeout=60,
    )
    assert status == program.returncode, program.stderr


@pytest.mark.full
def test_many_asleep_are_gone_with_their_owner() -> None:
    with Caller(_MANY) as caller:
        pids = caller.hear()
        held = pin(pids)
        assert until(lambda: all(is_hibernated(pid) for pid in pids))
        caller.kill()
        assert [] == survivors(held, GONE_WITHIN_S)


_REACH = """
for who in self 1; do
    said=$who
    cat /proc/$who/maps >/dev/null 2>&1 && said="$said maps"
    readlink /proc/$who/fd/0 >/dev/null 2>&1 && said="$said fd/0"
    readlink /proc/$who/exe >/dev/null 2>&1 && said="$said exe"
    ls /proc/$who/root/ >/dev/null 2>&1 && said="$said root"
    echo $said
done
"""
_MANY = """
sandboxes = [Sandbox.create() for _ in range(40)]
say([sandbox._inner.pid for sandbox in sandboxes])
listen()
"""
_HIBERNATED = """
import os, socket, sys
source, says = sys.argv[1:]
sys.path.insert(0, source)
sys.argv[1:] = [source]
from ringfence.launcher.machine_code import hibernation, hibernation_image
image = hibernation_image.HibernationImage()
hibernation_image.fill(image.fd)
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
pid = os.fork()
if pid == 0:
    moved = [os.dup2(fd, 20 + fd) for fd in (theirs.fileno(), image.fd)]
    ours.close()
    os.dup2(moved[0], hibernation.CONTROL)
    os.dup2(os.eventfd(0), hibernation.SIGNAL)
    os.dup2(moved[1], hibernation.PROGRAM)
    os.dup2(os.eventfd(0), hibernation.LISTENER)
    os.closerange(hibernation.LISTENER + 1, 64)
    os.execve(hibernation.PROGRAM, [hibernation.NAME], {})
theirs.close()
if says:
    ours.send(says.encode())
else:
    ours.close()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
