"""From a request and the config to a sandbox and a command. Starts nothing but a trial."""

from __future__ import annotations

import os
from dataclasses import replace

from ..backends.optional import Selective
from ..errors import InvalidRequest, RingfenceError
from ..model.execution.config import ExecutionConfig, is_at_or_below
from ..model.limits import Limits
from ..model.spec import OS_HARDENED, STRONG, SandboxSpec
from ..sandbox.sync import Sandbox

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..backends.protocol import Backend
    from ..model.execution.execution import ExecutionRequest

PROFILE = "execution"
"""Of sandboxes under the system-call policy of the config."""
TRIAL = "execution-trial"
"""Of the one sandbox in which a new policy is tried."""

_MIB = 1 << 20
_TRIAL_S = 10.0
_BOUNDED = ("timeout_secs", "memory_mb", "cpus")


def completed(request: ExecutionRequest, config: ExecutionConfig) -> ExecutionRequest:
    """The request with the defaults filled in.

    Raises:
        InvalidRequest: It asks for more than a maximum, or to work in a denied path.
    """
    given: dict[str, Any] = {}
    for name in _BOUNDED:
        wanted, most = getattr(request, name), getattr(config, f"max_{name}")
        if wanted is not None and wanted > most:
            hint = f"ask for less, or raise max_{name}"
            raise InvalidRequest(f"{wanted:.12g} is more than {most:.12g}", field=name, hint=hint)
        given[name] = wanted if wanted is not None else _default(request, config, name)
    work_dir = request.work_dir or config.work_dir
    for path in config.denied_paths:
        if is_at_or_below(work_dir, path):
            raise InvalidRequest(f"{work_dir} lies in a denied path", field="work_dir")
    return replace(request, work_dir=work_dir, **given)


def _default(request: ExecutionRequest, config: ExecutionConfig, name: str) -> float:
    if request.tier != STRONG or name == "timeout_secs":
        found: float = getattr(config, f"default_{name}")
        return found
    value = config.strong_default(name)
    return int(value) if name == "memory_mb" else value


def check_least(request: ExecutionRequest, backend: Backend) -> None:
    """Refuse less memory than anything runs with there. Preconditions: `request` is completed.

    Raises:
        InvalidRequest: `field` is what the request calls it.
    """
    bounds = backend.least if isinstance(backend, Selective) else {}
    least, why = bounds.get("memory_bytes", (0, ""))
    if request.memory_mb is not None and request.memory_mb * _MIB < least:
        message = f"must be at least {-(-least // _MIB)}: {why}"
        raise InvalidRequest(message, field="memory_mb", hint="memory_mb counts MiB")


def spec_for(request: ExecutionRequest, config: ExecutionConfig) -> SandboxSpec:
    """The sandbox of one execution. Preconditions: `request` is completed."""
    assert request.memory_mb is not None
    own_filter = config.seccomp is not None and request.tier != STRONG
    return SandboxSpec(
        labels={"execution": request.id or ""},
        network=config.network,
        mounts=config.mounts,
        deny=denied_inside(config),
        limits=Limits(
            wall_time_s=request.timeout_secs,
            cpus=request.cpus,
            memory_bytes=request.memory_mb * _MIB,
            pids=config.max_processes,
            output_bytes=config.max_output_bytes,
        ),
        tier=request.tier,
        profile=PROFILE if own_filter else OS_HARDENED,
        allow_degraded=config.allow_degraded,
    )


def trial(backend: Backend, profile: str) -> str:
    """Why no command runs in a sandbox of that profile; empty where one does."""
    spec = SandboxSpec(profile=profile, allow_degraded=("*",))
    try:
        with Sandbox.create(spec, backend=backend) as sandbox:
            ended = sandbox.exec(["true"], timeout_s=_TRIAL_S)
    except (RingfenceError, OSError) as exc:
        return str(exc)
    return "" if ended.ok else f"`true` ended with {ended.exit_code}, signal {ended.signal}"


def denied_inside(config: ExecutionConfig) -> tuple[str, ...]:
    """The denied paths, under every name that they have inside.

    Raises:
        InvalidRequest: An allowed path leads, through a symlink, into a denied one.
    """
    found = list(config.denied_paths)
    for mount in config.mounts:
        source = os.path.realpath(mount.source)
        for path in map(os.path.realpath, config.denied_paths):
            if is_at_or_below(source, path):
                message = f"{mount.source} leads into the denied path {path}"
                raise InvalidRequest(message, field="allowed_paths")
            if is_at_or_below(path, source):
                found.append(mount.target + path[len(source.rstrip("/")) :])
    return tuple(dict.fromkeys(found))
