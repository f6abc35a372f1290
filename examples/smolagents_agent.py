"""A smolagents CodeAgent in a sandbox, with a scripted model, offline. Needs the extra `smolagents`."""

from smolagents import ChatMessage, CodeAgent, Model

from ringfence.integrations.smolagents import RingfenceExecutor

STEPS = [
    "Thought: compute.\n<code>\nimport math\nx = math.factorial(5)\nprint(x)\n</code>",
    "Thought: answer.\n<code>\nfinal_answer(x)\n</code>",
]


class Scripted(Model):
    def generate(self, _messages, **_options):
        return ChatMessage(role="assistant", content=STEPS.pop(0))


with CodeAgent(
    tools=[],
    model=Scripted(),
    executor=RingfenceExecutor(),
    additional_authorized_imports=["math"],
) as agent:
    print(agent.run("What is 5 factorial?"))
