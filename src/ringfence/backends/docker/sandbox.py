"""A container, seen from the host."""

from __future__ import annotations

import errno
import os
import time

from ...errors import ExecError, IoError
from ...model.state import State
from ...model.stats import SandboxStats
from ..local.agents.contained import Changes, ContainedNetwork, ContainedSandbox
from ..local.answers import Refused
from ..local.session import is_below, is_own
from . import groups
from .image import OWN, one_of_the_users

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Iterable
    from typing import Any, Protocol

    from ...launcher import wire
    from ...model.mount import Mount
    from ...model.session import ResolvedMount
    from ...model.spec import SandboxSpec
    from ..local.agents.contained import OwnerWithJailer
    from ..local.protections import Reader
    from ..local.sizes import Sizes
    from .draft import Draft

    class Owner(OwnerWithJailer, Protocol):
        """Interface that such a sandbox needs of its backend."""

        def degraded(self, spec: SandboxSpec, lacking: Container[str] = ()) -> tuple[str, ...]: ...

        def released(self, sandbox: DockerSandbox) -> None: ...


QUOTAS = ("disk_bytes", "inodes")
_MODIFIED, _ADDED, _DELETED = 0, 1, 2  # of the engine's list of changes


class DockerSandbox(ContainedSandbox):
    """See `BackendSandbox`.

    Args:
        owner: Its user, as the engine counts.
        in_memory: Directories that the engine has made for it there.
        isolated: Whether its agent has set up isolation of its own.

    Attributes:
        first_host_id: Of ids that it shares with nobody; 0: it has the host's own.
        places: Directories whose whole content is its own, in memory.
        has_room: Whether there is nothing else that it may write, and all of that has a size.
    """

    def __init__(
        self,
        backend: Owner,
        spec: SandboxSpec,
        sandbox_id: str,
        uid: int,
        mounts: list[ResolvedMount],
        control: wire.Socket,
        namespace_fds: list[int],
        pid: int,
        container: Any,
        place: str,
        first_host_id: int,
        sizes: Sizes,
        draft: Draft,
        owner: int,
        in_memory: Iterable[str],
        *,
        isolated: bool,
    ) -> None:
        self.group = groups.Group(pid)  # which reads files: before there is anything to close
        self.group.limit_sockets()
        super().__init__(backend, spec, sandbox_id, uid, mounts, control, os.pidfd_open(pid))
        self.owner: Owner = backend
        self.namespace_fds, self.pid, self.container, self.place = (
            namespace_fds,
            pid,
            container,
            place,
        )
        self.first_host_id, self.sizes, self._counted_as = first_host_id, sizes, owner
        room = draft.room(sizes) if isolated else None
        self.has_room, self._of_image = room is not None, draft.held is not None
        own = room["places"] if room is not None else in_memory
        self.places = [path for path in own if not path.startswith("/dev/")]
        self.network: ContainedNetwork = ContainedNetwork(self, draft.trusted)

    def _read_stats(self, state: State) -> SandboxStats:
        pids = disk = inodes = None
        if state in (State.PROVISIONED, State.RUNNING):
            pids, _memory, disk, inodes = (int(word) for word in self.ask("usage")[0].split())
        return SandboxStats(
            state=state,
            cpu_ns=self.group.cpu_ns(),
            memory_bytes=self.group.memory_bytes(),
            peak_memory_bytes=self.group.peak_memory_bytes(),
            pids=pids,
            disk_bytes=disk if self.has_room else None,
            inodes=inodes if self.has_room else None,
            uptime_s=time.monotonic() - self._created,
            execs=self._execs,
            degraded=self.owner.degraded(self.spec, self.lacking()),
        )

    def lacking(self) -> tuple[str, ...]:
        if self.has_room:
            return ()
        return ("inodes",) if self._of_image and self.spec.limits.disk_bytes else QUOTAS

    def make_place(self, mount: Mount) -> None:
        """In the engine's own /, which is root's, the engine makes what is missing."""
        top = "/" + mount.target.split("/")[1]
        if self._of_image or not is_own(top) or any(is_below(top, each) for each in OWN):
            return
        with self.awake():
            try:
                self.ask("stat", top)
            except Refused as exc:
                if exc.errno != errno.ENOENT:
                    raise
            else:
                return
            self._make_top(top, mount)

    def _make_top(self, top: str, mount: Mount) -> None:
        from docker.errors import DockerException

        is_file = mount.is_host_path and mount.target == top and os.path.isfile(mount.source)
        content = one_of_the_users(top, self._counted_as, is_file=is_file)
        try:
            if self.container.put_archive("/", content):
                return
            why = "the engine gave no reason"
        except DockerException as exc:
            why = str(exc)
        raise IoError(f"{top}: the engine did not make it: {why}")

    def oom_kills(self) -> int | None:
        return self.group.oom_kills()

    def _reader(self) -> Reader:
        from .report import DockerReader

        return DockerReader(self)

    def changes(self) -> Changes:
        """As the engine tells, which keeps the container's files, in whatever way."""
        if self.has_room:
            return Changes([], [], self.places)
        from docker.errors import DockerException

        try:
            told = self.container.diff() or []
        except DockerException as exc:
            raise IoError(f"the engine did not list the changed files: {exc}") from exc
        kinds: dict[int, list[str]] = {_MODIFIED: [], _ADDED: [], _DELETED: []}
        for each in told:
            kinds[each["Kind"]].append(each["Path"])
        return Changes([*kinds[_MODIFIED], *kinds[_ADDED]], kinds[_DELETED], self.places)

    def _freeze(self, frozen: bool) -> None:
        from docker.errors import DockerException

        try:
            self.container.pause() if frozen else self.container.unpause()
        except DockerException as exc:
            raise ExecError(f"{'pause' if frozen else 'unpause'}: {exc}") from exc

    def _end(self, was_suspended: bool) -> None:
        super()._end(was_suspended)
        if was_suspended:  # older kernels hold even SIGKILL back until the thaw
            from docker.errors import DockerException

            try:
                self.container.unpause()
            except DockerException:
                pass  # newer ones do not, and it is gone

    def _let_go(self) -> None:
        super()._let_go()
        self.owner.released(self)
