"""Images of containers: our template's files or an image's, loaded into the engine; nothing is pulled."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import stat
import tarfile
import threading

from ...errors import ImageRefused, IoError
from ...images.store import ImageStore
from ..local.agents.contained import AGENT
from ..local.mounts import runtime, template

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from typing import Any

    from ..local.mounts.images import Held

REPOSITORY, IMAGES = "ringfence/template", "ringfence/image"
_ID, _STORE = "ringfence.image", "ringfence.store"  # labels
_PIECE = 1 << 16
OWN = ("/home", "/mnt", "/var", "/run", "/opt", "/tmp")  # whose directories are the user's


def archive(uid: int, owner: int) -> bytes:
    """The root as a tar; the same bytes for the same host and user. What is shown has empty places.

    Args:
        owner: The user's id as the engine counts.
    """
    steps, trees = template.guest_root(uid)
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        _add(tar, "./", tarfile.DIRTYPE, 0o755, owner)
        for step in steps:
            verb, path, *rest = step
            if path.startswith(("/dev", "/proc")):
                continue
            if verb == "dir":
                _add(tar, path, tarfile.DIRTYPE, rest[0], owner if rest[1] or _is_own(path) else 0)
            elif verb == "file":
                _add(tar, path, tarfile.REGTYPE, rest[1], 0, data=rest[0])
            elif verb == "symlink":
                _add(tar, path, tarfile.SYMTYPE, 0o777, 0, link=rest[0])
            elif verb == "show":
                kind = tarfile.DIRTYPE if rest[1] else tarfile.REGTYPE
                _add(tar, path, kind, 0o755, 0)
        _add(tar, AGENT, tarfile.DIRTYPE, 0o755, 0)
    del trees
    return made.getvalue()


def one_of_the_users(path: str, uid: int, *, is_file: bool) -> bytes:
    """A tar with one empty file or directory in it, the user's."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        kind, mode = (tarfile.REGTYPE, 0o644) if is_file else (tarfile.DIRTYPE, 0o755)
        _add(tar, path, kind, mode, uid)
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


def image_of(engine: Any, uid: int, owner: int) -> str:
    """The image's name in an engine, imported on first use; named by its content."""
    content = archive(uid, owner)
    tag = hashlib.sha256(content).hexdigest()[:24]
    name = f"{REPOSITORY}:{tag}"
    from docker.errors import ImageNotFound

    try:
        engine.images.get(name)
    except ImageNotFound:
        engine.api.import_image_from_data(content, repository=name)  # Podman reads no tag apart
    return name


def shown(uid: int) -> dict[str, dict[str, str]]:
    """The host's files that the template shows, as the engine's volumes."""
    steps, trees = template.guest_root(uid)
    found = [(trees[step[2]]["source"], step[1]) for step in steps if step[0] == "show"]
    return {source: {"bind": target, "mode": "ro"} for source, target in found}


# -- images ------------------------------------------------------------------------------------


def image_from(engine: Any, held: Held, uid: int) -> str:
    """The name of an image's files in an engine, all of them the user's; copied there on first use.

    Raises:
        ImageRefused: A link is where every program must find a directory.
        IoError: A file of it could not be read; the engine keeps no part of it.
    """
    from docker.errors import ImageNotFound

    tag = f"{held.image.id.removeprefix('sha256:')[:24]}-{uid}"
    name = f"{IMAGES}:{tag}"
    try:
        engine.images.get(name)
    except ImageNotFound:
        store = ImageStore()
        _forget_removed(engine, store)
        own = dict(_own_entries(held.root, uid))
        labels = [f"LABEL {_ID}={held.image.id}", f'LABEL {_STORE}="{store.directory}"']
        with contextlib.closing(_pieces(held.root, own, uid)) as pieces:
            engine.api.import_image_from_stream(pieces, name, changes=labels)
    return name


def _pieces(
    root: str, own: dict[str, tuple[Any, int, bytes]], uid: int
) -> Generator[bytes, None, None]:
    """Pieces of the tar stream of all files.

    Raises:
        IoError: A file could not be read. To an engine a tar stream that ends between two files is whole;
            that this one is not it knows from the request, whose last chunk is missing.
    """
    read, write = os.pipe2(os.O_CLOEXEC)
    problems: list[Exception] = []
    args = write, root, own, uid, problems
    writer = threading.Thread(target=_write, args=args, daemon=True)
    with open(read, "rb") as stream:
        writer.start()
        while piece := stream.read(_PIECE):
            yield piece
    writer.join()
    for exc in problems:
        raise IoError(f"the image could not be copied into the engine: {exc}") from exc


def _forget_removed(engine: Any, store: ImageStore) -> None:
    """Images that this store has no more are of no use in the engine either."""
    from docker.errors import DockerException

    here = {image.id for image in store.images()}
    for each in engine.images.list(filters={"label": f"{_STORE}={store.directory}"}):
        if each.labels.get(_ID) not in here:
            try:
                engine.images.remove(each.id)
            except DockerException:
                continue  # a container still uses it


def _own_entries(root: str, uid: int) -> Iterator[tuple[str, tuple[Any, int, bytes]]]:
    """Yield the entries that a container has besides, or instead of, the image's: kind, mode, content."""
    for verb, path, *rest in template.image_guest_root(uid):
        found = os.lstat(root + path).st_mode if os.path.lexists(root + path) else 0
        if verb == "image_dir":
            if found and not stat.S_ISDIR(found):
                raise ImageRefused(f"{path} of the image is not a directory")
            if not found:
                yield path, (tarfile.DIRTYPE, rest[0], b"")
        elif not found or rest[2]:
            yield path, (tarfile.REGTYPE, rest[1], rest[0])
    # A preload file of the image would be loaded into the agent too.
    yield runtime.PRELOAD, (tarfile.REGTYPE, 0o644, b"")
    for path in (AGENT, runtime.PLACE):
        yield path, (tarfile.DIRTYPE, 0o755, b"")


def _write(
    write: int,
    root: str,
    own: dict[str, tuple[Any, int, bytes]],
    uid: int,
    problems: list[Exception],
) -> None:
    """The tar stream of all files, ours last; the engine ends it early where it does not want it.

    Args:
        problems: Gets why the stream ended early otherwise.
    """

    def theirs(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        path = info.name.removeprefix(".")
        if path in own or path.partition("/")[0] in (AGENT, runtime.PLACE):
            return None
        info.uid = info.gid = uid
        info.uname = info.gname = ""
        return info

    try:
        with open(write, "wb") as sink, tarfile.open(fileobj=sink, mode="w|") as tar:
            tar.add(root, ".", filter=theirs)
            for path, (kind, mode, data) in own.items():
                _add(tar, path, kind, mode, uid, data=data)
    except BrokenPipeError:
        pass  # the engine has said why
    except (OSError, tarfile.TarError) as exc:
        problems.append(exc)
