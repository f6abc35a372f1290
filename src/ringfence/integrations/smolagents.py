"""smolagents: an executor for `CodeAgent` whose Python is in a sandbox.

    from smolagents import CodeAgent
    from ringfence.integrations.smolagents import RingfenceExecutor

    with CodeAgent(tools=[], model=model, executor=RingfenceExecutor()) as agent:
        agent.run("...")

Source: smolagents.remote_executors and smolagents.tools (1.26).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from smolagents.default_tools import FinalAnswerTool
from smolagents.local_python_executor import CodeOutput
from smolagents.monitoring import AgentLogger, LogLevel
from smolagents.remote_executors import RemotePythonExecutor
from smolagents.serialization import SafeSerializer
from smolagents.tools import get_tools_definition_code
from smolagents.utils import AgentError

from ..errors import ExecError, TimeoutExceeded
from .interpreter import Interpreter
from .origin import Origin

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..sandbox import Sandbox

_MISSING = """\
import importlib.metadata, sys
for name in sys.argv[1:]:
    try:
        importlib.metadata.distribution(name.split("=")[0].split("<")[0].split(">")[0])
    except importlib.metadata.PackageNotFoundError:
        print(name)
"""
_TRIED = {"PIL", "numpy"}
_OPTIONAL = re.compile(r"^(import (?:PIL|numpy))$", re.MULTILINE)
_PACKAGES = {"PIL": "pillow"}


class RingfenceExecutor(RemotePythonExecutor):
    """A sandbox with an interpreter that keeps its variables.

    Args:
        additional_imports: Packages that the code needs: pip installs missing ones, which takes a
            network policy that reaches an index.
        allow_pickle: As smolagents has it. Leave it off: results are untrusted.
        timeout_s: For one piece of code; then the interpreter is killed, and its variables with it.
        server, make, options: See `Origin`; `python_env=True` shows this Python's packages inside.
    """

    def __init__(
        self,
        additional_imports: Sequence[str] = (),
        logger: Any = None,
        *,
        allow_pickle: bool = False,
        timeout_s: float | None = 120.0,
        server: str | None = None,
        make: Callable[[], Sandbox] | None = None,
        **options: Any,
    ) -> None:
        logger = logger or AgentLogger(level=LogLevel.INFO)
        super().__init__(list(additional_imports), logger, allow_pickle)
        self.sandbox = Origin(options, server, make).sandbox()
        self._interpreter = Interpreter(self.sandbox)
        self._timeout_s = timeout_s
        try:
            self.installed_packages = self.install_packages(self.additional_imports)
        except BaseException:
            self.cleanup()
            raise

    def run_code_raise_errors(self, code: str) -> CodeOutput:
        """Run one step of the agent.

        Raises:
            AgentError: It failed, or took too long; the model is told why.
        """
        try:
            cell = self._interpreter.run(code, timeout_s=self._timeout_s)
        except (TimeoutExceeded, ExecError) as exc:
            text = f"{exc}. Variables are lost; tools are not."
            raise AgentError(text, self.logger) from exc
        if cell.error == self.FINAL_ANSWER_EXCEPTION:
            answer = self._deserialize_final_answer(cell.value, self.allow_pickle)
            return CodeOutput(output=answer, logs=cell.output, is_final_answer=True)
        if cell.error:
            text = f"{cell.output}\nExecuting code yielded an error:\n{cell.traceback}"
            raise AgentError(text, self.logger)
        return CodeOutput(output=cell.result, logs=cell.output, is_final_answer=False)

    def send_tools(self, tools: dict[str, Any]) -> None:
        """Define the agent's tools, with the packages that they import.

        smolagents' tool of final answers tries Pillow and numpy, for images and arrays, and does
        without where they are not. Its source comes with these imports at its head, where they
        would have to be.

        Raises:
            AgentError: pip could not.
        """
        required: set[str] = set()
        for tool in tools.values():
            # Once it has been replaced, as below, that tool names what it only tries, too.
            tried = _TRIED if isinstance(tool, FinalAnswerTool) else set()
            required |= set(tool.to_dict()["requirements"]) - tried
        if "final_answer" in tools:
            self._patch_final_answer_with_exception(tools["final_answer"])
        wanted = {_PACKAGES.get(name, name) for name in required} - {
            "smolagents",
            *self.installed_packages,
        }
        self.installed_packages += self.install_packages(sorted(wanted))
        code = _OPTIONAL.sub(
            r"try:\n    \1\nexcept ImportError:\n    pass", get_tools_definition_code(tools)
        )
        self.logger.log(self.run_code_raise_errors(code).logs)
        self._interpreter.prelude[code] = code

    def send_variables(self, variables: dict[str, Any]) -> None:
        """Define what the agent was given besides its task; a fresh interpreter has it again."""
        if not variables:
            return
        serialized = SafeSerializer.dumps(variables, allow_pickle=self.allow_pickle)
        code = (
            f"{SafeSerializer.get_deserializer_code(self.allow_pickle)}\n"
            f"globals().update(_deserialize({serialized!r}))"
        )
        self.run_code_raise_errors(code)
        self._interpreter.prelude["variables"] = code

    def install_packages(self, additional_imports: list[str]) -> list[str]:
        """Install what is not there yet.

        Raises:
            AgentError: pip could not.
        """
        if not additional_imports:
            return []
        missing = self.sandbox.exec(["python3", "-c", _MISSING, *additional_imports])
        wanted = missing.stdout_text.split()
        if wanted:
            pip = ["python3", "-m", "pip", "install", "--user", "--break-system-packages", *wanted]
            done = self.sandbox.exec(pip, timeout_s=600)
            if not done.ok:
                raise AgentError(f"pip install failed: {done.stderr_text[-2000:]}", self.logger)
        return additional_imports

    def cleanup(self) -> None:
        """End the sandbox."""
        self.sandbox.terminate()

    def delete(self) -> None:
        """As `cleanup`."""
        self.cleanup()
