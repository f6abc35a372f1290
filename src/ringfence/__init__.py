"""Run untrusted code in a sandbox that feels like a subprocess.

    from ringfence import Sandbox

    with Sandbox.create() as sandbox:
        print(sandbox.exec(["python3", "-c", "print(6 * 7)"]).text)

Names are imported when first used: the launcher runs inside this package and must load
nothing but the standard library.
"""

from __future__ import annotations

__version__ = "0.1.0"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .client import AsyncClient as AsyncClient
    from .client import AsyncRemoteSandbox as AsyncRemoteSandbox
    from .client import Client as Client
    from .client import RemoteSandbox as RemoteSandbox
    from .errors import RingfenceError as RingfenceError
    from .execution import ExecutionService as ExecutionService
    from .model.acquire import AcquireOptions as AcquireOptions
    from .model.acquire import AttachRequest as AttachRequest
    from .model.acquire import RequiredCapabilities as RequiredCapabilities
    from .model.client_session import ClientSession as ClientSession
    from .model.client_session import SessionState as SessionState
    from .model.client_session import SessionTimeouts as SessionTimeouts
    from .model.exec import ExecResult as ExecResult
    from .model.execution import ExecutionRequest as ExecutionRequest
    from .model.execution import ExecutionResult as ExecutionResult
    from .model.execution import ExecutionStatus as ExecutionStatus
    from .model.execution_config import ExecutionConfig as ExecutionConfig
    from .model.limits import Limits as Limits
    from .model.mount import Mount as Mount
    from .model.netlog import NetworkEvent as NetworkEvent
    from .model.network import NetworkLimits as NetworkLimits
    from .model.network import NetworkPolicy as NetworkPolicy
    from .model.rules import Credential as Credential
    from .model.rules import NetworkRule as NetworkRule
    from .model.snapshot import Snapshot as Snapshot
    from .model.spec import SandboxSpec as SandboxSpec
    from .sandbox import AsyncSandbox as AsyncSandbox
    from .sandbox import Sandbox as Sandbox
    from .sandbox.template import Template as Template
    from .sessions import AsyncBashTool as AsyncBashTool
    from .sessions import AsyncLease as AsyncLease
    from .sessions import AsyncSandboxBash as AsyncSandboxBash
    from .sessions import AsyncSessionManager as AsyncSessionManager
    from .sessions import BashConfig as BashConfig
    from .sessions import BashOutput as BashOutput
    from .sessions import BashTool as BashTool
    from .sessions import Lease as Lease
    from .sessions import ManagerConfig as ManagerConfig
    from .sessions import PoolConfig as PoolConfig
    from .sessions import SandboxBash as SandboxBash
    from .sessions import SessionManager as SessionManager

_LIBRARY = ("AsyncSandbox", "Sandbox")
_CLIENT = ("AsyncClient", "AsyncRemoteSandbox", "Client", "RemoteSandbox")
_SESSIONS = (
    "AsyncBashTool",
    "AsyncLease",
    "AsyncSandboxBash",
    "AsyncSessionManager",
    "BashConfig",
    "BashOutput",
    "BashTool",
    "Lease",
    "ManagerConfig",
    "PoolConfig",
    "SandboxBash",
    "SessionManager",
)


def __getattr__(name: str) -> object:
    """Import `name` from the library, the model or the errors (PEP 562)."""
    if name == "__all__":
        return _for_everybody()
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    for room in _rooms_of(name):
        value = getattr(import_module(room, __name__), name, None)
        if value is not None:
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _rooms_of(name: str) -> tuple[str, ...]:
    if name in _LIBRARY:
        return (".sandbox",)
    if name == "Template":
        return (".sandbox.template",)
    if name in _CLIENT:
        return (".client",)
    if name in _SESSIONS:
        return (".sessions",)
    if name == "ExecutionService":
        return (".execution",)
    return (".model", ".errors") if name[0].isupper() else (".model",)


def __dir__() -> list[str]:
    return sorted({*globals(), *_public()})


def _public() -> set[str]:
    from . import errors, model

    raised = {name for name in dir(errors) if name[0].isupper() and name != "TYPE_CHECKING"}
    return {
        *_LIBRARY,
        "Template",
        "ExecutionService",
        *_CLIENT,
        *_SESSIONS,
        *model.__all__,
        *raised,
    }


def _for_everybody() -> list[str]:
    """What `from ringfence import *` brings: the client only where its extra is installed."""
    from importlib.util import find_spec

    has_client = all(find_spec(name) for name in ("httpx2", "anyio"))
    return sorted(_public() - (set() if has_client else set(_CLIENT)))
