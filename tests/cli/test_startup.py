"""`ringfence run` starts fast because it reads little: what it must never import."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cli.command import PATIENCE_S, environment

# Each takes from half a millisecond to more than Python's own start.
HEAVY = {
    "argparse", "asyncio", "collections", "contextlib", "ctypes", "dataclasses", "enum",
    "functools", "hashlib", "heapq", "inspect", "json", "logging", "pathlib", "re", "shutil", "signal",
    "socket", "struct", "subprocess", "tempfile", "termios", "threading", "typing",
}  # fmt: skip
# Of ours, what a command without host directories, files and forks never uses; each costs 0.2 ms.
UNUSED = {
    "backends.local.agents.files", "backends.local.mounts.denied", "backends.local.mounts.protect",
    "backends.local.mounts.sources", "backends.native.connecting", "backends.native.files",
    "launcher.pid1.netlink_sockets", "launcher.placeholders", "linux.seccomp", "model.changes",
    "model.files", "model.fork", "policy.protected",
}  # fmt: skip
TELL = """
import os, sys
def tell(code):
    sys.stderr.write(" ".join(sys.modules)); sys.stderr.flush(); leave(code)
leave, os._exit = os._exit, tell
sys.argv = ["ringfence", "run", *sys.argv[1:]]
from ringfence.cli.main import main
main()
"""


def _loaded(*args: str) -> set[str]:
    # -S: site may load anything on its own, by way of .pth files.
    process = subprocess.run(
        [sys.executable, "-S", "-c", TELL, *args],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        env=environment(),
        timeout=PATIENCE_S,
        check=False,
    )
    return set(process.stderr.decode().split())


def test_a_run_loads_nothing_heavy() -> None:
    loaded = _loaded("--", "true")

    assert "ringfence.cli.supervise" in loaded
    assert set() == loaded & HEAVY
    assert set() == loaded & {f"ringfence.{name}" for name in UNUSED}


@pytest.mark.parametrize(
    "options",
    [["--timeout", "5s", "--pids", "9"], ["--mount", "/usr/lib:/mnt/x"], ["--env", "A=b"]],
    ids=str,
)
def test_nor_does_one_with_options(options: list[str]) -> None:
    assert set() == _loaded(*options, "--", "true") & HEAVY


def test_the_zygote_is_started_before_anything_else_is_read() -> None:
    """The control is the import: with it done, the spawn has long happened."""
    script = """
import sys
sys.argv = ["ringfence", "run", "--", "true"]
import ringfence.launcher.spawn as spawn
real = spawn.spawn
def tell():
    print(*[name for name in sys.modules if name.startswith("ringfence")]); sys.stdout.flush()
    return real()
spawn.spawn = tell
from ringfence.cli.main import main
main()
"""
    process = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        env=environment(),
        timeout=PATIENCE_S,
        check=True,
    )

    assert "ringfence.model" not in process.stdout.decode().split()
