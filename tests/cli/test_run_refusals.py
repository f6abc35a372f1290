"""Bad input: exit code 125, one line that names the option, and nothing started."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.cli.command import PATIENCE_S, RINGFENCE, environment, ringfence_command, run

pytestmark = pytest.mark.anyone

REFUSED = [
    ([], "CMD", "argv"),
    (["--"], "CMD", "argv"),
    (["--mount", "/no/such/path:/x", "--", "true"], "--mount", "mounts.source"),
    (["--mount", "lonely", "--", "true"], "--mount", "mount"),
    (["--mount", ".:relative", "--", "true"], "--mount", "mount.target"),
    (["--mount", ".:/a/../b", "--", "true"], "--mount", "mount.target"),
    (["--mount", ".:/proc", "--", "true"], "--mount", "mount.target"),
    (["--mount", ".:/proc/self", "--", "true"], "--mount", "mount.target"),
    (["--mount", ".:/", "--", "true"], "--mount", "mount.target"),
    (["--mount", ".:/x", "--mount", "/usr:/x/:rw", "--", "true"], "--mount", "mounts[1].target"),
    (["--mount", ".:/home", "--", "true"], "--mount", "mounts.target"),
    (["--mount", ".:/home", "--workdir", "/home/x", "--", "true"], "--workdir", "cwd"),
    (["--memory-dir", "/no/such/path", "--", "true"], "--memory-dir", ""),
    (["--memory-dir", "/etc/passwd", "--", "true"], "--memory-dir", "memory_dir"),
    (["--memory", "lots", "--", "true"], "--memory", "limits.memory_bytes"),
    (["--memory", "-1", "--", "true"], "--memory", "limits.memory_bytes"),
    (["--memory", "1", "--", "true"], "--memory", ""),
    (["--memory", "99999999999g", "--", "true"], "--memory", ""),
    (["--cpus", "-1", "--", "true"], "--cpus", ""),
    (["--cpus", "nan", "--", "true"], "--cpus", ""),
    (["--cpus", "two", "--", "true"], "--cpus", "limits.cpus"),
    (["--cpus", "1_0", "--", "true"], "--cpus", "limits.cpus"),
    (["--mount", ".:/w:rx", "--", "true"], "--mount", "mount.target"),
    (["--allow-degraded", "everything", "--", "true"], "--allow-degraded", "allow_degraded[0]"),
    (["--pids", "0", "--", "true"], "--pids", ""),
    (["--pids", "1.5", "--", "true"], "--pids", "limits.pids"),
    (["--disk", "x", "--", "true"], "--disk", "limits.disk_bytes"),
    (["--inodes", "-5", "--", "true"], "--inodes", ""),
    (["--open-files", "x", "--", "true"], "--open-files", "limits.open_files"),
    (["--timeout", "soon", "--", "true"], "--timeout", "timeout_s"),
    (["--timeout", "-1", "--", "true"], "--timeout", "timeout_s"),
    (["--timeout", "0", "--", "true"], "--timeout", "timeout_s"),
    (["--env", "1A=b", "--", "true"], "--env", "env.1A"),
    (["--env", "NOVALUE", "--", "true"], "--env", "env"),
    (["--workdir", "relative", "--", "true"], "--workdir", "workdir"),
    (["--user", "nosuchuser", "--", "true"], "--user", "user"),
    (["--profile", "nosuchprofile", "--", "true"], "--profile", "profile"),
    (["--backend", "nosuchbackend", "--", "true"], "--backend", "backend"),
    (["--tier", "medium", "--", "true"], "--tier", "tier"),
    (["--backend", "native", "--tier", "strong", "--", "true"], "--tier", "tier"),
    (["--net", "exa mple.com", "--", "true"], "--net", ""),
    (["--protect", "../up", "--", "true"], "--protect", ""),
    (["--protect", "kept", "--", "true"], "--protect", "protect"),
    (["--mount", ".:/w", "--protect", "kept", "--", "true"], "--protect", "protect"),
    (["--mount", ".:/w:rw", "--protect", "/w", "--", "true"], "--protect", "protect"),
    (["--mount", ".:/w:rw", "--protect", "/work/x", "--", "true"], "--protect", "protect"),
    (["--mount", ".:/w:rw", "--unprotect", "nothing", "--", "true"], "--unprotect", "unprotect"),
    (["--no-such-option", "--", "true"], "--no-such-option", "--no-such-option"),
    (["--memory"], "--memory", "--memory"),
    (["--json=yes", "--", "true"], "--json", "--json"),
]


@pytest.mark.parametrize(("args", "flag", "field"), REFUSED, ids=lambda value: str(value)[:40])
def test_it_is_refused_by_name(args: list[str], flag: str, field: str) -> None:
    result = run(*args)

    assert (125, b"") == (result.returncode, result.stdout)
    assert 1 == result.stderr.count(b"\n")
    assert result.stderr.startswith(f"ringfence: {flag}: ".encode())
    if "--json=yes" not in args:
        _check_json(run("--json", *args).stdout, field)


def _check_json(stdout: bytes, field: str) -> None:
    error = json.loads(stdout)["error"]

    assert {"code", "message", "hint", "field", "retryable"} <= set(error)
    assert error["message"]
    assert error["field"]
    assert field in ("", error["field"])


def test_a_nul_never_gets_as_far_as_an_argument() -> None:
    """exec(2) itself ends an argument at NUL, so the kernel's caller refuses it."""
    with pytest.raises(ValueError, match="null byte"):
        run("--", "echo", "a\0b")


def test_a_misspelt_option_gets_a_suggestion() -> None:
    assert b"did you mean --memory?" in run("--memroy", "1g", "--", "true").stderr


def test_a_commands_own_options_are_not_ours() -> None:
    assert b"--memory lots\n" == run("--", "echo", "--memory", "lots").stdout
    assert b"--json\n" == run("echo", "--json").stdout


@pytest.mark.parametrize(
    "args", [["no-such-command"], ["rum"], ["doctor", "extra"], ["bench", "x"]]
)
def test_other_commands_refuse_too(args: list[str]) -> None:
    result = ringfence_command(*args)

    assert 125 == result.returncode
    assert result.stderr.startswith(b"ringfence: ")
    assert 1 == result.stderr.count(b"\n")


@pytest.mark.parametrize("args", [["--help"], ["run", "--help"], ["doctor", "-h"], ["bench", "-h"]])
def test_help_has_examples(args: list[str]) -> None:
    result = ringfence_command(*args)

    assert 0 == result.returncode
    assert b"Examples:" in result.stdout
    assert b"\x1b" not in result.stdout


def test_version() -> None:
    from ringfence import __version__

    assert f"ringfence {__version__}\n".encode() == ringfence_command("--version").stdout


def test_bytes_that_are_no_text_are_named_too() -> None:
    result = run("--", "no\udcffsuch")

    assert (127, b"ringfence: no") == (result.returncode, result.stderr[:13])


@pytest.mark.parametrize("option", [["--mount", "x:/x"], ["--memory-dir", "x"]])
def test_a_directory_that_is_gone_is_no_place_to_start_from(
    option: list[str], tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    script = 'rmdir "$0" && exec "$@"'
    result = subprocess.run(
        ["sh", "-c", script, str(gone), *RINGFENCE, "run", *option, "--", "true"],
        cwd=gone,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        env=environment(),
        timeout=PATIENCE_S,
        check=False,
    )

    assert 125 == result.returncode
    assert f"ringfence: {option[0]}: the current directory is gone".encode() in result.stderr


def test_a_mount_that_takes_nothing_new_is_named() -> None:
    """Not somebody else's sandbox, who might let go of it: /proc never has a directory more."""
    result = run("--mount", "/proc:/x:rw", "--", "true")

    assert 125 == result.returncode
    assert b"no directory can be made in /proc" in result.stderr
    assert b"try again" not in result.stderr
