"""Names and types that do not exist: each line marked `error` must be one for every checker."""

from __future__ import annotations

import ringfence
from ringfence import (
    AsyncClient,
    AsyncSandbox,
    BashConfig,
    Client,
    ExecResult,
    Limits,
    ManagerConfig,
    PoolConfig,
    Sandbox,
    SandboxSpec,
)
from ringfence.e2b.settings import E2BSettings
from ringfence.ray import Sandbox as RaySandbox
from ringfence.ray import map_sandboxes

print(ringfence.Sandbx)  # error
Sandbox.create(imgae="alpine")  # error
Sandbox.create(timeout=3)  # error
Sandbox.create(memory="256m")  # error
Sandbox.create(env=["A=b"])  # error
Sandbox.create(network=True)  # error
Sandbox()  # error
Client().create(imgae="alpine")  # error
Limits(memory="256m")  # error
SandboxSpec(imgae="alpine")  # error
BashConfig(imgae="alpine")  # error
PoolConfig(profiles={"a": SandboxSpec(imgae="alpine")})  # error
PoolConfig(min=3)  # error
ManagerConfig(max=3)  # error
RaySandbox.create(imgae="alpine")  # error
map_sandboxes(print, [1], sandbox={"imgae": "alpine"})  # error
E2BSettings(templates={"a": SandboxSpec(imgae="alpine")})  # error


def wrong(box: Sandbox, result: ExecResult) -> None:
    box.exec(["true"], timeout=3)  # error
    box.exec(["true"], check=True)  # error
    box.shell("true", timeout=3)  # error
    box.shell(["true"])  # error
    box.run("true")  # error
    box.files.ls()  # error
    print(result.returncode)  # error


async def wrong_too(box: AsyncSandbox) -> None:
    await AsyncSandbox.create(imgae="alpine")  # error
    await AsyncClient().create(imgae="alpine")  # error
    await box.exec(["true"], timeout=3)  # error
    await box.start(["true"], background=True)  # error
    await box.files.read()  # error
    await box.files.ls()  # error
    print(1 + await box.files.read_text("a"))  # error
