"""Steps of one copy: into a sandbox, locked down as its programs are, and only then the source's own code.

Until the last filter is in place nothing of the source runs, no path that it named is opened with rights
of the host's, and no thread goes on before all are locked down. See decision 192 for the order.
"""

from __future__ import annotations

import _struct as struct
import posix as os
import resource

from ...linux import privileges, seccomp
from ..pid1 import notifications
from . import steps
from .source import DO_NOT_FORK, resumed
from .template import CLOSE_RANGE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ..plan import Plan
    from .sockets import Server
    from .source import Descriptor, Source, State
    from .template import Template

# arch/x86/include/generated/uapi/asm/unistd_64.h
_READ, _WRITE, _OPEN, _CLOSE, _LSEEK, _MUNMAP, _MADVISE, _SETITIMER = 0, 1, 2, 3, 8, 11, 28, 38
_SENDMSG, _EXIT_GROUP, _WAIT4, _FCNTL, _CHDIR, _SETSID, _SETGROUPS = 46, 231, 61, 72, 80, 112, 116
_SETRESUID, _SETRESGID, _CAPSET, _SIGQUEUE, _PRCTL, _ARCH_PRCTL = 117, 119, 126, 129, 157, 158
_SOCKET, _BIND, _LISTEN, _SOCKETPAIR, _SETSOCKOPT = 41, 49, 50, 53, 54
_SET_TID_ADDRESS, _EPOLL_CTL, _SET_ROBUST_LIST, _EVENTFD, _EPOLL_CREATE = 218, 233, 273, 290, 291
_DUP3, _PIPE2, _TGSIGQUEUE, _PRLIMIT, _SECCOMP, _RSEQ, _CLONE3 = 292, 293, 297, 302, 317, 334, 435
_SETNS, _OPENAT2 = 308, 437
_LANDLOCK_RULESET, _LANDLOCK_RULE, _LANDLOCK_RESTRICT = 444, 445, 446
_F_SETFL = 4
_CLONE_VM, _CLONE_VFORK, _SIGCHLD, _WALL = 0x100, 0x4000, 17, 0x40000000
# VM, FS, FILES, SIGHAND, THREAD, SYSVSEM, SETTLS, CHILD_CLEARTID: as pthread_create(3) asks for.
_THREAD = 0x100 | 0x200 | 0x400 | 0x800 | 0x10000 | 0x40000 | 0x80000 | 0x200000
_SET_FS, _SET_GS = 0x1002, 0x1001  # arch_prctl(2)
_PR_SET_MM_MAP = 14
_NEW_LISTENER, _TSYNC, _TSYNC_ESRCH, _KILLABLE = 8, 1, 16, 32
_NO_LINKS = 0x04 | 0x02  # openat2(2): RESOLVE_NO_SYMLINKS, RESOLVE_NO_MAGICLINKS
_AT_FDCWD = (1 << 64) - 100
_CLOEXEC, _STATUS = os.O_CLOEXEC, os.O_APPEND | os.O_NONBLOCK
_NEVER_AGAIN = os.O_CREAT | os.O_EXCL | os.O_TRUNC | os.O_NOCTTY | os.O_CLOEXEC
_RIGHTS = struct.Struct("=QiiI4x")  # struct cmsghdr with one descriptor
_LAST_CAPABILITY = "/proc/sys/kernel/cap_last_cap"


class Place:
    """Where a copy goes, and what the descriptors are that come with it, in this order.

    Attributes:
        cgroups: So many to write "0" to.
        namespaces: Flags of setns(2), one for each.
        streams: So many streams; the report's socket comes last.
        tag: Of its exec: see `processes.set_tag`.
        taken: Ids of threads, inside, of all copies that go there.
    """

    def __init__(
        self,
        plan: Plan,
        cgroups: int,
        namespaces: list[int],
        streams: int,
        tag: int,
        taken: list[int],
    ) -> None:
        self.plan, self.cgroups, self.namespaces = plan, cgroups, namespaces
        self.streams, self.tag, self.taken = streams, tag, taken


def program(template: Template, place: Place) -> tuple[bytes, bytes]:
    """The pages with secrets and the steps of one copy."""
    return _Copy(template, place).build()


class _Copy:
    def __init__(self, template: Template, place: Place) -> None:
        self.template, self.place, self.plan = template, place, place.plan
        self.source: Source = template.source
        self.steps = steps.Steps(template.program)
        self.secrets = bytearray()
        self.others = self.source.threads[1:]
        # Descriptors that came along, beyond the source's own numbers. The first of them was the program.
        self.parked = template.first + 1
        first = place.cgroups + len(place.namespaces)
        self.stream = [self.parked + first + i for i in range(place.streams)]
        self.report = self.parked + first + place.streams
        self.free = self.report + 1
        self.used: set[int] = set()
        count = struct.pack("=Q", len(self.source.threads))
        self.barriers: Callable[[], int] = lambda: self.steps.put(count)

    def build(self) -> tuple[bytes, bytes]:
        self._go_in()
        self._first_thread()
        for number, state in enumerate(self.others, 1):
            self.steps.begin(f"thread {number}")
            self._own_state(state)
            self._drop_rights()
            self._wait(self.locked)
            self._wait(self.filtered)
            self._go_on(state)
        return bytes(self.secrets), self.steps.content()

    # -- into the sandbox -----------------------------------------------------------------------

    def _go_in(self) -> None:
        """Two processes that share the template's memory: one enters, the other is born inside.

        The second ends once the copy is made, so that this becomes PID 1's.
        """
        add, exactly, place = self.steps.add, self.steps.exactly, self.place
        self.steps.begin("enter")
        add(steps.STATUS, 1 + self.report - self.parked)
        zero = self.steps.put(b"0")
        for fd in range(1, 1 + place.cgroups):
            exactly(1, _WRITE, fd, zero, 1)
        for fd, flags in enumerate(place.namespaces, 1 + place.cgroups):
            add(_SETNS, fd, flags)
        inside = self._id(_unused([1, *place.taken]))
        clone = struct.pack("=11Q", _CLONE_VM | _CLONE_VFORK, *[0] * 7, inside, 1, 0)
        add(_CLONE3, self.steps.put(clone), 88, expect=steps.BRANCH, value=steps.Label("inside"))
        add(_WAIT4, (1 << 64) - 1, 0, _WALL, 0, expect=steps.ANYTHING)
        add(_EXIT_GROUP, 0)
        self.steps.begin("inside")
        inside = self._id(self.source.threads[0].id_inside)
        clone = struct.pack("=11Q", 0, 0, 0, 0, _SIGCHLD, 0, 0, 0, inside, 1, 0)
        add(_CLONE3, self.steps.put(clone), 88, expect=steps.BRANCH, value=steps.Label("copy"))
        add(_EXIT_GROUP, 0)

    def _id(self, number: int) -> int:
        return self.steps.put(struct.pack("=i", number))

    # -- lock-down ------------------------------------------------------------------------------

    def _first_thread(self) -> None:
        add, first = self.steps.add, self.source.threads[0]
        self.locked, self.filtered = self.barriers(), self.barriers()
        self.steps.begin("copy")
        for number in range(1, 2 + self.report - self.parked):
            self.steps.exactly(
                self.parked + number - 1, _DUP3, number, self.parked + number - 1, _CLOEXEC
            )
        add(steps.STATUS, self.report)
        add(CLOSE_RANGE, 0, self.template.first)
        add(_SETSID)
        self._become_user()
        self._restrict_files()
        self._start_threads()
        self._own_state(first)
        self._drop_rights()
        self._wait(self.locked)
        self._open_files()
        self._limit()
        for start, end in self.source.not_inherited:
            add(_MADVISE, start, end - start, DO_NOT_FORK)
        add(_CHDIR, self.steps.text(self.source.cwd))
        for which, value in self.source.timers.items():
            add(_SETITIMER, which, self.steps.put(value), 0)
        for info in self.source.pending:
            self._queue(_SIGQUEUE, info, first.id_inside)
        self._report()
        self._filter()
        self._wait(self.filtered)
        self._go_on(first)

    def _limit(self) -> None:
        limits = [each for each in self.plan["rlimits"] if each[0] != _RLIMIT_RTTIME]
        for which, soft, hard in [*limits, (_RLIMIT_RTTIME, self.place.tag, self.place.tag)]:
            most = resource.getrlimit(which)[1] & _INFINITE
            hard = min(hard & _INFINITE, most)
            soft = min(soft & _INFINITE, hard)
            value = struct.pack("=QQ", soft, hard)
            self.steps.add(_PRLIMIT, 0, which, self.steps.put(value), 0)

    def _become_user(self) -> None:
        """As `lockdown.bound` and `lockdown.become_user`, and the exe that the source has."""
        add, plan = self.steps.add, self.plan
        add(_PRCTL, privileges.PR_CAP_AMBIENT, privileges.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
        with open(_LAST_CAPABILITY, "rb") as file:
            last = int(file.read())
        for capability in range(last + 1):
            add(_PRCTL, privileges.PR_CAPBSET_DROP, capability, 0, 0, 0)
        add(_PRCTL, privileges.PR_SET_SECUREBITS, privileges.SECUREBITS_LOCKED, 0, 0, 0)
        if not plan["deny_setgroups"]:
            add(_SETGROUPS, 0, 0)
        add(_SETRESGID, *[plan["gid"]] * 3)
        add(_SETRESUID, *[plan["uid"]] * 3)
        how = self.steps.put(struct.pack("=QQQ", os.O_RDONLY | _CLOEXEC, 0, _NO_LINKS))
        self.steps.exactly(0, _OPENAT2, _AT_FDCWD, self.steps.text(self.source.exe), how, 24)
        auxv = self.steps.put(self.source.auxv)
        codes, data, brk, rest = (
            self.source.memory_map[:2],
            self.source.memory_map[2:4],
            self.source.memory_map[4],
            self.source.memory_map[5:],
        )
        # struct prctl_mm_map: the last member is the descriptor of the program.
        words = (*codes, *data, brk, self.source.brk, *rest, auxv, len(self.source.auxv))
        memory = self.steps.put(struct.pack("=12QII", *words, 0))
        add(_PRCTL, privileges.PR_SET_MM, _PR_SET_MM_MAP, memory, 104, 0)
        add(_CLOSE, 0)

    def _restrict_files(self) -> None:
        """As the end of `lockdown.seal`, but for the filters."""
        add, exactly = self.steps.add, self.steps.exactly
        add(_PRCTL, privileges.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if self.plan["landlock"] is None:
            return
        handled_fs, handled_net, scoped, abi, rules = self.plan["landlock"]
        words = [handled_fs] + ([handled_net] if abi >= 4 else []) + ([scoped] if abi >= 6 else [])
        attributes = self.steps.put(struct.pack(f"={len(words)}Q", *words))
        exactly(0, _LANDLOCK_RULESET, attributes, 8 * len(words), 0)
        for path, access in rules:
            exactly(1, _OPEN, self.steps.text(path), os.O_PATH | _CLOEXEC, 0)
            add(_LANDLOCK_RULE, 0, 1, self.steps.put(struct.pack("=Qi", access, 1)), 0)
            add(_CLOSE, 1)
        add(_LANDLOCK_RESTRICT, 0, 0)
        add(_CLOSE, 0)

    def _start_threads(self) -> None:
        for number, state in enumerate(self.others, 1):
            registers, inside = state.registers, self._id(state.id_inside)
            words = (_THREAD, 0, state.clear_tid, 0, 0, 0, 0, registers["fs_base"], inside, 1, 0)
            clone = self.steps.put(struct.pack("=11Q", *words))
            there = steps.Label(f"thread {number}")
            self.steps.add(_CLONE3, clone, 88, expect=steps.BRANCH, value=there)

    def _own_state(self, state: State) -> None:
        add = self.steps.add
        add(_ARCH_PRCTL, _SET_FS, state.registers["fs_base"])
        add(_ARCH_PRCTL, _SET_GS, state.registers["gs_base"])
        add(_SET_TID_ADDRESS, state.clear_tid)
        add(_SET_ROBUST_LIST, *state.robust, expect=steps.ANYTHING)
        add(_PRCTL, privileges.PR_SET_NAME, self.steps.text(state.name), 0, 0, 0)
        for info in state.pending:
            self._queue(_TGSIGQUEUE, info, self.source.threads[0].id_inside, state.id_inside)

    def _queue(self, call: int, info: bytes, *ids: int) -> None:
        (number,) = struct.unpack_from("=i", info)
        self.steps.add(call, *ids, number, self.steps.put(info), expect=steps.ANYTHING)

    def _drop_rights(self) -> None:
        header = self.steps.put(struct.pack("=Ii", 0x20080522, 0))
        self.steps.add(_CAPSET, header, self.steps.put(bytes(24)))

    def _wait(self, barrier: int) -> None:
        if self.others:
            self.steps.add(steps.BARRIER, barrier)

    # -- descriptors ----------------------------------------------------------------------------

    def _open_files(self) -> None:
        """Under the sandbox's own rules already: a name that leads elsewhere leads a program nowhere."""
        ends: dict[int, tuple[int, int]] = {}
        for inode, content in self.source.pipes.items():
            self.steps.add(_PIPE2, self.steps.put(bytes(8)), 0)
            ends[inode] = self._park_two()
            if content:
                at = self.steps.put(content)
                self.steps.exactly(len(content), _WRITE, ends[inode][1], at, len(content))
        for kind, one, other in self.source.pairs:
            self.steps.add(_SOCKETPAIR, 1, kind, 0, self.steps.put(bytes(8)))
            ends[one] = self._park_two()
            ends[other] = ends[one][::-1]
        for number, each in sorted(self.source.descriptors.items()):
            self._place(number, each, ends)
            self.used.add(number)
        for number, each in self.source.descriptors.items():
            for watched, events, data in each.watched if each.same_as < 0 else ():
                event = self.steps.put(struct.pack("=IQ", events, data))
                self.steps.add(_EPOLL_CTL, number, 1, watched, event)

    def _park_two(self) -> tuple[int, int]:
        """Move two new descriptors, of the lowest numbers, out of the way."""
        there = self.free, self.free + 1
        for fd, place in zip(self._lowest(2), there, strict=True):
            self.steps.exactly(place, _DUP3, fd, place, _CLOEXEC)
            self.steps.add(_CLOSE, fd)
        self.free += 2
        return there

    def _place(self, number: int, each: Descriptor, ends: dict[int, tuple[int, int]]) -> None:
        on_exec = each.flags & _CLOEXEC
        status = each.flags & _STATUS
        if each.same_as >= 0:
            self.steps.exactly(number, _DUP3, each.same_as, number, on_exec)
            return
        if each.kind in ("given", "pipe", "socket"):
            if each.kind == "given":
                there = self.stream[each.given]
            else:  # a socket is open for both
                there = ends[each.pipe][(each.flags & 3) == os.O_WRONLY]
            self.steps.exactly(number, _DUP3, there, number, on_exec)
            if status:
                self.steps.add(_FCNTL, number, _F_SETFL, status)
            return
        (low,) = self._lowest(1)
        if each.kind == "event":
            flags = status & os.O_NONBLOCK | each.is_semaphore
            self.steps.exactly(low, _EVENTFD, each.count, flags)
        elif each.server is not None:
            self._listen(low, each.server, status & os.O_NONBLOCK)
        elif each.kind == "epoll":
            self.steps.exactly(low, _EPOLL_CREATE, 0)
        else:
            flags = each.flags & ~_NEVER_AGAIN
            self.steps.exactly(low, _OPEN, self.steps.text(each.path), flags, 0)
            if each.position:
                self.steps.exactly(each.position, _LSEEK, low, each.position, 0)
        if low != number:
            self.steps.exactly(number, _DUP3, low, number, on_exec)
            self.steps.add(_CLOSE, low)
        elif on_exec:
            self.steps.add(_FCNTL, number, 2, 1)  # F_SETFD, FD_CLOEXEC

    def _listen(self, number: int, server: Server, status: int) -> None:
        self.steps.exactly(number, _SOCKET, server.family, 1 | status, 0)
        for level, name, value in server.options:
            at = self.steps.put(struct.pack("=I", value))
            self.steps.add(_SETSOCKOPT, number, level, name, at, 4)
        address = self.steps.put(server.address)
        self.steps.add(_BIND, number, address, len(server.address))
        self.steps.add(_LISTEN, number, server.backlog)

    def _lowest(self, count: int) -> list[int]:
        """The numbers that the kernel gives next."""
        found = [n for n in range(len(self.used) + count) if n not in self.used]
        return found[:count]

    # -- the end --------------------------------------------------------------------------------

    def _report(self) -> None:
        """The filter that asks PID 1, whose listener goes to the host; wait for the word to go on."""
        plan = self.plan
        (listener,) = self._lowest(1)
        flags = _NEW_LISTENER | _TSYNC | _TSYNC_ESRCH | _KILLABLE
        guard = self._secret_filter(notifications.asking_in_copy(connects=plan["connects"]))
        self.steps.exactly(listener, _SECCOMP, seccomp.SECCOMP_SET_MODE_FILTER, flags, guard)
        rights = self.steps.put(_RIGHTS.pack(20, 1, 1, listener))
        text = self.steps.put(b"R")
        vector = self.steps.put(struct.pack("=QQ", text, 1))
        header = self.steps.put(struct.pack("=QQQQQQQ", 0, 0, vector, 1, rights, 24, 0))
        self.steps.exactly(1, _SENDMSG, self.report, header, 0)
        self.steps.add(_CLOSE, listener)
        self.steps.exactly(1, _READ, self.report, text, 1)
        self.steps.add(CLOSE_RANGE, self.parked, 0xFFFFFFFF)

    def _filter(self) -> None:
        self.steps.add(_PRCTL, privileges.PR_SET_DUMPABLE, 1, privileges.REALLY, 0, 0)
        main = self._secret_filter(self.plan["seccomp"])
        self.steps.exactly(0, _SECCOMP, seccomp.SECCOMP_SET_MODE_FILTER, _TSYNC, main)
        self.steps.add(
            _MUNMAP, self.template.secrets, len(self.secrets) + (-len(self.secrets) % steps.PAGE)
        )

    def _secret_filter(self, code: bytes) -> int:
        """struct sock_fprog, in pages that the copy unmaps: a filter knows PID 1 by a key in it."""
        self.secrets += bytes(-len(self.secrets) % 16)
        at = self.template.secrets + len(self.secrets)
        self.secrets += struct.pack("=HHIQ", len(code) // 8, 0, 0, at + 16) + code
        return at

    def _go_on(self, state: State) -> None:
        address, size, signature = state.sequences
        if address:
            self.steps.add(_RSEQ, address, size, 0, signature)
        at = self.steps.next_aligned(64)
        frame, context = signal_frame(state, at)
        self.steps.put(frame, 64)
        self.steps.add(steps.RETURN, context)


_RLIMIT_RTTIME = 15
_INFINITE = (1 << 64) - 1


def _unused(taken: list[int]) -> int:
    number = 2
    while number in taken:
        number += 1
    return number


# struct sigcontext: 18 registers in this order, then segments, and what the kernel does not read back.
_ORDER = (
    *("r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "rdi", "rsi", "rbp", "rbx", "rdx"),
    *("rax", "rcx", "rsp", "rip", "eflags"),
)
_TRAP = 0x100  # EFLAGS.TF: single step
_USER_CODE, _USER_DATA = 0x33, 0x2B
_SOFTWARE_AT, _FEATURES_AT = 464, 464
_MAGIC, _END_MAGIC = 0x46505853, 0x46505845
_CONTEXT_FLAGS = 1 | 2 | 4  # UC_FP_XSTATE, UC_SIGCONTEXT_SS, UC_STRICT_RESTORE_SS


def signal_frame(state: State, at: int) -> tuple[bytes, int]:
    """Frame that rt_sigreturn(2) restores a thread from, for memory at `at`, and the address it reads from.

    Source: arch/x86/include/uapi/asm/sigcontext.h, ucontext.h.
    """
    registers = resumed(state)
    extended = bytearray(state.thread.extended)
    size = len(extended)
    (features,) = struct.unpack_from("=Q", extended, _FEATURES_AT)
    struct.pack_into("=IIQI28x", extended, _SOFTWARE_AT, _MAGIC, size + 4, features, size)
    extended += struct.pack("=I", _END_MAGIC)
    extended += bytes(-len(extended) % 64)
    registers["eflags"] &= ~_TRAP
    values: list[Any] = [registers[name] for name in _ORDER]
    context = struct.pack("=QQ", _CONTEXT_FLAGS, 0) + state.alternate_stack
    context += struct.pack("=18Q", *values)
    context += struct.pack("=4H", _USER_CODE, 0, 0, _USER_DATA)
    context += struct.pack("=4QQ64x", 0, 0, 0, 0, at) + struct.pack("=Q", state.thread.mask)
    return bytes(extended) + context, at + len(extended)
