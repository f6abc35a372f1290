"""The agent of a guest with a kernel of its own: its PID 1, which starts processes and ends whole trees.

It gets the launcher's requests on its standard input, a socket that descriptors travel in by, and
answers each on the socket that came with it. When the host's end closes, it exits, and its kernel
kills all that is left.
"""

from __future__ import annotations

import _signal as signal
import _struct as struct
import errno
import os
import resource
import select
import time

from ..launcher import forked, init, programs, wire
from ..linux import libc, namespaces, signals
from . import flows, looking, program, room, users
from .files import FileRequests
from .groups import Groups
from .tags import Tags

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .settings import Settings

_CROWD = 64  # so many processes are stopped together before they are killed
_PASSES = 100
_LOOK_S = 0.01  # how soon to look again whether a killed tree is gone
_LOOKS = 20
_WATCHDOG_S = 0.05
_TIOCSWINSZ = 0x5414  # include/uapi/asm-generic/ioctls.h


class Exec:
    """One running process tree."""

    def __init__(
        self, number: int, command: str, uid: int, reply: wire.Socket, deadline: float
    ) -> None:
        self.number, self.command, self.uid = number, command, uid
        self.reply, self.deadline = reply, deadline
        self.pid = 0
        self.failure_fd = -1  # of `forked.start`
        self.started_ns = time.monotonic_ns()
        self.report: wire.ExecReport | None = None  # set once the first process has ended
        self.killed_by = wire.KILLED_BY_NOBODY
        self.terminal: flows.Pair | None = None


class Agent(FileRequests):
    """The event loop of PID 1."""

    def __init__(self, control: wire.Socket, settings: Settings, groups: Groups | Tags) -> None:
        self.control, self.settings, self.groups = control, settings, groups
        self.signal_fd = signals.signalfd([signal.SIGCHLD])
        self.execs: dict[int, Exec] = {}  # by number
        self.by_pid: dict[int, Exec] = {}
        self.left: set[int] = set()  # numbers of ended execs that may have left processes behind
        self.flows: list[flows.Flow] = []
        self.next_look = 0.0  # of the memory watchdog
        self.last_number = 0  # of an exec

    def run(self) -> None:
        """Serve until the host goes away."""
        while True:
            poll = select.poll()
            for fd in (self.control.fileno(), self.signal_fd):
                poll.register(fd, select.POLLIN)
            flowing: dict[int, flows.Flow] = {}
            for flow in self.flows:
                for fd, events in flow.wants().items():
                    flowing[fd] = flow
                    poll.register(fd, events)
            ready = [fd for fd, _events in poll.poll(self._timeout_ms())]
            self._enforce_deadlines()
            for fd in ready:
                if fd == self.signal_fd:
                    os.read(self.signal_fd, 4096)
                elif fd in flowing:
                    flowing[fd].ready(fd)
                elif not self._serve_one():
                    return
            self._reap()
            self.flows = [flow for flow in self.flows if flow.wants()]
            if self._is_watching:
                self._watch()

    def _timeout_ms(self) -> float | None:
        now = time.monotonic()
        waits = [run.deadline - now for run in self.execs.values() if run.deadline]
        if any(run.killed_by for run in self.execs.values()):
            waits.append(_LOOK_S)
        if self._is_watching:
            waits.append(max(_LOOK_S, self.next_look - now))
        return max(0.0, min(waits)) * 1000 + 1 if waits else None

    @property
    def _is_watching(self) -> bool:
        return bool(self.settings["memory_bytes"] and (self.execs or self.left))

    def _serve_one(self) -> bool:
        message, fds = wire.receive(self.control)
        if message is None:
            return False
        verb, *args = message
        reply = wire.adopt(fds[0])
        if verb == "exec":
            self._exec(reply, fds[1:], *args)
            return True
        keep = False
        try:
            answer = getattr(self, f"_do_{verb}")(reply, fds[1:], *args)
            keep = answer is None
            if not keep:
                init.answer(reply, b"O" + answer)
        except OSError as exc:
            init.refuse(reply, exc)
        finally:
            if not keep:
                reply.close()
                for fd in fds[1:]:
                    os.close(fd)
        return True

    # -- starting ---------------------------------------------------------------------------

    def _exec(
        self,
        reply: wire.Socket,
        streams: list[int],
        number: int,
        argv: list[str],
        env: dict[str, str],
        cwd: str,
        timeout_s: float,
        terminal: tuple[int, int] | None,
        uid: int,
    ) -> None:
        self.last_number = number
        deadline = time.monotonic() + timeout_s if timeout_s else 0.0
        run = Exec(number, argv[0], uid, reply, deadline)
        stage, opened = wire.STAGE_TERMINAL, list(streams)
        try:
            # Two streams: standard input is the guest's own /dev/null.
            first = 3 - len(streams)
            actions: list[Any] = [
                (os.POSIX_SPAWN_DUP2, fd, i) for i, fd in enumerate(streams, first)
            ]
            if first:
                actions.append((os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0))
            if terminal is not None:
                name = self._open_terminal(run, opened, *terminal)
                # Opened by the leader of a new session, it becomes its controlling terminal.
                actions = [(os.POSIX_SPAWN_OPEN, 0, name, os.O_RDWR, 0)]
                actions += [(os.POSIX_SPAWN_DUP2, 0, i) for i in (1, 2)]
            stage = wire.STAGE_CWD
            with users.As(uid):
                os.chdir(cwd)
            stage = wire.STAGE_COMMAND
            self.groups.enter(number)
            try:
                self._spawn(run, argv, env, actions)
            finally:
                self.groups.leave()
        except OSError as exc:
            report = wire.ExecReport(spawn_errno=exc.errno or errno.EIO, failed_stage=stage)
            init.answer(reply, report.pack())
            reply.close()
            self.groups.remove(number)
            if run.terminal:
                run.terminal.close()
            return
        finally:
            os.chdir("/")
            for fd in opened:
                os.close(fd)
        if run.terminal:
            self.flows.append(run.terminal)
        self.execs[number] = self.by_pid[run.pid] = run

    def _open_terminal(self, run: Exec, opened: list[int], rows: int, columns: int) -> str:
        """A new pseudo-terminal, its master tied to the socket that came along; the slave's name.

        A slave of ours is noted in `opened`, to be closed once the process has its own: a master
        without any slave reads as hung up.
        """
        with users.As(run.uid):
            master, name = init.new_terminal("/dev/ptmx", rows, columns)
            run.terminal = flows.Pair(master, opened.pop(), ends_at_once=True)
            opened.append(os.open(name, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
        return name

    def _spawn(self, run: Exec, argv: list[str], env: dict[str, str], actions: list[Any]) -> None:
        paths = programs.candidates(argv[0], env)
        if not users.is_root:  # there is one user, and nobody to become
            run.pid, run.failure_fd = forked.start(paths, argv, env, actions, users.prefer_for_oom)
            return
        if init.has_children():
            # Who runs already as that user could stop a child of ours before it has begun.
            become = users.become_for_good(run.uid)
            run.pid, run.failure_fd = forked.start(paths, argv, env, actions, become)
            return
        os.setresgid(run.uid, 0, -1)
        os.setresuid(run.uid, 0, -1)
        try:
            run.pid = programs.spawn_first(paths, argv, env, actions, as_real_user=True)
        finally:
            users.become_root()

    # -- ending -----------------------------------------------------------------------------

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            run = self.by_pid.pop(pid, None)
            if run is not None:
                run.report = wire.ExecReport(
                    wait_status=status,
                    peak_memory_bytes=usage.ru_maxrss * 1024,
                    io_read_bytes=wire.UNKNOWN,
                    io_write_bytes=wire.UNKNOWN,
                    duration_ns=time.monotonic_ns() - run.started_ns,
                )
        for run in list(self.execs.values()):
            if run.report is not None:
                self._finish(run)
        self.left = {number for number in self.left if not self.groups.remove(number)}

    def _finish(self, run: Exec) -> None:
        """Report an exec whose first process has ended; after a kill, only when its tree is gone."""
        report = run.report
        assert report is not None
        if run.killed_by and self._kill_tree(run.number):
            return  # the loop comes back soon
        if run.terminal and not run.killed_by and not run.terminal.settle():
            return  # what it has printed comes before its end: the loop comes back when there is room
        report.killed_by = run.killed_by
        report.timed_out = int(run.killed_by == wire.KILLED_BY_TIMEOUT)
        report.user_ns = report.system_ns = wire.UNKNOWN
        if self.settings["counts_cpu"]:
            report.user_ns, report.system_ns = self.groups.cpu_ns(run.number)
        if run.failure_fd >= 0:
            never_began = forked.failure(run.failure_fd)
            if never_began:
                report = wire.ExecReport(spawn_errno=never_began, failed_stage=wire.STAGE_COMMAND)
        del self.execs[run.number]
        if not self.groups.remove(run.number):
            self.left.add(run.number)
        init.answer(run.reply, report.pack())
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
        self._kill_tree(run.number)

    def _kill_tree(self, number: int) -> bool:
        """Kill every process of one exec; whether any may be left that has not died yet."""
        seen: set[int] = set()
        stopped = False
        for _ in range(_PASSES):
            fresh = [pid for pid in self.groups.members(number) if pid not in seen]
            if not fresh:
                break
            if len(fresh) > _CROWD and not stopped:
                # A stopped process cannot fork, and it leaves the processor to us.
                stopped = _signal(-1, signal.SIGSTOP)
                continue
            for pid in fresh:
                _signal(pid, signal.SIGKILL)
            seen.update(fresh)
        if stopped:
            _signal(-1, signal.SIGCONT)
        return bool(seen)

    def _watch(self) -> None:
        """What gVisor does not bound itself, or not exactly: sampled, in front of the host's cgroup."""
        now = time.monotonic()
        if now < self.next_look:
            return
        self.next_look = now + _WATCHDOG_S
        self._watch_processes()
        self._watch_memory()

    def _watch_processes(self) -> bool:
        """Forks in quick succession get past gVisor's own limit: the newest processes die of it."""
        excess = self.groups.count() - self.settings["pids"]
        if excess <= 0:
            return False
        numbers = [*self.execs, *self.left]
        everybody = sorted(pid for number in numbers for pid in self.groups.members(number))
        for pid in everybody[-excess:]:
            _signal(pid, signal.SIGKILL)
        return True

    def _watch_memory(self) -> None:
        usage = os.statvfs("/")
        used = self.groups.memory_bytes() + (usage.f_blocks - usage.f_bfree) * usage.f_frsize
        if used <= self.settings["memory_bytes"]:
            return
        numbers = [*self.execs, *self.left]
        worst = max(
            numbers, key=lambda number: sum(map(looking.resident, self.groups.members(number)))
        )
        run = self.execs.get(worst)
        if run is not None:
            self._kill(run, wire.KILLED_BY_MEMORY_WATCHDOG)
        else:
            self._kill_tree(worst)

    # -- requests: each answers with bytes, or with None where somebody else will answer later ------

    def _do_signal(
        self, _reply: wire.Socket, _fds: list[int], number: int, signum: int, group: bool
    ) -> bytes:
        run = self.execs.get(number)
        if run is None or run.report is not None:
            raise ProcessLookupError(errno.ESRCH, "the process has ended")
        os.kill(-run.pid if group else run.pid, signum)  # it leads a session, so also a group
        return b""

    def _do_kill(self, _reply: wire.Socket, _fds: list[int], number: int) -> bytes:
        run = self.execs.get(number)
        if run is not None:
            self._kill(run, wire.KILLED_BY_REQUEST)
        else:
            while self._kill_tree(number):  # what it left running in the background
                time.sleep(0.001)
        return b""

    def _do_resize(
        self, _reply: wire.Socket, _fds: list[int], number: int, rows: int, columns: int
    ) -> bytes:
        import fcntl

        run = self.execs.get(number)
        if run is not None and run.terminal is not None and run.terminal.is_open:
            size = struct.pack("HHHH", rows, columns, 0, 0)
            fcntl.ioctl(run.terminal.guest, _TIOCSWINSZ, size)
        return b""

    def _do_settle(self, _reply: wire.Socket, _fds: list[int]) -> bytes:
        """Whether all of the guest can be written down: nothing of it may hang on the host's.

        Raises:
            OSError: EBUSY, with who holds a stream, a file or a connection of the host's.
        """
        busy = ["an open file or connection"] if self.flows else []
        # By what was asked for: it may not have begun yet.
        busy += [f"exec {run.number} ({run.command})" for run in self.execs.values()]
        busy += [f"{looking.name_of(pid)} (pid {pid})" for pid in looking.holders_of_the_hosts()]
        if busy:
            raise OSError(errno.EBUSY, ", ".join(busy))
        if self.settings["place"]:
            program.leave(self.settings["place"])
        return b""

    def _do_wake(self, _reply: wire.Socket, _fds: list[int], hostname: str) -> bytes:
        """After a restore: a name of its own. Answers with the number of the last exec before."""
        namespaces.sethostname(hostname)
        looking.renew_machine_id()
        return b"%d" % self.last_number

    def _do_usage(self, _reply: wire.Socket, _fds: list[int]) -> bytes:
        """Processes, bytes in memory; bytes and inodes in the root, as text."""
        for _ in range(_LOOKS):
            if not self.settings["memory_bytes"] or not self._watch_processes():
                break
            time.sleep(_LOOK_S)
            self._reap()
        root = room.usage()
        return b"%d %d %d %d" % (
            self.groups.count(),
            self.groups.memory_bytes(),
            (root.f_blocks - root.f_bfree) * root.f_frsize,
            root.f_files - root.f_ffree,
        )

    def _do_bounds(self, _reply: wire.Socket, _fds: list[int]) -> bytes:
        """What holds the guest, as its kernel has it: processes, open files, bytes and inodes."""
        root = room.usage()
        return b"%d %d %d %d" % (
            self.groups.most(),
            resource.getrlimit(resource.RLIMIT_NOFILE)[1],
            root.f_blocks * root.f_frsize,
            root.f_files,
        )

    def _do_try(
        self, reply: wire.Socket, _fds: list[int], calls: list[tuple[int, tuple[int, ...]]]
    ) -> None:
        """See in a child what the kernel says to system calls, one answer each: errno, or 0."""
        if os.fork() == 0:
            try:
                users.keep_only([reply.fileno()])
                users.become_for_good(self.settings["uid"])()
                for number, arguments in calls:
                    init.answer(reply, b"%d" % libc.attempt(number, *arguments))
            finally:
                os._exit(0)
        reply.close()

    def _do_dial(self, reply: wire.Socket, fds: list[int], version: int, port: int) -> None:
        """Join a socket of the host's with a connection to a server on the guest's loopback."""
        host = fds[0]
        sock = wire.adopt(init.dial(version, port))

        def begin(guest: int) -> None:
            self.flows.append(flows.Pair(guest, host, ends_at_once=False))

        self.flows.append(flows.Dial(sock, reply, begin))

    def _do_tree(self, reply: wire.Socket, fds: list[int], operation: str, args: list[str]) -> None:
        """One operation on a tree, by a child of the guest's user: it may take long, and may be killed."""

        def work() -> None:
            from . import trees

            trees.OPERATIONS[operation](*fds, *args)

        self._by_child(reply, fds, users.become_for_good(self.settings["uid"]), work)

    def _by_child(
        self,
        reply: wire.Socket,
        fds: list[int],
        become: Callable[[], None],
        work: Callable[[], None],
    ) -> None:
        """Let a child do it, which has nothing of ours but these descriptors, and answers itself."""
        if os.fork() == 0:
            try:
                users.keep_only([reply.fileno(), *fds])
                become()
                work()
                init.answer(reply, b"O")
            except OSError as exc:
                init.refuse(reply, exc)
            except Exception as exc:  # noqa: BLE001  the host must hear of it, whatever it is
                init.refuse(reply, OSError(errno.EPROTO, repr(exc)))
            finally:
                os._exit(0)
        reply.close()
        for fd in fds:
            os.close(fd)


def _signal(pid: int, signum: int) -> bool:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return False
    return True
