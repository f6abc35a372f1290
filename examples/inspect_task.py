"""An Inspect task in a sandbox, with a scripted model and without network. Needs the extra `inspect`."""

import tempfile

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import bash

script = [
    ModelOutput.for_tool_call(
        "mockllm/model", "bash", {"command": "sha256sum given.txt | cut -c 1-8"}
    ),
    ModelOutput.from_content("mockllm/model", "It begins with 5891b5b5."),
]
for output in script:
    output.usage = ModelUsage()  # else Inspect counts tokens, with a table from the internet

task = Task(
    dataset=[Sample("What is the checksum?", target="5891b5b5", files={"given.txt": "hello\n"})],
    solver=[use_tools(bash(timeout=10)), generate()],
    scorer=includes(),
    sandbox="ringfence",
)
with tempfile.TemporaryDirectory() as logs:
    (log,) = eval(
        task,
        model=get_model("mockllm/model", custom_outputs=script),
        log_dir=logs,
        display="none",
    )
    tool_answer = next(m for m in log.samples[0].messages if m.role == "tool")
    print(tool_answer.text.strip(), log.results.scores[0].metrics["accuracy"].value)
