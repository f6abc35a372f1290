"""Trees that try to outlive a timeout, a kill, their sandbox or its maker."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

from ...errors import RingfenceError
from ..inside import archive, command
from ..lab import eventually, first_host_pid, host_processes, host_tree, lacking, others, run, start
from ..probes import trees
from ..probes.kit import Outcome, escaped, held, inconclusive
from ..scope import OWN_KERNEL
from .register import PLAIN_PROCESS, probe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ...sandbox.sync import Sandbox
    from ..lab import Lab

_TIMEOUT_S = 0.4
_LATE_S = 15.0  # a busy machine's; the trees themselves would take longer
_PATIENCE_S = 60.0
_ENDS_ANYWAY = "none: a signal to the one process ends it on a plain host too"
_NO_INIT = "none: a plain host has no PID 1 that watches over timeouts"


def _timed(name: str) -> Callable[[Lab], Outcome]:
    def attack(lab: Lab) -> Outcome:
        if not lab.protected:
            return timed_plainly(lab, name)
        with lab.sandbox() as sandbox:
            began = time.monotonic()
            try:
                result = run(sandbox, "trees", name, timeout_s=_TIMEOUT_S)
            except RingfenceError as exc:
                return escaped(f"no result: {exc}")
            took_s = time.monotonic() - began
            left = others(sandbox)
        said = f"returned after {took_s:.2f} s, timeout {_TIMEOUT_S}"
        if left:
            return escaped(f"{len(left)} left: {left[0]}; {said}")
        if not result.timed_out or took_s > _TIMEOUT_S + _LATE_S:
            return escaped(f"{said}, {result.timed_out=}")
        return held(f"{said}, nothing left")

    return attack


def timed_plainly(lab: Lab, name: str) -> Outcome:
    """The same on the host, with what Python offers: a timeout that ends one process."""
    path = f"{lab.canaries.directory}/{name}-{lab.canaries.token[:8]}.zip"
    with open(path, "wb") as file:
        file.write(archive())
    child = subprocess.Popen(
        command("trees", name, path=path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        # Not by the clock: a busy machine may need seconds to start even the first of them.
        eventually(
            lambda: child.poll() is not None or bool({*host_processes(path)} - {child.pid}),
            patience_s=_PATIENCE_S,
        )
        child.kill()
        child.wait()
        # A process that forks and exits all the time may escape a single look.
        if eventually(lambda: bool(host_processes(path)), patience_s=3.0):
            return escaped("something of it is left")
        return held("nothing left")
    finally:
        _sweep(path)


def _sweep(marker: str) -> None:
    """End what is left: only processes that this probe started have its archive's path."""
    for _ in range(100):
        found = host_processes(marker)
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)  # one of them made itself our child
        time.sleep(0.01)


for _tree in (*trees.DETACHED, *trees.NOT_DETACHED):
    probe(
        f"lifecycle.timeout-{_tree.__name__.replace('_', '-')}",
        "high",
        PLAIN_PROCESS if _tree in trees.DETACHED else _ENDS_ANYWAY,
        about=f"{_tree.__doc__} must not outlive its timeout.",
        waits=True,
    )(_timed(_tree.__name__))


@probe("lifecycle.stop-the-next", "high", _NO_INIT)
def stop_the_next(lab: Lab) -> Outcome:
    """A process that stops all others must not keep the next command from being timed out."""
    slowest = 0.0
    with lab.sandbox() as sandbox:
        stopper = start(sandbox, "trees", "stop_everybody")
        time.sleep(0.15)
        for _ in range(2):
            began = time.monotonic()
            try:
                sandbox.exec(["sleep", "30"], timeout_s=_TIMEOUT_S)
            except RingfenceError as exc:
                return escaped(f"no result after {time.monotonic() - began:.1f} s: {exc}")
            slowest = max(slowest, time.monotonic() - began)
        stopper.kill()
    said = f"timeouts of {_TIMEOUT_S} s came after {slowest:.2f} s"
    return held(said) if slowest < _TIMEOUT_S + _LATE_S else escaped(said)


@probe("lifecycle.kill-tree", "high", PLAIN_PROCESS)
def kill_tree(lab: Lab) -> Outcome:
    """Killing an exec must leave nothing of its tree."""
    if not lab.protected:
        return timed_plainly(lab, "double_fork")
    with lab.sandbox() as sandbox:
        process = start(sandbox, "trees", "double_fork")
        eventually(lambda: len(host_tree(first_host_pid(sandbox))) >= 3)
        process.kill()
        process.wait(_PATIENCE_S)
        left = others(sandbox)
    return escaped(f"left: {left[0]}") if left else held("nothing left")


@probe("lifecycle.kill-terminal", "high", PLAIN_PROCESS)
def kill_terminal(lab: Lab) -> Outcome:
    """A tree that was started on a terminal must not outlive its timeout."""
    if not lab.protected:
        return timed_plainly(lab, "double_fork")
    with lab.sandbox() as sandbox:
        process = start(sandbox, "trees", "double_fork", pty=(24, 80), timeout_s=_TIMEOUT_S)
        result = process.wait(_PATIENCE_S)
        left = others(sandbox)
    if left or not result.timed_out:
        return escaped(f"left: {left}, {result.timed_out=}")
    return held("nothing left")


@probe("lifecycle.kill-only-its-own", "medium", "none: a control would kill what it must not")
def kill_only_its_own(lab: Lab) -> Outcome:
    """A timeout must not end what another exec of the same sandbox runs."""
    with lab.sandbox() as sandbox:
        bystander = sandbox.start(["sleep", "1000"])  # an emulated machine takes its time
        run(sandbox, "trees", "many", timeout_s=_TIMEOUT_S)
        left = others(sandbox)
        running = bystander.running
        bystander.kill()
    if running and len(left) == 1:
        return held("the other one runs on")
    return escaped(f"the other one runs: {running}; left: {left}")


def _watched_by_agent(number: signal.Signals) -> Callable[[Lab], Outcome]:
    def attack(lab: Lab) -> Outcome:
        with lab.sandbox() as sandbox:
            began, watchers = time.monotonic(), set[str]()
            options: dict[str, Any] = {"user": "nobody", "timeout_s": _TIMEOUT_S}
            try:
                sandbox.exec(["true"], user="nobody")
                watchers = _alive(sandbox)  # they may live on, and with them the sandbox
                began = time.monotonic()
                run(sandbox, "trees", "signal_parent", str(int(number)), **options)
                said = "returned"
            except RingfenceError as exc:
                if exc.code == "unsupported":
                    return inconclusive(f"{exc.code}: {exc}")
                said = f"{exc.code}: {exc}"
            took_s = time.monotonic() - began
            if not eventually(lambda: not _alive(sandbox) - watchers, patience_s=_PATIENCE_S):
                return escaped(f"{said} after {took_s:.2f} s, and its processes run on")
        said = f"{said} after {took_s:.2f} s, timeout {_TIMEOUT_S}"
        return escaped(said) if took_s > _TIMEOUT_S + 2 * _LATE_S else held(f"{said}, nothing left")

    return attack


for _number in (signal.SIGKILL, signal.SIGSTOP):
    probe(
        f"lifecycle.other-user-{_number.name.lower()}",
        "high",
        _NO_INIT,
        about="A command run as another user must not outlive its timeout by sending "
        f"{_number.name} to its watcher.",
    )(_watched_by_agent(_number))


def _alive(sandbox: Sandbox) -> set[str]:
    """The numbers of its processes."""
    try:
        return {each.split()[0] for each in others(sandbox)}
    except RingfenceError:
        return set()  # the sandbox was ended with them


@probe("lifecycle.terminate", "critical", PLAIN_PROCESS)
def terminate(lab: Lab) -> Outcome:
    """When a sandbox has been terminated, no process of it may be left on the host."""
    if not lab.protected:
        return timed_plainly(lab, "many")
    with lab.sandbox() as sandbox:
        first = first_host_pid(sandbox)
        start(sandbox, "trees", "many")
        # Of a guest with a kernel of its own the host sees that kernel's process, and no other.
        most = 0 if lab.backend.name in OWN_KERNEL else 30
        if not first or not eventually(lambda: len(host_tree(first)) > most):
            return inconclusive("its processes cannot be seen from the host")
        tree = host_tree(first)
        sandbox.terminate()
        # PID 1 is a zombie until its parent has looked.
        left = [pid for pid in tree if _runs(pid)]
    return escaped(f"{len(left)} of {len(tree)} left") if left else held(f"all {len(tree)} gone")


def _runs(pid: int) -> bool:
    return _stat_fields(pid)[:1] not in ([], ["Z"], ["X"])


def _stat_fields(pid: int) -> list[str]:
    """Read /proc/PID/stat from the state on; empty where there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


_MAKER = """
import sys
sys.path.insert(0, sys.argv[1])
from ringfence import Sandbox
sandbox = Sandbox.create(backend=sys.argv[2], allow_degraded=sys.argv[3:])
running = sandbox.start(["sh", "-c", "setsid sleep 30 & echo begun; sleep 30"])
while not running.stdout.read() and running.running:
    pass
print(sandbox._inner.pid, flush=True)
sys.stdin.read()
"""
_PLAIN_MAKER = """
import subprocess, sys
print(subprocess.Popen(["/bin/sleep", "5"]).pid, flush=True)
sys.stdin.read()
"""


@probe("lifecycle.maker-killed", "critical", PLAIN_PROCESS)
def maker_killed(lab: Lab) -> Outcome:
    """When the process that made a sandbox is killed, the sandbox must end with it."""
    return _killed(lab, lambda maker, _first: [maker])


@probe("lifecycle.guards-killed", "high", PLAIN_PROCESS)
def guards_killed(lab: Lab) -> Outcome:
    """When its maker and all host processes between the two are killed at once, a sandbox must end."""
    return _killed(lab, lambda maker, first: [maker, *_between(maker, first)])


def _between(maker: int, first: int) -> list[int]:
    """Parents of a sandbox's first process that are children of its maker, or theirs."""
    found = []
    pid = _parent(first)
    while pid not in (0, 1, maker):
        found.append(pid)
        pid = _parent(pid)
    return found if pid == maker else []


def _parent(pid: int) -> int:
    fields = _stat_fields(pid)
    return int(fields[1]) if fields else 0


def _killed(lab: Lab, choose: Callable[[int, int], list[int]]) -> Outcome:
    """Kill the processes that `choose` names, of a maker and its sandbox's first process."""
    package_parent = os.path.dirname(lab.canaries.context["package_directory"])
    script = _MAKER if lab.protected else _PLAIN_MAKER
    maker = subprocess.Popen(
        [sys.executable, "-c", script, package_parent, lab.backend.name, *lacking(lab.backend)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with maker:
        line = maker.stdout.readline() if maker.stdout else b""
        tree = host_tree(int(line)) if line.strip() else []
        killed = choose(maker.pid, tree[0]) if tree else [maker.pid]
        for pid in killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    if not tree:
        return inconclusive("the maker made no sandbox")
    # The plain one would end by itself after a while.
    patience_s = _PATIENCE_S if lab.protected else 1.0
    if eventually(lambda: not any(map(_runs, tree)), patience_s=patience_s):
        return held(f"{len(killed)} killed, all {len(tree)} processes gone")
    left = [pid for pid in tree if _runs(pid)]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return escaped(f"{len(killed)} killed, {len(left)} of {len(tree)} processes are left")


@probe("lifecycle.suspended", "medium", "the same sandbox, not suspended")
def suspended(lab: Lab) -> Outcome:
    """A suspended sandbox must not run."""
    with lab.sandbox() as sandbox:
        ticks = "ticks"
        start(sandbox, "trees", "tick", ticks)
        if not eventually(lambda: sandbox.files.exists(ticks), patience_s=_PATIENCE_S):
            return inconclusive("it never ran")
        first = first_host_pid(sandbox)
        if lab.protected:
            sandbox.suspend()
            # Without a freezer a process stops when it next comes by.
            eventually(lambda: _stands_still(first, 0.1))
        before = _processor_ticks(first)
        time.sleep(0.3)
        after = _processor_ticks(first)
        if lab.protected:
            sandbox.resume()
    if not first:
        return inconclusive("its processes cannot be seen from the host")
    return held("it did not run") if after == before else escaped("it ran meanwhile")


def _stands_still(first: int, seconds: float) -> bool:
    before = _processor_ticks(first)
    time.sleep(seconds)
    return before == _processor_ticks(first)


def _processor_ticks(first: int) -> list[tuple[int, int]]:
    """Times that each process of a tree gave up the processor or was switched from it."""
    found = []
    for pid in host_tree(first)[1:]:
        with (
            contextlib.suppress(OSError),
            open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file,
        ):
            switches = [int(line.split()[1]) for line in file if "ctxt_switches" in line]
            found.append((pid, sum(switches)))
    return found
