"""The emulator's control socket: one JSON command, one JSON answer. Source: QEMU's docs/interop/qmp-spec."""

from __future__ import annotations

import json
import socket
import time
from _thread import allocate_lock

from ...errors import ExecError, IsolationError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_PATIENCE_S = 60.0
_MOST_BYTES = 1 << 22
_LOOK_S = 0.01


class Monitor:
    """A connection to one emulator. Thread-safe."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._buffer = sock, b""
        self._lock = allocate_lock()
        self._is_open = False
        sock.settimeout(_PATIENCE_S)

    def ask(self, command: str, arguments: dict[str, Any] | None = None, *, fd: int = -1) -> Any:
        """Run a command and return its answer; `fd` is passed along.

        Raises:
            ExecError: The emulator refused it, or is gone.
        """
        with self._lock:
            if not self._is_open:
                self._receive("QMP")
                self._command("qmp_capabilities", {}, -1)
                self._is_open = True
            return self._command(command, arguments or {}, fd)

    def _command(self, command: str, arguments: dict[str, Any], fd: int) -> Any:
        text = json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n"
        try:
            socket.send_fds(self._sock, [text], [fd] if fd >= 0 else [])
        except OSError as exc:
            raise ExecError(f"{command}: the emulator is gone: {exc}") from exc
        said = self._receive("return", "error")
        if "error" in said:
            raise ExecError(f"{command}: {said['error'].get('desc')}")
        return said["return"]

    def _receive(self, *wanted: str) -> dict[str, Any]:
        """The next line with one of these; events are of no interest."""
        while True:
            line, found, rest = self._buffer.partition(b"\n")
            if found:
                self._buffer = rest
                said = json.loads(line)
                if any(key in said for key in wanted):
                    return dict(said)
                continue
            try:
                piece = self._sock.recv(1 << 16)
            except OSError as exc:
                raise ExecError(f"the emulator does not answer: {exc}") from exc
            if not piece or len(self._buffer) > _MOST_BYTES:
                raise ExecError("the emulator is gone")
            self._buffer += piece

    def write_down(self, file: int) -> None:
        """Write the whole machine to a file, while it waits for us; it stands still afterwards.

        Raises:
            IsolationError: It could not.
        """
        self.ask("getfd", {"fdname": "memory"}, fd=file)
        self.ask("migrate-set-parameters", {"max-bandwidth": 1 << 40, "downtime-limit": 60_000})
        self.ask("migrate", {"uri": "fd:memory"})
        while True:
            said = self.ask("query-migrate")
            if said.get("status") == "completed":
                return
            if said.get("status") in ("failed", "cancelled"):
                raise IsolationError(
                    f"the machine's memory was not saved: {said.get('error-desc')}"
                )
            time.sleep(_LOOK_S)  # the emulator tells nobody

    def close(self) -> None:
        self._sock.close()
