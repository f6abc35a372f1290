"""Grants of the execution service: defaults, maxima, network, paths."""

from __future__ import annotations

from ..base import checks, jsonform
from ..base.checks import FrozenMap
from ..base.model import Model
from ..base.record import dataclass, field
from ..capabilities import weaker
from ..mount import Mount
from ..net.network import NetworkPolicy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Self


_DAY_S = 86_400.0
_YEAR_S = 366 * _DAY_S
_MOST_MIB = 2**26  # as `Limits.memory_bytes`
_WEAKER = ("memory_limit", "cpu_limit", "pids_limit")
VM_KERNEL = "vm_kernel"
_STRONG = ("backend", "memory_mb", "cpus", VM_KERNEL)
_DEFAULT_AND_MAX = (
    ("default_timeout_secs", "max_timeout_secs"),
    ("default_memory_mb", "max_memory_mb"),
    ("default_cpus", "max_cpus"),
)


@dataclass(frozen=True, eq=False, repr=False)
class ExecutionConfig(Model):
    """The rules of the execution service; valid as a whole or refused as a whole.

    Attributes:
        default_memory_mb, max_memory_mb: MiB.
        default_cpus, max_cpus: 1.0 is one core.
        max_processes: Of each execution, threads counted.
        network_enabled: Whether `network_policy` holds; without, nothing can be reached.
        network_policy: Public addresses, unless the policy says otherwise; never the host's own
            or private ones that no rule names.
        work_dir: Where commands start, absolute inside.
        allowed_paths: Host paths that commands see under the same path: `PATH` read-only,
            `PATH:rw` writable.
        denied_paths: Neither read nor written inside, even where they do not exist yet.
        strong_runtime: Settings of tier strong: `backend` names the one to use; `memory_mb` and
            `cpus` are its defaults instead of those above; `vm_kernel` is the directory of the
            guest kernel that microVMs boot.
        seccomp: A system-call policy of one's own, as `SeccompPolicy.from_json` reads it; None is
            the default one.
        allow_degraded: Limits that may hold less than asked on a host without cgroups; every
            result says which did.
        max_concurrent: Executions that run at once; more wait as `pending`, up to `max_pending`.
        max_output_bytes: Kept of each of stdout and stderr, head and tail; the rest is counted.
        keep_results_secs: How long results can be asked for.
        plain_results: Whether results over HTTP have `error` as a text and -1 for no exit code,
            unless a request says `plain`; see `ExecutionResult.to_json`.
    """

    default_timeout_secs: float = 30.0
    max_timeout_secs: float = 300.0
    default_memory_mb: int = 512
    max_memory_mb: int = 4096
    default_cpus: float = 1.0
    max_cpus: float = 4.0
    max_processes: int = 64
    network_enabled: bool = False
    network_policy: NetworkPolicy = field(default_factory=lambda: NetworkPolicy(learn=True))
    work_dir: str = "/home/sandbox"
    allowed_paths: tuple[str, ...] = ()
    denied_paths: tuple[str, ...] = ()
    strong_runtime: Mapping[str, str] = field(default_factory=FrozenMap)
    seccomp: Mapping[str, Any] | None = None
    allow_degraded: tuple[str, ...] = _WEAKER
    max_concurrent: int = 16
    max_pending: int = 1000
    max_output_bytes: int = 1 << 20
    keep_results_secs: float = _DAY_S
    plain_results: bool = False

    def __post_init__(self) -> None:
        self._check_numbers()
        for default, most in _DEFAULT_AND_MAX:
            if getattr(self, default) > getattr(self, most):
                checks.refuse(default, f"{getattr(self, default):g} is more than {most}")
        checks.flag(self.network_enabled, "network_enabled")
        checks.flag(self.plain_results, "plain_results")
        checks.instance(self.network_policy, "network_policy", NetworkPolicy)
        if self.network_policy.is_none:
            checks.refuse(
                "network_policy", "allows no host", "use network_enabled to turn the network off"
            )
        self._put("work_dir", checks.absolute_path(self.work_dir, "work_dir"))
        self._check_paths()
        self._check_strong_runtime()
        self._put("allow_degraded", weaker(self.allow_degraded, "allow_degraded"))
        if self.seccomp is not None:
            jsonform.json_object(self.seccomp, "seccomp")

    def _put(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_strong_runtime(self) -> None:
        name = "strong_runtime"
        given: Any = self.strong_runtime
        if hasattr(given, "items"):  # a number is as good as its text
            given = {k: str(v) if type(v) in (int, float) else v for k, v in given.items()}
        self._put(name, checks.string_map(given, name))
        for key, value in self.strong_runtime.items():
            at = f"{name}.{key}"
            checks.choice(key, at, _STRONG, f"one of {', '.join(_STRONG)}")
            if key == VM_KERNEL:
                checks.absolute_path(value, at)
        for key, low in (("memory_mb", 1.0), ("cpus", 0.001)):
            number, most = self.strong_default(key), getattr(self, f"max_{key}")
            checks.number(number, f"{name}.{key}", low, most)
            if key == "memory_mb" and number != int(number):
                checks.refuse(f"{name}.{key}", "must be a whole number of MiB")

    def strong_default(self, name: str) -> float:
        """`memory_mb` or `cpus` of an execution of tier strong that says nothing of it.

        Raises:
            InvalidRequest: It is not a number.
        """
        text = self.strong_runtime.get(name)
        if text is None:
            return float(getattr(self, f"default_{name}"))
        try:
            return float(text)
        except ValueError:
            checks.refuse(f"strong_runtime.{name}", f"must be a number, not {text!r}")

    def _check_numbers(self) -> None:
        for name, high in (("timeout_secs", _YEAR_S), ("cpus", 8192.0)):
            for which in ("default", "max"):
                key = f"{which}_{name}"
                self._put(key, checks.number(getattr(self, key), key, 0.001, high))
        for which in ("default", "max"):
            checks.integer(getattr(self, f"{which}_memory_mb"), f"{which}_memory_mb", 1, _MOST_MIB)
        checks.integer(self.max_processes, "max_processes", 1, 4_194_304)
        checks.integer(self.max_concurrent, "max_concurrent", 1, 10_000)
        checks.integer(self.max_pending, "max_pending", 0, 1_000_000)
        checks.integer(self.max_output_bytes, "max_output_bytes", 0, 2**30)
        checks.number(self.keep_results_secs, "keep_results_secs", 0.0, _YEAR_S)

    def _check_paths(self) -> None:
        denied = enumerate(checks.items(self.denied_paths, "denied_paths"))
        self._put(
            "denied_paths",
            tuple(checks.absolute_path(path, f"denied_paths[{i}]") for i, path in denied),
        )
        for i, path in enumerate(self.denied_paths):
            if is_at_or_below(self.work_dir, path):
                what = f"{path} lies above work_dir, {self.work_dir}: no command could start"
                checks.refuse(f"denied_paths[{i}]", what, 'set work_dir to another, as "/tmp"')
        allowed = checks.texts(self.allowed_paths, "allowed_paths")
        for i, text in enumerate(allowed):
            source, mount = f"allowed_paths[{i}]", mount_of(text, f"allowed_paths[{i}]")
            for path in self.denied_paths:
                if is_at_or_below(mount.target, path):
                    checks.refuse(source, f"{mount.target} lies in the denied path {path}")
        self._put("allowed_paths", allowed)

    @property
    def mounts(self) -> tuple[Mount, ...]:
        """The allowed paths as commands see them."""
        return tuple(mount_of(text, "allowed_paths") for text in self.allowed_paths)

    @property
    def network(self) -> NetworkPolicy:
        """The network policy of a command."""
        return self.network_policy if self.network_enabled else NetworkPolicy.none()

    def changed(self, patch: object) -> ExecutionConfig:
        """This config with the keys of a JSON object replaced.

        Raises:
            InvalidRequest: An unknown key, or the whole would not be valid.
        """
        given = jsonform.json_object(patch, "a change of the config")
        return ExecutionConfig.from_json({**self.to_json(), **given})

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Read `to_json`'s form; keys that are left out have their defaults."""
        return super().from_json(data)


def mount_of(text: str, field: str) -> Mount:
    """`PATH`, `PATH:ro` or `PATH:rw`: a host path shown under its own name."""
    path, colon, access = text.rpartition(":")
    if not colon or access not in ("ro", "rw"):
        path, access = text, "ro"
    path = checks.absolute_path(path, field)
    mount: Mount = jsonform.within(field, Mount.parse, f"{path}:{path}:{access}")
    return mount


def is_at_or_below(path: str, above: str) -> bool:
    """Return whether the normalised absolute `path` is `above` or below it."""
    return path == above or path.startswith(above.rstrip("/") + "/")
