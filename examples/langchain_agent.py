"""deepagents in a sandbox, with a scripted model: nothing leaves this machine. Needs the extra `langchain`."""

from deepagents import create_deep_agent
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage

from ringfence.integrations.langchain import RingfenceBackend


class Scripted(GenericFakeChatModel):
    def bind_tools(self, *_args, **_options):
        return self


def call(tool, **arguments):
    return AIMessage("", tool_calls=[{"name": tool, "args": arguments, "id": tool}])


model = Scripted(
    messages=iter(
        [
            call("write_file", file_path="/tmp/step.py", content="print(sum(range(101)))"),
            call("execute", command="id -un; python3 /tmp/step.py"),
            AIMessage("done"),
        ]
    )
)
with RingfenceBackend() as backend:
    agent = create_deep_agent(model=model, backend=backend)
    answer = agent.invoke({"messages": [("user", "add the numbers up to 100")]})
    print(answer["messages"][-2].content)
