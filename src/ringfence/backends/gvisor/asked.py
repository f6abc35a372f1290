"""Validation of requests to gVisor, before anything is made."""

from __future__ import annotations

from ...errors import InvalidRequest, Unsupported
from ...model import capabilities as can
from ...model.spec import DEBUG, OS_HARDENED, OWN_ROOT, STRONG, UNRESTRICTED, SandboxSpec
from ...policy.protected import check_names
from ..local.host import identity
from ..local.host.accounts import check_profile
from ..local.network import check_given_secrets
from ..local.session import check_idle_timeout, check_least, check_sources

NAME = "gvisor"
PROFILES = (OS_HARDENED, OWN_ROOT, DEBUG, UNRESTRICTED)
NEVER = {
    can.NETWORK_OPEN: "gVisor enables network access only at its start",
    can.NETWORK_UNRESTRICTED: "the host's network would open gVisor's control socket to every user",
    can.FORK: "a gVisor checkpoint ends the sandbox: take one, and restore it as often as needed",
    can.GPU: "the gVisor backend passes none on",
    can.IO_LIMIT: "gVisor does not measure I/O",
}
"""Capabilities that gVisor lacks on every host, and why: known without starting it."""
_MIB = 1 << 20
NO_MEMORY = "gVisor restores nothing for an ordinary user (runsc: rootless mode not supported)"
NO_MEMORY_OF_SOCKETS = (
    "with rules for the network, sockets are the host kernel's: gVisor saves none of these"
)
LEAST = {
    "open_files": (64, "PID 1 of the sandbox lives under it too"),
    "memory_bytes": (32 * _MIB, "PID 1 of the sandbox lives in it too"),
    "inodes": (256, "the sandbox's own directories are some of them"),
}


def check(spec: SandboxSpec) -> None:
    """Refuse what this backend does not do, before anything is made."""
    if spec.tier != STRONG:
        raise Unsupported(
            f"gVisor is tier {STRONG}",
            backend=NAME,
            operation=f"tier {spec.tier}",
            field="tier",
            hint=f"ask for tier {STRONG}, or leave the backend to Ringfence",
        )
    if spec.template != "default":
        raise InvalidRequest(
            f"unknown template {spec.template!r}", field="template", hint="one of default"
        )
    if spec.profile not in PROFILES:
        raise InvalidRequest(
            f"unknown profile {spec.profile!r}", field="profile", hint=f"one of {PROFILES}"
        )
    check_profile(spec.profile, NAME)
    identity.uid_of(spec.user)
    check_network(spec)
    if spec.limits.io_bytes_per_s is not None:
        name = "io_bytes_per_s"
        raise Unsupported(backend=NAME, operation=f"limit {name}", field=f"limits.{name}")
    check_idle_timeout(spec, NAME)
    check_least(spec, LEAST)
    check_sources(spec)
    check_names(spec.unprotect)


def check_network(spec: SandboxSpec) -> None:
    """Rules go through the egress engine; the host's own network is not had."""
    if spec.network.is_unrestricted:
        raise Unsupported(
            "gVisor on the host's network would open its control socket to every user of the host",
            backend=NAME,
            operation="network unrestricted",
            field="network",
            hint="list the destinations in the policy, or use tier light",
        )
    check_given_secrets(spec)
