"""The configuration of an image: who its commands are, where they start, what they see.

Source: OCI image specification 1.1, "Image Configuration".
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ImageRefused, InvalidRequest
from ..linux import files

_MOST_BYTES = 4 << 20
_MOST_ACCOUNTS = 1 << 20  # bytes of /etc/passwd that are read
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "ppc64le": "ppc64le"}
_NOBODY = 65534
_INSIDE = files.RESOLVE_IN_ROOT | files.RESOLVE_NO_MAGICLINKS  # links lead nowhere else


@dataclass(frozen=True)
class Account:
    uid: int | None  # None: its list does not have this name
    name: str
    home: str


@dataclass(frozen=True)
class Config:
    architecture: str
    diff_ids: tuple[str, ...]
    user: str
    workdir: str
    env: Mapping[str, str]
    entrypoint: tuple[str, ...]
    command: tuple[str, ...]
    labels: Mapping[str, str]


def account_of(user: str, root: str, *, unknown: bool = False) -> Account:
    """Look `user` up in the image's list of users; an empty name is root, as in Docker.

    Args:
        unknown: Return an account without a uid for a user that is missing or out of range: the image
            can be stored, but a sandbox has to name another user.

    Raises:
        InvalidRequest: The list does not have it.
    """
    wanted = user.partition(":")[0] or "0"
    listed = _accounts(root)
    for each in listed:
        if wanted in (each.name, str(each.uid)):
            return each
    if wanted in ("root", "0"):
        return Account(0, "root", "/root")
    if wanted.isascii() and wanted.isdigit() and int(wanted) <= _NOBODY:
        return Account(int(wanted), wanted, "/")
    if unknown:
        return Account(None, wanted, "/")
    if wanted.isascii() and wanted.isdigit():
        raise InvalidRequest(f"uid {wanted} is out of range", field="user", hint=f"up to {_NOBODY}")
    names = ", ".join(each.name for each in listed[:20]) or "none"
    raise InvalidRequest(
        f"the image has no user {wanted!r}", field="user", hint=f"it has {names}; or give a uid"
    )


def place_of(path: str, root: str) -> str:
    """Where absolute `path` is in the files at `root`, whatever links of theirs are on the way.

    What is not there is added as it is; `/var/run/app` is mostly `/run/app`.
    """
    directory = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        base, missing = _name_of(directory), ""
        while path.strip("/"):
            try:
                fd = files.openat2(directory, path.strip("/"), os.O_PATH, resolve=_INSIDE)
            except FileNotFoundError:
                path, _, last = path.rstrip("/").rpartition("/")
                missing = f"/{last}{missing}"
                continue
            try:
                return _name_of(fd).removeprefix(base) + missing
            finally:
                os.close(fd)
        return missing or "/"
    finally:
        os.close(directory)


def read(configuration: bytes) -> Config:
    """Read an image's configuration.

    Raises:
        ImageRefused: It is not one, or is of another kind of machine.
    """
    if len(configuration) > _MOST_BYTES:
        raise ImageRefused("the image's configuration is too large")
    try:
        told = json.loads(configuration)
        inner = told.get("config") or {}
        diff_ids = told.get("rootfs", {}).get("diff_ids") or []
        found = Config(
            architecture=_text(told.get("architecture")),
            diff_ids=_texts(diff_ids),
            user=_text(inner.get("User")),
            workdir=_text(inner.get("WorkingDir")) or "/",
            env=dict(_pair(each) for each in _texts(inner.get("Env"))),
            entrypoint=_texts(inner.get("Entrypoint")),
            command=_texts(inner.get("Cmd")),
            labels={_text(k): _text(v) for k, v in (inner.get("Labels") or {}).items()},
        )
    except (ValueError, AttributeError, TypeError, RecursionError) as exc:
        raise ImageRefused(f"the image's configuration cannot be read: {exc}") from exc
    if found.architecture and found.architecture != architecture():
        raise ImageRefused(
            f"the image is for {found.architecture}, and this machine is {architecture()}"
        )
    return found


def derived(configuration: bytes, changes: Mapping[str, Any], diff_ids: Sequence[str]) -> bytes:
    """Another image's configuration with parts of it changed, and layers on top.

    Args:
        changes: As images write them, but `Env` is a mapping, which is added.
    """
    told = json.loads(configuration)
    inner = dict(told.get("config") or {})
    changes = dict(changes)
    env = dict(_pair(each) for each in inner.get("Env") or []) | dict(changes.pop("Env", {}))
    inner |= {"Env": [f"{name}={value}" for name, value in env.items()], **changes}
    layers = [*(told.get("rootfs", {}).get("diff_ids") or []), *diff_ids]
    whole = {
        "architecture": told.get("architecture") or architecture(),
        "os": "linux",
        "config": inner,
        "rootfs": {"type": "layers", "diff_ids": layers},
    }
    return json.dumps(whole, sort_keys=True).encode()


def architecture() -> str:
    """This machine, as images say it."""
    machine = platform.machine()
    return _ARCHITECTURES.get(machine, machine)


def _name_of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


def _accounts(root: str) -> list[Account]:
    """The image's list of users; read below `root` only, whatever links it has."""
    try:
        directory = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            flags = os.O_RDONLY | os.O_NONBLOCK
            fd = files.openat2(directory, "etc/passwd", flags, resolve=_INSIDE)
        finally:
            os.close(directory)
    except OSError:
        return []  # an image may have none
    with open(fd, "rb") as file:
        lines = file.read(_MOST_ACCOUNTS).decode("utf-8", "replace").splitlines()
    found = []
    for line in lines:
        words = line.split(":")
        if (
            len(words) >= 6
            and words[2].isascii()
            and words[2].isdigit()
            and int(words[2]) <= _NOBODY
        ):
            home = words[5] if words[5].startswith("/") and ".." not in words[5] else "/"
            found.append(Account(int(words[2]), words[0], home))
    return found


def _text(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or "\0" in value:
        raise TypeError(f"{value!r} is not a text")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        raise TypeError(f"{value!r} is not a list")
    return tuple(_text(each) for each in value or ())


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value
