"""Waiting for descriptors, however high their numbers are."""

from __future__ import annotations

import select
from collections.abc import Iterable


def readable(fds: Iterable[int], timeout_s: float) -> list[int]:
    """Those that can be read or have ended, within `timeout_s` seconds; none where it is over before.

    `select.select` refuses descriptors above 1023, which a run of thousands of tests may have.
    """
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(timeout_s * 1000)]
