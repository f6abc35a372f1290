"""Helpers that go into a running sandbox on behalf of the host: live mounts, trees, other users."""

from __future__ import annotations

from . import wire


def serve(request: dict[str, object], reply: wire.Socket, fds: list[int]) -> None:
    """Do one request inside the sandbox and answer it."""
    raise NotImplementedError
