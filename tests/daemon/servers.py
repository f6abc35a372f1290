"""A real daemon, to be started, killed and started again, and a client of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from tests.native.outside import descendants_of, pin

SERVE = [sys.executable, "-m", "ringfence"]


class Server:
    """A daemon that is started, killed and started again.

    Attributes:
        step: A file; with a label of `faulty.STEPS` in it, the daemon kills itself there.
        module: Which runs the daemon, and is told that file first.
        env: Added to the daemon's environment.
    """

    def __init__(self, state: Path, env: dict[str, str] | None = None) -> None:
        self.state, self.step = state, state.parent / f"{state.name}.step"
        self.env = env or {}
        self.module = "tests.daemon.faulty"
        self.process: subprocess.Popen[str] | None = None
        transport = httpx.HTTPTransport(uds=str(state / "ringfence.sock"), verify=False)
        self.http = httpx.Client(transport=transport, base_url="http://localhost", timeout=60)

    def start(self, *options: str, faulty: bool = True) -> None:
        """Start it; returns when it answers."""
        self.begin(*options, faulty=faulty)
        self.ready()

    def begin(self, *options: str, faulty: bool = True, stderr: int | None = None) -> None:
        """Start it, and do not wait."""
        what = [sys.executable, "-m", self.module, str(self.step)] if faulty else SERVE
        self.process = subprocess.Popen(
            [*what, "serve", "--json", "--state-dir", str(self.state), *options],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path]),
                "PYTHONMALLOC": "malloc",  # what it would start itself again with
                **self.env,
            },
        )

    def ready(self) -> None:
        """Wait until it answers."""
        assert self.process is not None
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"it ended with {self.process.wait(10)}"
        assert json.loads(line)["listening"]

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.gone()

    def gone(self) -> None:
        """It was killed."""
        process, self.process = self.process, None
        assert process is not None
        assert process.stdout is not None
        assert -signal.SIGKILL == process.wait(30), "the control: it came by that step"
        process.stdout.close()
        self.step.unlink(missing_ok=True)

    def stop(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.terminate()
            assert 0 == process.wait(30)
            assert process.stdout is not None
            process.stdout.close()
        self.http.close()

    def ask(self, method: str, path: str, status: int = 0, **options: Any) -> Any:
        """What it answers; the status must be the one given, or any that says yes."""
        answer = self.http.request(method, f"/v1{path}", **options)
        assert status == answer.status_code if status else answer.is_success, answer.text
        return answer.json() if answer.content else None

    def make(self, **body: Any) -> str:
        found: str = self.ask("POST", "/sandboxes", 201, json=body)["id"]
        return found

    def run(self, sandbox: str, script: str, **more: Any) -> str:
        made = self.ask("POST", f"/sandboxes/{sandbox}/execs", json={"script": script, **more})
        found: str = made["id"]
        return found

    def wait(self, sandbox: str, run: str) -> Any:
        return self.ask("GET", f"/sandboxes/{sandbox}/execs/{run}/wait?timeout_s=30")

    def output(self, sandbox: str, run: str) -> bytes:
        path = f"/v1/sandboxes/{sandbox}/execs/{run}/output?stream=stdout"
        return self.http.get(path).content

    def family(self) -> dict[int, int]:
        """Everything that hangs on it."""
        assert self.process is not None
        return pin(descendants_of(self.process.pid))
