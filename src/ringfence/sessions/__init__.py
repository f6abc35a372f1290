"""Sandboxes that outlive a call: leased to clients, kept warm, watched, ended in time."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .aio import AsyncLease as AsyncLease
    from .aio import AsyncSandboxBash as AsyncSandboxBash
    from .aio import AsyncSessionManager as AsyncSessionManager
    from .bash import AsyncBashTool as AsyncBashTool
    from .bash import BashConfig as BashConfig
    from .bash import BashOutput as BashOutput
    from .bash import BashTool as BashTool
    from .bash import SandboxBash as SandboxBash
    from .config import ManagerConfig as ManagerConfig
    from .config import PoolConfig as PoolConfig
    from .lease import Lease as Lease
    from .manager import SessionManager as SessionManager

_HOME = {
    "AsyncBashTool": "bash",
    "AsyncLease": "aio",
    "AsyncSandboxBash": "aio",
    "AsyncSessionManager": "aio",
    "BashConfig": "bash",
    "BashOutput": "bash",
    "BashTool": "bash",
    "Lease": "lease",
    "ManagerConfig": "config",
    "PoolConfig": "config",
    "SandboxBash": "bash",
    "SessionManager": "manager",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> object:
    """Import the class on first use (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
