"""What the suites' sandboxes run in: the native backend, RINGFENCE_SUITE_BACKEND, or a server's."""

from __future__ import annotations

import os
import sys
from typing import Any

SERVER = "RINGFENCE_SUITE_SERVER"
_STRONG = ("gvisor",)


def backend() -> str:
    """The backend's name; empty for the default."""
    return os.environ.get("RINGFENCE_SUITE_BACKEND", "")


def server() -> str:
    """The address of the server that makes the sandboxes; empty where they are made here."""
    return os.environ.get(SERVER, "")


def options(**more: Any) -> dict[str, Any]:
    """Keyword arguments of `Sandbox.create`."""
    if server():
        return {"server": server(), **_for_a_server(more)}
    name = backend()
    return (
        {"backend": name, "tier": "strong" if name in _STRONG else "light", **more}
        if name
        else more
    )


def _for_a_server(more: dict[str, Any]) -> dict[str, Any]:
    """A server cannot show a client's Python: a mount and a PATH do the same where it has that, too."""
    if not more.pop("python_env", False):
        return more
    shown = {sys.prefix, sys.base_prefix} - {"/usr"}
    return {
        **more,
        "mounts": [*more.get("mounts", ()), *(f"{path}:{path}" for path in sorted(shown))],
        "env": {"PATH": f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin", **more.get("env", {})},
    }
