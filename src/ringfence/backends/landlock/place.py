"""The directories of one sandbox, at a path of the host: its home and its temporary files."""

from __future__ import annotations

import os

from ...errors import InvalidRequest
from ...model.mount import MEMORY_DIR, OUTPUTS_DIR
from ...policy.trust import DIRECTORY
from ..command.place import make_locked, remove_locked
from ..local.host.facts import host
from ..local.mounts import template

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..local.mounts.trusted import Trusted

SHARED_MEMORY = "/dev/shm"
_OWN = {
    template.HOME: "home",
    "/tmp": "tmp",
    "/mnt/session": "session",
    MEMORY_DIR: "memory",
    SHARED_MEMORY: "shm",
}
OWN = (*_OWN, OUTPUTS_DIR)
"""Paths at which other backends have directories of the sandbox's own."""


class Place:
    """A directory of this sandbox's own, removed with it; locked as long as we live.

    Args:
        host_id: Who owns what is in it.
        workdir: Where the session's root is to be seen; None: in the home.
        mounts: Its targets, by the paths of the host where programs find them; "": a directory of its
            own, which lies here.
        memory: Directory of the host that is its memory's; None: one of its own.
        trusted: The authority that its programs trust; None where no rule reads inside TLS.

    Attributes:
        shown: Empty, as nothing is shown at another path.
        links: Symlinks in its directories to what is to be seen there, and no snapshot has.
    """

    def __init__(
        self,
        host_id: int,
        workdir: str | None,
        mounts: Mapping[str, str],
        memory: str | None,
        trusted: Trusted | None,
    ) -> None:
        self.path, self._lock = make_locked()
        self.shown: list[tuple[str, str]] = []
        self.links: list[str] = []
        try:
            os.chmod(self.path, 0o700)
            self._names = {target: f"{self.path}/{name}" for target, name in _OWN.items()}
            if workdir is not None:
                self._names[workdir] = f"{self.path}/work"
            own = [target for target, path in mounts.items() if not path]
            self._names |= {each: f"{self.path}/own-{i}" for i, each in enumerate(own)}
            if memory is not None:
                self._names[MEMORY_DIR] = os.path.realpath(memory)
            self.writable = [path for path in self._names.values() if path.startswith(self.path)]
            for path in (*self.writable, f"{self.path}/session/outputs"):
                os.mkdir(path)
                self._give(path, host_id)
            shown = {target: path for target, path in mounts.items() if path}
            for target, path in sorted(shown.items()):  # the outer before what is in it
                self._link(target, path, host_id)
            # What is mapped is not mapped again, should it lie below /tmp.
            self._names = {**{path: path for path in shown.values()}, **self._names, **shown}
            self.readable: list[str] = []
            if trusted is not None:
                self._keep(trusted)
            self._give(self.path, host_id)
        except BaseException:
            self.remove()
            raise

    def _keep(self, trusted: Trusted) -> None:
        """Write the files that programs find by variables; those at fixed paths are the host's."""
        self._names[DIRECTORY] = path = f"{self.path}/trust"
        os.mkdir(path)
        os.chmod(path, 0o755)  # whatever our umask is: programs are another user's
        for verb, target, *rest in trusted.steps:
            if verb == "file" and target.startswith(f"{DIRECTORY}/"):
                with open(self.mapped(target), "xb") as file:
                    file.write(rest[0] if isinstance(rest[0], bytes) else rest[0].encode())
                os.chmod(file.name, 0o444)
        self.readable.append(path)

    def _link(self, target: str, path: str, host_id: int) -> None:
        """Lead to a mount from where it is to be seen in a directory of the sandbox's own.

        Raises:
            InvalidRequest: No link can be made there.
        """
        at = self.mapped(target)
        if target == path or not at.startswith(f"{self.path}/"):
            return
        if os.path.realpath(at) == path:
            return  # an outer one leads there
        try:
            self._make_link(path, at, host_id)
        except OSError as exc:
            what = f"{target}: {exc.strerror}: no link to the mount can be made there"
            hint = "choose a target that is shorter, or not in another mount"
            raise InvalidRequest(what, field="mounts.target", hint=hint) from exc

    def _make_link(self, path: str, at: str, host_id: int) -> None:
        above = os.path.dirname(at)
        missing = []
        while not os.path.isdir(above):
            missing.append(above)
            above = os.path.dirname(above)
        for each in reversed(missing):
            os.mkdir(each)
            self._give(each, host_id)
        os.symlink(path, at)
        self.links.append(at)

    def _give(self, path: str, host_id: int) -> None:
        if host_id != host().uid:
            os.chown(path, host_id, host_id)

    def mapped(self, path: str) -> str:
        """The path on the host of what other backends have at `path`."""
        for target in sorted(self._names, key=len, reverse=True):
            if path == target or path.startswith(f"{target}/"):
                return self._names[target] + path[len(target) :]
        return path

    def saved(self) -> list[tuple[str, str]]:
        """Directories that a snapshot saves, and their names on other backends; the deepest names first."""
        own = [(path, target) for target, path in self._names.items() if path in self.writable]
        return sorted(own, key=lambda each: len(each[1]), reverse=True)

    def remove(self) -> None:
        """Precondition: nothing runs any more that could write here."""
        remove_locked(self.path, self._lock)
