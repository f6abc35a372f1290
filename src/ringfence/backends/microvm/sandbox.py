"""A microVM, seen from the host."""

from __future__ import annotations

import marshal
import os
import time

from ...errors import IoError, LifecycleError, SandboxLost
from ...guest import channels
from ...launcher import wire
from ...launcher.fuse import serving
from ..local import journal
from ..local.answers import Refused, answer
from ..local.jailed import saving
from ..local.jailed.jailed import JailedSandbox
from ..local.jailed.jails import kill
from ..local.launched import last_words
from ..local.mounts import template
from ..local.mounts.denied import check_mount
from . import written
from .mounts import MOUNTS, MachineMounts
from .network import MicrovmNetwork

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager
    from typing import Any, Protocol

    from ...model.granted import SandboxCapabilities
    from ...model.mount import Mount
    from ...model.net.network import NetworkPolicy
    from ...model.session import Snapshot
    from ...snapshots.catalogue import Catalogue
    from ..local.agents import guest
    from ..local.host.cgroups import Group, Layout
    from ..local.jailed.jail_mounts import JailMounts
    from ..local.launched import Launched
    from ..local.protections import Reader
    from ..local.sizes import Sizes
    from .booted import Machines
    from .line import Line
    from .monitor import Monitor
    from .plan import Draft
    from .written import Conditions

    class Owner(guest.Owner, Protocol):
        """Interface that such a sandbox needs of its backend."""

        def layout(self) -> Layout: ...

        def machines(self) -> Machines: ...

        def catalogue(self) -> Catalogue: ...

        def released(self, sandbox: MicrovmSandbox) -> None: ...


_RISING_S = 60.0


class Started:
    """An emulator that runs, with what we hold of it.

    Args:
        share: To who serves files.
        network: Our end of the line for connections. Also while nobody relays any the guest finds
            somebody at its other end, and sleeps.
    """

    def __init__(
        self,
        line: Line,
        monitor: Monitor,
        share: wire.Socket,
        network: socket.socket,
        group: Group,
        errors: int,
    ) -> None:
        self.line, self.monitor, self.share, self.network = line, monitor, share, network
        self.group, self.errors = group, errors
        self.pid, self.pidfd = 0, -1

    def give_up(self) -> None:
        """End it, and let go of everything."""
        if self.pidfd >= 0:
            kill(self.pidfd)
        self.line.close()
        self.monitor.close()
        self.network.close()
        self.share.close()
        os.close(self.errors)


class MicrovmSandbox(JailedSandbox):
    """See `BackendSandbox`. All methods may be called from any thread.

    Attributes:
        pid: Of the emulator, as the host sees it.
    """

    can_change_network = True

    def __init__(
        self,
        backend: Owner,
        draft: Draft,
        sizes: Sizes,
        started: Started,
        control: wire.Socket,
        jailer: Launched,
        conditions: Conditions,
        *,
        before: NetworkPolicy | None,
        attached: Sequence[Mount] = (),
    ) -> None:
        super().__init__(
            backend, draft.spec, draft.id, draft.uid, draft.mounts, control, started.pidfd
        )
        self.owner, self.sizes, self.jailer = backend, sizes, jailer
        self.first_host_id, self.image = draft.first_host_id, draft.image
        self.protected, self.note = draft.protected, draft.note
        self.pid, self.group, self.errors = started.pid, started.group, started.errors
        self.conditions = conditions
        self.attached: list[Mount] = list(attached)  # of the host's, once it ran
        self.told = 0  # of what its PID 1 was told, and answers
        self._line, self.monitor, self.share = started.line, started.monitor, started.share
        self.network: MicrovmNetwork = MicrovmNetwork(
            self, started.network, draft.trusted, before=before
        )

    def _reader(self) -> Reader:
        from .report import MicrovmReader

        return MicrovmReader(self)

    def granted(self) -> SandboxCapabilities:
        from ..local.agents.guest_granted import granted

        return granted(self)

    def _may_be(self, uid: int) -> bool:
        return uid <= 0xFFFF

    # -- standing still -----------------------------------------------------------------------

    def _freeze(self, frozen: bool) -> None:
        """The emulator stops its processors. The guest's clock stood still too: it is told the time."""
        self.monitor.ask("stop" if frozen else "cont")
        if not frozen:
            self.tell(channels.CLOCK + b"%d" % time.time_ns())

    def tell(self, word: bytes) -> None:
        with self._send_lock:
            wire.send_raw(self.control, word)

    def hear(self, timeout_s: float) -> bytes:
        """Read an answer of the machine's PID 1. Precondition: the caller has the sandbox's lock.

        Raises:
            SandboxLost: None came in time.
        """
        self.control.settimeout(timeout_s)
        try:
            said = wire.receive_raw(self.control)[0]
        except OSError as exc:
            raise SandboxLost(f"the machine does not answer: {exc}") from exc
        finally:
            self.control.settimeout(None)
        if not said:
            raise self.lost_error()
        return said

    def _more_mounts(self) -> MachineMounts:
        return MachineMounts(self.spec, self.first_host_id, self.mounts)

    def _attach(self, mount: Mount, more: JailMounts) -> None:

        assert isinstance(more, MachineMounts)
        _attach(self, mount, more)

    def changing(self) -> AbstractContextManager[object]:
        return self._lock

    # -- snapshots ----------------------------------------------------------------------------

    def _snapshot(self, metadata: Mapping[str, str], catalogue: Catalogue | None) -> Snapshot:
        with self.awake():
            self.ask("freeze", True)
            try:
                return saving.keep(self, catalogue or self.owner.catalogue(), metadata, self._save)
            finally:
                self.ask("freeze", False)

    def _save(self, pipe: int) -> None:
        """Everything in the guest's root, at one moment."""
        names = [] if self.image is None else [self.image.open_names()]
        try:
            reply = self.request("save", (), (pipe, *names))
        finally:
            for fd in names:
                os.close(fd)
        try:
            answer(reply, None)
        finally:
            reply.close()

    def load(self, content: int) -> None:
        """Unpack a snapshot's files over the root."""
        self.unpack((self.image is not None,), content)

    # -- with its memory ----------------------------------------------------------------------

    def _checkpoint(self, metadata: Mapping[str, str]) -> Snapshot:
        return _checkpoint(self, self.owner.catalogue(), metadata)

    def not_saved(self) -> tuple[str, str]:
        if self.network.trusted or self.spec.secrets:
            why = "its programs hold certificates or secret placeholders of this sandbox"
            return why, "create the sandbox without secrets and without TLS inspection"
        return "", ""

    def resume_from_checkpoint(self) -> None:
        """Go on from a checkpoint."""
        try:
            answer(self.share, _RISING_S)  # files are served again
            self._numbers = self._execs_before = int(self.ask("wake", template.new_hostname())[0])
            self.ask("freeze", False)
        except (Refused, SandboxLost, ValueError) as exc:
            raise IoError(f"the machine could not be resumed: {exc}") from exc

    # -- the end ------------------------------------------------------------------------------

    def _cause(self) -> str:
        if (cause := super()._cause()) or self.errors < 0:
            return cause
        said = last_words(self.errors)
        return f"the emulator: {said}" if said else ""

    def _let_go(self) -> None:
        self.monitor.close()
        self.share.close()
        self._line.close()
        closing, self.errors = self.errors, -1
        os.close(closing)
        journal.give_up(self.protected, self.note, self.id, self.jailer)
        self.owner.released(self)


_MOUNT_S = 120.0  # a machine may have a tenth of a processor, and emulate the rest


def _attach(sandbox: MicrovmSandbox, mount: Mount, more: MachineMounts) -> None:
    """Do it, or leave nothing of it. Precondition: the caller has the sandbox's lock.

    Raises:
        InvalidRequest: The source does not exist, or it cannot be mounted there.
        Refused: As one of the kernels told it.
        SandboxLost: The machine does not answer.
    """
    check_mount(mount.target, sandbox.spec.deny)
    more.add(mount)
    if more.after:
        sandbox.mount_in_jail(more)
    try:
        _tell(sandbox, more)
    except BaseException:
        if more.after:
            sandbox.enter("unmount", {"path": more.places[mount.target]}, [])
        raise
    sandbox.attached.append(mount)
    sandbox.conditions.sources += [tree["source"] for tree in more.mounted]


def _tell(sandbox: MicrovmSandbox, more: MachineMounts) -> None:
    """Have the machine's PID 1 mount it, and hear how that went: see `guest.machine.Mounting`.

    Raises:
        Refused: As the guest's kernel told it.
    """
    first = sum(1 for each in sandbox.mounts if each.host_path)
    sandbox.told += 1
    told: Any = {
        "number": sandbox.told,
        "uid": sandbox.uid,
        "gid": sandbox.uid,
        "steps": more.inner,
        "trees": [
            (f"{MOUNTS}/{first + i}", tree["attributes"]) for i, tree in enumerate(more.mounted)
        ],
    }
    with sandbox.awake():
        sandbox.tell(channels.MOUNTS + marshal.dumps(told))
        ends, number = time.monotonic() + _MOUNT_S, b""
        while number != b"%d" % sandbox.told:  # others were given up waiting for
            number, _, said = sandbox.hear(max(0.1, ends - time.monotonic())).partition(b" ")
            if time.monotonic() > ends:
                raise SandboxLost("the machine does not answer", hint="create a new sandbox")
    if said[:1] != b"O":
        code, _, text = said[1:].partition(b" ")
        if not code.isdigit():
            raise SandboxLost("the machine sent an invalid message", hint="create a new sandbox")
        raise Refused(int(code), text.decode("utf-8", "replace"))


_SAVE_S = 60.0


def _checkpoint(
    sandbox: MicrovmSandbox, catalogue: Catalogue, metadata: Mapping[str, str]
) -> Snapshot:
    """The guest's memory, which holds its files too. The machine ends when it is written down.

    Raises:
        LifecycleError: Something inside holds what is the host's: that could not be continued, and it goes
            on as before.
    """
    if not sandbox.is_held:
        saving.settle(sandbox)
    sandbox.ask("freeze", True)
    try:
        _quiesce(sandbox)
    except LifecycleError:
        sandbox.ask("freeze", False)
        raise
    try:
        known = _known(sandbox)
        with catalogue.workspace(os.geteuid()) as directory:
            memory = f"{directory}/memory"

            def write_down(_pipe: int) -> None:
                with open(memory, "xb", buffering=0) as file:
                    written.begin(file.fileno(), sandbox.conditions, known, sandbox.attached)
                    sandbox.monitor.write_down(file.fileno())

            return saving.keep(sandbox, catalogue, metadata, write_down, memory=memory)
    finally:
        sandbox.terminate()


def _quiesce(sandbox: MicrovmSandbox) -> None:
    """Until nothing is under way between the machine and us, and nothing will be."""
    wire.send_raw(sandbox.control, channels.QUIESCE)
    said = sandbox.hear(_SAVE_S)
    if said.startswith(channels.BUSY):
        raise LifecycleError(
            f"streams of the host cannot be saved, and are open inside: {said.split()[-1].decode()} streams",
            hint=saving.GO_ON,
        )
    wire.send_raw(sandbox.control, channels.QUIESCE)
    if said != channels.QUIESCED or sandbox.hear(_SAVE_S) != channels.RESTED:
        sandbox.terminate()
        raise SandboxLost("the machine did not become idle")


def _known(sandbox: MicrovmSandbox) -> list[bytes]:
    """Collect the file tables of its kernel from the file servers."""
    files = [os.memfd_create("known", os.MFD_CLOEXEC) for _ in range(serving.LINES)]
    try:
        wire.send_raw(sandbox.share, b"W", files)
        answer(sandbox.share, _SAVE_S)
        return [os.pread(fd, os.fstat(fd).st_size, 0) for fd in files]
    except (Refused, OSError) as exc:
        raise IoError(f"the machine's file tables were not saved: {exc}") from exc
    finally:
        for fd in files:
            os.close(fd)
