"""What the host has a fixed number of: one sandbox takes a small share, and none of the host's own."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys

import pytest

from ringfence.model.limits import Limits
from tests.features import require
from tests.native.conftest import MakeSandbox, am_root
from tests.native.outside import until

_SANDBOXES = 5  # of 32 instances each: more than root's 128, were they counted for root
_MOST = 512
# Takes inotify instances until there are none, says how many, and holds them until its input ends.
_HOLD = f"""
import ctypes, sys
libc, count = ctypes.CDLL(None), 0
while count < {_MOST} and libc.inotify_init1(0) >= 0:
    count += 1
print(count, flush=True)
sys.stdin.read()
"""
_IN_A_NAMESPACE = "import ctypes; ctypes.CDLL(None).unshare(0x10000000)\n" + _HOLD
# Locks bytes of files of its own until there are so many, then holds them for some looks of PID 1's.
_LOCKS = """
import fcntl, os, struct, sys, time
files = []
for number in range(int(sys.argv[1])):
    if number % 1000 == 0:
        files.append(os.open(f"/tmp/locked.{number}", os.O_RDWR | os.O_CREAT))
    fcntl.fcntl(files[-1], fcntl.F_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, number % 1000 * 2, 1, 0))
print("all", flush=True)
time.sleep(2)
"""
_TERMINALS = """
import os
count = 0
try:
    while count < 512:
        os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY)
        count += 1
except OSError as exc:
    print(count, exc.errno)
"""


def instances_left() -> int:
    """How many inotify instances this user can still make."""
    libc, held = ctypes.CDLL(None, use_errno=True), list[int]()
    while len(held) < _MOST and (fd := libc.inotify_init1(0)) >= 0:
        held.append(fd)
    for fd in held:
        os.close(fd)
    return len(held)


@pytest.mark.skipif(not am_root(), reason="an ordinary user has no other ids to count for")
def test_watches_count_for_an_id_of_the_sandbox(make: MakeSandbox) -> None:
    before = instances_left()
    runs = [make().start(["python3", "-c", _HOLD], stream_stdin=True) for _ in range(_SANDBOXES)]
    taken = [int(next(iter(run.stdout))) for run in runs]

    assert [32] * _SANDBOXES == taken
    assert before == instances_left()


@pytest.mark.skipif(not am_root(), reason="it is root's count that is looked at")
def test_a_namespace_of_roots_own_takes_from_root() -> None:
    """The control: so was it with namespaces that root owns."""
    before = instances_left()
    with subprocess.Popen(
        [sys.executable, "-c", _IN_A_NAMESPACE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        taken = int(process.stdout.readline())
        left = instances_left()
        process.communicate(b"")

    assert taken >= before  # all that root had
    assert left == before - taken == 0


@pytest.mark.skipif(am_root(), reason="root has ids to count for")
def test_an_ordinary_users_sandbox_takes_a_small_share(make: MakeSandbox) -> None:
    result = make().exec(["python3", "-c", _HOLD])

    assert 8 == int(result.stdout_text), result.stderr_text


@pytest.mark.parametrize(("pids", "expected"), [(None, 24), (1024, 64)])
def test_terminals_are_few_and_follow_the_processes(
    make: MakeSandbox, pids: int | None, expected: int
) -> None:
    result = make(limits=Limits(pids=pids)).exec(["python3", "-c", _TERMINALS])

    assert f"{expected} {errno.ENOSPC}" == result.stdout_text.strip(), result.stderr_text


@pytest.fixture(params=["native", "bubblewrap"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "bubblewrap":
        require("bwrap")
    return str(request.param)


@pytest.mark.full
def test_who_locks_without_end_runs_out_of_memory(make: MakeSandbox, backend: str) -> None:
    sandbox = make(backend=backend)

    result = sandbox.exec(["python3", "-c", _LOCKS, "1500000"], timeout_s=60)

    assert result.oom_killed, (result.stdout_text, result.stderr_text)
    assert not result.stdout
    assert sandbox.exec(["true"]).ok


@pytest.mark.full
def test_who_left_it_in_the_background_ends_too(make: MakeSandbox) -> None:
    sandbox = make()
    behind = 'exec >/dev/null 2>&1 </dev/null; python3 -c "$1" 1500000 & echo $! > /tmp/pid'

    assert sandbox.exec(["sh", "-c", behind, "sh", _LOCKS]).ok

    look = (
        'kill -0 "$(cat /tmp/pid)" 2>/dev/null && ! grep -q "State:.Z" /proc/$(cat /tmp/pid)/status'
    )
    assert until(lambda: not sandbox.exec(["sh", "-c", look]).ok)


@pytest.mark.full
def test_some_thousand_locks_are_nobodys_business(make: MakeSandbox, backend: str) -> None:
    """The control: as a database has them, and more than enough for kernel memory to grow."""
    result = make(backend=backend).exec(["python3", "-c", _LOCKS, "45000"], timeout_s=60)

    assert result.ok
    assert b"all\n" == result.stdout


# Opens them until there are no more, in two processes, closes one and opens another.
_NETLINK = """
import os, socket
def more(held):
    try:
        while len(held) < 1000:
            held.append(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0))
    except OSError as exc:
        return len(held), exc.errno
held = []
print(*more(held), flush=True)
if os.fork() == 0:
    print(*more([]), flush=True)
    os._exit(0)
os.wait()
held.pop().close()
print(*more([]))
del held
print(len(socket.if_nameindex()))
"""


def test_netlink_sockets_are_few_in_all_processes_together(make: MakeSandbox, backend: str) -> None:
    result = make(backend=backend).exec(["python3", "-c", _NETLINK])

    full = str(errno.ENOBUFS)
    assert ["64", full, "0", full, "1", full, "1"] == result.stdout_text.split(), result.stderr_text


# Many ask at once, beside others that keep them from running; then somebody looks.
_STARVED = """
import os, signal, socket, time
def count():
    lines = open("/proc/net/protocols").readlines()
    return next(int(line.split()[2]) for line in lines if line.startswith("NETLINK "))
def surely():
    # The kernel sums counts of its processors one after the other: a socket that moves counts twice.
    return min(count(), count(), count())
def start(work):
    pid = os.fork()
    if pid == 0:
        try: work()
        finally: os._exit(0)
    return pid
def spin():
    end = time.monotonic() + 0.5
    while time.monotonic() < end: pass
def ask():
    os.nice(5)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0):
        signal.pause()
pids = [start(spin) for _ in range(4)] + [start(ask) for _ in range(90)]
most, end = 0, time.monotonic() + 60
while len(pids) > 64 and time.monotonic() < end:
    most = max(most, surely())
    pids = [pid for pid in pids if os.waitpid(pid, os.WNOHANG) == (0, 0)]
    time.sleep(0.01)
print(max(most, surely()), flush=True)
"""


def test_who_was_let_go_on_counts_before_it_runs(make: MakeSandbox) -> None:
    result = make().exec(["python3", "-c", _STARVED], timeout_s=90)

    # One that has run and was not switched since counts twice for a moment.
    assert 32 <= int(result.stdout_text) <= 64, result.stderr_text[-300:]


# Makes a sandbox under a filter that has a listener already, as some container engines have.
_UNDER_A_LISTENER = """
import struct, sys
from ringfence import Sandbox
from ringfence.linux import privileges, seccomp
if sys.argv[1] == "listener":
    privileges.set_no_new_privs()
    seccomp.install_listener(struct.pack("=HBBI", 0x06, 0, 0, seccomp.RET_ALLOW))
with Sandbox.create() as sandbox:
    found = sandbox.exec(["python3", "-c", "import socket; socket.socket(16, 3, 0)"])
    print(found.stderr_text.strip().splitlines()[-1:], sandbox.exec(["true"]).ok)
"""


@pytest.mark.parametrize(("above", "expected"), [("listener", "[Errno 97]"), ("none", "[] True")])
def test_without_a_listener_there_are_none(above: str, expected: str) -> None:
    """Only one filter of a process may have a listener: seccomp(2), EBUSY."""
    done = subprocess.run(
        [sys.executable, "-c", _UNDER_A_LISTENER, above], capture_output=True, text=True, check=True
    )

    assert expected in done.stdout
    assert done.stdout.endswith("True\n")


# Descriptors on their way in Unix sockets that nobody reads: as many as the program may have.
_IN_FLIGHT = """
import socket, sys
kept = []
try:
    while True:
        kept.append(socket.socketpair())
        kept[-1][0].setblocking(False)
        try:
            while True: socket.send_fds(kept[-1][0], [b"x"], [0] * 250)
        except BlockingIOError: pass
except OSError as exc:
    print("refused", exc.errno, flush=True)
sys.stdin.read()
"""
_BESIDE = f"""
import resource, sys
from ringfence import Limits, Sandbox
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
with Sandbox.create(limits=Limits(open_files=1024)) as sender, Sandbox.create() as other:
    process = sender.start(["python3", "-c", {_IN_FLIGHT!r}], stream_stdin=True)
    assert b"refused 109" in next(iter(process.stdout))
    assert 0 == other.exec(["true"]).exit_code
    other.files.write("kept", b"1")
    process.kill()
    assert 9 == process.wait(20).signal
    assert 256 == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    print("held")
"""


def test_descriptors_in_flight_keep_no_request_from_another_sandbox() -> None:
    """Linux counts them for the user, and refuses more to whoever has a lower soft limit: our caller."""
    answer = subprocess.run(
        [sys.executable, "-c", _BESIDE], capture_output=True, text=True, timeout=120, check=False
    )
    assert answer.stdout == "held\n", answer.stderr


@pytest.mark.parametrize("backend", ["native", "bubblewrap", "landlock"])
def test_programs_are_killed_before_their_agent(make: MakeSandbox, backend: str) -> None:
    """At the memory limit the kernel looks at resident memory: files of memfd_create(2) are nobody's."""
    if backend == "bubblewrap":
        require("bwrap")
    sandbox = make(backend=backend, allow_degraded=["*"])
    sandbox.start(["sleep", "1000"])

    assert 500 <= int(sandbox.exec(["cat", "/proc/self/oom_score_adj"]).stdout)
