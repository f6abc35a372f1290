"""Files that every fresh sandbox has: a saved stream that holds no others need not be unpacked into one.

Unpacking takes a helper in the sandbox, and a process of Python forked twice: a quarter of the processor time
of a fork. A context that kept all its state in memory has changed no file.
"""

from __future__ import annotations

import os

from ...errors import RingfenceError
from .trees import Helper

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .live import LiveSandbox

    Members = dict[bytes, bytes]  # header without its time, and content, by name

_BLOCK = 512
_NAME, _SIZE, _MTIME, _KIND, _PREFIX = 100, slice(124, 135), 136, 156, slice(345, 500)
_MOST_BYTES = 1 << 18
# The furniture of a root is made at once, so a later time shows a change that left the content as it was.
_AT_ONCE_S = 1.0


_known: dict[bytes, Members | None] = {}
"""What fresh sandboxes have, by the furniture that they were made of."""
_lasts: list[tuple[object, ...]] = [()]  # of the last stream that had no more


def has(sandbox: LiveSandbox, content: int) -> bool:
    """Return whether `sandbox`, in which nothing ran yet, has all that is in a stream already.

    The first stream that is compared with furniture is always said to have more: a process that restores
    one sandbox shall not read what that has.
    """
    furniture, info = sandbox.furniture, os.fstat(content)
    if not furniture or info.st_size > _MOST_BYTES:
        return False
    asked = furniture, info.st_dev, info.st_ino, info.st_ctime_ns
    if asked == _lasts[0]:
        return True
    if furniture not in _known:
        _known[furniture] = None
        return False
    wanted = _members(os.pread(content, _MOST_BYTES, 0))
    if wanted is None:
        return False
    known = _known[furniture] = _known[furniture] or _read(sandbox)
    if wanted.items() <= known.items():
        _lasts[0] = asked
        return True
    return False


def _read(sandbox: LiveSandbox) -> Members:
    helper = Helper(sandbox, "out", "/", as_root=True)
    try:
        with open(helper.stream, "rb", closefd=False) as file:
            found = _members(file.read(_MOST_BYTES))
    except BaseException:
        helper.abandon()
        raise
    try:
        helper.finish("/")
    except RingfenceError:
        return {}
    return found or {}


def _members(stream: bytes) -> Members | None:
    """Read a tar stream; None: it has more than plain members, or they were not made at once."""
    found: Members = {}
    times: list[float] = []
    at = 0
    try:
        while any(head := stream[at : at + _BLOCK]):
            at += _BLOCK
            size = int(head[_SIZE], 8)
            content = stream[at : at + size]
            at += -(-size // _BLOCK) * _BLOCK
            if head[_KIND : _KIND + 1] == b"x":
                length, name, time = content.replace(b"=", b" ").split()
                if name != b"mtime" or int(length) != size:
                    return None
                times.append(float(time))
            else:
                name = head[:_NAME] + head[_PREFIX]
                found[name] = head[:_MTIME] + head[_KIND:] + content
    except ValueError:
        return None
    is_plain = len(times) == len(found) and max(times) - min(times) <= _AT_ONCE_S
    return found if is_plain else None
