"""View of a session from inside, for all backends: its root, environment and mounts."""

from __future__ import annotations

import errno
import os
import stat

from ...errors import InvalidRequest, Unsupported
from ...model.mount import ALWAYS_THERE, MEMORY_DIR, READ_WRITE, Mount, outermost_first
from .host import identity
from .mounts import template

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from ...model.session import ResolvedMount
    from ...model.spec import SandboxSpec

_SYSTEM = ("usr", "bin", "sbin", "etc", "proc", "sys", "dev")


def is_own(path: str) -> bool:
    """Return whether a directory may be made there; the system's directories stay as they are."""
    first = path.split("/")[1]
    return bool(first) and first not in _SYSTEM and not first.startswith("lib")


def session_root(spec: SandboxSpec) -> str:
    """Where relative paths start."""
    return spec.workdir or template.HOME


def must_make(workdir: str, mounts: Sequence[ResolvedMount], *, of_image: bool) -> bool:
    """Return whether the session's root has to be made in the template's or image's root."""
    in_mount = any(is_below(workdir, mount.target) for mount in mounts)
    if of_image:  # also below /usr: all of it is the sandbox's own
        return workdir != "/" and not in_mount
    is_made = in_mount or is_below(workdir, template.HOME)
    return is_own(workdir) and (not is_made or workdir.startswith(template.HOME + "/"))


def environment(spec: SandboxSpec, own: Mapping[str, str]) -> dict[str, str]:
    """Build the environment of every exec; nothing comes from the host's.

    Args:
        own: Variables for the sandbox's network and secrets; the user's own variables win.
    """
    user = identity.name_of(identity.uid_of(spec.user))
    return {
        "PATH": template.python_path() if spec.python_env else template.PATH,
        "HOME": template.HOME,
        "USER": user,
        "LOGNAME": user,
        "LANG": "C.UTF-8",
        # `git init` would copy sample hooks into .git/hooks, which is read-only in a mount.
        "GIT_TEMPLATE_DIR": "",
        # The host's Python is read-only here: `pip install` falls back to the home directory.
        **({} if spec.image else {"PIP_BREAK_SYSTEM_PACKAGES": "1"}),
        **ALWAYS_THERE,
        **own,
        **spec.env,
    }


def all_mounts(spec: SandboxSpec) -> list[Mount]:
    memory = [Mount(MEMORY_DIR, spec.memory_dir, READ_WRITE)] if spec.memory_dir else []
    return outermost_first([*memory, *spec.mounts])


def steps_of_own(spec: SandboxSpec, mount: Mount) -> list[tuple[Any, ...]]:
    """Plan a mount without a source on the host: a directory of the session's."""
    steps: list[tuple[Any, ...]] = [("session_dir", mount.target)]
    if mount.source:
        source = f"{session_root(spec)}/{mount.source}"
        steps = [("session_dir", source), ("bind_inside", source, mount.target, 0)]
    return steps if mount.is_writable else [*steps, ("protect", mount.target)]


def no_source(mount: Mount, exc: OSError) -> InvalidRequest:
    """The error for a mount whose source cannot be had."""
    field, what = "mounts.source", "a mount source must exist on the host"
    if mount.target == MEMORY_DIR:
        field, what = "memory_dir", "it must be a directory on the host"
    hint = _meant_by(mount.source) or f"{what}; Ringfence does not create it"
    if exc.errno == errno.EACCES:
        hint = "make every parent directory accessible to this user, or run as its owner"
    return InvalidRequest(f"{mount.source}: {exc.strerror}", field=field, hint=hint)


def _meant_by(source: str) -> str:
    """Name what was meant by a source that only a shell, or another system, understands; else empty."""
    parts = source.split("/")
    if "\\" in source or any(each[1:2] == ":" for each in parts):
        return "paths are those of Linux: in WSL, C:\\Users is /mnt/c/Users"
    if any(each[:1] == "~" for each in parts):
        return "only a shell expands ~: write the whole path, as $HOME/x in a shell"
    if "$" in source:
        return "only a shell expands variables: write the whole path"
    if {"*", "?"} & {*parts[-1]}:
        return "only a shell expands patterns: mount the directory that has the files"
    return ""


def check_idle_timeout(spec: SandboxSpec, backend: str) -> None:
    """Refuse an idle timeout: no backend watches for that, a session manager does."""
    if spec.limits.idle_timeout_s is not None:
        raise Unsupported(
            "idle timeouts need a session manager",
            backend=backend,
            operation="limit idle_timeout_s",
            field="limits.idle_timeout_s",
            hint="use a SessionManager or a server, or set ttl_s",
        )


def check_least(spec: SandboxSpec, least: Mapping[str, tuple[int, str]]) -> None:
    """Refuse limits under which nothing comes up; of each, by its name: the least, and why."""
    for name, (lowest, why) in least.items():
        wanted = getattr(spec.limits, name)
        if wanted is not None and wanted < lowest:
            raise InvalidRequest(f"must be at least {lowest}: {why}", field=f"limits.{name}")


def check_sources(spec: SandboxSpec) -> None:
    """Refuse mounts whose source is not there: it is opened, for good, when all else is in order."""
    for mount in all_mounts(spec):
        try:
            if mount.is_host_path:
                mode = os.stat(mount.source).st_mode
                if mount.target == MEMORY_DIR and not stat.S_ISDIR(mode):
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        except OSError as exc:
            raise no_source(mount, exc) from exc


def is_below(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")
