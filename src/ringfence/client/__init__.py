"""The SDK: sandboxes of a server, with the surface of local ones.

What is in `_async` is written; what is in `_sync` is made of it by `tools/make_sync_client.py`.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._async.client import AsyncClient as AsyncClient
    from ._async.sandbox import AsyncRemoteSandbox as AsyncRemoteSandbox
    from ._sync.client import Client as Client
    from ._sync.sandbox import RemoteSandbox as RemoteSandbox

_HOME = {
    "AsyncClient": "_async.client",
    "AsyncRemoteSandbox": "_async.sandbox",
    "Client": "_sync.client",
    "RemoteSandbox": "_sync.sandbox",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> object:
    """Import the class on first use (PEP 562): it needs the extra `client`."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    except ModuleNotFoundError as exc:
        if exc.name not in ("httpx2", "anyio", "wsproto"):
            raise
        from ..errors import BackendUnavailable

        hint = 'pip install "ringfence[client]"'
        raise BackendUnavailable(f"the client is not installed: {exc}", hint=hint) from exc
    globals()[name] = value
    return value
