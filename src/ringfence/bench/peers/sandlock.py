"""sandlock, the library: it confines one process at a time, so a run is its `exec` and its life."""

from __future__ import annotations

import subprocess
import sys

from .peer import PeerMissingError, program

# In a small process of its own, which it forks: our threads and memory must not slow it down.
_SERVER = """
import os, sys, time
from sandlock import Sandbox
places = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc", "/dev")
sandbox = Sandbox(fs_readable=[place for place in places if os.path.exists(place)])
for _ in sys.stdin:
    started = time.perf_counter()
    result = sandbox.run(["true"])
    elapsed = time.perf_counter() - started
    print(elapsed if result.success else f"failed: {result.error or result.exit_code}", flush=True)
"""


class Sandlock:
    """See `Peer`. Timed by its own process, around its library's call."""

    name = "sandlock"

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [_python(), "-c", _SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            self.run_true()
        except BaseException:
            self.close()
            raise

    def run_true(self) -> float | None:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write("run\n")
            stdin.flush()
        except BrokenPipeError:
            raise PeerMissingError("its process ended") from None
        answer = stdout.readline().strip()
        try:
            return float(answer)
        except ValueError:
            raise PeerMissingError(answer or "its process ended") from None

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:
                pass
        self._process.kill()
        self._process.wait()


def _python() -> str:
    """An interpreter that has sandlock: this one, or the first `python3`."""
    for python in (sys.executable, program("python3")):
        probe = "import importlib.util as u, sys; sys.exit(u.find_spec('sandlock') is None)"
        if subprocess.run([python, "-c", probe], check=False).returncode == 0:
            return python
    raise PeerMissingError("no module named sandlock in this Python")
