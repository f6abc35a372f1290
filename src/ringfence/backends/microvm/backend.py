"""The microVM backend: one emulator in a jail per sandbox, continued from a machine that has booted before."""

from __future__ import annotations

import contextlib
import marshal
import os
import socket
import tempfile
from _thread import allocate_lock

from ...errors import BackendUnavailable, IsolationError, Unsupported
from ...guest.machine import BOOTED, READY
from ...launcher import wire
from ...model.base.ids import new_id
from ...model.spec import STRONG, SandboxSpec
from ..local import journal
from ..local.answers import Refused
from ..local.host.facts import host, out_of_files
from ..local.jailed.jails import Jails
from ..local.jailed.saving import check_goes_on, tell_limits
from ..local.launched import last_words, room_for_words
from ..local.mounts.trusted import trusted_for
from ..local.refusals import error_of
from ..optional import GuestKernel, Replicable, TierDefault
from . import booted, kernel, qemu, written
from . import plan as planning
from .accelerator import accelerator
from .line import Line
from .monitor import Monitor
from .network import check_kernel
from .sandbox import MicrovmSandbox, Started

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any

    from ...egress.host.client import Egress
    from ...model.capabilities import BackendReport
    from ...model.net.network import NetworkPolicy
    from ..local.mounts.images import Held
    from ..protocol import WarmSandbox
    from .booted import Machines

NAME = planning.NAME
_BOOT_S = 300.0  # under software emulation, on a machine that has other things to do
_WAKE_S = 120.0
_LINE, _MONITOR, _NETWORK, _SHARES, _MEMORY = 0, 3, 4, (5, 6), 7  # descriptors of the emulator's
_MIB = 1 << 20


class MicrovmBackend(Jails, TierDefault, GuestKernel, Replicable):
    """See `Backend`.

    Args:
        path: The emulator; None looks on PATH.
        kernel_place: Where a kernel's package was unpacked; None looks in the usual places.
        state_dir: Where snapshots are kept; None is this user's data directory.
        cache_dir: Where booted machines are kept; None is this user's cache.
        egress: Who moves the data of forwarded connections; None is the process that this one shares.
    """

    name = NAME
    tiers = (STRONG,)
    never = planning.NEVER
    profile_names = planning.PROFILES
    least = planning.LEAST

    def __init__(
        self,
        *,
        path: str | None = None,
        kernel_place: str | None = None,
        state_dir: str | None = None,
        cache_dir: str | None = None,
        egress: Callable[[], Egress] | None = None,
    ) -> None:
        super().__init__(state_dir, egress)
        self._path, self._kernel_place = path, kernel_place
        self._cache_dir = cache_dir or booted.default_directory()
        self._found = allocate_lock()
        self._machines: Machines | None = None
        self._report: BackendReport | None = None

    def beside(self, state_dir: str) -> MicrovmBackend:
        return MicrovmBackend(
            path=self._path,
            kernel_place=self._kernel_place,
            state_dir=state_dir,
            cache_dir=self._cache_dir,
        )

    def check_kernel(self, place: str) -> None:
        kernel.find(place)

    def use_kernel(self, place: str | None) -> None:
        if place == self._kernel_place:
            return
        with self._found:
            self._kernel_place, self._machines, self._report = place, None, None

    def machines(self) -> Machines:
        """Where booted ones are kept, for what was found on this host.

        Raises:
            BackendUnavailable: There is no emulator, or no kernel.
        """
        with self._found:
            if self._machines is None:
                program, guest = qemu.find(self._path), kernel.find(self._kernel_place)
                found = booted.Machines(self._cache_dir, guest, program, qemu.TCG)
                found.accelerator = accelerator(found, self._tries)
                self._machines = found
            return self._machines

    # -- provisioning -----------------------------------------------------------------------

    def provision(self, spec: SandboxSpec) -> MicrovmSandbox:
        return self._provision(spec, content=-1)

    def provision_unasked(self, spec: SandboxSpec) -> MicrovmSandbox:
        """For who has asked for a tier, and not for this backend.

        Raises:
            BackendUnavailable: There is only software emulation, which is taken by name alone.
        """
        if spec.image is None:  # else what it says is checked with all the rest
            planning.check(spec)
        if self.machines().accelerator != qemu.KVM:
            raise BackendUnavailable(
                "KVM cannot boot a guest on this host; software emulation is slow and is no security boundary",
                hint="select the backend microvm by name",
            )
        return self.provision(spec)

    def _provision(
        self, spec: SandboxSpec, content: int, memory: str = "", before: NetworkPolicy | None = None
    ) -> MicrovmSandbox:
        """Make one.

        Args:
            content: Files of a snapshot; -1: none.
            memory: What a machine that ran a sandbox was written down in; empty for a new one.
            before: Network policy under which it was.
        """
        if spec.image is None:
            return self._provision_over(None, spec, content, memory, before)
        from ..local.mounts import images

        return images.made_from(
            spec, lambda spec, image: self._provision_over(image, spec, content, memory, before)
        )

    def _provision_over(
        self,
        image: Held | None,
        spec: SandboxSpec,
        content: int,
        memory: str,
        before: NetworkPolicy | None,
    ) -> MicrovmSandbox:
        planning.check(spec)
        machines = self.machines()
        check_kernel(spec.network, machines.kernel)
        if image and not machines.kernel.has_overlays:
            why = f"{machines.kernel.path} has no module overlay"
            raise planning.refusal("image", "image", why, kernel.HINT)
        sandbox_id = self._new_id(spec)
        try:
            sandbox = self._make(spec, sandbox_id, machines, image, memory, before)
            self._jailed[sandbox_id] = sandbox
            sandbox.complete(lambda: sandbox.join_network(sandbox.network))
        except OSError as exc:
            if problem := out_of_files(exc):
                raise problem from exc
            raise
        finally:
            self._making.discard(sandbox_id)
        if memory:
            sandbox.complete(sandbox.resume_from_checkpoint)
        elif content >= 0:
            sandbox.complete(lambda: sandbox.load(content))
        return sandbox

    def _make(
        self,
        spec: SandboxSpec,
        sandbox_id: str,
        machines: Machines,
        image: Held | None,
        written_down: str,
        before: NetworkPolicy | None,
    ) -> MicrovmSandbox:
        """A sandbox that has been told who it is.

        Args:
            written_down, before: `memory` and `before` of `_provision`.
        """
        size = planning.sizes_of(spec, host())
        mib = qemu.memory_mib(size.memory_bytes)
        memory, initrd = machines.machine(
            mib, lambda path, out: self.boot(machines, mib, path, out)
        )
        with _HostId(self, keep=True) as first:
            with open(written_down or memory, "rb", buffering=0) as file:
                incoming = file.fileno()
                head = written.read(incoming) if written_down else written.Head()
                draft = planning.Draft(spec, sandbox_id, first, image, head.attached)
                try:
                    if spec.network.needs_tls_termination:
                        draft.trust(trusted_for(spec.network, self.egress()))
                    conditions = written.Conditions(machines.key(mib), draft.sources())
                    if head.before is not None:
                        head.before.check(conditions)
                    started = self._start(
                        machines, draft, mib, initrd, incoming=incoming, known=head.known
                    )
                except BaseException:
                    journal.give_up(draft.protected, draft.note, sandbox_id, self.jailer())
                    raise
                finally:
                    draft.close()
            try:
                told: Any = planning.rising() if written_down else planning.waking(draft, size)
                started.line.say(marshal.dumps(told))
                control = self._woken(started)
                started.group.unthrottle(False)
                return MicrovmSandbox(
                    self,
                    draft,
                    size,
                    started,
                    control,
                    self.jailer(),
                    conditions,
                    before=before,
                    attached=head.attached,
                )
            except BaseException:
                started.give_up()
                journal.give_up(draft.protected, draft.note, sandbox_id, self.jailer())
                raise

    def _woken(self, started: Started) -> wire.Socket:
        word = _said(started, _WAKE_S)
        if word != READY:
            number, _, text = word[1:].partition(b" ")
            problem = Refused(int(number or b"5"), text.decode("utf-8", "replace"))
            raise error_of(problem)
        return started.line.carry()

    def _start(
        self,
        machines: Machines,
        draft: planning.Draft,
        mib: int,
        initrd: str,
        *,
        incoming: int = -1,
        known: Sequence[bytes] = (),
        console: bool = False,
        accelerator: str = "",
    ) -> Started:
        """An emulator in a jail; what it says first is still to be heard.

        Args:
            known: What who serves files is to go on from: see `serving`.
        """
        jailer, program = self.jailer(), machines.program.path
        argv = qemu.argv(
            program,
            accelerator or machines.accelerator,
            mib,
            line=_LINE,
            monitor=_MONITOR,
            network=_NETWORK,
            shares=_SHARES,
            incoming=_MEMORY if incoming >= 0 else -1,
            console=console,
        )
        files = {"/boot/kernel": machines.kernel.path, "/boot/initrd": initrd}
        # First of all: a limit that cannot be held is refused here, when nothing is open yet.
        passes = 2 + len(_SHARES) + (incoming >= 0)
        plan = planning.jail(draft, host(), argv, files, passes)
        most = mib * _MIB + planning.EMULATOR_BYTES, planning.EMULATOR_PIDS
        group = self._plan_limits(plan, draft.spec, *most)
        draft.note = plan["note"] = journal.note(draft.id, plan["placeholders"]) or ""
        kind = socket.SOCK_STREAM | socket.SOCK_CLOEXEC
        near, far = socket.socketpair(socket.AF_UNIX, kind)
        network, inner = socket.socketpair(socket.AF_UNIX, kind)
        pairs = [socket.socketpair(socket.AF_UNIX, kind) for _ in _SHARES]
        share, serving = wire.socketpair()
        more = [far.fileno(), inner.fileno(), *(asks.fileno() for asks, _ in pairs)]
        more += [incoming] if incoming >= 0 else []
        more += [*(answers.fileno() for _, answers in pairs), serving.fileno()]
        if known:
            _hand_over(share, known)
        line = Line()
        errors = room_for_words("emulator-says")
        started = Started(line, Monitor(near), share, network, group, errors)
        try:
            with line.far, far, inner:
                passed = [line.far.fileno(), errors, *more, *draft.fds]
                body, [started.pidfd] = jailer.ask("create", plan, passed)
            started.pid = int(body)
            group.unthrottle(True)  # until it is ready: what is measured is what the guest does
        except BaseException as exc:
            started.give_up()
            if isinstance(exc, Refused):
                raise error_of(exc) from exc
            raise
        finally:
            for each in (serving, *(end for pair in pairs for end in pair)):
                each.close()
        return started

    # -- booting ----------------------------------------------------------------------------

    def boot(self, machines: Machines, mib: int, initrd: str, out: int) -> None:
        """Boot a machine, and write it down.

        Raises:
            IsolationError: It does not boot, with what its kernel said.
        """
        try:
            self._boot_once(machines, mib, initrd, machines.accelerator, out=out)
        except IsolationError:
            # Once more, to hear why: what is written down has no console.
            self._boot_once(machines, mib, initrd, machines.accelerator, console=True)
            raise

    def _boot_once(
        self,
        machines: Machines,
        mib: int,
        initrd: str,
        accelerator: str,
        *,
        out: int = -1,
        console: bool = False,
        timeout_s: float = _BOOT_S,
    ) -> None:
        with _HostId(self) as first:
            draft = planning.Draft(SandboxSpec(tier=STRONG), new_id("boot"), first)
            started = self._start(
                machines, draft, mib, initrd, console=console, accelerator=accelerator
            )
            try:
                if _said(started, timeout_s) != BOOTED:
                    raise IsolationError("the first message of the machine was invalid")
                if out >= 0:
                    started.monitor.write_down(out)
            finally:
                started.give_up()

    @contextlib.contextmanager
    def bootable(self) -> Iterator[Callable[[], None]]:
        """Something that boots the usual machine once and ends it: to see what that takes."""
        machines = self.machines()
        with tempfile.TemporaryDirectory(prefix="ringfence-boot-") as place:
            initrd, mib = machines.initrd(place), qemu.memory_mib(0)
            yield lambda: self._boot_once(machines, mib, initrd, machines.accelerator)

    def _tries(self, machines: Machines, accelerator: str, timeout_s: float) -> None:
        """Boot a machine that way, and end it.

        Raises:
            RingfenceError: It did not boot in time, and why.
        """
        with tempfile.TemporaryDirectory(prefix="ringfence-probe-") as place:
            initrd = machines.initrd(place)
            mib = qemu.memory_mib(0)
            self._boot_once(machines, mib, initrd, accelerator, timeout_s=timeout_s)

    # -- the rest of the contract -------------------------------------------------------------

    def report(self) -> BackendReport:
        from .report import backend_report

        # The inputs of the report are fixed for this process; a failure may pass, so it is retried.
        if self._report is None or not self._report.available:
            self._report = backend_report(self)
        return self._report

    def prewarm(self, spec: SandboxSpec) -> WarmSandbox:
        planning.check(spec)
        raise Unsupported(
            "machines already start from the snapshot of a booted machine",
            backend=NAME,
            operation="prewarm",
        )

    def restore(
        self,
        snapshot_id: str,
        spec: SandboxSpec | None = None,
        *,
        secrets: Mapping[str, str] | None = None,
    ) -> MicrovmSandbox:
        from dataclasses import replace

        catalogue = self.catalogue()
        _saved, taken_under, content = catalogue.open(snapshot_id)
        try:
            memory = catalogue.memory_of(snapshot_id)
            again = spec or replace(taken_under, id=None, secrets=secrets or {})
            if not memory:
                return self._provision(again, content)
            check_goes_on(spec, taken_under, network=True)
            sandbox = self._provision(again, content, memory, taken_under.network)
            sandbox.complete(lambda: tell_limits(sandbox, taken_under))
            return sandbox
        finally:
            os.close(content)


def _hand_over(share: wire.Socket, known: Sequence[bytes]) -> None:
    """It waits in the socket until somebody serves."""
    files = [os.memfd_create("known", os.MFD_CLOEXEC) for _ in known]
    try:
        for fd, content in zip(files, known, strict=True):
            with open(fd, "wb", closefd=False) as file:
                file.write(content)
        wire.send_raw(share, b"R", files)
    finally:
        for fd in files:
            os.close(fd)


class _HostId:
    """A host id of nobody else's in the `with` block; 0 without root.

    Args:
        keep: Also afterwards, where nothing went wrong.
    """

    def __init__(self, backend: MicrovmBackend, *, keep: bool = False) -> None:
        self._backend, self._first, self._keep = backend, 0, keep

    def __enter__(self) -> int:
        if host().trusted_root:
            self._backend.jailer()  # it is to hold the id as well, and asks which there are as it starts
            self._first = self._backend.host_ids().take()
        return self._first

    def __exit__(self, kind: object, *_exc: object) -> None:
        if self._first and (kind is not None or not self._keep):
            self._backend.host_ids().give_back(self._first)


def _said(started: Started, timeout_s: float) -> bytes:
    """The machine's next word.

    Raises:
        IsolationError: There is none, with the emulator's own words for it.
    """
    try:
        return started.line.first_word(started.pidfd, timeout_s)
    except Refused as exc:
        raise error_of(exc) from exc
    except IsolationError as exc:
        said = last_words(started.errors) or "it exited without printing an error"
        raise IsolationError(
            f"the machine did not start: {exc.message or said}",
            hint="run `ringfence doctor` to see what this host allows",
        ) from exc
