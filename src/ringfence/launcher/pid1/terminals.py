"""Pseudo-terminals of the sandbox's own, for whoever is its PID 1."""

from __future__ import annotations

import _struct as struct
import fcntl
import posix as os

from .. import wire

# include/uapi/asm-generic/ioctls.h
_TIOCGPTN, _TIOCSPTLCK, _TIOCSWINSZ, _TIOCSCTTY = 0x80045430, 0x40045431, 0x5414, 0x540E


def open_for_host(reply: wire.Socket, rows: int, columns: int) -> tuple[str, int]:
    """A new pseudo-terminal of the sandbox's own devpts: its master goes to the host.

    Returns the name of the slave, and a descriptor of it to close once the process has its own:
    a master without any slave reads as hung up.
    """
    master, name = new_terminal("/dev/pts/ptmx", rows, columns)
    try:
        slave = os.open(name, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            wire.send_raw(reply, b"T", [master])
        except OSError:  # the host has gone
            os.close(slave)
            raise
    finally:
        os.close(master)
    return name, slave


def take(slave: int) -> None:
    """Make a terminal that is open the controlling one. Precondition: the caller leads a new session.

    Source: ioctl_tty(2), TIOCSCTTY.
    """
    fcntl.ioctl(slave, _TIOCSCTTY, 0)


def new_terminal(multiplexer: str, rows: int, columns: int) -> tuple[int, str]:
    """A pseudo-terminal's master, and the name of its slave.

    Source: pts(4), ioctl_tty(2).
    """
    master = os.open(multiplexer, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(master, _TIOCSPTLCK, struct.pack("i", 0))
        number = struct.unpack("i", fcntl.ioctl(master, _TIOCGPTN, struct.pack("i", 0)))[0]
        fcntl.ioctl(master, _TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    except OSError:
        os.close(master)
        raise
    return master, f"/dev/pts/{number}"
