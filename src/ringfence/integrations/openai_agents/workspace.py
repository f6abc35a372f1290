"""Mounts of a session, and the part of its workspace that is saved and restored.

Mounts from outside are neither packed, nor cleared for a restore. Source:
agents.sandbox.workspace_paths, agents.sandbox.session.snapshot_lifecycle (0.24).
"""

from __future__ import annotations

import io
import tarfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from agents.sandbox.errors import WorkspaceArchiveWriteError
from agents.sandbox.session.tar_workspace import shell_tar_exclude_args
from agents.sandbox.util.tar_utils import UnsafeTarMemberError, validate_tar_bytes
from agents.sandbox.workspace_paths import sandbox_path_grant_host_path

from ...errors import InvalidRequest
from ...model.calls import parse_mount
from ...model.mount import READ_ONLY, READ_WRITE, Mount

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from agents.sandbox.manifest import Manifest

# A hard link would be refused on the way back: each name gets the content. Only GNU's tar can.
_PACK = """cd "$0" || exit
links=
tar --hard-dereference --version >/dev/null 2>&1 && links=--hard-dereference
exec tar $links {skip} -cf "$1" ."""


def mounts_of(create: Mapping[str, Any], server: str | None, manifest: Manifest) -> list[Mount]:
    """List the mounts: the caller's, the manifest's grants, and a workspace if neither has one.

    Raises:
        InvalidRequest: A grant is of this host's, and the sandbox would be on another one.
    """
    mounts = [parse_mount(mount) for mount in create.get("mounts", ())]
    mounts += granted(server, manifest)
    if all(mount.target != manifest.root for mount in mounts):
        # The workspace is the agent's own: nothing in it needs protection from it.
        mounts.append(Mount(manifest.root, "", READ_WRITE, protect=()))
    return mounts


def granted(server: str | None, manifest: Manifest) -> list[Mount]:
    """The manifest's grants that name a directory of this host."""
    grants = [each for each in manifest.extra_path_grants if each.host_path is not None]
    if grants and server is not None:
        raise InvalidRequest(
            f"{grants[0].path} is granted from this host, and the sandbox is a server's",
            field="host_path",
            hint="give mounts=, which the server resolves",
        )
    return [
        Mount(
            each.path,
            str(sandbox_path_grant_host_path(each)),
            READ_ONLY if each.read_only else READ_WRITE,
        )
        for each in grants
    ]


def from_outside(mounts: Iterable[Mount], root: str) -> set[Path]:
    """Where in the workspace at `root` something of the host or session is; `.` is all of it."""
    targets = (PurePosixPath(mount.target) for mount in mounts if mount.source)
    return {Path(target.relative_to(root)) for target in targets if target.is_relative_to(root)}


def packing(skip: Iterable[Path]) -> str:
    """The shell script that packs directory `$0` as a tar in the file `$1`, without `skip`."""
    return _PACK.format(skip=" ".join(shell_tar_exclude_args(skip)))  # quoted for a shell


def empty_tar() -> bytes:
    """An archive of nothing."""
    archive = io.BytesIO()
    tarfile.open(fileobj=archive, mode="w").close()
    return archive.getvalue()


def check_tar(root: Path, payload: bytes) -> None:
    """Refuse what would lead out of the workspace, and what the framework has no use for.

    Raises:
        WorkspaceArchiveWriteError: It would, or is no tar.
    """
    try:
        validate_tar_bytes(payload, allow_external_symlink_targets=False)
    except UnsafeTarMemberError as exc:
        context = {"reason": "unsafe_or_invalid_tar", "member": exc.member, "detail": str(exc)}
        raise WorkspaceArchiveWriteError(path=root, context=context, cause=exc) from exc
