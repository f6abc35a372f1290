"""Our own terminal while the command runs on one of the sandbox: raw, and always put back."""

from __future__ import annotations

import os
import termios

_IFLAG, _OFLAG, _CFLAG, _LFLAG, _CC = 0, 1, 2, 3, 6
END_OF_INPUT = b"\x04"


class RawTerminal:
    """Terminal `fd` between `enter` and `restore`: every key is passed on unchanged."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._before = termios.tcgetattr(fd)

    def enter(self) -> None:
        """Pass every key on. Source: cfmakeraw(3)."""
        mode = termios.tcgetattr(self._fd)
        mode[_IFLAG] &= ~(
            termios.IGNBRK
            | termios.BRKINT
            | termios.PARMRK
            | termios.ISTRIP
            | termios.INLCR
            | termios.IGNCR
            | termios.ICRNL
            | termios.IXON
        )
        mode[_OFLAG] &= ~termios.OPOST
        mode[_LFLAG] &= ~(
            termios.ECHO | termios.ECHONL | termios.ICANON | termios.ISIG | termios.IEXTEN
        )
        mode[_CFLAG] = (mode[_CFLAG] & ~(termios.CSIZE | termios.PARENB)) | termios.CS8
        mode[_CC][termios.VMIN], mode[_CC][termios.VTIME] = 1, 0
        termios.tcsetattr(self._fd, termios.TCSADRAIN, mode)

    def restore(self) -> None:
        """Put it back as it was; may be called again.

        What nobody has read goes: a program can have a terminal answer with words of its choice
        (CVE-2022-45872, CVE-2024-56803), and whoever reads next is a shell of the host's.
        """
        try:
            termios.tcsetattr(self._fd, termios.TCSAFLUSH, self._before)
        except (OSError, termios.error):
            pass  # the terminal is gone


def size_of(*fds: int) -> tuple[int, int]:
    """(rows, columns) of the first of `fds` that is a terminal; 24 by 80 where none is."""
    for fd in fds:
        try:
            found = os.get_terminal_size(fd)
        except OSError:
            continue
        if found.lines and found.columns:
            return found.lines, found.columns
    return 24, 80
