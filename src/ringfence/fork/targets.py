"""Writing a merge: into a sandbox, or into a directory of the host."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tarfile
import tempfile
import time

from ..errors import DirectoryNotEmpty, FileError, FileNotFound, StorageFull, host_file_error
from ..launcher.helpers.tars import Writer
from ..model.files import DIRECTORY, FILE
from .trees import HostTree, open_directory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    from ..errors import RingfenceError
    from ..model.files import FileInfo
    from ..model.spec import SandboxSpec
    from .three_way import Plan, Write

    class Task(Protocol):
        """See `backends.protocol.HelperTask`."""

        @property
        def stream(self) -> int: ...
        def finish(self, path: str) -> None: ...
        def abandon(self) -> None: ...

    class MergeFiles(Protocol):
        """The part of `backends.protocol.BackendFiles` that a merge needs."""

        def stat(self, path: str) -> FileInfo: ...
        def list(self, path: str) -> list[FileInfo]: ...
        def remove(self, path: str, *, recursive: bool = False) -> None: ...
        def start_helper(self, what: str, path: str, options: str = "") -> Task: ...

    class Branch(Protocol):
        """The part of `backends.protocol.BackendSandbox` that a merge needs of its source."""

        @property
        def spec(self) -> SandboxSpec: ...
        @property
        def files(self) -> MergeFiles: ...

    class Restored(Protocol):
        """The part of `backends.protocol.BackendSandbox` that a merge needs."""

        @property
        def files(self) -> MergeFiles: ...
        def terminate(self) -> None: ...


_STAGE = ".ringfence-merge-"
_TYPES = {FILE: tarfile.REGTYPE, DIRECTORY: tarfile.DIRTYPE}
_PERMISSIONS = 0o777  # of set-user-id and set-group-id nothing reaches the host


def write_to_sandbox(plan: Plan, files: MergeFiles, directory: str) -> None:
    """Bring a plan's changes into a sandbox, as its default user.

    All of the content is on disk here before anything is changed there.
    """
    with tempfile.TemporaryFile() as stream:
        with Writer(stream.fileno()) as tar:
            for path, write in plan.writes.items():
                _add(tar, path, write)
        for path in sorted(plan.removals, reverse=True):
            try:
                files.remove(directory + path)
            except (FileNotFound, DirectoryNotEmpty):
                continue  # what somebody put there meanwhile stays
        if plan.writes:
            stream.seek(0)
            helper = files.start_helper("in", directory)
            try:
                while data := stream.read(1 << 20):
                    view = memoryview(data)
                    while view:
                        view = view[os.write(helper.stream, view) :]
            except BrokenPipeError:
                pass  # the helper's own error says why it stopped reading
            helper.finish(directory)


def _add(tar: Writer, path: str, write: Write) -> None:
    kind, size, mode, link = write.entry
    member = tarfile.TarInfo("." + path)
    member.type = _TYPES.get(kind, tarfile.SYMTYPE)
    member.mode, member.mtime = mode, time.time()
    if kind not in _TYPES:
        member.linkname = os.fsdecode(link)
    if kind != FILE:
        tar.add(member)
        return
    member.size = size
    with tempfile.TemporaryFile() as content:
        for piece in write.pieces():
            content.write(piece)
        content.flush()
        content.seek(0)
        tar.add(member, content.fileno())


class HostWriter:
    """Brings a plan's changes into a directory of the host, each file by one rename.

    All new files are written beside their places first, so that a full disk changes nothing. No
    symlink in the directory is followed.

    Raises:
        FileError: A path has become another one since the plan was made, or cannot be written.
        StorageFull: The disk is full; nothing was changed.
    """

    def __init__(self, plan: Plan, target: HostTree) -> None:
        self._plan, self._target = plan, target
        self._stage, self._stage_fd = "", -1
        self._done = 0

    def write(self) -> None:
        plan = self._plan
        try:
            self._prepare()
            for path in sorted(plan.removals, reverse=True):
                self._check(path, plan.removals[path])
                self._remove(path, plan.removals[path][0])
            for number, (path, write) in enumerate(plan.writes.items()):
                if path not in plan.removals:
                    self._check(path, write.before)
                self._put(path, write, str(number))
        except OSError as exc:
            raise self._typed(exc) from exc
        finally:
            if self._stage_fd >= 0:
                os.close(self._stage_fd)
                shutil.rmtree(self._stage, ignore_errors=True)

    def _prepare(self) -> None:
        self._stage = tempfile.mkdtemp(prefix=_STAGE, dir=f"/proc/self/fd/{self._target.fd}/.")
        self._stage_fd = os.open(self._stage, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for number, write in enumerate(self._plan.writes.values()):
            if write.entry[0] == FILE:
                self._stage_file(str(number), write)
        for path, write in self._plan.writes.items():
            if write.before is not None and path not in self._plan.removals:
                self._check(path, write.before)

    def _stage_file(self, name: str, write: Write) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(name, flags, 0o600, dir_fd=self._stage_fd), "wb") as file:
            for piece in write.pieces():
                file.write(piece)
            file.flush()
            os.fchmod(file.fileno(), write.entry[2] & _PERMISSIONS)
            self._give_to_owner(file.fileno())

    def _give_to_owner(self, fd: int) -> None:
        """As root, leave what is new to the owner of the directory."""
        if os.geteuid() == 0:
            owner = os.fstat(self._target.fd)
            os.fchown(fd, owner.st_uid, owner.st_gid)

    def _check(self, path: str, before: object) -> None:
        found = self._target.get(path)
        if found != before:
            raise FileError(
                f"{self._target.directory}{path} was changed while it was merged",
                path=self._target.directory + path,
                hint=f"merge again: {self._done} changes are in place, and are skipped then",
            )

    def _remove(self, path: str, kind: str) -> None:
        parent, name = self._parent(path)
        try:
            if kind == DIRECTORY:
                os.rmdir(name, dir_fd=parent)
            else:
                os.unlink(name, dir_fd=parent)
        finally:
            os.close(parent)
        self._done += 1

    def _put(self, path: str, write: Write, staged: str) -> None:
        kind, _size, mode, link = write.entry
        parent, name = self._parent(path)
        try:
            if kind == FILE:
                os.rename(staged, name, src_dir_fd=self._stage_fd, dst_dir_fd=parent)
            elif kind == DIRECTORY:
                self._make_directory(parent, name, mode & _PERMISSIONS)
            else:
                os.symlink(link, staged.encode(), dir_fd=self._stage_fd)
                os.rename(staged, name, src_dir_fd=self._stage_fd, dst_dir_fd=parent)
        finally:
            os.close(parent)
        self._done += 1

    def _make_directory(self, parent: int, name: str, mode: int) -> None:
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                raise
            made = False
        else:
            made = True
        fd = open_directory(parent, name)
        try:
            if made:
                self._give_to_owner(fd)
            os.fchmod(fd, mode)
        finally:
            os.close(fd)

    def _parent(self, path: str) -> tuple[int, str]:
        above, _, name = path.rpartition("/")
        return open_directory(self._target.fd, above), name

    def _typed(self, exc: OSError) -> RingfenceError:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            return StorageFull(
                f"no space left in {self._target.directory}; {self._done} changes are in place",
                hint="free space, and merge again: what is in place is skipped then",
            )
        return host_file_error(exc.errno or 5, self._target.directory)
