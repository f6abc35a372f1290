"""Messages to people: one line each, colours, a progress line."""

from __future__ import annotations

import errno
import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Self

    from .options import Command

_COLOURS = {"green": "32", "yellow": "33", "red": "31", "bold": "1", "dim": "2"}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_EVERY_S = 0.1
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def say(text: str) -> None:
    """Print one line on stderr, escaped; a closed stderr is no error."""
    try:
        os.write(2, f"ringfence: {shown(text)}\n".encode())
    except OSError:
        pass


def shown(text: str) -> str:
    """`text` in one line; bytes that are no UTF-8, and what would steer the terminal, escaped."""
    try:
        raw = text.encode(
            "utf-8", "surrogateescape"
        )  # of a name, the very bytes: whatever the locale
    except UnicodeEncodeError:
        raw = text.encode("utf-8", "backslashreplace")
    words = " ".join(raw.decode("utf-8", "backslashreplace").split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words)


def complain(exc: BaseException, command: Command | None = None) -> None:
    """Print one line: the cause, the option at fault and the fix."""
    say(describe(exc, command))
    if os.environ.get("RINGFENCE_DEBUG"):
        import traceback

        traceback.print_exception(exc)


def describe(exc: BaseException, command: Command | None = None) -> str:
    """The line that `complain` prints, without the name in front."""
    from ..errors import RingfenceError

    if isinstance(exc, OSError) and exc.errno in _FULL and exc.filename is None:
        return f"standard output: {exc.strerror}"  # nothing else here is written without a name
    if isinstance(exc, RuntimeError) and "new thread" in str(exc):
        how = "raise `ulimit -u`, `ulimit -v` or pids.max of its cgroup"
        return f"no thread can be started in this process ({how})"
    if isinstance(exc, MemoryError):
        return "out of memory in this process (raise `ulimit -v`)"
    if not isinstance(exc, RingfenceError):
        return f"internal error: {type(exc).__name__}: {exc} (RINGFENCE_DEBUG=1 shows where)"
    where = command.flag_of(exc.field) if command and exc.field else exc.field
    return (f"{where}: " if where else "") + exc.message + (f" ({exc.hint})" if exc.hint else "")


def is_terminal(fd: int) -> bool:
    """Return whether `fd` is open and a terminal."""
    try:
        return os.isatty(fd)
    except OSError:
        return False


class Colours:
    """Paints words where a person looks; leaves them alone in a pipe and under NO_COLOR."""

    def __init__(self, fd: int) -> None:
        # no-color.org: present and not empty, whatever its value.
        dumb = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        self.on = is_terminal(fd) and not dumb

    def paint(self, colour: str, text: str) -> str:
        return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if self.on else text


class Progress:
    """A progress line for long copies: pass it as `progress=`; silent where nobody looks.

    Args:
        what: What is being done, such as `uploading`.
        total_bytes: Shows a percentage when known.
        fd: Where to draw, if it is a terminal.
    """

    def __init__(self, what: str, total_bytes: int | None = None, fd: int = 2) -> None:
        self._what, self._total, self._fd = what, total_bytes, fd
        self._on = is_terminal(fd)
        self._started = self._drawn = time.monotonic()
        self._used = False

    def __call__(self, copied_bytes: int, path: str) -> None:
        """Draw, at most ten times a second."""
        now = time.monotonic()
        if self._on and now - self._drawn >= _EVERY_S:
            self._drawn, self._used = now, True
            self._write(self._line(copied_bytes, path, now - self._started))

    def _line(self, copied_bytes: int, path: str, elapsed_s: float) -> str:
        share = f" {100 * copied_bytes // self._total:3d} %" if self._total else ""
        rate = f"{size(int(copied_bytes / elapsed_s))}/s" if elapsed_s > 0 else ""
        line = f"{self._what}{share} {size(copied_bytes)} {rate} {path}"
        # A name comes from inside a sandbox: it must not steer the terminal.
        safe = "".join(c if c.isprintable() else "?" for c in line)
        return safe[: self._columns() - 1]

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._fd).columns or 80
        except OSError:
            return 80

    def _write(self, line: str) -> None:
        try:
            os.write(self._fd, f"\r\x1b[K{line}".encode("utf-8", "replace"))
        except OSError:
            self._on = False

    def close(self) -> None:
        if self._used:
            self._used = False
            self._write("")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def size(count: int) -> str:
    """`count` bytes as people read them."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"
