"""Frames of a Python context's kernel to the host. Runs inside the sandbox,
in the namespace of `kernel.py` and ahead of it.
"""

from __future__ import annotations

import _thread
import fcntl
import io
import os
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

OUTPUT_BYTES = 8 << 20  # of one cell; the rest is counted
FRAME_BYTES = 1 << 16
_BATCH_S = 0.002  # output that comes within it shares a frame
_F_SETPIPE_SZ = 1031  # include/uapi/linux/fcntl.h


class Uninterrupted:
    """A lock. While the main thread has it, an interrupt waits: frames go out whole."""

    def __init__(self) -> None:
        self.lock, self.depth, self.main = _thread.RLock(), 0, _thread.get_ident()
        self.is_running = self.is_pending = False

    def __enter__(self) -> None:
        if _thread.get_ident() == self.main:
            self.depth += 1
        self.lock.acquire()

    def __exit__(self, *_exc: object) -> None:
        self.lock.release()
        if _thread.get_ident() == self.main:
            self.depth -= 1
            if self.is_pending and not self.depth:
                self.interrupt()

    def interrupt(self, *_signal: object) -> None:
        """Handler of SIGINT: the cell, and nothing else of the main thread, is interrupted."""
        self.is_pending = self.is_running and self.depth > 0
        if self.is_running and not self.depth:
            raise KeyboardInterrupt


class Wire:
    """Frames to the host, and the output of cells on its way there."""

    def __init__(self) -> None:
        # High numbers: cells that close or redirect low descriptors do not hit them.
        self._out, self._whole = high(1), Uninterrupted()
        self.whole = self._whole
        self.cell = ""
        self.is_child = False
        self.dropped = self._kept = 0
        self._pending: list[tuple[str, bytes]] = []
        self._pending_bytes, self._held = 0, b""
        self._pipes: dict[int, str] = {}
        self.ends: dict[int, int] = {}
        for fd, kind in ((1, "out"), (2, "err")):
            read, write = os.pipe()
            try:
                fcntl.fcntl(write, _F_SETPIPE_SZ, 1 << 20)
            except OSError:
                pass
            self.ends[fd] = high(write)
            os.close(write)
            os.set_blocking(read, False)
            self._pipes[high(read)] = kind
            os.close(read)
        self._wakes, self._wake = os.pipe()
        self.restore()
        os.register_at_fork(after_in_child=self._forked)

    def restore(self) -> None:
        """Give cells their standard streams back, whatever an earlier cell did to them."""
        for fd, write in self.ends.items():
            os.dup2(write, fd)
        for name, kind, fd in (("stdout", "out", 1), ("stderr", "err", 2)):
            if getattr(getattr(sys, name), "closed", True) or not hasattr(self, name):
                text = io.TextIOWrapper(
                    Output(self, kind, fd),  # type: ignore[type-var]
                    "utf-8",
                    "backslashreplace",
                    line_buffering=True,
                )
                setattr(self, name, text)
                setattr(sys, name, text)
                setattr(sys, f"__{name}__", text)

    def _forked(self) -> None:
        """A child of a cell has no part in the protocol."""
        self.is_child = True
        whole = self.whole
        whole.lock, whole.depth, whole.main = _thread.RLock(), 0, _thread.get_ident()
        for fd in (self._out, *self._pipes):
            os.close(fd)

    def emit(self, kind: str, data: bytes) -> None:
        """Add output of Python code, behind what subprocesses wrote before."""
        if self.is_child:
            _write_all(1 if kind == "out" else 2, data)
            return
        with self.whole:
            self._drain()
            is_first = not self._pending
            self._keep(kind, data)
        if is_first:
            os.write(self._wake, b".")

    def _keep(self, kind: str, data: bytes) -> None:
        room = max(0, OUTPUT_BYTES - self._kept)
        self.dropped += max(0, len(data) - room)
        data = bytes(data[:room])
        self._kept += len(data)
        while data:
            self._pending.append((kind, data[:FRAME_BYTES]))
            self._pending_bytes += len(self._pending[-1][1])
            data = data[FRAME_BYTES:]
            if self._pending_bytes >= FRAME_BYTES:
                self._flush()

    def _drain(self) -> None:
        for fd, kind in self._pipes.items():
            for _ in range(32):  # a writer that never stops must not keep the lock
                try:
                    data = os.read(fd, 1 << 16)
                except BlockingIOError:
                    break
                if not data:
                    break
                self._keep(kind, data)

    def _flush(self) -> None:
        if not self.cell:
            return  # output between cells is kept for the next one
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        frames: list[bytes] = []
        pieces: list[bytes] = []
        kind = ""
        for each, data in [*pending, ("", b"")]:
            if each != kind and pieces:
                frames.append(_frame(kind, self.cell, b"".join(pieces)))
                pieces = []
            kind = each
            pieces.append(data)
        if frames:
            _write_all(self._out, b"".join(frames))

    def pump(self) -> None:
        """Body of a thread: pass output on while a cell runs."""
        poll = select.poll()
        for fd in (*self._pipes, self._wakes):
            poll.register(fd, select.POLLIN)
        while True:
            poll.poll()
            time.sleep(_BATCH_S)
            with self.whole:
                if _waits(self._wakes, select.POLLIN, 0):
                    os.read(self._wakes, 1 << 16)
                self._drain()
                self._flush()

    def begin(self, cell: str) -> None:
        """Output belongs to this cell from here on."""
        with self.whole:
            self.cell = cell
            self.whole.is_pending = False
            self._flush()

    def result(self, name: str, parts: dict[str, bytes]) -> None:
        """Send one result or error, in parts."""
        with self.whole:
            self._drain()
            self._flush()
            frames = [_frame("part", self.cell, data, mime) for mime, data in parts.items()]
            frames = [self._held, *frames, _frame(name, self.cell)]
            self._held = b""
            if name == "main":  # it goes with the end of the cell: one write, one wake-up
                self._held = b"".join(frames)
            else:
                _write_all(self._out, b"".join(frames))

    def ask(self, prompt: str) -> None:
        """Ask the host for a line of input."""
        with self.whole:
            self._drain()
            self._flush()
            _write_all(self._out, _frame("input", self.cell, prompt.encode("utf-8", "replace")))

    def skip(self, cell: str, count: int) -> None:
        """End a cell that was interrupted before its turn."""
        parts = (
            (b"KeyboardInterrupt", "name"),
            (b"the cell was interrupted before its turn", "value"),
        )
        frames = [_frame("part", cell, data, name) for data, name in parts]
        frames += [_frame("error", cell), _frame("done", cell, b"%d 0" % count)]
        _write_all(self._out, b"".join(frames))

    def end(self, count: int) -> None:
        """The cell is over, and all its output so far is on its way."""
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:  # noqa: BLE001  a stream that the cell put there
                pass
        with self.whole:
            self._drain()
            self._flush()
            numbers = b"%d %d" % (count, self.dropped)
            cell, self.cell = self.cell, ""
            self.dropped = self._kept = 0
            held, self._held = self._held, b""
            _write_all(self._out, held + _frame("done", cell, numbers))


class Output(io.RawIOBase):
    """Standard output or error of Python code."""

    def __init__(self, wire: Wire, kind: str, fd: int) -> None:
        self._wire, self._kind, self._fd = wire, kind, fd

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._fd

    def write(self, data: Any) -> int:
        self._wire.emit(self._kind, bytes(data))
        return len(data)


def _frame(kind: str, cell: str, payload: bytes = b"", name: str = "") -> bytes:
    return (
        b"\x1e%s %s %d %s\n" % (kind.encode(), cell.encode() or b"-", len(payload), _name(name))
        + payload
    )


def _name(name: str) -> bytes:
    return b"".join(b"%c" % each if 33 <= each < 127 else b"?" for each in name.encode()) or b"-"


def _write_all(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(fd, left) :]
        except BlockingIOError:
            _waits(fd, select.POLLOUT)


def _waits(fd: int, events: int, timeout_s: float | None = None) -> bool:
    """Return whether a descriptor is ready in time. Its number may be above 1,023, where select(2) ends."""
    poll = select.poll()
    poll.register(fd, events)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


def high(fd: int) -> int:
    for least in (200, 10):
        try:
            return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, least)
        except OSError:
            pass  # a limit on open files below that
    return os.dup(fd)
