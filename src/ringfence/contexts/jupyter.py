"""A kernel of Jupyter's as the interpreter of a context. Runs inside the sandbox, sent with `kernel.py`.

It speaks Jupyter's messages by the `jupyter_client` that is installed there, and our frames outwards.
"""

from __future__ import annotations

import importlib
import math
import os
import queue
import re
import time
from typing import Any, Callable, Optional  # noqa: UP035  Python 3.8

READY_S = 55
_LOOKS_S = 0.05  # at interrupts and questions, which come by other ways than output
_BEGINS_S = 1.0  # after which a kernel that does not tell that a cell has begun is interrupted
_SHOWN = {"execute_result": "main", "display_data": "display"}
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class CellFailed(Exception):  # noqa: N818  never shown: its parts are
    """The error of a cell, as the kernel tells it."""

    def __init__(self, content: dict[str, Any]) -> None:
        trace = _COLOURS.sub("", "\n".join(map(str, content.get("traceback", ()))))
        parts = {"name": content.get("ename"), "value": content.get("evalue"), "traceback": trace}
        self.parts = {key: str(value or "") for key, value in parts.items()}


class _Interrupt:
    """An interrupt that waits until the cell has begun: before that, ipykernel ignores SIGINT.

    Attributes:
        is_wanted: Whether anybody asked for one.
    """

    is_wanted, _has_begun, _due_s = False, False, math.inf

    def want(self) -> None:
        self.is_wanted = True
        self._due_s = time.monotonic() + (0 if self._has_begun else _BEGINS_S)

    def begin(self) -> None:
        """Note that the cell has begun."""
        self._has_begun = True
        if self._due_s < math.inf:
            self._due_s = 0

    def is_due(self) -> bool:
        """Return whether to interrupt the kernel now; true once, but for a cell that has not begun."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return False
        self._due_s = math.inf if self._has_begun else now_s + _BEGINS_S
        return True


class Jupyter:
    """A kernel that was started by its kernelspec.

    Args:
        name: Of the kernelspec.
        stderr: Descriptor for the reason if it does not start, or ends.
    """

    def __init__(self, name: str, stderr: int) -> None:
        self._stderr = stderr
        try:
            library: Any = importlib.import_module("jupyter_client")  # the sandbox's
            self._manager = library.KernelManager(kernel_name=name)
            self._manager.kernel_spec  # noqa: B018  reads the kernelspec
        except ImportError:
            self._end(
                "jupyter_client is not installed in the sandbox: give it a template or an image with it"
            )
        except Exception as exc:  # noqa: BLE001  whatever the library raises
            self._end(f"no kernel {name!r}: {exc}")

    def start(self) -> None:
        """Start the kernel, and wait until it answers."""
        try:
            self._manager.start_kernel(cwd=os.getcwd())
            self._client = self._manager.blocking_client()
            self._client.start_channels()
            self._client.wait_for_ready(timeout=READY_S)
        except Exception as exc:  # noqa: BLE001  whatever the library raises
            self._end(f"the kernel did not start: {exc}")

    def _end(self, reason: str) -> None:
        os.write(self._stderr, f"{reason}\n".encode())
        os._exit(1)

    def run(
        self,
        code: str,
        emit: Callable[[str, bytes], None],
        show: Callable[[str, dict[str, Any]], None],
        answer: Optional[Callable[[str], Optional[str]]],  # noqa: UP045
        takes_interrupt: Callable[[], bool],
    ) -> None:
        """Run a cell to its end.

        Raises:
            CellFailed: It failed.
            KeyboardInterrupt: It was interrupted, and the kernel does not call that an error.
        """
        interrupt = _Interrupt()
        message, error = self._client.execute(code, allow_stdin=answer is not None), None
        while True:
            if takes_interrupt():
                interrupt.want()
            if interrupt.is_due():
                self._manager.interrupt_kernel()
            self._ask(answer)
            event = self._next(self._client.get_iopub_msg, _LOOKS_S)
            if event is None:
                if not self._manager.is_alive():
                    self._end("the kernel has ended")
                continue
            kind, content = event["msg_type"], event["content"]
            if kind == "stream":  # also of threads and earlier cells
                text = content["text"].encode("utf-8", "replace")
                emit("out" if content["name"] == "stdout" else "err", text)
            elif event["parent_header"].get("msg_id") != message:
                continue
            elif kind == "execute_input":
                interrupt.begin()
            elif kind in _SHOWN:
                show(_SHOWN[kind], content["data"])
            elif kind == "error":
                error = CellFailed(content)
            elif kind == "status" and content["execution_state"] == "idle":
                break
        self._settle(error, interrupt.is_wanted)

    def _ask(self, answer: Optional[Callable[[str], Optional[str]]]) -> None:  # noqa: UP045
        question = self._next(self._client.get_stdin_msg, 0)
        if question is not None and answer is not None:
            text = answer(str(question["content"].get("prompt", "")))
            self._client.input("\x04" if text is None else text)

    def _settle(self, error: Optional[CellFailed], was_interrupted: bool) -> None:  # noqa: UP045
        while self._next(self._client.get_shell_msg, 0) is not None:
            pass  # the replies, which say what the events said
        if error is not None:
            raise error
        if was_interrupted:
            raise KeyboardInterrupt

    def _next(self, get: Callable[..., Any], timeout_s: float) -> Any:
        try:
            return get(timeout=timeout_s)
        except queue.Empty:
            return None
