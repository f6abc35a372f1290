"""A daemon of the benchmark's own, as users start it."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time

from . import processes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, Self

_START_S, _END_S = 60.0, 120.0


class Daemon:
    """`ringfence serve` on a state directory of its own, which goes with it.

    Args:
        options: Further options of the command.
        manager: Its settings of the session manager.
    """

    def __init__(self, options: Sequence[str] = (), **manager: Any) -> None:
        self._options = options
        allow_open_files()
        self._directory = tempfile.TemporaryDirectory(prefix="rf-bench-")
        self.state_dir = f"{self._directory.name}/s"
        self._config = f"{self._directory.name}/config.json"
        with open(self._config, "w", encoding="utf-8") as file:
            json.dump({"log_level": "error", "manager": manager}, file)
        try:
            self.start()
        except BaseException:
            self._directory.cleanup()
            raise

    @property
    def address(self) -> str:
        return f"unix:{self.state_dir}/ringfence.sock"

    def start(self) -> float:
        """Start it; the seconds until it answers."""
        began = time.perf_counter()
        self.process = subprocess.Popen(
            [*self._command(), "--json", "--config", self._config, *self._options],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        if not self.process.stdout.readline():
            raise OSError(f"the daemon ended with {self.process.wait(_START_S)}")
        return time.perf_counter() - began

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "ringfence", "serve", "--state-dir", self.state_dir]

    def kill(self) -> None:
        """Kill -9."""
        self.process.kill()
        self._reap()

    def _reap(self) -> None:
        self.process.wait(_END_S)
        if self.process.stdout:
            self.process.stdout.close()

    @property
    def memory_bytes(self) -> int:
        """Of the daemon alone, without sandboxes and what makes them."""
        return processes.pss_bytes(self.process.pid)

    @property
    def cpu_s(self) -> float:
        """Processor time that the daemon alone has used."""
        return processes.cpu_s(self.process.pid)

    def close(self) -> None:
        try:
            subprocess.run(
                [*self._command(), "--stop"], stdout=subprocess.DEVNULL, timeout=_END_S, check=False
            )
            self._reap()
        except BaseException:
            self.kill()  # or it would serve for ever
            raise
        finally:
            self._directory.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def allow_open_files() -> None:
    """As many open files as this process, and what it starts, may have; root may raise even that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in ((1 << 17, 1 << 17), (hard, hard)):
        if soft >= wanted[0]:
            return
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, wanted)
        except (ValueError, OSError):
            continue
        return
