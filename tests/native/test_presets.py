"""`protect=["@agents"]` and its like: what the names stand for cannot be changed, by whatever way.

Each attack runs twice: with the preset it must fail, and without it, the control, it must succeed.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ringfence import InvalidRequest, Mount, Sandbox, SandboxSpec
from ringfence.model.mount import PRESETS
from tests.cli.command import run
from tests.features import require
from tests.strangers import let_others_in

pytestmark = pytest.mark.anyone

MINE = "mine\n"
EVIL = "evil"
MADE = {
    "@git": (".git/HEAD", ".git/refs/heads/main"),
    "@agents": ("AGENTS.md", "CLAUDE.md", ".github/copilot-instructions.md"),
    "@ci": (".github/workflows/ci.yml", ".gitlab-ci.yml"),
}
TRIES: dict[str, str] = {
    "write": "echo evil > {path}",
    "append": "echo evil >> {path}",
    "remove and make": "rm -rf {path} && echo evil > {path}",
    "rename over": "echo evil > {beside}/plain && mv -f {beside}/plain {path}",
    "hard link over": "echo evil > {beside}/plain && ln -f {beside}/plain {path}",
    "symlink over": "echo evil > plain && ln -sf /work/plain {path}",
    "write by a hard link": "ln {path} {beside}/other && echo evil > {beside}/other",
    "write by a symlink": "ln -s /work/{path} other && echo evil > other",
    "through /proc": "echo evil > /proc/self/root/work/{path}",
    "truncate": "truncate -s 0 {path} && printf evil > {path}",
}
REPLACED = (
    "mv {top} old && mkdir -p $(dirname {path}) && echo evil > {path}",
    "cp -r {top} copy && mv {top} old && mv copy {top} && echo evil > {path}",
)
"""The parent directory is replaced."""


@pytest.fixture(scope="module", autouse=True)
def _user_namespaces() -> None:
    require("user namespaces")


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """A directory without any of the files; its parents can be entered by a sandbox's owner."""
    made = tmp_path / "empty"
    made.mkdir(mode=0o755)
    let_others_in(made)
    return made


@pytest.fixture
def repository(empty: Path) -> Path:
    directory = empty.parent / "repository"
    for path in (path for paths in MADE.values() for path in paths):
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text(MINE)
    return directory


def script(name: str, path: str) -> str:
    return TRIES[name].format(path=path, beside=os.path.dirname(path) or ".")


def attack(repository: Path, preset: str, tries: list[str]) -> None:
    """Run each try in a sandbox that may write the repository."""
    protect = [preset] if preset else None
    with Sandbox.create(
        mounts=[Mount("/work", repository, "rw")], workdir="/work", protect=protect
    ) as sandbox:
        for each in tries:
            sandbox.shell(f"rm -f plain other; {each}")


@pytest.mark.full
@pytest.mark.parametrize("preset", list(MADE))
@pytest.mark.parametrize("name", list(TRIES))
def test_what_a_preset_names_stays(preset: str, name: str, repository: Path) -> None:
    tries = [script(name, path) for path in MADE[preset]]
    attack(repository, preset, tries)

    assert [MINE] * len(tries) == [(repository / path).read_text() for path in MADE[preset]]


@pytest.mark.parametrize("preset", list(MADE))
@pytest.mark.parametrize("name", list(TRIES))
def test_the_control_changes_it(preset: str, name: str, repository: Path) -> None:
    path = MADE[preset][0]
    attack(repository, "", [script(name, path)])

    assert (repository / path).is_symlink() or EVIL in (repository / path).read_text()


@pytest.mark.parametrize("replacing", REPLACED)
@pytest.mark.parametrize(
    ("preset", "path"),
    [
        ("@git", ".git/HEAD"),
        ("@agents", ".github/copilot-instructions.md"),
        ("@ci", ".github/workflows/ci.yml"),
    ],
)
def test_its_parent_cannot_be_replaced(
    preset: str, path: str, replacing: str, repository: Path
) -> None:
    told = replacing.format(top=path.partition("/")[0], path=path)
    attack(repository, preset, [told])
    assert MINE == (repository / path).read_text()

    # `.git` holds paths that are protected without being asked for, so it is never moved.
    if preset != "@git":
        attack(repository, "", [told])
        assert EVIL in (repository / path).read_text(), "the control"


@pytest.mark.parametrize(
    ("preset", "path"), [("@agents", "AGENTS.md"), ("@ci", ".gitlab-ci.yml"), ("@git", ".git")]
)
def test_what_is_absent_cannot_be_made(preset: str, path: str, empty: Path) -> None:
    script = (
        f"rmdir {path}; echo evil > {path}; mkdir {path}; echo evil > {path}/x; ln -s /x {path}"
    )
    attack(empty, preset, [script])
    assert not (empty / path).exists()

    file = ".git/HEAD" if ".git" == path else path
    attack(empty, "", [f"echo evil > {file}"])
    assert "evil\n" == (empty / file).read_text(), "the control"


def test_work_goes_on_beside_it(repository: Path) -> None:
    with Sandbox.create(
        mounts=[Mount("/work", repository, "rw")], workdir="/work", protect=["@agents", "@ci"]
    ) as sandbox:
        result = sandbox.shell("echo new > main.c && cat AGENTS.md .github/workflows/ci.yml")

    assert (0, MINE * 2) == (result.exit_code, result.stdout_text)
    assert "new\n" == (repository / "main.c").read_text()


def test_one_mount_of_several(repository: Path, empty: Path) -> None:
    """`Mount(protect=)` takes the names, too, and holds for that mount alone."""
    mounts = [
        Mount("/work", repository, "rw", protect=["@agents"]),
        Mount("/other", empty, "rw"),
    ]
    with Sandbox.create(mounts=mounts) as sandbox:
        sandbox.shell("echo evil > /work/AGENTS.md; echo made > /other/AGENTS.md")

    assert MINE == (repository / "AGENTS.md").read_text()
    assert "made\n" == (empty / "AGENTS.md").read_text()


def test_by_the_command_line(repository: Path) -> None:
    script = "echo evil > AGENTS.md; echo evil > .github/workflows/ci.yml; echo evil > .git/HEAD"
    options = ["--protect", "@agents", "--protect", "@ci", "--protect", "@git"]
    run("--here=rw", *options, "--", "sh", "-c", script, cwd=repository)
    paths = ("AGENTS.md", ".github/workflows/ci.yml", ".git/HEAD")
    assert [MINE] * 3 == [(repository / path).read_text() for path in paths]

    run("--here=rw", "--", "sh", "-c", script, cwd=repository)
    assert ["evil\n"] * 3 == [(repository / path).read_text() for path in paths], "the control"


def test_a_preset_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"no preset '@agnets' \(did you mean @agents\?"):
        SandboxSpec(protect=("@agnets",))


def test_a_spec_has_the_paths_and_reads_its_own_form() -> None:
    spec = SandboxSpec(protect=("@ci", "@git", ".git"))

    assert (*PRESETS["@ci"], ".git") == spec.protect
    assert spec == SandboxSpec.from_json(spec.to_json())
