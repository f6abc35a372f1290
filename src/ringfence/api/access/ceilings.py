"""How much callers that are no admins may ask for."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from ...backends.local.host.facts import Host
from ...backends.local.sizes import sizes
from ...errors import Forbidden
from ...model.base import checks, jsonform
from ...model.base.model import Model
from ...model.limits import Limits
from ...model.spec import SandboxSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Self

_YEAR_S = 366 * 86_400
_DEFAULTED = ("memory_bytes", "disk_bytes", "inodes", "pids", "open_files")
_UNBOUNDED = ("wall_time_s", "cpus", "network_bytes")  # without a default of the backends


@dataclass(frozen=True, eq=False, repr=False)
class Ceilings(Model):
    """The most that callers other than admins get. In JSON the limits are its own fields.

    Attributes:
        limits: None bounds nothing. A limit that a request leaves out is its usual default, or the
            ceiling where that is lower.
        ttl_s: The same for `ttl_s`, of a new sandbox and from each `extend` on.
    """

    limits: Limits = field(default_factory=Limits)
    ttl_s: float | None = None

    def __post_init__(self) -> None:
        if self.ttl_s is not None:
            put = object.__setattr__
            put(self, "ttl_s", checks.number(self.ttl_s, "ttl_s", 0.001, _YEAR_S))

    def to_json(self) -> dict[str, Any]:
        """The JSON object of the ceilings that are set."""
        ttl = {} if self.ttl_s is None else {"ttl_s": self.ttl_s}
        return {**self.limits.to_json(), **ttl}

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Read `to_json`'s form."""
        given = jsonform.json_object(data, "most")
        ttl_s = given.pop("ttl_s", None)
        return cls(jsonform.widened(Limits.from_json, given, "most", ("ttl_s",)), ttl_s)

    def apply(self, spec: SandboxSpec) -> SandboxSpec:
        """The spec with what it leaves out bounded as well.

        Raises:
            Forbidden: It asks for more; `field` names the limit.
        """
        limits = spec.limits
        for name in Limits.__match_args__:
            self.check(f"limits.{name}", getattr(limits, name), name)
        self.check("ttl_s", spec.ttl_s, "ttl_s")
        if self == _NONE:
            return spec
        usual = sizes(spec, _host())
        lower = {name: getattr(self.limits, name) for name in (*_DEFAULTED, *_UNBOUNDED)}
        given = {
            name: most
            for name, most in lower.items()
            if most is not None
            and getattr(limits, name) is None
            and (name in _UNBOUNDED or most < getattr(usual, name))
        }
        ttl_s = self.ttl_s if spec.ttl_s is None else spec.ttl_s
        return spec.altered(limits=limits.altered(**given), ttl_s=ttl_s)

    def check(self, name: str, value: float | None, ceiling: str) -> None:
        """Refuse a value above a ceiling.

        Raises:
            Forbidden: `field` is `name`.
        """
        most = self.ttl_s if ceiling == "ttl_s" else getattr(self.limits, ceiling)
        if most is not None and value is not None and value > most:
            raise Forbidden(
                f"{value:g} is more than the server's maximum of {most:g}",
                field=name,
                hint="request less, or ask an admin to raise `most` in the server's configuration",
            )


_NONE = Ceilings()


@cache
def _host() -> Host:
    return Host()
