"""How a session manager is set up."""

from __future__ import annotations

from ..model.base import checks, jsonform
from ..model.base.model import Model
from ..model.base.record import dataclass, field
from ..model.client_session import SessionTimeouts
from ..model.spec import SandboxSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


DEFAULT = "default"
_DAY_S = 86_400.0
_MOST = 100_000


@dataclass(frozen=True, eq=False, repr=False)
class PoolConfig(Model):
    """Configuration of the pool.

    Attributes:
        min_warm: Of each warm profile, made in the background.
        max_warm: Of all together, returned ones included.
        warm_ttl_s: A warm sandbox unclaimed for so long is replaced.
        warm_profiles: Names from `profiles`; `default` is the default spec.
        profiles: By name, the spec of a warm sandbox. Only fields that cannot be set at the claim
            matter: user, template, profile, the host's network, the Python environment.
    """

    enabled: bool = True
    min_warm: int = 2
    max_warm: int = 10
    warm_ttl_s: float = 600.0
    warm_profiles: tuple[str, ...] = (DEFAULT,)
    profiles: Mapping[str, SandboxSpec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.flag(self.enabled, "enabled")
        checks.integer(self.min_warm, "min_warm", 0, _MOST)
        checks.integer(self.max_warm, "max_warm", 0, _MOST)
        checks.number(self.warm_ttl_s, "warm_ttl_s", 0.001, 366 * _DAY_S)
        object.__setattr__(self, "profiles", {DEFAULT: SandboxSpec(), **self.profiles})
        names = checks.texts(self.warm_profiles, "warm_profiles")
        object.__setattr__(self, "warm_profiles", tuple(dict.fromkeys(names)))
        for i, name in enumerate(self.warm_profiles):
            if name not in self.profiles:
                known = ", ".join(self.profiles)
                checks.refuse(f"warm_profiles[{i}]", f"no profile {name!r}", f"one of {known}")
        if self.min_warm * len(self.warm_profiles) > self.max_warm:
            most = self.max_warm // len(self.warm_profiles)
            what = "times the number of warm profiles exceeds max_warm"
            checks.refuse("min_warm", what, f"at most {most}, or raise max_warm")

    def to_json(self) -> dict[str, Any]:
        specs = {name: spec.to_json() for name, spec in self.profiles.items()}
        return {**jsonform.dump(self), "profiles": specs}

    @classmethod
    def _nested(cls) -> jsonform.Readers:
        return {"profiles": _read_profiles}


def _read_profiles(value: object) -> dict[str, SandboxSpec]:
    given = jsonform.json_object(value, "profiles")
    return {
        checks.name(name, "name"): jsonform.within(name, SandboxSpec.from_json, spec)
        for name, spec in given.items()
    }


@dataclass(frozen=True, eq=False, repr=False)
class TemplateBounds(Model):
    """Bounds of the templates that clients build.

    Attributes:
        templates: Of each client.
        bytes: Of layers and uploads of each client, together.
        upload_bytes: Of one upload.
        builds: At once, of all clients.
        builds_of_client: At once, of each.
        waiting_of_client: Builds of each that wait for their turn.
        build_s: Time of one build.
        output_bytes: Of the log of one build; a step that prints more fails.
        keep_s: Layers and uploads that no template needs are kept for so long after their last use.
        index_url: Package index of `pip_install`; empty for $PIP_INDEX_URL, else PyPI.
    """

    templates: int = 200
    bytes: int = 20 << 30
    upload_bytes: int = 1 << 30
    builds: int = 4
    builds_of_client: int = 2
    waiting_of_client: int = 20
    build_s: float = 3_600.0
    output_bytes: int = 4 << 20
    keep_s: float = 7 * _DAY_S
    index_url: str = ""

    def __post_init__(self) -> None:
        for name in ("templates", "builds", "builds_of_client", "waiting_of_client"):
            checks.integer(getattr(self, name), name, 0, _MOST)
        for name in ("bytes", "upload_bytes", "output_bytes"):
            checks.integer(getattr(self, name), name, 0, 1 << 62)
        checks.number(self.build_s, "build_s", 0.001, _DAY_S)
        checks.number(self.keep_s, "keep_s", 0.0, 366 * _DAY_S)
        checks.text(self.index_url, "index_url")


@dataclass(frozen=True, eq=False, repr=False)
class ManagerConfig(Model):
    """The bounds a manager keeps to.

    Attributes:
        max_sandboxes: Alive at once, warm ones included; a warm one makes room for a client's.
        max_of_client: The same for each client; None: no more than all together.
        timeouts: Of sessions that bring none of their own.
        cleanup_interval_s: At least so often everything is looked at. What expires does so at its
            own time, not at the next interval.
        max_waiting: Acquires that may wait for room; the next one is refused at once.
        wait_s: How long each waits at most.
        keep_ended_s: How long ended sessions can still be looked up.
        templates: Bounds of the templates that clients build.
    """

    max_sandboxes: int = 100
    timeouts: SessionTimeouts = field(default_factory=SessionTimeouts)
    cleanup_interval_s: float = 60.0
    pool: PoolConfig = field(default_factory=PoolConfig)
    max_waiting: int = 0
    wait_s: float = 10.0
    keep_ended_s: float = _DAY_S
    max_of_client: int | None = None
    templates: TemplateBounds = field(default_factory=TemplateBounds)

    def __post_init__(self) -> None:
        checks.instance(self.templates, "templates", TemplateBounds)
        checks.integer(self.max_sandboxes, "max_sandboxes", 1, _MOST)
        if self.max_of_client is not None:
            checks.integer(self.max_of_client, "max_of_client", 1, _MOST)
        checks.instance(self.timeouts, "timeouts", SessionTimeouts)
        checks.number(self.cleanup_interval_s, "cleanup_interval_s", 0.01, _DAY_S)
        checks.instance(self.pool, "pool", PoolConfig)
        checks.integer(self.max_waiting, "max_waiting", 0, _MOST)
        checks.number(self.wait_s, "wait_s", 0.0, _DAY_S)
        checks.number(self.keep_ended_s, "keep_ended_s", 0.0, 366 * _DAY_S)
