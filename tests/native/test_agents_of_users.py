"""Agents of other users than the sandbox's own: no program reaches them, and they watch what they started."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from ringfence import Limits, Sandbox
from ringfence.backends.optional import Clearable
from ringfence.errors import ExecError
from ringfence.launcher.wire import AGENT_UID
from tests.features import require
from tests.native.conftest import MakeSandbox
from tests.native.outside import until

pytestmark = [pytest.mark.full, pytest.mark.root]

USERS = ["root", "nobody", "1500"]
# Prints each call that the kernel did not refuse: on every agent, or on the process named as argument 1.
ATTACK = """
import ctypes, errno, os, signal, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
def word(name, pid):
    text = open(f"/proc/{pid}/status").read()
    return text.partition("\\n" + name + ":")[2].split()[0]
found = [int(n) for n in os.listdir("/proc") if n.isdigit()]
agents = [int(a) for a in sys.argv[1:]] or [p for p in found if word("Uid", p) == "AGENT"]
assert agents
done = []
def attempt(name, call):
    try:
        call()
    except OSError as exc:
        assert exc.errno in (errno.EPERM, errno.EACCES, errno.ENOENT, errno.ESRCH), (name, exc)
    else:
        done.append(name)
def raw(number, *args):
    if libc.syscall(number, *args) < 0:
        raise OSError(ctypes.get_errno(), "")
for pid in agents:
    attempt("kill", lambda: os.kill(pid, signal.SIGCHLD))
    attempt("killpg", lambda: os.killpg(pid, signal.SIGCHLD))
    attempt("tgkill", lambda: raw(234, pid, pid, signal.SIGCHLD))
    attempt("pidfd", lambda: signal.pidfd_send_signal(os.pidfd_open(pid), signal.SIGCHLD))
    attempt("affinity", lambda: os.sched_setaffinity(pid, {0}))
    attempt("scheduler", lambda: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)))
    attempt("nice", lambda: os.setpriority(os.PRIO_PROCESS, pid, 19))
    attempt("nice of the group", lambda: os.setpriority(os.PRIO_PGRP, pid, 19))
    attempt("nice of the user", lambda: os.setpriority(os.PRIO_USER, os.getuid(), 19))
    attempt("ioprio", lambda: raw(251, 1, pid, 3 << 13))
    attempt("limits", lambda: raw(302, pid, 7, (ctypes.c_ulong * 2)(9, 9), None))
    for name in ("mem", "environ", "maps", "fd/3"):
        attempt(name, lambda: os.close(os.open(f"/proc/{pid}/{name}", os.O_RDONLY)))
print(*done)
""".replace("AGENT", str(AGENT_UID))


def _warm(sandbox: Sandbox) -> None:
    for user in USERS:
        assert sandbox.exec(["true"], user=user).ok


def _names(sandbox: Sandbox) -> str:
    """The command lines of all programs, as the host's root sees them."""
    listed = "for each in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $each; echo; done"
    return sandbox.exec(["sh", "-c", listed]).stdout_text


@pytest.mark.parametrize("profile", ["os_hardened", "own_root"])
@pytest.mark.parametrize("user", USERS)
def test_a_program_that_signals_all_ends_no_sandbox(
    make: MakeSandbox, profile: str, user: str
) -> None:
    sandbox = make(profile=profile)
    watched = sandbox.start(["sleep", "2000"], user=user)
    assert until(lambda: "sleep 2000" in _names(sandbox)), "its program has begun"

    for signal in ("-9", "-STOP"):
        sandbox.exec(["sh", "-c", f"kill {signal} -1; exit 0"], user=user)
        late = sandbox.exec(["sleep", "1000"], user=user, timeout_s=0.2)
        assert late.timed_out, "its agent still watches"
        assert late.duration_s < 5
    assert 9 == watched.wait().signal
    assert sandbox.exec(["true"]).ok


@pytest.mark.parametrize("profile", ["os_hardened", "own_root"])
def test_no_program_reaches_an_agent(make: MakeSandbox, profile: str) -> None:
    sandbox = make(profile=profile)
    _warm(sandbox)

    for user in (None, *USERS):
        tried = sandbox.exec(["python3", "-c", ATTACK], user=user)
        assert "\n" == tried.stdout_text, (user, tried)
        assert tried.ok, tried.stderr_text[-500:]
    other = 'sleep 9 & python3 -c "$0" $!; kill $!'
    control = sandbox.exec(["sh", "-c", other, ATTACK], user="nobody").stdout_text
    assert {"kill", "tgkill", "pidfd", "affinity", "nice", "mem"} <= set(control.split())


@pytest.mark.parametrize("user", ["root", None])
def test_root_cannot_become_an_agent(make: MakeSandbox, user: str | None) -> None:
    sandbox = make(profile="own_root", user=None if user else "root")
    calls: tuple[str, ...] = ("setuid({})", "setreuid({}, -1)", "setreuid(-1, {})")
    calls += ("setresuid({}, -1, -1)", "setresuid(-1, {}, -1)", "setresuid(-1, -1, {})")
    for call in calls:
        for uid, is_ok in ((AGENT_UID, False), (1500, True)):
            code = f"import os; os.{call.format(uid)}"
            assert is_ok == sandbox.exec(["python3", "-c", code], user=user).ok, call


@pytest.mark.parametrize("user", ["root", None])
def test_what_became_another_user_ends_in_time(make: MakeSandbox, user: str | None) -> None:
    sandbox = make(profile="own_root", user=None if user else "root")
    become = ["setpriv", "--reuid=1500", "--clear-groups", "sh", "-c"]

    late = sandbox.exec([*become, "sleep 1000 & sleep 1000"], user=user, timeout_s=0.3)

    assert late.timed_out
    assert late.duration_s < 5
    assert "sleep" not in _names(sandbox)
    begun = sandbox.start([*become, "sleep 1000"], user=user)
    begun.kill()
    assert 9 == begun.wait().signal
    rights = sandbox.exec(["grep", "-h", "^CapPrm", "/proc/self/status"], user=user).stdout_text
    assert 0xCB == int(rights.split()[1], 16), "no program has its agent's rights"


def test_processes_beyond_the_limit_end_no_sandbox(make: MakeSandbox) -> None:
    sandbox = make(profile="own_root", limits=Limits(pids=30))
    bomb = (
        "b() { b | b & }; b & exec sleep 1000"  # dash ends where it cannot fork: it forks once here
    )

    for user in USERS:
        assert sandbox.exec(["sh", "-c", bomb], user=user, timeout_s=0.5).timed_out
        assert sandbox.exec(["true"], user=user).ok


@pytest.mark.full
def test_memory_beyond_the_limit_ends_no_sandbox(make: MakeSandbox) -> None:
    """Many small processes: the largest is the agent."""
    require("cgroup")
    sandbox = make(profile="own_root", limits=Limits(memory_bytes=64 << 20, pids=200))
    fill = "i=0; while [ $i -lt 90 ]; do head -c 1m /dev/zero | tail >/dev/null & i=$((i+1)); done"

    for user in USERS:
        sandbox.exec(["sh", "-c", f"{fill}; sleep 1"], user=user, timeout_s=5)
        assert sandbox.exec(["true"], user=user).ok


def test_all_processes_are_ended(make: MakeSandbox) -> None:
    sandbox = make(profile="own_root", limits=Limits(pids=30))
    assert isinstance(sandbox._inner, Clearable)
    become = "setsid setpriv --reuid=1501 --clear-groups"
    for user, how in ((None, "setsid"), ("root", "setsid"), ("nobody", "setsid"), ("root", become)):
        assert sandbox.exec(["sh", "-c", f"{how} sleep 1000 >/dev/null 2>&1 &"], user=user).ok
    running = [sandbox.start(["sleep", "1000"], user=user) for user in (None, *USERS)]
    running.append(sandbox.start(["sh", "-c", "while :; do sleep 1000 & done"], user="1500"))
    running += [sandbox.start(["sleep", "1000"]) for _ in range(30)]
    with pytest.raises(ExecError, match="processes limit"):
        sandbox.exec(["true"])

    sandbox._inner.end_processes()

    assert "sleep" not in _names(sandbox)
    for process in running:
        with suppress(ExecError):  # some were too many
            process.wait()
    assert sandbox.exec(["true"], user="root").ok


def test_an_agent_connects_for_its_programs(make: MakeSandbox, private_dir: Path) -> None:
    """Where a directory of the host is shown, the agent makes every connection: with other real ids."""
    require("landlock")
    sandbox = make(mounts=[f"{private_dir}:/work:ro"])
    code = (
        "import os, socket; server = socket.socket(socket.AF_UNIX); name = f'/tmp/{os.getuid()}'; "
        "server.bind(name); server.listen(); client = socket.socket(socket.AF_UNIX); "
        "client.connect(name); server.accept()[0].send(b'here'); print(client.recv(9).decode())"
    )
    if not sandbox._inner.lockdown["connects"]:  # type: ignore[attr-defined]
        pytest.skip("needs what PID 1 connects by")

    for user in (None, *USERS):
        assert "here\n" == sandbox.exec(["python3", "-c", code], user=user).stdout_text


_JOINS = """
import os, signal, time
os.setpgid(0, os.getppid() if os.getuid() == 65534 else 1)
print(os.getpgrp() == os.getppid(), flush=True)
signal.pause()
"""


@pytest.mark.parametrize("user", ["nobody", None])
def test_a_program_in_the_group_of_its_agent_has_its_signals_alone(
    make: MakeSandbox, user: str | None
) -> None:
    sandbox = make()
    other = sandbox.start(["sleep", "1000"], user=user, session_leader=False)
    joined = sandbox.start(["python3", "-c", _JOINS], user=user, session_leader=False)
    assert b"True\n" == next(iter(joined.stdout)), "it is in the group"

    joined.signal_group(15)

    assert 15 == joined.wait().signal
    assert other.running
    assert sandbox.exec(["true"], user=user).ok, "its agent lives"


def test_programs_of_each_user_have_the_limits_of_the_sandboxs_own(make: MakeSandbox) -> None:
    """setrlimit(2) lowers them in each agent alone: PID 1 has those of the host."""
    sandbox = make(limits=Limits(open_files=100))

    def limits(user: str | None) -> list[str]:
        ran = sandbox.exec(["cat", "/proc/self/limits"], user=user)
        # The limit of real-time scheduling carries the exec's number.
        return [line for line in ran.stdout_text.splitlines() if "realtime timeout" not in line]

    own = limits(None)
    assert any(line.split()[:5] == ["Max", "open", "files", "100", "100"] for line in own), own
    for user in USERS:
        assert own == limits(user), user
