"""Shared parts of backends that run a program of their own in a jail: jailer, cgroups, host ids, snapshots."""

from __future__ import annotations

import os
import select
import signal
from _thread import allocate_lock, start_new_thread

from ....errors import InvalidRequest, Unsupported
from ....launcher import cgroups as launcher_cgroups
from ....launcher.machine_code.process_image import ProcessImage
from ....launcher.spawn import JAILER
from ....model.base.ids import new_id
from .. import journal
from ..agents import agent_code
from ..base import LocalBackend
from ..host import cgroups, identity
from ..launched import Launched

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Protocol

    from ....egress.host.client import Egress
    from ....launcher.jail.jail import JailPlan
    from ....model.spec import SandboxSpec
    from ..mounts.images import Held

    class Jailed(Protocol):
        """Interface that such a backend needs of its sandboxes."""

        id: str
        group: cgroups.Group
        first_host_id: int
        jailer: Launched
        image: Held | None

        def terminate(self) -> None: ...

        def end_unwatched(self) -> None: ...


_DYING_MS = 30_000


class Jails(LocalBackend):
    """The shared part of such a backend; see `Backend`.

    Args:
        state_dir: Where snapshots are kept; None is this user's data directory.
        egress: Who moves the data of forwarded connections; None is the process that this one shares.
    """

    def __init__(self, state_dir: str | None, egress: Callable[[], Egress] | None) -> None:
        super().__init__(egress, state_dir)
        self._lock, self._first_use = allocate_lock(), allocate_lock()
        self._jailer: Launched | None = None
        self._layout: cgroups.Layout | None = None
        self._host_ids: identity.HostIds | None = None
        self._jailed: dict[str, Jailed] = {}
        self._making: set[str] = set()

    def _new_id(self, spec: SandboxSpec) -> str:
        """Reserved by its name until it is made, or is not."""
        if spec.id is None:
            return new_id(self.name)
        with self._lock:
            if spec.id in self._jailed or spec.id in self._making:
                raise InvalidRequest(f"a sandbox {spec.id!r} already exists", field="id")
            self._making.add(spec.id)
        return spec.id

    def _plan_limits(
        self, plan: JailPlan, spec: SandboxSpec, memory_bytes: int, pids: int
    ) -> cgroups.Group:
        """Fill in the cgroups around a jail.

        Args:
            memory_bytes, pids: For the program and its guest together.

        Raises:
            Unsupported: A processor limit cannot be had, and may not be missing.
        """
        layout = self.layout()
        group = cgroups.Group(layout, cgroups.group_name(plan["id"]), cpus=bool(spec.limits.cpus))
        plan["cgroup_dirs"], plan["cgroup_version"] = group.directories, group.version
        plan["cgroup_values"] = group.values(spec.limits, memory_bytes, pids)
        if spec.limits.cpus and not group.holds_cpus:
            allowed = {"cpu_limit", "*"}.intersection(spec.allow_degraded)
            if not allowed:
                raise Unsupported(
                    f"cpu_limit cannot be enforced here: {layout.why}",
                    backend=self.name,
                    operation="cpu_limit",
                    field="limits.cpus",
                    hint="run `ringfence doctor` for the fix, or allow it by name: "
                    "allow_degraded=['cpu_limit']",
                )
        return group

    def released(self, sandbox: Jailed) -> None:
        """Called by a sandbox whose PID namespace was seen empty."""
        launcher_cgroups.remove(sandbox.group.directories)
        if sandbox.image is not None:
            sandbox.image.close()
        if sandbox.first_host_id:
            self.host_ids().give_back(sandbox.first_host_id)
        self._jailed.pop(sandbox.id, None)

    # -- shared parts -----------------------------------------------------------------------

    def jailer(self) -> Launched:
        """The jailer of this process; a new one when the last is gone or belongs to our parent."""
        with self._lock:
            if self._jailer is None or self._jailer.owner != os.getpid() or not self._jailer.alive:
                self._jailer = Launched("jailer", JAILER)
                if self._host_ids is not None:
                    for lock in self._host_ids.locks():
                        self._jailer.tell("hold", None, [lock])
                start_new_thread(self._watch, (self._jailer,))
            return self._jailer

    def _watch(self, jailer: Launched) -> None:
        """Its death ends every sandbox; somebody must thaw the frozen and clear up."""
        jailer.wait()
        for sandbox in [each for each in self._jailed.values() if each.jailer is jailer]:
            sandbox.end_unwatched()
        jailer.release()

    def layout(self) -> cgroups.Layout:
        """Where cgroups go; what dead processes left there is swept first."""
        with self._first_use:
            if self._layout is None:
                layout = cgroups.Layout()
                cgroups.sweep(layout)
                journal.sweep()
                self._layout = layout
            return self._layout

    def host_ids(self) -> identity.HostIds:
        with self._first_use:
            if self._host_ids is None:
                self._host_ids = identity.HostIds("/run/ringfence/ids", self._hold)
            return self._host_ids

    def _hold(self, lock_fd: int) -> None:
        """The jailer shares the lock: ids stay ours until its last sandbox is gone."""
        self.jailer().tell("hold", None, [lock_fd])

    def close(self) -> None:
        for sandbox in list(self._jailed.values()):
            sandbox.terminate()
        with self._lock:
            if self._jailer is not None:
                self._jailer.close()
                self._jailer = None
        if self._host_ids is not None:
            self._host_ids.close()


def ask_for_process_image(jailer: Launched, wanted: dict[str, Any]) -> ProcessImage:
    """Let the jailer start the agent once, for all its jails.

    Args:
        wanted: See `launcher.machine_code.process_images.take`.

    Raises:
        Refused: No process image can be taken here.
    """
    code = os.memfd_create("agent", os.MFD_CLOEXEC)
    try:
        with open(code, "wb", closefd=False) as file:
            file.write(agent_code.packed())
        os.lseek(code, 0, os.SEEK_SET)
        _, [process_image] = jailer.ask("process_image", wanted, [code])
        return ProcessImage(process_image)
    finally:
        os.close(code)


def kill(pidfd: int) -> None:
    """End a jail that did not come up, and close its pidfd."""
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        pass
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll(_DYING_MS)
    os.close(pidfd)
