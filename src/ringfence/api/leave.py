"""What a user's key may ask of the host: less than an admin, who could do it without us."""

from __future__ import annotations

import os

from ..errors import Forbidden
from ..model.spec import OWN_ROOT, UNRESTRICTED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..model.mount import Mount
    from ..model.network import NetworkPolicy
    from ..model.spec import SandboxSpec
    from .caller import Caller


def check_spec(caller: Caller, spec: SandboxSpec, host_roots: Sequence[str]) -> None:
    """Refuse what only an admin may ask for.

    Raises:
        Forbidden: `field` names it.
    """
    if caller.is_admin:
        return
    if spec.profile == UNRESTRICTED:
        _refuse("profile", "an unrestricted sandbox")
    if spec.profile == OWN_ROOT:
        _refuse("profile", "a root with rights of its own")
    if spec.python_env:
        _refuse("python_env", "the server's own Python environment")
    if spec.allow_degraded:
        _refuse("allow_degraded", "less protection than the server has")
    check_network(caller, spec.network)
    for i, mount in enumerate(spec.mounts):
        check_mount(caller, mount, host_roots, f"mounts[{i}].source")
    if spec.memory_dir is not None:
        _check_path(spec.memory_dir, host_roots, "memory_dir")


def check_network(caller: Caller, policy: NetworkPolicy) -> None:
    """The host's whole network is an admin's to give."""
    if policy.is_unrestricted and not caller.is_admin:
        _refuse("network.mode", "the host's whole network")


def check_mount(caller: Caller, mount: Mount, host_roots: Sequence[str], field: str) -> None:
    """A directory of the host must be below one of the roots, without symlinks on the way."""
    if mount.is_host_path and not caller.is_admin:
        _check_path(mount.source, host_roots, field)


def _check_path(path: str, host_roots: Sequence[str], field: str) -> None:
    plain = os.path.normpath(path)
    below = any(
        plain == root or plain.startswith(f"{root.rstrip('/')}/")
        for root in map(os.path.realpath, host_roots)
    )
    # A symlink below a root may lead out of it, and whoever may write there may make one.
    if ".." in path.split("/") or not below or os.path.realpath(plain) != plain:
        _refuse(field, "a directory of the host outside of those given to users")


def _refuse(field: str, what: str) -> None:
    raise Forbidden(f"only an admin may have {what}", field=field)
