"""Starting a program by vfork(2), with no system call in between but those that it needs.

posix_spawn(3) of the C library resets every signal by a call of its own, asks for limits and maps a
stack: ninety calls for one program. In gVisor, where each is a stop of the whole process, they took
longer than a short program runs. Here the child works through a table of calls, as a process image does.

Our memory is the child's too until its program has begun, and so is our stack: it writes to neither but
for `_Failure`. Precondition: we have no thread besides, and handle no signal by a function, which would
run in the child as well. For x86-64; elsewhere `is_here` is false.
"""

from __future__ import annotations

import _struct as struct
import errno
import posix as os

from ...linux import cdata, libc, mappings
from . import process_image_elf

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Row = tuple[int, ...]

# arch/x86/include/generated/uapi/asm/unistd_64.h
_OPEN, _CLOSE, _RT_SIGACTION, _RT_SIGPROCMASK, _DUP2 = 2, 3, 13, 14, 33
_EXECVE, _CHDIR, _SETPGID, _SETSID, _SETRESUID, _SETRESGID = 59, 80, 109, 112, 117, 119
_CLOSE_RANGE = 436
_NO_ROW = (1 << 64) - 1  # ends a table
_SIG_SETMASK, _SIGSET_BYTES, _EVERY_FD = 2, 8, 0x7FFFFFFF
# struct kernel_sigaction with SIG_DFL, no flags and nothing blocked; and a set of no signals.
_DEFAULT = bytes(32)

_CODE = bytes.fromhex(
    "4157"  # push r15
    "53"  # push rbx
    "4989ff"  # mov r15, rdi: the table
    "4889f3"  # mov rbx, rsi: where to tell of a failure
    "b83a000000"  # mov eax, SYS_vfork
    "0f05"  # syscall
    "4885c0"  # test rax, rax
    "7404"  # je next: the child goes on there, and never comes back
    "5b"  # pop rbx
    "415f"  # pop r15
    "c3"  # ret
    "498b07"  # next: mov rax, [r15]
    "4883f8ff"  # cmp rax, -1
    "7432"  # je done
    f"{process_image_elf.CALL_ROW}"
    "7306"  # jae failed
    "4983c738"  # add r15, 56
    "ebcf"  # jmp next
    "48f7d8"  # failed: neg rax
    "488903"  # mov [rbx], rax
    "4c897b08"  # mov [rbx + 8], r15
    "bf7f000000"  # done: mov edi, 127
    "b8e7000000"  # mov eax, SYS_exit_group
    "0f05"  # syscall
)


class _Failure(cdata.Structure):
    _fields_ = (("errno", cdata.c_ulong), ("row", cdata.c_ulong))


class NoDirectory(OSError):  # noqa: N818  (not an error of ours: what the kernel said)
    """Where the program was to begin cannot be gone to."""


def _map_code() -> Any:
    """The code as a function; None where it cannot be had, by its processor or its kernel."""
    if libc.MACHINE != "x86_64":
        return None
    try:
        start = mappings.map_code(_CODE)
    except OSError:
        return None
    return cdata.function_at(start, cdata.c_long, cdata.c_void_p, cdata.c_void_p)


_mapped: list[Any] = []


def _code() -> Any:
    """Map it at the first use, so that neither a zygote nor an image of a process contains it."""
    if not _mapped:
        _mapped.append(_map_code())
    return _mapped[0]


def is_here() -> bool:
    """Return whether the code can run here."""
    return _code() is not None


def ended_child() -> int:
    """Make a child that ends at once, and return its pid; the caller waits for it."""
    pid: int
    if not is_here():
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        return pid
    nothing, failure = cdata.c_ulong(_NO_ROW), _Failure()
    pid = _code()(cdata.addressof(nothing), cdata.addressof(failure))
    if pid < 0:
        raise OSError(-pid, os.strerror(-pid))
    return pid


class Start:
    """How programs are to begin; `begin` begins one.

    Args:
        uid: Whom it runs as, with a group of the same number.
        actions: As for posix_spawn.
        ignored: The signals that we ignore, and the program shall not.
        group: To join instead of beginning a session; 0: none.
    """

    def __init__(
        self,
        uid: int,
        cwd: str,
        env: dict[str, str],
        actions: list[Any],
        ignored: list[int],
        group: int = 0,
    ) -> None:
        self._held: list[Any] = []  # what is at the addresses below
        default = self._at(_DEFAULT)
        self._env = self._list([f"{name}={value}" for name, value in env.items()])
        self._rows: list[Row] = [
            (_SETPGID, 0, group) if group else (_SETSID,),
            (_SETRESGID, uid, uid, uid),
            (_SETRESUID, uid, uid, uid),
        ]
        for action in actions:
            self._rows += self._action(*action)
        # Before it goes anywhere: a link of the guest's may name one of our descriptors (CVE-2024-21626).
        self._rows.append((_CLOSE_RANGE, 3, _EVERY_FD, 0))
        self._chdir: Row = (_CHDIR, self._text(cwd))
        self._rows.append(self._chdir)
        self._rows += [(_RT_SIGACTION, n, default, 0, _SIGSET_BYTES) for n in ignored]
        self._rows.append((_RT_SIGPROCMASK, _SIG_SETMASK, default, 0, _SIGSET_BYTES))

    def begin(self, path: str, argv: list[str]) -> int:
        """The pid of a new process, whose program has begun.

        Raises:
            NoDirectory: It has not, for the directory.
            OSError: It has not. Nothing is left of it either way.
        """
        execve = _EXECVE, self._text(path), self._list(argv), self._env
        table = self._at(process_image_elf.rows_of([*self._rows, execve]))
        failure = _Failure()
        pid: int = _code()(table, cdata.addressof(failure))
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid), path)
        if not failure.errno:
            return pid
        os.waitpid(pid, 0)
        row = (failure.row - table) // process_image_elf.ROW_BYTES
        kind = NoDirectory if self._rows[row : row + 1] == [self._chdir] else OSError
        raise kind(failure.errno, os.strerror(failure.errno), path)

    def _action(self, verb: int, fd: int, *rest: Any) -> list[Row]:
        if verb == os.POSIX_SPAWN_DUP2:
            return [(_DUP2, fd, rest[0])]
        if verb != os.POSIX_SPAWN_OPEN or fd:
            raise OSError(errno.EINVAL, "only standard input is opened anew")
        path, flags, mode = rest
        # All others are open: the lowest that is free is the one just closed.
        return [(_CLOSE, 0), (_OPEN, self._text(path), flags, mode)]

    def _at(self, content: bytes) -> int:
        """Its address, for as long as we are there."""
        held = cdata.c_ulong.from_buffer(bytearray(content.ljust(8, b"\0")))
        self._held.append(held)
        return cdata.addressof(held)

    def _text(self, text: str) -> int:
        return self._at(_encoded(text))

    def _list(self, texts: list[str]) -> int:
        """Addresses of texts, and 0, as execve(2) takes them."""
        encoded = [_encoded(text) for text in texts]
        at = self._at(b"".join(encoded))
        addresses = []
        for text in encoded:
            addresses.append(at)
            at += len(text)
        return self._at(struct.pack(f"={len(texts) + 1}Q", *addresses, 0))


def _encoded(text: str) -> bytes:
    data = libc.path_bytes(text)
    if b"\0" in data:
        raise OSError(errno.EINVAL, "a null byte in", text)
    return data + b"\0"
