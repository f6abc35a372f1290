"""Parts of a file: RFC 9110, section 14."""

from __future__ import annotations

import re

_ONE = re.compile(r"\Abytes=(\d{0,18})-(\d{0,18})\Z")


def part_of(header: str, size: int) -> tuple[int, int] | None:
    """From where to where, exclusive; None for the whole, which is also right for what is not understood.

    Raises:
        ValueError: Nothing of it is there.
    """
    match = _ONE.match(header.strip())
    if match is None or not (match[1] or match[2]):
        return None
    if not match[1]:
        last = int(match[2])
        if not last or not size:
            raise ValueError
        return max(0, size - last), size
    start = int(match[1])
    end = min(int(match[2]) + 1, size) if match[2] else size
    if start >= size:
        raise ValueError
    return None if end <= start else (start, end)
