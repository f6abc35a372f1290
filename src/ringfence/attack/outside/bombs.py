"""Bounded bombs, set off in sandboxes with small limits; `probes/bombs.py` has what runs inside."""

from __future__ import annotations

import contextlib
import os
import time

from ...errors import SandboxLost
from ..again import declared_weaker
from ..lab import first_host_pid, host_tree, run, start
from ..probes import bombs
from ..probes.kit import Outcome, escaped, held, inconclusive
from ..scope import OWN_KERNEL
from .register import ROOMY, probe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ...sandbox.sync import Sandbox
    from ..lab import Lab

_MIB = 1 << 20


def _counted(
    lab: Lab, field: str, function: str, wanted: int, small: int, large: int, unit: int = 1
) -> Outcome:
    """Run a bomb that prints how much it got of what it wanted."""
    limit = small if lab.protected else large
    with lab.sandbox(limits={field: limit * unit}) as sandbox:
        result = run(sandbox, "bombs", function)
    words = result.stdout_text.split()
    if not words:
        return held(f"it ended before it could count: {result.stderr_text.strip()[-80:]}")
    got = int(words[0])
    said = f"{got} of {wanted} under a limit of {limit}"
    return escaped(said) if got >= wanted else held(said)


@probe("resources.fork-bomb", "high", ROOMY)
def fork_bomb(lab: Lab) -> Outcome:
    """No more processes may be made than the limit allows."""
    return _counted(lab, "pids", "processes", 200, 40, 400)


@probe("resources.thread-bomb", "high", ROOMY)
def thread_bomb(lab: Lab) -> Outcome:
    """Threads must count as processes."""
    return _counted(lab, "pids", "threads", 200, 40, 400)


@probe("resources.inode-filler", "high", ROOMY)
def inode_filler(lab: Lab) -> Outcome:
    """No more files may be made than the limit allows."""
    return _counted(lab, "inodes", "inodes", 2000, 600, 9000)


@probe("resources.open-file-hog", "medium", ROOMY)
def open_file_hog(lab: Lab) -> Outcome:
    """No process may have more open files than the limit allows."""
    return _counted(lab, "open_files", "open_files", 300, 64, 1024)


@probe("resources.disk-filler", "high", ROOMY)
def disk_filler(lab: Lab) -> Outcome:
    """No more may be written than the limit allows, over all places together."""
    return _counted(lab, "disk_bytes", "disk", 6 * len(bombs.PLACES), 16, 64, _MIB)


# -- memory ----------------------------------------------------------------------------------


def _memory_bomb(kind: str) -> Callable[[Lab], Outcome]:
    def attack(lab: Lab) -> Outcome:
        limit = (64 if lab.protected else 1024) * _MIB
        # With a larger disk than memory, files would be on disk, which is no memory.
        limits = {"memory_bytes": limit, "disk_bytes": min(limit, 512 * _MIB)}
        with lab.sandbox(limits=limits, allow_degraded=("*",)) as sandbox:
            weaker = declared_weaker(sandbox, "memory") if lab.protected else ""
            try:
                result = run(sandbox, "bombs", "memory", kind)
            except SandboxLost as exc:  # the agent lives in its cgroup, too
                if lab.protected and "memory allowed" in str(exc):
                    return held(f"it ended under a limit of {limit // _MIB}: {exc.message}")
                raise
        words = result.stdout_text.split()
        took = 4 * max((int(word) for word in words if word.isdigit()), default=0)
        said = f"{took} MiB under a limit of {limit // _MIB}"
        if words[-1:] != ["done"]:
            end = "killed for memory" if result.oom_killed else result.stderr_text.strip()[-60:]
            return held(f"{said}: {end or f'signal {result.signal}'}")
        return inconclusive(f"{said}; declared: {weaker}") if weaker else escaped(said)

    return attack


_WITHOUT_CONTROL = {
    "pipes": "none: the kernel itself bounds the pipes of a user",
    "netlink": "none: PID 1 lets few be made, whatever the limits are; see resources.netlink-sockets",
    "locks": "none: PID 1 counts them, whatever the limits are",
}
for _take in bombs.MEMORY:
    _name = _take.__name__
    probe(
        f"resources.memory-{_name.replace('_', '-')}",
        "high",
        _WITHOUT_CONTROL.get(_name, ROOMY),
        about=f"{_take.__doc__} must count against the memory limit.",
    )(_memory_bomb(_name))


# -- output and processor ---------------------------------------------------------------------


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@probe("resources.output-flood", "high", ROOMY)
def output_flood(lab: Lab) -> Outcome:
    """A flood of output must not make the host process grow."""
    most = _MIB if lab.protected else 96 * _MIB
    before = _resident_bytes()
    with lab.sandbox() as sandbox:
        result = run(sandbox, "bombs", "output", max_output_bytes=most)
    grown = (_resident_bytes() - before) // _MIB
    kept = len(result.stdout) // _MIB
    said = f"64 MiB came, {kept} MiB kept, the host process grew by {grown} MiB"
    return held(said) if grown < 32 and kept <= 2 and result.truncated else escaped(said)


def _processor_s(sandbox: Sandbox) -> float:
    """Add up the processor time of its processes from the host's view, including reaped children."""
    ticks = 0
    for pid in host_tree(first_host_pid(sandbox)):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
            # utime, stime, cutime and cstime, behind a name that may hold spaces: proc_pid_stat(5)
            ticks += sum(map(int, file.read().rpartition(b")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


@probe("resources.processor-hog", "medium", ROOMY)
def processor_hog(lab: Lab) -> Outcome:
    """No more processor time may be used than the limit allows."""
    limits = {"cpus": 0.1} if lab.protected else {}
    with lab.sandbox(limits=limits, allow_degraded=("*",)) as sandbox:
        weaker = declared_weaker(sandbox, "cpu") if lab.protected else ""
        # Longer without a limit: others may want the processors too.
        time_s = 0.5 if lab.protected else 5.0
        before_s, began_s = _processor_s(sandbox), time.monotonic()
        used_s = float(run(sandbox, "bombs", "spin", str(time_s)).stdout_text or 0)
        if lab.backend.name in OWN_KERNEL:
            # Its clocks go on for who is kept from the processor: what it got only the host can tell.
            time_s, used_s = time.monotonic() - began_s, _processor_s(sandbox) - before_s
    said = f"{used_s:.2f} s of processor time in {time_s:.2f} s, limit {limits.get('cpus', 'none')}"
    if used_s <= 0.1 * time_s + 0.1:
        return held(said)
    return inconclusive(f"{said}; declared: {weaker}") if weaker else escaped(said)


@probe("resources.neighbour-answers", "high", "none: it would slow the whole host on purpose")
def neighbour_answers(lab: Lab) -> Outcome:
    """While one sandbox is bombed from inside, another must keep answering."""
    limits = {"pids": 64, "memory_bytes": 128 * _MIB, "inodes": 5000}
    with lab.sandbox(limits=limits, allow_degraded=("*",)) as bombed, lab.sandbox() as neighbour:
        noisy = start(bombed, "bombs", "everything")
        time.sleep(0.3)
        slowest = 0.0
        for _ in range(5):
            began = time.monotonic()
            if not neighbour.exec(["true"], timeout_s=60).ok:
                return escaped("the neighbour's command failed")
            slowest = max(slowest, time.monotonic() - began)
        noisy.kill()
    said = f"the slowest of five answers took {slowest:.2f} s"
    return held(said) if slowest < 10 else escaped(said)
