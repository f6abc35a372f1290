"""Unpacking layers in a process that can do nothing else: see `unpacker.py`."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ImageRefused, IoError, StorageFull
from .decompress import compression_of

MOST_BYTES = 32 << 30
MOST_ENTRIES = 2_000_000
_FULL = (28, 122)  # ENOSPC, EDQUOT
_CODE = "import sys; sys.path[:] = {path!r}; from ringfence.images.unpacker import main; main()"


@dataclass(frozen=True)
class Layer:
    """A layer's file on this machine.

    Attributes:
        diff_id: Digest of the plain tar stream, which is checked; empty: not known.
        is_known: Its file has been compared with a digest of its own.
    """

    path: str
    diff_id: str = ""
    is_known: bool = False


def unpack(
    layers: Sequence[Layer],
    target: str,
    *,
    most_bytes: int = MOST_BYTES,
    most_entries: int = MOST_ENTRIES,
) -> int:
    """Unpack `layers` one on top of the other into the empty directory `target`.

    Returns:
        The bytes of all files that were written.

    Raises:
        ImageRefused: Damaged, of another digest, too large, or made to do harm.
        StorageFull: The disk is full.
    """
    with contextlib.ExitStack() as opened:
        root = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.callback(os.close, root)
        return _tell(opened, root, layers, most_bytes, most_entries)


def check(layers: Sequence[Layer]) -> None:
    """Read `layers` as `unpack` would, and put nothing anywhere.

    Raises:
        ImageRefused: One is damaged, of another digest, or too large.
    """
    with contextlib.ExitStack() as opened:
        _tell(opened, -1, layers, MOST_BYTES, MOST_ENTRIES)


def _tell(
    opened: contextlib.ExitStack,
    root: int,
    layers: Sequence[Layer],
    most_bytes: int,
    most_entries: int,
) -> int:
    told: list[Any] = []
    for layer in layers:
        fd = os.open(layer.path, os.O_RDONLY | os.O_CLOEXEC)
        opened.callback(os.close, fd)
        told.append([fd, compression_of(layer.path), layer.diff_id])
    roots = [root] if root >= 0 else []
    answer = _ask([root, most_bytes, most_entries, told], [*roots, *(each[0] for each in told)])
    if "bytes" in answer:
        return int(answer["bytes"])
    if answer.get("errno") in _FULL:
        raise StorageFull(f"unpacking the image: {answer['text']}", hint="free disk space")
    if "refused" in answer:
        raise ImageRefused(f"the image was not unpacked: {answer['refused']}")
    raise IoError(f"unpacking the image: {answer.get('text', 'the unpacker failed')}")


def _ask(told: list[Any], fds: list[int]) -> dict[str, Any]:
    code = _CODE.format(path=[os.path.abspath(each) for each in sys.path if each])
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, json.dumps(told)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        pass_fds=fds,
        env={"LC_ALL": "C.UTF-8"},
        cwd="/",
        check=False,
    )
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return {"text": f"the unpacker ended with {done.returncode}: {last}"}
    return answer
