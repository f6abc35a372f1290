"""Saving and loading the writable layer of a native sandbox."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import replace

from ...errors import LifecycleError, ResourceExhausted, RingfenceError, SnapshotCorrupt
from ...model.base.ids import new_id
from ...model.session import TEMPORARY
from ...model.state import State
from ...snapshots.layers import as_file
from ..local.answers import Refused
from ..local.mounts import layered
from ..local.mounts.layered import Layered
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

    Members = dict[bytes, bytes]  # header without its time, and content, by name
    T = TypeVar("T", bound=LiveSandbox)

_PIECE = 1 << 20
_OVERHEAD_BYTES = 64 << 20  # headers of very many small files
_BLOCK = 512
_NAME, _SIZE, _MTIME, _KIND, _PREFIX = 100, slice(124, 135), 136, 156, slice(345, 500)
_MOST_BYTES = 1 << 18
# The furniture of a root is made at once, so a later time shows a change that left the content as it was.
_AT_ONCE_S = 1.0
_known: dict[bytes, Members | None] = {}
"""What fresh sandboxes have, by the furniture that they were made of."""
_lasts: list[tuple[object, ...]] = [()]  # of the last stream that had no more


def save(sandbox: LiveSandbox, catalogue: Catalogue, metadata: Mapping[str, str]) -> Snapshot:
    """Everything in the writable layer, at one moment: the sandbox is stopped meanwhile."""
    was_suspended = sandbox.state is State.SUSPENDED
    was = sandbox.state
    if not was_suspended:
        sandbox.suspend()
    names = -1
    try:
        names = _open_names(sandbox)
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
                is_durable=TEMPORARY.isdisjoint(metadata),
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


def writable_layer(sandbox: LiveSandbox, names: int, path: str = "/") -> Helper:
    """A helper that streams what is not the template's, the image's or of the snapshots below.

    Args:
        names: Descriptor of the names of the files below it; -1 without any.
        path: The directory of which it streams this.
    """
    if names < 0:
        return Helper(sandbox, "out", path, as_root=True)
    return Helper(sandbox, "layer out", path, as_root=True, also=[names])


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
                if not (is_whole and _is_fresh(sandbox, each)):
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


def _is_fresh(sandbox: LiveSandbox, content: int) -> bool:
    """Return whether `sandbox`, in which nothing ran yet, has all that is in a stream already.

    Unpacking takes a helper in the sandbox, and a process of Python forked twice: a quarter of the processor
    time of a fork. A context that kept all its state in memory has changed no file.

    The first stream that is compared with furniture is always said to have more: a process that restores
    one sandbox shall not read what that has.
    """
    furniture, info = sandbox.furniture, os.fstat(content)
    if not furniture or info.st_size > _MOST_BYTES:
        return False
    asked = furniture, info.st_dev, info.st_ino, info.st_ctime_ns
    if asked == _lasts[0]:
        return True
    if furniture not in _known:
        _known[furniture] = None
        return False
    wanted = _members(os.pread(content, _MOST_BYTES, 0))
    if wanted is None:
        return False
    known = _known[furniture] = _known[furniture] or _read_fresh(sandbox)
    if wanted.items() <= known.items():
        _lasts[0] = asked
        return True
    return False


def _read_fresh(sandbox: LiveSandbox) -> Members:
    helper = Helper(sandbox, "out", "/", as_root=True)
    try:
        with open(helper.stream, "rb", closefd=False) as file:
            found = _members(file.read(_MOST_BYTES))
    except BaseException:
        helper.abandon()
        raise
    try:
        helper.finish("/")
    except RingfenceError:
        return {}
    return found or {}


def _members(stream: bytes) -> Members | None:
    """Read a tar stream; None: it has more than plain members, or they were not made at once."""
    found: Members = {}
    times: list[float] = []
    at = 0
    try:
        while any(head := stream[at : at + _BLOCK]):
            at += _BLOCK
            size = int(head[_SIZE], 8)
            content = stream[at : at + size]
            at += -(-size // _BLOCK) * _BLOCK
            if head[_KIND : _KIND + 1] == b"x":
                length, name, time = content.replace(b"=", b" ").split()
                if name != b"mtime" or int(length) != size:
                    return None
                times.append(float(time))
            else:
                name = head[:_NAME] + head[_PREFIX]
                found[name] = head[:_MTIME] + head[_KIND:] + content
    except ValueError:
        return None
    is_plain = 0 < len(times) == len(found) and max(times) - min(times) <= _AT_ONCE_S
    return found if is_plain else None
