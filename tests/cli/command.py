"""The `ringfence` command as its users start it: a process of its own."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import ringfence

SOURCE = str(Path(ringfence.__file__).parent.parent)
RINGFENCE = [sys.executable, "-m", "ringfence"]
PATIENCE_S = 180


def environment(**more: str) -> dict[str, str]:
    """Ours, with the package found whatever the current directory."""
    kept = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path]
    return {**os.environ, "PYTHONPATH": ":".join([SOURCE, *kept]), **more}


def ringfence_command(
    *args: str,
    stdin: bytes | None = None,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Run `ringfence ARGS` to its end; without `stdin` it reads from /dev/null."""
    given: dict[str, Any] = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    return subprocess.run(
        [*RINGFENCE, *args],
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
        cwd=cwd,
        env=environment(**(env or {})),
        **given,
    )


def run(*args: str, **kwargs: Any) -> subprocess.CompletedProcess[bytes]:
    """`ringfence run ARGS`."""
    return ringfence_command("run", *args, **kwargs)


def run_json(*args: str, **kwargs: Any) -> dict[str, Any]:
    """The object that `ringfence run --json ARGS` prints."""
    result: dict[str, Any] = json.loads(run("--json", *args, **kwargs).stdout)
    return result


def start(*args: str, **kwargs: Any) -> subprocess.Popen[bytes]:
    """`ringfence run ARGS` in the background."""
    kwargs.setdefault("stdin", subprocess.DEVNULL)
    return subprocess.Popen([*RINGFENCE, "run", *args], env=environment(), **kwargs)


def is_readable(fd: int, timeout_s: float) -> bool:
    """Wait for input or an end. With poll(2): select(2) takes no descriptor above 1,023."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))
