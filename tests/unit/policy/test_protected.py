"""Names that are protected in a mount, by what is in its directory on the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence import Mount, SandboxSpec
from ringfence.errors import InvalidRequest
from ringfence.model.mount import READ_WRITE
from ringfence.policy.protected import (
    BY_KIND,
    DEFAULTS,
    EVERYTHING,
    HOME_DEFAULTS,
    MAY_BE_MADE,
    NESTED,
    OWN,
    WHERE,
    check_names,
    wanted,
)

pytestmark = pytest.mark.anyone
MOUNT = Mount("/work", "/somewhere", READ_WRITE)


def names(source: Path) -> set[str]:
    return {name for name, _ in wanted(MOUNT, SandboxSpec(), str(source))}


def test_what_depends_on_nothing_is_always_protected(tmp_path: Path) -> None:
    assert {*DEFAULTS} - {*WHERE} == names(tmp_path)


@pytest.mark.parametrize("marker", sorted({*WHERE.values()}))
@pytest.mark.parametrize("kind", ["file", "directory", "link", "dangling link", "link to itself"])
def test_what_depends_on_another_is_protected_where_that_is_there_in_any_form(
    tmp_path: Path, marker: str, kind: str
) -> None:
    """A dangling link can be replaced, or what it names be made."""
    depending = {name for name, where in WHERE.items() if where == marker}
    assert depending.isdisjoint(names(tmp_path))
    place = tmp_path / marker
    if kind == "file":
        place.touch()
    elif kind == "directory":
        place.mkdir()
    else:
        place.symlink_to({"link": "/etc", "dangling link": "nowhere"}.get(kind, marker))

    assert {*DEFAULTS} - {*WHERE} | depending == names(tmp_path)


def test_no_name_is_left_out_of_the_lists() -> None:
    """Each is a program of the host's that obeys it: a name that is gone here is a way out of the sandbox."""
    assert {
        *(".git/hooks", ".git/config", ".git/commondir", ".git/config.worktree"),
        *(".git/info/attributes", ".git/rebase-merge", ".git/sequencer", ".gitmodules", ".hg/hgrc"),
        *(".husky", ".pre-commit-config.yaml"),
        *("lefthook.yml", "lefthook-local.yml", ".lefthook.yml"),
        *(".envrc", ".direnv", ".tool-versions", "mise.toml", ".mise.toml"),
        *(".vscode", ".idea", ".zed", ".devcontainer", ".devcontainer.json", ".exrc"),
        *(".mcp.json", ".agents", ".aider.conf.yml", ".amazonq", ".claude", ".codex", ".continue"),
        *(".cursor", ".factory", ".gemini", ".kilocode", ".kiro", ".opencode", "opencode.json"),
        *("opencode.jsonc", ".qwen", ".roo", ".windsurf", ".yarnrc.yml", ".ripgreprc"),
    } == {*DEFAULTS}
    assert {
        *(".bashrc", ".bash_profile", ".bash_login", ".bash_logout", ".bash_aliases", ".profile"),
        *(
            ".zshrc",
            ".zprofile",
            ".zshenv",
            ".zlogin",
            ".zlogout",
            ".config/fish",
            ".ssh",
            ".gnupg",
        ),
        *(
            ".gitconfig",
            ".config/git",
            ".local/bin",
            ".cargo/bin",
            ".vimrc",
            ".vim",
            ".config/nvim",
        ),
        *(".config/zed", ".config/Code", ".xprofile", ".pam_environment", ".config/autostart"),
        *(".config/systemd", ".config/environment.d", ".local/share/applications"),
    } == {*HOME_DEFAULTS}
    assert {*DEFAULTS, *HOME_DEFAULTS} == OWN
    assert sum(map(len, BY_KIND.values())) == len(DEFAULTS) == len({*DEFAULTS})
    assert {".git/config", ".git/rebase-merge", ".git/sequencer"} == {*MAY_BE_MADE}


@pytest.mark.parametrize("through", ["", "link"])
def test_a_home_is_known_as_such_through_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, through: str
) -> None:
    """Mounts come with their links resolved; `HOME` is as the system's administrator has written it."""
    (home := tmp_path / "home").mkdir()
    (tmp_path / "link").symlink_to(home)
    monkeypatch.setenv("HOME", str(tmp_path / (through or "home")))

    assert {*HOME_DEFAULTS} <= names(home)
    assert {*HOME_DEFAULTS}.isdisjoint(names(tmp_path)), "nor what is around a home"
    assert {*HOME_DEFAULTS}.isdisjoint(names(tmp_path / "home" / "below"))


def test_a_mount_s_own_list_is_all_there_is(tmp_path: Path) -> None:
    mount = Mount("/work", str(tmp_path), READ_WRITE, protect=("a", "b/c"))
    assert [("a", True), ("b/c", True)] == wanted(mount, SandboxSpec(), str(tmp_path))
    assert [] == wanted(Mount("/work", "/x", READ_WRITE, protect=()), SandboxSpec(), str(tmp_path))


def test_paths_of_the_spec_are_of_the_mount_that_they_lie_in(tmp_path: Path) -> None:
    mount = Mount("/work", str(tmp_path), READ_WRITE)
    spec = SandboxSpec(
        protect=("rel/a", "/work/abs", "/works/beside", "/other/b", "/work", ".envrc"),
        unprotect=("all",),
    )
    assert [("rel/a", True), ("abs", True), (".envrc", True)] == wanted(mount, spec, str(tmp_path))


def test_what_the_user_names_is_the_users_also_where_it_is_a_default(tmp_path: Path) -> None:
    """Of the two only what was named is refused where it cannot be protected."""
    chosen = wanted(MOUNT, SandboxSpec(protect=(".envrc",)), str(tmp_path))
    assert 1 == [name for name, _ in chosen].count(".envrc")
    assert (".envrc", True) in chosen
    assert (".direnv", False) in chosen


def git_directory(path: Path) -> None:
    for each in ("objects", "refs"):
        (path / each).mkdir(parents=True)
    (path / "HEAD").touch()


def test_what_is_unprotected_by_name_is_so_in_nested_repositories_too(tmp_path: Path) -> None:
    git_directory(tmp_path / "app" / ".git")

    assert {"app/.git/hooks", "app/.git/config"} <= names(tmp_path)
    for words, left in (
        ((".git/hooks",), {"app/.git/config"}),
        (("nested",), {".git/hooks", ".git/config"}),
        (("*",), set()),
        (("all",), set()),
    ):
        spec = SandboxSpec(unprotect=words)
        found = {name for name, _ in wanted(MOUNT, spec, str(tmp_path))}
        assert left <= found, words
        gone = {"app/.git/hooks"} if left else found
        assert found.isdisjoint(gone), words


def test_what_leads_git_to_a_repository_is_protected_unless_all_of_git_is_not(
    tmp_path: Path,
) -> None:
    """A work tree's file `.git` could lead to settings of the sandbox's own."""
    git_directory(tmp_path / ".git")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / ".git").write_text("gitdir: ../.git/worktrees/tree\n")

    assert "tree/.git" in names(tmp_path)
    spec = SandboxSpec(unprotect=tuple(name for name in DEFAULTS if name.startswith(".git/")))
    assert "tree/.git" not in {name for name, _ in wanted(MOUNT, spec, str(tmp_path))}


@pytest.mark.parametrize("name", [*sorted(OWN), *EVERYTHING, NESTED])
def test_each_name_may_be_unprotected(name: str) -> None:
    check_names((name,))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        (".git/hook", ".git/hooks"),
        ("@secrets", "presets are for --protect"),
        ("Makefile.something", "lists the names"),
        ("", "lists the names"),
    ],
)
def test_what_is_not_protected_cannot_be_unprotected(name: str, hint: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        check_names((".envrc", name))
    assert "unprotect" == refusal.value.field
    assert hint in refusal.value.hint
