"""FUSE mount of host files in a machine: requests go out by a port, answers come in.

Two processes pass whole messages on and understand nothing of them. Who answers is on the host.
"""

from __future__ import annotations

import errno
import os
import time

from ..linux import fuse, mounts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

_PAUSE_S = 0.005
_PAUSES = 1000
_NOT_PASSED_ON = (fuse.INTERRUPT, fuse.DESTROY)
_LENGTH = 4  # of the length that a message begins with


def mount(place: str, port: int) -> None:
    """Mount the host's files at `place`. Accesses wait until a server answers."""
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    # The guest's kernel enforces modes and owners for all users, our own namespace's root too.
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
    flags = mounts.MS_NOSUID | mounts.MS_NODEV
    mounts.mount("ringfence", place, "fuse", flags, options)
    _apart(lambda: _ask(device, port))
    _apart(lambda: _answer(device, port))
    os.close(device)


def survive() -> None:
    """Be the last that this kernel kills for lack of memory."""
    with open("/proc/self/oom_score_adj", "wb") as file:
        file.write(b"-1000")


def _apart(work: Callable[[], None]) -> None:
    if os.fork() == 0:
        try:
            survive()
            work()
        finally:
            os._exit(1)


def _ask(device: int, port: int) -> NoReturn:
    buffer = bytearray(fuse.BUFFER)
    view = memoryview(buffer)
    while True:
        try:
            size = os.readv(device, [buffer])
        except OSError as exc:
            if exc.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                continue  # who asked has been interrupted
            raise
        operation = buffer[_LENGTH]
        if operation == fuse.INIT:  # nothing in it is the host's to say
            os.write(device, fuse.agreed(view[:size]))
        elif operation not in _NOT_PASSED_ON:
            rest = view[:size]
            while rest:
                rest = rest[os.write(port, rest) :]


def _answer(device: int, port: int) -> None:
    buffer = bytearray(2 * fuse.BUFFER)
    view = memoryview(buffer)
    have = silence = 0
    while silence < _PAUSES:
        count = os.readv(port, [view[have:]])
        if not count:  # nobody is at the other end: not yet, or not any more
            silence += bool(have)
            time.sleep(_PAUSE_S)
            continue
        have += count
        while have >= _LENGTH:
            size = int.from_bytes(buffer[:_LENGTH], "little")
            if have < size:
                break
            try:
                os.write(device, view[:size])
            except OSError as exc:
                if exc.errno not in (errno.ENOENT, errno.EINTR):
                    raise
            have -= size
            buffer[:have] = buffer[size : size + have]
