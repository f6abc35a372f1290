"""What is protected without being asked for: ordinary work goes on, and git is left nothing to run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ringfence import Mount
from ringfence.model.mount import READ_WRITE
from ringfence.policy.protected import DEFAULTS, MAY_BE_MADE, WHERE
from tests.native.conftest import MakeSandbox

IDENTITY = {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    **{
        f"GIT_{who}_{what}": "someone"
        for who in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    },
}


def git(repo: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """On the host, by the owner of the repository."""
    return subprocess.run(
        ["git", *arguments],
        cwd=repo,
        env={**os.environ, **IDENTITY, "GIT_EDITOR": "true"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """With a side branch that a rebase onto the main one stops in: both change one line."""
    path = tmp_path / "repo"
    path.mkdir()
    for line in (
        "init -q -b main .",
        "add -A",
        "commit -q --allow-empty -m first",
        "checkout -q -b side",
        "commit -q --allow-empty -m side",
        "checkout -q main",
        "commit -q --allow-empty -m main",
    ):
        assert git(path, *line.split()).returncode == 0
    return path


# Makes or changes each as a file, as a directory with a file in it, and by moving another there.
OVERWRITE = """
import os, sys
for name in sys.argv[1:]:
    os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
    for path in (name, name + "/planted"):
        try:
            open(path, "ab").write(b"planted")
            print(name)
        except OSError: pass
    try:
        open("mine", "w").close()
        os.rename("mine", name)
        print(name)
    except OSError: pass
"""


@pytest.mark.parametrize("unprotect", [(), ("all",)])
def test_each_name_stays_as_it_is(
    make: MakeSandbox, repo: Path, unprotect: tuple[str, ...]
) -> None:
    (repo / ".hg").mkdir()
    for name in WHERE.values():
        if name != ".hg":
            (repo / name).touch()
    for name in MAY_BE_MADE[1:]:
        (repo / name).mkdir()
    sandbox = make(mounts=[Mount("/repo", str(repo), READ_WRITE)], unprotect=unprotect)

    result = sandbox.exec(["python3", "-c", OVERWRITE, *DEFAULTS], cwd="/repo")

    assert not result.stderr
    assert set(DEFAULTS if unprotect else ()) == set(result.stdout_text.split())


def test_ordinary_work_goes_on(make: MakeSandbox, repo: Path) -> None:
    """A commit, a rebase with a program of its own, a clean status: inside, and on the host meanwhile."""
    sandbox = make(mounts=[Mount("/work", str(repo), READ_WRITE)], workdir="/work", env=IDENTITY)
    done = sandbox.shell(
        "set -e; git status --porcelain; echo x >file; git add -A; git commit -qm file;"
        "git checkout -q side; git rebase -q -x 'touch ran' main; git status --porcelain; git log --oneline"
    )
    assert done.ok, done.stderr_text
    assert "?? ran" == done.stdout_text.splitlines()[0]
    assert "rebas" not in git(repo, "status").stdout
    sandbox.terminate()

    assert {".git", "file", "ran"} == set(os.listdir(repo))
    assert not git(repo, "fsck").stderr


@pytest.mark.parametrize(
    ("state", "files"),
    [
        ("rebase-merge", {"git-rebase-todo": "pick 1\n exec touch PLANTED\n"}),
        ("rebase-merge", {"git-rebase-todo": "pick 1\nx touch PLANTED\n"}),
        ("rebase-merge", {"git-rebase-todo": "pick 1\n", "strategy": "../planted\n"}),
        ("rebase-merge", {"onto": "no todo\n"}),
        ("sequencer", {"todo": "pick 1\n", "opts": "[options]\n\tstrategy = ../planted\n"}),
        ("sequencer", {"todo": "pick 1\n", "opts": "[options] Strategy = ../planted\n"}),
    ],
)
def test_nothing_to_run_is_left(
    make: MakeSandbox, repo: Path, state: str, files: dict[str, str]
) -> None:
    """What `git rebase --continue` on the host would run is out of git's way, and still to be read."""
    sandbox = make(mounts=[Mount("/work", str(repo), READ_WRITE)])
    assert sandbox.shell(f"mkdir /work/.git/{state}").ok
    for name, text in files.items():
        sandbox.files.write(f"/work/.git/{state}/{name}", text)
    sandbox.terminate()

    left = [name for name in os.listdir(repo / ".git") if name.startswith(state)]
    assert [f"{state}.left-"] == [name[: len(state) + 6] for name in left]
    assert set(files) == set(os.listdir(repo / ".git" / left[0]))


def test_a_link_is_not_left_either(make: MakeSandbox, repo: Path) -> None:
    sandbox = make(mounts=[Mount("/work", str(repo), READ_WRITE)])
    assert sandbox.shell("mkdir /work/x && ln -s ../x /work/.git/rebase-merge").ok
    sandbox.terminate()

    assert not os.path.lexists(repo / ".git/rebase-merge")
    assert (repo / "x").is_dir()


def test_a_plain_rebase_is_left_to_go_on_with(make: MakeSandbox, repo: Path) -> None:
    """One that stopped in a conflict inside is continued on the host."""
    sandbox = make(mounts=[Mount("/work", str(repo), READ_WRITE)], workdir="/work", env=IDENTITY)
    stopped = sandbox.shell(
        "echo 1 >file; git add -A; git commit -qm one; git checkout -q side;"
        "echo 2 >file; git add -A; git commit -qm two; git rebase main"
    )
    assert not stopped.ok
    sandbox.terminate()

    assert "rebas" in git(repo, "status").stdout
    (repo / "file").write_text("3\n")
    git(repo, "add", "-A")
    assert git(repo, "rebase", "--continue").returncode == 0


def test_what_was_going_on_before_cannot_be_changed(make: MakeSandbox, repo: Path) -> None:
    state = repo / ".git/rebase-merge"
    state.mkdir()
    (state / "git-rebase-todo").write_text("exec true\n")
    sandbox = make(mounts=[Mount("/work", str(repo), READ_WRITE)])
    assert not sandbox.shell("echo exec touch PLANTED >>/work/.git/rebase-merge/git-rebase-todo").ok
    assert not sandbox.shell("mv /work/.git/rebase-merge /work/.git/moved").ok
    sandbox.terminate()

    assert "exec true\n" == (state / "git-rebase-todo").read_text()


@pytest.mark.parametrize("is_yarns", [True, False])
def test_a_stand_in_breaks_neither_yarn_nor_git(
    make: MakeSandbox, repo: Path, is_yarns: bool
) -> None:
    """Yarn reads its settings, a file; elsewhere git would show such a file as a change."""
    if is_yarns:
        (repo / "yarn.lock").write_text("")
    with make(mounts=[Mount("/work", str(repo), READ_WRITE)]):
        assert is_yarns == (repo / ".yarnrc.yml").is_file()
        assert (repo / ".yarnrc.yml").exists()
    assert not (repo / ".yarnrc.yml").exists()
