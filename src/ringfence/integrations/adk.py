"""Google's Agent Development Kit: a code executor, `LlmAgent(code_executor=RingfenceCodeExecutor())`.

Every run is a process of its own in one sandbox, whose files stay. What it writes to
$RINGFENCE_OUTPUTS_DIR comes back as output files.

Source: google.adk.code_executors.base_code_executor (2.13).
"""

from __future__ import annotations

import base64
import mimetypes
import threading
from typing import TYPE_CHECKING, Any

from google.adk.code_executors.base_code_executor import BaseCodeExecutor
from google.adk.code_executors.code_execution_utils import CodeExecutionResult, File
from pydantic import PrivateAttr

from ..model.mount import OUTPUTS_DIR
from . import outcome
from .origin import Origin

if TYPE_CHECKING:
    from google.adk.agents.invocation_context import InvocationContext
    from google.adk.code_executors.code_execution_utils import CodeExecutionInput

    from ..model.execs.exec import ExecResult
    from ..sandbox import Sandbox

OUTPUT_BYTES = 1 << 20
FILES_BYTES = 32 << 20
_CODE = "/tmp/adk-code.py"


class RingfenceCodeExecutor(BaseCodeExecutor):
    """Python in a sandbox; `timeout_seconds` is honoured, and kills everything that was started.

    As in the framework's own executors code that never ends is ended after five minutes.

    Args:
        server, options: See `Origin`. What is a field of `BaseCodeExecutor` is that.
    """

    timeout_seconds: int | None = 300
    _origin: Origin = PrivateAttr()
    _lock: Any = PrivateAttr(default_factory=threading.Lock)
    _sandbox: Any = PrivateAttr(default=None)

    def __init__(self, *, server: str | None = None, **options: Any) -> None:
        known = {name: options.pop(name) for name in BaseCodeExecutor.model_fields & options.keys()}
        super().__init__(**known)
        self._origin = Origin(options, server)

    def execute_code(
        self, invocation_context: InvocationContext, code_execution_input: CodeExecutionInput
    ) -> CodeExecutionResult:
        """Run the code with its input files in the working directory."""
        del invocation_context
        with self._lock:  # the outputs directory is one
            sandbox = self._live()
            for each in code_execution_input.input_files:
                sandbox.files.write(each.name, _bytes_of(each), parents=True)
            sandbox.files.write(_CODE, code_execution_input.code)
            result = sandbox.exec(
                ["python3", _CODE], timeout_s=self.timeout_seconds, max_output_bytes=OUTPUT_BYTES
            )
            files = _outputs(sandbox)
        stdout, stderr = _streams(result)
        return CodeExecutionResult(stdout, stderr, files, outcome.exit_code(result))

    def terminate(self) -> None:
        """End the sandbox; the next code gets a fresh one."""
        with self._lock:
            if self._sandbox is not None:
                self._sandbox.terminate()
            self._sandbox = None

    def _live(self) -> Sandbox:
        if self._sandbox is None or self._sandbox.state == "terminated":
            self._sandbox = self._origin.lasting()
        sandbox: Sandbox = self._sandbox
        return sandbox


def _streams(result: ExecResult) -> tuple[str, str]:
    """Standard output and standard error as the framework reads them.

    Anything in the latter makes a run a failure whose output the model never sees; nothing makes it
    a success. So a success brings its warnings after its output, and a failure always says something.
    """
    code, note = outcome.exit_code(result), outcome.notes(result)
    said = "\n".join(filter(None, (result.stderr_text, note)))
    if code == 0:
        return "\n".join(filter(None, (result.stdout_text, said))), ""
    return result.stdout_text, said or f"ended with exit code {code}"


def _bytes_of(file: File) -> bytes:
    if isinstance(file.content, bytes):
        return file.content
    return (
        base64.b64decode(file.content) if file.mime_type != "text/plain" else file.content.encode()
    )


def _outputs(sandbox: Sandbox) -> list[File]:
    """The files that were written for the agent; they are taken out, so that each comes once."""
    found, left = [], FILES_BYTES
    for info in sandbox.files.list(OUTPUTS_DIR):
        if info.kind != "file" or info.size_bytes > left:
            continue
        data = sandbox.files.read(info.path, max_bytes=left)
        left -= len(data)
        kind = mimetypes.guess_type(info.name)[0] or "application/octet-stream"
        found.append(File(name=info.name, content=data, mime_type=kind))
        sandbox.files.remove(info.path)
    return found
