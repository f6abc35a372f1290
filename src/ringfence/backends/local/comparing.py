"""Comparison of a sandbox's files with a snapshot's, or with those of a new sandbox."""

from __future__ import annotations

import os
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import TYPE_CHECKING

from ...errors import InvalidRequest
from ...snapshots.changes import Moment, compare
from .mounts import images
from .session import is_below

if TYPE_CHECKING:
    from typing import Any, Protocol

    from ...model.changes import Changes
    from ...model.session import ResolvedMount
    from ...model.spec import SandboxSpec
    from ...snapshots.catalogue import Catalogue
    from ..protocol import BackendSandbox

    class Maker(Protocol):
        name: str

        def catalogue(self) -> Catalogue: ...

        def provision(self, spec: SandboxSpec) -> BackendSandbox: ...

    class Compared(Protocol):
        spec: SandboxSpec
        mounts: list[ResolvedMount]
        has_whiteouts: bool
        lower: tuple[str, ...]


def changes(sandbox: Compared, backend: Maker, since: str | None) -> Changes:
    with ExitStack() as stack:
        root = -1
        if sandbox.spec.image is not None:
            _spec, held = images.hold(sandbox.spec)
            stack.callback(held.close)
            root = os.open(held.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, root)
        before = _saved(sandbox, backend, since) if since is not None else _of_new(sandbox, backend)
        stack.callback(_close, before)
        after = _below(backend, sandbox.lower)
        stack.callback(_close, after)
        after.append(_moment(sandbox, backend))
        mounted = [each.target for each in sandbox.mounts if each.host_path]
        return compare(
            before,
            after,
            is_layer=root >= 0 or sandbox.has_whiteouts,
            root=root,
            # With a mount come the directories above it.
            is_mounted=lambda path: any(
                is_below(path, each) or is_below(each, path) for each in mounted
            ),
        )


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _below(backend: Maker, lower: tuple[str, ...]) -> list[int]:
    """The streams of snapshots that others lie over, the lowest first."""
    found: list[int] = []
    try:
        for each in reversed(lower):
            found.append(backend.catalogue().content(each))
    except BaseException:
        _close(found)
        raise
    return found


def _saved(sandbox: Compared, backend: Maker, since: str) -> list[int]:
    _snapshot, spec, lower = backend.catalogue().describe(since)
    if spec.image != sandbox.spec.image:
        raise InvalidRequest(
            "that snapshot is of another image, or of none",
            field="since",
            hint="compare with a snapshot of a sandbox of the same image",
        )
    return _below(backend, (since, *lower))


def _of_new(sandbox: Compared, backend: Maker) -> list[int]:
    """Save the files of a new sandbox of the same spec, without mounts of the host."""
    own = tuple(each for each in sandbox.spec.mounts if not each.is_host_path)
    spec = replace(sandbox.spec, id=None, mounts=own, memory_dir=None, ttl_s=None)
    made = backend.provision(spec)
    try:
        return [_moment(made, backend)]
    finally:
        made.terminate()


def _moment(sandbox: Any, backend: Maker) -> int:
    moment = Moment(backend.catalogue().directory, backend.name)
    sandbox.snapshot({}, moment)
    with closing(moment.file):
        return os.dup(moment.file.fileno())
