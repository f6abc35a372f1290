"""How much callers that are no admins may ask for."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from ...backends.local.host.facts import Host
from ...backends.local.sizes import sizes
from ...errors import Forbidden, QuotaExceeded
from ...model.base import checks, jsonform
from ...model.base.model import Model
from ...model.limits import Limits
from ...model.spec import SandboxSpec
from ...sandbox.stream import DEFAULT_OUTPUT_BYTES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, Self

    from ...model.session import Snapshot

_YEAR_S = 366 * 86_400
_OF_SNAPSHOTS = ("snapshots", "snapshot_bytes")
_OWN = ("ttl_s", *_OF_SNAPSHOTS)
_DEFAULTED = ("memory_bytes", "disk_bytes", "inodes", "pids", "open_files")
_UNBOUNDED = ("wall_time_s", "cpus", "network_bytes")  # without a default of the backends
_BESIDE = ("idle_timeout_s", "output_bytes")  # whose defaults are the server's own


@dataclass(frozen=True, eq=False, repr=False)
class Ceilings(Model):
    """The most that callers other than admins get. In JSON the limits are its own fields.

    Attributes:
        limits: None bounds nothing. A limit that a request leaves out is its usual default, or the
            ceiling where that is lower.
        ttl_s: The same for `ttl_s`, of a new sandbox and from each `extend` on.
        snapshots: Snapshots that a client may keep.
        snapshot_bytes: Size of a client's snapshots at which it takes no further one.
    """

    limits: Limits = field(default_factory=Limits)
    ttl_s: float | None = None
    snapshots: int | None = None
    snapshot_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.ttl_s is not None:
            put = object.__setattr__
            put(self, "ttl_s", checks.number(self.ttl_s, "ttl_s", 0.001, _YEAR_S))
        for name in _OF_SNAPSHOTS:
            if (value := getattr(self, name)) is not None:
                checks.integer(value, name, 0, 1 << 62)

    def to_json(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in _OWN if getattr(self, name) is not None}
        return {**self.limits.to_json(), **own}

    @classmethod
    def from_json(cls, data: object) -> Self:
        given = jsonform.json_object(data, "most")
        own = {name: given.pop(name, None) for name in _OWN}
        return cls(jsonform.widened(Limits.from_json, given, "most", _OWN), **own)

    def apply(self, spec: SandboxSpec, idle_s: float | None = None) -> SandboxSpec:
        """The spec with what it leaves out bounded as well.

        Args:
            idle_s: The default of `idle_timeout_s`; None is for ever.

        Raises:
            Forbidden: It asks for more; `field` names the limit.
        """
        limits = spec.limits
        for name in Limits.__match_args__:
            self.check(f"limits.{name}", getattr(limits, name), name)
        self.check("ttl_s", spec.ttl_s, "ttl_s")
        if self.limits == _NONE.limits and self.ttl_s is None:
            return spec
        backends = sizes(spec, _host())
        usual = {name: getattr(backends, name) for name in _DEFAULTED}
        usual |= {"output_bytes": DEFAULT_OUTPUT_BYTES}
        usual |= {} if idle_s is None else {"idle_timeout_s": idle_s}
        lower = {name: getattr(self.limits, name) for name in (*_DEFAULTED, *_UNBOUNDED, *_BESIDE)}
        given = {
            name: most
            for name, most in lower.items()
            if most is not None
            and getattr(limits, name) is None
            and (name not in usual or most < usual[name])
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

    def check_snapshots(self, every: Callable[[], Sequence[Snapshot]]) -> None:
        """Refuse one more snapshot than a client may keep.

        Args:
            every: Lists the client's; not called where nothing is bounded.

        Raises:
            QuotaExceeded: It keeps as many; some taken at the same time may pass.
        """
        if self.snapshots is None and self.snapshot_bytes is None:
            return
        kept = every()
        used = len(kept), sum(each.size_bytes for each in kept)
        for name, value in zip(_OF_SNAPSHOTS, used, strict=True):
            most = getattr(self, name)
            if most is not None and value >= most:
                raise QuotaExceeded(
                    f"this client keeps {used[0]} snapshots of {used[1]} bytes, of at most {most}",
                    field=name,
                    hint="delete a snapshot, or ask an admin to raise `most` in the server's configuration",
                )


_NONE = Ceilings()


@cache
def _host() -> Host:
    return Host()
