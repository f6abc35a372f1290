"""Ids: time-ordered, bounded, and always valid as a file name and a host name."""

from __future__ import annotations

import os
import time
from _thread import allocate_lock

from . import checks
from .helpful import knows_keywords

MAX_LENGTH = 63  # one DNS label, and far below NAME_MAX
_UUID_LENGTH = 36
_LOWER = frozenset("abcdefghijklmnopqrstuvwxyz0123456789")
_ALLOWED = _LOWER | {"-"}
_HEX = frozenset("0123456789abcdef")

_NODE_DIGITS = 8
_AT_NODE = -12  # of an id: the last group of its UUID begins there

_lock = allocate_lock()
_last = 0
_node = ""


def set_node(node: str) -> None:
    """Let every id that this process makes from now on name its node of a cluster.

    Args:
        node: Eight hexadecimal digits; empty for none.
    """
    global _node
    if node and (len(node) != _NODE_DIGITS or not _HEX.issuperset(node)):
        checks.refuse("node", f"{node!r} is not {_NODE_DIGITS} hexadecimal digits")
    _node = node


def node_of(any_id: str) -> str:
    """Read the node in an id of `new_id`; anything at all where the process that made it had none."""
    found = any_id[_AT_NODE : _AT_NODE + _NODE_DIGITS]
    return found if len(found) == _NODE_DIGITS and _HEX.issuperset(found) else ""


@knows_keywords
def new_id(prefix: str) -> str:
    """A fresh id such as `native-0190b5a4-...`; later ids of one prefix sort after earlier ones.

    Args:
        prefix: The backend's name, or `sbx`, `sess`, ...: letters and digits, at most 26.
    """
    if len(prefix) > MAX_LENGTH - _UUID_LENGTH - 1:
        checks.refuse("prefix", f"{prefix!r} is too long for an id")
    return check_id(f"{prefix}-{_uuid7()}", "prefix")


def derived_id(id: str, *others: str) -> str:
    """The id that these always give: as old as the first one, and of the same prefix."""
    import hashlib  # OpenSSL: a run does without

    digest = hashlib.sha256("\0".join((id, *others)).encode()).hexdigest()
    low = int(digest[:16], 16) & (2**62 - 1) | 1 << 63
    return f"{id[:-18]}-{low >> 48:04x}-{low & (1 << 48) - 1:012x}"


@knows_keywords
def check_id(value: object, field: str = "id") -> str:
    """The id in `value`, trimmed.

    Raises:
        InvalidRequest: Empty, too long, or anything that could be read as a path or an option.
    """
    if not isinstance(value, str):
        hint = "give its id: .id" if hasattr(value, "id") else ""
        checks.refuse(field, f"must be a string, not {type(value).__name__}", hint)
    given = value.strip()
    if not given:
        checks.refuse(field, "must not be empty")
    if len(given) > MAX_LENGTH:
        checks.refuse(field, f"is longer than {MAX_LENGTH} characters")
    if not _ALLOWED.issuperset(given) or given[0] == "-" or given[-1] == "-":
        checks.refuse(field, f"{given!r} is not an id: use a-z, 0-9 and inner dashes")
    return given


def _uuid7() -> str:
    """A version 7 UUID whose first 60 value bits count time.

    Source: RFC 9562 section 5.7, and 6.2 method 3 (sub-millisecond time in `rand_a`).
    """
    ticks = _next_ticks()
    low = int.from_bytes(os.urandom(8), "big") & (2**62 - 1) | 1 << 63
    digits = f"{ticks >> 12:012x}7{ticks & 0xFFF:03x}{low:016x}"
    # Random bits give way to the node: within it, the count of ticks alone keeps ids apart.
    last = _node + digits[20 + len(_node) :]
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{last}"


def _next_ticks() -> int:
    """Time in 1/4096 ms since 1970, but always later than the last answer.

    The clock may be set back, and two callers may come within one tick.
    """
    global _last
    with _lock:
        _last = max(_last + 1, (time.time_ns() << 12) // 1_000_000)
        return _last
