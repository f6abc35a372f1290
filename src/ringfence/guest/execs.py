"""The process trees that the host has had the agent start, until each is over and reported."""

from __future__ import annotations

import _signal as signal
import errno
import os
import time

from ..launcher import wire
from ..launcher.pid1 import forked
from . import flows, relays, starting, users

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .groups import Groups
    from .tags import Tags

_CROWD = 64  # so many processes are stopped together before they are killed
_PASSES = 100
_PREFERRED, _MOST_SCORE = 500, 1000  # include/uapi/linux/oom.h
# Usage, limit and kills of a memory cgroup of version 2, and of version 1: the container's own, as Docker and
# LXC show it. Source: Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst.
_OF_MEMORY = (
    (
        "/sys/fs/cgroup/memory.current",
        "/sys/fs/cgroup/memory.max",
        "/sys/fs/cgroup/memory.events",
    ),
    (
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.oom_control",
    ),
)
_UNLIMITED = 1 << 62
_ROOM_BYTES = 4 << 20
_PATIENCE_S, _EVERY_S = 0.5, 0.002
_PAUSE_S = 1.0  # between two waits for memory, in which the agent does what else there is
LOOK_S = 0.01  # how soon to look again whether a killed tree is gone


class Exec:
    def __init__(
        self, number: int, command: str, uid: int, reply: wire.Socket, timeout_s: float
    ) -> None:
        self.number, self.command, self.uid, self.reply = number, command, uid, reply
        self.stage = wire.STAGE_TERMINAL  # of its start
        self.pid = 0
        self.failure_fd = -1  # of `forked.start`
        self.started_ns = time.monotonic_ns()
        self.deadline = self.started_ns / 1e9 + timeout_s if timeout_s else 0.0
        self.report: wire.ExecReport | None = None  # set once the first process has ended
        self.killed_by = wire.KILLED_BY_NOBODY
        self.crowded = (
            0  # `wire.CROWDED` if a process of it was one too many, `wire.FULL` if it was the last
        )
        self.terminal: flows.Pair | None = None
        self.relay: relays.Relay | None = None
        self.is_apart = False  # nobody is there to hear of its end yet


class Execs:
    """All of them.

    Args:
        groups: What tells one exec's processes from another's.
        counts_cpu: Whether what `groups` say of processor time is to be believed.
    """

    def __init__(self, groups: Groups | Tags, *, counts_cpu: bool) -> None:
        self.groups, self.counts_cpu = groups, counts_cpu
        self.running: dict[int, Exec] = {}  # by number
        self.last_number = 0
        self._by_pid: dict[int, Exec] = {}
        self._left: set[int] = set()  # numbers of ended ones that may have left processes behind
        self.oom_score = OomScore()
        self.unseen_s = 0.0  # for how long they have run since the watchdog looked

    def numbers(self) -> list[int]:
        return [*self.running, *self._left]

    def wait_s(self) -> float | None:
        """How long nothing is to be done by itself; None: until something happens."""
        deadlines = [run.deadline for run in self.running.values() if run.deadline]
        now = time.monotonic() if deadlines else 0.0  # in gVisor to ask is a stop
        waits = [deadline - now for deadline in deadlines]
        if any(run.killed_by for run in self.running.values()):
            waits.append(LOOK_S)
        return min(waits, default=None)

    def start(
        self,
        reply: wire.Socket,
        streams: list[int],
        number: int,
        argv: list[str],
        env: dict[str, str],
        cwd: str,
        timeout_s: float,
        terminal: tuple[int, int] | None,
        leads: bool,
        uid: int,
        is_relayed: bool = False,
    ) -> Exec | None:
        """Start one, whose end is told on `reply`; None: it could not be, which has been told.

        Args:
            leads: It leads a session of its own: see `forked.start`.
            is_relayed: Its streams pass through us, so that it can be saved: see `relays`.
        """
        self.last_number = number
        run = Exec(number, argv[0], uid, reply, timeout_s)
        try:
            if is_relayed:
                with users.As(uid):
                    run.relay = relays.Relay(streams)
                streams = run.relay.inner
            with self.oom_score:
                starting.start(run, self.groups, streams, argv, env, cwd, terminal, leads=leads)
        except OSError as exc:
            _tell(run, wire.ExecReport(spawn_errno=exc.errno or errno.EIO, failed_stage=run.stage))
            self.groups.remove(number)
            for each in (run.terminal, run.relay):
                if each:
                    each.close()
            return None
        self.running[number] = self._by_pid[run.pid] = run
        return run

    def reap(self) -> None:
        """Take what has ended, and report what is over."""
        self.take()
        self.settle()

    def take(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            run = self._by_pid.pop(pid, None)
            if run is not None:
                run.report = wire.ExecReport(
                    wait_status=status,
                    peak_memory_bytes=usage.ru_maxrss * 1024,
                    io_read_bytes=wire.UNKNOWN,
                    io_write_bytes=wire.UNKNOWN,
                    duration_ns=time.monotonic_ns() - run.started_ns,
                )

    @property
    def has_ended(self) -> bool:
        """True while the end of one is still to be reported."""
        return any(run.report is not None for run in self.running.values())

    def settle(self) -> None:
        """Report what is over, as far as all of its tree has ended where that must."""
        for run in list(self.running.values()):
            if run.report is not None and not run.is_apart:
                self._finish(run, run.report)
        self._left = {number for number in self._left if not self.groups.remove(number)}

    def _finish(self, run: Exec, report: wire.ExecReport) -> None:
        """Report an exec whose first process has ended; after a kill, only when its tree is gone."""
        if not run.killed_by and self.groups.lacked_memory(run.number):
            run.killed_by = wire.KILLED_BY_MEMORY_WATCHDOG
        if run.killed_by and self.kill_tree(run.number):
            return  # the loop comes back soon
        if run.terminal and not run.killed_by and not run.terminal.settle():
            return  # what it has printed comes before its end: the loop comes back when there is room
        if run.relay and not run.killed_by and not run.relay.settle():
            return
        report.killed_by = run.killed_by | run.crowded
        report.timed_out = int(run.killed_by == wire.KILLED_BY_TIMEOUT)
        report.user_ns = report.system_ns = wire.UNKNOWN
        if self.counts_cpu:
            report.user_ns, report.system_ns = self.groups.cpu_ns(run.number)
        if run.failure_fd >= 0:
            never_began = forked.failure(run.failure_fd)
            if never_began:
                report = wire.ExecReport(spawn_errno=never_began, failed_stage=wire.STAGE_COMMAND)
        del self.running[run.number]
        self.unseen_s += report.duration_ns / 1e9
        _tell(run, report)
        if not self.groups.remove(run.number):
            self._left.add(run.number)

    def enforce_deadlines(self) -> None:
        """Kill what has run for too long."""
        if not any(run.deadline for run in self.running.values()):
            return
        now = time.monotonic()
        late = [run for run in self.running.values() if run.deadline and now >= run.deadline]
        if late:
            self.reap()  # who has ended meanwhile was in time
        for run in late:
            run.deadline = 0.0
            if run.number in self.running:
                self.kill(run.number, wire.KILLED_BY_TIMEOUT)

    def kill(self, number: int, reason: int) -> bool:
        """Kill every process of one exec; whether any may be left that has not died yet."""
        run = self.running.get(number)
        if run is not None:
            run.killed_by = run.killed_by or reason
        return self.kill_tree(number)

    def kill_owner(self, pid: int, reason: int) -> None:
        """Kill the exec that a process belongs to; where that is over, only the process."""
        owner = [number for number in self.running if pid in self.groups.members(number)]
        for number in owner:
            self.kill(number, reason)
        if not owner and pid != os.getpid():
            send(pid, signal.SIGKILL)

    def kill_tree(self, number: int) -> bool:
        """As `kill`, for nobody's reason."""
        seen: set[int] = set()
        stopped = False
        for _ in range(_PASSES):
            fresh = [pid for pid in self.groups.members(number) if pid not in seen]
            if not fresh:
                break
            if len(fresh) > _CROWD and not stopped and self.groups.is_alone:
                # A stopped process cannot fork, and it leaves the processor to us.
                stopped = send(-1, signal.SIGSTOP)
                continue
            for pid in fresh:
                send(pid, signal.SIGKILL)
            seen.update(fresh)
        if stopped:
            send(-1, signal.SIGCONT)
        return bool(seen)


class OomScore:
    """Has the kernel kill programs before the agent, whose memory limit is the same: it decides by resident
    memory, and files of memfd_create(2) are nobody's. Opened before the agent confines itself.
    """

    def __init__(self) -> None:
        self._fd, self._own = users.score_fd, 0
        try:
            if self._fd < 0:
                self._fd = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
            self._own = int(os.pread(self._fd, 16, 0))
        except OSError:  # no /proc, or not ours: as before
            pass

    def __enter__(self) -> None:
        """Let what is started now be killed first."""
        self._write(min(_MOST_SCORE, self._own + _PREFERRED))

    def __exit__(self, *_exc: object) -> None:
        """Go back, which the kernel allows as far as the lowest score before."""
        self._write(self._own)

    def _write(self, score: int) -> None:
        if self._fd >= 0:
            try:
                os.write(self._fd, b"%d" % score)
            except OSError:
                pass


class Uncharged:
    """Waits for memory that the kernel still charges to killed processes, whose limit is the agent's as well.

    The pages of a killed process stay charged for 5 to 30 ms after its end (Linux 6.18), longer on a busy host.
    The agent that asks for memory meanwhile is alone at the limit, and is killed for it. See decisions 148, 343
    and 346.

    Args:
        files: Triples of paths: of what is used and of the limit, in bytes, and of how many the kernel has
            killed for it; the first that can be read count.
    """

    def __init__(self, files: tuple[tuple[str, str, str], ...] = _OF_MEMORY) -> None:
        self._fds: list[int] = []  # of what is used, and of the kills
        self._enough, self._next, self._seen = 0, 0.0, 0
        for usage, limit, kills in files:
            try:
                with open(limit, "rb") as file:
                    most = int(file.read())
                if most >= _UNLIMITED:
                    continue
                for path in (usage, kills):
                    self._fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
                self._enough = most - _ROOM_BYTES
                self._used()  # which makes the kernel's buffer, that later reads use again
                self._seen = self._killed()
            except (OSError, ValueError):  # there is none, or no limit
                self.close()
                continue
            return

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def _used(self) -> int:
        return int(os.pread(self._fds[0], 32, 0))

    def _killed(self) -> int:
        for line in os.pread(self._fds[1], 512, 0).splitlines():
            if line.startswith(b"oom_kill "):
                return int(line.split()[1])
        return 0

    def wait_after_kill(self) -> None:
        """Wait for room where the kernel has killed since the last call."""
        if self._fds and (killed := self._killed()) != self._seen:
            self._seen = killed
            self.wait()

    def wait(self) -> bool:
        """Wait for room, half a second at most and not again within a second; whether there is any."""
        if not self._fds or self._used() <= self._enough:
            return True
        began = time.monotonic()
        if began < self._next:
            return False
        until = began + _PATIENCE_S
        while (is_full := self._used() > self._enough) and time.monotonic() < until:
            time.sleep(_EVERY_S)
        self._next = time.monotonic() + _PAUSE_S
        return not is_full


_uncharged: Uncharged | None = None


def keep_usage() -> None:
    """Open the files of the memory limit, before they are hidden."""
    global _uncharged
    _uncharged = Uncharged()


def await_memory() -> None:
    """Wait for memory of programs that the kernel has killed: before anything that may ask for more."""
    if _uncharged is not None:
        _uncharged.wait_after_kill()


def send(pid: int, signum: int) -> bool:
    """Send a signal; whether anybody was there."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return False
    return True


def _tell(run: Exec, report: wire.ExecReport) -> None:
    wire.answer(run.reply, report.pack())
    run.reply.close()
