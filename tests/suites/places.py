"""What the suites' sandboxes run in: the native backend, or the one named by RINGFENCE_SUITE_BACKEND."""

from __future__ import annotations

import os
from typing import Any


def options(**more: Any) -> dict[str, Any]:
    """Keyword arguments of `Sandbox.create`."""
    backend = os.environ.get("RINGFENCE_SUITE_BACKEND")
    return {**({"backend": backend} if backend else {}), **more}
