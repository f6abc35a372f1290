"""The boot of a sandbox, run by the process that becomes its PID 1, in two halves.

The first half needs nobody's wishes: it goes from new namespaces to a root of its own. The second
brings the plan, with everything that depends on who gets the sandbox, and locks it down. A cold
start goes through both without a pause; one of a pool waits between them, and is then the same.
"""

from __future__ import annotations

import _signal as signal
import errno
import posix as os
import select

from ..linux import files, namespaces, privileges, signals
from . import build, cgroups, lockdown, network, newroot, rehearsal, wire
from .machine_code import hibernation
from .pid1 import init, netlink_sockets

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    from .plan import Plan, Shape, Tree

    Template = tuple[list[Tree], list[tuple[Any, ...]]]

_CONTROL, _SIGNAL, _OOM_SCORE, _IO = (
    hibernation.CONTROL,
    hibernation.SIGNAL,
    hibernation.OOM_SCORE,
    hibernation.IO,
)
_LISTENER = hibernation.LISTENER
# Sent to the host with the ready message, besides the sockets of our network: our pidfd; our mount
# and PID namespace. The user namespace that owns both follows from the mount namespace.
_TOLD = range(hibernation.KNOWN, hibernation.KNOWN + 3)
_GO = _TOLD[-1] + 1
# And up: the plan's own mounts, where they had to be opened in the host's view of files.
_TREES = _GO + 1


class Boot:
    """The boot of one sandbox.

    Args:
        go: From the zygote: first that our ids are mapped, then the sandbox's identity.
        control: To the host, which gets errors there; the plan comes there too.
        template: Trees and steps.
        hibernation_image: Program to hibernate in: see `hibernation_image`.
        disk: The mount to write to, where the host had to make it; -1 for none.
    """

    def __init__(
        self,
        go: wire.Socket,
        control: wire.Socket,
        shape: Shape,
        template: Template,
        layers: list[int],
        hibernation_image: int,
        disk: int,
    ) -> None:
        self.hibernation_image, self.disk = hibernation_image, disk
        self.layers, self.go, self.shape = layers, go, shape
        # None while a claim is waited for: then the host reads there of no error.
        self.control: wire.Socket | None = control
        self.template_trees, self.template_steps = template
        self.pid = b""
        self.trees: list[int] = []
        self.around: list[int] = []  # open: see `cgroups.around`

    def run(self, *, waits: bool, rehearses: bool) -> NoReturn:
        """Build, wait for a plan if need be, lock down, serve as PID 1.

        Args:
            waits: Tell the host that we wait; then a plan may come there, or with another `control`.
            rehearses: There is time to prepare for the first client.
        """
        self.reported(self.build)
        if waits:
            self.reported(self.rest)
        if rehearses and not (waits and offered(0)):  # else it is claimed already
            rehearsal.rehearse(self.shape, _SIGNAL, _OOM_SCORE, _IO)
        self.reported(self.receive_word)
        self.reported(self.finish)
        os._exit(0)

    def reported(self, half: Callable[[], None]) -> None:
        """Call `half`; when it fails, the host hears why, and this process ends."""
        try:
            half()
        except newroot.BuildError as exc:
            self.refuse(exc.cause, exc.step)
        except OSError as exc:
            self.refuse(exc, "lock down")
        except BaseException as exc:  # noqa: BLE001  the host must hear of it, whatever it is
            self.refuse(OSError(errno.EPROTO, repr(exc)), "boot")

    def refuse(self, exc: OSError, step: str) -> NoReturn:
        if self.control is not None:
            wire.refuse(self.control, exc, step)
        os._exit(1)

    # -- the first half -----------------------------------------------------------------------

    def build(self) -> None:
        """From new namespaces to a root of our own; nothing is locked down yet, and nothing runs."""
        shape = self.shape
        # While the zygote maps our ids and makes our cgroups, what needs neither.
        os.setsid()
        # Python's own handler would let anybody inside interrupt PID 1; without a handler the kernel
        # drops every signal that PID 1 gets from its own namespace.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        build.leave_host_network(shape["namespaces"])
        build.make_mounts_private()
        try:
            namespaces.sethostname(shape["hostname"])
        except PermissionError:
            # By Podman's filter, without CAP_SYS_ADMIN in the container: its name then shows.
            if not shape["borrows_proc"]:
                raise
        shown = build.open_trees(self.template_trees)
        if not shape["trusted_root"]:
            # An ordinary user may copy mounts only in here, and only while the host's are in sight.
            self.trees = build.open_trees(shape["trees"])
            self.layers = build.open_trees(shape["layers"])
            if shape["disk"]:
                self.disk = build.open_trees([shape["disk"]])[0]
        self.pid, passed = wire.receive_raw(self.go)
        if not self.pid:
            os._exit(1)  # the zygote gave up before our ids were mapped
        self.take_place(passed[1:])
        rest = self.layers, self.disk
        oom_score_fd = build.build_root(shape, self.template_steps, shown, *rest)
        self.hold_only(passed[0], oom_score_fd)
        lockdown.bound(shape)

    def take_place(self, tasks: list[int]) -> None:
        """Join our cgroups, hide their names, and take ids of our own."""
        shape = self.shape
        if count := 2 * len(shape["programs_cgroups"]):
            if len(tasks) < count:  # the kernel passed on only as many as we may have open
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            self.around, tasks = tasks[-count:], tasks[:-count]
        self.join(tasks, cgroups.Apart(tuple(self.around)))
        if not shape["deny_setgroups"]:
            os.setgroups([])
        # Unmapped ids cannot create files (EOVERFLOW): take mapped ones before the first mkdir.
        os.setresgid(*[shape["setup_gid"]] * 3)
        os.setresuid(*[shape["setup_uid"]] * 3)
        # The change of ids hid our own /proc files from us; no guest exists yet.
        privileges.set_dumpable(True)

    def join(self, tasks: list[int], apart: cgroups.Apart) -> None:
        """Join cgroups and hide the names of all: what programs see as the top is where they are."""
        apart.enter()
        cgroups.join(tasks)
        namespaces.unshare(namespaces.CLONE_NEWCGROUP)
        apart.leave()

    def hold_only(self, pidfd: int, oom_score_fd: int) -> None:
        """Open what PID 1 needs for good while it is still ours to open, and close everything else."""
        signal_fd = signals.signalfd([signal.SIGCHLD])
        io_fd = os.open("/proc/self/io", os.O_RDONLY | os.O_CLOEXEC)
        names = [f"/proc/self/ns/{name}" for name in ("mnt", "pid")]
        told = [pidfd, *(os.open(name, os.O_RDONLY | os.O_CLOEXEC) for name in names)]
        build.point_standard_at_null()
        privileges.set_name(b"ringfence-init")
        go = self.go.detach()
        assert self.control is not None
        control = self.control.detach()
        # So that nothing else gets the numbers of the listener, and of cgroups that there are not.
        absent = os.eventfd(0, os.EFD_CLOEXEC)
        missing = 2 * cgroups.MOST_APART - len(self.around)
        held = [
            control,
            signal_fd,
            oom_score_fd,
            io_fd,
            self.hibernation_image,
            absent,
            *self.around,
            *[absent] * missing,
        ]
        wanted = [*held, *told, go, *self.trees]
        try:
            kept = build.pack(wanted)
        except OSError as exc:
            self.control = wire.adopt(control)  # who waits there is to hear why
            # Where even the first of the copies would lie above the limit, it is EINVAL.
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE)) from exc
        self.go, self.trees = wire.adopt(_GO), kept[_TREES - _CONTROL :]
        self.control = wire.adopt(_CONTROL)

    def rest(self) -> None:
        """Tell the host that we wait for a claim, and end with the zygote."""
        assert self.control is not None
        wire.send_raw(self.control, b"O" + self.pid, [_TOLD[0]])
        self.control.detach()
        self.control = None
        privileges.die_with_parent(signal.SIGKILL)

    def receive_word(self) -> None:
        """Wait until this sandbox is claimed; at once where that is so from the start."""
        if self.control is None and offered():
            self.control = wire.adopt(_CONTROL)
            return
        word, fds = wire.receive(self.go)
        if word is None:
            os._exit(0)  # no longer wanted
        brings_control, count = word
        if brings_control:
            os.dup2(fds[0], _CONTROL, inheritable=False)
            os.close(fds.pop(0))
            self.control = wire.adopt(_CONTROL)
        if count:
            # Cgroups that only this plan has; their names could else be seen from inside.
            self.join(fds[:count], hibernation.apart(self.shape))
        self.trees += fds[count:]

    # -- the second half ------------------------------------------------------------------------

    def finish(self) -> None:
        """Everything that depends on who gets this sandbox; then there is no way back."""
        assert self.control is not None
        message, _ = wire.receive(self.control)
        if message is None:
            os._exit(0)
        plan: Plan = message
        build.complete_root(plan, self.shape, self.trees)
        sockets = network.set_up(plan["network"])
        lockdown.apply_rlimits(plan["rlimits"])
        lockdown.become_init(plan)
        if not plan["namespaces"] & namespaces.CLONE_NEWNET:
            plan["netlink_sockets"] += netlink_sockets.count()  # with those of the host's programs
        listener_fd = lockdown.seal(plan, serves=True)
        if listener_fd >= 0:
            os.dup2(listener_fd, _LISTENER, inheritable=False)
            os.close(listener_fd)
        wire.send_raw(self.control, b"READY" + self.pid, [*_TOLD, *sockets])
        self.go.detach()
        files.close_from(_TOLD[0])
        # Where root inside belongs to a range of the caller's ids, who has run a program belongs to
        # that user namespace, and not any longer to the host's: such a PID 1 stays what it is. So does
        # one that would lose a capability by execve(2).
        is_ruler = lockdown.is_ruler(plan)
        hibernate = None if plan["id_helpers"] or is_ruler else hibernation.hibernate
        held, apart = (_SIGNAL, _OOM_SCORE, _IO, _LISTENER), hibernation.apart(plan)
        init.Init(
            plan, self.control, *held, apart=apart, hibernate=hibernate, is_ruler=is_ruler
        ).run()


def offered(timeout_ms: int | None = None) -> bool:
    """Wait for a plan straight from the host, or a word of the zygote's; whether it was the first.

    The zygote may give us up in the moment in which the host claims us. Then the claim holds, for
    it lies here; or it comes too late, and the host reads that we have ended.
    """
    poll = select.poll()
    poll.register(_CONTROL, select.POLLIN)
    poll.register(_GO, select.POLLIN)
    return _CONTROL in dict(poll.poll(timeout_ms))
