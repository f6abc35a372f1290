"""Names and passwords for registries, as Docker and Podman keep them."""

from __future__ import annotations

import base64
import binascii
import json
import os
from typing import Any

from .reference import DOCKER_HUB, Reference

_HUB_KEY = "https://index.docker.io/v1/"


def configured(reference: Reference) -> tuple[str, str] | None:
    """Name and password for the registry of `reference`, from the user's files; None without.

    Credential helpers are not run: what they print is a program's, started with the user's rights.
    """
    keys = [reference.registry, f"https://{reference.registry}"]
    if reference.registry == DOCKER_HUB:
        keys.append(_HUB_KEY)
    for path in _files():
        auths = _auths(path)
        for key in keys:
            found = _decoded(auths.get(key))
            if found:
                return found
    return None


def _files() -> list[str]:
    home = os.path.expanduser("~")
    docker = os.environ.get("DOCKER_CONFIG") or os.path.join(home, ".docker")
    found = [os.environ.get("REGISTRY_AUTH_FILE", "")]
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        found.append(os.path.join(runtime, "containers", "auth.json"))
    return [each for each in (*found, os.path.join(docker, "config.json")) if each]


def _auths(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            auths = json.load(file).get("auths")
    except (OSError, ValueError, AttributeError):
        return {}
    return auths if isinstance(auths, dict) else {}


def _decoded(entry: Any) -> tuple[str, str] | None:
    if not isinstance(entry, dict):
        return None
    try:
        text = base64.b64decode(entry.get("auth") or "", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, TypeError):
        return None
    # Of `echo NAME:PASSWORD | base64`: no password has the end of a line in it (RFC 7617, 2).
    name, colon, password = text.removesuffix("\n").removesuffix("\r").partition(":")
    return (name, password) if colon else None
