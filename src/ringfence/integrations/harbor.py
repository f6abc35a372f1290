"""Harbor: run benchmark tasks in sandboxes.

    harbor run -p TASK -a AGENT -e ringfence.integrations.harbor:RingfenceEnvironment

Options go through `--ek KEY=VALUE`: `image=default` runs a task on the host's own programs, without
any image; `server=ADDRESS`; and the keyword arguments of `Sandbox.create`.

Source: harbor.environments.base (0.24).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import (
    EnvironmentCapabilities,
    EnvironmentResourceCapabilities,
)
from harbor.environments.definition import effective_exec_cwd, parse_dockerfile_workdir
from harbor.models.task.config import NetworkMode, NetworkPolicy

from ..errors import InvalidRequest
from ..model.limits import MIB
from ..model.mount import READ_WRITE, Mount
from . import outcome
from .origin import Origin

if TYPE_CHECKING:
    from ..sandbox import AsyncSandbox

HOST_USERLAND = "default"
OUTPUT_BYTES = 16 << 20
_OF_HARBOR = ("/logs", "/tests", "/solution", "/installed-agent")
_NOT_BUILT = {"from", "workdir", "label", "env", "cmd"}
_OURS = {
    "image",
    "server",
    "allow_degraded",
    "backend",
    "tier",
    "profile",
    "python_env",
    "env",
    "user",
}


class RingfenceEnvironment(BaseEnvironment):
    """Sandbox of a trial."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = {name: kwargs.pop(name) for name in _OURS & kwargs.keys()}
        self._server: str | None = given.pop("server", None)
        self._image: str = given.pop("image", "")
        self._options = given
        self._sandbox: AsyncSandbox | None = None
        super().__init__(*args, **kwargs)
        self._workdir = parse_dockerfile_workdir(self.environment_dir / "Dockerfile")

    @staticmethod
    def type() -> str:
        """Its name in results."""
        return "ringfence"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        """Every network mode, and changing it under a running trial."""
        return EnvironmentCapabilities(
            disable_internet=True,
            network_allowlist=True,
            network_allowlist_hostnames=True,
            network_allowlist_wildcard_hostnames=True,
            network_allowlist_ipv4_addresses=True,
            network_allowlist_ipv6_addresses=True,
            network_allowlist_ipv4_cidrs=True,
            network_allowlist_ipv6_cidrs=True,
            dynamic_network_policy=True,
        )

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        """Both are hard ceilings; where a host cannot hold them, the trial is refused."""
        return EnvironmentResourceCapabilities(cpu_limit=True, memory_limit=True)

    def _validate_definition(self) -> None:
        dockerfile = self.environment_dir / "Dockerfile"
        if self._image or self.task_env_config.docker_image:
            return
        if not dockerfile.exists():
            raise FileNotFoundError(f"{dockerfile}: nothing says which image the task runs on")
        for line in dockerfile.read_text(encoding="utf-8").splitlines():
            word = line.split(maxsplit=1)[0].lower() if line.strip() else ""
            if word and not word.startswith("#") and word not in _NOT_BUILT:
                raise InvalidRequest(
                    f"{dockerfile} has {word.upper()}, and Ringfence builds no images",
                    field="image",
                    hint="build it elsewhere and give --ek image=NAME",
                )

    def _image_of_task(self) -> str:
        if self._image or self.task_env_config.docker_image:
            return str(self._image or self.task_env_config.docker_image)
        lines = (self.environment_dir / "Dockerfile").read_text(encoding="utf-8").splitlines()
        return next(line.split()[1] for line in lines if line.lower().startswith("from "))

    async def start(self, force_build: bool) -> None:
        """Make the sandbox; nothing is built."""
        del force_build
        self._sandbox = await Origin(self._arguments(), self._server).async_sandbox()
        await self.ensure_dirs(self._mount_targets(writable_only=True))
        await self._upload_environment_dir_after_start()

    def _arguments(self) -> dict[str, Any]:
        """Build the arguments of `Sandbox.create`."""
        limits: dict[str, Any] = {}
        if self._effective_memory_mb is not None:
            limits["memory_bytes"] = self._effective_memory_mb * MIB
        if self._effective_cpus is not None:
            limits["cpus"] = float(self._effective_cpus)
        workdir = effective_exec_cwd(None, self.task_env_config.workdir, self._workdir) or "/app"
        directories = dict.fromkeys((*_OF_HARBOR, workdir))
        image = self._image_of_task()
        # Harbor works as root beside the task's user; an image names its own user.
        root: dict[str, Any] = {"user": "root"} if image == HOST_USERLAND else {"image": image}
        return {
            **root,
            **self._options,
            "mounts": [Mount(path, "", READ_WRITE, protect=()) for path in directories],
            "workdir": workdir,
            "limits": limits,
            "network": _network(self.network_policy),
        }

    async def stop(self, delete: bool) -> None:
        """End it; a sandbox does not outlive its trial."""
        del delete
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await sandbox.terminate()

    @property
    def sandbox(self) -> AsyncSandbox:
        """The live sandbox.

        Raises:
            RuntimeError: There is none, before `start` and after `stop`.
        """
        if self._sandbox is None:
            raise RuntimeError("the environment is not started")
        return self._sandbox

    async def _apply_network_policy(self, network_policy: NetworkPolicy) -> None:
        await self.sandbox.apply_network_policy(_network(network_policy))

    def _reset_dirs_user(self) -> str | int | None:
        return None  # the sandbox's user owns them

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command line in bash, or sh; on timeout everything that it started is killed."""
        result = await self.sandbox.exec(
            outcome.shell_argv(command),
            cwd=effective_exec_cwd(cwd, self.task_env_config.workdir, self._workdir),
            env=self._merge_env(env),
            timeout_s=timeout_sec,
            user=self._resolve_user(user),
            max_output_bytes=OUTPUT_BYTES,
        )
        note = outcome.notes(result)
        return ExecResult(
            stdout=result.stdout_text,
            stderr=f"{result.stderr_text}\n{note}" if note else result.stderr_text,
            return_code=outcome.exit_code(result),
        )

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Copy a file in, with the directories it needs."""
        await self.sandbox.files.make_dir(target_path.rpartition("/")[0] or "/")
        await self.sandbox.files.upload(str(source_path), target_path)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Copy what is in a directory into another one, which may have files already."""
        await self.sandbox.files.make_dir(target_dir)
        for entry in sorted(Path(source_dir).iterdir()):
            target = f"{target_dir.rstrip('/')}/{entry.name}"
            if entry.is_dir() and not entry.is_symlink():
                await self.upload_dir(entry, target)
            else:
                await self.sandbox.files.upload(str(entry), target)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Copy a file out."""
        await self.sandbox.files.download(source_path, str(target_path), overwrite=True)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Copy a directory out over one that may be there."""
        # Straight there: a copy of a copy would go through links that an earlier one has brought.
        await self.sandbox.files.download(source_dir, str(target_dir), overwrite=True)


def _network(policy: NetworkPolicy) -> str | list[str]:
    """Harbor's modes as a network policy; its host names, wildcards and networks are ours."""
    if policy.network_mode == NetworkMode.PUBLIC:
        return "public"
    if policy.network_mode == NetworkMode.NO_NETWORK:
        return "none"
    return list(policy.allowed_hosts)
