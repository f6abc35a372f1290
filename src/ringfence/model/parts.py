"""The keyword arguments of `Sandbox.create` and `exec`, for code that passes them on.

def make(image: str, **parts: Unpack[SandboxParts]) -> Sandbox:
return Sandbox.create(image=image, **parts)
"""

from __future__ import annotations

from typing import TypedDict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from .calls import Mounts, Network, StrPath
    from .limits import Limits


class SandboxParts(TypedDict, total=False):
    """The fields of `SandboxSpec`, as `Sandbox.create` takes them."""

    id: str | None
    labels: Mapping[str, str] | None
    network: Network
    mounts: Mounts
    limits: Limits | Mapping[str, Any] | None
    template: str | None
    image: str | None
    env: Mapping[str, str] | None
    secrets: Mapping[str, str] | None
    tier: str | None
    profile: str | None
    user: str | int | None
    workdir: StrPath | None
    ttl_s: float | None
    python_env: bool | None
    disk_root: bool | None
    memory_dir: StrPath | None
    protect: Sequence[str] | None
    unprotect: Sequence[str] | None
    allow_degraded: Sequence[str] | None
    deny: Sequence[str] | None


class ExecParts(TypedDict, total=False):
    """The options of `Sandbox.exec`."""

    cwd: StrPath | None
    env: Mapping[str, str] | None
    user: str | int | None
    stdin: bytes | str | None
    timeout_s: float | None
    max_output_bytes: int | None
    session_leader: bool
    on_stdout: Callable[[bytes], None] | None
    on_stderr: Callable[[bytes], None] | None


class StartParts(ExecParts, total=False):
    """The options of `Sandbox.start`."""

    stream_stdin: bool
    pty: tuple[int, int] | None
