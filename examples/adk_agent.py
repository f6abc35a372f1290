"""An ADK agent whose code runs in a sandbox, with a scripted model, offline. Needs the extra `adk`."""

import asyncio

from google.adk.agents import LlmAgent
from google.adk.models import BaseLlm, LlmResponse
from google.adk.runners import InMemoryRunner
from google.genai import types

from ringfence.integrations.adk import RingfenceCodeExecutor

STEPS = ["```python\nprint(sum(range(101)))\n```", "It is 5050."]


class Scripted(BaseLlm):
    async def generate_content_async(self, _request, **_options):
        part = types.Part.from_text(text=STEPS.pop(0))
        yield LlmResponse(content=types.Content(role="model", parts=[part]))


async def main():
    executor = RingfenceCodeExecutor(timeout_seconds=30)
    agent = LlmAgent(name="worker", model=Scripted(model="scripted"), code_executor=executor)
    try:
        for event in await InMemoryRunner(agent=agent).run_debug("Sum 0 to 100.", quiet=True):
            for part in event.content.parts if event.content else ():
                if part.code_execution_result:
                    print("ran:", part.code_execution_result.output.strip())
                elif part.text:
                    print("said:", part.text.strip())
    finally:
        executor.terminate()


asyncio.run(main())
