"""`Sandbox.merge`: the changes of a branch, into another sandbox or a directory of the host."""

from __future__ import annotations

import os
import tarfile
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from ..errors import FileNotFound, InvalidRequest, file_error
from ..model.base import checks
from ..model.files import DIRECTORY
from ..model.fork import SIDES, MergeConflict, Merged
from ..model.mount import READ_WRITE, Mount
from ..model.net.network import NetworkPolicy
from ..policy import protected
from .targets import HostWriter, write_to_sandbox
from .three_way import Plan
from .trees import HostTree, StreamTree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import BinaryIO, NoReturn

    from ..model.spec import SandboxSpec
    from .targets import MergeFiles, Restored

    Pack = Callable[[BinaryIO], None]

_PIECE = 1 << 20
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


def pack(files: MergeFiles, directory: str, file: BinaryIO) -> None:
    """Write the tree at `directory` of a sandbox to `file`; nothing where there is no directory."""
    try:
        if files.stat(directory).kind != DIRECTORY:
            raise file_error(20, directory)  # ENOTDIR
    except FileNotFound:
        return
    helper = files.start_helper("out", directory)
    try:
        while data := os.read(helper.stream, _PIECE):
            file.write(data)
    except BaseException:
        helper.abandon()
        raise
    helper.finish(directory)


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
        spec,
        id=None,
        mounts=own,
        memory_dir=None,
        ttl_s=None,
        network=NetworkPolicy(),
        secrets={},
    )

    def packed(file: BinaryIO) -> None:
        restored = restore(snapshot_id, bare)
        try:
            pack(restored.files, directory, file)
        finally:
            restored.terminate()

    return packed


def into_sandbox(
    base: Pack,
    theirs: Pack,
    target: MergeFiles,
    directory: str,
    *,
    prefer: str | None,
    dry_run: bool,
) -> Merged:
    """Merge into the directory of a sandbox; see `Sandbox.merge`."""
    with ExitStack() as stack:
        sides = [_tree(stack, each) for each in (base, partial(pack, target, directory), theirs)]
        _refuse_absent(sides[0], sides[2], directory)
        plan = Plan(sides[0], sides[1], sides[2], prefer)
        if dry_run or plan.conflicts:
            return plan.outcome(is_applied=False)
        write_to_sandbox(plan, target, directory.rstrip("/"))
        return plan.outcome(is_applied=True)


def into_host(
    base: Pack,
    theirs: Pack,
    target: str,
    spec: SandboxSpec,
    directory: str = ".",
    *,
    prefer: str | None,
    dry_run: bool,
) -> Merged:
    """Merge into a directory of the host; see `Sandbox.merge`.

    Args:
        spec: The branch's: its `protect` and `unprotect` hold as for a writable mount.
        directory: Of the branch.
    """
    with ExitStack() as stack:
        ours = HostTree(os.path.realpath(target))
        stack.callback(ours.close)
        sides = [_tree(stack, each) for each in (base, theirs)]
        _refuse_absent(sides[0], sides[1], directory)
        plan = Plan(sides[0], ours, sides[1], prefer)
        _refuse_protected(plan, ours.directory, spec)
        if dry_run or plan.conflicts:
            return plan.outcome(is_applied=False)
        HostWriter(plan, ours).write()
        return plan.outcome(is_applied=True)


def _refuse_absent(base: StreamTree, theirs: StreamTree, directory: str) -> None:
    if base.is_absent and theirs.is_absent:
        what = f"{directory}: no such directory in the sandbox, nor in the snapshot"
        raise FileNotFound(what, path=directory)


def _tree(stack: ExitStack, pack: Pack) -> StreamTree:
    try:
        tree = StreamTree(pack)
    except tarfile.ReadError as exc:
        raise InvalidRequest(f"the files could not be read: {exc}", field="path") from exc
    stack.callback(tree.close)
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
