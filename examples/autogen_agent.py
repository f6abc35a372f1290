"""A tool of AutoGen's that runs Python in a sandbox, called as a model would. Needs the extra `autogen`."""

import asyncio

from autogen_core import CancellationToken
from autogen_core.code_executor import CodeBlock
from autogen_core.tools import FunctionTool

from ringfence.integrations.autogen import RingfenceCodeExecutor


async def main():
    async with RingfenceCodeExecutor(timeout_s=30) as executor:

        async def run_python(code: str, cancellation_token: CancellationToken) -> str:
            block = CodeBlock(code=code, language="python")
            result = await executor.execute_code_blocks([block], cancellation_token)
            return result.output

        tool = FunctionTool(run_python, description="Run Python in a sandbox.")
        call = {"code": "print(sum(range(101)))"}
        print((await tool.run_json(call, CancellationToken())).strip())


asyncio.run(main())
