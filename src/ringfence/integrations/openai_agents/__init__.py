"""OpenAI Agents: sandbox agents whose sandbox is confined on Linux.

    from agents import Runner, RunConfig
    from agents.sandbox import SandboxAgent, SandboxRunConfig
    from ringfence.integrations.openai_agents import RingfenceSandboxClient

    config = RunConfig(sandbox=SandboxRunConfig(client=RingfenceSandboxClient()))
    await Runner.run(SandboxAgent(name="worker", ...), "...", run_config=config)

Importing this registers the options and the session state by their type, `ringfence`.
"""

from __future__ import annotations

from .client import RingfenceSandboxClient as RingfenceSandboxClient
from .client import RingfenceSandboxClientOptions as RingfenceSandboxClientOptions
from .session import RingfenceSandboxSession as RingfenceSandboxSession
from .session import RingfenceSandboxSessionState as RingfenceSandboxSessionState
