"""Stopping a running process and looking into it, on x86-64: ptrace(2), PTRACE_SEIZE and what follows."""

from __future__ import annotations

import _signal as signal
import _struct as struct
import fcntl
import posix as os

from . import cdata, ptrace
from .libc import declare, raise_errno

# include/uapi/linux/ptrace.h
_CONT, _STEP, _DETACH, _SETOPTIONS, _GETEVENTMSG = 7, 9, 17, 0x4200, 0x4201
_GETREGSET, _SETREGSET, _SEIZE, _INTERRUPT = 0x4204, 0x4205, 0x4206, 0x4207
_PEEKSIGINFO, _GETSIGMASK, _SETSIGMASK, _GET_RSEQ = 0x4209, 0x420A, 0x420B, 0x420F
_EXITKILL = 1 << 20
_TRACE_FORK_AND_CLONE, _EVENT_FORK, _EVENT_CLONE, _EVENT_STOP = 2 | 8, 1, 3, 128
_SHARED_SIGNALS = 1
_GENERAL, _EXTENDED = 1, 0x202  # NT_PRSTATUS, NT_X86_XSTATE: include/uapi/linux/elf.h
_WALL = 0x40000000  # include/uapi/linux/wait.h
_SIGINFO_BYTES, _MOST_PENDING = 128, 32
_MOST_EXTENDED = 1 << 14
_STOP_SIGNALS = frozenset((signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU))
EVERY_SIGNAL = (1 << 64) - 1
_NO_CALL = (1 << 64) - 1  # orig_rax of who is in no system call
# include/uapi/linux/fs.h: ioctl, struct pm_scan_arg, categories of pages.
_PAGEMAP_SCAN, _SCAN_BYTES, _WALK_END_AT = 0xC0606610, 96, 32
_FILE, _PRESENT, _SWAPPED, _ZERO = 4, 8, 16, 32
_RUNS_AT_ONCE = 4096
TASK_END = 0x7FFF_FFFF_F000  # TASK_SIZE_MAX of x86-64 with four levels of page tables

_word = cdata.c_ulong
_ptrace = declare("ptrace", cdata.c_long, cdata.c_long, _word, _word)
_robust_list = declare("get_robust_list", cdata.c_long, cdata.c_void_p, cdata.c_void_p)


class _Vector(cdata.Structure):
    _fields_ = (("base", cdata.c_uint64), ("length", cdata.c_uint64))


class _PeekArguments(cdata.Structure):
    """struct ptrace_peeksiginfo_args; its two last members, of 32 bits, in one."""

    _fields_ = (("offset", cdata.c_uint64), ("flags_and_count", cdata.c_uint64))


def _call(request: int, tid: int, address: int = 0, data: int = 0) -> int:
    result = _ptrace(request, tid, address, data)
    if result < 0:
        raise_errno(f"ptrace {request:#x}", tid)
    return result


class Thread:
    """A thread that stands still from `stop` to `release`.

    Attributes:
        registers, extended: As it was stopped; the second is the XSAVE area.
        mask: Signals that it blocks, bit 0 for signal 1.
        ends_with_us: It is a copy, which must not run.
        is_suspended: A signal had stopped its process before; ptrace(2), "Group-stop".
    """

    def __init__(self, tid: int) -> None:
        self.tid = tid
        self.registers: dict[str, int] = {}
        self.ends_with_us = self.is_suspended = False
        self.extended, self.mask = b"", 0

    def stop(self) -> None:
        """Stop it.

        Raises:
            OSError: EPERM where somebody traces it already, ESRCH where it has ended.
        """
        _call(_SEIZE, self.tid)
        _call(_INTERRUPT, self.tid)
        status = self.wait()
        if status >> 16 != _EVENT_STOP:  # a signal came first: it is put back
            status = self._put_back(status)
        self.is_suspended = status >> 8 & 0x7F in _STOP_SIGNALS
        self.registers = ptrace.registers(self.tid)
        self.extended = _regset(self.tid, _EXTENDED, _MOST_EXTENDED)
        self.mask = self._mask()

    def _put_back(self, status: int) -> int:
        """Let it take the signal that it stopped for, and stop again before it runs; the new status."""
        _call(_CONT, self.tid, 0, status >> 8 & 0x7F)
        status = self.wait()
        if status >> 16 != _EVENT_STOP:
            raise OSError(11, "signals keep arriving", str(self.tid))
        return status

    def wait(self) -> int:
        """Its status when it next stands still.

        Raises:
            OSError: ESRCH: it has ended.
        """
        _pid, status = os.waitpid(self.tid, _WALL)
        if not os.WIFSTOPPED(status):
            raise ProcessLookupError(3, "a thread ended", str(self.tid))
        return status

    def _mask(self) -> int:
        word = cdata.c_uint64()
        _call(_GETSIGMASK, self.tid, 8, cdata.addressof(word))
        return int(word.value)

    def block(self, mask: int) -> None:
        """Set the signals that it blocks."""
        word = cdata.c_uint64(mask)
        _call(_SETSIGMASK, self.tid, 8, cdata.addressof(word))

    def call(self, at: int, number: int, *arguments: int) -> int:
        """Have it make a system call; what the kernel answered, below 0 for an errno.

        Args:
            at: Address of a `syscall` instruction in its memory.
        """
        self._step(at, number, arguments)
        if self.wait() >> 8 & 0x7F != signal.SIGTRAP:
            raise OSError(5, "a system call did not end", str(self.tid))
        result = ptrace.registers(self.tid)["rax"]
        return result - (1 << 64) if result >> 63 else result

    def _step(self, at: int, number: int, arguments: tuple[int, ...]) -> None:
        changed = {**self.registers, "rip": at, "rax": number, "orig_rax": _NO_CALL}
        changed.update(zip(("rdi", "rsi", "rdx", "r10", "r8", "r9"), arguments, strict=False))
        _set_registers(self.tid, changed)
        _call(_STEP, self.tid)

    def clone(self, at: int, flags: int) -> int:
        """Have it make a copy of its process, which stands still and ends with us; the pid of that."""
        # The copy inherits the options. If we end meanwhile, both do: it would run as if it were the process.
        _call(_SETOPTIONS, self.tid, 0, _TRACE_FORK_AND_CLONE | _EXITKILL)
        try:
            self._step(at, 56, (flags, 0, 0, 0, 0))
            status = self.wait()
            if status >> 16 not in (_EVENT_FORK, _EVENT_CLONE):
                result = ptrace.registers(self.tid)["rax"]
                raise OSError((-result) & 0xFFF or 11, "no copy of the process could be made")
            word = cdata.c_uint64()
            _call(_GETEVENTMSG, self.tid, 0, cdata.addressof(word))
            os.waitpid(word.value, _WALL)
            _call(_SETOPTIONS, word.value, 0, _EXITKILL)
            _call(_STEP, self.tid)
            self.wait()
            return int(word.value)
        finally:
            _call(_SETOPTIONS, self.tid, 0, _EXITKILL if self.ends_with_us else 0)

    def restore(self) -> None:
        """Give it back the registers and the mask that it had. It goes on if we end from here on."""
        _set_registers(self.tid, self.registers)
        self.block(self.mask)
        # It stands where a signal is delivered, the trap of its last step: our end would deliver that.
        _call(_INTERRUPT, self.tid)
        _call(_CONT, self.tid)
        if self.wait() >> 16 != _EVENT_STOP:
            raise OSError(11, "a signal came in between", str(self.tid))

    def release(self) -> None:
        try:
            _call(_DETACH, self.tid)
        except ProcessLookupError:  # killed meanwhile: its parent waits for it after us
            try:
                os.waitpid(self.tid, _WALL | os.WNOHANG)
            except ChildProcessError:
                pass

    def pending(self, *, of_process: bool) -> list[bytes]:
        """Signals that wait, each a struct siginfo; of the thread, or of all its process."""
        flags = _SHARED_SIGNALS if of_process else 0
        arguments = _PeekArguments(0, flags | _MOST_PENDING << 32)
        buffer = bytearray(_SIGINFO_BYTES * _MOST_PENDING)
        at = cdata.address_of(buffer)
        count = _call(_PEEKSIGINFO, self.tid, cdata.addressof(arguments), at)
        return [bytes(buffer[_SIGINFO_BYTES * i : _SIGINFO_BYTES * (i + 1)]) for i in range(count)]

    def restartable_sequences(self) -> tuple[int, int, int]:
        """Address, length and signature of its rseq area; address 0: it has none. Source: rseq(2)."""
        buffer = bytearray(24)
        _call(_GET_RSEQ, self.tid, 24, cdata.address_of(buffer))
        address, size, signature, _flags, _pad = struct.unpack("=QIIII", buffer)
        return address, size, signature

    def robust_list(self) -> tuple[int, int]:
        """Address and length of its list of robust futexes. Source: get_robust_list(2)."""
        head, length = cdata.c_uint64(), cdata.c_uint64()
        if _robust_list(self.tid, cdata.byref(head), cdata.byref(length)) < 0:
            raise_errno("get_robust_list", self.tid)
        return int(head.value), int(length.value)


def _regset(tid: int, kind: int, most: int) -> bytes:
    buffer = bytearray(most)
    vector = _Vector(cdata.address_of(buffer), most)
    _call(_GETREGSET, tid, kind, cdata.addressof(vector))
    return bytes(buffer[: vector.length])


def _set_registers(tid: int, registers: dict[str, int]) -> None:
    data = bytearray(ptrace.packed(registers))
    vector = _Vector(cdata.address_of(data), len(data))
    _call(_SETREGSET, tid, _GENERAL, cdata.addressof(vector))


def own_pages(pid: int) -> list[tuple[int, int]]:
    """Start and end of each run of pages that belong to a process alone, present or swapped out.

    Pages of files that it has not written to, and pages that are zero, are left out.

    Raises:
        OSError: ENOTTY before Linux 6.7.

    Source: Documentation/admin-guide/mm/pagemap.rst, PAGEMAP_SCAN.
    """
    found: list[tuple[int, int]] = []
    buffer = bytearray(24 * _RUNS_AT_ONCE)
    vector = cdata.address_of(buffer)
    fd = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        at = 0
        while at < TASK_END:
            words = (_SCAN_BYTES, 0, at, TASK_END, 0, vector, _RUNS_AT_ONCE, 0)
            masks = (_FILE | _ZERO, _FILE | _ZERO, _PRESENT | _SWAPPED, _PRESENT | _SWAPPED)
            argument = bytearray(struct.pack("=12Q", *words, *masks))
            count = fcntl.ioctl(fd, _PAGEMAP_SCAN, argument)
            for i in range(count):
                found.append(struct.unpack_from("=QQ", buffer, 24 * i))
            (at,) = struct.unpack_from("=Q", argument, _WALK_END_AT)
    finally:
        os.close(fd)
    return found
