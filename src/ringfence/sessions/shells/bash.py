"""A bash tool for agents: commands in, output out, in a sandbox that starts with the first of them."""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING, Protocol

from ...backends.registry import DEFAULT
from ...errors import ImageNotFound
from ...images.store import ImageStore
from ...model.base import checks
from ...model.base.checks import FrozenMap
from ...model.base.helpful import helpful
from ...model.base.model import Model
from ...model.base.record import dataclass, field
from ...model.capabilities import weaker
from ...model.limits import MIB, Limits
from ...model.mount import READ_WRITE, Mount
from ...model.net.network import NetworkPolicy
from ...model.spec import LIGHT, TIERS, SandboxSpec
from ...sandbox.sync import Sandbox
from .shell import PersistentShell

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ...backends.protocol import Backend
    from ...model.execs.exec import ExecResult
    from ..manager import SessionManager


WORKSPACE = "/workspace"
HOST_USERLAND = "default"
"""The image that is no image: the host's own programs, read-only."""

_FIND_SHELL = "command -v bash || command -v sh"


@dataclass(frozen=True, eq=False, repr=False)
class BashConfig(Model):
    """Configuration of a bash tool's sandbox.

    Attributes:
        image: An OCI image, fetched with the first command where it is missing, or `default` for
            the host's own programs, read-only.
        network: Off, or the host's own. For a list of hosts give a policy.
        timeout_s: Of each command without its own; None: no limit.
        user: The user of the commands; None: the image's.
        persistent: One shell for all commands, which then run one after the other: directory,
            variables and functions stay. Otherwise each command has a shell of its own.
        backend: Name of the backend.
    """

    image: str = "alpine:latest"
    memory_mib: int = 512
    cpus: float = 1.0
    network: bool | NetworkPolicy = False
    env: Mapping[str, str] = field(default_factory=FrozenMap)
    timeout_s: float | None = None
    persistent: bool = False
    tier: str = LIGHT
    backend: str = DEFAULT
    user: str | None = None
    allow_degraded: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        checks.text(self.image, "image", empty=False)
        checks.integer(self.memory_mib, "memory_mib", 1, 2**40)
        checks.number(self.cpus, "cpus", 0.001, 8192)
        object.__setattr__(self, "env", checks.env_map(self.env, "env"))
        checks.choice(self.tier, "tier", TIERS, "light or strong")
        if self.timeout_s is not None:
            checks.number(self.timeout_s, "timeout_s", 0.001, 366 * 86_400)
        if not isinstance(self.network, NetworkPolicy):
            checks.flag(self.network, "network")
        checks.flag(self.persistent, "persistent")
        if self.user is not None:
            checks.user(self.user, "user")
        degraded = weaker(self.allow_degraded, "allow_degraded")
        object.__setattr__(self, "allow_degraded", degraded)

    def spec(self, workspace: str | None) -> SandboxSpec:
        """The sandbox for it, with a host directory as its workspace; None: an empty one."""
        network = self.network
        if not isinstance(network, NetworkPolicy):
            network = NetworkPolicy.unrestricted() if network else NetworkPolicy.none()
        return SandboxSpec(
            image=None if self.image == HOST_USERLAND else self.image,
            mounts=(Mount(WORKSPACE, os.path.abspath(workspace) if workspace else "", READ_WRITE),),
            workdir=WORKSPACE,
            limits=Limits(memory_bytes=self.memory_mib * MIB, cpus=self.cpus),
            network=network,
            env=self.env,
            tier=self.tier,
            user=self.user,
            allow_degraded=self.allow_degraded,
        )


@dataclass(frozen=True, eq=False, repr=False)
class BashOutput(Model):
    """Output of a command. `exit_code` is None where the command was killed.

    Attributes:
        timed_out: The command and all processes that it started were killed at the timeout.
        signal: The signal that killed it.
    """

    stdout: str
    stderr: str
    exit_code: int | None
    timed_out: bool = False
    signal: int | None = None

    @classmethod
    def of(cls, result: ExecResult) -> BashOutput:
        return cls(
            result.stdout_text,
            result.stderr_text,
            result.exit_code,
            result.timed_out,
            result.signal,
        )


class BashTool(Protocol):
    """Interface that an agent runtime needs of a bash tool; other implementations are welcome."""

    def exec_command(self, command: str, guest_workspace: str = WORKSPACE) -> BashOutput:
        """Run a command line of bash, starting in `guest_workspace`."""
        ...

    def shutdown(self) -> None:
        """Terminate the sandbox, if any; never raises. The next command starts a new one."""
        ...


class AsyncBashTool(Protocol):
    async def exec_command(self, command: str, guest_workspace: str = WORKSPACE) -> BashOutput: ...

    async def shutdown(self) -> None: ...


@helpful
class SandboxBash:
    """`BashTool` in a sandbox of any backend.

    Nothing starts before the first command; ten first commands at once start one sandbox. A command
    that is not found ends with exit code 127. Who drops the tool ends the sandbox too.

    Args:
        workspace: The host directory at `/workspace`, read-write; None: an empty one, gone with it.
        backend: Instead of `config.backend`, one of the caller's own.
        manager: Take sandboxes from its pool, for client `client_id`, and let it watch over them.
    """

    def __init__(
        self,
        workspace: str | None = None,
        config: BashConfig | None = None,
        *,
        backend: Backend | None = None,
        manager: SessionManager | None = None,
        client_id: str = "bash",
    ) -> None:
        self.config = config or BashConfig()
        self._spec = self.config.spec(workspace)
        chosen = backend if backend is not None else self.config.backend
        self._held = _Held(_maker(self._spec, chosen, manager, client_id), self.config.persistent)
        # At the latest when the tool is dropped, or the interpreter ends.
        self._finalizer = weakref.finalize(self, self._held.end)

    def exec_command(
        self, command: str, guest_workspace: str = WORKSPACE, *, timeout_s: float | None = None
    ) -> BashOutput:
        """Run a command line.

        Args:
            timeout_s: Then the command is killed, with everything that it started.

        Raises:
            InvalidRequest: `guest_workspace` is not there, or the configuration is malformed.
            RingfenceError: No sandbox could be started; the next command tries again.
        """
        checks.text(command, "command")
        timeout = self.config.timeout_s if timeout_s is None else timeout_s
        sandbox, shell, persistent = self.begin()
        if persistent is not None:
            return persistent.run(command, guest_workspace, timeout)
        result = sandbox.exec([shell, "-c", command], cwd=guest_workspace, timeout_s=timeout)
        return BashOutput.of(result)

    def begin(self) -> tuple[Sandbox, str, PersistentShell | None]:
        """Have the sandbox before the first command; with it the shell's name, and the persistent one.

        Raises:
            RingfenceError: No sandbox could be started.
        """
        return self._held.get()

    @property
    def sandbox(self) -> Sandbox | None:
        """The sandbox of the commands; None before the first."""
        return self._held.sandbox

    def shutdown(self) -> None:
        """End the sandbox; never raises, and the next command gets a fresh one."""
        self._held.end()

    def __enter__(self) -> SandboxBash:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.shutdown()


class _Held:
    """The sandbox, apart from the tool, so that dropping the tool can end it."""

    def __init__(self, make: Callable[[], Sandbox], persistent: bool) -> None:
        self._make, self._wants_persistent = make, persistent
        self._lock = threading.Lock()
        self.sandbox: Sandbox | None = None
        self._shell = ""
        self._persistent: PersistentShell | None = None

    def get(self) -> tuple[Sandbox, str, PersistentShell | None]:
        """The sandbox that lives, or a new one; whoever comes meanwhile waits for the same."""
        with self._lock:
            if self.sandbox is not None and self.sandbox.state == "terminated":
                self.sandbox = None  # lost, or ended by its manager
            if self.sandbox is None:
                self._begin()
            assert self.sandbox is not None
            return self.sandbox, self._shell, self._persistent

    def _begin(self) -> None:
        sandbox = self._make()
        try:
            self._shell = sandbox.exec(["sh", "-c", _FIND_SHELL]).stdout_text.split("\n")[0] or "sh"
        except BaseException:
            sandbox.terminate()
            raise
        self._persistent = None
        if self._wants_persistent:
            self._persistent = PersistentShell(sandbox, self._shell)
        self.sandbox = sandbox

    def end(self) -> None:
        with self._lock:
            sandbox, self.sandbox = self.sandbox, None
        if sandbox is not None:
            try:
                sandbox.terminate()
            except Exception:  # noqa: BLE001  "never raises"; the backend ends it with the process
                pass


def _maker(
    spec: SandboxSpec, backend: Backend | str, manager: SessionManager | None, client_id: str
) -> Callable[[], Sandbox]:
    """Make a function that creates the sandbox on first use."""

    def make() -> Sandbox:
        if spec.image is not None:
            _fetch(spec.image)
        if manager is not None:
            return manager.acquire(spec, client_id=client_id).sandbox
        return Sandbox.create(spec, backend=backend)

    return make


def _fetch(image: str) -> None:
    """Have it on this machine.

    Raises:
        ImageNotFound, RegistryError, ImageRefused: It cannot be had.
    """
    try:
        ImageStore().find(image)
    except ImageNotFound:
        from ...images.registry import pull

        pull(image)
