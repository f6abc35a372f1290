"""How much the server takes."""

from __future__ import annotations

from dataclasses import dataclass

from ..model.base import checks
from ..model.base.model import Model

_MOST = 2**31
_COUNTS = (
    *("connections", "requests", "requests_of_client", "head_bytes"),
    *("body_bytes", "bodies_bytes", "bodies_bytes_of_client"),
)


@dataclass(frozen=True, eq=False, repr=False)
class Bounds(Model):
    """How much the server takes.

    Attributes:
        connections: At once; one more is closed with 503.
        requests: At once, of everybody together; then 503.
        requests_of_client: At once, of one client; then 429.
        head_bytes, head_s: Of the head of a request, and until it is whole.
        body_bytes, body_s: Of a body that is read whole, and until it is there.
        bodies_bytes, bodies_bytes_of_client: Of all such bodies at once, of everybody together (then
            503) and of one client (then 429).
        chunk_s: Between two pieces of a body that is streamed.
    """

    connections: int = 4096
    requests: int = 2048
    requests_of_client: int = 512
    head_bytes: int = 64 << 10
    head_s: float = 10.0
    body_bytes: int = 16 << 20
    body_s: float = 30.0
    bodies_bytes: int = 256 << 20
    bodies_bytes_of_client: int = 64 << 20
    chunk_s: float = 60.0

    def __post_init__(self) -> None:
        for name in _COUNTS:
            checks.integer(getattr(self, name), name, 1, _MOST)
        for name in ("head_s", "body_s", "chunk_s"):
            checks.number(getattr(self, name), name, 0.001, 86_400.0)
