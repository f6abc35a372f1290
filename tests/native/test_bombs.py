"""What eats a machine ends inside its sandbox: with a true reason, while host and neighbours live.

Each bomb goes off in a calling process of its own, whose memory is measured, and which asks a
second sandbox for an answer again and again meanwhile. Every bomb is bounded: were its limit not to
hold, the machine would survive it.
"""

from __future__ import annotations

import errno
import json
import re
from typing import Any

import pytest

from ringfence import Sandbox
from ringfence.errors import ExecError, ResourceExhausted
from tests.native.callers import Caller
from tests.native.conftest import MakeSandbox, has_cgroups
from tests.native.outside import new_marker, pids_with, until

MIB = 1 << 20
MOST_GROWTH_KIB = 32 << 10

_CALLER = """
def kib(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field + ":"))

asked = json.loads(listen())
with Sandbox.create() as neighbour, Sandbox.create(limits=asked["limits"]) as sandbox:
    for each in (neighbour, sandbox):
        assert each.exec(["true"]).ok and each.start(["true"]).wait(20).ok
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts again from here: proc(5)
    before = kib("VmRSS")
    bomb = sandbox.start(asked["argv"], **asked["request"])
    answers = 0
    while bomb.running:
        assert neighbour.exec(["true"], timeout_s=20).ok
        answers += 1
    result = bomb.wait(20)
    grown = kib("VmHWM") - before
    try:
        after = sandbox.shell("cat /tmp/hops 2>/dev/null | wc -c").stdout_text
    except RingfenceError as exc:
        after = repr(exc)
    said = result.to_json()
    said["stdout_bytes"], said["stdout"] = len(result.stdout), result.stdout_text[-2000:]
    said["stderr_bytes"], said["stderr"] = len(result.stderr), result.stderr_text[-2000:]
    say({**said, "grown_kib": grown, "answers": answers, "after": after})
"""


class Outcome:
    """How a bomb ended, and what it did to others."""

    def __init__(self, said: dict[str, Any]) -> None:
        self.said = said
        self.stdout: str = said["stdout"]
        self.stderr: str = said["stderr"]
        self.exit_code: int | None = said["exit_code"]
        self.killed_by: str | None = said["killed_by"]
        self.timed_out: bool = said["timed_out"]
        self.oom_killed: bool = said["oom_killed"]
        self.after: str = said["after"].strip()

    def harmed_nobody(self) -> bool:
        assert self.said["grown_kib"] < MOST_GROWTH_KIB, self.said
        assert self.said["answers"] > 0, self.said
        return True


def set_off(*argv: str, limits: dict[str, Any], **request: Any) -> Outcome:
    with Caller("from ringfence.errors import RingfenceError\n" + _CALLER) as caller:
        caller.tell(json.dumps({"argv": argv, "limits": limits, "request": request}))
        return Outcome(caller.hear(110))


def python(code: str, *args: str) -> tuple[str, ...]:
    return ("python3", "-c", code, *args)


# -- processes ------------------------------------------------------------------------------------

_FORK_FOREVER = """
import os
while True:
    try: os.fork()
    except OSError: pass
"""
_FORK_AND_COUNT = """
import os, signal
count = 0
try:
    while True:
        if not os.fork(): signal.pause()
        count += 1
except OSError as exc:
    print(count, exc.errno, flush=True)
    os.killpg(0, signal.SIGKILL)
"""
_HOP = """
import os, time
if os.fork():
    time.sleep(600)
while True:
    os.setsid()
    file = os.open("/tmp/hops", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, b"h")
    os.close(file)
    if os.fork(): os._exit(0)
"""


@pytest.mark.full
def test_a_fork_bomb_ends_with_its_timeout() -> None:
    marker = new_marker()

    bomb = set_off(*python(_FORK_FOREVER, marker), limits={"pids": 200}, timeout_s=1)

    assert ("timeout", True, False) == (bomb.killed_by, bomb.timed_out, bomb.oom_killed)
    assert bomb.harmed_nobody()
    assert "0" == bomb.after, "the sandbox is not usable any more"
    assert until(lambda: not pids_with(marker))


@pytest.mark.parametrize("most", [16, 64])
def test_the_processes_limit_is_exact(most: int) -> None:
    """The bomb itself counts; PID 1 does not. The control is the other limit."""
    bomb = set_off(*python(_FORK_AND_COUNT), limits={"pids": most}, timeout_s=20)

    assert f"{most - 1} {errno.EAGAIN}\n" == bomb.stdout
    assert bomb.harmed_nobody()


def test_refused_forks_are_counted(make: MakeSandbox) -> None:
    """Without a cgroup nobody counts them: then that is said, not zero."""
    quiet, full = make(limits={"pids": 16}), make(limits={"pids": 16})

    assert quiet.exec(["true"]).ok
    assert not full.exec(["python3", "-c", _FORK_AND_COUNT]).ok

    assert (0 if has_cgroups() else None) == quiet.stats().forks_refused
    full.terminate()
    assert bool(full.stats().forks_refused) == has_cgroups()


@pytest.mark.full
def test_a_process_that_hops_from_pid_to_pid_is_caught() -> None:
    """Each lives for a millisecond, in a session of its own, and its parent is always gone."""
    marker = new_marker()

    for timeout_s in (1, 5, 25):
        bomb = set_off(*python(_HOP, marker), limits={"pids": 64}, timeout_s=timeout_s)
        if int(bomb.after) > 20:
            break

    assert "timeout" == bomb.killed_by
    assert int(bomb.after) > 20, "it did not hop at all"
    assert bomb.harmed_nobody()
    assert until(lambda: not pids_with(marker))


def test_a_sandbox_full_of_processes_says_so(make: MakeSandbox) -> None:
    sandbox = make(limits={"pids": 8})
    crowd = sandbox.start(["sh", "-c", "for n in 1 2 3 4 5 6 7; do sleep 600 & done; echo; wait"])
    crowd.stdout.read(20)

    with pytest.raises(ExecError, match="processes limit") as refusal:
        sandbox.exec(["true"])
    crowd.kill()
    crowd.wait(20)

    assert refusal.value.retryable
    assert sandbox.exec(["true"]).ok


@pytest.mark.full
def test_spinning_processes_leave_the_processor_to_others() -> None:
    script = "for n in 1 2 3 4 5 6 7 8; do while :; do :; done & done; wait"

    bomb = set_off("sh", "-c", script, limits={"cpus": 0.5} if has_cgroups() else {}, timeout_s=1)

    assert "timeout" == bomb.killed_by
    assert bomb.harmed_nobody()


# -- memory ---------------------------------------------------------------------------------------

_FILL = "def fill(n):\n    for start in range(0, len(n), 4096): n[start] = 1\n"
MEMORY_BOMBS = {
    "one process": "kept = []\nwhile len(kept) < 300: kept.append(b'x' * (1 << 20))",
    "a shared mapping": "import mmap\nfill(mmap.mmap(-1, 300 << 20))",
    "many children": """
import os, time
children = []
for n in range(16):
    children.append(os.fork())
    if not children[-1]:
        kept = b"x" * (20 << 20)
        time.sleep(1); os._exit(0)
for child in children: os.waitpid(child, 0)
""",
    "a file": "file = open('/tmp/large', 'wb')\nfor n in range(300): file.write(bytes(1 << 20))",
    "posix shared memory": """
from multiprocessing import shared_memory
block = shared_memory.SharedMemory(create=True, size=95 << 20)
fill(block.buf)
block.unlink()
""",
    "a file in memory that nobody maps": """
import os, time
bomb = os.memfd_create('')
for n in range(300):
    os.write(bomb, bytes(1 << 20))
    time.sleep(0.001)  # without a cgroup the limit is sampled: let it be seen
time.sleep(0.3)
""",
    "system v shared memory": """
import ctypes, time
libc = ctypes.CDLL(None); libc.shmat.restype = ctypes.c_void_p
for n in range(300):
    block = libc.shmget(0, 1 << 20, 0o1600)
    place = libc.shmat(block, None, 0)
    ctypes.memset(place, 1, 1 << 20)
    libc.shmdt(ctypes.c_void_p(place))
    time.sleep(0.001)  # without a cgroup the limit is sampled: let it be seen
""",
}


@pytest.mark.full
@pytest.mark.parametrize("kind", MEMORY_BOMBS)
def test_a_memory_bomb_runs_out_of_memory(kind: str) -> None:
    """Where there is no cgroup one process may meet its own limit first, or that of files."""
    limits = {"memory_bytes": 96 * MIB, "disk_bytes": 96 * MIB}

    bomb = set_off(*python(_FILL + MEMORY_BOMBS[kind]), limits=limits, timeout_s=60)

    assert not bomb.timed_out, bomb.said
    if bomb.oom_killed:
        assert bomb.killed_by in ("oom", None)
    else:
        assert not has_cgroups()
        assert re.search(r"MemoryError|Errno (27|28)", bomb.stderr), bomb.said
    assert bomb.harmed_nobody()


@pytest.mark.full
@pytest.mark.parametrize("kind", MEMORY_BOMBS)
def test_with_enough_memory_they_are_no_bombs(make: MakeSandbox, kind: str) -> None:
    """The control: the same programs, and nothing is said about memory."""
    sandbox = make(limits={"memory_bytes": 1536 * MIB, "disk_bytes": 1024 * MIB})

    result = sandbox.exec(python(_FILL + MEMORY_BOMBS[kind]), timeout_s=60)

    assert (0, False, None) == (result.exit_code, result.oom_killed, result.killed_by), result


@pytest.mark.full
def test_idle_forks_are_not_out_of_memory(make: MakeSandbox) -> None:
    """Sixty processes share nearly all their pages: counted once each they would be too many."""
    code = "import os, time\n[os.fork() or (time.sleep(0.5), os._exit(0)) for n in range(60)]"

    result = make(limits={"memory_bytes": 128 * MIB}).exec(python(code), timeout_s=20)

    assert (0, False) == (result.exit_code, result.oom_killed)


# -- files ----------------------------------------------------------------------------------------


def test_a_full_disk(make: MakeSandbox) -> None:
    """The program is told, so is the caller; space freed is space again."""
    sandbox = make(limits={"disk_bytes": 32 * MIB, "memory_bytes": 512 * MIB})

    filler = sandbox.shell(
        "dd if=/dev/zero of=/tmp/filler bs=1M count=100 2>&1; echo; stat -c%s /tmp/filler"
    )

    assert "No space left on device" in filler.stdout_text
    assert 28 * MIB < int(filler.stdout_text.split()[-1]) <= 32 * MIB
    assert not filler.oom_killed
    with pytest.raises(ResourceExhausted):
        sandbox.files.write("more", bytes(4 * MIB))
    assert sandbox.exec(["true"]).ok
    sandbox.files.remove("/tmp/filler")
    sandbox.files.write("more", bytes(4 * MIB))


@pytest.mark.full
def test_a_disk_filler_harms_nobody() -> None:
    script = "cat /dev/zero > /tmp/filler"

    bomb = set_off("sh", "-c", script, limits={"disk_bytes": 256 * MIB}, timeout_s=20)

    assert "No space left on device" in bomb.stderr
    assert (1, None, False) == (bomb.exit_code, bomb.killed_by, bomb.oom_killed)
    assert bomb.harmed_nobody()


_MAKE_FILES = """
import os
count = 0
try:
    while True:
        os.close(os.open(f"/tmp/{count}", os.O_CREAT | os.O_WRONLY)); count += 1
except OSError as exc:
    print(count, exc.errno)
"""


@pytest.mark.full
def test_an_inode_filler(make: MakeSandbox) -> None:
    sandbox = make(limits={"inodes": 500})

    count, number = sandbox.exec(python(_MAKE_FILES)).stdout_text.split()

    assert errno.ENOSPC == int(number)
    assert 300 < int(count) < 500  # some are the sandbox's own
    with pytest.raises(ResourceExhausted):
        sandbox.files.write("one-more", b"")
    assert sandbox.shell("rm /tmp/1").ok
    sandbox.files.write("one-more", b"")


_OPEN_FILES = """
import os
kept = []
try:
    while True: kept.append(os.open("/dev/null", os.O_RDONLY))
except OSError as exc:
    print(len(kept), exc.errno, flush=True)
"""


def test_an_open_file_hog(make: MakeSandbox) -> None:
    """One descriptor less than the limit for each that every process has: 0, 1 and 2."""
    small, larger = make(limits={"open_files": 100}), make(limits={"open_files": 300})

    assert f"97 {errno.EMFILE}\n" == small.exec(python(_OPEN_FILES)).stdout_text
    assert f"297 {errno.EMFILE}\n" == larger.exec(python(_OPEN_FILES)).stdout_text


_OPEN_TERMINALS = _OPEN_FILES.replace('"/dev/null", os.O_RDONLY', '"/dev/ptmx", os.O_RDWR')


def test_a_terminal_hog_leaves_some_to_others(sandbox: Sandbox, make: MakeSandbox) -> None:
    """The kernel has one number of them for all sandboxes together."""
    hog = sandbox.start(python(_OPEN_TERMINALS + "import signal; signal.pause()"))
    count, number = hog.stdout.read(20).split()

    other = make().start(["tty"], pty=(24, 80))

    assert (24, errno.ENOSPC) == (int(count), int(number))
    assert other.wait(20).ok
    assert other.stdout.read().startswith(b"/dev/pts/")


# -- output ---------------------------------------------------------------------------------------

FLOOD_BYTES = 2 << 30


@pytest.mark.full
def test_an_output_flood_is_counted_exactly() -> None:
    """Head and tail are kept, the rest is dropped and counted; nobody waits for a reader."""
    kept = MIB
    script = f"echo first; head -c {FLOOD_BYTES} /dev/zero; echo last; echo aside >&2"
    limits = {"output_bytes": kept}

    bomb = set_off("sh", "-c", script, limits=limits, timeout_s=60)

    total = len("first\n") + FLOOD_BYTES + len("last\n")
    assert 0 == bomb.exit_code
    assert (kept, total - kept) == (bomb.said["stdout_bytes"], bomb.said["stdout_dropped_bytes"])
    assert (b"aside\n".decode(), 0) == (bomb.stderr, bomb.said["stderr_dropped_bytes"])
    assert bomb.said["truncated"]
    assert bomb.stdout.endswith("\0last\n")
    assert bomb.harmed_nobody()


@pytest.mark.full
def test_an_endless_flood_ends_with_its_timeout() -> None:
    bomb = set_off("sh", "-c", "yes & yes >&2", limits={}, timeout_s=1)

    assert ("timeout", True) == (bomb.killed_by, bomb.said["truncated"])
    # How many more it was says how busy the machine is.
    assert bomb.said["stdout_dropped_bytes"] > 0
    assert bomb.said["stderr_dropped_bytes"] > 0
    assert bomb.harmed_nobody()


@pytest.mark.parametrize("most", [0, 1, 1000])
def test_what_is_kept_and_what_is_dropped_add_up(sandbox: Sandbox, most: int) -> None:
    """In the caller's own thread, where `exec` drives it."""
    result = sandbox.shell("head -c 3000000 /dev/zero | tr '\\0' x", max_output_bytes=most)

    assert (b"x" * most, 3_000_000 - most) == (result.stdout, result.stdout_dropped_bytes)
    assert result.truncated
    assert not sandbox.exec(["echo"], max_output_bytes=1).truncated
