"""How it ended: exit codes, timeouts, and the JSON object."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time

import pytest

from ringfence.cli.commands import LIMITS
from tests.cli.command import PATIENCE_S, RINGFENCE, environment, run, run_json, start

pytestmark = pytest.mark.anyone

KEYS = {
    "stdout", "stderr", "exit_code", "signal", "timed_out", "oom_killed", "killed_by", "truncated",
    "stdout_dropped_bytes", "stderr_dropped_bytes", "duration_s", "resource_usage", "protections",
}  # fmt: skip
TREE = "echo so far; setsid sleep 600 & sleep 600"  # longer than a test may take


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 0", 0), ("exit 3", 3), ("exit 255", 255), ("kill -TERM $$", 143), ("kill -9 $$", 137)],
)
def test_the_exit_code_is_the_commands(script: str, code: int) -> None:
    assert code == run("--", "sh", "-c", script).returncode
    assert code == run("--json", "--", "sh", "-c", script).returncode


@pytest.mark.full
@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        ("no-such-command", 127, b"no-such-command: No such file or directory"),
        ("/no/such/command", 127, b"No such file or directory"),
        ("/usr", 126, b"/usr: Permission denied"),
        ("/usr/lib/os-release", 126, b"Permission denied"),
    ],
)
def test_what_cannot_be_run_is_reported_as_a_shell_does(
    command: str, code: int, says: bytes
) -> None:
    result = run("--", command)

    assert code == result.returncode
    assert result.stderr.startswith(b"ringfence: ")
    assert says in result.stderr
    assert says.decode() in run_json("--", command)["stderr"]


def test_a_timeout_ends_the_tree_in_time_and_keeps_the_output() -> None:
    began = time.monotonic()
    result = run("--timeout", "1s", "--", "sh", "-c", TREE)
    took_s = time.monotonic() - began

    assert 124 == result.returncode
    assert b"so far\n" == result.stdout
    assert b"ringfence: timed out after 1 s" in result.stderr
    assert took_s >= 1.0


def test_a_timeout_of_many_days() -> None:
    """poll(2) takes 24 days at most."""
    result = run("--timeout", "1440h", "--", "echo", "x")

    assert (0, b"x\n") == (result.returncode, result.stdout)


def test_a_timeout_with_a_reader_that_stands_still_returns_all_the_same() -> None:
    with start("--timeout", "500ms", "--", "yes", stdout=subprocess.PIPE) as process:
        assert 124 == process.wait(PATIENCE_S)


def test_json_has_everything() -> None:
    result = run_json("--", "sh", "-c", "echo out; echo err >&2; exit 4")

    assert KEYS == set(result)
    assert ("out\n", "err\n", 4, None) == tuple(
        result[key] for key in ("stdout", "stderr", "exit_code", "signal")
    )
    assert not result["timed_out"]
    assert not result["truncated"]
    assert result["duration_s"] > 0
    assert result["resource_usage"]["cpu_ns"] > 0
    assert {"seccomp", "landlock", "namespaces", "network"} <= {
        each["name"] for each in result["protections"]
    }


def test_json_reads_input_too() -> None:
    assert "fed" == run_json("--", "cat", stdin=b"fed")["stdout"]


def test_json_keeps_bytes_that_are_not_text() -> None:
    result = run_json("--", "printf", r"\377\000x")

    assert b"\xff\0x" == base64.b64decode(result["stdout_base64"])


def test_json_of_a_signal() -> None:
    result = run_json("--", "sh", "-c", "kill -TERM $$")

    assert (None, 15) == (result["exit_code"], result["signal"])


def test_json_of_a_timeout() -> None:
    result = run_json("--timeout", "500ms", "--", "sh", "-c", TREE)

    assert result["timed_out"]
    assert "timeout" == result["killed_by"]
    assert "so far\n" == result["stdout"]


def test_json_bounds_what_it_keeps() -> None:
    result = run_json("--output-bytes", "1000", "--", "head", "-c", "1000000", "/dev/zero")

    assert result["truncated"]
    assert 1000 == len(result["stdout"])
    assert 999_000 == result["stdout_dropped_bytes"]


def test_json_is_one_line_and_alone() -> None:
    result = run("--json", "--", "sh", "-c", "echo a; echo b")

    assert 1 == result.stdout.count(b"\n")
    assert b"" == result.stderr


def test_memory_that_runs_out_is_named() -> None:
    grow = "x = bytearray()\nwhile True: x += bytes(1 << 20)"
    result = run_json("--memory", "64m", "--timeout", "30s", "--", "python3", "-c", grow)

    assert result["oom_killed"] or "MemoryError" in result["stderr"]
    assert not result["timed_out"]


def test_a_limit_that_holds_less_is_warned_of() -> None:
    """Where every limit holds nothing is said, where not each is named; never silence."""
    flags = ["--memory", "200m", "--pids", "50", "--disk", "50m"]
    weak = {
        each["name"]
        for each in run_json(*flags, "--", "true")["protections"]
        if each["status"] != "enforced"
    }

    result = run(*flags, "--", "true")
    warned = [line for line in result.stderr.decode().splitlines() if "warning" in line]
    allowed = run(*flags, "--allow-degraded", "*", "--", "true")

    assert 0 == result.returncode
    assert len(weak & set(LIMITS.values())) == len(warned)
    assert all(line.startswith("ringfence: warning: --") for line in warned)
    assert b"" == allowed.stderr


@pytest.mark.full
@pytest.mark.parametrize("backend", ["native", "bubblewrap"])
@pytest.mark.parametrize("option", ["--memory=64m", "--cpus=1", "--pids=50", "--disk=50m"])
def test_a_limit_that_is_none_is_refused(backend: str, option: str) -> None:
    """Naming a limit does not allow it to be missing; saying so does."""
    if backend == "bubblewrap" and not shutil.which("bwrap"):
        pytest.skip("bwrap is not installed")
    flag, _, _value = option.partition("=")
    allowed = run("--backend", backend, option, "--allow-degraded", "*", "--json", "--", "true")
    held = {each["name"]: each for each in json.loads(allowed.stdout)["protections"]}
    limit = held.get(LIMITS[flag.removeprefix("--")])
    is_none = limit is None or limit["status"] == "missing" or limit["why"].startswith("none")

    plain = run("--backend", backend, option, "--", "true")
    assert (125 if is_none else 0) == plain.returncode
    if is_none:
        (line,) = plain.stderr.decode().splitlines()
        assert line.startswith(f"ringfence: {flag}: ")
        assert "allow_degraded=" in line


@pytest.mark.full
def test_with_few_files_it_runs_or_says_that_they_are_too_few() -> None:
    """Never that something else is the matter: each of its processes meets the limit somewhere else."""
    codes = set()
    for most in range(12, 72, 6):
        limited = [
            "sh",
            "-c",
            f'ulimit -n {most}; exec "$@"',
            "sh",
            *RINGFENCE,
            "run",
            "--",
            "true",
        ]
        result = subprocess.run(
            limited,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=environment(),
            timeout=PATIENCE_S,
            check=False,
        )
        codes.add(result.returncode)
        assert result.returncode == 0 or b"`ulimit -n`" in result.stderr, (most, result.stderr)

    assert {0, 125} == codes
