"""PID 1 of a sandbox: starts processes, reaps every one, kills whole trees. Locked down like its children.

It trusts its control socket (the host holds the other end) and nothing else, and touches no data:
output flows through descriptors that it only passes on. When the host's end closes, it exits, and
the kernel kills all that is left in its PID namespace.
"""

from __future__ import annotations

import _signal as signal
import _socket as socket
import _struct as struct
import errno
import posix as os
import resource
import select
import time

from ...linux import libc, on_behalf
from .. import wire
from . import (
    file_locks,
    forked,
    idle_pages,
    notifications,
    processes,
    programs,
    terminals,
    watchdog,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from typing import Any

    from ..cgroups import Apart
    from ..plan import Plan

_LONGEST_S = 86_400.0  # poll(2) takes milliseconds as an int: 24 days
_PASSES = 100  # of looking for a process that is not stopped yet; two are the rule
_CROWD = 64  # so many processes are stopped by one call, together with everything else
_PREFER_FOR_OOM = b"500"
SPARED = b"-1000"  # by the OOM killer: include/uapi/linux/oom.h, OOM_SCORE_ADJ_MIN
# While nothing can be killed for memory, and none is free: until what has ended has given it back.
_FULL_S = 0.005
_DYING_S = 1.0  # for what an ended exec has left
# Until there is something to sleep in: see `hibernation_image`.
_NOT_YET_S, _TRIES = 0.5, 8
_LOOPBACK = {4: (socket.AF_INET, "127.0.0.1"), 6: (socket.AF_INET6, "::1")}


class Exec:
    def __init__(self, number: int, reply: wire.Socket, deadline: float) -> None:
        self.number, self.reply, self.deadline = number, reply, deadline
        self.pid = 0
        self.failure_fd = -1  # of `forked.start`
        self.started_ns = time.monotonic_ns()
        self.report: wire.ExecReport | None = None  # set once the first process has ended
        self.killed_by = wire.KILLED_BY_NOBODY
        self.dying: set[int] = set()  # killed, not yet reaped
        self.orphans = [
            0,
            0,
            0,
            0,
            0,
        ]  # user ns, system ns, peak bytes, read, written of reaped orphans

    @property
    def tag(self) -> int:
        return processes.TAG_BASE - self.number


class Init:
    """The event loop of PID 1."""

    def __init__(
        self,
        plan: Plan,
        control: wire.Socket,
        signal_fd: int,
        oom_score_fd: int,
        io_fd: int,
        listener_fd: int = -1,
        *,
        apart: Apart | None = None,
        hibernate: Callable[[Plan], None] | None = None,
        become: Callable[[], None] | None = None,
        is_ruler: bool = False,
    ) -> None:
        """See `Init`.

        Args:
            become: Of the agent of another user: what a child does before it begins a program.
            is_ruler: We may signal processes of other users, agents among them.
        """
        # An agent may signal other agents: they have one real id.
        self.become, self.is_ruler = become, is_ruler or become is not None
        processes.begin(are_others=self.is_ruler)
        self.plan, self.control, self.signal_fd = plan, control, signal_fd
        self.oom_score_fd, self.io_fd = oom_score_fd, io_fd
        self.own_score = self._find_own_score()
        self.apart = apart  # None: programs are where we are
        self.is_full = False  # of memory, before the next exec
        self.io_read_here = 0
        self.execs: dict[int, Exec] = {}  # by number
        self.by_pid: dict[int, Exec] = {}
        self.stopped_before: set[int] = set()
        self.is_suspended = False
        self.watchdog = watchdog.Watchdog(plan, self.execs, self._kill)
        self.file_locks = file_locks.FileLocks()
        self.hibernate = hibernate  # where there is nothing else to do: `hibernation.hibernate`
        self.tries = 0
        self.release_at = self._release_later(time.monotonic())
        self.poll = select.poll()
        self.poll.register(control.fileno(), select.POLLIN)
        self.poll.register(signal_fd, select.POLLIN)
        self.connect_key = plan["tag_key"] if plan["connects"] else 0
        self.listener = notifications.Listener(
            listener_fd, plan["netlink_sockets"], self.connect_key
        )
        self.adopted: dict[int, notifications.Listener] = {}  # by descriptor
        if listener_fd >= 0:
            self.poll.register(listener_fd, select.POLLIN)

    def run(self) -> None:
        """Serve until the host goes away, and without memory of our own no less."""
        is_needed = True
        while is_needed:
            try:
                is_needed = self._take_turn()
            except OSError as exc:
                if exc.errno != errno.ENOMEM:
                    raise
                self._reap_without_memory()

    def _take_turn(self) -> bool:
        """Do what there is to do; False: the host has gone away."""
        ready = self.poll.poll(self._timeout_ms())
        self._release_idle_pages(bool(ready))
        self._enforce_deadlines()
        for fd, event in ready:
            if fd == self.signal_fd:
                os.read(self.signal_fd, 4096)
                self._reap()
            elif fd == self.listener.fd:
                self.listener.serve_one()
            elif fd in self.adopted:
                self._serve_adopted(fd, event)
            elif not self._serve_one():
                return False
        for listener in (self.listener, *self.adopted.values()):
            if listener.connects is not None:
                listener.connects.look(is_asked=any(fd == listener.fd for fd, _ in ready))
        if self.watchdog.is_on:
            self.watchdog.look()
        for pid in self.file_locks.look():
            self._kill_owner(pid)
        return True

    def _reap_without_memory(self) -> None:
        """The signal that told of ended processes may be read already: reap them as soon as may be."""
        while True:
            time.sleep(_FULL_S)
            try:
                return self._reap()
            except OSError as exc:
                if exc.errno != errno.ENOMEM:
                    raise

    def _release_idle_pages(self, has_work: bool) -> None:
        """Give back what a PID 1 without work does not need, once it has had none for a while."""
        now = time.monotonic()
        if has_work:
            self.release_at, self.tries = self._release_later(now), 0
        elif self.release_at and now >= self.release_at:
            self.release_at = self._release_later(now) if self.watchdog.is_on else 0.0
            if not self.release_at:
                idle_pages.give_back()
                self._sleep(now)

    def _sleep(self, now: float) -> None:
        """Sleep, where nothing runs that could need us."""
        if self.hibernate is None or self.execs or self.adopted or has_children():
            return
        try:
            self.hibernate(self.plan)
        except BlockingIOError:  # there is nothing to sleep in yet
            self.tries += 1
            self.release_at = now + _NOT_YET_S if self.tries < _TRIES else 0.0
        except OSError:
            self.hibernate = (
                None  # a kernel or a filter says no, and will not say otherwise the next time
            )

    def _release_later(self, now: float) -> float:
        """When, in seconds of the monotonic clock; 0 for never."""
        return (
            now + idle_pages.AFTER_S
            if self.plan["releases_idle_pages"] and idle_pages.is_of_use()
            else 0.0
        )

    def _timeout_ms(self) -> float | None:
        waits = [e.deadline - time.monotonic() for e in self.execs.values() if e.deadline]
        if self.release_at:
            waits.append(self.release_at - time.monotonic())
        if self.watchdog.is_on:
            waits.append(self.watchdog.wait_s())
        for listener in (self.listener, *self.adopted.values()):
            connect_s = listener.connects.wait_s() if listener.connects else None
            if connect_s is not None:
                waits.append(connect_s)
        look_s = self.file_locks.wait_s(is_busy=bool(self.execs) or has_children())
        if look_s is not None:
            waits.append(look_s)
        return max(0.0, min(*waits, _LONGEST_S)) * 1000 + 1 if waits else None

    def _serve_one(self) -> bool:
        message, fds = wire.receive(self.control)
        if message is None:
            return False
        verb, *args = message
        if verb == "exec":
            self._exec(fds, *args)
            return True
        if verb == "adopt":
            self._adopt(fds, *args)
            return True
        if verb == "try":
            self._try(fds, *args)
            return True
        if verb == "await_memory":
            self._await_memory(fds[0], *args)
            return True
        reply = wire.adopt(fds[0]) if fds else None
        try:
            passed = getattr(self, f"_do_{verb}")(*args)
            if reply:
                if isinstance(passed, int):
                    wire.send_raw(reply, b"O", [passed])
                    os.close(passed)
                else:
                    wire.send_raw(reply, b"O" + (passed or b""))
        except OSError as exc:
            if reply:
                wire.refuse(reply, exc)
        finally:
            if reply:
                reply.close()
        return True

    def _try(self, fds: list[int], calls: list[tuple[int, tuple[int, ...]]]) -> None:
        """See in a child what the kernel says to system calls, one answer each: errno, or 0.

        It answers for itself: a filter that kills, or a guest that stops it, must not hold us up.
        """
        reply = wire.adopt(fds[0])
        try:
            if os.fork() == 0:
                try:
                    if self.become:
                        self.become()
                    for number, arguments in calls:
                        wire.send_raw(reply, b"%d" % libc.attempt(number, *arguments))
                finally:
                    os._exit(0)
        except OSError:
            pass  # at the processes limit: no answer is an answer
        finally:
            reply.close()

    # -- starting ---------------------------------------------------------------------------

    def _exec(
        self,
        fds: list[int],
        number: int,
        argv: list[str],
        env: dict[str, str],
        cwd: str,
        timeout_s: float,
        terminal: tuple[int, int] | None,
        leads: bool,
    ) -> None:
        reply = wire.adopt(fds[0])
        run = Exec(number, reply, time.monotonic() + timeout_s if timeout_s else 0.0)
        stage = wire.STAGE_TERMINAL
        try:
            # Two streams: standard input is the sandbox's own /dev/null.
            first = 3 - len(fds[1:])
            actions: list[Any] = [
                (os.POSIX_SPAWN_DUP2, fd, i) for i, fd in enumerate(fds[1:], first)
            ]
            if first:
                actions.append((os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0))
            if terminal is not None:
                # Opened by the leader of a new session, it becomes its controlling terminal.
                name, slave = terminals.open_for_host(reply, *terminal)
                fds.append(slave)
                actions = [(os.POSIX_SPAWN_OPEN, 0, name, os.O_RDWR, 0)]
                actions += [(os.POSIX_SPAWN_DUP2, 0, i) for i in (1, 2)]
            stage = wire.STAGE_CWD
            programs.enter(cwd)
            stage = wire.STAGE_COMMAND
            processes.set_tag(self.plan["tag_key"], run.tag)
            self._spawn(run, argv, env, actions, leads)
        except OSError as exc:
            report = wire.ExecReport(spawn_errno=exc.errno or errno.EIO, failed_stage=stage)
            wire.answer(reply, report.pack())
            reply.close()
            return
        finally:
            os.chdir("/")
            for fd in fds[1:]:
                os.close(fd)
        self.execs[number] = self.by_pid[run.pid] = run

    def _adopt(self, fds: list[int], number: int, pid: int, timeout_s: float) -> None:
        """Watch over a copy of another sandbox's process, which waits for this: see `launcher.live`."""
        run = Exec(number, wire.adopt(fds[0]), time.monotonic() + timeout_s if timeout_s else 0.0)
        run.pid = pid
        self.execs[number] = self.by_pid[pid] = run
        listener = notifications.Listener(fds[1], self.plan["netlink_sockets"], self.connect_key)
        self.adopted[fds[1]] = listener
        self.poll.register(fds[1], select.POLLIN)

    def _serve_adopted(self, fd: int, event: int) -> None:
        if event & select.POLLIN:
            self.adopted[fd].serve_one()
        else:  # nobody is under its filter any more
            self.poll.unregister(fd)
            del self.adopted[fd]
            os.close(fd)

    def _do_pid(self, number: int) -> bytes:
        """The pid of an exec's first process, as everybody here sees it."""
        run = self.execs.get(number)
        if run is None or run.report is not None:
            raise ProcessLookupError(3, "the process has ended")
        return b"%d" % run.pid

    def _do_begun(self, number: int) -> bytes:
        """Answer 1 once an exec's first process has begun its program: until then it is a copy of ours."""
        run = self.execs.get(number)
        has_begun = run is None or run.failure_fd < 0 or forked.has_begun(run.failure_fd)
        return b"%d" % has_begun

    def _spawn(
        self, run: Exec, argv: list[str], env: dict[str, str], actions: list[Any], leads: bool
    ) -> None:
        paths = programs.candidates(argv[0], env)
        self._oom_score(_PREFER_FOR_OOM)
        try:
            if self.is_full or self.become or has_children():
                started = forked.start(paths, argv, env, actions, self._prepare, leads=leads)
                run.pid, run.failure_fd = started
            else:
                run.pid = self._spawn_first(paths, argv, env, actions, leads)
        finally:
            self.is_full = False
            self._oom_score(self.own_score)

    def _prepare(self) -> None:
        """In a child that has been forked: go and be where and who its program is to be."""
        if self.apart:
            self.apart.enter()
        if self.become:
            self.become()

    def _spawn_first(
        self,
        paths: list[str],
        argv: list[str],
        env: dict[str, str],
        actions: list[Any],
        leads: bool,
    ) -> int:
        """Start what runs alone. It shares our memory until it has begun, so we go where it is to be."""
        group = 0 if leads else forked.begin_group()
        try:
            if self.apart is None:
                return programs.spawn_first(paths, argv, env, actions, group=group)
            self.apart.enter()
            try:
                return programs.spawn_first(paths, argv, env, actions, group=group)
            finally:
                self.apart.leave()
        finally:
            forked.end_group(group)

    def _await_memory(self, usage_fd: int, most: int, until: float) -> None:
        """Before an exec: wait for what the kernel has yet to give back of processes that it has killed."""
        self.is_full = True
        try:
            while int(os.pread(usage_fd, 32, 0)) > most and time.monotonic() < until:
                time.sleep(_FULL_S)
        finally:
            os.close(usage_fd)

    def _find_own_score(self) -> bytes:
        if self.oom_score_fd < 0:
            return b"0"
        try:
            self._oom_score(SPARED)
        except PermissionError:
            return b"0"
        return SPARED

    def _oom_score(self, score: bytes) -> None:
        if self.oom_score_fd >= 0:
            os.write(self.oom_score_fd, score)

    # -- ending -----------------------------------------------------------------------------

    def _reap(self) -> None:
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                break
            if found is None:
                break
            self._reap_one(found.si_pid)
        for run in list(self.execs.values()):
            if run.report is not None:
                self._finish(run)

    def _reap_one(self, pid: int) -> None:
        run = self.by_pid.pop(pid, None)
        owner = run or self.execs.get(processes.TAG_BASE - processes.tag_of(pid))
        # A zombie's own io file is closed to us; reaping it adds its counts to ours.
        if owner is not None:
            owner.dying.discard(pid)
        before = self._io_bytes()
        _, status, usage = os.wait4(pid, 0)
        after = self._io_bytes()
        read_bytes, write_bytes = after[0] - before[0], after[1] - before[1]
        if owner is None:
            return
        user, system = int(usage.ru_utime * 1e9), int(usage.ru_stime * 1e9)
        peak = usage.ru_maxrss * 1024
        if run is None:
            sums = owner.orphans
            sums[0] += user
            sums[1] += system
            sums[2] = max(sums[2], peak)
            sums[3] += read_bytes
            sums[4] += write_bytes
            return
        run.report = wire.ExecReport(
            wait_status=status,
            user_ns=user,
            system_ns=system,
            peak_memory_bytes=peak,
            io_read_bytes=read_bytes,
            io_write_bytes=write_bytes,
            duration_ns=time.monotonic_ns() - run.started_ns,
        )

    def _io_bytes(self) -> tuple[int, int]:
        """Bytes read and written through any file by PID 1 and all it has reaped: proc(5), io."""
        text = os.pread(self.io_fd, 4096, 0)
        _rchar, read, _wchar, written, _rest = text.split(None, 4)
        self.io_read_here += len(text)  # by the time of the next look, this one counts too
        return int(read) - self.io_read_here + len(text), int(written)

    def _finish(self, run: Exec) -> None:
        """Report an exec whose first process has ended; after a kill, only when its tree is gone."""
        report = run.report
        assert report is not None
        # A dying parent may still reap a child of its own, which then never comes to us.
        run.dying = {pid for pid in run.dying if processes.tag_of(pid) == run.tag}
        if run.killed_by and not run.dying:
            run.dying = self._kill_tree(run.tag)  # once more, to see that nothing is left
        if run.dying:
            return  # its last orphan brings us back here
        report.killed_by = run.killed_by
        report.timed_out = int(run.killed_by == wire.KILLED_BY_TIMEOUT)
        report.user_ns += run.orphans[0]
        report.system_ns += run.orphans[1]
        report.peak_memory_bytes = max(report.peak_memory_bytes, run.orphans[2])
        report.io_read_bytes += run.orphans[3]
        report.io_write_bytes += run.orphans[4]
        if run.failure_fd >= 0:
            never_began = forked.failure(run.failure_fd)
            if never_began:
                report = wire.ExecReport(spawn_errno=never_began, failed_stage=wire.STAGE_COMMAND)
        del self.execs[run.number]
        wire.answer(run.reply, report.pack())
        run.reply.close()

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        late = [run for run in self.execs.values() if run.deadline and now >= run.deadline]
        if late:
            self._reap()  # who has ended meanwhile was in time
        for run in late:
            run.deadline = 0.0
            if run.number in self.execs:
                self._kill(run, wire.KILLED_BY_TIMEOUT)

    def _kill(self, run: Exec, reason: int) -> None:
        run.killed_by = run.killed_by or reason
        run.dying = self._kill_tree(run.tag)
        self._reap()

    def _kill_owner(self, pid: int) -> None:
        """End what takes memory that no limit counts: its exec, or only itself where that is over."""
        run = self.execs.get(processes.TAG_BASE - processes.tag_of(pid))
        if run is not None:
            self._kill(run, wire.KILLED_BY_MEMORY_WATCHDOG)
        elif pid != os.getpid():
            processes.send(pid, signal.SIGKILL)

    def _kill_tree(self, tag: int) -> set[int]:
        """Kill every process with `tag`; returns those that are left to die."""
        return self._kill_each(lambda pid: processes.tag_of(pid) == tag, alone=len(self.execs) < 2)

    def _kill_each(self, is_wanted: Callable[[int], bool], *, alone: bool) -> set[int]:
        """Kill every process that is wanted; returns those that are left to die.

        Stopping comes first: a stopped process cannot fork (a pending signal aborts fork(2)), and
        it leaves the processor to us, who may share it with a thousand spinning ones.

        Args:
            alone: All of our user's are stopped at once; the others go on afterwards.
        """
        may_stop_all = not self.is_ruler
        alone = alone and may_stop_all
        if alone:
            processes.send(-1, signal.SIGSTOP)  # one call, atomic in the kernel
        mine: set[int] = set()
        for _ in range(_PASSES):
            fresh = [
                pid
                for pid in processes.pids()
                if pid not in mine and is_wanted(pid) and not processes.is_zombie(pid)
            ]
            if not fresh:
                break
            if may_stop_all and len(fresh) > _CROWD:
                processes.send(-1, signal.SIGSTOP)
                alone = True
            for pid in fresh:
                processes.send(pid, signal.SIGSTOP)
            mine.update(fresh)
        for pid in mine:
            processes.send(pid, signal.SIGKILL)
        if alone and not self.is_suspended:
            self._continue(mine)
        return mine

    # -- requests ---------------------------------------------------------------------------

    def _do_signal(self, number: int, signum: int, group: bool = False) -> None:
        run = self.execs.get(number)
        if run is None or run.report is not None:
            raise ProcessLookupError(3, "the process has ended")
        if group:
            processes.send_to_group(run.pid, signum)
        else:
            os.kill(run.pid, signum)

    def _do_kill(self, number: int) -> None:
        run = self.execs.get(number)
        if run is not None:
            self._kill(run, wire.KILLED_BY_REQUEST)
        else:
            self._end_rest(processes.TAG_BASE - number)

    def _end_rest(self, tag: int) -> None:
        """Kill what an ended exec has left, and reap it: until then it counts against the limits."""
        doomed, until = self._kill_tree(tag), time.monotonic() + _DYING_S
        while doomed and time.monotonic() < until:
            time.sleep(0.001)
            self._reap()
            doomed = {pid for pid in doomed if processes.tag_of(pid) == tag}

    def _do_end_all(self) -> bytes:
        """Kill every program that we may; answer with the count of all, those not reaped included."""

        def is_there(pid: int) -> bool:
            # What we have just forked has our ids still.
            return pid in self.by_pid or processes.is_program(pid)

        def is_ours(pid: int) -> bool:
            return is_there(pid) and processes.may_signal(pid)

        doomed, until = self._kill_each(is_ours, alone=False), time.monotonic() + _DYING_S
        self._reap()
        while any(map(is_ours, doomed)) and time.monotonic() < until:
            time.sleep(0.001)
            self._reap()
        return b"%d" % sum(map(is_there, processes.pids()))

    def _do_wake(self) -> None:
        """Be awake when the next request comes: that takes milliseconds after hibernation."""

    def _do_stop(self) -> None:
        """Suspend without a freezer: remember who was stopped already, stop the rest."""
        self.stopped_before = {pid for pid in processes.pids() if processes.state(pid) == "T"}
        self.is_suspended = True
        processes.send(-1, signal.SIGSTOP)

    def _do_continue(self) -> None:
        self._continue(frozenset())
        self.stopped_before, self.is_suspended = set(), False

    def _continue(self, but: Collection[int]) -> None:
        for pid in processes.pids():
            if pid not in self.stopped_before and pid not in but:
                processes.send(pid, signal.SIGCONT)

    def _do_usage(self) -> bytes:
        """cpu ns, peak bytes, processes of all that was reaped and all that runs, as text."""
        past = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s, pids = past.ru_utime + past.ru_stime, processes.pids()
        ticks = os.sysconf("SC_CLK_TCK")
        live_cpu = sum(processes.cpu_ticks(pid) for pid in pids) / ticks
        memory = sum(processes.resident_bytes(pid) for pid in pids)
        values = (int((cpu_s + live_cpu) * 1e9), past.ru_maxrss * 1024, len(pids), memory)
        return " ".join(map(str, values)).encode()

    def _do_open(self, path: str, flags: int, mode: int) -> int:
        """Open a path as the sandbox sees it. Never blocks on a FIFO; the host checks what it got."""
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK, mode)
        # A guest's symlink to /proc/self would show our own side of things: it is not theirs to read.
        if not path.startswith("/proc/") and os.fstat(fd).st_dev == os.stat("/proc").st_dev:
            os.close(fd)
            raise PermissionError(errno.EACCES, "a link into /proc", path)
        return fd

    def _do_disk(self) -> int:
        return os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def _do_dial(self, version: int, port: int) -> int:
        return dial(version, port, self.connect_key)

    def _do_mkdir(self, path: str, parents: bool) -> None:
        if parents:
            programs.make_dirs(path)
        else:
            os.mkdir(path)

    def _do_remove(self, path: str) -> None:
        info = os.lstat(path)
        if (info.st_mode & 0o170000) != 0o040000:
            os.unlink(path)
        else:
            os.rmdir(path)

    def _do_move(self, source: str, target: str) -> None:
        os.rename(source, target)

    def _do_stat(self, path: str) -> bytes:
        info = os.lstat(path)
        link = os.readlink(path) if (info.st_mode & 0o170000) == 0o120000 else ""
        head = f"{info.st_mode} {info.st_size} {info.st_mtime_ns} "
        return head.encode() + libc.path_bytes(link)


def dial(version: int, port: int, key: int = 0) -> int:
    """A connection to a server inside, on its way: a full queue there must not stop us here.

    Args:
        key: Of `notifications.guard`, where it asks about connections.
    """
    family, address = _LOOPBACK[version]
    kind = socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    sock = wire.Socket(family, kind)
    if key:
        packed = struct.pack("=H", family) + struct.pack(">H", port)
        packed += socket.inet_pton(family, address) if version == 4 else bytes(4)
        packed += bytes(8) if version == 4 else socket.inet_pton(family, address) + bytes(4)
        failed = on_behalf.connect(sock.fileno(), packed, key)
    else:
        failed = sock.connect_ex((address, port))
    if failed not in (0, errno.EINPROGRESS):
        sock.close()
        raise OSError(failed, os.strerror(failed))
    return sock.detach()


def has_children() -> bool:
    """Return whether any process may run under our uid: all of them descend from PID 1."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
