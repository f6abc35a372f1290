"""Optional parts of the backend contract: base classes that a backend, sandbox or exec declares.

Callers ask `isinstance(backend, Durable)` and do without the part where it is not declared. Each part
has a class of its own in `ringfence.testing.conformance.optional`. Nothing is imported at run time.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import ExitStack
    from typing import ClassVar

    from ..fork.trees import Compared
    from ..model.changes import Changes
    from ..model.execs.exec import ExecRequest
    from ..model.spec import SandboxSpec
    from ..policy.seccomp import SeccompPolicy
    from .protocol import Backend, BackendExec, BackendSandbox

_GRACE_S = 10.0


class Selective:
    """A backend that refuses specs without a report, which may take as long as a boot.

    Attributes:
        never: Capabilities that it has on no host, and why.
        least: Least values of limits, by their names in `Limits`, and why.
    """

    never: ClassVar[Mapping[str, str]] = {}
    least: Mapping[str, tuple[int, str]] = {}

    @property
    def profile_names(self) -> Sequence[str]:
        """Return the only profiles that it serves."""
        raise NotImplementedError

    def refuses(self, spec: SandboxSpec) -> str:
        """Return why the spec's profile or user cannot be had here; empty if it can."""
        del spec
        return ""


class TierDefault:
    """A backend that has conditions for being chosen by tier, and not by name."""

    def provision_unasked(self, spec: SandboxSpec) -> BackendSandbox:
        """Provision for a caller that named a tier; BackendUnavailable where the conditions fail."""
        raise NotImplementedError


class Durable:
    """A backend whose sandboxes can be taken over by the next manager of the state directory.

    A server gives the options `restart_dir`, its state directory, and `outlive_s`, for how long sandboxes
    live on without a server; None: end what an earlier server left there. Commands go on where its sandboxes
    are `DurableSandbox`.
    """

    @property
    def outlives(self) -> bool:
        """True if sandboxes outlive this process; False: only this object, for a second manager."""
        raise NotImplementedError

    def living(self) -> Sequence[BackendSandbox]:
        """List every sandbox that has not ended, those of earlier processes included."""
        raise NotImplementedError

    def adopt(self, sandbox_id: str) -> BackendSandbox | None:
        """Return a live sandbox, of this or an earlier process; None if there is none."""
        raise NotImplementedError

    def save(self) -> None:
        """Save what the end of this process would lose: it ends now, and leaves its sandboxes."""

    def leave(self) -> None:
        """Close after `save`, without ending any sandbox for good. Preconditions: `outlives`."""
        raise NotImplementedError

    def anchor(self) -> tuple[int, int] | None:
        """Return pid and start time of the process with which new sandboxes end; None: there is none."""
        return None

    def end_leftovers(self, pid: int, started: int) -> None:
        """End an anchor of an earlier manager, and clear up what it left."""


class Tenanted:
    """A backend whose sandboxes share resources, such as cached pages, within one tenant only."""

    def belongs_to(self, sandbox_id: str, tenant: str) -> None:
        """Name the tenant of the sandbox that will have this id. Called before it is provisioned."""
        raise NotImplementedError


class ProfileStore:
    """A backend that takes profiles at run time."""

    def define_profile(self, name: str, policy: SeccompPolicy | None) -> None:
        """Define a profile like `os_hardened` with that system-call policy; None removes it.

        Existing sandboxes keep their filter.
        """
        raise NotImplementedError


class GuestKernel:
    """A backend that boots a kernel of the caller's choice."""

    def check_kernel(self, place: str) -> None:
        """Refuse a directory without a kernel that can be booted, by BackendUnavailable."""
        raise NotImplementedError

    def use_kernel(self, place: str | None) -> None:
        """Boot the kernel of that directory from now on; None looks in the usual places."""
        raise NotImplementedError


class Replicable:
    """A backend that is set up in a way which its name does not tell."""

    def beside(self, state_dir: str) -> Backend:
        """Make another one, set up as this one, with snapshots in a directory of its own."""
        raise NotImplementedError


class AttendedExec:
    """A sandbox that is told when a driver waits for an exec's end, and nobody for its streams' ends."""

    def start_attended(self, request: ExecRequest, label: str = "") -> BackendExec:
        """Start; both streams may stay open until the exec ends, which saves the driver two wake-ups.

        Args:
            label: Name of the exec in `DurableSandbox.adopted_execs`.
        """
        raise NotImplementedError


class DurableSandbox(AttendedExec):
    """A sandbox of a `Durable` backend."""

    def adopted_execs(self) -> Mapping[str, BackendExec]:
        """Return the unclosed execs by their labels, those of an earlier process included."""
        raise NotImplementedError

    def align(self, suspended: bool) -> None:
        """Suspend or resume it, as recorded by the earlier process, which may have been killed between."""
        raise NotImplementedError


class Comparable:
    """A sandbox that tells what has changed in it."""

    def compare(self, since: str | None) -> Changes:
        """Compare its files with a snapshot's; None: with those of a new sandbox of the same spec.

        Mounts of the host are left out. It stands still while its files are read, as for a snapshot.

        Raises:
            SnapshotNotFound, SnapshotCorrupt: As `Backend.restore`.
            InvalidRequest: `field` is `since` for a snapshot of another image.
        """
        raise NotImplementedError


class Layered:
    """A sandbox whose files are layers over those of snapshots: what differs is known without reading all."""

    def sides(
        self, since: str, directory: str, stack: ExitStack
    ) -> tuple[Compared, Compared] | None:
        """Return a directory as a snapshot and as the sandbox has it; mounts are left out.

        Args:
            stack: Closes both.

        Returns:
            None: Layers do not tell, as where the directory has mounts in it, or is behind a symlink.

        Raises:
            SnapshotNotFound, SnapshotCorrupt: As `Backend.restore`.
            NotADirectory: It is something else on one of the sides.
            ResourceExhausted: It has too many files to be compared.
        """
        raise NotImplementedError


class WaitingCopy:
    """A copy of a process. It may wait until `go_on`; without it, `close` has to be called.

    Args:
        run: The exec that it is.
    """

    def __init__(self, run: BackendExec) -> None:
        self.run = run

    def go_on(self) -> None:
        """Let it run."""

    def close(self) -> None:
        """Let go of what it waits for, so that it ends; no effect after `go_on`."""


class ProcessTemplate:
    """The memory of one process, from which processes of other sandboxes are made; see `Forkable`.

    The process stands still until `release`.

    Attributes:
        ids: Of its threads, inside.
        bytes: Memory that is kept for it, shared with its copies until these write to it.
        processes: Pid inside and name of it and of all that descend from it; empty: not known.
    """

    ids: Sequence[int] = ()
    bytes: int = 0
    processes: Sequence[tuple[int, str]] = ()

    def release(self) -> None:
        """Let the process go on; idempotent."""
        raise NotImplementedError

    def load(self) -> None:
        """Begin to copy its memory; `copy` waits for that. Precondition: `release`."""
        raise NotImplementedError

    def wait(self) -> None:
        """Wait until its memory is copied.

        Raises:
            Unsupported: It could not be, nor can `copy` be called then.
        """

    def copy(
        self, sandbox: BackendSandbox, request: ExecRequest, taken: Sequence[int], label: str = ""
    ) -> WaitingCopy:
        """Make a copy in a sandbox in which nothing has run.

        Args:
            request: The exec that it is there; its command is not run.
            taken: Ids of all threads that are copied into that sandbox.

        Raises:
            Unsupported: The copy could not be made.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Let go of all that is kept; copies live on."""
        raise NotImplementedError


class Forkable:
    """A sandbox whose running processes can be copied into other sandboxes of its backend."""

    def start(self, request: ExecRequest) -> BackendExec:
        """See `BackendSandbox`."""
        raise NotImplementedError

    def running(self) -> Mapping[str, str]:
        """Return the commands of all execs that run, by id, in the order in which they began."""
        raise NotImplementedError

    def template(self, run: BackendExec) -> ProcessTemplate:
        """Stop the process of an exec and have it copied.

        Raises:
            Unsupported: It has something that no copy can have; it goes on.
        """
        raise NotImplementedError

    def left_behind(self) -> Sequence[str]:
        """Return the commands, with their pids inside, of processes of no exec. No template is there yet."""
        raise NotImplementedError


class Continuable:
    """A sandbox that is saved as a whole: all that runs in it goes on in each sandbox restored from that.

    Once it is held, `snapshot` saves its memory too, and ends it. `Backend.restore` under its own id makes
    the one that is then in its place.
    """

    def start(self, request: ExecRequest) -> BackendExec:
        """See `BackendSandbox`."""
        raise NotImplementedError

    def running(self) -> Mapping[str, str]:
        """Return the commands of all execs that run, by id, in the order in which they began."""
        raise NotImplementedError

    def template(self, run: BackendExec) -> ProcessTemplate:
        """Return what a copy of an exec can be attended by, in a sandbox restored from the snapshot.

        Raises:
            Unsupported: It cannot be saved.
        """
        raise NotImplementedError

    def check_copy(self, spec: SandboxSpec) -> None:
        """Refuse what no copy of what runs can have.

        Raises:
            Unsupported: Its limits, network policy or secrets differ from this one's in a way that what is
                saved has inside.
        """
        raise NotImplementedError

    def hold(self, templates: Sequence[ProcessTemplate]) -> None:
        """Prepare it for `snapshot`, with these execs; `ProcessTemplate.release` takes that back.

        Raises:
            Unsupported: Something else runs that cannot be saved; all goes on.
        """
        raise NotImplementedError

    def move(self, templates: Sequence[ProcessTemplate], sandbox: BackendSandbox) -> None:
        """Have these execs go on, as the same objects, in the sandbox that was restored in its place."""
        raise NotImplementedError

    def number_of(self, template: ProcessTemplate) -> int:
        """Return the number that an exec keeps in every sandbox restored from the snapshot."""
        raise NotImplementedError

    def rejoin(self, number: int, request: ExecRequest) -> BackendExec:
        """Attend to an exec of the sandbox that was saved, here where it was restored.

        Args:
            number: As `number_of` told it, perhaps on another host.
            request: As it was started there; nothing is started.

        Raises:
            RingfenceError: It does not go on here.
        """
        raise NotImplementedError


class CpuClock:
    """A sandbox that reads its processor time faster than `stats`."""

    def cpu_ns(self) -> int | None:
        """Return the processor time used so far; None where it cannot be read now."""
        raise NotImplementedError


class BootIdentity:
    """A sandbox with a boot id of its own in /proc/sys/kernel/random/boot_id."""

    def renew_boot_id(self) -> None:
        """Show another one from now on: what runs inside is to be taken for started anew.

        Raises:
            SandboxLost: It is gone.
        """
        raise NotImplementedError


class Clearable:
    """A sandbox that can end all that runs in it, and lives on."""

    def end_processes(self) -> None:
        """Kill every program of every user, also what ended commands have left, and wait for it.

        Nothing is started inside for that: it works where the sandbox is at a limit.

        Raises:
            ExecError: Some could not be ended in time.
            LifecycleError, SandboxLost: It is suspended, or gone.
        """
        raise NotImplementedError


class DrivenExec:
    """An exec that its driver tells about the timeout; the defaults are those of any other exec.

    Attributes:
        note: What a shell would print for exit codes 126 and 127; appended to stderr.
        grace_s: Seconds beyond the timeout until `abandon`.
        splice_pipe: A pipe, reading end first, that survives with a terminal and takes its output.
        asks_to_resize: True if `resize` waits for an answer.
    """

    note: bytes = b""
    grace_s: float = _GRACE_S
    splice_pipe: tuple[int, int] | None = None
    asks_to_resize: bool = False

    def pid(self) -> int | None:
        """Return the number that its first process has inside; None once it has ended, or if none is known."""
        return None

    @property
    def paused(self) -> bool:
        """True while the exec is suspended with its sandbox, timeout included."""
        return False

    def overdue(self) -> None:
        """Hear that the timeout has passed, so that nothing slows the kill down."""

    def abandon(self) -> bool:
        """End the sandbox, which did not end the exec in time; False if that is not possible."""
        return False
