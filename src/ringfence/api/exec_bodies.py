"""Bodies of requests to an exec: signals, sizes, input."""

from __future__ import annotations

import asyncio
import os
import signal as signals
from typing import Annotated

from pydantic import BaseModel, Field, StrictInt

from ..errors import InvalidRequest
from ..execs.run import Run


class SignalBody(BaseModel):
    """A signal by number or name; with `group`, to the whole process group, as a terminal's are."""

    signal: Annotated[StrictInt, Field(ge=1, lt=signals.NSIG)] | str
    group: bool = False


class SizeBody(BaseModel):
    """Size of a terminal."""

    rows: int = Field(ge=1, le=65_535)
    cols: int = Field(ge=1, le=65_535)


def signal_number(given: object) -> int:
    """The number of `15`, `"TERM"` or `"SIGTERM"`.

    Raises:
        InvalidRequest: There is no such signal.
    """
    if isinstance(given, str):
        name = "SIG" + given.upper().removeprefix("SIG")
        given = signals.Signals.__members__.get(name, 0)
    if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given < signals.NSIG:
        raise InvalidRequest("is not a signal", field="signal")
    return int(given)


async def give(run: Run, offset: int, data: bytes, stall_s: float) -> int:
    """Write input, waiting for the process to read it, `stall_s` at most; the offset to go on from.

    Raises:
        RingfenceError: As `Run.give`.
    """
    left, end = memoryview(data), offset + len(data)
    while (reached := run.give(offset, left)) < end and await _has_room(run, stall_s):
        left, offset = left[reached - offset :], reached
    return reached


async def append(run: Run, data: bytes) -> None:
    """Write input after all that it was given, waiting for the process to read it.

    Raises:
        RingfenceError: As `Run.append`.
    """
    left = memoryview(data)
    while left := left[run.append(left) :]:
        await _has_room(run, None)


async def _has_room(run: Run, stall_s: float | None) -> bool:
    fd = run.input_place()
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_writer(fd, ready.set)
    try:
        async with asyncio.timeout(stall_s):
            await ready.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_writer(fd)
        os.close(fd)
    return True
