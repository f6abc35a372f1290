"""The models of Ringfence: frozen dataclasses with one JSON form each.

Names are imported when first used, so that `import ringfence.model` costs nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .acquire import AcquireOptions as AcquireOptions
    from .acquire import AttachRequest as AttachRequest
    from .acquire import RequiredCapabilities as RequiredCapabilities
    from .base.checks import parse_duration as parse_duration
    from .base.checks import parse_size as parse_size
    from .base.ids import check_id as check_id
    from .base.ids import new_id as new_id
    from .capabilities import BackendReport as BackendReport
    from .capabilities import Capability as Capability
    from .capabilities import Protection as Protection
    from .changes import Changes as Changes
    from .changes import PathChange as PathChange
    from .client_session import SESSION_NEXT as SESSION_NEXT
    from .client_session import ClientSession as ClientSession
    from .client_session import SessionState as SessionState
    from .client_session import SessionTimeouts as SessionTimeouts
    from .create import CreateRequest as CreateRequest
    from .event import Event as Event
    from .execs.exec import ExecRequest as ExecRequest
    from .execs.exec import ExecResult as ExecResult
    from .execs.exec import ExecStatus as ExecStatus
    from .execs.exec import ResourceUsage as ResourceUsage
    from .execs.exec_start import StartRequest as StartRequest
    from .execs.exec_view import ExecProblem as ExecProblem
    from .execs.exec_view import ExecState as ExecState
    from .execs.exec_view import ExecView as ExecView
    from .execution.config import ExecutionConfig as ExecutionConfig
    from .execution.execution import ExecutionRequest as ExecutionRequest
    from .execution.execution import ExecutionResult as ExecutionResult
    from .execution.execution import ExecutionStatus as ExecutionStatus
    from .files import FileInfo as FileInfo
    from .fork import CopiedProcess as CopiedProcess
    from .fork import ForkReport as ForkReport
    from .fork import MergeConflict as MergeConflict
    from .fork import Merged as Merged
    from .found import AllReplaced as AllReplaced
    from .found import FileChange as FileChange
    from .found import FoundFiles as FoundFiles
    from .found import FoundLine as FoundLine
    from .found import FoundLines as FoundLines
    from .found import Replaced as Replaced
    from .granted import SandboxCapabilities as SandboxCapabilities
    from .limits import Limits as Limits
    from .manager_stats import Check as Check
    from .manager_stats import Health as Health
    from .manager_stats import ManagerStats as ManagerStats
    from .manager_stats import Percentiles as Percentiles
    from .mount import Mount as Mount
    from .net.netlimits import NetworkLimits as NetworkLimits
    from .net.netlog import NetworkEvent as NetworkEvent
    from .net.network import NetworkPolicy as NetworkPolicy
    from .net.rules import Credential as Credential
    from .net.rules import NetworkRule as NetworkRule
    from .sandbox import SandboxView as SandboxView
    from .session import ResolvedMount as ResolvedMount
    from .session import Session as Session
    from .session import Snapshot as Snapshot
    from .spec import SandboxSpec as SandboxSpec
    from .state import NEXT as NEXT
    from .state import State as State
    from .state import check_transition as check_transition
    from .stats import SandboxStats as SandboxStats

_ROOMS = {
    "acquire": ("AcquireOptions", "AttachRequest", "RequiredCapabilities"),
    "capabilities": ("BackendReport", "Capability", "Protection"),
    "client_session": ("SESSION_NEXT", "ClientSession", "SessionState", "SessionTimeouts"),
    "create": ("CreateRequest",),
    "event": ("Event",),
    "execs.exec": ("ExecRequest", "ExecResult", "ExecStatus", "ResourceUsage"),
    "execs.exec_start": ("StartRequest",),
    "execs.exec_view": ("ExecProblem", "ExecState", "ExecView"),
    "execution.execution": ("ExecutionRequest", "ExecutionResult", "ExecutionStatus"),
    "execution.config": ("ExecutionConfig",),
    "files": ("FileInfo",),
    "found": ("AllReplaced", "FileChange", "FoundFiles", "FoundLine", "FoundLines", "Replaced"),
    "changes": ("Changes", "PathChange"),
    "fork": ("CopiedProcess", "ForkReport", "MergeConflict", "Merged"),
    "granted": ("SandboxCapabilities",),
    "base.checks": ("parse_duration", "parse_size"),
    "base.ids": ("check_id", "new_id"),
    "limits": ("Limits",),
    "manager_stats": ("Check", "Health", "ManagerStats", "Percentiles"),
    "mount": ("Mount",),
    "net.netlog": ("NetworkEvent",),
    "net.netlimits": ("NetworkLimits",),
    "net.network": ("NetworkPolicy",),
    "net.rules": ("Credential", "NetworkRule"),
    "sandbox": ("SandboxView",),
    "session": ("ResolvedMount", "Session", "Snapshot"),
    "spec": ("SandboxSpec",),
    "state": ("NEXT", "State", "check_transition"),
    "stats": ("SandboxStats",),
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names}
__all__ = list(_HOME)


def __getattr__(name: str) -> object:
    """Import the module that holds `name` (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
