"""Sandboxes that were evicted from a draining node: records by which gateways find and restore them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Self

MOVED = "moved/"
"""Keys of records in the cluster's store, by sandbox."""
KEEP_S = 30 * 86_400.0
"""How long a record is kept where no node has the sandbox."""


@dataclass(frozen=True)
class Moved:
    """A sandbox that has left its node.

    Attributes:
        snapshot: In the snapshot_store, with memory.
        needs: What a node must have to restore it, beside the backend and the image.
        left: The node that it has left.
        at: When, in seconds since 1970.
        node: Where it was restored; empty until then.
    """

    owner: str
    snapshot: str
    name: str
    timeouts: dict[str, Any]
    metadata: dict[str, str]
    backend: str
    needs: str
    image: str | None
    left: str
    at: float
    node: str = ""

    def written(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def read(cls, value: bytes) -> Self:
        return cls(**json.loads(value))


__all__ = ["KEEP_S", "MOVED", "Moved"]
