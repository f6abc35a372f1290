"""Git's settings in the repositories below a writable mount: they run when their owner uses git there."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ringfence import Sandbox
from ringfence.errors import InvalidRequest
from ringfence.policy import repositories
from tests.native.conftest import MakeSandbox

pytestmark = pytest.mark.anyone

NAMES = {
    **dict.fromkeys(("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME"), "a"),
    **dict.fromkeys(("GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"), "a@a.test"),
}
ENV = {
    **os.environ,
    **NAMES,
    **dict.fromkeys(("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"), "/dev/null"),
    "GIT_ALLOW_PROTOCOL": "file",  # of submodules
}


def git(directory: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(directory), *words], check=True, env=ENV, capture_output=True)


def census(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a submodule and a linked work tree, one deep down, and a bare one."""
    root = tmp_path_factory.mktemp("projects")
    library = root / "libs" / "deep" / "library"
    app = root / "app"
    for each in (library, app):
        each.mkdir(parents=True)
        git(each, "init", "-q")
        git(each, "commit", "-q", "--allow-empty", "-m", "first")
    git(app, "submodule", "add", "-q", str(library), "sub")
    git(app, "worktree", "add", "-q", "../linked")
    git(root, "clone", "-q", "--bare", "app", "bare.git")
    return root


PLACES = {
    "deep": "libs/deep/library/.git",
    "submodule": "app/.git/modules/sub",
    "bare": "bare.git",
    "app": "app/.git",
}


def test_they_are_read_only_wherever_they_are(make: MakeSandbox, projects: Path) -> None:
    """And work goes on in each: what is protected is what runs, or says what runs."""
    before = census(projects)
    sandbox = make(mounts=[f"{projects}:/work:rw"])

    for name, place in PLACES.items():
        for path in ("hooks/post-checkout", "config", "commondir", "config.worktree"):
            assert not sandbox.shell(f"echo x >> /work/{place}/{path}").ok, (name, path)
        assert not sandbox.shell(f"mv /work/{place} /work/{place}.moved").ok, name
    for link in ("app/sub/.git", "linked/.git", "app/.git/worktrees/linked/commondir"):
        assert not sandbox.shell(f"echo gitdir: /work/evil > /work/{link}").ok, link
    for work in ("libs/deep/library", "app", "app/sub"):
        done = sandbox.shell(f"cd /work/{work} && git commit -q --allow-empty -m made", env=NAMES)
        assert done.ok, (work, done.stderr_text)

    sandbox.terminate()
    grown = {os.path.basename(path) for path in set(census(projects)) - set(before)}
    assert not grown & {"hooks", "config", "commondir", "config.worktree"}
    git(projects / "app", "status")


def test_they_can_be_left_writable_by_name(make: MakeSandbox, projects: Path) -> None:
    sandbox = make(mounts=[f"{projects}:/work:rw"], unprotect=["nested"])

    assert sandbox.shell(f"touch /work/{PLACES['deep']}/hooks-2 /work/app/.git/config").ok
    assert sandbox.shell("mv /work/bare.git /work/b && mv /work/b /work/bare.git").ok


def test_too_many_are_refused(monkeypatch: pytest.MonkeyPatch, projects: Path) -> None:
    """Not some protected and others not, without a word."""
    monkeypatch.setattr(repositories, "_MOST_FOUND", 2)

    with pytest.raises(InvalidRequest, match="too many") as refusal:
        Sandbox.create(mounts=[f"{projects}:/work:rw"])

    assert "protect" == refusal.value.field
    assert "nested" in refusal.value.hint
