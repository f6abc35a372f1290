"""One microVM, seen from the host."""

from __future__ import annotations

import os
import time
from dataclasses import replace

from ...errors import IoError, LifecycleError, Unsupported
from ...guest import channels
from ...launcher import wire
from ...model.state import State
from ..local import saving
from ..local.answers import Refused, answer
from ..local.hulled import HulledSandbox
from .network import MicrovmNetwork

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ...model.capabilities import Protection
    from ...model.granted import SandboxCapabilities
    from ...model.snapshot import Snapshot
    from ..local.launched import Launched
    from ..local.sizes import Sizes
    from .backend import MicrovmBackend, Started
    from .plan import Draft


class MicrovmSandbox(HulledSandbox):
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
        keeper: Launched,
    ) -> None:
        super().__init__(
            backend, draft.spec, draft.id, draft.uid, draft.mounts, control, started.pidfd
        )
        self.owner, self.sizes, self.keeper = backend, sizes, keeper
        self.first_host_id, self.image = draft.first_host_id, draft.image
        self.pid, self.group, self.errors = started.pid, started.group, started.errors
        self._line, self.monitor = started.line, started.monitor
        self.network: MicrovmNetwork = MicrovmNetwork(self, started.network, draft.trusted)

    def protections(self) -> tuple[Protection, ...]:
        from .report import sandbox_protections

        return sandbox_protections(self)

    def granted(self) -> SandboxCapabilities:
        from ..local.guest_granted import granted

        policy = self.spec.network
        return replace(
            granted(self),
            has_network=not policy.is_none,
            allowed_destinations=policy.allowed_hosts,
        )

    def _may_be(self, uid: int) -> bool:
        return uid <= 0xFFFF

    # -- standing still -----------------------------------------------------------------------

    def _freeze(self, frozen: bool) -> None:
        """The emulator stops its processors. The guest's clock stood still too: it is told the time."""
        self.monitor.ask("stop" if frozen else "cont")
        if not frozen:
            with self._send_lock:
                wire.send_raw(self.control, channels.CLOCK + b"%d" % time.time_ns())

    # -- snapshots ----------------------------------------------------------------------------

    def snapshot(self, metadata: Mapping[str, str]) -> Snapshot:
        with self._lock:
            if self.state is State.TERMINATED:
                raise LifecycleError("snapshot: the sandbox is terminated")
            if self.image is not None:
                raise Unsupported(
                    "what was changed of an image is not told apart in a machine yet",
                    backend=self.owner.name,
                    operation="snapshot",
                )
            with self.awake():
                self.ask("freeze", True)
                try:
                    return saving.keep(self, self.owner.catalogue(), metadata, self._save)
                finally:
                    self.ask("freeze", False)

    def _save(self, pipe: int) -> None:
        """Everything in the guest's root, at one moment."""
        reply = self.request("save", (), (pipe,))
        try:
            answer(reply, None)
        finally:
            reply.close()

    def load(self, content: int) -> None:
        """Unpack a snapshot's files over the root; on failure the sandbox is ended."""
        reply = self.request("load", (), (content,))
        try:
            answer(reply, None)
        except Refused as exc:
            self.terminate()
            raise IoError(f"the snapshot was not unpacked: {exc.strerror}") from exc
        finally:
            reply.close()

    # -- the end ------------------------------------------------------------------------------

    def _let_go(self) -> None:
        self.monitor.close()
        self._line.close()
        closing, self.errors = self.errors, -1
        os.close(closing)
        self.owner.released(self)
