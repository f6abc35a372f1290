"""Finding an engine: the one that DOCKER_HOST names, or the local one."""

from __future__ import annotations

import os
import socket

from ...errors import BackendUnavailable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_LOCAL = "unix:///var/run/docker.sock"
_PATIENCE_S = 60


def connect(host: str | None) -> Any:
    """A client of the engine at `host`, such as `unix:///run/docker.sock`; None is the environment's.

    Raises:
        BackendUnavailable: There is no SDK, no engine, or one on another machine.
    """
    where = host or os.environ.get("DOCKER_HOST") or _LOCAL
    if not where.startswith("unix://"):
        raise BackendUnavailable(
            f"the engine at {where} is not reached by a unix socket, and its sandboxes need one",
            hint="set DOCKER_HOST to a local one, as unix:///var/run/docker.sock, or run Ringfence there",
        )
    try:
        import docker
        from docker.errors import DockerException
    except ImportError as exc:
        raise BackendUnavailable(
            "the Docker SDK is not installed", hint="pip install 'ringfence[docker]'"
        ) from exc
    try:
        _try(where.removeprefix("unix://"))
        return docker.DockerClient(base_url=where, timeout=_PATIENCE_S)
    except (DockerException, OSError) as exc:
        raise BackendUnavailable(
            f"no Docker engine answers at {where}: {exc}",
            hint="start an engine, or set DOCKER_HOST",
        ) from exc


def is_podman(engine: Any) -> bool:
    """Return whether the engine is Podman's Docker API."""
    components = engine.version().get("Components") or []
    return any("Podman" in each.get("Name", "") for each in components)


def _try(path: str) -> None:
    """Connect to the socket; raises without a listener, where the SDK would leak a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PATIENCE_S)
        probe.connect("/" + path.lstrip("/"))
