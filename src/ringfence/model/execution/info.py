"""Capabilities of the execution service on this host."""

from __future__ import annotations

from ..base import jsonform
from ..base.checks import FrozenMap
from ..base.model import Model
from ..base.record import dataclass, field
from ..spec import LIGHT
from .config import ExecutionConfig
from .execution import ExecutionStatus, TierSupport

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


_HOST_PATHS = ("allowed_paths", "denied_paths")


@dataclass(frozen=True, eq=False, repr=False)
class ExecutorInfo(Model):
    """Something that runs commands; `reason` says why it cannot here.

    Attributes:
        supports_network_enabled: Whether it enforces the config's `network_policy`, and none.
    """

    name: str
    available: bool
    reason: str = ""
    tiers: tuple[str, ...] = ()
    supports_network_enabled: bool = False


@dataclass(frozen=True, eq=False, repr=False)
class ExecutionInfo(Model):
    """Tiers, executors, config, and what runs.

    Attributes:
        seccomp: The system-call policy in force: a default action, and rules of names and an action.
        running, pending: Executions now.
        supports_network_enabled: Whether any executor here holds what `network_enabled` switches.
    """

    version: str
    tiers: tuple[TierSupport, ...]
    executors: tuple[ExecutorInfo, ...]
    config: ExecutionConfig
    default_tier: str = LIGHT
    statuses: tuple[str, ...] = tuple(str(each) for each in ExecutionStatus)
    seccomp: Mapping[str, Any] = field(default_factory=FrozenMap)
    running: int = 0
    pending: int = 0
    supports_network_enabled: bool = False

    def to_json(self, *, admin: bool = False) -> dict[str, Any]:
        """The JSON object; host paths are shown only to an admin."""
        form = jsonform.dump(self)
        if not admin:
            for name in _HOST_PATHS:
                del form["config"][name]
        return form
