"""Denied paths: hidden behind something that nobody can read, also where nothing is there yet.

In a host directory an absent path is given a placeholder, as a protected one is (`protect`): what is
not there cannot be covered, and somebody might put something there later.
"""

from __future__ import annotations

import os

from ....errors import InvalidRequest
from ..session import is_below
from .protect import Protected, prepare

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from ....model.session import ResolvedMount
    from ....model.spec import SandboxSpec

_SYSTEM = ("usr", "etc")  # read-only to everybody inside: nothing can be made there


def deny_paths(
    spec: SandboxSpec, mounts: Sequence[ResolvedMount]
) -> tuple[list[tuple[Any, ...]], list[Protected]]:
    """The steps that hide what it denies, and the placeholders they need.

    Raises:
        InvalidRequest: A mount is at or in a denied path, or a symlink on the way to it.
    """
    steps: list[tuple[Any, ...]] = []
    made: list[Protected] = []
    try:
        for given in spec.deny:
            path = _without_links(given)
            check_overlap(path, mounts)
            mount = next((m for m in reversed(mounts) if is_below(path, m.target)), None)
            if mount is not None and mount.host_path is not None:
                names = path[len(mount.target) + 1 :]
                made.append(prepare(mount.target, mount.host_path, names, "hide"))
                steps += made[-1].steps
            else:
                # Of an image all is the user's, wherever it is.
                steps.append(("hide", path, spec.image is not None or not _is_system(path)))
    except BaseException:
        for each in made:
            each.remove_placeholders()
        raise
    return steps, made


def check_mount(target: str, denied: Sequence[str]) -> None:
    """Refuse to mount later what would show something that is denied, or hide that it is.

    Raises:
        InvalidRequest: naming the denied path.
    """
    for path in denied:
        if is_below(target, path) or is_below(path, target):
            raise InvalidRequest(f"{path} is denied", field="target")


def check_overlap(path: str, mounts: Sequence[ResolvedMount]) -> None:
    """Refuse a mount that would show something where everything is denied.

    Raises:
        InvalidRequest: naming both.
    """
    for mount in mounts:
        if is_below(mount.target, path):
            raise InvalidRequest(f"{path} is denied, and {mount.target} is mounted", field="deny")


def _is_system(path: str) -> bool:
    first = path.split("/")[1]
    return first in _SYSTEM or first.startswith("lib")


def _without_links(path: str) -> str:
    """/bin and friends are links to /usr on most hosts, and so inside."""
    _, first, *rest = path.split("/")
    if not first.startswith(("bin", "sbin", "lib")) or not os.path.islink(f"/{first}"):
        return path
    return "/".join([os.path.join("/", os.readlink(f"/{first}")), *rest])
