"""`Sandbox.merge`: the changes of a branch, into another sandbox or a directory of the host."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from ..errors import FileNotFound, InvalidRequest
from ..model.base import checks
from ..model.files import DIRECTORY
from ..model.fork import SIDES, MergeConflict, Merged
from ..model.mount import READ_WRITE, Mount
from ..model.net.network import NetworkPolicy
from ..policy import protected
from .targets import HostWriter, write_to_sandbox
from .three_way import Plan
from .trees import HostTree, SandboxTree, StreamTree, pack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import BinaryIO, NoReturn

    from ..model.spec import SandboxSpec
    from .targets import Branch, MergeFiles, Restored
    from .trees import Compared, Pack

    ByLayers = Callable[[str, str, ExitStack], tuple[Compared, Compared] | None]
    Sides = Callable[[ExitStack], tuple[Compared, Compared]]

_GIT = tuple(name.removeprefix(".git/") for name in protected.DEFAULTS if name.startswith(".git/"))


def check(path: object, prefer: object) -> str:
    """Check the arguments of a merge that are plain values; return the path."""
    if prefer is not None:
        checks.choice(prefer, "prefer", SIDES, " or ".join(SIDES))
    return checks.text(os.fspath(path) if hasattr(path, "__fspath__") else path, "path") or "."


def refuse_itself() -> NoReturn:
    """Refuse to merge a sandbox into itself, where nothing could ever change.

    Raises:
        InvalidRequest: Always.
    """
    hint = "name the sandbox or the directory that is to get its changes"
    raise InvalidRequest("a sandbox cannot be merged into itself", field="into", hint=hint)


def before(
    restore: Callable[[str, SandboxSpec], Restored],
    spec: SandboxSpec,
    snapshot_id: str,
    directory: str,
) -> Pack:
    """Pack a directory of a snapshot, by way of a sandbox in which nothing runs.

    Args:
        restore: The backend's.
        spec: Of the branch.
    """
    own = tuple(each for each in spec.mounts if not each.is_host_path)
    bare = replace(
        spec, id=None, mounts=own, memory_dir=None, ttl_s=None, network=NetworkPolicy(), secrets={}
    )

    def packed(file: BinaryIO) -> None:
        restored = restore(snapshot_id, bare)
        try:
            pack(restored.files, directory, file)
        finally:
            restored.terminate()

    return packed


def sides_of(
    branch: Branch,
    by_layers: ByLayers | None,
    restore: Callable[[str, SandboxSpec], Restored],
    snapshot_id: str,
    directory: str,
    stack: ExitStack,
) -> tuple[Compared, Compared]:
    """Return a directory in a snapshot and in a branch; of layers only what differs is read.

    Args:
        by_layers: The branch's, where it is `optional.Layered`.
        restore: Its backend's.
        stack: Closes both.
    """
    sides = by_layers(snapshot_id, directory, stack) if by_layers is not None else None
    if sides is not None:
        return sides
    base = before(restore, branch.spec, snapshot_id, directory)
    return whole(base, partial(pack, branch.files, directory), stack)


def whole(base: Pack, theirs: Pack, stack: ExitStack) -> tuple[Compared, Compared]:
    """Read both sides whole; `stack` closes them.

    Raises:
        InvalidRequest: What was packed is no tree.
    """
    return _read(stack, base), _read(stack, theirs)


def into_sandbox(
    sides: Sides, target: MergeFiles, directory: str, *, prefer: str | None, dry_run: bool
) -> Merged:
    """Merge into the directory of a sandbox; see `Sandbox.merge`.

    Args:
        sides: Opens the snapshot's and the branch's.
    """
    with ExitStack() as stack:
        base, theirs = sides(stack)
        _refuse_absent(base, theirs, directory)
        ours = SandboxTree(target, directory.rstrip("/"))
        stack.callback(ours.close)
        plan = Plan(base, ours, theirs, prefer)
        if dry_run or plan.conflicts:
            return plan.outcome(is_applied=False)
        write_to_sandbox(plan, target, directory.rstrip("/"))
        return plan.outcome(is_applied=True)


def into_host(
    sides: Sides,
    target: str,
    spec: SandboxSpec,
    directory: str = ".",
    *,
    prefer: str | None,
    dry_run: bool,
) -> Merged:
    """Merge into a directory of the host; see `Sandbox.merge`.

    Args:
        sides: Opens the snapshot's and the branch's.
        spec: The branch's: its `protect` and `unprotect` hold as for a writable mount.
        directory: Of the branch.
    """
    with ExitStack() as stack:
        ours = HostTree(os.path.realpath(target))
        stack.callback(ours.close)
        base, theirs = sides(stack)
        _refuse_absent(base, theirs, directory)
        plan = Plan(base, ours, theirs, prefer)
        _refuse_protected(plan, ours.directory, spec)
        if dry_run or plan.conflicts:
            return plan.outcome(is_applied=False)
        HostWriter(plan, ours).write()
        return plan.outcome(is_applied=True)


def _refuse_absent(base: Compared, theirs: Compared, directory: str) -> None:
    if base.is_absent and theirs.is_absent:
        what = f"{directory}: no such directory in the sandbox, nor in the snapshot"
        raise FileNotFound(what, path=directory)


def _read(stack: ExitStack, pack: Pack) -> StreamTree:
    tree = StreamTree()
    stack.callback(tree.close)
    tree.add(pack)
    return tree


def _refuse_protected(plan: Plan, directory: str, spec: SandboxSpec) -> None:
    """Make a conflict of each path that would be read-only if the directory were mounted writable."""
    shown = Mount("/merged", directory, READ_WRITE)
    names = [name for name, _named in protected.wanted(shown, spec, directory)]
    of_git = [name for name in _GIT if f".git/{name}" not in spec.unprotect]
    if any(each in (*protected.EVERYTHING, protected.NESTED) for each in spec.unprotect):
        of_git = []
    for path, kind in [
        *((path, write.entry[0]) for path, write in plan.writes.items()),
        *((path, entry[0]) for path, entry in plan.removals.items()),
    ]:
        below = path[1:] + "/"
        is_named = any(below.startswith(name + "/") for name in names)
        if is_named or (of_git and _is_of_git(path, kind, of_git)):
            reason = "it is protected: programs on the host act on it; merge it by hand"
            plan.conflicts[path] = MergeConflict(path[1:], reason)


def _is_of_git(path: str, kind: str, names: list[str]) -> bool:
    """Return whether git acts on a path, in a repository at any depth."""
    if path.endswith("/.git"):
        return kind != DIRECTORY  # it leads git to another place
    _above, is_in_git, rest = f"{path}/".rpartition("/.git/")
    return bool(is_in_git) and any(rest.startswith(f"{name}/") for name in names)
