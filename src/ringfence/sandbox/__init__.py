"""The library: `Sandbox` and `AsyncSandbox` over any backend."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .aio import AsyncSandbox as AsyncSandbox
    from .aio_process import AsyncProcess as AsyncProcess
    from .process import Process as Process
    from .sync import Sandbox as Sandbox

_HOME = {
    "Sandbox": "sync",
    "Process": "process",
    "AsyncSandbox": "aio",
    "AsyncProcess": "aio_process",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> object:
    """Import the class on first use (PEP 562): `ringfence run` needs only one of them."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
