"""E2B's network options as a policy of ours, and back."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from ..errors import InvalidRequest
from ..model.net.hosts import PUBLIC
from ..model.net.network import NetworkPolicy
from ..model.spec import SandboxSpec
from ..sessions.live import Live
from .call import ApiError
from .codec import field
from .entrance import MOST_PORT
from .notes import Notes

_HOST = re.compile(r"[A-Za-z0-9.-]{1,253}(:[0-9]{1,5})?")
_MOST_PORTS = 100
_ALL = ("0.0.0.0/0", "::/0")
_REFUSED = {
    "rules": "network rules with transforms are not supported by Ringfence's E2B API",
    "egressProxy": "an egress proxy of the client's is not supported by Ringfence",
    "dnsServers": "DNS servers of the client's are not supported by Ringfence",
}


def policy_of(
    form: dict[str, Any], internet: bool | None, allowed: NetworkPolicy, spec: SandboxSpec
) -> NetworkPolicy:
    """Return the policy that E2B's options ask for.

    Args:
        form: `allowOut` and `denyOut`; what allows wins there, as in E2B.
        internet: Whether the client allows internet access; None: as the template has it.
        allowed: What internet access means on this server.

    Raises:
        ApiError: An option cannot be kept.
    """
    for name, why in _REFUSED.items():
        if form.get(name):
            raise ApiError(501, why)
    allow, deny = _hosts(form, "allowOut"), _hosts(form, "denyOut")
    base = spec.network if spec.network != NetworkPolicy() else allowed
    if internet is False or set(deny) & set(_ALL):
        base = NetworkPolicy()
        deny = []
    if not allow and not deny:
        return base
    if set(allow) & set(_ALL):
        allow = []
    # A rule of ours that denies wins over one that allows: what E2B allows again is not denied.
    rules = [*base.allowed_hosts, *allow, *(f"!{each}" for each in deny if each not in allow)]
    if base.is_unrestricted:
        raise ApiError(501, "network options need a limited policy: set `internet` to one")
    # A policy that learns allows whatever no rule denies: there, rules that only deny leave the rest open.
    if not (base.rules or base.learn) and all(each.startswith("!") for each in rules):
        return NetworkPolicy()
    try:
        # Checked again: permissions are judged by the one spelling that the constructor writes.
        return replace(base, allowed_hosts=tuple(rules))
    except InvalidRequest as exc:
        raise ApiError(400, f"network: {exc.message}") from exc


def _hosts(form: dict[str, Any], name: str) -> list[str]:
    found: list[str] = field(form, name, list, [])
    if not all(isinstance(each, str) for each in found):
        raise ApiError(400, f"{name}: must be a list of strings")
    return found


def host_mask(form: dict[str, Any]) -> str:
    """The `maskRequestHost` of a client.

    Raises:
        ApiError: It is no host name.
    """
    mask: str = field(form, "maskRequestHost", str, "")
    if mask and not _HOST.fullmatch(mask.replace("${PORT}", "65535")):
        raise ApiError(400, "maskRequestHost: must be HOST or HOST:PORT; ${PORT} is allowed in it")
    return mask


def https_ports(form: dict[str, Any]) -> tuple[int, ...]:
    """The `httpsPorts` of a client.

    Raises:
        ApiError: They are no ports.
    """
    found: list[int] = field(form, "httpsPorts", list, [])
    if len(found) > _MOST_PORTS or not all(
        type(each) is int and 1 <= each <= MOST_PORT for each in found
    ):
        raise ApiError(400, f"httpsPorts: must be up to {_MOST_PORTS} ports")
    return tuple(found)


def shown(live: Live, notes: Notes) -> dict[str, Any]:
    """Return the policy in force as E2B describes it."""
    # E2B lists nothing where the internet is open.
    hosts = [each for each in live.inner.spec.network.allowed_hosts if each != PUBLIC]
    return {
        "allowOut": [each for each in hosts if not each.startswith("!")],
        "denyOut": [each[1:] for each in hosts if each.startswith("!")],
        "allowPublicTraffic": notes.is_public,
        **({"maskRequestHost": notes.host_mask} if notes.host_mask else {}),
        **({"httpsPorts": [*notes.https_ports]} if notes.https_ports else {}),
    }
