"""Sandboxes in Ray programs: `pip install "ringfence[ray]"`.

This package is `ringfence.ray`; Ray's own is `ray`. `ringfence` itself imports neither.
"""

from __future__ import annotations

TRIED = ("2.60",)
"""The versions of Ray that the tests run with. Others are refused: its sandbox API is alpha."""

try:
    import ray as _ray
except ImportError as exc:
    raise ImportError(
        'ringfence.ray needs Ray, which is not installed here: pip install "ringfence[ray]"'
    ) from exc

if ".".join(_ray.__version__.split(".")[:2]) not in TRIED:
    raise ImportError(
        f"ringfence.ray was tried with Ray {', '.join(TRIED)}, and this is Ray {_ray.__version__}:"
        ' pip install "ringfence[ray]" installs a version that was tried'
    )
