"""A backend whose sandboxes are all built ahead and then claimed.

Run the conformance suite over it as well: a claimed sandbox must be like any other.
"""

from __future__ import annotations

from collections.abc import Mapping

from ringfence.backends.protocol import Backend, BackendSandbox, WarmSandbox
from ringfence.model.capabilities import BackendReport
from ringfence.model.session import Snapshot
from ringfence.model.spec import SandboxSpec


class ClaimingBackend:
    """`Backend`, with `provision` as `prewarm` and `claim`."""

    def __init__(self, inner: Backend) -> None:
        self.inner, self.name, self.tiers = inner, inner.name, inner.tiers

    def provision(self, spec: SandboxSpec) -> BackendSandbox:
        warm = self.inner.prewarm(spec)
        if warm.fits(spec):
            return warm.claim(spec)
        warm.discard()
        return self.inner.provision(spec)

    def prewarm(self, spec: SandboxSpec) -> WarmSandbox:
        return self.inner.prewarm(spec)

    def report(self) -> BackendReport:
        return self.inner.report()

    def restore(
        self,
        snapshot_id: str,
        spec: SandboxSpec | None = None,
        *,
        secrets: Mapping[str, str] | None = None,
    ) -> BackendSandbox:
        return self.inner.restore(snapshot_id, spec, secrets=secrets)

    def snapshots(self) -> list[Snapshot]:
        return self.inner.snapshots()

    def delete_snapshot(self, snapshot_id: str) -> None:
        self.inner.delete_snapshot(snapshot_id)

    def close(self) -> None:
        self.inner.close()
