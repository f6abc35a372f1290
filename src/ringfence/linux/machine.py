"""A kernel of one's own: its modules, its entropy and its end."""

from __future__ import annotations

import _struct as struct
import fcntl
import posix as os

from . import cdata
from .libc import declare, raise_errno

_RNDADDENTROPY, _RNDRESEEDCRNG = 0x40085203, 0x5207  # include/uapi/linux/random.h
_MAGIC1, _MAGIC2, _POWER_OFF = 0xFEE1DEAD, 0x28121969, 0x4321FEDC  # include/uapi/linux/reboot.h

_finit_module = declare("finit_module", cdata.c_int, cdata.c_char_p, cdata.c_int)
_reboot = declare("reboot", cdata.c_int, cdata.c_int, cdata.c_uint, cdata.c_char_p)


def finit_module(fd: int) -> None:
    """Load the kernel module that `fd` is.

    Raises:
        OSError: EEXIST if it is loaded already; ENOENT if one that it needs is not.

    Source: finit_module(2).
    """
    if _finit_module(fd, b"", 0) < 0:
        raise_errno("finit_module")


def add_entropy(entropy: bytes) -> None:
    """Mix bytes that nobody else has into the kernel's random numbers, and begin these anew.

    Source: random(4).
    """
    fd = os.open("/dev/urandom", os.O_WRONLY | os.O_CLOEXEC)
    try:
        head = struct.pack("=ii", len(entropy) * 8, len(entropy))
        fcntl.ioctl(fd, _RNDADDENTROPY, head + entropy)
        fcntl.ioctl(fd, _RNDRESEEDCRNG)
    finally:
        os.close(fd)


def power_off() -> None:
    """End the machine; nothing is synchronised.

    Source: reboot(2).
    """
    if _reboot(_MAGIC1 - (1 << 32), _MAGIC2, _POWER_OFF, None) < 0:
        raise_errno("reboot")
