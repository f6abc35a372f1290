"""Host and origin policy: which requests are accepted at all. Pure."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from ...errors import Forbidden

_HOST = re.compile(r"\A(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(?::(\d{1,5}))?\Z")


@dataclass(frozen=True)
class OriginPolicy:
    """Accepted names of the server, and web origins that may call it.

    Attributes:
        hosts: Accepted values of the `Host` header on TCP, lower case, without ports.
        origins: As browsers write them: `https://app.example.com`.
    """

    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()


def check_host(origin_policy: OriginPolicy, host: str) -> None:
    """Refuse a name that is not ours: a page may have pointed its own name at us (DNS rebinding).

    Raises:
        Forbidden: It says anything but our address or one of our names.
    """
    match = _HOST.match(host.lower())
    name = match[1].strip("[]") if match else ""
    if name and (name in origin_policy.hosts or name == "localhost" or _is_loopback(name)):
        return
    raise Forbidden(
        "the Host header has a name that the server does not accept", hint="see --allow-host"
    )


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def check_origin(origin_policy: OriginPolicy, origin: str | None, fetch_site: str | None) -> None:
    """Refuse web pages, but those that are named.

    Raises:
        Forbidden: A page of another origin sent it.
    """
    if origin is not None and origin.lower() not in origin_policy.origins:
        raise Forbidden(
            "requests from web pages of this origin are not allowed", hint="see --allow-origin"
        )
    if origin is None and fetch_site in ("cross-site", "same-site"):
        raise Forbidden("requests from web pages are not allowed")
