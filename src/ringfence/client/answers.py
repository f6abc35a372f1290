"""Encoding of requests, mapping of responses to errors, and whether a retry may help. Pure."""

from __future__ import annotations

import json
import random
import socket
import sys
from urllib.parse import urlencode

from ..errors import RingfenceError, ServerUnreachable, error_from_json
from ..model.base import checks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_PROBLEM = "application/problem+json"
_LONGEST_PAUSE_S = 5.0
_FIRST_PAUSE_S = 0.1
KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]
"""A stream may be quiet for hours; a peer that is gone is noticed within a minute: tcp(7)."""
BUSY = (429, 502, 503, 504)
"""Statuses that pass by themselves."""


def error_of(status: int, media_type: str, form: Any) -> RingfenceError:
    """The error that a response of status 400 or more tells of: of the class that was raised there."""
    if media_type.startswith(_PROBLEM) and isinstance(form, dict) and "code" in form:
        return error_from_json({"message": form.get("detail", ""), **form})
    return ServerUnreachable(f"answered {status}, in a form that is not Ringfence's")


def object_of(content: bytes) -> Any:
    """The JSON object that a response is.

    Raises:
        ServerUnreachable: It is none: something else answers there.
    """
    try:
        form = json.loads(content)
    except (ValueError, RecursionError):
        form = None
    if not isinstance(form, dict):
        raise ServerUnreachable("answered in a form that is not Ringfence's")
    return form


def user_agent() -> str:
    """Build the User-Agent header."""
    # Layering forbids importing the package; it is loaded by the time this runs.
    return f"ringfence/{sys.modules['ringfence'].__version__}"


def pause_s(attempt: int, headers: Mapping[str, str]) -> float:
    """How long to wait before asking again: what the server says, else longer each time.

    Args:
        attempt: 0 for the first one that failed.
    """
    told = headers.get("retry-after", "")
    if told.isdigit():
        return min(float(told), _LONGEST_PAUSE_S)
    # Spread out: those that failed together must not come back together.
    return min(_FIRST_PAUSE_S * 2.0**attempt, _LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)


def with_query(path: str, params: Mapping[str, Any] | None) -> str:
    """`path` with parameters; None ones are left out, file names that are not UTF-8 arrive unchanged.

    Raises:
        InvalidRequest: One is no text that the kernel could be given.
    """
    wanted = {name: _plain(name, value) for name, value in (params or {}).items()}
    given = {name: value for name, value in wanted.items() if value is not None}
    query = urlencode(given, doseq=True, errors="surrogateescape")
    return f"{path}?{query}" if query else path


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    return checks.text(value, name) if isinstance(value, str) else value


def as_json(body: Any) -> bytes:
    """A body in ASCII: a lone surrogate, which UTF-8 cannot write, has an escape."""
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode("ascii")
