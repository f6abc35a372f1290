"""Transfer of the package `probes` into a sandbox, or a plain process, and of its results back."""

from __future__ import annotations

import functools
import io
import json
import os
import zipfile

from ..policy.seccomp import MACHINES
from .probes import kit, main
from .result import INCONCLUSIVE, STATUSES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from ..model.execs.exec import ExecResult
    from ..sandbox.sync import Sandbox

PYTHON = "/usr/bin/python3"
ARCHIVE = "/tmp/probes.zip"
_START = (
    # Where a sandbox has no mounts, its /tmp is at TMPDIR.
    "import os, sys; at, own = sys.argv[1], os.environ.get('TMPDIR', '/tmp'); "
    "at = at if os.path.exists(at) else at.replace('/tmp', own, 1); sys.path.insert(0, at); "
    "from importlib import import_module; "
    "getattr(import_module('probes.' + sys.argv[2]), sys.argv[3])(*sys.argv[4:])"
)
_PATIENCE_S = 300.0

Found = dict[str, tuple[str, str]]
"""Probe to status and evidence."""


def registered() -> dict[str, kit.Probe]:
    """Every probe that runs inside."""
    assert main.AREAS  # importing them registers their probes
    return kit.PROBES


@functools.cache
def archive() -> bytes:
    """The package `probes` as a zip file that Python can import from."""
    directory = os.path.dirname(main.__file__)
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        for name in sorted(os.listdir(directory)):
            if name.endswith(".py"):
                file.write(os.path.join(directory, name), f"probes/{name}")
    return content.getvalue()


def command(module: str, function: str, *arguments: str, path: str = ARCHIVE) -> list[str]:
    """Build the command that calls a function of `probes`, whose archive is at `path`."""
    return [PYTHON, "-I", "-S", "-B", "-c", _START, path, module, function, *arguments]


def request(probes: Sequence[str], context: dict[str, Any]) -> str:
    """Build the input of `main.main`."""
    machine = MACHINES.get(os.uname().machine)
    numbers = dict(machine.numbers) if machine else {}
    return json.dumps({"context": context, "numbers": numbers, "probes": list(probes)})


def read_answers(probes: Sequence[str], output: str, problem: str) -> Found:
    """Parse the results; a probe without one is inconclusive because of `problem`."""
    found: Found = {}
    for line in output.splitlines():
        try:
            id, status, evidence = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            continue
        # The other side is confined, and no friend: another status would be shown as it is.
        if isinstance(id, str) and isinstance(evidence, str) and status in STATUSES:
            found[id] = (status, evidence)
    return {id: found.get(id, (INCONCLUSIVE, f"no answer: {problem}")) for id in probes}


def run_in_copy(
    sandbox: Sandbox,
    probes: Sequence[str],
    context: dict[str, Any],
    judge: Callable[[Sandbox, Found], Found],
) -> Found:
    """Run probes in a process that began in another sandbox, and goes on in a fork of that.

    Args:
        judge: Called with the fork before it ends.

    Raises:
        Unsupported: No process of it can be copied.
    """
    sandbox.files.write(ARCHIVE, archive())
    waiting = sandbox.start(command("main", "copied"), stream_stdin=True, cwd="/tmp")
    next(iter(waiting.stdout), b"")
    (fork,) = sandbox.fork(processes="required")
    with fork:
        report = fork.fork_report
        assert report is not None
        copy = fork.process(*report.processes)
        assert copy.stdin is not None
        copy.stdin.write(request(probes, context).encode())
        copy.stdin.close()
        return judge(fork, _answers(probes, copy.wait(_PATIENCE_S)))


def run_inside(sandbox: Sandbox, probes: Sequence[str], context: dict[str, Any]) -> Found:
    """Run probes one by one in a sandbox."""
    sandbox.files.write(ARCHIVE, archive())
    result = sandbox.exec(
        command("main", "main"), stdin=request(probes, context), timeout_s=_PATIENCE_S, cwd="/tmp"
    )
    return _answers(probes, result)


def _answers(probes: Sequence[str], result: ExecResult) -> Found:
    problem = f"{result.exit_code=} {result.signal=} {result.stderr_text[-300:]}"
    return read_answers(probes, result.stdout_text, problem)
