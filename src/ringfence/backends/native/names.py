"""Name resolution on the host's own network: a sandbox that shares it resolves as the host does."""

from __future__ import annotations

import os

from ..local.mounts import template

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MOST_BYTES = 256 << 10  # of /etc/hosts: lists that block advertising have megabytes
_KEYWORDS = ("nameserver", "search", "domain", "options", "sortlist")  # resolv.conf(5)


def as_the_host() -> list[tuple[Any, ...]]:
    """Steps that give a root of the template the host's name servers, and its names of hosts.

    Read anew for each sandbox: a laptop's name servers change with its network. A name server on
    loopback, such as systemd-resolved's, is reached as it is: the loopback is the host's. Without
    any, resolv.conf(5) has programs ask 127.0.0.1. A list of hosts beyond 256 KiB is left out.
    """
    servers = [line for line in _lines("/etc/resolv.conf") if line.split()[0] in _KEYWORDS]
    hosts = [*template.HOSTS.splitlines(), *_lines("/etc/hosts")]
    return [
        ("rewrite", f"/etc/{name}", "".join(f"{line}\n" for line in lines).encode())
        for name, lines in (("resolv.conf", servers), ("hosts", hosts))
    ]


def _lines(path: str) -> list[str]:
    """Read a file's lines without comments; none where it is missing or too large."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            if os.fstat(file.fileno()).st_size > _MOST_BYTES:
                return []
            text = file.read()
    except OSError:
        return []
    said = (line.partition("#")[0].partition(";")[0].strip() for line in text.splitlines())
    return [line for line in said if line]
