"""Process images: programs that started once, and continue from there in every guest with a copy.

A program runs here until it stops itself. What it has in memory then is written down; see
`process_image_elf` for what becomes of that. Only for programs of our own, before they have read or
opened anything: a process image is the same in every guest, with whatever is in it.
"""

from __future__ import annotations

import _signal as signal
import _struct as struct
import errno
import io
import posix as os

from ...linux import files, libc, privileges, ptrace, seccomp
from . import process_image_elf
from .process_image import ProcessImage

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO

    from .process_image_elf import Region

# No thread notes for the kernel, which would be another one's; no giving back of memory by brk(2),
# which where we go on may not be where it was: malloc would miscount.
TUNABLES = "glibc.pthread.rseq=0:glibc.malloc.trim_threshold=0x7fffffffffff"
_AT_IGNORE, _AT_SYSINFO_EHDR = 1, 33  # include/uapi/linux/auxvec.h
_STACK_BYTES = 8 << 20  # what Linux gives everybody
_SMALL_BYTES = 256 << 10
_ENDS_BELOW = 0x7FFF_FF00_0000  # platforms of gVisor's have code of their own at the very top
_ATTEMPTS = 8  # where the kernel puts things is a matter of chance
_OF_THE_KERNEL = ("[vdso]", "[vvar]", "[vvar_vclock]", "[vsyscall]")
_CODE_FD = 3
# brk(2) answers 0, as if it could not: for x86-64 and a program of our own. Source: seccomp(2), bpf.
_WITHOUT_BRK = b"".join(
    struct.pack("=HBBI", *each)
    for each in (
        (0x20, 0, 0, 0),  # the number of the call
        (0x15, 0, 1, 12),  # is it brk?
        (0x06, 0, 0, 0x0005_0000),  # SECCOMP_RET_ERRNO, 0
        (0x06, 0, 0, 0x7FFF_0000),  # SECCOMP_RET_ALLOW
    )
)


def take(
    argv: list[str],
    env: dict[str, str],
    code: int,
    place: str,
    copy_task: tuple[str, list[str]] | None = None,
    *,
    waits: bool = False,
) -> ProcessImage:
    """Run a program until it sends itself SIGSTOP, and keep it.

    Args:
        code: What it finds as descriptor 3, and has closed again by then.
        place: The path of its copies in every guest. The files that it has mapped are there as here.
        copy_task: What a child of each does meanwhile: see `process_image_elf.CopyTask`.
        waits: Whether a copy begins before all of it is written: see `process_image_elf.head`.

    Raises:
        OSError: ENOSYS where such a thing cannot go on elsewhere; what the kernel says to ptrace(2).
    """
    if libc.MACHINE != "x86_64":
        raise OSError(errno.ENOSYS, f"no process images on {libc.MACHINE}")
    for _ in range(_ATTEMPTS):
        pid = _start(argv, env, code)
        try:
            _run(pid)
            regions = _regions(pid)
            if max(region.end for region in regions) < _ENDS_BELOW:
                runs = process_image_elf.CopyTask(*copy_task) if copy_task else None
                regions = process_image_elf.joined(regions)
                return _keep(regions, ptrace.registers(pid), place, runs, waits=waits)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    raise OSError(errno.EAGAIN, "the stack lies too high, time and again")


def take_memory(argv: list[str], code: int) -> tuple[list[Region], dict[str, int]]:
    """Run a program until it sends itself SIGSTOP: all of its memory, without a heap, and registers.

    Args:
        code: As in `take`.

    Raises:
        OSError: As `take`.
    """
    if libc.MACHINE != "x86_64":
        raise OSError(errno.ENOSYS, f"no process images on {libc.MACHINE}")
    pid = _start(argv, {}, code, heap=False)
    try:
        _run(pid)
        return _regions(pid, whole=True), ptrace.registers(pid)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _keep(
    regions: list[Region],
    registers: dict[str, int],
    place: str,
    copy_task: process_image_elf.CopyTask | None,
    *,
    waits: bool,
) -> ProcessImage:
    content = io.BytesIO()
    write_pieces(regions, content)
    head = process_image_elf.head(regions, registers, place, copy_task, waits=waits)
    fd = os.memfd_create("process-image", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(head)
            file.write(content.getbuffer())
        return ProcessImage(fd)
    except BaseException:
        os.close(fd)
        raise


def write_pieces(regions: list[Region], file: BinaryIO) -> None:
    """Write the regions' content at the position of `file`; record each piece's offset from there."""
    begin = file.tell()
    for region in regions:
        for start, end in process_image_elf.in_use(region.content):
            piece = region.content[start:end].ljust(end - start, b"\0")
            region.pieces.append((file.tell() - begin, region.start + start, len(piece)))
            file.write(piece)


def _start(argv: list[str], env: dict[str, str], code: int, *, heap: bool = True) -> int:
    us = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            # Until `ptrace.kill_with_us` it would go on when we end, stop itself, and stand there for ever.
            privileges.die_with_parent(signal.SIGKILL)
            if os.getppid() != us:
                os._exit(127)
            os.setsid()
            null = os.open("/dev/null", os.O_RDWR)
            moved = os.dup(code)  # that may be one of the first three
            for standard in range(3):
                os.dup2(null, standard)
            os.dup2(moved, _CODE_FD)
            files.close_from(_CODE_FD + 1)
            os.chdir("/")
            for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            if not heap:
                # Linux begins it elsewhere in every new program, and malloc would not look again.
                privileges.set_no_new_privs()
                seccomp.install_filter(_WITHOUT_BRK)
            ptrace.trace_me()
            os.execve(argv[0], argv, {**env, "GLIBC_TUNABLES": TUNABLES})
        finally:
            os._exit(127)
    return pid


def _run(pid: int) -> None:
    """From its execve(2), where it stands, to where it stops itself."""
    _wait(pid, signal.SIGTRAP)
    ptrace.kill_with_us(pid)
    _take_away_vdso(pid)
    ptrace.go_on(pid)
    _wait(pid, signal.SIGSTOP)
    if len(os.listdir(f"/proc/{pid}/task")) != 1:
        raise OSError(errno.ENOSYS, "a program with threads cannot be kept")


def _wait(pid: int, signum: int) -> None:
    while True:
        # Do not reap a process that ended: it will be killed by its pid.
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
        if found is None or found.si_code not in (os.CLD_STOPPED, os.CLD_TRAPPED):
            raise OSError(errno.ECHILD, "the program to keep ended")
        os.waitpid(pid, os.WUNTRACED)
        if found.si_status == signum:
            return
        ptrace.go_on(pid, found.si_status)


def _take_away_vdso(pid: int) -> None:
    """The C library would keep the addresses of this kernel's own code; so it asks by system calls.

    On the stack of a new program: argc, argv, 0, environment, 0, auxiliary vector. Source: getauxval(3).
    """
    memory = os.open(f"/proc/{pid}/mem", os.O_RDWR | os.O_CLOEXEC)
    try:
        at = ptrace.registers(pid)["rsp"] + 8
        for _list in ("argv", "environment"):
            while any(os.pread(memory, 8, at)):
                at += 8
            at += 8
        while key := struct.unpack("=Q", os.pread(memory, 8, at))[0]:
            if key == _AT_SYSINFO_EHDR:
                os.pwrite(memory, struct.pack("=Q", _AT_IGNORE), at)
            at += 16
    finally:
        os.close(memory)


def _regions(pid: int, *, whole: bool = False) -> list[Region]:
    """All that is mapped; of files only what was written to, or the whole. Source: proc_pid_smaps(5)."""
    found: list[Region] = []
    with open(f"/proc/{pid}/smaps", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            words = line.split(None, 5)
            if "-" in words[0] and not words[0].endswith(":"):
                found.append(_region(words))
            elif words[0] == "Anonymous:" and int(words[1]):
                found[-1].is_own = True
    regions = [region for region in found if region.name not in _OF_THE_KERNEL]
    if not any(region.name.endswith("/libc.so.6") for region in regions):
        raise OSError(errno.ENOSYS, "only programs with glibc are kept")
    if whole:
        regions = [region for region in regions if region.rights]
        for region in regions:
            region.is_own = True
    _own_the_small(regions)
    memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for region in regions:
            if region.is_own:
                region.content = os.pread(memory, region.end - region.start, region.start)
                region.content = region.content.rstrip(b"\0")
    finally:
        os.close(memory)
    return regions


def _own_the_small(regions: list[Region]) -> None:
    """A file of which little is mapped is kept as well: to open it anew takes longer than to read that."""
    sizes: dict[str, int] = {}
    for region in regions:
        sizes[region.name] = sizes.get(region.name, 0) + region.end - region.start
    for region in regions:
        if region.name.startswith("/") and sizes[region.name] <= _SMALL_BYTES:
            region.is_own = True


def _region(words: list[str]) -> Region:
    start, _, end = words[0].partition("-")
    rights = sum(bit for letter, bit in (("r", 1), ("w", 2), ("x", 4)) if letter in words[1])
    name = words[5].strip() if len(words) > 5 else ""
    region = process_image_elf.Region(int(start, 16), int(end, 16), rights, name, int(words[2], 16))
    if name == "[stack]":
        region.room = _STACK_BYTES
    return region
