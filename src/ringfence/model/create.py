"""A server client's request for a sandbox."""

from __future__ import annotations

from .base import checks, jsonform
from .base.checks import FrozenMap
from .base.ids import check_id
from .base.model import Model
from .base.record import dataclass, field
from .client_session import SessionTimeouts
from .spec import SandboxSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Self

_NAME_MAX = 255


@dataclass(frozen=True, eq=False, repr=False)
class CreateRequest(Model):
    """A sandbox, and how to come by it. In JSON the spec's fields are its own: there is no `spec`.

    Attributes:
        spec: Of a restored one: what differs from the spec that the snapshot was taken under, so far
            as it is given; `given` says which fields are.
        name: For people; need not be unique.
        backend: Its name; empty for the first that can.
        use_pool: Whether a warm sandbox will do.
        snapshot_id: Start with the files of this snapshot.
        timeouts: None takes the server's.
        given: The fields of the spec that the client wrote.
    """

    spec: SandboxSpec = field(default_factory=SandboxSpec)
    name: str = ""
    backend: str = ""
    use_pool: bool = True
    snapshot_id: str | None = None
    timeouts: SessionTimeouts | None = None
    metadata: Mapping[str, str] = field(default_factory=FrozenMap)
    given: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        checks.instance(self.spec, "spec", SandboxSpec)
        if len(checks.text(self.name, "name")) > _NAME_MAX or not self.name.isprintable():
            checks.refuse("name", f"must be up to {_NAME_MAX} printable characters")
        if self.backend:
            checks.name(self.backend, "backend")
        checks.flag(self.use_pool, "use_pool")
        if self.snapshot_id is not None:
            object.__setattr__(self, "snapshot_id", check_id(self.snapshot_id, "snapshot_id"))
        if self.timeouts is not None:
            checks.instance(self.timeouts, "timeouts", SessionTimeouts)
        object.__setattr__(self, "metadata", checks.string_map(self.metadata, "metadata"))
        notes = (self.metadata, self.spec.labels, self.spec.env, self.spec.secrets)
        checks.weigh("metadata", checks.NOTES_BYTES, *notes)

    @property
    def is_secret(self) -> bool:
        """True if the request holds values that must not be stored beyond the sandbox's life."""
        return bool(self.spec.secrets or self.spec.env)

    def to_json(self) -> dict[str, Any]:
        """The JSON object, secrets included: it goes to the server."""
        form = jsonform.dump(self)
        del form["spec"], form["given"]
        spec = self.spec.to_json(with_secrets=True)
        return {**{name: spec[name] for name in self.given or spec}, **form}

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Read `to_json`'s form; `idle_timeout_s` is short for `limits.idle_timeout_s`."""
        given = jsonform.json_object(data, cls.__name__)
        own = {name: given.pop(name) for name in OWN if name in given}
        if "idle_timeout_s" in given:
            limits = jsonform.json_object(given.get("limits", {}), "limits")
            given["limits"] = {**limits, "idle_timeout_s": given.pop("idle_timeout_s")}
        beside = (*OWN, "idle_timeout_s")
        spec = jsonform.widened(SandboxSpec.from_json, given, cls.__name__, beside)
        return cls(spec, given=tuple(given), **jsonform.take(cls, own))


OWN = ("name", "backend", "use_pool", "snapshot_id", "timeouts", "metadata")
"""The fields beside those of the spec."""
