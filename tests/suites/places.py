"""What the suites' sandboxes run in: the native backend, or the one named by RINGFENCE_SUITE_BACKEND."""

from __future__ import annotations

import os
from typing import Any

_STRONG = ("gvisor",)


def options(**more: Any) -> dict[str, Any]:
    """Keyword arguments of `Sandbox.create`."""
    backend = os.environ.get("RINGFENCE_SUITE_BACKEND")
    if not backend:
        return more
    return {"backend": backend, "tier": "strong" if backend in _STRONG else "light", **more}
