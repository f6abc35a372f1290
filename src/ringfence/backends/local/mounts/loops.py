"""Loop devices, which make a block device of a file: loop(4)."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import tempfile

# include/uapi/linux/loop.h
_GET_FREE, _CONFIGURE = 0x4C82, 0x4C0A
_AUTOCLEAR, _DIRECT_IO = 4, 16
_MAJOR = 7
_TRIES = 64  # another process may take the device that the kernel has named
# struct loop_config: descriptor, block size, struct loop_info64 with its flags, reserved words
_CONFIG = struct.Struct("=II 5Q 4I 64s 64s 32s 2Q 8Q")


def attach(file: int) -> tuple[int, str]:
    """Return a descriptor of a device made of an open file, and a path to it for this process.

    The kernel lets the device go with its last user: an open descriptor, or the mount of its file system.
    Direct transfers keep the page cache of the host from holding the file's bytes a second time.

    Raises:
        OSError: There is no loop device to be had here.
    """
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(_TRIES):
            number = fcntl.ioctl(control, _GET_FREE)
            device = _open(number)
            try:
                _configure(device, file)
                return device, f"/proc/self/fd/{device}"
            except OSError as exc:
                os.close(device)
                if exc.errno != errno.EBUSY:
                    raise
    finally:
        os.close(control)
    raise OSError(errno.EBUSY, "every loop device was taken by another process")


def _configure(device: int, file: int) -> None:
    for flags in (_AUTOCLEAR | _DIRECT_IO, _AUTOCLEAR):
        none = (0,) * 5
        config = _CONFIG.pack(
            file, 4096, *none, 0, 0, 0, flags, b"ringfence", b"", b"", 0, 0, *(0,) * 8
        )
        try:
            fcntl.ioctl(device, _CONFIGURE, config)
            return
        except OSError as exc:
            if exc.errno != errno.EINVAL or not flags & _DIRECT_IO:
                raise  # else the file's own file system has no direct transfers


def _open(number: int) -> int:
    """Open a device; in a container whose /dev does not show it, by a node of our own."""
    try:
        return os.open(f"/dev/loop{number}", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        pass
    with tempfile.TemporaryDirectory(prefix="ringfence-") as place:
        node = f"{place}/loop"
        os.mknod(node, stat.S_IFBLK | 0o600, os.makedev(_MAJOR, number))
        return os.open(node, os.O_RDWR | os.O_CLOEXEC)
