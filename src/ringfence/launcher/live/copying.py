"""Steps of one copy: into a sandbox, locked down as its programs are, and only then the source's own code.

Until the last filter is in place nothing of the source runs, no path that it named is opened with rights
of the host's, and no thread goes on before all are locked down. See decision 192 for the order.
"""

from __future__ import annotations

import _signal as signal
import _struct as struct
import posix as os
import resource

from ...linux import privileges, seccomp
from ..pid1 import notifications
from . import steps
from .frames import signal_frame
from .opening import OpenFiles
from .source import DO_NOT_FORK, Zombie
from .template import CLOSE_RANGE, SPAN, kernels_own, move_kernels_own, set_actions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..plan import Plan
    from .source import Source, State
    from .template import Template

# arch/x86/include/generated/uapi/asm/unistd_64.h
_READ, _WRITE, _OPEN, _CLOSE, _MUNMAP, _MADVISE, _SETITIMER = 0, 1, 2, 3, 11, 28, 38
_SENDMSG, _EXIT_GROUP, _WAIT4, _CHDIR, _SETSID, _SETGROUPS = 46, 231, 61, 80, 112, 116
_MMAP, _SIGACTION, _SIGPROCMASK, _MREMAP, _KILL, _SETPGID = 9, 13, 14, 25, 62, 109
_SIGTIMEDWAIT, _WAITID = 128, 247
_SETRESUID, _SETRESGID, _CAPSET, _SIGQUEUE, _PRCTL, _ARCH_PRCTL = 117, 119, 126, 129, 157, 158
_SET_TID_ADDRESS, _SET_ROBUST_LIST = 218, 273
_DUP3, _PIPE2, _TGSIGQUEUE, _PRLIMIT, _SECCOMP, _RSEQ, _CLONE3 = 292, 293, 297, 302, 317, 334, 435
_SETNS, _OPENAT2 = 308, 437
_LANDLOCK_RULESET, _LANDLOCK_RULE, _LANDLOCK_RESTRICT = 444, 445, 446
_CLONE_VM, _CLONE_VFORK, _SIGCHLD, _WALL = 0x100, 0x4000, 17, 0x40000000
# VM, FS, FILES, SIGHAND, THREAD, SYSVSEM, SETTLS, CHILD_CLEARTID: as pthread_create(3) asks for.
_THREAD = 0x100 | 0x200 | 0x400 | 0x800 | 0x10000 | 0x40000 | 0x80000 | 0x200000
_SET_FS, _SET_GS = 0x1002, 0x1001  # arch_prctl(2)
_ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 0x1023, 18
_PR_SET_MM_MAP = 14
_NEW_LISTENER, _TSYNC, _KILLABLE = 8, 1, 32
_SHARED_FIXED_ANONYMOUS = 1 | 0x10 | 0x20  # mmap(2)
_NO_LINKS = 0x04 | 0x02  # openat2(2): RESOLVE_NO_SYMLINKS, RESOLVE_NO_MAGICLINKS
_AT_FDCWD = (1 << 64) - 100
_CLOEXEC = os.O_CLOEXEC
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
        self.tree = template.tree
        self.steps = steps.Steps(template.program)
        self.secrets = bytearray()
        self.main_filter = 0
        # Descriptors that came along, beyond the processes' own numbers. The first of them was the program.
        self.parked = template.first + 1
        first = place.cgroups + len(place.namespaces)
        streams = [self.parked + first + i for i in range(place.streams)]
        self.report = self.parked + first + place.streams
        self.listener = self.report + 1
        self.files = OpenFiles(self.steps, self.tree, streams, template.objects, self.listener + 1)
        self.is_one = len(self.tree.processes) == 1

    def build(self) -> tuple[bytes, bytes]:
        self._go_in()
        for number, source in enumerate(self.tree.processes):
            self._process(number, source)
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
        self._bear(self.tree.root.id, "process 0")
        add(_EXIT_GROUP, 0)

    def _bear(self, id: int, begins: str) -> None:
        """Make a child with that id, inside, which begins with that list."""
        clone = struct.pack("=11Q", 0, 0, 0, 0, _SIGCHLD, 0, 0, 0, self._id(id), 1, 0)
        label = steps.Label(begins)
        self.steps.add(_CLONE3, self.steps.put(clone), 88, expect=steps.BRANCH, value=label)

    def _id(self, number: int) -> int:
        return self.steps.put(struct.pack("=i", number))

    # -- one process ----------------------------------------------------------------------------

    def _process(self, number: int, source: Source) -> None:
        """A process of the copy, from its birth on; children are born before it has memory of its own."""
        add, first = self.steps.add, source.threads[0]
        count = struct.pack("=Q", len(source.threads))
        locked, filtered, released = (self.steps.put(count) for _ in range(3))
        self.steps.begin(f"process {number}")
        if source.parent is None:
            self._lock_down()
            self._bear_children(source)
            if (size := self.template.end - self.template.base - SPAN) > 0:
                add(_MUNMAP, self.template.base + SPAN, size)
        else:
            self._join_group(source)
            self._bear_children(source)
            self._take_memory(source)
        self.files.map_objects(source)
        self._start_threads(number, source)
        self._own_state(source, first)
        self._drop_rights()
        self._wait(source, locked)
        self.files.open(source)
        add(CLOSE_RANGE, self.listener + 1, 0xFFFFFFFF)
        self.files.lock(source)
        self._own_process(source)
        self._all_wait(0)
        if source.parent is None:
            self._report()
        self._all_wait(1)
        if source.parent is not None:
            add(_PRCTL, privileges.PR_SET_PDEATHSIG, source.death_signal, 0, 0, 0)
        add(CLOSE_RANGE, self.parked, 0xFFFFFFFF)
        self._filter()
        self._wait(source, filtered)
        self._all_wait(2)
        if not self.is_one:
            add(_MUNMAP, self.template.shared, steps.PAGE)
            self._wait(source, released)
        self._go_on(first)
        for which, state in enumerate(source.threads[1:], 1):
            self.steps.begin(f"thread {number}.{which}")
            self._own_state(source, state)
            self._drop_rights()
            self._wait(source, locked)
            self._wait(source, filtered)
            if not self.is_one:
                self._wait(source, released)
            self._go_on(state)

    def _own_process(self, source: Source) -> None:
        """Set limits, directory, timers and pending signals of a process."""
        self._limit(self.plan["rlimits"])
        for start, end in source.not_inherited:
            self.steps.add(_MADVISE, start, end - start, DO_NOT_FORK)
        self.steps.add(_CHDIR, self.steps.text(source.cwd))
        if source.may_use_tiles:
            self.steps.add(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
        for which, value in source.timers.items():
            self.steps.add(_SETITIMER, which, self.steps.put(value), 0)
        for info in source.pending:
            self._queue(_SIGQUEUE, info, source.id)

    def _wait(self, source: Source, barrier: int) -> None:
        """Wait for the other threads of a process."""
        if len(source.threads) > 1:
            self.steps.add(steps.BARRIER, barrier)

    def _lock_down(self) -> None:
        """Lock the first process down, and so all that it bears."""
        add = self.steps.add
        for number in range(1, 2 + self.report - self.parked):
            self.steps.exactly(
                self.parked + number - 1, _DUP3, number, self.parked + number - 1, _CLOEXEC
            )
        add(steps.STATUS, self.report)
        add(CLOSE_RANGE, 0, self.template.first)
        add(_SETSID)
        self._limit([])
        self._become_user()
        self._restrict_files()
        self._ask_of_pid_1()
        self.files.connect()
        if not self.is_one:
            self._share_page()
        if self.tree.shared or self.tree.objects.paths:
            everything = (1 << _last_capability() + 1) - 1
            self._set_capabilities(0, everything)
            self.files.open_shared()
            self._set_capabilities(everything, everything)

    def _share_page(self) -> None:
        """Map a page with what all wait for."""
        add, exactly, page = self.steps.add, self.steps.exactly, self.template.shared
        exactly(page, _MMAP, page, steps.PAGE, 3, _SHARED_FIXED_ANONYMOUS, (1 << 64) - 1, 0)
        counts = struct.pack("=3Q", *[len(self.tree.processes)] * 3)
        add(_PIPE2, self.steps.put(bytes(8)), 0)
        exactly(len(counts), _WRITE, 1, self.steps.put(counts), len(counts))
        exactly(len(counts), _READ, 0, page, len(counts))
        add(_CLOSE, 0)
        add(_CLOSE, 1)

    def _all_wait(self, number: int) -> None:
        """Wait for the first threads of all processes."""
        if not self.is_one:
            self.steps.add(steps.BARRIER, self.template.shared + 8 * number)

    def _join_group(self, child: Source) -> None:
        add, parent = self.steps.add, child.parent
        assert parent is not None
        # Should the first fail, all end. What they are to get at the end of their parent comes later.
        add(_PRCTL, privileges.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if child.session != parent.session:
            add(_SETSID)
        elif child.group != parent.group:
            add(_SETPGID, 0, child.group)

    def _bear_children(self, source: Source) -> None:
        """Leaders of process groups come first, and have theirs when the others join them."""
        add = self.steps.add
        born: list[Source | Zombie] = sorted(
            [*source.children, *source.zombies], key=lambda each: each.id != each.group
        )
        for each in born:
            number = -1 if isinstance(each, Zombie) else self.tree.processes.index(each)
            self._bear(each.id, f"process {number}" if number >= 0 else f"zombie {each.id}")
            if each.group == each.id and (isinstance(each, Zombie) or each.session != each.id):
                add(_SETPGID, each.id, each.id, expect=steps.ANYTHING)
        for each in source.zombies:
            add(_WAITID, 1, each.id, 0, os.WEXITED | os.WNOWAIT, 0)
        if source.zombies:
            # The parent has had the signal that each of them sends it.
            mask = self.steps.put(struct.pack("=Q", 1 << signal.SIGCHLD - 1))
            now = self.steps.put(bytes(16))
            add(_SIGTIMEDWAIT, mask, 0, now, 8, expect=steps.ANYTHING)
        here = self.steps.current
        for each in source.zombies:
            self._zombie(source, each)
        self.steps.begin(here)

    def _zombie(self, parent: Source, each: Zombie) -> None:
        """End as it has, without a core file: it is not dumpable."""
        add = self.steps.add
        self.steps.begin(f"zombie {each.id}")
        if each.group != parent.group:
            add(_SETPGID, 0, each.group, expect=steps.ANYTHING)
        if each.signal:
            add(_SIGACTION, each.signal, self.steps.put(bytes(32)), 0, 8, expect=steps.ANYTHING)
            add(_SIGPROCMASK, signal.SIG_SETMASK, self.steps.put(bytes(8)), 0, 8)
            add(_KILL, each.id, each.signal)
        add(_EXIT_GROUP, each.code)

    def _take_memory(self, source: Source) -> None:
        """Put the memory of this process, which the template has elsewhere, in its place."""
        program, template = self.steps, self.template
        places, end = template.places[source]
        root = kernels_own(self.tree.root.mappings)
        spared = [(template.base, template.base + SPAN), (places[0], end)]
        move_kernels_own(program, template.base, root, kernels_own(source.mappings), *spared)
        mappings = [each for each in source.mappings if not each.is_of_kernel]
        for mapping, place in zip(mappings, places, strict=True):
            length = mapping.end - mapping.start
            if not mapping.is_object:
                program.exactly(mapping.start, _MREMAP, place, length, length, 3, mapping.start)
        set_actions(program, source)
        self._describe_memory(source)

    # -- lock-down ------------------------------------------------------------------------------

    def _limit(self, limits: list[tuple[int, int, int]]) -> None:
        """Set limits, and the exec's tag, by which PID 1 finds all of it."""
        limits = [each for each in limits if each[0] != _RLIMIT_RTTIME]
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
        for capability in range(_last_capability() + 1):
            add(_PRCTL, privileges.PR_CAPBSET_DROP, capability, 0, 0, 0)
        add(_PRCTL, privileges.PR_SET_SECUREBITS, privileges.SECUREBITS_LOCKED, 0, 0, 0)
        if not plan["deny_setgroups"]:
            add(_SETGROUPS, 0, 0)
        add(_SETRESGID, *[plan["gid"]] * 3)
        add(_SETRESUID, *[plan["uid"]] * 3)
        self._describe_memory(self.tree.root)

    def _describe_memory(self, source: Source) -> None:
        """Where its parts are, and what it executes."""
        add, exe = self.steps.add, 0
        if source.parent is not None and source.exe == self.tree.root.exe:
            exe = 0xFFFFFFFF  # which it has already
        else:
            how = self.steps.put(struct.pack("=QQQ", os.O_RDONLY | _CLOEXEC, 0, _NO_LINKS))
            path = self.steps.text(source.exe)
            self.steps.exactly(0, _OPENAT2, _AT_FDCWD, path, how, 24)
        auxv = self.steps.put(source.auxv)
        codes, data, brk, rest = (
            source.memory_map[:2],
            source.memory_map[2:4],
            source.memory_map[4],
            source.memory_map[5:],
        )
        # struct prctl_mm_map: the last member is the descriptor of the program.
        words = (*codes, *data, brk, source.brk, *rest, auxv, len(source.auxv))
        memory = self.steps.put(struct.pack("=12QII", *words, exe))
        add(_PRCTL, privileges.PR_SET_MM, _PR_SET_MM_MAP, memory, 104, 0)
        if not exe:
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

    def _start_threads(self, process: int, source: Source) -> None:
        for number, state in enumerate(source.threads[1:], 1):
            registers, inside = state.registers, self._id(state.id_inside)
            words = (_THREAD, 0, state.clear_tid, 0, 0, 0, 0, registers["fs_base"], inside, 1, 0)
            clone = self.steps.put(struct.pack("=11Q", *words))
            there = steps.Label(f"thread {process}.{number}")
            self.steps.add(_CLONE3, clone, 88, expect=steps.BRANCH, value=there)

    def _own_state(self, source: Source, state: State) -> None:
        add = self.steps.add
        add(_ARCH_PRCTL, _SET_FS, state.registers["fs_base"])
        add(_ARCH_PRCTL, _SET_GS, state.registers["gs_base"])
        add(_SET_TID_ADDRESS, state.clear_tid)
        add(_SET_ROBUST_LIST, *state.robust, expect=steps.ANYTHING)
        add(_PRCTL, privileges.PR_SET_NAME, self.steps.text(state.name), 0, 0, 0)
        for info in state.pending:
            self._queue(_TGSIGQUEUE, info, source.id, state.id_inside)

    def _queue(self, call: int, info: bytes, *ids: int) -> None:
        (number,) = struct.unpack_from("=i", info)
        self.steps.add(call, *ids, number, self.steps.put(info), expect=steps.ANYTHING)

    def _drop_rights(self) -> None:
        self._set_capabilities(0, 0)

    def _set_capabilities(self, effective: int, permitted: int) -> None:
        header = self.steps.put(struct.pack("=Ii", 0x20080522, 0))
        sets = [
            number >> shift & 0xFFFFFFFF
            for shift in (0, 32)
            for number in (effective, permitted, 0)
        ]
        self.steps.add(_CAPSET, header, self.steps.put(struct.pack("=6I", *sets)))

    # -- the end --------------------------------------------------------------------------------

    def _ask_of_pid_1(self) -> None:
        """The filter that asks PID 1, whose listener goes to the host later."""
        guard = self._secret_filter(notifications.asking_in_copy(connects=self.plan["connects"]))
        flags = _NEW_LISTENER | _KILLABLE
        self.steps.exactly(0, _SECCOMP, seccomp.SECCOMP_SET_MODE_FILTER, flags, guard)
        self.steps.exactly(self.listener, _DUP3, 0, self.listener, _CLOEXEC)
        self.steps.add(_CLOSE, 0)

    def _report(self) -> None:
        """Send the listener to the host, and wait for the word to go on."""
        rights = self.steps.put(_RIGHTS.pack(20, 1, 1, self.listener))
        text = self.steps.put(b"R")
        vector = self.steps.put(struct.pack("=QQ", text, 1))
        header = self.steps.put(struct.pack("=QQQQQQQ", 0, 0, vector, 1, rights, 24, 0))
        self.steps.exactly(1, _SENDMSG, self.report, header, 0)
        self.steps.exactly(1, _READ, self.report, text, 1)

    def _filter(self) -> None:
        self.steps.add(_PRCTL, privileges.PR_SET_DUMPABLE, 1, privileges.REALLY, 0, 0)
        self.main_filter = self.main_filter or self._secret_filter(self.plan["seccomp"])
        self.steps.exactly(0, _SECCOMP, seccomp.SECCOMP_SET_MODE_FILTER, _TSYNC, self.main_filter)
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


def _last_capability() -> int:
    with open(_LAST_CAPABILITY, "rb") as file:
        return int(file.read())


_RLIMIT_RTTIME = 15
_INFINITE = (1 << 64) - 1


def _unused(taken: list[int]) -> int:
    number = 2
    while number in taken:
        number += 1
    return number
