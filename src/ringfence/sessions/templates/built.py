"""The state that sandboxes of a template start from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from ...errors import InvalidRequest
from ...model.base.checks import FrozenMap
from ...model.spec import LIGHT, OS_HARDENED, SandboxSpec
from ...model.template import TemplateRequest
from ...store.templates import BuildRecord, TemplateRecord


@dataclass(frozen=True)
class Built:
    """The state that sandboxes of a template start from.

    Attributes:
        snapshot: Id of its uppermost layer; None where no step made one.
        spec: What they get beside the files.
    """

    template: TemplateRecord
    build: BuildRecord
    snapshot: str | None
    spec: SandboxSpec
    request: TemplateRequest

    def merged(self, spec: SandboxSpec) -> SandboxSpec:
        """The spec of a sandbox of this template; what the client says wins.

        Raises:
            InvalidRequest: It names another root.
        """
        for other in ("image", "python_env"):
            if getattr(spec, other):
                hint = "omit it, or build a template over that image"
                raise InvalidRequest("a template has its own root", field=other, hint=hint)
        own, given = self.spec, {each.target for each in spec.mounts}
        mounts = [each for each in own.mounts if each.target not in given]
        return replace(
            spec,
            template="default",
            image=own.image,
            mounts=(*mounts, *spec.mounts),
            env=FrozenMap({**own.env, **spec.env}),
            workdir=spec.workdir or own.workdir,
            user=spec.user or own.user,
            tier=own.tier if spec.tier == LIGHT else spec.tier,
            profile=own.profile if spec.profile == OS_HARDENED else spec.profile,
        )


class Resolver(Protocol):
    """Finds templates by name; see `catalogue.Templates`."""

    def resolve(self, name: str, client: str | None) -> Built | None:
        """Return the meaning of a name, or id, of a template or build for a client; None: nothing."""
        ...
