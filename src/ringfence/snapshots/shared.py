"""A store of snapshots that outlives the machine: a directory that machines share, or S3, by fsspec.

Each snapshot is a directory `ID` with the files of the catalogue and `manifest.json`, which is written
last and names them with size and SHA-256, and the owner. It carries a MAC by the cluster's secret, as
forms do that others keep beside them, such as templates: a
program that may write to the store, and has not the secret, can remove a snapshot and cannot change
one, nor give it to another owner. `under/LOWER/ID` says that ID lies over LOWER, which is kept for as long.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import shutil

from ..errors import BackendUnavailable, IoError, SnapshotCorrupt, TooLarge
from ..model.base.ids import check_id

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    Form = dict[str, Any]

_MANIFEST, _UNDER = "manifest.json", "under"
_DESCRIPTION, _DELETED = "snapshot.json", "deleted.json"
_FILES = (_DESCRIPTION, "content.tar", "memory.img")
_MOST_MANIFEST = 1 << 20
_SNAPSHOT, _FORM = b"snapshot", b"form"
_CHUNK = 1 << 20


class SharedSnapshots:
    """The store. Its methods block.

    Args:
        url: Of a directory, as fsspec reads it: `/mnt/snapshots`, `s3://bucket/snapshots`.
        secret: What manifests are authenticated with.

    Raises:
        BackendUnavailable: fsspec, or what it needs for this URL, is not installed.
        IoError: From every method: the store does not answer.
    """

    def __init__(self, url: str, secret: bytes) -> None:
        try:
            from fsspec.core import url_to_fs

            self._fs, self._root = url_to_fs(url)
        except (ImportError, ValueError) as exc:
            hint = 'pip install "ringfence[ray]"; for s3:// also s3fs'
            raise BackendUnavailable(f"snapshot_store: {exc}", hint=hint) from exc
        self._url, self._secret = url, secret

    def push(self, catalogue: str, snapshot_id: str, record: Form | None) -> None:
        """Copy a snapshot from the catalogue, with those that it lies over.

        Args:
            record: Owner and origin; None: others lie over it, and it is nobody's by itself.
        """
        with self._told():
            place = os.path.join(catalogue, snapshot_id)
            description = _description_of(place)
            with open(description, encoding="utf-8") as file:
                lower = json.load(file).get("lower", [])
            for each in lower:
                if not self._fs.exists(self._path(each, _MANIFEST)):
                    self.push(catalogue, each, None)
                self._fs.makedirs(self._path(_UNDER, each), exist_ok=True)
                self._fs.pipe_file(self._path(_UNDER, each, snapshot_id), b"-")
            self._fs.makedirs(self._path(snapshot_id), exist_ok=True)
            files = {}
            for name in _FILES:
                path = description if name == _DESCRIPTION else os.path.join(place, name)
                if os.path.exists(path):
                    files[name] = self._send(path, self._path(snapshot_id, name))
            form = {"id": snapshot_id, "record": record, "lower": lower, "files": files}
            self._write_manifest(form)

    def pull(self, catalogue: str, snapshot_id: str) -> Form | None:
        """Copy a snapshot into the catalogue; its record, None for one that is not in the store.

        Raises:
            SnapshotCorrupt: It is not what was stored; nothing of it is kept.
        """
        with self._told():
            form = self._manifest(snapshot_id)
            if form is None or form["record"] is None:
                return None
            for each in form["lower"]:
                below = self._manifest(each)
                if below is None:
                    raise SnapshotCorrupt(
                        f"{snapshot_id}: {each} below it is gone", hint="delete it"
                    )
                self._fetch(catalogue, below, _DELETED)
            self._fetch(catalogue, form, _DESCRIPTION)
            record: Form = form["record"]
            return record

    def owner(self, snapshot_id: str) -> str | None:
        """The owner of a snapshot; None for one that is not in the store."""
        with self._told():
            form = self._manifest(snapshot_id)
            return form["record"]["owner"] if form and form["record"] else None

    def remove(self, snapshot_id: str) -> None:
        """Remove a snapshot; what others lie over stays as long as they do."""
        with self._told():
            form = self._manifest(snapshot_id)
            if form is None:
                return
            if self._is_under(snapshot_id):
                self._write_manifest({**form, "record": None})
                return
            # The manifest first: without it, the rest is nothing.
            self._fs.rm_file(self._path(snapshot_id, _MANIFEST))
            self._fs.rm(self._path(snapshot_id), recursive=True)
            for each in form["lower"]:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(self._path(_UNDER, each, snapshot_id))
                below = self._manifest(each)
                if below is not None and below["record"] is None and not self._is_under(each):
                    self.remove(each)

    # -- forms beside the snapshots ---------------------------------------------------------------

    def write(self, form: Form, *path: str) -> None:
        """Write a form under a MAC, with where it belongs.

        Args:
            path: Where; it must not be where snapshots are.

        Raises:
            TooLarge: The form is.
        """
        whole = {**form, "at": [*path]}
        text = json.dumps({**whole, "mac": self._mac(whole, _FORM)}).encode()
        if len(text) > _MOST_MANIFEST:
            raise TooLarge(f"{'/'.join(path)} is larger than {_MOST_MANIFEST} bytes")
        with self._told():
            self._fs.makedirs(self._path(*path[:-1]), exist_ok=True)
            # Readers must not find half of it.
            beside = self._path(*path[:-1], f".{path[-1]}.{os.urandom(4).hex()}")
            self._fs.pipe_file(beside, text)
            self._fs.mv(beside, self._path(*path))

    def read(self, *path: str) -> Form | None:
        """Read a form; None where there is none.

        Raises:
            SnapshotCorrupt: It was not written there by this cluster.
        """
        with self._told():
            text = self._text(self._path(*path))
        if text is None:
            return None
        form = self._opened(text, _FORM)
        if form is None or form["at"] != [*path]:
            raise _changed("/".join(path))
        return form

    def names(self, *path: str) -> list[str]:
        """List the names of forms and places below a place."""
        with self._told():
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._path(*path), detail=False)
            except FileNotFoundError:
                return []
        names = (str(each).rstrip("/").rpartition("/")[2] for each in found)
        return sorted(each for each in names if not each.startswith("."))

    def forget(self, *path: str) -> None:
        """Remove a form."""
        with self._told(), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(*path))

    # -- inside ---------------------------------------------------------------------------------

    def _is_under(self, snapshot_id: str) -> bool:
        self._fs.invalidate_cache()
        try:
            return bool(self._fs.ls(self._path(_UNDER, snapshot_id), detail=False))
        except FileNotFoundError:
            return False

    def _path(self, *names: str) -> str:
        return "/".join((self._root, *names))

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            hint = "look at the store; nothing was changed here"
            raise IoError(f"snapshot_store {self._url}: {exc}", hint=hint) from exc

    def _mac(self, form: Form, kind: bytes = _SNAPSHOT) -> str:
        text = json.dumps({k: v for k, v in form.items() if k != "mac"}, sort_keys=True)
        return hmac.new(self._secret, kind + b"\n" + text.encode(), "sha256").hexdigest()

    def _opened(self, text: bytes, kind: bytes = _SNAPSHOT) -> Form | None:
        """Return the form in a text; None where this cluster has not written it."""
        try:
            form: Form = json.loads(text)
            is_ours = hmac.compare_digest(form.get("mac", ""), self._mac(form, kind))
        except (ValueError, AttributeError, TypeError):
            return None
        return form if is_ours and len(text) <= _MOST_MANIFEST else None

    def _text(self, path: str) -> bytes | None:
        try:
            with self._fs.open(path, "rb") as file:
                text: bytes = file.read(_MOST_MANIFEST + 1)
                return text
        except FileNotFoundError:
            return None

    def _write_manifest(self, form: Form) -> None:
        text = json.dumps({**form, "mac": self._mac(form)}).encode()
        self._fs.pipe_file(self._path(form["id"], _MANIFEST), text)

    def _manifest(self, snapshot_id: str) -> Form | None:
        text = self._text(self._path(check_id(snapshot_id, "snapshot_id"), _MANIFEST))
        if text is None:
            return None
        form = self._opened(text)
        if form is None or form["id"] != snapshot_id:
            raise _changed(snapshot_id)
        return form

    def _send(self, path: str, target: str) -> list[Any]:
        digest, size = hashlib.sha256(), 0
        with open(path, "rb") as source, self._fs.open(target, "wb") as sink:
            while data := source.read(_CHUNK):
                digest.update(data)
                size += len(data)
                sink.write(data)
        return [size, digest.hexdigest()]

    def _fetch(self, catalogue: str, form: Form, description: str) -> None:
        """Copy files into the catalogue; one that is there already only gets its description back."""
        place = os.path.join(catalogue, form["id"])
        if os.path.isdir(place):
            if description == _DESCRIPTION:
                with contextlib.suppress(FileNotFoundError):
                    os.rename(os.path.join(place, _DELETED), os.path.join(place, _DESCRIPTION))
            return
        partial = os.path.join(catalogue, f".partial-{form['id']}")
        shutil.rmtree(partial, ignore_errors=True)
        os.makedirs(partial, mode=0o700)
        try:
            for name, (size, digest) in form["files"].items():
                if name not in _FILES:
                    raise SnapshotCorrupt(f"{form['id']}: has a file {name!r}", hint="delete it")
                target = os.path.join(partial, description if name == _DESCRIPTION else name)
                self._receive(self._path(form["id"], name), target, size, digest)
            os.rename(partial, place)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _receive(self, source: str, target: str, size: int, wanted: str) -> None:
        digest, left = hashlib.sha256(), size
        with self._fs.open(source, "rb") as file, open(target, "xb") as sink:
            while data := file.read(min(_CHUNK, left + 1)):
                left -= len(data)
                if left < 0:
                    break
                digest.update(data)
                sink.write(data)
            sink.flush()
            os.fsync(sink.fileno())
        if left or digest.hexdigest() != wanted:
            raise SnapshotCorrupt(f"{source} is not what was stored", hint="delete it in the store")
        if target.endswith("memory.img"):
            os.chmod(target, 0o444)


def _changed(name: str) -> SnapshotCorrupt:
    return SnapshotCorrupt(
        f"{name}: its manifest in the store was changed, or is another cluster's",
        hint="delete it in the store",
    )


def _description_of(place: str) -> str:
    path = os.path.join(place, _DESCRIPTION)
    return path if os.path.exists(path) else os.path.join(place, _DELETED)


__all__ = ["SharedSnapshots"]
