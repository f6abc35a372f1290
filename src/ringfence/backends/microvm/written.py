"""File of a saved machine: the conditions for restoring it, then the emulator's own stream."""

from __future__ import annotations

import json
import os

from ...errors import InvalidRequest, SnapshotCorrupt, Unsupported
from ...model.mount import Mount

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

_MAGIC = b"ringfence machine 1\n"
_LENGTH = 8  # of the number of bytes of what follows it, little-endian
_MOST_BYTES = 1 << 26


class Conditions:
    """Conditions for restoring a machine: the parts it was made of.

    Args:
        key: Of the emulator, the kernel and the processor: see `Machines.key`.
        sources: The host paths it sees, in order.
    """

    def __init__(self, key: str, sources: Sequence[str]) -> None:
        self.key, self.sources = key, list(sources)

    def check(self, now: Conditions) -> None:
        """Raises Unsupported where something is not as it was."""
        if self.key != now.key:
            why = "it was saved by another emulator, kernel or processor"
        elif self.sources != now.sources:
            why = "its host files have changed since"
        else:
            return
        raise Unsupported(why, backend="microvm", operation="restore", field="snapshot_id")


class Head:
    """Header of such a file.

    Args:
        before: Parts the machine was made of; None for a new one.
        known: File tables of the guest's kernel, as the file servers wrote them.
        attached: Mounts added after its start.
    """

    def __init__(
        self,
        before: Conditions | None = None,
        known: Sequence[bytes] = (),
        attached: Sequence[Mount] = (),
    ) -> None:
        self.before, self.known, self.attached = before, known, attached


def begin(
    file: int, before: Conditions, known: Sequence[bytes], attached: Sequence[Mount] = ()
) -> None:
    """Write what comes before the emulator's stream: see `Head`."""
    form = {
        "key": before.key,
        "sources": before.sources,
        "known": [len(k) for k in known],
        "attached": [each.to_json() for each in attached],
    }
    text = json.dumps(form).encode()
    content = memoryview(b"".join([_MAGIC, len(text).to_bytes(_LENGTH, "little"), text, *known]))
    while content:
        content = content[os.write(file, content) :]


def read(file: int) -> Head:
    """Read the header; the descriptor is then where the emulator's stream begins.

    Raises:
        SnapshotCorrupt: It is not a header.
    """
    try:
        if _exactly(file, len(_MAGIC)) != _MAGIC:
            raise ValueError("has an invalid header")
        form: Any = json.loads(_exactly(file, int.from_bytes(_exactly(file, _LENGTH), "little")))
        before = Conditions(form["key"], form["sources"])
        known = [_exactly(file, int(size)) for size in form["known"]]
        attached = [Mount.from_json(each) for each in form.get("attached", ())]
    except (ValueError, KeyError, TypeError, InvalidRequest) as exc:
        raise SnapshotCorrupt(f"the machine cannot be read: {exc}", hint="delete it") from exc
    return Head(before, known, attached)


def _exactly(file: int, size: int) -> bytes:
    if not 0 <= size <= _MOST_BYTES:
        raise ValueError("it has an invalid length")
    found = b""
    while len(found) < size:
        piece = os.read(file, size - len(found))
        if not piece:
            raise ValueError("it is truncated")
        found += piece
    return found
