"""The host's requests that are about files: each done as the guest's user."""

from __future__ import annotations

import errno
import os

from ..launcher import wire
from ..launcher.pid1 import programs
from . import flows, looking, users

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .settings import Settings


class FileRequests:
    """File requests of an agent; see `Agent` for how requests come."""

    settings: Settings
    flows: list[flows.Flow]

    def _do_rights(self, _reply: wire.Socket, _fds: list[int], paths: list[str]) -> bytes:
        """Test for each path whether the guest's user can read and write there: pairs of 0 and 1."""
        with users.As(self.settings["uid"]):
            return b"".join(
                b"%d%d" % (looking.can_read(path), looking.can_write(path)) for path in paths
            )

    def _do_read(self, reply: wire.Socket, fds: list[int], path: str) -> None:
        with users.As(self.settings["uid"]):
            file = looking.open_file(path, os.O_RDONLY, 0)
        os.set_blocking(fds[0], False)
        self.flows.append(flows.Copy(file, fds[0], reply, out=True))
        wire.answer(reply, b"O")

    def _do_write(
        self, reply: wire.Socket, fds: list[int], path: str, flags: int, mode: int
    ) -> None:
        with users.As(self.settings["uid"]):
            file = looking.open_file(path, flags, mode)
        os.set_blocking(fds[0], False)
        self.flows.append(flows.Copy(fds[0], file, reply, out=False))
        wire.answer(reply, b"O")

    def _do_stat(self, _reply: wire.Socket, _fds: list[int], path: str) -> bytes:
        with users.As(self.settings["uid"]):
            return looking.described(path)

    def _do_list(self, _reply: wire.Socket, fds: list[int], path: str) -> bytes:
        """Into the file that came along, for there may be very many: lines of name NUL description NUL."""
        with users.As(self.settings["uid"]), open(fds[0], "wb", closefd=False) as body:
            for name in os.listdir(path):
                try:
                    described = looking.described(os.path.join(path, name))
                except OSError as exc:
                    if exc.errno not in (errno.ENOENT, errno.EINVAL):
                        raise
                    continue  # it went away while we looked, or is no symlink any longer
                body.write(os.fsencode(name) + b"\0" + described + b"\0")
        return b""

    def _do_mkdir(self, _reply: wire.Socket, _fds: list[int], path: str, parents: bool) -> bytes:
        with users.As(self.settings["uid"]):
            if parents:
                programs.make_dirs(path)
            else:
                os.mkdir(path)
        return b""

    def _do_remove(self, _reply: wire.Socket, _fds: list[int], path: str) -> bytes:
        with users.As(self.settings["uid"]):
            if (os.lstat(path).st_mode & 0o170000) == 0o040000:
                os.rmdir(path)
            else:
                os.unlink(path, dir_fd=looking.NO_DIRECTORY)
        return b""

    def _do_move(self, _reply: wire.Socket, _fds: list[int], source: str, target: str) -> bytes:
        with users.As(self.settings["uid"]):
            os.rename(source, target)
        return b""
