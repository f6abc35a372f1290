"""Sandboxes that are saved as a whole, as those of gVisor are: what runs in them is only counted."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from tests.unconfined import Unconfined

from ringfence.backends.optional import Continuable, ProcessTemplate
from ringfence.errors import IoError, LifecycleError
from ringfence.model import capabilities as can
from ringfence.model.session import Snapshot
from ringfence.model.spec import SandboxSpec
from ringfence.snapshots.catalogue import Catalogue
from ringfence.testing.unconfined.sandbox import UnconfinedSandbox


class WholeSandbox(UnconfinedSandbox, Continuable):
    """`checkpoint` ends it, and so does `snapshot` once it is held."""

    is_held = False

    def running(self) -> Mapping[str, str]:
        return {}

    def check_copy(self, spec: SandboxSpec) -> None:
        """Take every one."""

    def hold(self, templates: Sequence[ProcessTemplate]) -> None:
        self.is_held = True

    def move(self, templates: Sequence[ProcessTemplate], sandbox: Any) -> None:
        """Nothing runs."""

    def snapshot(self, metadata: Mapping[str, str]) -> Snapshot:
        if not self.is_held:
            return super().snapshot(metadata)
        return self.checkpoint(metadata)

    def checkpoint(self, metadata: Mapping[str, str]) -> Snapshot:  # type: ignore[override]
        backend = self._backend
        assert isinstance(backend, Whole)
        self._check_awake("checkpoint")
        backend.fail("checkpoint")
        made = super().snapshot(metadata)
        self.terminate()
        return replace(made, has_memory=True)

    def suspend(self) -> None:
        self._note("suspend")
        super().suspend()

    def resume(self) -> None:
        self._note("resume")
        super().resume()

    def _note(self, what: str) -> None:
        backend = self._backend
        assert isinstance(backend, Whole)
        backend.done.append(what)


class Whole(Unconfined):
    """Its snapshots are in a catalogue, too, which a shared store copies them from.

    Attributes:
        done: What was done, in order.
        fails: How often each operation is still to fail.
    """

    lacks: ClassVar = {
        name: why
        for name, why in Unconfined.lacks.items()
        if name not in (can.MEMORY_SNAPSHOT, can.NETWORK_CHANGE, can.NETWORK_HOSTS, can.SECRETS)
    }

    def __init__(self, directory: str) -> None:
        super().__init__()
        self.catalogue = Catalogue(directory, self.name)
        self.done: list[str] = []
        self.fails: dict[str, int] = {}

    def fail(self, what: str) -> None:
        """Note an operation, and have it fail while it is to."""
        self.done.append(what)
        if self.fails.get(what, 0) > 0:
            self.fails[what] -= 1
            raise (LifecycleError if "checkpoint" == what else IoError)(f"{what} fails")

    def restore(
        self,
        snapshot_id: str,
        spec: SandboxSpec | None = None,
        *,
        secrets: Mapping[str, str] | None = None,
    ) -> UnconfinedSandbox:
        self.fail("restore")
        return super().restore(snapshot_id, spec, secrets=secrets)

    def save(
        self, session_id: str, spec: SandboxSpec, root: str, metadata: Mapping[str, str]
    ) -> Snapshot:
        made = super().save(session_id, spec, root, metadata)
        read, write = os.pipe()
        os.close(write)
        facts: dict[str, Any] = {"session_id": session_id, "created_at": made.created_at}
        try:
            self.catalogue.save(read, made.id, spec, 1 << 20, is_durable=False, **facts)
        finally:
            os.close(read)
        return made

    def delete_snapshot(self, snapshot_id: str) -> None:
        super().delete_snapshot(snapshot_id)
        self.catalogue.delete(snapshot_id)
        self.done.append("delete")

    def _make(self, spec: SandboxSpec, content: str | None) -> UnconfinedSandbox:
        made = super()._make(spec, content)
        made.__class__ = WholeSandbox
        return made
