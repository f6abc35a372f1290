"""A running process of a sandbox, stopped, described and copied by the kernel: what its copies begin from."""

from __future__ import annotations

import _signal as signal
import _struct as struct
import posix as os
import stat
import time

from ...linux import files, tracing
from . import frames
from .descriptors import RESOLVE, require_file, shown
from .sockets import CannotCopy
from .steps import CODE, PAGE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .descriptors import Descriptor

MOST_THREADS, MOST_MAPPINGS = 64, 16_384
_BEGINS_S = 1.0
_COPY_BEGINS_S = 5.0
_CALL = b"\x0f\x05"  # syscall
_PR_GET_TID_ADDRESS, _PR_GET_PDEATHSIG, _PR_GET_CHILD_SUBREAPER, _PR = 40, 2, 37, 157
_SIGALTSTACK, _SIGACTION, _BRK, _GETITIMER = 131, 13, 12, 36
_CLONE_PARENT, _SIGCHLD = 0x8000, 17
_MADVISE, DO_NOT_FORK, _DO_FORK, _WAIT4, _WAITID = 28, 10, 11, 61, 247
_ARCH_PRCTL, _ARCH_GET_XCOMP_PERM = 158, 0x1022
_EXITED, _STATUS_AT = 1, 24  # CLD_EXITED, and si_status in siginfo_t
_FILTERS = 2  # of each program beside ours: see `lockdown.seal`
_READ_ONLY = 1  # ST_RDONLY
_SCRATCH = 1024
_CLOEXEC, _WALL = os.O_CLOEXEC, 0x40000000


class NotBegun(CannotCopy):
    """It is a copy itself, and is still being made: its threads have no stacks yet."""


class Mapping:
    """Mapping of memory: proc_pid_maps(5).

    Attributes:
        file: Descriptor of the file that copies map as well; -1: they get the content of the memory.
        is_object: It is shared memory, which copies get another one of.
        path: Of the file that is mapped by it; empty: it has no name.
        is_wiped: Children get it zeroed: see `Source.look_at_copy`.
    """

    def __init__(self, line: bytes) -> None:
        place, rights, offset, device, inode, *name = line.rstrip(b"\n").split(None, 5)
        self.start, self.end = _range(place)
        self.rights = _RIGHTS[rights[:3]]
        self.is_shared = rights[3:4] == b"s"
        self.offset, self.inode, self.device = int(offset, 16), int(inode), 0
        if self.inode:
            major, _, minor = device.partition(b":")
            self.device = os.makedev(int(major, 16), int(minor, 16))
        self.name = name[0] if name else b""
        self.file = -1
        self.size = self.end - self.start
        self.key = self.device, self.inode
        has_name = not self.name.endswith(b" (deleted)") or self.name.startswith(b"/SYSV")
        self.is_object, self.path = self.is_shared and not has_name, b""
        self.is_wiped = False

    @property
    def is_of_kernel(self) -> bool:
        """True for vdso, vvar and vsyscall."""
        return self.name.startswith(b"[v")


# PROT_READ, PROT_WRITE, PROT_EXEC
_RIGHTS = {bytes(b"-rwx"[bit * (n >> bit - 1 & 1)] for bit in (1, 2, 3)): n for n in range(8)}


def _range(place: bytes) -> tuple[int, int]:
    start, _, end = place.partition(b"-")
    return int(start, 16), int(end, 16)


class State:
    """Further facts of a thread that copies begin with."""

    tid = id_inside = 0
    clear_tid = 0  # set_tid_address(2)
    alternate_stack = b""
    name = b""

    def __init__(self, thread: tracing.Thread) -> None:
        self.thread = thread
        self.registers = dict(thread.registers)
        self.robust = thread.robust_list()
        self.sequences = thread.restartable_sequences()
        self.pending = thread.pending(of_process=False)


class Zombie:
    """A child that has ended, and which its parent has not waited for yet.

    Attributes:
        code: What it exited with.
        signal: What ended it; 0: it exited.
    """

    code = signal = 0

    def __init__(self, id: int, group: int) -> None:
        self.id, self.group = id, group


class Source:
    """A process that stands still from `stop` to `release`.

    Args:
        pid: As we see it.
        parent: None: it is the first process of an exec.
        opened: Descriptors of mapped files by device and inode, of all processes that are copied together;
            -1: their content is copied.

    Attributes:
        child: A copy that the kernel made, which stands still too: its memory is what copies get.
        id, group, session: As those inside see them.
        user: Its ids and groups.
        death_signal: prctl(2), PR_SET_PDEATHSIG.
        stopped: Its threads, by id.
    """

    def __init__(self, pid: int, parent: Source | None, opened: dict[tuple[int, int], int]) -> None:
        self.pid, self.parent = pid, parent
        self.threads: list[State] = []
        self.children: list[Source] = []
        self.zombies: list[Zombie] = []
        self.mappings: list[Mapping] = []
        self.descriptors: dict[int, Descriptor] = {}
        self.actions: dict[int, bytes] = {}
        self.timers: dict[int, bytes] = {}
        self.pending: list[bytes] = []
        self.child = self.id = self.group = self.session = 0
        self.runs: list[tuple[int, int]] = []
        self.not_inherited: list[tuple[int, int]] = []  # memory that its own children do not get
        self.brk = self.umask = self.death_signal = 0
        self.may_use_tiles = False
        self.memory_map: list[int] = []
        self.auxv, self.vdso = b"", b""
        self.user: list[bytes] = []
        self.cwd = self.exe = ""
        self.root = -1
        self._opened = opened
        self.stopped: dict[int, tracing.Thread] = {}

    def stop(self) -> None:
        """Stop all of it, once it runs its program.

        PID 1's child is no session leader, and not locked down, before. A copy works through its steps.

        Raises:
            CannotCopy: It is not as we start programs.
            ProcessLookupError: It has ended.
        """
        give_up = time.monotonic() + _COPY_BEGINS_S
        while True:
            self._stop_threads()
            try:
                self._check()
                break
            except NotBegun:
                if time.monotonic() > give_up:
                    raise
            except CannotCopy:
                if self.parent or self._age_s() > _BEGINS_S:
                    raise
            self.release()
            time.sleep(0.001)
        self.root = os.open(f"/proc/{self.pid}/root", os.O_PATH | os.O_DIRECTORY | _CLOEXEC)

    def look(self, files: dict[tuple[int, int], bytes]) -> None:
        """Learn what copies need to know of its program, its memory and its threads.

        Args:
            files: Paths by device and inode, of a source that this is a copy of: the mounts through which
                that one mapped them may have gone, and then the kernel names no path.

        Raises:
            CannotCopy: It has something that no copy can have.
        """
        self._read_mappings(files)
        self.cwd = os.readlink(f"/proc/{self.pid}/cwd")
        self.exe = os.readlink(f"/proc/{self.pid}/exe")
        require_file(self.root, self.exe, os.stat(f"/proc/{self.pid}/exe"), "its program")
        require_file(self.root, self.cwd, os.stat(f"/proc/{self.pid}/cwd"), "its directory")
        self._ask_threads()

    def children_found(self) -> list[int]:
        """Pids of its children. While it stands still, one of them may add another: clone(2), CLONE_PARENT."""
        found: list[int] = []
        for tid in self.stopped:
            with open(f"/proc/{self.pid}/task/{tid}/children", "rb") as file:
                found += map(int, file.read().split())
        return sorted(found)

    def release(self) -> None:
        """Let it go on; idempotent."""
        stopped, self.stopped = self.stopped, {}
        for thread in stopped.values():
            thread.release()

    def drop_child(self) -> None:
        """End the kernel's copy; idempotent."""
        self._end_child()
        root, self.root = self.root, -1
        if root >= 0:
            os.close(root)

    def _end_child(self) -> None:
        child, self.child = self.child, 0
        if child:
            os.kill(child, 9)
            try:
                os.waitpid(child, _WALL)
            except ChildProcessError:
                pass

    # -- stopping -------------------------------------------------------------------------------

    def _age_s(self) -> float:
        started = int(_read(f"/proc/{self.pid}/stat").rpartition(b")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")

    def _stop_threads(self) -> None:
        directory = f"/proc/{self.pid}/task"
        while new := [int(name) for name in os.listdir(directory) if int(name) not in self.stopped]:
            if len(self.stopped) + len(new) > MOST_THREADS:
                raise CannotCopy(f"it has more than {MOST_THREADS} threads")
            for tid in new:
                thread = tracing.Thread(tid)
                try:
                    thread.stop()
                except ProcessLookupError:
                    if tid == self.pid:
                        raise
                    continue  # a thread that ended
                except PermissionError:
                    raise CannotCopy("it is traced by another process") from None
                self.stopped[tid] = thread
                if thread.is_suspended:
                    raise CannotCopy("it is suspended by a signal")
                if frames.uses_tiles(thread):
                    raise CannotCopy("a thread of it computes with the tiles of AMX just now")
        if self.pid not in self.stopped:
            raise CannotCopy("its first thread has ended")

    def _facts(self, *names: bytes, task: str = "", pid: int | str = "") -> list[bytes]:
        """Words of proc_pid_status(5); b"" for one that this kernel does not tell."""
        text = _read(f"/proc/{pid or self.pid}{task}/status")
        return [text.partition(b"\n%s:" % each)[2].partition(b"\n")[0].strip() for each in names]

    def _check(self) -> None:
        """Refuse what is not of an exec, and locked down as those are."""
        names = b"CapEff", b"Uid", b"Gid", b"Groups", b"Seccomp_filters"
        capabilities, *user, filters = self._facts(*names)
        if int(capabilities, 16) or len(set(user[0].split())) > 1:
            raise CannotCopy("it has capabilities, or several user ids")
        self.user = user
        # A container's filter around us is around each sandbox and each copy as well.
        (around,) = self._facts(b"Seccomp_filters", pid="self")
        if filters and int(filters) != int(around) + _FILTERS:
            raise CannotCopy("it has a system-call filter of its own")
        fields = _read(f"/proc/{self.pid}/stat").rpartition(b")")[2].split()
        if self.parent is None:
            self._check_group(fields)
        if int(fields[4]):
            raise CannotCopy("it has a terminal")
        *ids, umask, ignored, caught = self._facts(
            *(b"NSpid", b"NSpgid", b"NSsid", b"Umask", b"SigIgn", b"SigCgt")
        )
        self.id, self.group, self.session = (int(each.split()[-1]) for each in ids)
        if _read(f"/proc/{self.pid}/timers"):
            raise CannotCopy("it has POSIX timers")
        self.umask = int(umask, 8)
        self._ignored = int(ignored, 16) | int(caught, 16)
        # proc_pid_stat(5), fields 26 to 28, 45 to 51: start_code, end_code, start_stack; start_data ...
        places = [int(fields[number - 3]) for number in (26, 27, 45, 46, 47, 28, 48, 49, 50, 51)]
        if not all(places):
            raise CannotCopy("its memory is not ours to look into")
        self.memory_map = places
        self._check_code()

    def _check_code(self) -> None:
        """Refuse a copy that works through its steps still. The last of them restores its registers."""
        with open(f"/proc/{self.pid}/mem", "rb", buffering=0) as memory:
            for page in {thread.registers["rip"] & -PAGE for thread in self.stopped.values()}:
                if _pread(memory.fileno(), len(CODE), page) == CODE:
                    raise NotBegun("it is a copy that has not begun to run its program")

    def _check_group(self, fields: list[bytes]) -> None:
        """Refuse an exec that has left its session, or joined a process group of another."""
        group, session = fields[2:4]
        parents = _read(f"/proc/{int(fields[1])}/stat").rpartition(b")")[2].split()[2:4]
        # What `forked.begin_group` has put in a group of its own is in PID 1's session.
        if int(session) != self.pid and (group in parents or parents[1:] != [session]):
            raise CannotCopy("it has neither a session nor a process group of its own")

    # -- memory ---------------------------------------------------------------------------------

    def _read_mappings(self, paths: dict[tuple[int, int], bytes]) -> None:
        self.mappings = [Mapping(line) for line in _read(f"/proc/{self.pid}/maps").splitlines()]
        if len(self.mappings) > MOST_MAPPINGS:
            raise CannotCopy(f"it has more than {MOST_MAPPINGS} mappings")
        for mapping in self.mappings:
            if mapping.is_of_kernel or mapping.is_object:
                continue
            if mapping.is_shared and (mapping.rights & 2 or not mapping.inode):
                if not _is_there(self.root, mapping):
                    raise CannotCopy(f"it shares memory: {shown(mapping.name)}")
                mapping.is_object, mapping.path = True, mapping.name
                continue
            if mapping.inode:
                self._find_file(mapping, paths)
        vdso = [each for each in self.mappings if each.name == b"[vdso]"]
        with open(f"/proc/{self.pid}/mem", "rb", buffering=0) as memory:
            for each in vdso:
                self.vdso = os.pread(memory.fileno(), each.size, each.start)
        if _CALL not in self.vdso:  # unmapped, or written over
            raise CannotCopy("its vdso is not the kernel's")
        self._gadget = vdso[0].start + self.vdso.index(_CALL)

    def _find_file(self, mapping: Mapping, paths: dict[tuple[int, int], bytes]) -> None:
        """Open the file of a mapping where nobody inside can write to it; else its content is copied."""
        key, opened = mapping.key, self._opened
        if key not in opened:
            for name in (mapping.name, paths.get(key, b"")):
                opened[key] = _open_read_only(self.root, mapping, name)
                if opened[key] >= 0:
                    paths[key] = name
                    break
        mapping.file = opened[key]
        if mapping.file < 0:
            if mapping.name.endswith(b" (deleted)"):
                raise CannotCopy(f"it maps a file that was removed: {shown(mapping.name)}")
            size = _size_of(self.root, mapping)
            left = max(0, -(-(size - mapping.offset) // 4096) * 4096)
            mapping.size = min(mapping.size, left)

    # -- threads --------------------------------------------------------------------------------

    def _ask_threads(self) -> None:
        first = self.stopped[self.pid]
        self.pending = first.pending(of_process=True)
        memory = os.open(f"/proc/{self.pid}/mem", os.O_RDWR | os.O_CLOEXEC)
        try:
            for tid in sorted(self.stopped, key=lambda each: (each != self.pid, each)):
                thread = self.stopped[tid]
                state = State(thread)
                (inside,) = self._facts(b"NSpid", task=f"/task/{tid}")
                state.id_inside = int(inside.split()[-1])
                state.name = _read(f"/proc/{self.pid}/task/{tid}/comm").rstrip(b"\n")[:15]
                self._ask(state, memory, is_first=tid == self.pid)
                _leave_sequence(state, memory)
                self.threads.append(state)
        finally:
            os.close(memory)

    def _ask(self, state: State, memory: int, *, is_first: bool) -> None:
        """Learn by system calls of its own what the kernel tells nobody else."""
        thread = state.thread
        scratch = (thread.registers["rsp"] - _SCRATCH) & ~15
        saved = _pread(memory, 64, scratch)
        if len(saved) != 64:
            raise CannotCopy("a thread of it has no stack")
        thread.block(tracing.EVERY_SIGNAL)
        try:
            thread.call(self._gadget, _PR, _PR_GET_TID_ADDRESS, scratch)
            (state.clear_tid,) = struct.unpack("=Q", os.pread(memory, 8, scratch))
            thread.call(self._gadget, _SIGALTSTACK, 0, scratch)
            state.alternate_stack = os.pread(memory, 24, scratch)
            if is_first:
                self._ask_process(thread, memory, scratch)
                if thread.call(self._gadget, _ARCH_PRCTL, _ARCH_GET_XCOMP_PERM, scratch) == 0:
                    (permitted,) = struct.unpack("=Q", os.pread(memory, 8, scratch))
                    self.may_use_tiles = bool(permitted & frames.TILES)
        finally:
            try:
                os.pwrite(memory, saved, scratch)
            except OSError:
                raise CannotCopy("a thread of it has a stack that it cannot write to") from None
            finally:
                thread.restore()

    def _ask_process(self, thread: tracing.Thread, memory: int, scratch: int) -> None:
        for number in range(1, 65):
            if self._ignored >> (number - 1) & 1:
                if thread.call(self._gadget, _SIGACTION, number, 0, scratch, 8):
                    raise CannotCopy("its signal handlers cannot be read")
                self.actions[number] = os.pread(memory, 32, scratch)
        self.brk = thread.call(self._gadget, _BRK, 0)
        for which in range(3):
            if thread.call(self._gadget, _GETITIMER, which, scratch) == 0:
                value = os.pread(memory, 32, scratch)
                if any(value):
                    self.timers[which] = value
        for each in self.zombies:
            how = os.WEXITED | os.WNOWAIT | os.WNOHANG
            thread.call(self._gadget, _WAITID, os.P_PID, each.id, scratch, how, 0)
            signum, _errno, code = struct.unpack("=3i", os.pread(memory, 12, scratch))
            (status,) = struct.unpack("=i", os.pread(memory, 4, scratch + _STATUS_AT))
            if signum != signal.SIGCHLD:
                raise CannotCopy("a child process of it has just ended")
            each.code, each.signal = (status, 0) if code == _EXITED else (0, status)
        if self.parent is not None:
            thread.call(self._gadget, _PR, _PR_GET_PDEATHSIG, scratch)
            (self.death_signal,) = struct.unpack("=i", os.pread(memory, 4, scratch))
        if self.children or self.parent is not None:
            thread.call(self._gadget, _PR, _PR_GET_CHILD_SUBREAPER, scratch)
            if any(os.pread(memory, 4, scratch)):
                raise CannotCopy("it adopts the children of its children")

    def clone(self) -> None:
        """Have the kernel copy it, page by page only where one of both writes afterwards."""
        first = self.stopped[self.pid]
        first.block(tracing.EVERY_SIGNAL)
        try:
            self.child = self._copied(first)
            self.not_inherited = self._missing_in_child()
            if self.not_inherited:  # JavaScript engines ask for that: madvise(2), MADV_DONTFORK
                self._end_child()
                try:
                    self._advise(first, _DO_FORK)
                    self.child = self._copied(first)
                finally:
                    self._advise(first, DO_NOT_FORK)
                if self._missing_in_child():
                    raise CannotCopy("it has memory that no child process gets")
        finally:
            first.restore()
        self.auxv = _read(f"/proc/{self.pid}/auxv")
        self.runs = tracing.own_pages(self.child)

    def look_at_copy(self) -> None:
        """Learn which memory the kernel zeroes in children: madvise(2), MADV_WIPEONFORK, and vDSO getrandom's.

        Random number generators notice by it that they were copied, so a copy has to zero it again in its own
        children and copies. The kernel's copy has the same flags, and reading them costs the source no time.
        """
        wiped, start = set(), b""
        for line in _read(f"/proc/{self.child}/smaps").splitlines():
            first = line.partition(b" ")[0]
            if b"-" in first:
                start = first
            elif first == b"VmFlags:" and b"wf" in line.split():
                wiped.add(_range(start)[0])
        for mapping in self.mappings:
            mapping.is_wiped = mapping.start in wiped

    def _copied(self, first: tracing.Thread) -> int:
        """A copy that the kernel makes, as a child of PID 1: none that its own parent could wait for.

        That of a child is made by a copy in between, which ends first, and of which nobody gets a signal.
        """
        if self.parent is None:
            return first.clone(self._gadget, _CLONE_PARENT | _SIGCHLD)
        between = tracing.Thread(first.clone(self._gadget, 0))
        try:
            between.registers, between.ends_with_us = first.registers, True
            return between.clone(self._gadget, _SIGCHLD)
        finally:
            inside = int(self._facts(b"NSpid", pid=between.tid)[0].split()[-1])
            os.kill(between.tid, signal.SIGKILL)
            os.waitpid(between.tid, _WALL)
            first.call(self._gadget, _WAIT4, inside, 0, _WALL | os.WNOHANG, 0)

    def _missing_in_child(self) -> list[tuple[int, int]]:
        lines = _read(f"/proc/{self.child}/maps").splitlines()
        there = [_range(line.partition(b" ")[0]) for line in lines]
        found, place = [], 0
        for mapping in self.mappings:  # both in order of address
            at = mapping.start
            while place < len(there) and there[place][0] <= at:
                end = there[place][1]
                at = max(at, min(end, mapping.end))
                if end > mapping.end:
                    break
                place += 1
            if at < mapping.end and not mapping.is_of_kernel:
                found.append((mapping.start, mapping.end))
        return found

    def _advise(self, first: tracing.Thread, advice: int) -> None:
        for start, end in self.not_inherited:
            first.call(self._gadget, _MADVISE, start, end - start, advice)


def _leave_sequence(state: State, memory: int) -> None:
    """In a restartable sequence, go on where the kernel would have it go after a switch: rseq(2)."""
    area = state.sequences[0]
    if not area:
        return
    sequence = int.from_bytes(_pread(memory, 8, area + 8), "little")
    found = _pread(memory, 32, sequence) if sequence else b""
    if len(found) < 32:
        return  # in none; or it points nowhere: the kernel would end the process for that, and may
    _version, _flags, start, length, abort = struct.unpack("=IIQQQ", found)
    if start <= state.registers["rip"] < start + length:
        state.registers["rip"] = abort


def _open_read_only(root: int, mapping: Mapping, path: bytes) -> int:
    """Open a mapped file, if it is the one and lies where nobody inside can write; else -1."""
    try:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        fd = files.openat2(root, path.decode("utf-8", "surrogateescape"), flags, resolve=RESOLVE)
    except OSError:
        return -1
    status = os.fstat(fd)
    if (
        stat.S_ISREG(status.st_mode)
        and (status.st_dev, status.st_ino) == mapping.key
        and os.fstatvfs(fd).f_flag & _READ_ONLY
    ):
        return fd
    os.close(fd)
    return -1


def _is_there(root: int, mapping: Mapping) -> bool:
    """Return whether a mapped file is the one that has its name now."""
    try:
        name = mapping.name.decode("utf-8", "surrogateescape")
        fd = files.openat2(root, name, os.O_PATH | os.O_CLOEXEC, resolve=RESOLVE)
    except OSError:
        return False
    try:
        status = os.fstat(fd)
        return stat.S_ISREG(status.st_mode) and (status.st_dev, status.st_ino) == mapping.key
    finally:
        os.close(fd)


def _size_of(root: int, mapping: Mapping) -> int:
    try:
        flags = os.O_PATH | os.O_CLOEXEC
        fd = files.openat2(
            root, mapping.name.decode("utf-8", "surrogateescape"), flags, resolve=RESOLVE
        )
    except OSError:
        raise CannotCopy(f"it maps a file that is not there: {shown(mapping.name)}") from None
    try:
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


def _pread(fd: int, length: int, at: int) -> bytes:
    try:
        return os.pread(fd, length, at)
    except (OSError, OverflowError):
        return b""


def _read(path: str) -> bytes:
    """Read a file of /proc. A line at a time is a system call for each KiB: that is the size of its blocks."""
    with open(path, "rb", buffering=0) as file:
        return file.readall()
