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
    from .errors import BackendUnavailable as BackendUnavailable
    from .errors import BadJson as BadJson
    from .errors import ConnectError as ConnectError
    from .errors import DirectoryNotEmpty as DirectoryNotEmpty
    from .errors import ExecError as ExecError
    from .errors import ExecNotFound as ExecNotFound
    from .errors import ExecNotStarted as ExecNotStarted
    from .errors import ExecutionKilled as ExecutionKilled
    from .errors import ExecutionNotFound as ExecutionNotFound
    from .errors import ExecutionTimeout as ExecutionTimeout
    from .errors import FileError as FileError
    from .errors import FileExists as FileExists
    from .errors import FileNotFound as FileNotFound
    from .errors import Forbidden as Forbidden
    from .errors import ImageNotFound as ImageNotFound
    from .errors import ImageRefused as ImageRefused
    from .errors import InvalidRequest as InvalidRequest
    from .errors import IoError as IoError
    from .errors import IsADirectory as IsADirectory
    from .errors import IsolationError as IsolationError
    from .errors import LifecycleError as LifecycleError
    from .errors import NetworkPolicyError as NetworkPolicyError
    from .errors import NotADirectory as NotADirectory
    from .errors import NotFound as NotFound
    from .errors import PermissionDenied as PermissionDenied
    from .errors import QuotaExceeded as QuotaExceeded
    from .errors import RegistryError as RegistryError
    from .errors import ResourceExhausted as ResourceExhausted
    from .errors import ResourceLimitExceeded as ResourceLimitExceeded
    from .errors import RingfenceError as RingfenceError
    from .errors import SandboxLost as SandboxLost
    from .errors import SandboxNotFound as SandboxNotFound
    from .errors import SandboxNotSupported as SandboxNotSupported
    from .errors import ServerUnreachable as ServerUnreachable
    from .errors import SnapshotCorrupt as SnapshotCorrupt
    from .errors import SnapshotNotFound as SnapshotNotFound
    from .errors import StateInUse as StateInUse
    from .errors import StateTooNew as StateTooNew
    from .errors import StorageFull as StorageFull
    from .errors import TaskFailed as TaskFailed
    from .errors import TimeoutExceeded as TimeoutExceeded
    from .errors import TooLarge as TooLarge
    from .errors import TooManyRequests as TooManyRequests
    from .errors import TooSlow as TooSlow
    from .errors import Unauthenticated as Unauthenticated
    from .errors import Unsupported as Unsupported
    from .execution.service import ExecutionService as ExecutionService
    from .fork.branches import Outcome as Outcome
    from .fork.branches import Race as Race
    from .fork.branches import race as race
    from .model.acquire import AcquireOptions as AcquireOptions
    from .model.acquire import AttachRequest as AttachRequest
    from .model.acquire import RequiredCapabilities as RequiredCapabilities
    from .model.base.checks import parse_duration as parse_duration
    from .model.base.checks import parse_size as parse_size
    from .model.base.ids import check_id as check_id
    from .model.base.ids import new_id as new_id
    from .model.capabilities import BackendReport as BackendReport
    from .model.capabilities import Capability as Capability
    from .model.capabilities import Protection as Protection
    from .model.changes import Changes as Changes
    from .model.changes import PathChange as PathChange
    from .model.client_session import SESSION_NEXT as SESSION_NEXT
    from .model.client_session import ClientSession as ClientSession
    from .model.client_session import SessionState as SessionState
    from .model.client_session import SessionTimeouts as SessionTimeouts
    from .model.create import CreateRequest as CreateRequest
    from .model.event import Event as Event
    from .model.execs.exec import ExecRequest as ExecRequest
    from .model.execs.exec import ExecResult as ExecResult
    from .model.execs.exec import ExecStatus as ExecStatus
    from .model.execs.exec import ResourceUsage as ResourceUsage
    from .model.execs.exec_start import StartRequest as StartRequest
    from .model.execs.exec_view import ExecProblem as ExecProblem
    from .model.execs.exec_view import ExecState as ExecState
    from .model.execs.exec_view import ExecView as ExecView
    from .model.execution.config import ExecutionConfig as ExecutionConfig
    from .model.execution.execution import ExecutionRequest as ExecutionRequest
    from .model.execution.execution import ExecutionResult as ExecutionResult
    from .model.execution.execution import ExecutionStatus as ExecutionStatus
    from .model.files import FileInfo as FileInfo
    from .model.fork import CopiedProcess as CopiedProcess
    from .model.fork import ForkReport as ForkReport
    from .model.fork import MergeConflict as MergeConflict
    from .model.fork import Merged as Merged
    from .model.found import AllReplaced as AllReplaced
    from .model.found import FileChange as FileChange
    from .model.found import FoundFiles as FoundFiles
    from .model.found import FoundLine as FoundLine
    from .model.found import FoundLines as FoundLines
    from .model.found import Replaced as Replaced
    from .model.granted import SandboxCapabilities as SandboxCapabilities
    from .model.limits import Limits as Limits
    from .model.manager_stats import Check as Check
    from .model.manager_stats import Health as Health
    from .model.manager_stats import ManagerStats as ManagerStats
    from .model.manager_stats import Percentiles as Percentiles
    from .model.mount import Mount as Mount
    from .model.net.netlimits import NetworkLimits as NetworkLimits
    from .model.net.netlog import NetworkEvent as NetworkEvent
    from .model.net.network import NetworkPolicy as NetworkPolicy
    from .model.net.rules import Credential as Credential
    from .model.net.rules import NetworkRule as NetworkRule
    from .model.sandbox import SandboxView as SandboxView
    from .model.session import ResolvedMount as ResolvedMount
    from .model.session import Session as Session
    from .model.session import Snapshot as Snapshot
    from .model.spec import SandboxSpec as SandboxSpec
    from .model.state import NEXT as NEXT
    from .model.state import State as State
    from .model.state import check_transition as check_transition
    from .model.stats import SandboxStats as SandboxStats
    from .sandbox import AsyncSandbox as AsyncSandbox
    from .sandbox import Sandbox as Sandbox
    from .sandbox.marks import Mark as Mark
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


_FORKS = ("Outcome", "Race", "race")
_PACKAGES = ("cli", "integrations", "testing")


def _first_use(name: str) -> object:
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
    hint = ""
    if name[0].isupper():  # not a module, which `_public` itself looks for
        from .model.mistakes import NOT_CLASSES, closest

        close = NOT_CLASSES.get(name) or closest(name, _public())
        hint = f" ({close})" if close else ""
    elif name in _PACKAGES:
        hint = f" (first: import ringfence.{name})"
    else:
        from .model.mistakes import NOT_FUNCTIONS

        hint = f" ({NOT_FUNCTIONS[name]})" if name in NOT_FUNCTIONS else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


if not TYPE_CHECKING:  # for checkers a name that is not above is an error
    __getattr__ = _first_use


def _rooms_of(name: str) -> tuple[str, ...]:
    if name in _LIBRARY:
        return (".sandbox",)
    if name == "Template":
        return (".sandbox.template",)
    if name == "Mark":
        return (".sandbox.marks",)
    if name in _FORKS:
        return (".fork.branches",)
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
        *_FORKS,
        "Mark",
        "Template",
        "ExecutionService",
        *_CLIENT,
        *_SESSIONS,
        *model.__all__,
        *raised,
    }


def _for_everybody() -> list[str]:
    """List the names for `from ringfence import *`: with the client only where its extra is installed."""
    from importlib.util import find_spec

    has_client = all(find_spec(name) for name in ("httpx2", "anyio"))
    return sorted(_public() - (set() if has_client else set(_CLIENT)))
