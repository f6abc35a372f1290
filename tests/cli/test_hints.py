"""What a newcomer is told: why a first command cannot have worked, and where the caller's files are."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ringfence import Mount, Sandbox, SandboxLost, SandboxSpec
from ringfence.backends.native.backend import NativeBackend
from ringfence.cli.commands import RUN
from ringfence.cli.hints import OPTIONS, hints
from tests.cli.command import ringfence_command, run, run_json
from tests.features import require

pytestmark = pytest.mark.anyone

MOST_TRIES, ENOUGH = 300, 10

FILES = b"the sandbox does not have your files: add --here"
NETWORK = b"the sandbox has no network: allow the host with --net "


@pytest.fixture
def notes(project: Path) -> Path:
    """A directory of the caller's with a file in it."""
    (project / "notes.txt").write_text("mine\n")
    return project


# -- the caller's files ---------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["cat", "notes.txt"], ["ls", "./notes.txt"]])
def test_a_file_that_is_not_inside(command: list[str], notes: Path) -> None:
    missed = run("--", *command, cwd=notes)
    shown = run("--here", "--", *command, cwd=notes)

    assert missed.returncode != 0
    assert FILES in missed.stderr
    assert (0, b"") == (shown.returncode, shown.stderr)


@pytest.mark.skipif(shutil.which("git") is None, reason="this machine lacks: git")
def test_a_program_that_works_on_a_directory(notes: Path) -> None:
    """It names no file, and cannot work without any."""
    result = run("--", "git", "status", cwd=notes)

    assert result.returncode != 0
    assert FILES in result.stderr


@pytest.mark.parametrize(
    ("options", "command"),
    [
        ([], ["false"]),
        ([], ["sh", "-c", "exit 3"]),
        ([], ["cat", "/no/such/file"]),
        (["--here"], ["cat", "missing.txt"]),
        (["--mount", ".:/w"], ["cat", "missing.txt"]),
        (["--mount", ".:/w"], ["python3", "/w/notes.txt"]),
        (["--net", "127.0.0.1:9"], ["sh", "-c", "exit 3", "https://example.com/x"]),
    ],
)
def test_no_hint_where_it_would_be_wrong(
    options: list[str], command: list[str], notes: Path
) -> None:
    result = run(*options, "--", *command, cwd=notes)

    assert result.returncode != 0
    assert b"hint:" not in result.stderr


def test_no_hint_for_a_command_that_succeeds(notes: Path) -> None:
    assert b"" == run("--", "sh", "-c", "true", "notes.txt", cwd=notes).stderr


def test_no_hint_for_one_that_was_ended(notes: Path) -> None:
    killed = run("--", "sh", "-c", "kill -9 $$", "notes.txt", cwd=notes)
    late = run("--timeout", "200ms", "--", "tail", "-f", "/dev/null", cwd=notes)

    assert (128 + signal.SIGKILL, 124) == (killed.returncode, late.returncode)
    assert b"hint:" not in killed.stderr + late.stderr


def test_json_stays_json(notes: Path) -> None:
    assert 1 == run_json("--", "cat", "notes.txt", cwd=notes)["exit_code"]


def test_a_program_of_the_host_that_is_not_inside(notes: Path, tmp_path: Path) -> None:
    own = tmp_path / "bin"
    own.mkdir()
    (own / "mytool").write_text("#!/bin/sh\n")
    (own / "mytool").chmod(0o755)
    path = f"{own}:{os.environ['PATH']}"
    result = run("--", "mytool", cwd=notes, env={"PATH": path})

    assert 127 == result.returncode
    assert (
        f"{own}/mytool is not in the sandbox, which has only programs of /usr".encode()
        in result.stderr
    )


# -- the network ------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    ("command", "host"),
    [
        (["sh", "-c", "exit 3", "https://user@example.com:8443/x"], b"example.com:443"),
        (["python3", "-m", "pip", "install", "x"], b"HOST:443"),
    ],
)
def test_a_command_that_asks_the_network(command: list[str], host: bytes, notes: Path) -> None:
    assert NETWORK + host in run("--", *command, cwd=notes).stderr


# -- --here -----------------------------------------------------------------------------------------


def test_here_shows_this_directory_and_starts_there(notes: Path) -> None:
    result = run("--here", "--", "sh", "-c", "pwd; cat notes.txt; echo x > new", cwd=notes)

    assert b"/work\nmine\n" == result.stdout
    assert result.returncode != 0
    assert b"Read-only file system" in result.stderr
    assert not (notes / "new").exists()


def test_here_rw_may_write(notes: Path) -> None:
    result = run("--here=rw", "--", "sh", "-c", "echo x > new", cwd=notes)

    assert (0, b"") == (result.returncode, result.stderr)
    assert "x\n" == (notes / "new").read_text()
    assert notes.stat().st_uid == (notes / "new").stat().st_uid


def test_without_here_nothing_is_shown(notes: Path) -> None:
    """The control."""
    assert b"" == run("--", "sh", "-c", "ls; ls /work 2>/dev/null", cwd=notes).stdout


def test_here_beside_other_options(notes: Path) -> None:
    (notes / "sub").mkdir()
    result = run(
        "--here=ro", "--workdir", "/work/sub", "--mount", "./sub:/other:rw",
        "--", "sh", "-c", "pwd; echo y > /other/made; cat ../notes.txt", cwd=notes,
    )  # fmt: skip

    assert (0, b"/work/sub\nmine\n") == (result.returncode, result.stdout)
    assert "y\n" == (notes / "sub" / "made").read_text()


# -- options of other tools ---------------------------------------------------------------------------


@pytest.mark.parametrize("option", sorted(OPTIONS))
def test_options_of_others_are_none_of_ours(option: str) -> None:
    """A hint for an option that exists would never be read; one that names an option names a real one."""
    ours = {each.flag for each in RUN.options} | {f"-{each.short}" for each in RUN.options}
    named = [word.strip(",.;:`") for word in OPTIONS[option].split() if word.startswith("--")]
    elsewhere = {"--", "--n", "--name", "--label", "--verbose", "--server", "--snapshot"}

    assert option not in ours
    assert [] == [word for word in named if word not in ours | elsewhere]


# -- doctor ---------------------------------------------------------------------------------------------


@pytest.mark.full
def test_doctor_answers_first_and_fits_a_screen() -> None:
    short = ringfence_command("doctor")
    long = ringfence_command("doctor", "--verbose")
    lines = short.stdout.decode().splitlines()

    assert (0, 0) == (short.returncode, long.returncode)
    assert lines[0].startswith("tier light: ")
    assert "ringfence doctor --verbose" in lines[-1]
    assert 40 >= len(lines)
    assert len(lines) < len(long.stdout.splitlines())
    assert b"\x1b" not in short.stdout + long.stdout  # no colours in a pipe


# -- a helper process that crashes ----------------------------------------------------------------------


def test_a_crash_says_what_to_do() -> None:
    """Each process that the zygote forks is killed as soon as it is there; most of them half made."""
    require("user namespaces")
    backend, said = NativeBackend(), set()
    words = [sys.executable, "-c", KILLER, str(backend.zygote().pid)]
    with (
        subprocess.Popen(words, stdout=subprocess.PIPE) as killer,
        contextlib.ExitStack() as ending,
    ):
        ending.callback(killer.kill)
        assert killer.stdout is not None
        assert b"ready\n" == killer.stdout.readline()
        for _ in range(MOST_TRIES):
            try:
                Sandbox.create(backend=backend).terminate()
            except SandboxLost as exc:
                said.add(exc)
            if len(said) == ENOUGH:
                break

    assert ENOUGH == len(said)
    assert [
        each
        for each in said
        if "first process of the sandbox ended during creation" not in str(each)
    ] == []
    assert [each for each in said if "ringfence doctor --json" not in each.hint] == []
    with Sandbox.create(backend=backend) as control:
        assert control.exec(["true"]).ok
    backend.close()


KILLER = """
import os, sys
children = open(f"/proc/{sys.argv[1]}/task/{sys.argv[1]}/children")
print("ready", flush=True)
while True:
    children.seek(0)
    for pid in children.read().split():
        try:
            os.kill(int(pid), 9)
        except ProcessLookupError:
            pass
"""


def test_go_in_a_directory_that_is_no_repository(notes: Path) -> None:
    """It takes the protected, empty .git for one; the control: a repository."""
    spec = SandboxSpec(mounts=(Mount("/work", str(notes), "rw"),))

    missed = hints(["go", "build"], 1, spec, {"here": "rw"})
    (notes / ".git").mkdir()
    found = hints(["go", "build"], 1, spec, {"here": "rw"})

    assert "add -buildvcs=false" in missed[-1]
    assert not any("buildvcs" in each for each in found)
