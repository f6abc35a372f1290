"""Uploads of files of this machine for templates of a server. Blocks."""

from __future__ import annotations

import hashlib
import os
import tarfile
import tempfile
import uuid

from ..errors import FileNotFound
from ._sync.transport import segment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import IO

    from ._sync.transport import Transport

_CHUNK = 1 << 20


def new_key() -> str:
    """A key that makes asking again harmless."""
    return uuid.uuid4().hex


def upload(transport: Transport, path: str) -> str:
    """Send a file, or what is in a directory, as a tar stream; its digest."""
    if not os.path.exists(path):
        hint = "give a path on this host; a relative path starts at the current directory"
        what = f"{path}: no such file or directory on this host"
        raise FileNotFound(what, path=path, hint=hint)
    with tempfile.TemporaryFile() as file:
        _pack(path, file)
        digest = _digest_of(file)
        at = f"/v1/uploads/{segment(digest)}"
        if transport.json("GET", at)["present"]:
            return digest

        def pieces() -> Iterator[bytes]:
            file.seek(0)
            while data := file.read(_CHUNK):
                yield data

        transport.request("PUT", at, content=pieces, repeat=True)
    return digest


def _pack(path: str, file: IO[bytes]) -> None:
    """Write the tar stream: the same for the same names, modes and content, whenever and whoever."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.mtime = info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        if not os.path.isdir(path):
            tar.add(os.path.realpath(path), os.path.basename(path), filter=plain)
            return
        for name in sorted(os.listdir(path)):
            tar.add(os.path.join(path, name), name, filter=plain)


def _digest_of(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    file.seek(0)
    while data := file.read(_CHUNK):
        digest.update(data)
    return digest.hexdigest()
