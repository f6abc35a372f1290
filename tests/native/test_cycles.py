"""Again and again: nothing grows, in the caller, its zygote, the kernel or PID 1. And at once."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ringfence import AsyncSandbox, Sandbox
from tests.native.callers import Caller
from tests.native.conftest import MakeSandbox, am_root
from tests.native.outside import (
    init_pid,
    new_length,
    open_fds,
    pids_with,
    status_kib,
    until,
)

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]
PATIENCE_S = 500  # a thousand of anything take minutes where twenty others want the processor
_COUNTING = """
import gc, time
from concurrent.futures import ThreadPoolExecutor
from ringfence.errors import RingfenceError
from ringfence.sandbox.reactor import reactor

def kib(pid, field):
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field + ":"))

def lines(path):
    with open(path) as file:
        return file.readlines()

def children(pid):
    tasks = os.listdir(f"/proc/{pid}/task")
    return [child for task in tasks for line in lines(f"/proc/{pid}/task/{task}/children")
            for child in line.split()]

def cgroups():
    ours = f"ringfence.{os.getpid()}."
    return sorted(name for _root, names, _files in os.walk("/sys/fs/cgroup")
                  for name in names if name.startswith(ours))

def runtime_files():
    ours = f".{os.getpid()}."
    return [name for place in ("/run/ringfence", f"/tmp/ringfence-{os.geteuid()}")
            if os.path.isdir(place) for name in os.listdir(place) if ours in name]

def zygote():
    from ringfence.backends.registry import backend_named
    return backend_named("native").zygote().pid

def mounts(pid):
    # Only root can make any in the host's own namespace, and root's tests run beside an ordinary user's.
    if os.geteuid() and os.path.samefile(f"/proc/{pid}/ns/mnt", "/proc/self/ns/mnt"):
        return 0
    return len(lines(f"/proc/{pid}/mountinfo"))

def census():
    gc.collect()
    pid = zygote()
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "mounts": mounts("self"),
        "children": len(children("self")),
        "zygote's fds": len(os.listdir(f"/proc/{pid}/fd")),
        "zygote's children": len(children(pid)),
        "zygote's mounts": mounts(pid),
        "cgroups": cgroups(),
        "runtime files": runtime_files(),
    }

def rss():
    gc.collect()
    return {"caller": kib("self", "VmRSS"), "zygote": kib(zygote(), "VmRSS")}

def many(pool, times, cycle):
    # In equal parts: a thousand waiting futures weigh more than five hundred.
    for first in range(0, times, 100):
        for _ in pool.map(cycle, range(first, min(first + 100, times))):
            pass

def calm(is_calm):
    from ringfence.backends.registry import backend_named
    backend_named("native").prebuilder.drop()  # kept for a minute, and no growth
    # The zygote clears up a moment later than it tells us of an end.
    deadline = time.monotonic() + 60
    while not is_calm(found := census()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found

def busy(found):
    # An exec that ended with its sandbox is cleared up by the reactor, when its turn comes.
    return found["zygote's children"] or found["cgroups"] or reactor()._futures

def later():
    time.sleep(0.1)  # the zygote closes what it was given, and no cgroup of rootless ones tells when
    return census()

def run(warm, times, cycle, threads):
    pool = ThreadPoolExecutor(threads)
    many(pool, warm, cycle)
    before = calm(lambda found: not busy(found) and found == later())
    weight = rss()
    many(pool, times, cycle)
    say([before, calm(lambda found: found == before), weight, rss()])

"""
_PLAIN = """
def cycle(number):
    with Sandbox.create() as sandbox:
        assert sandbox.exec(["true"]).ok
run(500, 1000, cycle, 20)
"""
_EVERYTHING = """
source = sys.argv[1]

def cycle(number):
    place = os.path.join(source, str(number % 4))
    os.makedirs(place, exist_ok=True)
    with Sandbox.create(mounts=[place + ":/work:rw"]) as sandbox:
        assert sandbox.shell("yes | head -c 100000", max_output_bytes=1000).truncated
        assert sandbox.shell("sleep 60 & sleep 60", timeout_s=0.01).timed_out
        background = sandbox.start(["cat"], stream_stdin=True)
        background.stdin.write(b"hello")
        assert b"hello" == background.stdout.read(20)
        left = sandbox.start(["sleep", "60"], pty=(24, 80))
        sandbox.files.write("note", b"x" * 1000)
        sandbox.files.upload(source + "/tree", "tree")
        assert 1 == len(sandbox.files.list("tree"))
        sandbox.mount(source + "/tree:/mnt/live:ro")
        sandbox.suspend()
        sandbox.resume()
        background.kill()
        sandbox.stats(), sandbox.protections()
        try:
            sandbox.files.read("missing")
        except RingfenceError:
            pass
run(20, 60, cycle, 4)
"""
_REFUSED = """
source = sys.argv[1]
options = [
    {"mounts": [source + ":/work:rw", source + "/missing:/more:ro"]},
    {"mounts": [source + ":/work:rw"], "protect": ["link/x"]},
    {"mounts": [source + ":/work:rw", source + "/note:/work/tree:ro"]},
    {"profile": "none"},
    {"user": "nobody-knows"},
    {"limits": {"open_files": 8}},
    {"tier": "strong", "backend": "native"},
    {"network": ["not a host"]},
]

def cycle(number):
    try:
        Sandbox.create(**options[number % len(options)]).terminate()
    except RingfenceError:
        return
    raise AssertionError(options[number % len(options)])
run(16, 80, cycle, 4)
"""


def check(said: list[Any]) -> None:
    before, after, weight_before, weight_after = said
    assert before == after
    for who, kib in weight_before.items():
        assert weight_after[who] < kib * 1.05 + 512, (who, weight_before, weight_after)


def test_a_thousand_sandboxes_leave_nothing() -> None:
    """Created, used once and terminated from twenty threads."""
    with Caller(_COUNTING + _PLAIN) as caller:
        check(caller.hear(PATIENCE_S))


def test_sandboxes_that_were_used_for_everything_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "file").write_text("content")

    with Caller(_COUNTING + _EVERYTHING, tmp_path) as caller:
        check(caller.hear(PATIENCE_S))

    assert not list(tmp_path.glob("[0-9]/*")), "placeholders are left"


def test_refused_sandboxes_leave_nothing(tmp_path: Path) -> None:
    """Refused before anything was made, and halfway."""
    (tmp_path / "note").write_text("")
    (tmp_path / "tree").mkdir()
    (tmp_path / "link").symlink_to("tree")
    before = sorted(os.listdir(tmp_path))

    with Caller(_COUNTING + _REFUSED, tmp_path) as caller:
        check(caller.hear(PATIENCE_S))

    assert before == sorted(os.listdir(tmp_path))


_FEW_DESCRIPTORS = """
import resource
with Sandbox.create() as first:
    first.start(["true"]).wait()
before = len(os.listdir("/proc/self/fd"))
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (80, most))
kept, problem = [], None
while problem is None and len(kept) < 100:
    try:
        kept.append(Sandbox.create())
        kept[-1].start(["sleep", "60"])
    except Exception as exc:
        problem = exc
for sandbox in kept:
    sandbox.terminate()
del sandbox, kept
import gc, time
gc.collect()
deadline = time.monotonic() + 20
while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < deadline:
    time.sleep(0.01)
again = Sandbox.create()
answer = again.exec(["echo", "again"]).stdout_text
again.terminate()
say([type(problem).__name__, str(problem), before, len(os.listdir("/proc/self/fd")), answer])
"""


def test_a_caller_out_of_descriptors_is_told_and_recovers() -> None:
    with Caller(_FEW_DESCRIPTORS) as caller:
        kind, text, before, after, answer = caller.hear(PATIENCE_S)

    assert "ResourceExhausted" == kind, text
    assert "ulimit" in text
    assert (before, "again\n") == (after, answer)


def test_two_thousand_execs_do_not_grow_pid_1(sandbox: Sandbox) -> None:
    pid = init_pid(sandbox)

    def table() -> int:
        # An ordinary user may not list the descriptors of PID 1, but sees how large their table is.
        return len(open_fds(pid)) if am_root() else _table_size(pid)

    def run(times: int) -> None:
        for _ in range(times):
            assert sandbox.exec(["true"]).ok

    run(200)
    fds, kib = table(), status_kib(pid, "VmRSS")
    run(2000)

    assert until(lambda: table() <= fds)
    assert status_kib(pid, "VmRSS") < kib + 1024  # half a KiB for each would be more
    stats = sandbox.stats()
    assert (2200, 0) == (stats.execs, stats.pids)


def _table_size(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("FDSize:"))


# -- one event loop -------------------------------------------------------------------------------


async def test_fifty_sandboxes_of_one_loop_do_not_wait_for_each_other() -> None:
    """Each ends when all run: one after the other none ever would."""
    running = asyncio.Barrier(50)

    async def live() -> str:
        sandbox = await AsyncSandbox.create()
        async with sandbox:
            process = await sandbox.start(["cat"], stream_stdin=True)
            assert process.stdin is not None
            await running.wait()
            await process.stdin.write(b"done")
            await process.stdin.close()
            return (await process.wait()).stdout_text

    answers = await asyncio.gather(*(live() for _ in range(50)))

    assert ["done"] * 50 == answers


async def test_the_loop_is_never_blocked() -> None:
    """While sandboxes are made, used and ended, the loop's own clock keeps ticking, as a thread's does."""
    gaps = {"loop": 0.0, "thread": 0.0}
    over = threading.Event()

    async def tick() -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.001)
            gaps["loop"], last = max(gaps["loop"], time.monotonic() - last), time.monotonic()

    def tick_beside() -> None:
        last = time.monotonic()
        while not over.wait(0.001):
            gaps["thread"], last = max(gaps["thread"], time.monotonic() - last), time.monotonic()

    async def live() -> None:
        async with await AsyncSandbox.create() as sandbox:
            await sandbox.files.write("note", b"x" * 1_000_000)
            await asyncio.gather(*(sandbox.exec(["cat", "note"]) for _ in range(5)))
            await sandbox.stats()

    async with AsyncSandbox(Sandbox.create()):
        clock, beside = asyncio.create_task(tick()), threading.Thread(target=tick_beside)
        beside.start()
        await asyncio.gather(*(live() for _ in range(5)))
        clock.cancel()
    over.set()
    beside.join()
    # A machine that has no time for either blocks nobody: what the thread was kept waiting counts for nothing.
    assert gaps["loop"] < 0.5 + 2 * gaps["thread"]


async def test_a_cancelled_exec_kills_its_tree(make: MakeSandbox) -> None:
    sandbox, length = AsyncSandbox(make()), new_length()
    task = asyncio.create_task(sandbox.shell(f"setsid sleep {length} & sleep {length}"))
    while 2 != len(pids_with(length)):
        await asyncio.sleep(0.01)

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert until(lambda: not pids_with(length))
    assert (await sandbox.exec(["true"])).ok


async def test_an_exec_that_takes_too_long_for_its_caller(make: MakeSandbox) -> None:
    sandbox, length = AsyncSandbox(make()), new_length()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await sandbox.exec(["sleep", length])

    assert until(lambda: not pids_with(length))


_CANCEL_CREATE = """
import asyncio, time

async def main():
    await (await AsyncSandbox.create()).terminate()
    for delay_s in (0, 0.001, 0.005, 0.02):
        for _ in range(5):
            task = asyncio.create_task(AsyncSandbox.create())
            await asyncio.sleep(delay_s)
            task.cancel()
            try:
                await (await task).terminate()
            except asyncio.CancelledError:
                pass

from ringfence.backends.registry import backend_named
asyncio.run(main())
deadline = time.monotonic() + 20
live = backend_named("native")._live
while live and time.monotonic() < deadline:
    time.sleep(0.01)
say(len(live))
"""


def test_a_cancelled_create_leaves_no_sandbox() -> None:
    """Whenever the cancellation comes."""
    with Caller(_CANCEL_CREATE, env={"PYTHONWARNINGS": "error"}) as caller:
        assert 0 == caller.hear(PATIENCE_S)


def test_one_id_over_and_over() -> None:
    """What is left of the last one is cleared up before, never after, the next one is made."""
    for _ in range(100):
        with Sandbox.create(id="again-and-again") as sandbox:
            assert "again-and-again" == sandbox.id
