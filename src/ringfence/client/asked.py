"""Encoding of requests: file names that are not UTF-8 arrive unchanged."""

from __future__ import annotations

import json
from urllib.parse import urlencode

from ..model.base import checks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


def with_query(path: str, params: Mapping[str, Any] | None) -> str:
    """`path` with parameters; those that are None are left out.

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
