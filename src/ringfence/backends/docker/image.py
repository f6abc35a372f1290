"""The image that sandboxes start from: our template's files, made here, and nothing pulled."""

from __future__ import annotations

import hashlib
import io
import tarfile

from ..local import template

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

REPOSITORY = "ringfence/template"
OWN = ("/home", "/mnt", "/var", "/run", "/opt", "/tmp")  # whose directories are the user's


def archive(uid: int) -> bytes:
    """The root as a tar; the same bytes for the same host and user. What is shown has empty places."""
    steps, trees = template.guest_root(uid)
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        _add(tar, "./", tarfile.DIRTYPE, 0o755, uid)
        for step in steps:
            verb, path, *rest = step
            if path.startswith(("/dev", "/proc")):
                continue
            if verb == "dir":
                _add(tar, path, tarfile.DIRTYPE, rest[0], uid if rest[1] or _is_own(path) else 0)
            elif verb == "file":
                _add(tar, path, tarfile.REGTYPE, rest[1], 0, data=rest[0])
            elif verb == "symlink":
                _add(tar, path, tarfile.SYMTYPE, 0o777, 0, link=rest[0])
            elif verb == "show":
                kind = tarfile.DIRTYPE if rest[1] else tarfile.REGTYPE
                _add(tar, path, kind, 0o755, 0)
        _add(tar, "/.ringfence", tarfile.DIRTYPE, 0o755, 0)
    del trees
    return made.getvalue()


def _is_own(path: str) -> bool:
    return path.startswith(OWN)


def _add(
    tar: tarfile.TarFile,
    path: str,
    kind: Any,
    mode: int,
    uid: int,
    *,
    data: bytes = b"",
    link: str = "",
) -> None:
    info = tarfile.TarInfo("." + path if path.startswith("/") else path)
    info.type, info.mode, info.uid, info.gid = kind, mode, uid, uid
    info.size, info.linkname = len(data), link
    tar.addfile(info, io.BytesIO(data))


def image_of(engine: Any, uid: int) -> str:
    """The image's name in an engine, imported on first use; named by its content."""
    content = archive(uid)
    tag = hashlib.sha256(content).hexdigest()[:24]
    name = f"{REPOSITORY}:{tag}"
    from docker.errors import ImageNotFound

    try:
        engine.images.get(name)
    except ImageNotFound:
        engine.api.import_image_from_data(content, repository=REPOSITORY, tag=tag)
    return name


def shown(uid: int) -> dict[str, dict[str, str]]:
    """The host's files that the template shows, as the engine's volumes."""
    steps, trees = template.guest_root(uid)
    found = [(trees[step[2]]["source"], step[1]) for step in steps if step[0] == "show"]
    return {source: {"bind": target, "mode": "ro"} for source, target in found}
