"""A running process of a sandbox, stopped, described and copied by the kernel: what its copies begin from."""

from __future__ import annotations

import _struct as struct
import fcntl
import posix as os
import stat
import time

from ...linux import files, libc, on_behalf, tracing
from . import sockets
from .sockets import CannotCopy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MOST_THREADS, MOST_MAPPINGS, MOST_DESCRIPTORS = 64, 16_384, 1024
MOST_PIPE_BYTES = 1 << 16
_BEGINS_S = 1.0
_CALL = b"\x0f\x05"  # syscall
_PR_GET_TID_ADDRESS, _PR = 40, 157
_SIGALTSTACK, _SIGACTION, _BRK, _GETITIMER = 131, 13, 12, 36
_CLONE_PARENT, _SIGCHLD = 0x8000, 17
_MADVISE, DO_NOT_FORK, _DO_FORK = 28, 10, 11
_FILTERS = 2  # of each program beside ours: see `lockdown.seal`
_O_PATH = 0o10000000
_READ_ONLY = 1  # ST_RDONLY
# fs/signal: what a system call that a signal interrupted has in rax, to begin again.
_RESTARTS = (-512, -513, -514, -516)
_SCRATCH = 1024
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_CLOEXEC = os.O_CLOEXEC
_RESOLVE = 0x04 | 0x02 | 0x10  # openat2(2): NO_SYMLINKS, NO_MAGICLINKS, IN_ROOT


class Mapping:
    """Mapping of memory: proc_pid_maps(5).

    Attributes:
        file: Descriptor of the file that copies map as well; -1: they get the content of the memory.
    """

    def __init__(self, line: bytes) -> None:
        place, rights, offset, device, inode, *name = line.rstrip(b"\n").split(None, 5)
        start, _, end = place.partition(b"-")
        self.start, self.end = int(start, 16), int(end, 16)
        self.rights = sum(
            bit for at, letter, bit in _RIGHTS if rights[at] == letter
        )  # PROT_READ, PROT_WRITE, PROT_EXEC
        self.is_shared = rights[3:4] == b"s"
        self.offset, self.inode = int(offset, 16), int(inode)
        major, _, minor = device.partition(b":")
        self.device = os.makedev(int(major, 16), int(minor, 16))
        self.name = name[0] if name else b""
        self.file = -1
        self.size = self.end - self.start

    @property
    def is_of_kernel(self) -> bool:
        """True for vdso, vvar and vsyscall."""
        return self.name.startswith(b"[v")


_RIGHTS = ((0, ord("r"), 1), (1, ord("w"), 2), (2, ord("x"), 4))


class Descriptor:
    """An open file of the process.

    Attributes:
        kind: `given`, `pipe`, `socket`, `server`, `file`, `event` or `epoll`.
        pipe: Inode, of a pipe or socket.
        flags: Of open(2), with O_CLOEXEC.
        same_as: A lower descriptor of the same open file; -1: there is none.
    """

    def __init__(self, kind: str, flags: int) -> None:
        self.kind, self.flags, self.same_as = kind, flags, -1
        self.path, self.position = "", 0
        self.pipe = 0  # inode
        self.given = 0  # which of the streams
        self.server: sockets.Server | None = None
        self.count, self.is_semaphore = 0, False
        self.watched: list[tuple[int, int, int]] = []  # descriptor, events, data


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


class Source:
    """A process that stands still from `stop` to `release`.

    Args:
        pid: As we see it.
        streams: Inodes of the pipes that its copies get others for, in their order.
        files: Paths by device and inode, of a source that this is a copy of: the mounts through which that
            one mapped them may have gone, and then the kernel names no path.

    Attributes:
        child: A copy that the kernel made, which stands still too: its memory is what copies get.
    """

    def __init__(self, pid: int, streams: list[int], files: dict[tuple[int, int], bytes]) -> None:
        self.pid, self._streams = pid, streams
        self.files = files
        self.threads: list[State] = []
        self.mappings: list[Mapping] = []
        self.descriptors: dict[int, Descriptor] = {}
        self.pipes: dict[int, bytes] = {}  # content by inode
        self.pairs: list[tuple[int, int, int]] = []  # kind, and both inodes
        self.actions: dict[int, bytes] = {}
        self.timers: dict[int, bytes] = {}
        self.pending: list[bytes] = []
        self.child = 0
        self.runs: list[tuple[int, int]] = []
        self.not_inherited: list[tuple[int, int]] = []  # memory that its own children do not get
        self.brk = self.umask = 0
        self.memory_map: list[int] = []
        self.auxv, self.vdso = b"", b""
        self.cwd = self.exe = ""
        self._root = -1
        self._stopped: dict[int, tracing.Thread] = {}

    def stop(self) -> None:
        """Stop all of it, learn what copies need, and have the kernel copy it.

        Raises:
            CannotCopy: The process has something that no copy can have; it goes on.
            OSError: As the kernel refused; it goes on.
        """
        try:
            self._stop_begun()
            self._root = os.open(f"/proc/{self.pid}/root", os.O_PATH | os.O_DIRECTORY | _CLOEXEC)
            try:
                self._read_mappings()
                self._read_descriptors()
            finally:
                os.close(self._root)
            self._ask_threads()
            self._clone()
        except BaseException:
            self.release()
            self.drop_child()
            raise

    def release(self) -> None:
        """Let it go on; idempotent."""
        stopped, self._stopped = self._stopped, {}
        for thread in stopped.values():
            thread.release()

    def drop_child(self) -> None:
        """End the kernel's copy; idempotent."""
        self._end_child()
        for mapping in self.mappings:
            if mapping.file >= 0:
                os.close(mapping.file)
                mapping.file = -1

    def _end_child(self) -> None:
        child, self.child = self.child, 0
        if child:
            os.kill(child, 9)
            try:
                os.waitpid(child, 0x40000000)
            except ChildProcessError:
                pass

    # -- stopping -------------------------------------------------------------------------------

    def _stop_begun(self) -> None:
        """Stop it once it runs its program: PID 1's child is no session leader, and not locked down, before."""
        give_up = time.monotonic() + _BEGINS_S
        while True:
            self._stop_threads()
            try:
                return self._check()
            except CannotCopy:
                if self._age_s() > _BEGINS_S or time.monotonic() > give_up:
                    raise
            self.release()
            time.sleep(0.001)

    def _age_s(self) -> float:
        started = int(_read(f"/proc/{self.pid}/stat").rpartition(b")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")

    def _stop_threads(self) -> None:
        directory = f"/proc/{self.pid}/task"
        while new := [
            int(name) for name in os.listdir(directory) if int(name) not in self._stopped
        ]:
            if len(self._stopped) + len(new) > MOST_THREADS:
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
                self._stopped[tid] = thread
        if self.pid not in self._stopped:
            raise CannotCopy("its first thread has ended")

    def _facts(self, task: str = "", pid: int | str = "") -> dict[str, str]:
        text = _read(f"/proc/{pid or self.pid}{task}/status").decode("utf-8", "replace")
        pairs = (line.partition(":") for line in text.splitlines())
        return {key: value.strip() for key, _, value in pairs}

    def _check(self) -> None:
        """Refuse what is not the first process of an exec, locked down as ours are."""
        facts = self._facts()
        if int(facts["CapEff"], 16) or len(set(facts["Uid"].split())) > 1:
            raise CannotCopy("it has capabilities, or several user ids")
        # A container's filter around us is around each sandbox and each copy as well.
        around = int(self._facts(pid="self").get("Seccomp_filters", 0))
        if int(facts.get("Seccomp_filters", around + _FILTERS)) != around + _FILTERS:
            raise CannotCopy("it has a system-call filter of its own")
        fields = _read(f"/proc/{self.pid}/stat").rpartition(b")")[2].split()
        if int(fields[3]) != self.pid:
            raise CannotCopy("it does not lead a session")
        if int(fields[4]):
            raise CannotCopy("it has a terminal")
        for tid in self._stopped:
            if children := _read(f"/proc/{self.pid}/task/{tid}/children").split():
                raise CannotCopy(f"it has child processes: {_names_of(children)}")
        if _read(f"/proc/{self.pid}/timers"):
            raise CannotCopy("it has POSIX timers")
        self.umask = int(facts["Umask"], 8)
        self._ignored = int(facts["SigIgn"], 16) | int(facts["SigCgt"], 16)
        # proc_pid_stat(5), fields 26 to 28, 45 to 51: start_code, end_code, start_stack; start_data ...
        places = [int(fields[number - 3]) for number in (26, 27, 45, 46, 47, 28, 48, 49, 50, 51)]
        if not all(places):
            raise CannotCopy("its memory is not ours to look into")
        self.memory_map = places

    # -- memory ---------------------------------------------------------------------------------

    def _read_mappings(self) -> None:
        with open(f"/proc/{self.pid}/maps", "rb") as file:
            self.mappings = [Mapping(line) for line in file]
        if len(self.mappings) > MOST_MAPPINGS:
            raise CannotCopy(f"it has more than {MOST_MAPPINGS} mappings")
        known: dict[tuple[int, int], int] = {}
        try:
            for mapping in self.mappings:
                if mapping.is_of_kernel:
                    continue
                if mapping.is_shared and (mapping.rights & 2 or not mapping.inode):
                    raise CannotCopy(f"it shares memory: {_shown(mapping.name)}")
                if mapping.inode:
                    self._find_file(mapping, known)
        finally:
            for fd in known.values():
                if fd >= 0:
                    os.close(fd)
        vdso = [each for each in self.mappings if each.name == b"[vdso]"]
        with open(f"/proc/{self.pid}/mem", "rb", buffering=0) as memory:
            for each in vdso:
                self.vdso = os.pread(memory.fileno(), each.size, each.start)
        if _CALL not in self.vdso:  # unmapped, or written over
            raise CannotCopy("its vdso is not the kernel's")
        self._gadget = vdso[0].start + self.vdso.index(_CALL)

    def _find_file(self, mapping: Mapping, known: dict[tuple[int, int], int]) -> None:
        """Open the file of a mapping where nobody inside can write to it; else its content is copied."""
        key = mapping.device, mapping.inode
        if key not in known:
            for name in (mapping.name, self.files.get(key, b"")):
                known[key] = _open_read_only(self._root, mapping, name)
                if known[key] >= 0:
                    self.files[key] = name
                    break
        if known[key] >= 0:
            mapping.file = os.dup(known[key])
        else:
            if mapping.name.endswith(b" (deleted)"):
                raise CannotCopy(f"it maps a file that was removed: {_shown(mapping.name)}")
            size = _size_of(self._root, mapping)
            left = max(0, -(-(size - mapping.offset) // 4096) * 4096)
            mapping.size = min(mapping.size, left)

    # -- descriptors ----------------------------------------------------------------------------

    def _read_descriptors(self) -> None:
        names = sorted(map(int, os.listdir(f"/proc/{self.pid}/fd")))
        if len(names) > MOST_DESCRIPTORS:
            raise CannotCopy(f"it has more than {MOST_DESCRIPTORS} open files")
        for number in names:
            self.descriptors[number] = self._descriptor(number)
        self._find_shared()
        self._read_pipes()
        self._read_pairs()
        self.cwd = os.readlink(f"/proc/{self.pid}/cwd")
        self.exe = os.readlink(f"/proc/{self.pid}/exe")
        self._find(self.exe, os.stat(f"/proc/{self.pid}/exe"), "its program")

    def _descriptor(self, number: int) -> Descriptor:
        target = os.readlink(f"/proc/{self.pid}/fd/{number}")
        info = _read(f"/proc/{self.pid}/fdinfo/{number}").decode("utf-8", "replace")
        rows = [line.split() for line in info.splitlines()]
        facts = {row[0]: row[1] for row in rows if len(row) > 1}
        if "lock:" in facts:
            raise CannotCopy(f"descriptor {number} holds a lock")
        flags = int(facts["flags:"], 8)
        if target.startswith("pipe:["):
            found = Descriptor("pipe", flags)
            found.pipe = int(target[6:-1])
            if found.pipe in self._streams:
                found.kind, found.given = "given", self._streams.index(found.pipe)
            return found
        if target.startswith("socket:["):
            found = Descriptor("socket", flags)
            found.pipe = int(target[8:-1])
            found.server = sockets.server_of(self.pid, number)
            if found.server is not None:
                found.kind = "server"
            return found
        if target == "anon_inode:[eventfd]":
            found = Descriptor("event", flags)
            found.count = int(facts["eventfd-count:"], 16)
            found.is_semaphore = facts.get("eventfd-semaphore:") == "1"
            return found
        if target == "anon_inode:[eventpoll]":
            found = Descriptor("epoll", flags)
            for row in rows:
                if row[0] == "tfd:":
                    found.watched.append((int(row[1]), int(row[3], 16), int(row[5], 16)))
            return found
        if not target.startswith("/"):
            raise CannotCopy(f"descriptor {number} is {target.partition(':')[0]}: {target}")
        return self._file(number, target, flags, int(facts["pos:"]))

    def _file(self, number: int, target: str, flags: int, position: int) -> Descriptor:
        status = os.stat(f"/proc/{self.pid}/fd/{number}")
        kind = stat.S_IFMT(status.st_mode)
        if kind == stat.S_IFCHR and target in _DEVICES:
            position = 0
        elif kind not in (stat.S_IFREG, stat.S_IFDIR):
            raise CannotCopy(f"descriptor {number} is {_shown(target)}, a device or a pipe")
        if not status.st_nlink:
            raise CannotCopy(f"descriptor {number} is a file that was removed")
        self._find(target, status, f"descriptor {number}")
        if flags & _O_PATH:
            raise CannotCopy(f"descriptor {number} is a place, and no open file")
        found = Descriptor("file", flags)
        found.path, found.position = target, position
        return found

    def _find(self, path: str, wanted: os.stat_result, what: str) -> None:
        """Refuse a file that is not where the kernel says: a copy opens it by its path."""
        try:
            fd = files.openat2(self._root, path, os.O_PATH | _CLOEXEC, resolve=_RESOLVE)
        except PermissionError:
            return  # of another user inside: the copy finds out
        except OSError as exc:
            raise CannotCopy(f"{what} is not at {_shown(path)}: {exc.strerror}") from None
        try:
            found = os.fstat(fd)
            if (found.st_dev, found.st_ino) != (wanted.st_dev, wanted.st_ino):
                raise CannotCopy(f"{what} is not the file at {_shown(path)}")
        finally:
            os.close(fd)

    def _find_shared(self) -> None:
        """Find descriptors of one open file, which share their position: kcmp(2), KCMP_FILE."""
        seen: dict[tuple[str, str, int], list[int]] = {}
        for number, each in self.descriptors.items():
            if each.kind in ("given", "pipe", "socket"):
                continue
            others = seen.setdefault((each.kind, each.path, each.count), [])
            for other in others:
                if libc.same_file(self.pid, other, number):
                    each.same_as = other
                    break
            else:
                others.append(number)

    def _read_pipes(self) -> None:
        """Copy what is in the pipes that it holds both ends of."""
        ends: dict[int, dict[int, int]] = {}
        for number, each in self.descriptors.items():
            if each.kind == "pipe":
                ends.setdefault(each.pipe, {})[each.flags & 3] = number
        for inode, numbers in ends.items():
            if set(numbers) != {0, 1}:
                number = next(iter(numbers.values()))
                raise CannotCopy(f"descriptor {number} is a pipe to another process")
            self.pipes[inode] = self._content(numbers[0])

    def _read_pairs(self) -> None:
        """Find which of its sockets are pairs of socketpair(2), with nothing in them."""
        ours = {
            each.pipe: number for number, each in self.descriptors.items() if each.kind == "socket"
        }
        if not ours:
            return
        known = sockets.unix_sockets(self.pid)
        for inode, number in ours.items():
            kind, peer, waiting = known.get(inode, (0, 0, 0))
            if peer not in ours:
                raise CannotCopy(
                    f"descriptor {number} is a socket that has a connection, or leads to another process"
                )
            if waiting:
                raise CannotCopy(f"descriptor {number} is a socket with {waiting} bytes in it")
            if inode < peer:
                self.pairs.append((kind, inode, peer))

    def _content(self, number: int) -> bytes:
        fd = on_behalf.descriptor(self.pid, number, 0)
        read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            waiting = struct.unpack("=i", fcntl.ioctl(fd, 0x541B, bytes(4)))[0]  # FIONREAD
            if waiting > MOST_PIPE_BYTES:
                raise CannotCopy(f"descriptor {number} is a pipe with {waiting} bytes in it")
            if not waiting:
                return b""
            copied = libc.tee(fd, write, waiting)
            return os.read(read, copied)
        finally:
            for each in (fd, read, write):
                os.close(each)

    # -- threads --------------------------------------------------------------------------------

    def _ask_threads(self) -> None:
        first = self._stopped[self.pid]
        self.pending = first.pending(of_process=True)
        memory = os.open(f"/proc/{self.pid}/mem", os.O_RDWR | os.O_CLOEXEC)
        try:
            for tid in sorted(self._stopped, key=lambda each: (each != self.pid, each)):
                thread = self._stopped[tid]
                state = State(thread)
                facts = self._facts(f"/task/{tid}")
                state.id_inside = int(facts["NSpid"].split()[-1])
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

    def _clone(self) -> None:
        """Have the kernel copy it, page by page only where one of both writes afterwards."""
        first = self._stopped[self.pid]
        first.block(tracing.EVERY_SIGNAL)
        try:
            self.child = first.clone(self._gadget, _CLONE_PARENT | _SIGCHLD)
            self.not_inherited = self._missing_in_child()
            if self.not_inherited:  # JavaScript engines ask for that: madvise(2), MADV_DONTFORK
                self._end_child()
                try:
                    self._advise(first, _DO_FORK)
                    self.child = first.clone(self._gadget, _CLONE_PARENT | _SIGCHLD)
                finally:
                    self._advise(first, DO_NOT_FORK)
                if self._missing_in_child():
                    raise CannotCopy("it has memory that no child process gets")
        finally:
            first.restore()
        self.auxv = _read(f"/proc/{self.pid}/auxv")
        self.runs = tracing.own_pages(self.child)

    def _missing_in_child(self) -> list[tuple[int, int]]:
        with open(f"/proc/{self.child}/maps", "rb") as file:
            there = [Mapping(line) for line in file]
        found, place = [], 0
        for mapping in self.mappings:  # both in order of address
            at = mapping.start
            while place < len(there) and there[place].start <= at:
                at = max(at, min(there[place].end, mapping.end))
                if there[place].end > mapping.end:
                    break
                place += 1
            if at < mapping.end and not mapping.is_of_kernel:
                found.append((mapping.start, mapping.end))
        return found

    def _advise(self, first: tracing.Thread, advice: int) -> None:
        for start, end in self.not_inherited:
            first.call(self._gadget, _MADVISE, start, end - start, advice)


def resumed(state: State) -> dict[str, int]:
    """The registers that a copy of a thread begins with: an interrupted system call begins again."""
    registers = dict(state.registers)
    signed = registers["rax"] - (1 << 64) if registers["rax"] >> 63 else registers["rax"]
    if not registers["orig_rax"] >> 63 and signed in _RESTARTS:
        registers["rax"] = registers["orig_rax"]
        registers["rip"] -= 2
    return registers


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
        fd = files.openat2(root, path.decode("utf-8", "surrogateescape"), flags, resolve=_RESOLVE)
    except OSError:
        return -1
    status = os.fstat(fd)
    if (
        stat.S_ISREG(status.st_mode)
        and (status.st_dev, status.st_ino) == (mapping.device, mapping.inode)
        and os.fstatvfs(fd).f_flag & _READ_ONLY
    ):
        return fd
    os.close(fd)
    return -1


def _size_of(root: int, mapping: Mapping) -> int:
    try:
        flags = os.O_PATH | os.O_CLOEXEC
        fd = files.openat2(
            root, mapping.name.decode("utf-8", "surrogateescape"), flags, resolve=_RESOLVE
        )
    except OSError:
        raise CannotCopy(f"it maps a file that is not there: {_shown(mapping.name)}") from None
    try:
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


def _names_of(pids: list[bytes]) -> str:
    names = []
    for pid in pids[:5]:
        try:
            names.append(_shown(_read(f"/proc/{int(pid)}/comm").rstrip(b"\n")))
        except OSError:
            continue  # it has just ended
    return ", ".join([*names, *["others"] * (len(pids) > 5)])


def _pread(fd: int, length: int, at: int) -> bytes:
    try:
        return os.pread(fd, length, at)
    except (OSError, OverflowError):
        return b""


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _shown(name: str | bytes) -> str:
    data = name if isinstance(name, bytes) else name.encode("utf-8", "surrogateescape")
    return data.decode("utf-8", "replace")[:200] or "memory without a name"


def describe(source: Source) -> dict[str, Any]:
    """Facts for the host of a process that was copied."""
    return {
        "threads": len(source.threads),
        "bytes": sum(end - start for start, end in source.runs),
        "ids": [each.id_inside for each in source.threads],
        "files": source.files,
    }
