"""A fake sandbox built ahead: only its id, since there is nothing that takes time to build."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ...errors import InvalidRequest, LifecycleError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...model.spec import SandboxSpec
    from .backend import FakeBackend
    from .sandbox import FakeSandbox


class FakeWarm:
    """See `WarmSandbox`."""

    def __init__(self, backend: FakeBackend, sandbox_id: str, template: str) -> None:
        self.id, self.alive = sandbox_id, True
        self._backend, self._template = backend, template

    def fits(self, spec: SandboxSpec) -> bool:
        self._backend.check(spec)
        return spec.template == self._template

    def claim(self, spec: SandboxSpec, meanwhile: Callable[[], None] | None = None) -> FakeSandbox:
        if not self.alive:
            raise LifecycleError(f"{self.id} was claimed or discarded before")
        self.discard()
        if spec.id not in (None, self.id):
            raise InvalidRequest("this warm sandbox does not fit the spec", field="id")
        if meanwhile is not None:
            meanwhile()
        return self._backend.provision(replace(spec, id=self.id))

    def discard(self) -> None:
        self.alive = False
        self._backend.discarded(self)
