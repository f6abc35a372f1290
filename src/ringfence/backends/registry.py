"""The one place that names concrete backends."""

from __future__ import annotations

import os
import sys
from _thread import RLock
from importlib import import_module

from ..model.capabilities import NAMESPACES
from .optional import TierDefault

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from ..errors import RingfenceError
    from ..launcher.spawn import Started
    from ..model.capabilities import BackendReport
    from ..model.spec import SandboxSpec
    from .command.launchers import Launcher
    from .native.zygote import Zygote
    from .protocol import Backend, BackendSandbox
    from .settings import Settings

_LAUNCHED, _STREAMED = "command.backend:CommandBackend", "command.stream:StreamBackend"
_CLASSES = {
    "native": "native.backend:NativeBackend",
    "gvisor": "gvisor.backend:GvisorBackend",
    "microvm": "microvm.backend:MicrovmBackend",
    "docker": "docker.backend:DockerBackend",
    "landlock": "landlock.backend:LandlockBackend",
    "bubblewrap": _LAUNCHED,
    "codex": _LAUNCHED,
    "lxc": _LAUNCHED,
}
NAMES = tuple(_CLASSES)
DEFAULT = "native"
# Taken where only a tier is asked for, the best first; every other backend is weaker than these.
_BY_TIER = {"light": ("native",), "strong": ("gvisor", "microvm")}
_lock = RLock()  # a plug-in may ask for another backend while it is made
_shared: dict[tuple[str, int, int], Backend] = {}
_warm: Started | None = None
_settings: Settings | None = None


def hand_over(started: Started) -> None:
    """A zygote that was started before anything else; the native backend made next takes it."""
    global _warm
    _warm = started


def backend_named(name: str, *, is_about_to_provision: bool = False) -> Backend:
    """This process's shared backend of that name; it lives as long as the process.

    Args:
        is_about_to_provision: A process that it needs for its first sandbox boots while its modules are read.

    Raises:
        InvalidRequest: There is none.
    """
    # A forked child must not share its parent's zygote, nor a changed user the old one's.
    key = (name, os.getpid(), os.geteuid())
    with _lock:
        if key not in _shared:
            _shared[key] = _make(name, is_about_to_provision)
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
        raise InvalidRequest(said, field="backend", hint=_meant(""))
    return name


def _meant(name: str) -> str:
    """Name the backend that a misspelt name means, else all of them."""
    from ..model.mistakes import meant

    return meant(name, names(), of="backend")


def tier_of(name: str) -> str:
    """The tier that is meant where only a backend is named."""
    return _tiers_of(name)[0] if name in NAMES or name in names() else "light"


def _tiers_of(name: str) -> tuple[str, ...]:
    declared: tuple[str, ...] = getattr(_class_of(name), "tiers", ())
    return declared or backend_named(name).tiers  # what a function makes is known when it is made


def _class_of(name: str) -> Any:
    """The class of a backend, or the function that makes it; None where a package cannot be imported."""
    if place := _CLASSES.get(name):
        return _loaded(place)
    if own := settings().found.get(name):
        from .settings import LauncherSettings

        return _loaded(_LAUNCHED if isinstance(own, LauncherSettings) else _STREAMED)
    from . import plugins
    from .command.launchers import Launcher

    point = plugins.found().get(name)
    found = plugins.loaded(point) if point is not None else None
    return _loaded(_LAUNCHED) if isinstance(found, Launcher) else found


def _loaded(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(f".{module}", __package__), name)


def names() -> tuple[str, ...]:
    """Every backend that can be asked for: ours, those of `backends.toml` and of installed packages."""
    return (*NAMES, *_own_names())


def settings() -> Settings:
    """Read `backends.toml`, once."""
    global _settings
    if _settings is None:
        from .settings import Settings

        _settings = Settings()
    return _settings


def use_settings(path: str) -> None:
    """Read another file than this user's.

    Raises:
        InvalidRequest: It is not there, or cannot be read as a whole.
    """
    global _settings
    from .settings import Settings

    _settings = Settings(path, required=True)


def check_settings() -> None:
    """Raise what is wrong with `backends.toml` as a whole.

    Raises:
        InvalidRequest: It is not there, or cannot be read.
    """
    from .settings import WHOLE

    if isinstance(wrong := settings().found.get(WHOLE), Exception):
        raise wrong


def _options_of(name: str) -> tuple[str, ...]:
    made_by = _class_of(name)
    function = getattr(made_by, "__init__", None) if isinstance(made_by, type) else made_by
    code = getattr(function, "__code__", None)  # `inspect` takes longer than a run
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if code else ()


def provision(spec: SandboxSpec, name: str | None = None) -> BackendSandbox:
    """A sandbox of the backend of that name; of None, of the first of the spec's tier that can.

    Raises:
        InvalidRequest: There is no backend of that name.
        BackendUnavailable: None of that tier works here; the message says of every one why not.
        RingfenceError: As `Backend.provision` does.
    """
    if name is not None:
        return backend_named(name, is_about_to_provision=True).provision(spec)
    able = candidates(spec.tier)
    if spec.tier == "light" and NAMESPACES in spec.allow_degraded:
        able = (*able, "landlock")
    if len(able) == 1:
        return backend_named(*able, is_about_to_provision=True).provision(spec)
    return _first_that_can(spec, able)


def candidates(tier: str) -> tuple[str, ...]:
    """Backends that may be taken where only a tier is asked for, the best first."""
    return _BY_TIER[tier]


def is_taken_unasked(report: BackendReport) -> bool:
    """Return whether a backend that works here may be chosen by default; see `provision_unasked`."""
    weak = [each.name for each in report.protections if each.status != "enforced"]
    if report.backend == DEFAULT and NAMESPACES in weak:
        return False
    return report.available and "virtual_machine" not in weak


def backend_of(snapshot_id: str) -> Backend:
    """Find the backend of this user's snapshot; for an unknown id the native one, which raises."""
    taken = {each.id: each.backend for each in backend_named(DEFAULT).snapshots()}
    return backend_named(taken.get(snapshot_id, DEFAULT))


def _first_that_can(spec: SandboxSpec, names: tuple[str, ...]) -> BackendSandbox:
    """The attempt is the probe: it costs nothing besides, and what it finds cannot be out of date."""
    from ..errors import BackendUnavailable, IsolationError, NetworkPolicyError, Unsupported
    from .local.host.mountinfo import masks_of_proc

    refusals: dict[str, RingfenceError] = {}
    for name in names:
        try:
            backend = backend_named(name)
            if isinstance(backend, TierDefault):
                return backend.provision_unasked(spec)
            made = backend.provision(spec)
            if name == "landlock":
                mapped = [f"{each} here" for each in mapped_mounts(made)]
                what = "a sandbox without namespaces, by the backend landlock"
                _tell_lack("; ".join([what, *mapped]), refusals)
            elif name == DEFAULT and (masks := masks_of_proc()):
                _tell_lack(
                    f"a sandbox with the caller's /proc, which is masked: {', '.join(masks[:4])}"
                )
            return made
        except (BackendUnavailable, IsolationError, NetworkPolicyError, Unsupported) as exc:
            refusals[name] = exc
    told = {name: exc.message for name, exc in refusals.items()}
    for name in NAMES:
        told.setdefault(name, f"it is tier {' and '.join(_tiers_of(name))}")
    able = [exc for exc in refusals.values() if not isinstance(exc, BackendUnavailable)]
    if able:
        raise able[0]  # the best that works here says itself what of the request it cannot do
    said = "; ".join(f"{name}: {why}" for name, why in told.items())
    hint = next((exc.hint for exc in refusals.values() if exc.hint), "")
    raise BackendUnavailable(f"no backend of tier {spec.tier} works here: {said}", hint=hint)


def mapped_mounts(sandbox: BackendSandbox) -> list[str]:
    """Say where mounts are that programs find by an argument or the working directory, not by their target."""
    if sandbox.session.backend != "landlock":
        return []
    from .local.mounts.template import HOME

    return [
        f"{each.target} is {each.host_path}"
        for each in sandbox.session.mounts
        if each.host_path
        and os.path.realpath(each.target) != os.path.realpath(each.host_path)
        and not each.target.startswith(f"{HOME}/")
    ]


def _tell_lack(what: str, refusals: Mapping[str, RingfenceError] | None = None) -> None:
    import warnings

    why = [exc.message for exc in (refusals or {}).values()]
    warnings.warn("; ".join([what, *why]), stacklevel=6)


def _own_names() -> tuple[str, ...]:
    from . import plugins

    found = dict.fromkeys((*settings().found, *plugins.found()))
    return tuple(name for name in found if name not in NAMES)


def _make_own(name: str, **options: Any) -> Backend:
    """Make a backend of `backends.toml`, or else of an installed package.

    Raises:
        InvalidRequest: No backend has that name.
    """
    from ..errors import RingfenceError
    from . import plugins
    from .settings import WHOLE

    own = settings().found.get(name)
    if isinstance(own, RingfenceError):
        return plugins.UnusableBackend(name, own)
    if own is not None:
        return _described(name, own, options)
    if point := plugins.found().get(name):
        return plugins.make(point, options, lambda made: _adapt(made, options))
    if isinstance(whole := settings().found.get(WHOLE), RingfenceError):
        raise whole
    raise _unknown(name)


def _unknown(name: str) -> Exception:
    from ..errors import InvalidRequest

    hint = f"{_meant(name)}; describe your own backend in {settings().path}"
    return InvalidRequest(f"unknown backend {name!r}", field="backend", hint=hint)


def check_names(wanted: Iterable[str]) -> None:
    """Refuse names that no backend has, before anything is made.

    Raises:
        InvalidRequest: One is unknown.
    """
    for name in wanted:
        if name not in NAMES and name not in _own_names():
            _make_own(name)


def _described(name: str, own: Any, options: dict[str, Any]) -> Backend:
    from .settings import LauncherSettings, StreamSettings

    parts = {each: getattr(own, each) for each in own.__match_args__}
    if isinstance(own, LauncherSettings):
        from .command.backend import CommandBackend
        from .command.launchers import Launcher

        return CommandBackend(Launcher(name=name, **parts), **options)
    from .command import far
    from .command.stream import StreamBackend

    parts["there"] = parts.pop("launcher")
    if isinstance(own, StreamSettings):
        return StreamBackend(far.FarLauncher(name=name, **parts), **options)
    return StreamBackend(far.ssh(name, **parts), **options)


def _adapt(made: Any, options: dict[str, Any]) -> Any:
    """A backend of what a plug-in brings, which may be a launcher."""
    from .command.launchers import Launcher

    if not isinstance(made, Launcher):
        return made
    from .command.backend import CommandBackend

    return CommandBackend(made, **options)


def new_backend(name: str, **options: Any) -> Backend:
    """A backend of the caller's own, who closes it; with those of the options that its class takes.

    Raises:
        InvalidRequest: There is none of that name.
    """
    if options:
        options = {each: options[each] for each in _options_of(name) if each in options}
    if name not in NAMES:
        return _make_own(name, **options)
    made: Backend = _class_of(name)(*_launchers(name), **options)
    return made


def _launchers(name: str) -> tuple[Launcher, ...]:
    """The launcher of a command backend that comes along."""
    if _CLASSES[name] != _LAUNCHED:
        return ()
    from .command import codex, launchers, lxc

    if name == "bubblewrap":
        return (launchers.bubblewrap(),)
    return (
        lxc.lxc(settings().of(name).executable) if name == "lxc" else codex.of(settings().of(name)),
    )


def end_what_outlives(state_dir: str) -> bool:
    """End sandboxes that live on without the process that managed them; whether there may be any."""
    from .local.fd_store import end_of

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
    egress = sys.modules.get("ringfence.egress.host.client")
    if egress is not None:
        egress.close_shared()


def _close_all(owner: int) -> None:
    """At the end of the process: nothing is left when it is gone, not a moment later."""
    if os.getpid() == owner:
        close_all()


def _make(name: str, is_about_to_provision: bool) -> Backend:
    options: dict[str, Any] = {}
    if name == "gvisor":
        from .gvisor.ahead import is_on

        options["prebuilt"] = is_on()
    elif name == "native" and _warm is not None:
        # `ringfence run` creates one sandbox.
        options["zygote"], options["prebuilt_s"] = _zygote_of(_warm), 0.0
    elif name == "native" and is_about_to_provision:
        from ..launcher.spawn import LEAST_FILES, spawn

        try:
            if os.sysconf("SC_OPEN_MAX") >= LEAST_FILES:
                options["zygote"] = _zygote_of(spawn())
        except OSError:
            pass  # the backend tries it again, and says what is the matter
    # These options are known: reading a signature takes milliseconds, which every `run` would pay.
    made: Backend = _class_of(name)(**options) if options else new_backend(name)
    return made


def _zygote_of(started: Started) -> Zygote:
    """Wrap one that boots on another core while this one reads the modules of the backend."""
    from .native.zygote import Zygote

    return Zygote(started)
