"""`Backend`: Ringfence below Ray's own sandbox API, its REST routes and its Modal-compatible facade.

    ray.init(runtime_env=ringfence.ray.backend.runtime_env(tier="light"))
    sandbox = ray.experimental.sandbox.create(image=HOST, cpu=1)

Ray 2.60 names its gVisor backend in `SandboxRuntime` and offers no setting: `install` puts this one in
its place in each worker process of the job. `python -m ringfence.ray.backend` is Ray's facade over it.

Source: ray.experimental.sandbox (2.60).
"""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import dataclass

import ray
import ray.experimental.sandbox.runtime as ray_runtime
from ray.experimental.sandbox.backend.base import BaseSandboxBackend, ExecResult, SandboxStatus
from ray.experimental.sandbox.config import SandboxConfig, parse_memory_bytes
from ray.experimental.sandbox.exceptions import (
    SandboxCreationError,
    SandboxError,
    SandboxExecError,
    SandboxNotFoundError,
    SandboxTimeoutError,
)

from ..errors import ImageNotFound, RingfenceError
from ..images.store import ImageStore
from ..sandbox import Sandbox

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

HOST = "ringfence/host"
"""The image name that stands for none: the node's own programs, read-only."""
SETTING = "RINGFENCE_RAY"
"""The variable that brings `runtime_env`'s options to worker processes."""


@dataclass(frozen=True)
class Options:
    """Options of the backend, alike on all nodes.

    Attributes:
        tier: `light` or `strong`; empty is the default of the node.
        backend: Name of a Ringfence backend; empty is the best of the tier.
        public: What `network="public"` reaches, as rules of a network policy. Without rules it is refused.
        allow_degraded: Protections and limits that may be weaker on nodes that lack something.
        pull: Whether an image that a node lacks is fetched from its registry.
    """

    tier: str = ""
    backend: str = ""
    public: Sequence[str] = ()
    allow_degraded: Sequence[str] = ()
    pull: bool = True

    @classmethod
    def of_environment(cls) -> Options:
        """Read the options of this process."""
        return cls(**json.loads(os.environ.get(SETTING, "{}")))


def runtime_env(**options: Any) -> dict[str, Any]:
    """Return the `runtime_env` for `ray.init` with which a job's sandboxes are Ringfence's.

    Args:
        options: Fields of `Options`.
    """
    Options(**options)
    return {
        "worker_process_setup_hook": "ringfence.ray.backend.install",
        "env_vars": {SETTING: json.dumps(options)},
    }


def install() -> None:
    """Let Ray's sandboxes of this process be Ringfence's."""
    ray_runtime.GVisorSandboxBackend = Backend
    ray_runtime.ImageManager = Images


class Images:
    """Ray's image manager over Ringfence's images: they are shared with all other programs of the node.

    Args:
        options: None reads those of `runtime_env`.
    """

    def __init__(self, options: Options | None = None) -> None:
        self._options = options or Options.of_environment()

    def pull_image(self, image: str, timeout_seconds: float = 600.0) -> str:  # noqa: ARG002  Ray's
        """Fetch an image that this node lacks; returns its name.

        Args:
            image: Its name, or `HOST` for none.
            timeout_seconds: Unused: each step of a download has a bound of its own.
        """
        if image == HOST:
            return image
        try:
            ImageStore().find(image)
        except ImageNotFound as exc:
            if not self._options.pull:
                raise SandboxCreationError(str(exc)) from exc
            from ..images.registry import pull

            try:
                pull(image)
            except RingfenceError as failed:
                raise SandboxCreationError(str(failed)) from failed
        except RingfenceError as exc:
            raise SandboxCreationError(str(exc)) from exc
        return image

    def release_image(self, image: str, instance_id: str) -> None:
        """Do nothing: a sandbox holds its image itself."""


class Backend(BaseSandboxBackend):
    """Ray's sandboxes, made by Ringfence in the process of their actor.

    Capabilities are not granted: no process of a sandbox has any, and packages are installed in images.
    `readonly` changes nothing: what a sandbox writes is in a layer of its own, and an image is never written.

    Args:
        image_manager: As Ray passes it; None is `Images`.
        options: None reads those of `runtime_env`.
    """

    def __init__(self, image_manager: Any = None, options: Options | None = None) -> None:
        self._options = options or Options.of_environment()
        super().__init__(image_manager or Images(self._options))
        self._sandboxes: dict[str, Sandbox] = {}
        self._sandbox_metadata: dict[str, Any] = {}  # Ray's actor reads the configuration here
        self._lock = threading.Lock()

    def create_sandbox(self, config: SandboxConfig) -> str:
        """Make a sandbox; returns its id.

        Args:
            config: Ray's configuration.

        Raises:
            SandboxCreationError: It asks for something that Ringfence does not do, or the node cannot.
        """
        try:
            sandbox = Sandbox.create(**self._parts(config))
            try:
                if config.workdir:
                    sandbox.files.make_dir(config.workdir)
            except BaseException:
                sandbox.terminate()
                raise
        except RingfenceError as exc:
            raise SandboxCreationError(str(exc)) from exc
        with self._lock:
            self._sandboxes[sandbox.id] = sandbox
            self._sandbox_metadata[sandbox.id] = {"config": config}
        return sandbox.id

    def _parts(self, config: SandboxConfig) -> dict[str, Any]:
        options = self._options
        limits: dict[str, Any] = {}
        if config.cpu and config.cpu > 0:
            limits["cpus"] = float(config.cpu)
        if memory := parse_memory_bytes(config.memory):
            limits["memory_bytes"] = memory
        parts = {
            "image": None if config.image == HOST else config.image,
            "network": self._network(config),
            "limits": limits,
            "env": dict(config.env),
            "tier": options.tier or None,
            "backend": options.backend or None,
            "allow_degraded": options.allow_degraded or None,
        }
        return {name: value for name, value in parts.items() if value}

    def _network(self, config: SandboxConfig) -> Any:
        if config.network == "none":
            return "none"
        if config.network == "public" and config.dns is None and self._options.public:
            return list(self._options.public)
        hint = "ask for network='none' (block_network=True), or name hosts: runtime_env(public=[…])"
        if config.dns is not None:
            hint = "leave dns out: names are resolved outside the sandbox"
        raise SandboxCreationError(
            f"network={config.network!r} is not open: Ringfence opens named hosts alone ({hint})"
        )

    def delete_sandbox(self, sandbox_id: str) -> None:
        """End a sandbox; an unknown one is no error.

        Args:
            sandbox_id: Its id.
        """
        with self._lock:
            sandbox = self._sandboxes.pop(sandbox_id, None)
            self._sandbox_metadata.pop(sandbox_id, None)
        if sandbox is not None:
            sandbox.terminate()

    def exec_command(
        self,
        sandbox_id: str,
        command: str | list[str],
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        shell: str | None = None,
        user: str | None = None,
    ) -> ExecResult:
        """Run a command to its end.

        Args:
            sandbox_id: The sandbox.
            command: Arguments, or a line for the shell.
            timeout: Seconds; then its whole process tree is killed.
            cwd: Where it starts; None is the sandbox's directory.
            env: Added to the sandbox's variables.
            shell: What runs a line; None is the sandbox's.
            user: A user's name or uid, without a group.

        Raises:
            SandboxTimeoutError: It took too long.
            SandboxExecError: It did not start.
        """
        sandbox, config = self._find(sandbox_id), self._sandbox_metadata[sandbox_id]["config"]
        if user and ":" in user:
            raise SandboxExecError(f"user {user!r}: a group cannot be chosen; name the user alone")
        argv = command if isinstance(command, list) else [shell or config.shell, "-c", command]
        try:
            result = sandbox.exec(
                argv,
                timeout_s=timeout,
                cwd=cwd or config.workdir,
                env=env,
                user=int(user) if user and user.isdecimal() else user,
            )
        except RingfenceError as exc:
            raise SandboxExecError(str(exc)) from exc
        if result.timed_out:
            raise SandboxTimeoutError(f"the command was killed after {timeout} seconds")
        code = result.exit_code if result.exit_code is not None else 128 + (result.signal or 0)
        return ExecResult(code, result.stdout_text, result.stderr_text, result.duration_s)

    def write_file(
        self, sandbox_id: str, path: str, content: str | bytes, append: bool = False
    ) -> None:
        """Write a file, and the directories above it.

        Args:
            sandbox_id: The sandbox.
            path: Where.
            content: What.
            append: Add to what is there.

        Raises:
            SandboxError: It could not be written.
        """
        try:
            self._find(sandbox_id).files.write(path, content, append=append, parents=True)
        except RingfenceError as exc:
            raise SandboxError(str(exc)) from exc

    def read_file(self, sandbox_id: str, path: str) -> bytes:
        """Read a file.

        Args:
            sandbox_id: The sandbox.
            path: Where.

        Raises:
            SandboxError: It could not be read.
        """
        try:
            return self._find(sandbox_id).files.read(path)
        except RingfenceError as exc:
            raise SandboxError(str(exc)) from exc

    def get_status(self, sandbox_id: str) -> SandboxStatus:
        """Tell whether a sandbox runs.

        Args:
            sandbox_id: The sandbox.
        """
        sandbox = self._sandboxes.get(sandbox_id)
        if sandbox is None or sandbox.state.value == "terminated":
            return SandboxStatus.TERMINATED
        return SandboxStatus.RUNNING

    def _find(self, sandbox_id: str) -> Sandbox:
        try:
            return self._sandboxes[sandbox_id]
        except KeyError:
            raise SandboxNotFoundError(
                f"sandbox {sandbox_id!r} not found, or it has ended"
            ) from None


def main(arguments: list[str] | None = None) -> None:
    """Serve Ray's Modal-compatible facade, with `RINGFENCE_RAY` as JSON for `Options`.

    Args:
        arguments: As for `python -m ray.experimental.sandbox.http.grpc_facade`.
    """
    from ray.experimental.sandbox.http import grpc_facade

    options = json.loads(os.environ.get(SETTING, "{}"))
    address = os.environ.get("RAY_ADDRESS", "auto")
    ray.init(address=address, runtime_env=runtime_env(**options))
    grpc_facade.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
