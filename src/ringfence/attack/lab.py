"""Where the attack happens: sandboxes, canaries, and whether the protection under test is on."""

from __future__ import annotations

import os
import time

from ..backends.local.host.mountinfo import masks_of_proc
from ..backends.optional import Replicable
from ..backends.registry import new_backend
from ..model.capabilities import NAMESPACES
from ..model.mount import READ_ONLY, READ_WRITE, Mount
from ..sandbox.sync import Sandbox
from .canaries import PROTECTED, RO, RO_FILE, RW
from .inside import ARCHIVE, archive, command

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ..backends.protocol import Backend
    from ..model.execs.exec import ExecResult
    from ..sandbox.process import Process
    from .canaries import Canaries

_PATIENCE_S = 60.0


class Lab:
    """Environment of the probes that run on the host.

    Attributes:
        protected: False in a control: the probe then leaves the protection out, and must fire.
    """

    def __init__(self, backend: Backend, canaries: Canaries, *, protected: bool = True) -> None:
        self.backend, self.canaries, self.protected = backend, canaries, protected
        self.looked: tuple[list[str], str] | None = None  # see outside/neighbours.py

    @property
    def rootless(self) -> bool:
        return bool(self.canaries.context["rootless"])

    def sandbox(self, **options: Any) -> Sandbox:
        """A new sandbox, to be used as a context manager."""
        return make(self.backend, **options)

    def mounted(self, **options: Any) -> Sandbox:
        """A new sandbox that shows the planted directories."""
        if not self.has_own_paths:
            options["protect"] = PROTECTED
        return self.sandbox(mounts=self.mounts(), **options)

    @property
    def has_own_paths(self) -> bool:
        """Without a mount namespace, a mount is at its source's own path and protects nothing in it."""
        return self.backend.name == "landlock"

    def at(self, target: str, source: str) -> str:
        """Where a directory of the host is seen inside."""
        return source if self.has_own_paths else target

    def mount(self, target: str, source: str, access: str = READ_WRITE) -> Mount:
        """A mount of `source`, at `target` where that can be."""
        free: dict[str, Any] = {"protect": ()} if self.has_own_paths else {}
        return Mount(self.at(target, source), source, access, **free)

    def places(self, sandbox: Sandbox) -> dict[str, Any]:
        """Where probes find the planted directories; their own home for one that cannot be mounted."""
        found = {
            "ro": self.at(RO, self.canaries.ro),
            "rw": self.at(RW, self.canaries.rw),
            "ro_file": self.at(RO_FILE, self.canaries.ro_file),
        }
        targets = list(found.values())
        if self.has_own_paths and not self.rootless:
            found["rw"] = sandbox.exec(["pwd"]).stdout_text.strip()
        return {**found, "targets": targets}

    def init_of(self, sandbox: Sandbox) -> dict[str, int]:
        """The number of PID 1 in the /proc inside, which may be that of this process."""
        return {"init": first_host_pid(sandbox)} if lacking(self.backend) else {}

    def limited(self, *, wider: bool = False) -> Sandbox:
        """A new sandbox that may reach one service of the host, by its name and by its address.

        Args:
            wider: And the canaries beside it, and names that nobody has.
        """
        context = self.canaries.context
        ports = [context["service"]]
        rules = [f"localhost:{context['service']}"]
        if wider:
            ports += [context["other_service"], context["tcp"]["v4"]]
            rules.append("*.example.com")
        return self.sandbox(network=[*rules, *(f"127.0.0.1:{port}" for port in ports)])

    def mounts(self, *, access: str = READ_ONLY) -> tuple[Mount, ...]:
        """The planted directories: one read-only, one writable and protected, and a single file."""
        mounts = [
            self.mount(RO, self.canaries.ro, access),
            self.mount(RO_FILE, self.canaries.ro_file, access),
        ]
        if self.rootless or not self.has_own_paths:
            mounts.append(self.mount(RW, self.canaries.rw))
        return tuple(mounts)

    def other_backend(self, state_dir: str) -> Backend:
        """A backend of one probe's own, whose snapshots are there; close it.

        Raises:
            Unsupported: Such a backend keeps none.
        """
        if isinstance(self.backend, Replicable):
            return self.backend.beside(state_dir)
        return new_backend(self.backend.name, state_dir=state_dir)


def make(backend: Backend, **options: Any) -> Sandbox:
    """A new sandbox of a backend, without what this place lacks and the backend's report declares."""
    if lacks := lacking(backend):
        options["allow_degraded"] = [*options.get("allow_degraded", ()), *lacks]
    return Sandbox.create(backend=backend, **options)


def lacking(backend: Backend) -> list[str]:
    return [NAMESPACES] if backend.name == "native" and masks_of_proc() else []


def run(sandbox: Sandbox, module: str, function: str, *words: str, **options: Any) -> ExecResult:
    """Call a function of the package `probes` inside, and wait for its end."""
    sandbox.files.write(ARCHIVE, archive())
    options.setdefault("timeout_s", _PATIENCE_S)
    return sandbox.exec(command(module, function, *words), **options)


def start(sandbox: Sandbox, module: str, function: str, *words: str, **options: Any) -> Process:
    """Call a function of the package `probes` inside, in the background."""
    sandbox.files.write(ARCHIVE, archive())
    return sandbox.start(command(module, function, *words), **options)


def first_line(process: Process) -> str:
    """Read the first line of a process's output."""
    said: list[bytes] = []

    def whole() -> bool:
        said.append(process.stdout.read())
        return b"\n" in said[-1] or not process.running

    eventually(whole, patience_s=_PATIENCE_S)
    return b"".join(said).decode("utf-8", "replace").partition("\n")[0]


def others(sandbox: Sandbox) -> list[str]:
    """Everything that runs inside, but PID 1 and who asks.

    Raises:
        RuntimeError: It could not be asked.
    """
    result = run(sandbox, "trees", "census")
    if not result.ok:
        raise RuntimeError(f"no census: {result.stderr_text[-200:]}")
    return result.stdout_text.splitlines()


def eventually(condition: Callable[[], bool], *, patience_s: float = 20.0) -> bool:
    """Wait for `condition()`; return whether it became true in time."""
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


# -- processes as the host sees them --------------------------------------------------------------


def first_host_pid(sandbox: Sandbox) -> int:
    """The host's number of PID 1; 0 where the backend has none."""
    return int(getattr(sandbox._inner, "pid", 0))


def host_tree(pid: int) -> list[int]:
    """`pid` and all its descendants, as the host numbers them."""
    found = [pid] if pid else []
    for parent in found:
        try:
            for task in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children", encoding="ascii") as file:
                    found += map(int, file.read().split())
        except OSError:
            continue
    return found


def host_pid(sandbox: Sandbox, inside: int) -> int:
    """The host's number of a process inside; 0 when it is not found."""
    for pid in host_tree(first_host_pid(sandbox)):
        try:
            with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
                lines = [line.split() for line in file if line.startswith("NSpid:")]
        except OSError:
            continue
        if lines and int(lines[0][-1]) == inside:
            return pid
    return 0


def host_processes(marker: str) -> list[int]:
    """Processes of this host whose command line holds `marker`, this one left out."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    if marker.encode() in file.read():
                        found.append(int(name))
            except OSError:
                continue
    return found
