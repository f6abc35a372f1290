"""What a command sees of the caller's files, and what it leaves there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.command import run

SHOW = "import os; print(sorted(os.listdir()), open(__file__).read()[:6])"


@pytest.fixture
def step(project: Path) -> Path:
    (project / "step.py").write_text(SHOW)
    (project / "secret.txt").write_text("hunter2")
    return project


def test_the_script_that_is_named_is_there_and_nothing_else(step: Path) -> None:
    result = run("--", "python3", "step.py", cwd=step)

    assert (b"['step.py'] import\n", b"") == (result.stdout, result.stderr)


def test_the_script_cannot_be_changed(step: Path) -> None:
    (step / "evil.sh").write_text("echo x >> evil.sh || exit 9")

    assert 9 == run("--", "sh", "evil.sh", cwd=step).returncode


def test_options_of_the_interpreter_are_skipped(step: Path) -> None:
    for options in (["-u"], ["-W", "ignore"], ["-X", "utf8", "-B"]):
        assert 0 == run("--", "python3", *options, "step.py", cwd=step).returncode


def test_a_script_in_a_directory_below(step: Path) -> None:
    (step / "tools").mkdir()
    (step / "tools/step.py").write_text(SHOW)

    assert b"['tools']" in run("--", "python3", "tools/step.py", cwd=step).stdout


def test_a_path_as_command(step: Path) -> None:
    script = step / "step.sh"
    script.write_text("#!/bin/sh\nls\n")
    script.chmod(0o755)

    assert b"step.sh\n" == run("--", "./step.sh", cwd=step).stdout
    assert 0 == run("--", str(script)).returncode


def test_it_goes_to_the_working_directory(step: Path) -> None:
    result = run("--workdir", "/work", "--", "python3", "step.py", cwd=step)

    assert b"['step.py']" in result.stdout


@pytest.mark.parametrize(
    "command",
    [
        ["cat", "secret.txt"],
        ["python3", "../project/secret.txt"],
        ["python3", "-c", "open('secret.txt')"],
        ["cat", "step.py"],
    ],
)
def test_other_files_are_not_brought_in(step: Path, command: list[str]) -> None:
    assert 0 != run("--", *command, cwd=step).returncode


def test_an_absolute_script_of_an_interpreter_is_not_brought_in(step: Path) -> None:
    assert 0 != run("--", "python3", str(step / "step.py")).returncode


def test_a_symlink_does_not_bring_in_what_lies_elsewhere(step: Path) -> None:
    (step / "link.py").symlink_to("../outside.py")
    (step.parent / "outside.py").write_text("print('seen')")

    result = run("--", "python3", "link.py", cwd=step)

    assert 0 != result.returncode
    assert b"seen" not in result.stdout


def test_with_a_mount_only_the_mount_is_there(step: Path) -> None:
    (step / "data").mkdir()

    assert 0 != run("--mount", "data:/data", "--", "python3", "step.py", cwd=step).returncode


def test_a_build_writes_where_it_may_and_nowhere_else(step: Path) -> None:
    (step / "build.py").write_text("print('built')")
    result = run(
        "--mount", ".:/work:rw", "--workdir", "/work",
        "--", "sh", "-c", "python3 build.py > out.txt", cwd=step,
    )  # fmt: skip
    made = (step / "out.txt").stat()

    assert 0 == result.returncode
    assert "built\n" == (step / "out.txt").read_text()
    assert (os.geteuid(), os.getegid()) == (made.st_uid, made.st_gid)


def test_a_read_only_mount_is_read_only(step: Path) -> None:
    assert 0 != run("--mount", ".:/work", "--", "touch", "/work/x", cwd=step).returncode
    assert not (step / "x").exists()


def test_a_protected_path_stays_as_it_is(step: Path) -> None:
    """Also one that does not exist yet; the control is a path that is not named."""
    command = ["sh", "-c", "mkdir -p /w/kept /w/free; touch /w/kept/x; touch /w/free/x"]
    run("--mount", ".:/w:rw", "--protect", "kept", "--", *command, cwd=step)

    assert (step / "free/x").exists()
    assert not (step / "kept").exists()


def test_the_default_set_can_be_switched_off_by_name(step: Path) -> None:
    command = ["sh", "-c", "echo x > /w/.envrc"]
    assert 0 != run("--mount", ".:/w:rw", "--", *command, cwd=step).returncode
    assert (
        0 == run("--mount", ".:/w:rw", "--unprotect", ".envrc", "--", *command, cwd=step).returncode
    )
    assert (step / ".envrc").exists()


def test_the_callers_environment_stays_outside() -> None:
    result = run("--env", "GIVEN=yes", "--", "env", env={"CALLERS_TOKEN": "hunter2"})

    assert b"GIVEN=yes\n" in result.stdout
    assert b"hunter2" not in result.stdout


def test_memory_survives_in_a_directory_of_the_host(step: Path) -> None:
    (step / "memory").mkdir()
    for _ in range(2):
        run("--memory-dir", "memory", "--", "sh", "-c", "echo x >> /mnt/memory/log", cwd=step)

    assert "x\nx\n" == (step / "memory/log").read_text()
