"""`ringfence mcp`: reads the options; serving is `ringfence.integrations.mcp`'s."""

from __future__ import annotations

import os
import sys

from ..errors import BackendUnavailable, InvalidRequest
from .commands import MCP
from .options import no_arguments, parse
from .request import check_protected, make_spec
from .terminal import say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

TOKEN = "RINGFENCE_MCP_TOKEN"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def main(argv: Sequence[str]) -> int:
    """Serve until the client is gone; returns the exit code."""
    given, rest = parse(MCP, argv)
    if "help" in given:
        from .help import help_of

        sys.stdout.write(help_of(MCP))
        return 0
    no_arguments(MCP, rest)
    spec = make_spec(given, [])
    check_protected(spec)
    options: dict[str, Any] = {"spec": spec}
    if "backend" in given:
        options["backend"] = given["backend"]
    address = _address(given["http"]) if "http" in given else None
    try:
        from ..integrations.mcp.server import serve_http, serve_stdio
    except ImportError as exc:
        raise BackendUnavailable(
            f"the MCP SDK is not installed: {exc}", hint='pip install "ringfence[mcp]"'
        ) from exc
    from ..integrations.origin import Origin

    _fetch_image(given)

    origin = Origin(options, given.get("server"))
    if address is None:
        serve_stdio(origin)
    else:
        serve_http(origin, *address, _token())
    return 0


def _token() -> str:
    """Read or make the token that callers must send. Without one, every local user could use the sandboxes."""
    token = os.environ.get(TOKEN, "")
    if not token:
        import secrets

        token = secrets.token_urlsafe(32)
        say(f"send this header with each request: Authorization: Bearer {token}")
        say(f"(each start makes a new token; set {TOKEN} for a fixed token)")
    return token


def _fetch_image(given: dict[str, Any]) -> None:
    """Once, before anybody waits for a sandbox; a server has images of its own."""
    if "server" in given and "pull" in given:
        hint = "on the server's machine: ringfence image pull NAME"
        raise InvalidRequest(
            "a server does not fetch images for clients", field="--pull", hint=hint
        )
    if "server" not in given and ("image" in given or "pull" in given):
        from .image import needed

        needed(given)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    is_port = port.isascii() and port.isdigit() and int(port) <= 65_535
    if not is_port or not host:
        hint = f"as 127.0.0.1:{port if is_port else 8765}"
        raise InvalidRequest(f"{text!r} is not HOST:PORT", field="http", hint=hint)
    if host not in _LOOPBACK:
        what = (
            f"{host} can be reached by other machines, and this server does not authenticate them"
        )
        hint = f"127.0.0.1:{port}, behind a proxy that authenticates"
        raise InvalidRequest(what, field="http", hint=hint)
    return host, int(port)
