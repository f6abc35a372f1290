"""Options of a container: all are explicit, none is left to the engine's defaults."""

from __future__ import annotations

import resource

from ...model.base.record import dataclass
from ..local.mounts import template
from .engine import is_podman

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from ..local.sizes import Sizes

LABEL = "ringfence.sandbox"
_MOST_PROCESSES = 32768  # what Podman 4.3's service has itself
_CAREFUL = ("no-new-privileges:true",)


@dataclass(frozen=True, eq=False, repr=False)
class Options:
    """Options of a container.

    Attributes:
        user: Its uid, as the engine counts.
        tmpfs: Mount point to options.
        disk_bytes: Bytes the container may write; 0: the engine's limit.
        volumes: Host path to its place inside, and the access.
    """

    image: str
    command: Sequence[str]
    user: int
    cpus: float | None
    size: Sizes
    tmpfs: Mapping[str, str]
    volumes: Mapping[str, Mapping[str, str]]
    disk_bytes: int = 0

    def create(self, engine: Any, sandbox_id: str, *, isolated: bool) -> Any:
        """The container, which does not run yet.

        Args:
            isolated: True where the agent isolates better than the engine's filter, profile and masks.
        """
        host = engine.api.create_host_config(**self._host(engine, isolated))
        if isolated:
            # The engine's own command line sends these for "systempaths=unconfined".
            host |= {"MaskedPaths": [], "ReadonlyPaths": []}
        config = engine.api.create_container_config(
            image=self.image,
            command=list(self.command),
            user=f"{self.user}:{self.user}",
            hostname=template.HOSTNAME,
            working_dir="/",
            environment={},
            labels={LABEL: sandbox_id},
            host_config=host,
        )
        made = engine.api.create_container_from_config(config)
        return engine.containers.get(made["Id"])

    def _host(self, engine: Any, isolated: bool) -> dict[str, Any]:
        from docker.types import LogConfig, Ulimit

        size = self.size
        return {
            "network_mode": "none",
            "ipc_mode": "private",
            "cap_drop": ["ALL"],
            "security_opt": _security(engine) if isolated else list(_CAREFUL),
            "mem_limit": size.memory_bytes,
            "memswap_limit": size.memory_bytes,
            "pids_limit": size.pids + 1,
            "nano_cpus": int(self.cpus * 1e9) if self.cpus else None,
            "ulimits": [
                Ulimit(name="nofile", soft=size.open_files, hard=size.open_files),
                Ulimit(name="core", soft=1, hard=1),  # with 0, a core_pattern with a pipe would run
                *_limits_of_ours(engine),
            ],
            "log_config": LogConfig(type=LogConfig.types.JSON, config={"max-size": "64k"}),
            "restart_policy": {"Name": "no"},
            "tmpfs": dict(self.tmpfs),
            "binds": dict(self.volumes),
            "storage_opt": {"size": str(self.disk_bytes)} if self.disk_bytes else None,
        }


def _limits_of_ours(engine: Any) -> list[Any]:
    """Podman asks for a number of processes of its own, which not every host lets it have."""
    from docker.types import Ulimit

    if not is_podman(engine):
        return []
    _soft, most = resource.getrlimit(resource.RLIMIT_NPROC)
    most = _MOST_PROCESSES if most == resource.RLIM_INFINITY else min(most, _MOST_PROCESSES)
    return [Ulimit(name="nproc", soft=most, hard=most)]


def _security(engine: Any) -> list[str]:
    """Without the engine's filter and profile: they forbid the very calls that isolation is made of."""
    found = engine.info().get("SecurityOptions") or []
    unconfined = ["apparmor=unconfined"] if any("name=apparmor" in each for each in found) else []
    unmasked = ["unmask=ALL"] if is_podman(engine) else []  # which reads no list of paths
    return [*_CAREFUL, "seccomp=unconfined", *unconfined, *unmasked]
