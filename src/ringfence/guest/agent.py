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

from ..launcher import wire
from ..launcher.machine_code import process_image_elf
from ..launcher.pid1 import init, processes
from ..linux import libc, namespaces, privileges, signals
from . import flows, looking, relays, room, users
from .execs import Execs, await_memory
from .files import FileRequests
from .watchdog import Watchdog

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    from ..launcher.pid1.file_locks import FileLocks
    from .groups import Groups
    from .settings import Settings
    from .tags import Tags

    class Asks(Protocol):
        """Interface of a descriptor that the loop watches besides."""

        fd: int

        def serve_one(self) -> None:
            """Called when there is something to read."""


_LONGEST_S = 86_400.0  # poll(2) takes milliseconds as an int: 24 days
_TIOCSWINSZ = 0x5414  # include/uapi/asm-generic/ioctls.h


class Agent(FileRequests):
    """The event loop of PID 1."""

    def __init__(
        self, control: wire.Socket, settings: Settings, groups: Groups | Tags, *listeners: Asks
    ) -> None:
        self.control, self.settings, self.groups = control, settings, groups
        self.signal_fd = signals.signalfd([signal.SIGCHLD])
        self.execs = Execs(groups, counts_cpu=settings["counts_cpu"])
        self.watchdog = Watchdog(
            self.execs,
            pids=settings["pids"],
            memory_bytes=settings["memory_bytes"],
            owns_root=settings["own_kernel"],
        )
        self.flows: list[flows.Flow] = []
        self.listeners = {each.fd: each for each in listeners if each.fd >= 0}
        self.file_locks: FileLocks | None = None
        if not settings["own_kernel"]:
            from ..launcher.pid1.file_locks import FileLocks

            self.file_locks = FileLocks(keeps_open=True)

    def run(self) -> None:
        """Serve until the host goes away."""
        self.groups.prepare()
        while True:
            poll = select.poll()
            for fd in (self.control.fileno(), self.signal_fd, *self.listeners):
                poll.register(fd, select.POLLIN)
            flowing: dict[int, flows.Flow] = {}
            for flow in self.flows:
                for fd, events in flow.wants().items():
                    flowing[fd] = flow
                    poll.register(fd, events)
            ready = [fd for fd, _events in poll.poll(self._timeout_ms())]
            await_memory()
            self.execs.enforce_deadlines()
            for fd in ready:
                if fd == self.signal_fd:
                    os.read(self.signal_fd, 4096)
                    self.execs.take()
                elif fd in self.listeners:
                    self.listeners[fd].serve_one()
                elif fd in flowing:
                    flowing[fd].ready(fd)
                elif not self._serve_one():
                    return
            if self.execs.has_ended and self._is_alone():
                return
            self.execs.settle()
            self.flows = [flow for flow in self.flows if flow.wants()]
            self.watchdog.look()
            for pid in self.file_locks.look() if self.file_locks else ():
                self.execs.kill_owner(pid, wire.KILLED_BY_MEMORY_WATCHDOG)

    def _is_alone(self) -> bool:
        """Return whether the host is gone: what has ended since did not end by itself."""
        poll = select.poll()
        poll.register(self.control.fileno(), 0)  # POLLHUP is always told
        return bool(poll.poll(0))

    def _timeout_ms(self) -> float | None:
        asked = [self.execs.wait_s(), self.watchdog.wait_s()]
        if self.file_locks:
            asked.append(self.file_locks.wait_s(is_busy=bool(self.execs.numbers())))
        waits = [wait for wait in asked if wait is not None]
        return max(0.0, min(*waits, _LONGEST_S)) * 1000 + 1 if waits else None

    def _serve_one(self) -> bool:
        message, fds = wire.receive(self.control)
        if message is None:
            return False
        verb, *args = message
        reply = wire.adopt(fds[0])
        if verb == "exec":
            run = self.execs.start(reply, fds[1:], *args)
            if run is not None:
                self.watchdog.put_off(run)
            if run is not None and run.terminal is not None:
                self.flows.append(run.terminal)
            if run is not None and run.relay is not None:
                self.flows += run.relay.streams.values()
            return True
        keep = False
        try:
            answer = getattr(self, f"_do_{verb}")(reply, fds[1:], *args)
            keep = answer is None
            if not keep:
                wire.answer(reply, b"O" + answer)
        except OSError as exc:
            wire.refuse(reply, exc)
        finally:
            if not keep:
                reply.close()
                for fd in fds[1:]:
                    os.close(fd)
        return True

    # -- requests: each answers with bytes, or with None where somebody else will answer later ------

    def _do_signal(
        self, _reply: wire.Socket, _fds: list[int], number: int, signum: int, group: bool
    ) -> bytes:
        run = self.execs.running.get(number)
        if run is None or run.report is not None:
            raise ProcessLookupError(errno.ESRCH, "the process has ended")
        if group:
            processes.send_to_group(run.pid, signum)
        else:
            os.kill(run.pid, signum)
        return b""

    def _do_pid(self, _reply: wire.Socket, _fds: list[int], number: int) -> bytes:
        run = self.execs.running.get(number)
        if run is None:
            raise ProcessLookupError(errno.ESRCH, "the process has ended")
        return b"%d" % run.pid

    def _do_kill(self, _reply: wire.Socket, _fds: list[int], number: int) -> bytes:
        is_over = number not in self.execs.running
        while self.execs.kill(number, wire.KILLED_BY_REQUEST) and is_over:
            time.sleep(0.001)  # of one that runs, the end is told when its tree is gone
        if is_over:
            self.execs.take()  # who has ended and was not waited for counts against the limit of processes
        return b""

    def _do_end_all(self, _reply: wire.Socket, _fds: list[int]) -> bytes:
        """Kill what all execs have started, the ended ones too; answer with how many processes are left."""
        numbers = self.execs.numbers()
        for number in numbers:
            self.execs.kill_tree(number)
        self.execs.reap()
        return b"%d" % sum(len(self.groups.members(number)) for number in numbers)

    def _do_resize(
        self, _reply: wire.Socket, _fds: list[int], number: int, rows: int, columns: int
    ) -> bytes:
        import fcntl

        run = self.execs.running.get(number)
        if run is not None and run.terminal is not None and run.terminal.is_open:
            size = struct.pack("HHHH", rows, columns, 0, 0)
            fcntl.ioctl(run.terminal.guest, _TIOCSWINSZ, size)
        return b""

    def _do_settle(self, _reply: wire.Socket, _fds: list[int], *going_on: int) -> bytes:
        """Prepare the guest for saving: no descriptor in it may depend on the host's.

        Args:
            going_on: Execs that are saved with it. Each waits for somebody to `join` it.

        Raises:
            OSError: EBUSY, with the holders of a host stream, file or connection.
        """
        others = [flow for flow in self.flows if not isinstance(flow, relays.OneWay)]
        busy = ["an open file or connection"] if others else []
        # By the request's command: the exec may not have begun yet.
        for run in self.execs.running.values():
            if run.relay is None or run.number not in going_on:
                busy.append(f"exec {run.number} ({run.command})")
            elif waiting := run.relay.waiting():
                busy.append(f"exec {run.number} ({run.command}) with {waiting}")
        busy += [f"{looking.name_of(pid)} (pid {pid})" for pid in looking.holders_of_the_hosts()]
        if busy:
            raise OSError(errno.EBUSY, ", ".join(busy))
        for run in self.execs.running.values():
            assert run.relay is not None
            run.relay.let_go()
            run.reply.close()
            run.is_apart = True
        for flow in self.flows:
            if flow.wants():  # of an exec that has ended: nobody reads what it left behind
                flow.close()
        self.flows = []
        if self.settings["place"]:
            leave(self.settings["place"])
        return b""

    def _do_join(
        self, reply: wire.Socket, fds: list[int], number: int, streams: tuple[int, ...]
    ) -> None:
        """Tell of the end of an exec that was saved, and go on with its streams.

        Args:
            fds: A socket for its end, and the host's ends of `streams`.
        """
        run = self.execs.running.get(number)
        if run is None or run.relay is None or not run.is_apart:
            raise ProcessLookupError(errno.ESRCH, "no such exec was saved")
        run.reply, run.is_apart = wire.adopt(fds[0]), False
        self.flows += run.relay.join(dict(zip(streams, fds[1:], strict=True)))
        wire.answer(reply, b"O")
        reply.close()

    def _do_wake(self, _reply: wire.Socket, _fds: list[int], hostname: str) -> bytes:
        """After a restore: a name of its own. Answers with the number of the last exec before."""
        namespaces.sethostname(hostname)
        looking.renew_machine_id()
        return b"%d" % self.execs.last_number

    def _do_throttled(self, _reply: wire.Socket, _fds: list[int]) -> bytes:
        """Believe no count of processor time from now on: the host keeps the guest waiting."""
        self.execs.counts_cpu = False
        return b""

    def _do_usage(self, _reply: wire.Socket, _fds: list[int]) -> bytes:
        """Processes, bytes in memory; bytes and inodes in the root, as text."""
        self.watchdog.settle()
        root = room.usage()
        return b"%d %d %d %d" % (
            self.groups.count(),
            self.groups.memory_bytes(),
            (root.f_blocks - root.f_bfree) * root.f_frsize,
            root.f_files - root.f_ffree,
        )

    def _do_bounds(self, _reply: wire.Socket, _fds: list[int]) -> bytes:
        """Read the guest's limits from its kernel: processes, open files, bytes and inodes."""
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
        if users.fork() == 0:
            try:
                users.keep_only([reply.fileno()])
                users.become_for_good(self.settings["uid"])()
                for number, arguments in calls:
                    wire.answer(reply, b"%d" % libc.attempt(number, *arguments))
            finally:
                os._exit(0)
        reply.close()

    def _do_dial(self, reply: wire.Socket, fds: list[int], version: int, port: int) -> None:
        """Join a socket of the host's with a connection to a server on the guest's loopback."""
        host = fds[0]
        sock = wire.adopt(self._dial(version, port))

        def begin(guest: int) -> None:
            self.flows.append(flows.Pair(guest, host, ends_at_once=False))

        self.flows.append(flows.Dial(sock, reply, host, begin))

    def _dial(self, version: int, port: int) -> int:
        """A connection to a server inside, on its way."""
        return init.dial(version, port)

    def _do_tree(self, reply: wire.Socket, fds: list[int], operation: str, args: list[str]) -> None:
        """Run a tree operation in a child as the guest's user: it may take long, and may be killed."""

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
        if users.fork() == 0:
            try:
                users.keep_only([reply.fileno(), *fds])
                become()
                work()
                wire.answer(reply, b"O")
            except OSError as exc:
                wire.refuse(reply, exc)
            except Exception as exc:  # noqa: BLE001  the host must hear of it, whatever it is
                wire.refuse(reply, OSError(errno.EPROTO, repr(exc)))
            finally:
                os._exit(0)
        reply.close()
        for fd in fds:
            os.close(fd)


def leave(place: str) -> None:
    """Be a program that can be saved: gVisor saves none whose file is gone.

    Args:
        place: The directory that it came in.
    """
    if not os.readlink("/proc/self/exe").startswith(f"{place}/"):
        return
    fd = os.open(_python(place), os.O_RDONLY | os.O_CLOEXEC)
    try:
        privileges.prctl(privileges.PR_SET_MM, privileges.PR_SET_MM_EXE_FILE, fd)
    finally:
        os.close(fd)
    libc.munmap(process_image_elf.BASE, process_image_elf.MOST_BYTES)


def _python(place: str) -> str:
    """Find the interpreter behind the process image: the first executable that is mapped."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            rights, path = line.split(None, 2)[1], line[line.find("/") :].rstrip("\n")
            if "x" in rights and path.startswith("/") and not path.startswith(f"{place}/"):
                return path
    raise FileNotFoundError("no program is mapped")
