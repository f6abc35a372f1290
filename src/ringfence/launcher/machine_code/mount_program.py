"""A mount program for a guest: an ELF file for x86-64 that uses no files of the guest.

No library, loader or interpreter is between it and the kernel, for those may be the guest's own files, and
it has rights that the guest has not. It is a table of system calls, as `process_image_elf` is; the first that
fails and must not ends it, with the errno as its exit status.
"""

from __future__ import annotations

import _stat as stat
import _struct as struct
import errno
import posix as os

from . import process_image_elf
from .process_image_elf import BASE, CALL_ROW

# arch/x86/include/generated/uapi/asm/unistd_64.h; include/uapi/linux/fcntl.h, mount.h
_FCHDIR, _MOUNT, _OPENAT, _MKDIRAT, _MKNODAT, _FCHOWNAT = 81, 165, 257, 258, 259, 260
_AT_FDCWD = (1 << 64) - 100
_AT_SYMLINK_NOFOLLOW = 0x100
_MS_BIND = 4096
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW
# Not O_PATH, with which a symlink would be opened itself.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
_FIRST_FD = 3
_MAY_FAIL = 1
_ROW = "<8Q"
_NONE = struct.pack("<Q", (1 << 64) - 1)
_BEFORE_TABLE = bytes.fromhex("49bf")  # mov r15, table
_CALLS = bytes.fromhex(
    "498b07"  # next: mov rax, [r15]
    "4883f8ff"  # cmp rax, -1
    "7437"  # je done
    f"{CALL_ROW}"
    "720f"  # jb went
    "49837f3800"  # cmp qword [r15 + 56], 0
    "7508"  # jne went
    "48f7d8"  # neg rax
    "4889c7"  # mov rdi, rax
    "eb08"  # jmp out
    "4983c740"  # went: add r15, 64
    "ebc0"  # jmp next
    "31ff"  # done: xor edi, edi
    "b83c000000"  # out: mov eax, 60 (exit)
    "0f05"  # syscall
)


class MountProgram:
    """A mount program being assembled. It follows no symlinks: the guest may have made them."""

    def __init__(self) -> None:
        self._rows: list[tuple[int | str, ...]] = []
        self._next_fd = _FIRST_FD

    def own(self, path: str, uid: int) -> None:
        """A directory of that user's at `path`, made where it is not there."""
        parent, name = self._parent(path)
        self._enter(parent, name)
        self._rows.append((_FCHOWNAT, parent, name, uid, uid, _AT_SYMLINK_NOFOLLOW, 0, 0))

    def show(self, source: str, target: str, *, is_dir: bool) -> None:
        """Bind `source`, which no guest can change, to `target`; the target is made if absent."""
        self._bind(source, target, is_dir)

    def bind(self, source: str, target: str) -> None:
        """A directory of the guest's at another path, too."""
        parent, name = self._parent(source)
        self._bind(f"/proc/self/fd/{self._enter(parent, name)}/.", target, is_dir=True)

    def _bind(self, source: str, target: str, is_dir: bool) -> None:
        """Where we are or, for a file, in there: gVisor mounts on a link of /proc, not where that leads."""
        parent, name = self._parent(target)
        if is_dir:
            parent, name = self._enter(parent, name), "."
        else:
            self._make_file(parent, name)
        self._rows.append((_FCHDIR, parent, 0, 0, 0, 0, 0, 0))
        self._rows.append((_MOUNT, source, name, 0, _MS_BIND, 0, 0, 0))

    def _parent(self, path: str) -> tuple[int, str]:
        *above, name = path.strip("/").split("/")
        fd = self._open(_AT_FDCWD, "/", _DIRECTORY)
        for each in above:
            fd = self._enter(fd, each)
        return fd, name

    def _enter(self, parent: int, name: str) -> int:
        # Why it could not be made is told by what comes next: that it is not there.
        self._rows.append((_MKDIRAT, parent, name, 0o755, 0, 0, 0, _MAY_FAIL))
        return self._open(parent, name, _DIRECTORY)

    def _make_file(self, parent: int, name: str) -> None:
        self._rows.append((_MKNODAT, parent, name, stat.S_IFREG | 0o644, 0, 0, 0, _MAY_FAIL))
        self._open(parent, name, _FILE)

    def _open(self, parent: int, name: str, flags: int) -> int:
        self._rows.append((_OPENAT, parent, name, flags, 0, 0, 0, 0))
        self._next_fd += 1  # the lowest that is free, so each is known before
        return self._next_fd - 1

    def packed(self) -> bytes:
        """The file.

        Raises:
            OSError: E2BIG if there is too much to do.
        """
        texts = dict.fromkeys(
            (word for row in self._rows for word in row if isinstance(word, str)), 0
        )
        table_at = process_image_elf.code_at() + len(_BEFORE_TABLE) + 8 + len(_CALLS)
        at = BASE + table_at + len(self._rows) * struct.calcsize(_ROW) + len(_NONE)
        for text in texts:
            texts[text] = at
            at += len(_bytes_of(text))
        rows = [
            struct.pack(_ROW, *(texts[word] if isinstance(word, str) else word for word in row))
            for row in self._rows
        ]
        size = process_image_elf.whole_pages(at - BASE)
        if size > process_image_elf.MOST_BYTES:
            raise OSError(errno.E2BIG, "too much to mount")
        code = _BEFORE_TABLE + struct.pack("<Q", BASE + table_at) + _CALLS
        whole = process_image_elf.elf(size) + code
        return (whole + b"".join(rows) + _NONE + b"".join(map(_bytes_of, texts))).ljust(size, b"\0")


def _bytes_of(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape") + b"\0"
