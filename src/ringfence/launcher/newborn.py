"""The process of a sandbox, from its clone until it is somebody's, seen from the zygote."""

from __future__ import annotations

import errno
import posix as os

from ..linux import namespaces
from . import boot, cgroups, wire
from .pid1 import processes
from .pid1.init import SPARED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .boot import Template
    from .plan import Ids, Shape


class Newborn:
    """A process in new namespaces.

    Attributes:
        go: Our end of the socket on which it is told to go on, and then whose it is.
        values: What is set in its cgroups.
    """

    def __init__(
        self, pid: int, pidfd: int, go: wire.Socket, values: list[tuple[str, str]]
    ) -> None:
        self.pid, self.pidfd, self.go, self.values = pid, pidfd, go, values

    def let_go(self, shape: Shape) -> None:
        """Give it its ids and, with version 1, its cgroups, and the word to build its root."""
        tasks: list[int] = []
        try:
            if shape["cgroup_version"] == 1:
                cgroups.make(shape["cgroup_dirs"], shape["cgroup_values"])
                tasks = cgroups.open_tasks(shape["cgroup_dirs"] + cgroups.around(shape))
            spare(self.pid)
            self.map_ids(shape)
            # With it, its own pidfd, for the host: one wake-up of the host is enough.
            wire.send_raw(self.go, b"%d" % self.pid, [self.pidfd, *tasks])
        except OSError as exc:
            if processes.is_exiting(self.pid):
                # Without its memory its files in /proc are root's: an ordinary user gets EACCES.
                raise OSError(errno.ESRCH, os.strerror(errno.ESRCH)) from exc
            raise
        finally:
            for fd in tasks:
                os.close(fd)

    def map_ids(self, shape: Shape) -> None:
        """Say who is who in its user namespace."""
        if shape["id_helpers"]:
            from . import ranges  # few sandboxes need it

            ranges.write_id_maps(self.pid, shape)
            return
        maps = shape["uid_map"], shape["gid_map"]
        namespaces.write_id_maps(self.pid, *maps, deny_setgroups=shape["deny_setgroups"])

    def give(self, control: wire.Socket | None, tasks: list[int], trees: list[int]) -> None:
        """The word whose it is.

        Args:
            control: Where its plan waits and the host listens; None when it has that already.
            tasks: Cgroups to join besides those of its shape.
            trees: What its plan mounts.
        """
        first = [] if control is None else [control.fileno()]
        wire.send(self.go, (control is not None, len(tasks)), [*first, *tasks, *trees])

    def close(self) -> None:
        """Close our descriptors of it; while it waits for a word, that ends it."""
        self.go.close()
        os.close(self.pidfd)


def clone(
    shape: Shape,
    template: Template,
    control: wire.Socket,
    layers: list[int],
    hibernation_image: int,
    disk: int,
    *,
    waits: bool,
    rehearses: bool,
) -> Newborn:
    """A new process, on its way through `boot`."""
    theirs, ours = wire.socketpair()
    try:
        pid, pidfd = _clone_into(shape)
    except OSError:
        ours.close()
        theirs.close()
        cgroups.remove(shape["cgroup_dirs"])
        raise
    if pid == 0:
        ours.close()
        birth = boot.Boot(theirs, control, shape, template, layers, hibernation_image, disk)
        birth.run(waits=waits, rehearses=rehearses)
    theirs.close()
    return Newborn(pid, pidfd, ours, shape["cgroup_values"])


def _clone_into(shape: Shape) -> tuple[int, int]:
    owner = namespace_owner(shape) if shape["trusted_root"] else 0
    if shape["cgroup_version"] != 2:
        return namespaces.clone3(shape["namespaces"], owner=owner)
    # Version 2 clones straight into its cgroup; version 1 is made while the clone boots.
    cgroups.make(shape["cgroup_dirs"], shape["cgroup_values"])
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    cgroup_fd = os.open(shape["cgroup_dirs"][0], flags)
    try:
        return namespaces.clone3(shape["namespaces"], cgroup_fd=cgroup_fd, owner=owner)
    finally:
        os.close(cgroup_fd)


def namespace_owner(ids: Ids) -> int:
    """The host id of the first user inside: of no other sandbox, and never root's."""
    return namespaces.parse_id_map(ids["uid_map"])[0][1]


def spare(pid: int) -> None:
    """Let the OOM killer pass PID 1 by, where the host's root may say so.

    The page tables of a process that it has killed stay charged until an RCU grace period is over: Linux
    frees them by call_rcu(). Until then PID 1 is alone at the limit, and whatever it asks for kills it.
    """
    try:
        fd = os.open(f"/proc/{pid}/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.write(fd, SPARED)
    except OSError:
        pass  # without CAP_SYS_RESOURCE on the host
    finally:
        os.close(fd)


def prefer(pid: int) -> None:
    """Let PID 1 run before a thousand spinning children of its own; they start at nice 0 again.

    Only once it is claimed: a prebuilt sandbox shall not delay what runs.
    """
    try:
        os.setpriority(os.PRIO_PROCESS, pid, -15)
        os.sched_setscheduler(pid, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
    except PermissionError:
        pass  # an ordinary user: the scheduler's autogroup keeps sessions apart
