"""What a user of the library writes, with every public class where it belongs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import ringfence
from ringfence import (
    AsyncClient,
    AsyncSandbox,
    BashConfig,
    Client,
    Credential,
    ExecResult,
    FileInfo,
    FileNotFound,
    InvalidRequest,
    Limits,
    ManagerConfig,
    Mount,
    NetworkPolicy,
    NetworkRule,
    PoolConfig,
    Protection,
    RemoteSandbox,
    ResourceExhausted,
    RingfenceError,
    Sandbox,
    SandboxBash,
    SandboxLost,
    SandboxSpec,
    SandboxStats,
    SessionManager,
    Snapshot,
    Template,
    TimeoutExceeded,
)

if TYPE_CHECKING:
    from typing import Unpack

    from ringfence.model.parts import ExecParts, SandboxParts


def grade(sandbox: Sandbox, argv: Sequence[str], **options: Unpack[ExecParts]) -> int | None:
    result: ExecResult = sandbox.exec(argv, **options)
    return result.exit_code if result.ok else None


def make(**parts: Unpack[SandboxParts]) -> Sandbox:
    return Sandbox.create(**parts)


def usage(stats: SandboxStats, protections: Sequence[Protection]) -> str:
    return f"{stats.memory_bytes} {[each.status for each in protections]}"


def work(directory: Path) -> list[FileInfo]:
    policy = NetworkPolicy(
        allowed_hosts=("pypi.org",),
        rules=(NetworkRule("api.test", "443", credential=Credential("TOKEN")),),
    )
    spec = SandboxSpec(mounts=(Mount("/work", directory, "rw"),), network=policy)
    with Sandbox.create(spec) as first, Sandbox.create(mounts=f"{directory}:/work:rw") as second:
        try:
            found: bytes = first.files.read("no such file")
            print(found)
        except FileNotFound as exc:
            print(exc.path, exc.hint)
        except (ResourceExhausted, SandboxLost, TimeoutExceeded, RingfenceError) as exc:
            print(exc.code)
        second.shell("echo hi", timeout_s=5, cwd="/work")
        process = second.start(["cat"], stream_stdin=True)
        ended: ExecResult = process.wait(timeout_s=3)
        saved: Snapshot = second.snapshot({"step": "1"})
        print(ended.text, saved.id, usage(second.stats(), second.protections()))
        return first.files.list(".")


def limits() -> None:
    try:
        Sandbox.create(
            limits={"memory_bytes": "256m"},
            network=["example.com", NetworkRule("api.test")],
            image="alpine:3.20",
            env={"A": "b"},
            user=1000,
            workdir=Path("/work"),
            python_env=True,
            tier="strong",
            labels={"run": "1"},
        )
        Limits(memory_bytes="256m", cpus=0.5, wall_time_s="5s")
    except InvalidRequest as exc:
        print(exc.field)


def remote() -> None:
    with Client("unix:/run/ringfence.sock", key="k") as client:
        box: RemoteSandbox = client.create(name="a", network="none", ttl_s=60)
        print(box.exec(["true"], stdin="x").ok, client.make_key("me", max_sandboxes=3))


async def many() -> None:
    async with await AsyncSandbox.create(network="none") as box:
        text: str = await box.files.read_text("a.txt")
        await box.files.write("b.txt", text, parents=True)
        size: int = (await box.files.stat("b.txt")).size_bytes
        result = await box.exec(["true"], timeout_s=1.0)
        process = await box.start(["cat"], stream_stdin=True)
        print(size, result.ok, await process.wait())
    async with AsyncClient() as client:
        print((await (await client.create()).exec(["true"])).ok)


def others() -> tuple[SessionManager, ManagerConfig, PoolConfig, SandboxBash]:
    print(Template.from_image("alpine").run("true", network="none", env={"A": "b"}))
    print(ringfence.parse_size("1m"), ringfence.__version__)
    config = ManagerConfig()
    return SessionManager(config), config, PoolConfig(), SandboxBash(config=BashConfig())


if __name__ == "__main__":
    asyncio.run(many())
