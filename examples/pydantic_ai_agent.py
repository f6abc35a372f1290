"""Pydantic AI in a sandbox, with a scripted model and without network. Needs the extra `pydantic-ai`."""

import asyncio

from pydantic_ai import Agent, RunContext
from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import FunctionModel
from pydantic_ai.workspaces import Workspace

from ringfence.integrations.pydantic_ai import RingfenceWorkspace


def script(messages, _info):
    """One call of the tool, then its answer as text."""
    last = messages[-1].parts[-1]
    if last.part_kind == "tool-return":
        return ModelResponse([TextPart(str(last.content))])
    return ModelResponse([ToolCallPart("shell", {"command": "id -un; python3 -c 'print(6 * 7)'"})])


agent = Agent(FunctionModel(script), deps_type=Workspace)


@agent.tool
async def shell(ctx: RunContext[Workspace], command: str) -> str:
    return (await ctx.deps.run(command, shell=True, timeout=10)).stdout


async def main() -> None:
    workspace = RingfenceWorkspace()
    try:
        print((await agent.run("work", deps=Workspace(workspace))).output, end="")
    finally:
        await workspace.terminate()


asyncio.run(main())
