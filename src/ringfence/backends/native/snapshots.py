"""Saving and loading the writable layer of a native sandbox."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import replace

from ...errors import LifecycleError, ResourceExhausted, SnapshotCorrupt
from ...model.base.ids import new_id
from ...model.state import State
from ...snapshots.layers import as_file
from ..local.answers import Refused
from ..local.mounts import layered
from ..local.mounts.layered import Layered
from . import fresh
from .inner import replay, send
from .profiles import profile_named
from .trees import Helper

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TypeVar

    from ...model.session import Snapshot
    from ...model.spec import SandboxSpec
    from ...snapshots.catalogue import Catalogue
    from ..local.mounts.images import Held
    from .live import LiveSandbox
    from .profiles import Profile
    from .request import Base, Over

    T = TypeVar("T", bound=LiveSandbox)

_PIECE = 1 << 20
_OVERHEAD_BYTES = 64 << 20  # headers of very many small files


def save(sandbox: LiveSandbox, catalogue: Catalogue, metadata: Mapping[str, str]) -> Snapshot:
    """Everything in the writable layer, at one moment: the sandbox is stopped meanwhile."""
    was_suspended = sandbox.state is State.SUSPENDED
    was = sandbox.state
    if not was_suspended:
        sandbox.suspend()
    names = _open_names(sandbox)
    try:
        helper = writable_layer(sandbox, names)
        try:
            snapshot = catalogue.save(
                helper.stream,
                new_id("snap"),
                sandbox.spec,
                sandbox.sizes.disk_bytes + sandbox.sizes.disk_bytes // 8 + _OVERHEAD_BYTES,
                session_id=sandbox.id,
                created_at=time.time(),
                lower=sandbox.lower,
                metadata=dict(metadata),
            )
        except BaseException:
            helper.abandon()
            raise
        try:
            helper.finish("/")
        except BaseException:
            catalogue.delete(snapshot.id)
            raise
    finally:
        if names >= 0:
            os.close(names)
        if not was_suspended:
            sandbox.resume()
            sandbox.restore_state(was)
    layered.unpack_large(catalogue, snapshot.id)
    return snapshot


def _open_names(sandbox: LiveSandbox) -> int:
    """Return a descriptor of the names of the files that a snapshot lies over; -1 where it is a whole one."""
    base = sandbox.base
    if base is None:
        return -1
    if sandbox.lower == base.ids:
        return base.open_names()
    image = base.image if isinstance(base, Layered) else base
    return as_file(image.names() if image else {})


def save_layer(sandbox: LiveSandbox, path: str) -> None:
    """Write the changes to the image as a tar stream to the new file `path`."""
    base = sandbox.base
    image = base.image if isinstance(base, Layered) else base
    if image is None:
        raise LifecycleError("this sandbox did not start from an image")
    names = image.open_names()
    try:
        helper = writable_layer(sandbox, names)
        try:
            with open(path, "xb") as file:
                while data := os.read(helper.stream, _PIECE):
                    file.write(data)
        except OSError as exc:
            helper.abandon()
            raise ResourceExhausted(f"{path}: {exc.strerror}", hint="free disk space") from exc
        except BaseException:
            helper.abandon()
            raise
        helper.finish("/")
    finally:
        os.close(names)


def writable_layer(sandbox: LiveSandbox, names: int) -> Helper:
    """A helper that streams what is not the template's, the image's or of the snapshots below.

    Args:
        names: Descriptor of the names of the files below it; -1 without any.
    """
    if names < 0:
        return Helper(sandbox, "out", "/", as_root=True)
    return Helper(sandbox, "layer out", "/", as_root=True, also=[names])


def restore(
    provision: Callable[[SandboxSpec, Over | None], T],
    catalogue: Catalogue,
    profiles: dict[str, Profile],
    snapshot_id: str,
    spec: SandboxSpec | None,
    secrets: Mapping[str, str],
) -> T:
    """Make a sandbox over the snapshot's unpacked layers; what is not unpacked is loaded into it.

    Args:
        provision: `NativeBackend.provision`.

    Raises:
        SnapshotNotFound, SnapshotCorrupt: As `Catalogue.open`; nothing was made.
    """
    if spec is None:
        _saved, taken_under, lower = catalogue.describe(snapshot_id)
        spec = replace(taken_under, id=None, secrets=dict(secrets))
    else:
        lower = catalogue.lower(snapshot_id)
    chain = snapshot_id, *lower
    # Root inside has more ids than an unpacked snapshot shows.
    is_layered = not profile_named(spec.profile, profiles).root_capabilities
    with ExitStack() as stack:
        contents: list[int] = []

        def over(image: Held | None) -> Base | None:
            base: Base | None = image
            above = chain
            if is_layered:
                held, above = layered.hold(catalogue, chain, image)
                base = held or image
            try:
                for each in reversed(above):
                    contents.append(catalogue.content(each))
                    stack.callback(os.close, contents[-1])
            except BaseException:
                if base is not None:
                    base.close()
                raise
            return base

        sandbox = provision(spec, over)
        try:
            for number, each in enumerate(contents):
                is_whole = number == 0 and sandbox.base is None
                if not (is_whole and fresh.has(sandbox, each)):
                    load(sandbox, each, is_whole=is_whole)
        except BaseException:
            sandbox.terminate()
            raise
    return sandbox


def load(sandbox: LiveSandbox, content: int, *, is_whole: bool) -> None:
    """Put saved files into a sandbox in which nothing has run yet.

    Args:
        is_whole: The stream lies over nothing: it removes no file.

    Raises:
        SnapshotCorrupt: The content could not be unpacked.
    """
    request = {
        "op": "tree",
        "plan": replay(sandbox),
        "direction": "in" if is_whole else "layer in",
        "path": "/",
        "as_root": True,
        "cgroup_dirs": sandbox.group.directories,
    }
    try:
        send(sandbox, request, [content], None)
    except Refused as exc:
        raise SnapshotCorrupt(f"the snapshot was not restored: {exc.strerror}") from exc
