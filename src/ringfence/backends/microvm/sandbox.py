"""A microVM, seen from the host."""

from __future__ import annotations

import os
import time

from ...errors import IoError, LifecycleError, SandboxLost, Unsupported
from ...guest import channels
from ...launcher import wire
from ...model.state import State
from ..local import journal
from ..local.answers import Refused, answer
from ..local.jailed import saving
from ..local.jailed.jailed import JailedSandbox
from ..local.mounts import template
from . import checkpoints
from .mounts import MachineMounts
from .network import MicrovmNetwork

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from ...model.capabilities import Protection
    from ...model.granted import SandboxCapabilities
    from ...model.mount import Mount
    from ...model.session import Snapshot
    from ..local.jailed.jail_mounts import JailMounts
    from ..local.launched import Launched
    from ..local.sizes import Sizes
    from .backend import MicrovmBackend, Started
    from .plan import Draft
    from .written import Conditions

_RISING_S = 60.0


class MicrovmSandbox(JailedSandbox):
    """See `BackendSandbox`. All methods may be called from any thread.

    Attributes:
        pid: Of the emulator, as the host sees it.
    """

    def __init__(
        self,
        backend: MicrovmBackend,
        draft: Draft,
        sizes: Sizes,
        started: Started,
        control: wire.Socket,
        jailer: Launched,
        conditions: Conditions,
        *,
        resumes: bool,
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
            self, started.network, draft.trusted, resumes=resumes
        )

    def protections(self) -> tuple[Protection, ...]:
        from .report import sandbox_protections

        return sandbox_protections(self)

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
        """Something for the machine's PID 1."""
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
        from .attach import attach

        assert isinstance(more, MachineMounts)
        attach(self, mount, more)

    def changing(self) -> AbstractContextManager[object]:
        """For who changes it and is no caller's."""
        return self._lock

    # -- snapshots ----------------------------------------------------------------------------

    def snapshot(self, metadata: Mapping[str, str]) -> Snapshot:
        with self._lock:
            if self.state is State.TERMINATED:
                raise LifecycleError("snapshot: the sandbox is terminated", hint="create a new one")
            with self.awake():
                self.ask("freeze", True)
                try:
                    return saving.keep(self, self.owner.catalogue(), metadata, self._save)
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
        """Unpack a snapshot's files over the root; on failure the sandbox is ended."""
        reply = self.request("load", (self.image is not None,), (content,))
        try:
            answer(reply, None)
        except Refused as exc:
            self.terminate()
            raise IoError(f"the snapshot was not unpacked: {exc.strerror}") from exc
        finally:
            reply.close()

    # -- with its memory ----------------------------------------------------------------------

    def checkpoint(self, metadata: Mapping[str, str]) -> Snapshot:
        with self._lock:
            self._require(self._state, "checkpoint")
            if self._state is State.SUSPENDED:
                raise LifecycleError("checkpoint: the sandbox is suspended", hint="resume it first")
            if self.network.trusted or self.spec.secrets:
                raise Unsupported(
                    "its programs hold certificates or secret placeholders of this sandbox",
                    backend=self.owner.name,
                    operation="checkpoint",
                    hint="create the sandbox without secrets and without TLS inspection",
                )
            return checkpoints.save(self, self.owner.catalogue(), metadata)

    def resume_from_checkpoint(self) -> None:
        """Go on from a checkpoint; on failure the sandbox is ended."""
        try:
            answer(self.share, _RISING_S)  # files are served again
            self._numbers = self._execs_before = int(self.ask("wake", template.new_hostname())[0])
            self.ask("freeze", False)
        except (Refused, SandboxLost, ValueError) as exc:
            self.terminate()
            raise IoError(f"the machine could not be resumed: {exc}") from exc

    # -- the end ------------------------------------------------------------------------------

    def _let_go(self) -> None:
        self.monitor.close()
        self.share.close()
        self._line.close()
        closing, self.errors = self.errors, -1
        os.close(closing)
        journal.give_up(self.protected, self.note, self.id, self.jailer)
        self.owner.released(self)
