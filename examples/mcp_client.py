"""A client of `ringfence mcp`: what an agent does, without the agent. Needs the extra `mcp`."""

import asyncio

from mcp.client.session import ClientSession
from mcp.client.stdio import StdioServerParameters, stdio_client

SERVER = StdioServerParameters(command="ringfence", args=["mcp"])


async def main() -> None:
    async with stdio_client(SERVER) as streams, ClientSession(*streams) as session:
        await session.initialize()
        file = {
            "path": "primes.py",
            "content": "print([n for n in range(2, 30) if all(n % d for d in range(2, n))])",
        }
        await session.call_tool("write_file", file)
        answer = await session.call_tool("run_command", {"command": "python primes.py"})
        print(answer.structured_content["stdout"], end="")


asyncio.run(main())
