"""What a hostile cell writes to the wire of its context: code for Python, and how each must end."""

from __future__ import annotations

from pathlib import Path

PRELUDE = """
import gc, os
_wire = next(each for each in gc.get_objects() if type(each).__name__ == 'Wire')
_cell = _wire.cell.encode()
def send(data):
    left = memoryview(data)
    while left:
        try: left = left[os.write(_wire._out, left):]
        except BlockingIOError: pass
def frame(kind, payload=b'', name=b'-', cell=_cell):
    return b'\\x1e%s %s %d %s\\n' % (kind, cell, len(payload), name) + payload
"""
ENDS = {
    "bytes that are no frame": "send(b'no frame at all' * 100)",
    "a huge length": "send(b'\\x1eout - 999999999 -\\n')",
    "a length of more digits than any has": "send(b'\\x1eout - 99999999999999999999 -\\n' * 10)",
    "a negative length": "send(b'\\x1eout %s -5 -\\n' % _cell + bytes(200))",
    "a length that is no number": "send(b'\\x1eout %s 0x10 -\\n' % _cell + bytes(200))",
    "a kind that is no word": "send(b'\\x1e\\xff\\xfe %s 5 -\\n' % _cell + bytes(200))",
    "a name that is too long": "send(frame(b'part', b'x', b'n' * 101) + bytes(200))",
    "a name that is no ASCII": "send(frame(b'part', b'x', b'\\xff') + bytes(200))",
    "a cell that is none": "send(frame(b'out', b'x', cell=b'../x') + bytes(200))",
    "zeros": "send(bytes(100_000))",
}
"""The stream is useless from there on: they end the context."""
LASTS = {
    "unknown kinds": "send(frame(b'what', b'x') * 1000)",
    "frames of other cells": "send(frame(b'main', cell=b'-') * 1000 + frame(b'done', b'1 0', cell=b'0' * 32))",
    "many tiny frames": "for _ in range(30): send(frame(b'out', b'x') * 10_000)",
    "many results": "for _ in range(30): send(frame(b'main') * 10_000)",
    "JSON that is deep": "send(frame(b'part', b'[' * 10_000_000, b'application/json') + frame(b'main'))",
    "JSON of many values": "send(frame(b'part', b'[' + b'[],' * 3_000_000 + b'0]', b'application/json')"
    " + frame(b'display'))",
    "JSON with a long number": "send(frame(b'part', b'9' * 9_000_000, b'application/json') + frame(b'main'))",
    "results without an end": "for at in range(300): send(frame(b'part', bytes(1 << 20), b'x/%d' % at))",
    "results of invalid UTF-8": "send(frame(b'part', b'\\xff' * (15 << 20), b'text/plain') + frame(b'main'))",
    "output of invalid UTF-8": "for _ in range(300): send(frame(b'out', b'\\xff' * (1 << 20)))",
    "an image that is none": "send(frame(b'part', b'\\xff' * 1000, b'image/png') + frame(b'display'))",
    "errors again and again": "one = frame(b'part', b'x' * 1000, b'value') + frame(b'error')\n"
    "for _ in range(200): send(one * 100)",
}
"""They are the cell's own, and the cell ends as others do."""
PROMPTS = """import time
_kernel = next(each for each in gc.get_objects() if type(each).__name__ == 'Kernel')
type(_kernel)._sort = lambda *_: time.sleep(1000)
for _ in range(6_000): send(frame(b'input', b'p' * 65_536))
time.sleep(1000)
"""
"""Nothing reads the answers."""
GROWTH_BYTES = 400 << 20


def reset_peak(pid: int | str = "self") -> int:
    """Forget the most memory that a process has had; return what it has."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _kib(pid, "VmRSS") << 10


def peak(pid: int | str = "self") -> int:
    """Return the most memory that a process has had since `reset_peak`."""
    return _kib(pid, "VmHWM") << 10


def _kib(pid: int | str, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
