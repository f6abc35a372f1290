"""Images from files: an OCI layout (directory or tar), `docker save`'s archive, a plain directory.

Source: OCI image specification 1.1, "Image Layout".
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from typing import Any

from ..errors import ImageRefused, InvalidRequest, StorageFull
from ..model.image import Image
from . import manifest
from .config import architecture
from .reference import Reference
from .store import ImageStore
from .unpack import MOST_BYTES, Layer

_NOT_SAVED = ("proc", "sys", "dev")


def load(path: str, name: str, *, store: ImageStore | None = None) -> Image:
    """Take an image from a file or directory, as `name`.

    Args:
        path: An OCI layout (directory or tar), an archive of `docker save`, or a directory with a
            root file system, such as debootstrap makes.

    Raises:
        InvalidRequest: There is nothing at `path`, or `name` is not the name of an image.
        ImageRefused: It is damaged, or not what its digests say.
    """
    Reference.parse(name)
    into = store or ImageStore()
    if not os.path.exists(path):
        hint = (
            "give what `docker save` wrote, an OCI layout, or a directory with a root file system"
        )
        raise InvalidRequest(f"{path}: no such file or directory", field="path", hint=hint)
    if os.path.isdir(path) and not os.listdir(path):
        hint = "give a directory with a root file system, as debootstrap makes"
        raise InvalidRequest(f"{path} is empty", field="path", hint=hint)
    with tempfile.TemporaryDirectory(prefix="ringfence-image-") as scratch:
        try:
            if os.path.isdir(path) and not os.path.exists(os.path.join(path, "oci-layout")):
                return _load_root(path, name, into, scratch)
            if not os.path.isdir(path):
                _check_file(path)
                _unpack_archive(path, scratch)
            return _load_layout(path, scratch if os.path.isfile(path) else path, name, into)
        except OSError as exc:
            said = f"{exc.filename or path}: {exc.strerror or exc}"
            if exc.errno in (errno.EACCES, errno.EPERM):
                hint = "make all files readable for this user, or load them as their owner"
                raise InvalidRequest(said, field="path", hint=hint) from exc
            raise StorageFull(said, hint="free disk space") from exc


def _check_file(path: str) -> None:
    """A pipe would be waited on for ever, and it is read more than once."""
    if not os.path.isfile(path):
        raise InvalidRequest(f"{path}: neither a regular file nor a directory", field="path")


def _load_layout(given: str, path: str, name: str, store: ImageStore) -> Image:
    if os.path.exists(os.path.join(path, "index.json")):
        return _load_oci(path, name, store)
    if os.path.exists(os.path.join(path, "manifest.json")):
        return _load_docker(path, name, store)
    raise ImageRefused(f"{given}: neither an OCI layout nor an archive of `docker save`")


def _load_oci(path: str, name: str, store: ImageStore) -> Image:
    document = _read(path, "index.json")
    digest = ""
    for _ in range(4):  # an index may name another one
        chosen = manifest.choose(document, name)
        if chosen is None:
            break
        digest, document = chosen, _blob(path, chosen)
    found = manifest.read(document)
    layers = [Layer(_blob_path(path, layer.digest), is_known=True) for layer in found.layers]
    return store.add(name, _blob(path, found.config.digest), layers, digest=digest)


def _load_docker(path: str, name: str, store: ImageStore) -> Image:
    try:
        listed = json.loads(_read(path, "manifest.json"))
        first = next((each for each in listed if name in (each.get("RepoTags") or [])), listed[0])
        layers = [Layer(_there(path, each)) for each in first["Layers"]]
        configuration = _read(path, first["Config"])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as exc:
        raise ImageRefused(f"manifest.json cannot be read: {exc!r}") from exc
    return store.add(name, configuration, layers)


def _load_root(path: str, name: str, store: ImageStore, scratch: str) -> Image:
    """A layer of all files below `path`, but what a kernel makes."""
    layer = os.path.join(scratch, "layer.tar")

    def without_kernel(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        first, slash, _ = member.name.removeprefix("./").partition("/")
        return None if slash and first in _NOT_SAVED else member

    with tarfile.open(layer, "w", format=tarfile.PAX_FORMAT) as tar:
        tar.add(path, ".", filter=without_kernel)
    with open(layer, "rb") as file:
        diff_id = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    configuration = {
        "architecture": architecture(),
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": [diff_id]},
    }
    return store.add(
        name, json.dumps(configuration, sort_keys=True).encode(), [Layer(layer, is_known=True)]
    )


# -- archives ------------------------------------------------------------------------------------


def _unpack_archive(path: str, scratch: str) -> None:
    """The members of an archive that an image can be made of, as flat files of plain names."""
    left = MOST_BYTES
    try:
        with tarfile.open(path, "r:*") as tar:
            for member in tar:
                if not member.isreg():
                    continue
                left -= member.size
                if left < 0:
                    raise ImageRefused(f"{path} is larger than the limit")
                source: Any = tar.extractfile(member)
                target = _inside(scratch, member.name)
                os.makedirs(os.path.dirname(target), exist_ok=True)
                with open(target, "xb") as file:
                    shutil.copyfileobj(source, file, 1 << 20)
    except tarfile.ReadError as exc:
        said = f"{path} is not an archive of an image: no complete tar, plain, gzip, bzip2 or xz"
        raise ImageRefused(said) from exc
    except (tarfile.TarError, EOFError, FileExistsError, NotADirectoryError) as exc:
        raise ImageRefused(f"{path} is not an archive of an image: {exc}") from exc


def _inside(path: str, name: object) -> str:
    """A file of a layout, by the name that the layout gives it."""
    if not isinstance(name, str) or name.startswith("/") or ".." in name.split("/") or "\0" in name:
        raise ImageRefused(f"{name!r} is not a file of an image")
    return os.path.join(path, os.path.normpath(name))


def _there(path: str, name: object) -> str:
    found = _inside(path, name)
    with _opened(found):
        return found


def _read(path: str, name: str) -> bytes:
    with _opened(_inside(path, name)) as file:
        data: bytes = file.read(manifest.MOST_BYTES + 1)
    if len(data) > manifest.MOST_BYTES:
        raise ImageRefused(f"{name} is too large")
    return data


def _blob_path(path: str, digest: str) -> str:
    """A blob, whose content was compared with its digest."""
    found = os.path.join(path, "blobs", "sha256", digest.removeprefix("sha256:"))
    with _opened(found) as file:
        actual = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    if actual != digest:
        raise ImageRefused(f"a blob is {actual}, and should be {digest}")
    return found


def _blob(path: str, digest: str) -> bytes:
    return _read(path, os.path.relpath(_blob_path(path, digest), path))


@contextlib.contextmanager
def _opened(path: str) -> Iterator[Any]:
    try:
        # A link in a layout could lead anywhere on this machine.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as exc:
        raise ImageRefused(f"{os.path.basename(path)} is missing: {exc.strerror}") from exc
    with open(fd, "rb") as file:
        yield file
