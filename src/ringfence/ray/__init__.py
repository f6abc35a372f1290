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

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .backend import Backend as Backend
    from .rollouts import Progress as Progress
    from .rollouts import map_sandboxes as map_sandboxes
    from .sandbox import Handle as Handle
    from .sandbox import Sandbox as Sandbox
    from .sandbox import detached as detached

_HOMES = {
    "Backend": "backend",
    "Handle": "sandbox",
    "Progress": "rollouts",
    "Sandbox": "sandbox",
    "detached": "sandbox",
    "map_sandboxes": "rollouts",
}


def __getattr__(name: str) -> object:
    """Import a name when it is first used: Ray's sandbox package, below `Backend`, takes 0.1 s."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
