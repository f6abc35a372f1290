"""Sandboxes that outlive a call: leased to clients, kept warm, watched, ended in time."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .aio import AsyncLease as AsyncLease
    from .aio import AsyncSandboxBash as AsyncSandboxBash
    from .aio import AsyncSessionManager as AsyncSessionManager
    from .config import ManagerConfig as ManagerConfig
    from .config import PoolConfig as PoolConfig
    from .lease import Lease as Lease
    from .manager import SessionManager as SessionManager
    from .shells.bash import AsyncBashTool as AsyncBashTool
    from .shells.bash import BashConfig as BashConfig
    from .shells.bash import BashOutput as BashOutput
    from .shells.bash import BashTool as BashTool
    from .shells.bash import SandboxBash as SandboxBash

_HOME = {
    "AsyncBashTool": "shells.bash",
    "AsyncLease": "aio",
    "AsyncSandboxBash": "aio",
    "AsyncSessionManager": "aio",
    "BashConfig": "shells.bash",
    "BashOutput": "shells.bash",
    "BashTool": "shells.bash",
    "Lease": "lease",
    "ManagerConfig": "config",
    "PoolConfig": "config",
    "SandboxBash": "shells.bash",
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
