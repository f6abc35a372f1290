"""A sandbox agent of OpenAI Agents, with a scripted model, offline. Needs the extra `openai-agents`."""

import asyncio

from agents import RunConfig, Runner
from agents.sandbox import SandboxAgent, SandboxRunConfig
from agents.sandbox.capabilities import Shell
from agents.testing import ScriptedModel, assistant_message, function_call

from ringfence.integrations.openai_agents import RingfenceSandboxClient

MODEL = ScriptedModel(
    [
        [
            function_call(
                "exec_command", {"cmd": "id -un; pwd; seq 3 | paste -sd+ | bc"}, call_id="one"
            )
        ],
        [assistant_message("done")],
    ]
)


async def main() -> None:
    agent = SandboxAgent(name="worker", model=MODEL, capabilities=[Shell()])
    config = RunConfig(
        sandbox=SandboxRunConfig(client=RingfenceSandboxClient()), tracing_disabled=True
    )
    result = await Runner.run(agent, "Who am I?", run_config=config)
    print(next(item.output for item in result.new_items if hasattr(item, "output")))


asyncio.run(main())
