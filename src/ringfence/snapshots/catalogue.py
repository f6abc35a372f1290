"""The catalogue of snapshots: one directory each: `content.tar`, `snapshot.json`, perhaps `memory.img`.

A snapshot appears by one rename, after its content is on disk, unless it is a temporary one; whatever a
crash leaves half written has another name and is never read. The content's SHA-256 is checked before
anything is restored.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
import tempfile

from ..errors import IoError, ResourceExhausted, SnapshotCorrupt, SnapshotNotFound, StorageFull
from ..model.base.ids import check_id
from ..model.session import Snapshot
from ..model.spec import SandboxSpec
from . import layers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any, BinaryIO

_CHUNK = 1 << 20
_FORMAT = 1
_MOST_KNOWN = 64
_known: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {}
"""Checked descriptions, and the state of their files then, by path."""
_PARTIAL = ".partial-"
_DESCRIPTION, _DELETED = "snapshot.json", "deleted.json"
_MEMORY = "memory.img"


def default_directory() -> str:
    if os.geteuid() == 0:
        return "/var/lib/ringfence/snapshots"
    home = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    return os.path.join(home, "ringfence", "snapshots")


class Catalogue:
    """Snapshots of one backend in `directory`, which is created (mode 0700) on first use."""

    def __init__(self, directory: str, backend: str) -> None:
        self.directory, self.backend = directory, backend

    def save(
        self,
        stream: int,
        snapshot_id: str,
        spec: SandboxSpec,
        most_bytes: int,
        *,
        memory: str = "",
        lower: tuple[str, ...] = (),
        is_durable: bool = True,
        **facts: Any,
    ) -> Snapshot:
        """Keep what comes out of `stream` until its end.

        Args:
            most_bytes: More than that is refused: a sparse file may claim any size.
            lower: The snapshots that the stream lies over, the uppermost first.
            is_durable: It is on disk when this returns. Else only its description is, by which it is swept up
                after a crash of the machine: nobody restores it then.
            memory: A file beside the snapshots that becomes part of this one, once the stream ends.

        Raises:
            ResourceExhausted: Too large, or the disk is full; nothing is kept.
        """
        partial = os.path.join(self.directory, _PARTIAL + snapshot_id)
        try:
            os.makedirs(partial, mode=0o700)
            content = os.path.join(partial, "content.tar")
            size, digest = self._write(content, stream, most_bytes, is_durable=is_durable)
            kept = self._take_in(partial, memory) if memory else (0, "")
            snapshot = Snapshot(
                id=snapshot_id,
                backend=self.backend,
                size_bytes=size + kept[0],
                has_memory=bool(memory),
                **facts,
            )
            form = {
                "format": _FORMAT,
                "sha256": digest,
                "memory_sha256": kept[1],
                "lower": list(lower),
                "spec": spec.to_json(),
                "snapshot": snapshot.to_json(),
            }
            self._write_description(partial, form)
            if is_durable:
                _sync(partial)
            os.rename(partial, os.path.join(self.directory, snapshot_id))
            if is_durable:
                _sync(self.directory)
        except OSError as exc:
            shutil.rmtree(partial, ignore_errors=True)
            raise self._not_saved(exc) from exc
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return snapshot

    @contextlib.contextmanager
    def workspace(self, uid: int) -> Iterator[str]:
        """A directory beside the snapshots that a host user may write in, gone afterwards."""
        os.makedirs(self.directory, mode=0o700, exist_ok=True)
        directory = tempfile.mkdtemp(prefix=f"{_PARTIAL}memory-", dir=self.directory)
        try:
            if uid != os.geteuid():
                os.chown(directory, uid, -1)
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _not_saved(self, cause: OSError) -> IoError | StorageFull:
        if cause.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = f"free space in {self.directory}"
            return StorageFull("no space left for the snapshot", hint=hint)
        return IoError(f"the snapshot was not saved: {cause}")

    def _write(
        self, path: str, stream: int, most_bytes: int, *, is_durable: bool
    ) -> tuple[int, str]:
        with open(path, "xb") as file:
            told = self._copy(file, stream, most_bytes)
            if is_durable:
                os.fsync(file.fileno())
        return told

    def _copy(self, file: BinaryIO, stream: int, most_bytes: int) -> tuple[int, str]:
        """Copy `stream` to its end; returns the bytes and their SHA-256."""
        digest, size = hashlib.sha256(), 0
        while data := os.read(stream, _CHUNK):
            size += len(data)
            if size > most_bytes:
                raise ResourceExhausted(
                    f"the snapshot would be larger than {most_bytes} bytes",
                    hint="a sparse file inside? Remove it, or raise limits.disk_bytes",
                    retryable=False,
                )
            digest.update(data)
            if not data.strip(b"\0"):
                file.seek(len(data), os.SEEK_CUR)  # a sparse file of the guest's stays one
            else:
                file.write(data)
        file.truncate()
        file.flush()
        return size, digest.hexdigest()

    def _take_in(self, partial: str, memory: str) -> tuple[int, str]:
        """Whoever wrote it has it no longer; whoever continues from it may read it.

        Raises:
            OSError: It is no file of its own: a runtime that a guest has taken over may have left a link there.
        """
        path = os.path.join(partial, _MEMORY)
        os.rename(memory, path)  # where nobody else may write: what it is now, it stays
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
                raise OSError(errno.EINVAL, "the snapshot has no memory file", memory)
            os.fchown(fd, os.geteuid(), os.getegid())
            os.fchmod(fd, 0o444)
            os.fsync(fd)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return os.fstat(fd).st_size, digest

    def memory_of(self, snapshot_id: str) -> str:
        """The path of its verified memory; empty for one that has only files.

        Raises:
            SnapshotNotFound, SnapshotCorrupt: As `open`.
        """
        wanted = self._describe(self._path(snapshot_id), snapshot_id).get("memory_sha256", "")
        if not wanted:
            return ""
        path = os.path.join(self._path(snapshot_id), _MEMORY)
        try:
            with open(path, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as exc:
            raise SnapshotCorrupt(f"{snapshot_id}: {exc}", hint="delete it") from exc
        if found != wanted:
            raise SnapshotCorrupt(f"{snapshot_id}: its memory file is damaged", hint="delete it")
        return path

    def _write_description(self, directory: str, form: dict[str, Any]) -> None:
        with open(os.path.join(directory, _DESCRIPTION), "x", encoding="utf-8") as file:
            json.dump({**form, "check": _check(form)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())

    def open(self, snapshot_id: str) -> tuple[Snapshot, SandboxSpec, int]:
        """A snapshot, the spec it was taken under, and a descriptor of its verified content.

        Raises:
            SnapshotNotFound: No such snapshot.
            SnapshotCorrupt: The description or the content is not what was saved.
        """
        snapshot, spec, _lower = self.describe(snapshot_id)
        return snapshot, spec, self.content(snapshot_id)

    def describe(self, snapshot_id: str) -> tuple[Snapshot, SandboxSpec, tuple[str, ...]]:
        """Return a snapshot, the spec it was taken under, and the snapshots below it, the uppermost first.

        Raises:
            SnapshotNotFound: No such snapshot.
            SnapshotCorrupt: The description is not what was saved.
        """
        form = self._describe(self._path(snapshot_id), snapshot_id)
        try:
            snapshot = Snapshot.from_json(form["snapshot"])
            return snapshot, SandboxSpec.from_json(form["spec"]), tuple(form.get("lower", ()))
        except Exception as exc:
            raise SnapshotCorrupt(f"{snapshot_id}: {exc}", hint="delete it") from exc

    def lower(self, snapshot_id: str) -> tuple[str, ...]:
        """Return the snapshots below one, the uppermost first.

        Raises:
            SnapshotNotFound, SnapshotCorrupt: As `describe`.
        """
        return tuple(self._describe(self._path(snapshot_id), snapshot_id).get("lower", ()))

    def is_layer(self, snapshot_id: str) -> bool:
        """Return whether a snapshot, deleted or not, lies over others or over an image.

        Raises:
            SnapshotNotFound, SnapshotCorrupt: As `open`.
        """
        form = self._describe(self.place(snapshot_id), snapshot_id, deleted=True)
        return bool(form.get("lower") or form["spec"].get("image"))

    def content(self, snapshot_id: str) -> int:
        """Return a descriptor of the verified stream of a snapshot, or of one that others lie over.

        Raises:
            SnapshotNotFound, SnapshotCorrupt: As `open`.
        """
        place = self.place(snapshot_id)
        form = self._describe(place, snapshot_id, deleted=True)
        try:
            fd = os.open(os.path.join(place, "content.tar"), os.O_RDONLY | os.O_CLOEXEC)
        except OSError as exc:
            raise SnapshotCorrupt(f"{snapshot_id}: {exc}", hint="delete it") from exc
        digest = hashlib.sha256()
        while data := os.read(fd, _CHUNK):
            digest.update(data)
        if digest.hexdigest() != form["sha256"]:
            os.close(fd)
            raise SnapshotCorrupt(f"{snapshot_id}: its content is damaged", hint="delete it")
        os.lseek(fd, 0, os.SEEK_SET)
        return fd

    def list(self) -> list[Snapshot]:
        """Every whole snapshot, oldest first."""
        try:
            names = sorted(os.listdir(self.directory))
        except FileNotFoundError:
            return []
        found = []
        for name in names:
            if name.startswith("."):
                continue
            # A damaged one is reported by `open`, and must not hide the others; nor must another user's.
            with contextlib.suppress(SnapshotCorrupt, SnapshotNotFound, KeyError, PermissionError):
                found.append(self.describe(name)[0])
        return found

    def tidy(self) -> None:
        """Remove what was half saved, or half removed. Preconditions: nobody else uses the directory."""
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self.directory):
                if name.startswith(_PARTIAL):
                    layers.remove_tree(os.path.join(self.directory, name))
                else:
                    layers.tidy(os.path.join(self.directory, name))
        self._sweep()

    def delete(self, snapshot_id: str) -> None:
        """Remove one, damaged or not.

        Raises:
            SnapshotNotFound: No such snapshot.
        """
        place = self.place(snapshot_id)
        try:
            # Its directory keeps its name: another snapshot, or a sandbox, may lie over it.
            os.rename(os.path.join(place, _DESCRIPTION), os.path.join(place, _DELETED))
        except FileNotFoundError:
            if _is_deleted(place) or not os.path.isdir(place):
                raise SnapshotNotFound(f"no snapshot {snapshot_id!r}") from None
            self._remove(place)
        self._sweep()

    def let_go(self, ids: Iterable[str]) -> None:
        """Remove those of `ids` that were deleted while a sandbox, which has ended, lay over them.

        What cannot be removed now is when the next snapshot is deleted.
        """
        if any(_is_deleted(self.place(each)) for each in ids):
            with contextlib.suppress(OSError):
                self._sweep()

    def _sweep(self) -> None:
        """Remove the deleted snapshots that no snapshot lies over and no sandbox is over."""
        for name, place in self._places():
            # Held first: a sandbox that is saved meanwhile holds what its snapshot lies over.
            if _is_deleted(place) and not layers.is_held(place) and name not in self._needed():
                self._remove(place)

    def _remove(self, place: str) -> None:
        doomed = os.path.join(self.directory, f"{_PARTIAL}gone-{os.path.basename(place)}")
        with contextlib.suppress(FileNotFoundError):
            os.rename(place, doomed)
            layers.remove_tree(doomed)

    def _needed(self) -> set[str]:
        """Return the ids that snapshots and sandboxes lie over."""
        needed: set[str] = set()
        for name, place in self._places():
            if not _is_deleted(place) or layers.is_held(place):
                with contextlib.suppress(SnapshotCorrupt, SnapshotNotFound):
                    needed.update(self._describe(place, name, deleted=True).get("lower", ()))
        return needed

    def _places(self) -> Iterator[tuple[str, str]]:
        """Yield the id and the directory of each snapshot, deleted or not."""
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self.directory):
                if not name.startswith("."):
                    yield name, os.path.join(self.directory, name)

    def place(self, snapshot_id: str) -> str:
        return self._path(snapshot_id)

    def _path(self, snapshot_id: str) -> str:
        return os.path.join(self.directory, check_id(snapshot_id, "snapshot_id"))

    def _describe(self, place: str, snapshot_id: str, *, deleted: bool = False) -> dict[str, Any]:
        name = _DELETED if deleted and _is_deleted(place) else _DESCRIPTION
        path = os.path.join(place, name)
        try:
            with open(path, encoding="utf-8") as file:
                info = os.fstat(file.fileno())
                seen = info.st_dev, info.st_ino, info.st_size, info.st_ctime_ns
                known = _known.get(path)
                if known is not None and known[0] == seen:
                    return known[1]
                form = json.load(file)
        except FileNotFoundError:
            raise SnapshotNotFound(f"no snapshot {snapshot_id!r}") from None
        except ValueError as exc:
            raise SnapshotCorrupt(
                f"{snapshot_id}: its description is damaged", hint="delete it"
            ) from exc
        if not isinstance(form, dict) or form.get("format") != _FORMAT:
            raise SnapshotCorrupt(
                f"{snapshot_id}: unknown format", hint="use the newer Ringfence that saved it"
            )
        # A changed limit or mount is as bad as changed content.
        if form.pop("check", "") != _check(form):
            raise SnapshotCorrupt(f"{snapshot_id}: its description is damaged", hint="delete it")
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[path] = seen, form
        return form


def _is_deleted(place: str) -> bool:
    return os.path.exists(os.path.join(place, _DELETED))


def _check(form: dict[str, Any]) -> str:
    """A digest of everything that the description says."""
    return hashlib.sha256(json.dumps(form, sort_keys=True).encode()).hexdigest()


def _sync(directory: str) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
