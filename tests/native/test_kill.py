"""Killing: whole trees, whatever they did to get away; and PID 1, which nobody inside can kill.

Whether a tree is gone is asked of the host's /proc: every sleeper of a test sleeps for a number of
seconds that no other process on the machine has on its command line.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from textwrap import dedent
from typing import Any

import pytest

from ringfence import Sandbox
from ringfence.errors import LifecycleError, RingfenceError, SandboxLost
from ringfence.model.state import State
from ringfence.sandbox.process import Process
from tests.native.conftest import MakeSandbox, has_cgroups
from tests.native.outside import (
    PATIENCE_S,
    descendants_of,
    init_pid,
    is_sleep,
    new_length,
    pids_with,
    pin,
    survivors,
    until,
)

TREES = {
    "children": "sleep {0} & sleep {0}",
    "a session of its own": "setsid sleep {0} & sleep {0}",
    "a double fork": "(setsid sh -c 'sleep {0} & exec sleep {0}' &) ; sleep {0}",
    "nohup": "nohup sleep {0} > /dev/null 2>&1 & sleep {0}",
    "deaf to signals": "trap '' TERM HUP INT QUIT; sleep {0} & while :; do sleep {0}; done",
    # Stopped only once it is `sleep`: before, it would count as nothing that can be found.
    "stopped": "sleep {0} & until grep -qa ^sleep /proc/$!/cmdline; do :; done; kill -STOP $!; sleep {0}",
    "a holder of the output": "setsid sh -c 'sleep {0}; echo late' & sleep {0}",
    "a first thread that ended": """
        python3 -c 'if True:
            import ctypes, subprocess, sys, threading
            threading.Thread(target=subprocess.run, args=(["sleep", sys.argv[1]],)).start()
            ctypes.CDLL(None).pthread_exit(None)' {0} & sleep {0}""",
    "a parent that reaps": """
        exec python3 -c 'if True:
            import os, sys
            for n in range(40):
                os.fork() or os.execlp("sleep", "sleep", sys.argv[1])
            while True: os.wait()' {0}""",
}


def plant(sandbox: Sandbox, tree: str, length: str, **options: Any) -> Process:
    """Start a tree; returns when it is there, as the host sees it."""
    script = "echo before; " + dedent(TREES[tree]).strip().format(length)
    process = sandbox.start(["sh", "-c", script], **options)
    until(lambda: len(_sleepers(length)) >= 2 or not process.running)
    assert len(_sleepers(length)) >= 2, "the tree did not grow"
    return process


def _sleepers(length: str) -> list[int]:
    """The processes of a tree that sleep: a Python loses its arguments when its first thread ends."""
    return [pid for pid in pids_with(length) if is_sleep(pid)]


def plant_briefly(sandbox: Sandbox, tree: str, length: str) -> tuple[Process, float]:
    """Start a tree that its timeout ends, in so many seconds: but not before it is there."""
    for timeout_s in (2.0, 10.0, 50.0):
        with suppress(AssertionError):
            return plant(sandbox, tree, length, timeout_s=timeout_s), timeout_s
    raise AssertionError("the tree did not grow")


@pytest.mark.full
@pytest.mark.parametrize("company", ["each in a sandbox", "all in one"])
def test_a_timeout_takes_the_whole_tree(make: MakeSandbox, company: str) -> None:
    """Nothing is left when the result is there, not a moment later; what was written is kept."""
    shared = make()
    lengths = {tree: new_length() for tree in TREES}
    planted = {}
    for tree, length in lengths.items():
        sandbox = shared if "all in one" == company else make()
        planted[tree] = plant_briefly(sandbox, tree, length)

    for tree, (process, timeout_s) in planted.items():
        result = process.wait(PATIENCE_S)

        assert [] == pids_with(lengths[tree]), tree
        assert (True, "timeout") == (result.timed_out, result.killed_by), tree
        assert (signal.SIGKILL, b"before\n") == (result.signal, result.stdout), tree
        assert timeout_s <= result.duration_s, tree


@pytest.fixture(params=[False, True], ids=["alone", "in company"])
def company(request: pytest.FixtureRequest, sandbox: Sandbox) -> Callable[[], bool]:
    """Tells whether another exec of the same sandbox is still there; it must not be harmed."""
    if not request.param:
        return lambda: True
    length = new_length()
    other = sandbox.start(["sleep", length])
    assert until(lambda: 1 == len(pids_with(length)))
    return lambda: 1 == len(pids_with(length)) and other.running


@pytest.mark.full
@pytest.mark.parametrize("tree", TREES)
def test_kill_takes_the_whole_tree(
    sandbox: Sandbox, company: Callable[[], bool], tree: str
) -> None:
    length = new_length()
    process = plant(sandbox, tree, length)

    process.kill()
    result = process.wait(PATIENCE_S)

    assert [] == pids_with(length)
    assert (False, "caller", signal.SIGKILL) == (
        result.timed_out,
        result.killed_by,
        result.signal,
    )
    assert company()


def test_a_timeout_is_told_in_time(sandbox: Sandbox) -> None:
    """Also when a survivor-to-be holds the output open, for longer than a test may take."""
    result = sandbox.shell("echo kept; setsid sleep 600 & sleep 600", timeout_s=1)

    assert (b"kept\n", True) == (result.stdout, result.timed_out)


def test_what_an_exec_leaves_behind_ends_with_the_sandbox(make: MakeSandbox) -> None:
    """A daemon may outlive its exec: nobody asked for its end. Terminate takes it along."""
    sandbox, length = make(), new_length()
    assert sandbox.shell(f"setsid sleep {length} > /dev/null 2>&1 & echo", timeout_s=20).ok
    assert sandbox.exec(["true"]).ok
    assert until(lambda: 1 == len(pids_with(length)))

    sandbox.terminate()

    assert [] == pids_with(length)


# -- PID 1 ----------------------------------------------------------------------------------------

_LOOK_AT_PID_1 = (
    # Its oom_score_adj is raised for the moment of each start: wait until that is over.
    "until grep -qxE -e '0|-1000' /proc/1/oom_score_adj; do :; done;"
    "cut -d' ' -f 18-20,40,41 /proc/1/stat;"
    "grep -v realtime /proc/1/limits;"  # one of these carries the tag of the latest exec
    # It may still be on its way to sleep, having started us.
    "grep -E 'Cpus_allowed|Sig|State|Mems' /proc/1/status | sed 's/R (running)/S (sleeping)/'"
)
ATTACKS = {
    "kill": "for n in $(seq 1 64); do kill -$n 1; done",
    "kill everything": "kill -KILL -1; kill -STOP -1; kill -CONT -1",
    "its process group": "kill -KILL -- -1; kill -KILL 0",
    "pidfd": """
        python3 -c 'import os, signal
        pidfd = os.pidfd_open(1)
        for n in range(1, 65): signal.pidfd_send_signal(pidfd, n)'""",
    "priority": """
        renice -n 19 -p 1; renice -n 19 -u sandbox; renice -n 19 -g 1
        chrt --idle -p 0 1; taskset -p 1 1; ionice -c 3 -p 1""",
    "limits": "prlimit --pid 1 --nofile=4:4; prlimit --pid 1 --nproc=1:1; prlimit --pid 1 --as=1:1",
    "proc": """
        for f in oom_score_adj comm mem autogroup timerslack_ns clear_refs setgroups; do
            echo 1000 > /proc/1/$f
        done; cat /proc/1/environ; ls /proc/1/fd""",
    "trace": "strace -f -p 1 -o /dev/null; gdb -p 1 -batch",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_pid_1_is_immune(sandbox: Sandbox, attack: str) -> None:
    """It goes on as it was; the attackers themselves may well be dead."""
    if 0 == os.geteuid():
        # The zygote raises its priority once the sandbox has its owner, at the same time as this.
        assert until(lambda: os.getpriority(os.PRIO_PROCESS, init_pid(sandbox)) < 0)
    before = sandbox.shell(_LOOK_AT_PID_1).stdout
    script = dedent(ATTACKS[attack]).replace("\n        ", "\n")

    sandbox.shell(script, timeout_s=PATIENCE_S)

    assert before == sandbox.shell(_LOOK_AT_PID_1).stdout
    assert State.RUNNING == sandbox.state
    assert sandbox.exec(["echo", "still here"]).ok


@pytest.mark.parametrize(
    ("attack", "hit"),
    [("kill -KILL $!", 137), ("kill -KILL -1", 137), ("renice -n 19 $! > /dev/null; nice", 0)],
)
def test_what_pid_1_withstands_hits_others(sandbox: Sandbox, attack: str, hit: int) -> None:
    """The control: the same weapons are not blunt."""
    script = f"sh -c 'sleep 600' & {attack}; "
    script += "cut -d' ' -f 19 /proc/$!/stat" if 0 == hit else "wait $!; echo $?"

    assert sandbox.shell(script).stdout_text.endswith(f"{19 if 0 == hit else hit}\n")


_STOP_EVERYTHING = """
import os, signal
me = os.getpid()
print("ready", flush=True)
while True:
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in (1, me):
            try: os.kill(int(name), signal.SIGSTOP)
            except OSError: pass
"""


@pytest.mark.full
def test_a_guest_that_stops_every_newcomer_does_not_stop_pid_1(sandbox: Sandbox) -> None:
    """The parent of a vfork(2) sleeps until its child begins; PID 1 must not be that parent."""
    stopper = sandbox.start(["python3", "-c", _STOP_EVERYTHING])
    stopper.stdout.read(PATIENCE_S)

    results = [sandbox.exec(["sleep", "0.01"], timeout_s=0.2) for _ in range(10)]
    sandbox.files.write("note", "answered")
    assert "answered" == sandbox.files.read_text("note")

    assert any(result.timed_out for result in results), "it hit nobody: this proves nothing"
    stopper.kill()
    assert "caller" == stopper.wait(PATIENCE_S).killed_by
    assert sandbox.exec(["true"]).ok


# -- exit status ----------------------------------------------------------------------------------


def test_a_script_that_kills_its_own_group(sandbox: Sandbox) -> None:
    """A death of its own is told as such: by nobody's hand."""
    length = new_length()

    result = sandbox.shell(f"echo before; sleep {length} & kill -9 0", timeout_s=PATIENCE_S)

    assert (signal.SIGKILL, None, None) == (result.signal, result.exit_code, result.killed_by)
    assert (False, False, b"before\n") == (result.timed_out, result.oom_killed, result.stdout)
    assert until(lambda: [] == pids_with(length))


@pytest.mark.parametrize("signum", [1, 2, 3, 6, 9, 11, 13, 14, 15, 34, 64])
def test_a_signal_is_told_by_its_number(sandbox: Sandbox, signum: int) -> None:
    result = sandbox.exec(["sh", "-c", f"kill -{signum} $$; sleep 600"])

    assert (signum, None) == (result.signal, result.exit_code)


@pytest.mark.full
def test_no_exit_status_is_lost_in_a_crowd(sandbox: Sandbox) -> None:
    """Many at once, while orphans die and a guest sends PID 1 false news of dead children."""
    noise = sandbox.start(["sh", "-c", "while :; do (sh -c 'exit 1' &); kill -CHLD 1; done"])

    def code_of(number: int) -> int | None:
        return sandbox.shell(f"(exit 3 &); exit {number}", timeout_s=PATIENCE_S).exit_code

    with ThreadPoolExecutor(8) as pool:
        assert list(range(256)) == list(pool.map(code_of, range(256)))
    noise.kill()
    assert "caller" == noise.wait(PATIENCE_S).killed_by


@pytest.mark.skipif(not has_cgroups(), reason="no cgroup, no processor limit")
def test_the_processor_limit_is_back_after_a_kill(make: MakeSandbox) -> None:
    """It is lifted while something is being killed: of two, until the second one has ended."""
    sandbox = make(limits={"cpus": 0.5})
    both = [sandbox.start(["sh", "-c", "echo; while :; do :; done"]) for _ in range(2)]
    for each in both:
        each.stdout.read(PATIENCE_S)

    for each in both:
        each.kill()
    for each in both:
        each.wait(PATIENCE_S)
        each._pump.run.kill()  # too late: it must not lift the limit for good

    (limit,) = [each for each in sandbox.protections() if "cpu_limit" == each.name]
    assert limit.why.startswith("0.5 cores"), limit


def test_exec_in_a_dead_directory(sandbox: Sandbox) -> None:
    """A program that removes what it runs from still has an exit status."""
    script = (
        "mkdir d && cp /bin/sleep d/ && cd d && ./sleep 0.05 & sleep 0.02; rm -r d; wait; exit 5"
    )

    assert 5 == sandbox.shell(script).exit_code


# -- terminate ------------------------------------------------------------------------------------


def kill_pid_1(sandbox: Sandbox) -> None:
    os.kill(init_pid(sandbox), signal.SIGKILL)


def be_busy(sandbox: Sandbox) -> None:
    sandbox.start(["sleep", "600"])


WAYS_TO: dict[str, tuple[Callable[[Sandbox], object], ...]] = {
    "provisioned": (),
    "idle": (lambda sandbox: sandbox.exec(["true"]),),
    "busy": (be_busy,),
    "suspended": (Sandbox.suspend,),
    "suspended and busy": (be_busy, Sandbox.suspend),
    "resumed": (be_busy, Sandbox.suspend, Sandbox.resume),
    "dead": (kill_pid_1,),
    "dead and busy": (be_busy, kill_pid_1),
    "suspended and dead": (be_busy, Sandbox.suspend, kill_pid_1),
    "terminated": (Sandbox.terminate,),
}


@pytest.mark.parametrize("state", WAYS_TO)
def test_terminate_in_every_state(make: MakeSandbox, state: str) -> None:
    sandbox = make()
    pid = init_pid(sandbox)
    for step in WAYS_TO[state]:
        step(sandbox)
    inside = pin([pid, *descendants_of(pid)])

    sandbox.terminate()
    sandbox.terminate()

    assert [] == survivors(inside, 0.0)
    assert State.TERMINATED == sandbox.state
    with pytest.raises(LifecycleError):
        sandbox.exec(["true"])


def test_what_runs_is_told_of_the_end(sandbox: Sandbox) -> None:
    """Never a false success; and what had ended by itself before says so."""
    process = sandbox.start(["sh", "-c", "echo ready; sleep 600"])
    process.stdout.read(PATIENCE_S)
    over = sandbox.start(["sh", "-c", "exit 3"])
    assert 3 == over.wait(PATIENCE_S).exit_code

    sandbox.terminate()

    ended = process.wait(PATIENCE_S)
    assert (None, 9, "terminate", b"ready\n") == (
        ended.exit_code,
        ended.signal,
        ended.killed_by,
        ended.stdout,
    )
    assert 3 == over.wait(PATIENCE_S).exit_code


def test_one_that_ended_by_itself_says_so(make: MakeSandbox) -> None:
    """And not only that it is terminated, as if somebody had asked for it."""
    sandbox, asked = make(), make()
    asked.terminate()
    inner: Any = sandbox._inner
    pidfd = inner.borrow_pidfd()
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)
    assert until(lambda: sandbox.state is State.TERMINATED)

    with pytest.raises(LifecycleError, match="is terminated, it ended unexpectedly"):
        sandbox.exec(["true"])
    with pytest.raises(LifecycleError, match="is terminated") as refused:
        asked.exec(["true"])
    assert "unexpectedly" not in str(refused.value), "the control"


def test_kill_in_a_suspended_sandbox(sandbox: Sandbox) -> None:
    length = new_length()
    process = plant(sandbox, "a session of its own", length)
    sandbox.suspend()

    process.kill()

    assert "caller" == process.wait(PATIENCE_S).killed_by
    assert [] == pids_with(length)
    assert State.SUSPENDED == sandbox.state
    sandbox.resume()
    assert sandbox.exec(["true"]).ok


def test_terminate_from_many_threads(make: MakeSandbox) -> None:
    """Whoever returns finds it gone."""
    sandbox, length = make(), new_length()
    plant(sandbox, "a double fork", length)
    together = threading.Barrier(8)

    def end(_: int) -> list[int]:
        together.wait()
        sandbox.terminate()
        return pids_with(length)

    with ThreadPoolExecutor(8) as pool:
        assert [[]] * 8 == list(pool.map(end, range(8)))


def test_terminate_while_fifty_execs_are_starting(make: MakeSandbox) -> None:
    """Each of them ends with a result or an error that says so; none hangs."""
    sandbox, length = make(), new_length()
    together = threading.Barrier(51)

    def run(number: int) -> object:
        together.wait()
        try:
            return sandbox.shell(f"[ {number} -lt 10 ] || sleep {length}", timeout_s=60).exit_code
        except RingfenceError as exc:
            return type(exc)

    with ThreadPoolExecutor(50) as pool:
        outcomes = [pool.submit(run, number) for number in range(50)]
        together.wait()
        until(lambda: len(pids_with(length)) > 5)
        sandbox.terminate()
        assert [] == pids_with(length)
        found = {outcome.result(PATIENCE_S) for outcome in outcomes}

    # None: killed by a signal. SandboxLost: it was just being asked for.
    assert found <= {0, None, SandboxLost, LifecycleError}
    assert found & {None, SandboxLost, LifecycleError}


@pytest.mark.full
def test_terminate_under_a_fork_bomb(make: MakeSandbox) -> None:
    sandbox = make(limits={"pids": 200})
    script = "import os, sys\nwhile True:\n  try: os.fork()\n  except OSError: print(flush=True)"
    bomb = sandbox.start(["python3", "-c", script])
    bomb.stdout.read(PATIENCE_S)  # the first fork that was refused: it is full
    pid = init_pid(sandbox)
    inside = pin([pid, *descendants_of(pid)])
    assert len(inside) > 100

    sandbox.terminate()

    assert [] == survivors(inside, 0.0)
