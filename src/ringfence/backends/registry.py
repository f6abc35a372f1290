"""The one place that names concrete backends."""

from __future__ import annotations

import os
import sys
from _thread import allocate_lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..errors import RingfenceError
    from ..launcher.spawn import Started
    from ..model.capabilities import BackendReport
    from ..model.spec import SandboxSpec
    from .protocol import Backend, BackendSandbox

_TIERS = {
    "native": ("light",),
    "gvisor": ("strong",),
    "microvm": ("strong",),
    "docker": ("light",),
    "bubblewrap": ("light",),
    "codex": ("light",),
    "lxc": ("light",),
    "fake": ("light", "strong"),
}
NAMES = tuple(_TIERS)
TEST_DOUBLES = ("fake",)  # they isolate nothing, and are used only where they are asked for by name
_BY_NAME_ONLY = (
    "docker",
    "bubblewrap",
    "codex",
    "lxc",
    *TEST_DOUBLES,
)  # weaker than others of their tier
_lock = allocate_lock()
_shared: dict[tuple[str, int, int], Backend] = {}
_warm: Started | None = None


def hand_over(started: Started) -> None:
    """A zygote that was started before anything else; the native backend made next takes it."""
    global _warm
    _warm = started


def backend_named(name: str) -> Backend:
    """This process's shared backend of that name; it lives as long as the process.

    Raises:
        InvalidRequest: There is none.
    """
    if name not in NAMES:
        from ..errors import InvalidRequest

        raise InvalidRequest(
            f"unknown backend {name!r}", field="backend", hint=f"one of {', '.join(NAMES)}"
        )
    # A forked child must not share its parent's zygote, nor a changed user the old one's.
    key = (name, os.getpid(), os.geteuid())
    with _lock:
        if key not in _shared:
            _shared[key] = _make(name)
            if len(_shared) == 1:
                import atexit

                atexit.register(_close_all, os.getpid())
        return _shared[key]


def name_of(backend: Backend | str | None) -> str | None:
    """Of a backend, or the name that was given instead of one.

    Raises:
        InvalidRequest: It is neither.
    """
    name = backend if isinstance(backend, str | None) else getattr(backend, "name", 0)
    if not isinstance(name, str | None):
        from ..errors import InvalidRequest

        said = f"must be a backend or its name, not {type(backend).__name__}"
        raise InvalidRequest(said, field="backend", hint=f"one of {', '.join(NAMES)}")
    return name


def tier_of(name: str) -> str:
    """The tier that is meant where only a backend is named."""
    return _TIERS.get(name, ("light",))[0]


def provision(spec: SandboxSpec, name: str | None = None) -> BackendSandbox:
    """A sandbox of the backend of that name; of None, of the first of the spec's tier that can.

    Raises:
        InvalidRequest: There is no backend of that name.
        BackendUnavailable: None of that tier works here; the message says of every one why not.
        RingfenceError: As `Backend.provision` does.
    """
    if name is not None:
        return backend_named(name).provision(spec)
    candidates = [each for each in NAMES if spec.tier in _TIERS[each] and each not in _BY_NAME_ONLY]
    if len(candidates) == 1 and spec.tier == "light":
        return backend_named(candidates[0]).provision(spec)
    return _first_that_can(spec, candidates)


def candidates(tier: str) -> list[str]:
    """Backends that may be taken where only a tier is asked for, the best first."""
    return [name for name in NAMES if tier in _TIERS[name] and name not in _BY_NAME_ONLY]


def is_taken_unasked(report: BackendReport) -> bool:
    """Whether one of those that works here is taken although nobody named it; see `provision_unasked`."""
    weak = [each.name for each in report.protections if each.status != "enforced"]
    return report.available and "virtual_machine" not in weak


def backend_of(snapshot_id: str) -> Backend:
    """Who took a snapshot of this user's; where nobody did, the native backend, which says so."""
    taken = {each.id: each.backend for each in backend_named("native").snapshots()}
    return backend_named(taken.get(snapshot_id, "native"))


def _first_that_can(spec: SandboxSpec, names: list[str]) -> BackendSandbox:
    """The attempt is the probe: it costs nothing besides, and what it finds cannot be out of date."""
    from ..errors import BackendUnavailable, IsolationError, NetworkPolicyError, Unsupported

    refusals: dict[str, RingfenceError] = {}
    for name in names:
        try:
            backend = backend_named(name)
            return getattr(backend, "provision_unasked", backend.provision)(spec)
        except (BackendUnavailable, IsolationError, NetworkPolicyError, Unsupported) as exc:
            refusals[name] = exc
    told = {name: exc.message for name, exc in refusals.items()}
    for name in NAMES:
        if name not in TEST_DOUBLES:
            told.setdefault(name, f"it is tier {' and '.join(_TIERS[name])}")
    able = [exc for exc in refusals.values() if not isinstance(exc, BackendUnavailable)]
    if able:
        raise able[0]  # the best that works here says itself what of the request it cannot do
    said = "; ".join(f"{name}: {why}" for name, why in told.items())
    hint = next((exc.hint for exc in refusals.values() if exc.hint), "")
    raise BackendUnavailable(f"no backend of tier {spec.tier} works here: {said}", hint=hint)


def new_backend(name: str, **options: Any) -> Backend:
    """A backend of the caller's own, who closes it; options as its class takes them.

    Raises:
        InvalidRequest: There is none of that name.
    """
    if name == "native":
        from .native.backend import NativeBackend

        return NativeBackend(**options)
    if name == "gvisor":
        from .gvisor.backend import GvisorBackend

        return GvisorBackend(**options)
    if name == "microvm":
        from .microvm.backend import MicrovmBackend

        return MicrovmBackend(**options)
    if name == "docker":
        from .docker.backend import DockerBackend

        return DockerBackend(**options)
    if name in ("bubblewrap", "codex", "lxc"):
        from .command import launchers, lxc
        from .command.backend import CommandBackend

        make = {
            "bubblewrap": launchers.bubblewrap,
            "codex": launchers.codex,
            "lxc": lxc.lxc,
        }
        return CommandBackend(make[name](), **options)
    return _make(name) if name in NAMES else backend_named(name)


def end_what_outlives(state_dir: str) -> bool:
    """End sandboxes that live on without the process that managed them; whether there may be any."""
    from .local.holder import end_of

    return end_of(state_dir)


def close_all() -> None:
    """End every shared backend of this process, all its sandboxes and the egress processes.

    The next use makes new ones.
    """
    with _lock:
        backends = list(_shared.values())
        _shared.clear()
    for backend in backends:
        backend.close()
    egress = sys.modules.get("ringfence.egress.client")
    if egress is not None:
        egress.close_shared()


def _close_all(owner: int) -> None:
    """At the end of the process: nothing is left when it is gone, not a moment later."""
    if os.getpid() == owner:
        close_all()


def _make(name: str) -> Backend:
    if name == "fake":
        from .fake import FakeBackend

        return FakeBackend()
    if name == "gvisor":
        from .gvisor.ahead import is_on

        return new_backend(name, ahead=is_on())
    if name != "native":
        return new_backend(name)
    from .native.backend import NativeBackend
    from .native.zygote import Zygote

    return NativeBackend(zygote=Zygote(_warm) if _warm else None)
