"""The files of one session, as a directory on the host that a launcher shows inside."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress

from ...errors import IsolationError
from ..local.agents import agent_code
from ..local.host.facts import host
from ..local.host.own_places import place_in, remove_tree
from ..local.mounts import template

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

_PREFIX = "ringfence-command-"
_LOCK = "lock"


class Place:
    """A directory of this session's own, removed with it; locked as long as we live.

    Args:
        host_id: Who owns what is the guest's, on the host.
        more: Steps of the template besides.
    """

    def __init__(
        self, uid: int, host_id: int, extra: tuple[str, ...], more: Sequence[tuple[Any, ...]] = ()
    ) -> None:
        self.path, self._lock = make_locked()
        try:
            # For nobody else: a program in it may have set-id bits, which only our own filter refuses.
            os.chmod(self.path, 0o700)
            self._host_id = host_id
            if host_id != host().uid:
                os.chown(self.path, host_id, host_id)
            steps, trees = template.guest_root(uid)
            self.shown = [_shown(step, trees) for step in steps if step[0] == "show"]
            self.shown += [(path, path) for path in extra]
            self.shown += [(source, target) for source, target, _ in agent_code.interpreter()[1]]
            for name in ("root", "etc", "agent"):
                self._directory(name)
            for step in (*steps, *more):
                self._make(step)
            for source, target in self.shown:
                self._make_point(source, target)
            self._directory("own", 0o711, owned=False)
            with open(f"{self.path}/agent/{agent_code.NAME}", "xb") as file:
                file.write(agent_code.packed())
            os.chmod(f"{self.path}/agent/{agent_code.NAME}", 0o444)
        except BaseException:
            self.remove()
            raise

    @property
    def words(self) -> dict[str, str]:
        paths = {name: f"{self.path}/{name}" for name in ("root", "etc", "agent", "own")}
        return {**paths, "host_id": str(self._host_id)}

    def _directory(self, name: str, mode: int = 0o755, *, owned: bool = True) -> None:
        path = f"{self.path}/{name}"
        if not os.path.isdir(path):
            os.mkdir(path)
        os.chmod(path, mode)
        if owned and self._host_id != host().uid:
            os.chown(path, self._host_id, self._host_id)

    def _make(self, step: tuple[Any, ...]) -> None:
        """Make one step of the template; the launcher makes /dev and /proc."""
        verb, target, *rest = step
        if target.startswith(("/dev", "/proc")) or verb == "show":
            return
        # Files in /etc are shown read-only, so no user inside needs to own them.
        inside = target.removeprefix("/etc") if target.startswith("/etc/") else target
        base = "etc" if target.startswith("/etc/") else "root"
        path = f"{self.path}/{base}{inside}"
        if verb == "dir":
            self._directory(f"{base}{inside}", rest[0], owned=base == "root")
        elif verb == "file":
            with open(path, "xb") as file:
                file.write(rest[0])
            os.chmod(path, rest[1])
        elif verb == "symlink":
            os.symlink(rest[0], path)

    def _make_point(self, source: str, target: str) -> None:
        """Where something of the host's is shown in /etc, which no launcher may write to."""
        if not target.startswith("/etc/"):
            return
        path = f"{self.path}{target}"
        os.makedirs(path if os.path.isdir(source) else os.path.dirname(path), exist_ok=True)
        if not os.path.lexists(path):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))

    def remove(self) -> None:
        """Precondition: nothing runs any more that could write here."""
        remove_locked(self.path, self._lock)


def _shown(step: tuple[Any, ...], trees: list[Any]) -> tuple[str, str]:
    return trees[step[2]]["source"], step[1]


def base() -> str:
    """Where such directories are, on disk: who may not list it can still pass through."""
    return place_in("/var/tmp", f".ringfence-{os.geteuid()}", 0o711)


def make_locked() -> tuple[str, int]:
    while True:
        path, lock = tempfile.mkdtemp(prefix=_PREFIX, dir=base()), -1
        try:
            lock = os.open(f"{path}/{_LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            # A sweep in between had the lock first, and took the directory for one left behind.
            if os.fstat(lock).st_nlink:
                return path, lock
        except FileNotFoundError:
            continue  # it was swept when it was still empty
        except BaseException:
            # Without a lock in it no sweep would ever remove it.
            shutil.rmtree(path, ignore_errors=True)
            if lock >= 0:
                os.close(lock)
            raise
        os.close(lock)


def remove_locked(path: str, lock: int) -> None:
    """Remove a directory and close its lock, which goes last: of half a removal a sweep does the rest."""
    remove_tree(path, last=_LOCK)
    os.close(lock)


def sweep() -> None:
    """Remove what processes left that were killed: their locks are gone with them."""
    try:
        names = os.listdir(top := base())
    except (IsolationError, OSError):
        return  # whoever makes one is told why
    for name in names:
        if not name.startswith(_PREFIX):
            continue
        try:
            lock = os.open(f"{top}/{name}/{_LOCK}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            with suppress(OSError):  # it is just being made, or removed, and only then empty
                os.rmdir(f"{top}/{name}")
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
        else:
            remove_locked(f"{top}/{name}", lock)
