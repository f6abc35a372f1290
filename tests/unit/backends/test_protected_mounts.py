"""Protection of absent paths: what is made on the host, what is refused, and what a refusal gives back."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.native.outside import same_descriptors

from ringfence import Mount, SandboxSpec
from ringfence.backends.local.mounts import protect
from ringfence.backends.local.mounts.protect import (
    hold_template,
    prepare,
    prepare_mount_point,
    protect_mount,
)
from ringfence.errors import InvalidRequest
from ringfence.launcher import placeholders
from ringfence.model.mount import READ_ONLY, READ_WRITE
from ringfence.model.session import ResolvedMount


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    with same_descriptors():
        yield


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.mkdir()
    return path


def tree(source: Path) -> Any:
    return {"source": str(source)}


def protected(source: Path, *names: str, **options: Any) -> protect.Protected:
    mount = Mount("/data", str(source), READ_WRITE, protect=names or None)
    return protect_mount(mount, SandboxSpec(mounts=(mount,), **options), tree(source))


def everything(source: Path) -> list[str]:
    return sorted(str(path.relative_to(source)) for path in source.rglob("*"))


def is_locked(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(fd)


@pytest.mark.anyone
def test_what_is_made_is_locked_and_goes_with_the_last_that_needs_it(source: Path) -> None:
    one, other = protected(source, "a/b", "c"), protected(source, "a/b")
    assert [("pin", "/data/a"), ("protect", "/data/a/b"), ("protect", "/data/c")] == one.steps
    assert ["a", "a/b", "c"] == everything(source)
    assert all(is_locked(source / each) for each in everything(source))

    one.remove_placeholders()
    assert ["a", "a/b"] == everything(source)
    assert not one.placeholders
    assert not one.locks
    other.remove_placeholders()
    assert [] == everything(source)


@pytest.mark.anyone
@pytest.mark.parametrize("where", ["last", "on the way"])
def test_a_refusal_leaves_no_placeholder_and_no_descriptor(source: Path, where: str) -> None:
    (source / "real").mkdir()
    (source / "link").symlink_to("real")
    path = "link" if where == "last" else "link/below"
    with pytest.raises(InvalidRequest, match="symbolic link") as refusal:
        protected(source, "made/first", "also", path)

    assert ("protect", "name the link's target instead") == (
        refusal.value.field,
        refusal.value.hint,
    )
    assert ["link", "real"] == everything(source)
    control = protected(source, "made/first", "also", "real")
    assert ["also", "link", "made", "made/first", "real"] == everything(source)
    control.remove_placeholders()


@pytest.mark.anyone
def test_a_default_that_is_a_link_can_be_left_writable(source: Path) -> None:
    (source / ".vscode").symlink_to("elsewhere")
    with pytest.raises(InvalidRequest, match="symbolic link") as refusal:
        protected(source)

    assert refusal.value.hint == "--unprotect .vscode leaves it writable"
    assert [".vscode"] == everything(source)
    protected(source, unprotect=(".vscode",)).remove_placeholders()


@pytest.mark.anyone
def test_one_that_another_process_removes_just_now_is_worth_another_try(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the lock alone, or has renamed it: then there is something else, or nothing."""
    monkeypatch.setattr(protect, "_PATIENCE_S", 0.0)
    (source / "busy").mkdir()
    (source / "busy").chmod(placeholders.MARK | 0o755)
    remover = os.open(source / "busy", os.O_RDONLY)
    fcntl.flock(remover, fcntl.LOCK_EX)
    with pytest.raises(InvalidRequest, match="another process is using it") as refusal:
        protected(source, "first", "busy")
    assert refusal.value.retryable
    assert ["busy"] == everything(source)

    fcntl.flock(remover, fcntl.LOCK_UN)
    os.close(remover)
    protected(source, "first", "busy").remove_placeholders()
    assert [] == everything(source), "a placeholder that another has left is removed with ours"


@pytest.mark.anyone
def test_what_the_user_has_is_protected_and_stays(source: Path) -> None:
    (source / "own").mkdir()
    (source / "file").write_text("own")
    (source / ".git").write_text("gitdir: elsewhere\n")
    part = protected(source, "own", "file", ".git/hooks")

    assert [("protect", f"/data/{each}") for each in ("own", "file", ".git")] == part.steps
    assert ([], []) == (part.placeholders, part.locks)
    assert not is_locked(source / "own")
    part.remove_placeholders()
    assert [".git", "file", "own"] == everything(source)


@pytest.mark.anyone
def test_git_gets_no_stand_in_that_it_would_go_on_with(source: Path) -> None:
    (source / ".git").mkdir()
    part = protected(source)

    made = everything(source / ".git")
    assert not {"config", *placeholders.STATES} & {*made}
    assert {"hooks", "commondir", "config.worktree", "info", "info/attributes"} == {*made}
    states = [(d, n) for d, n, device, inode in part.placeholders if (device, inode) == (0, 0)]
    assert [(f"{source}/.git", name) for name in ("rebase-merge", "sequencer")] == states
    for name, content in placeholders.FILES.items():
        if (source / ".git" / name).exists():
            assert content == (source / ".git" / name).read_bytes()
    part.remove_placeholders()
    assert [".git"] == everything(source)

    named = protected(source, ".git/config", ".git/sequencer")  # by the user, who wants them so
    assert ["config", "sequencer"] == everything(source / ".git")
    named.remove_placeholders()


@pytest.mark.anyone
def test_yarn_gets_a_file_where_it_is_in_use(source: Path) -> None:
    without = protected(source)
    assert (source / ".yarnrc.yml").is_dir()
    without.remove_placeholders()
    (source / "yarn.lock").touch()
    part = protected(source)
    assert (source / ".yarnrc.yml").is_file()
    part.remove_placeholders()
    assert ["yarn.lock"] == everything(source)


@pytest.mark.anyone
def test_a_stand_in_that_cannot_be_written_is_none(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_what: object) -> int:
        raise OSError(errno.ENOSPC, "no room")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse)
        with pytest.raises(InvalidRequest, match="No space left"):
            protected(source, "hgrc")
    assert [] == everything(source)
    protected(source, "hgrc").remove_placeholders()
    assert [] == everything(source)


@pytest.mark.anyone
def test_a_strange_umask_makes_none_that_its_maker_cannot_open(source: Path) -> None:
    before = os.umask(0o777)
    try:
        part = protected(source, "deep/hooks", "hgrc")
    finally:
        os.umask(before)

    modes = {name: stat.S_IMODE(os.stat(source / name).st_mode) for name in everything(source)}
    assert {"deep": 0o1700, "deep/hooks": 0o1700, "hgrc": 0o600} == modes
    part.remove_placeholders()
    assert [] == everything(source)


@pytest.mark.root
def test_a_placeholder_belongs_to_the_owner_of_its_directory(source: Path) -> None:
    os.chown(source, 4711, 4712)
    part = protected(source, "a/b", "hgrc")

    owners = {os.stat(source / each) for each in everything(source)}
    assert {(4711, 4712)} == {(each.st_uid, each.st_gid) for each in owners}
    part.remove_placeholders()


@pytest.mark.rootless
def test_where_nothing_can_be_made_only_what_could_be_written_is_refused(source: Path) -> None:
    """A default path cannot be made by the sandbox either; one that the user named is missed."""
    source.chmod(0o500)
    try:
        assert [] == prepare_nested(source)
        with pytest.raises(InvalidRequest, match="stand-in for an absent protected path") as no:
            protected(source, "made")
        assert "make the mount's source writable" in (no.value.hint or "")
        source.chmod(0o200)
        with pytest.raises(InvalidRequest, match="may not look whether"):
            protected(source, "deep/made")
    finally:
        source.chmod(0o700)


def prepare_nested(source: Path) -> list[tuple[Any, ...]]:
    return protect._protect_all(
        "/data", str(source), [("below/.git/hooks", False)], "protect"
    ).steps


@pytest.mark.anyone
def test_a_directory_that_takes_nothing_new_is_named() -> None:
    with pytest.raises(InvalidRequest, match="no directory can be made in /proc") as refusal:
        prepare("/data", "/proc", "ringfence-absent", "protect")

    assert ("protect", False) == (refusal.value.field, refusal.value.retryable)


@pytest.mark.anyone
@pytest.mark.parametrize(
    ("verb", "step"),
    [
        ("protect", ("protect", "/data/x")),
        ("pin", ("pin", "/data/x")),
        ("hide", ("hide", "/data/x", False)),
    ],
)
def test_each_verb_has_its_arguments(source: Path, verb: str, step: tuple[Any, ...]) -> None:
    part = prepare("/data", str(source), "x", verb)
    assert [step] == part.steps
    part.remove_placeholders()


@pytest.mark.anyone
def test_a_file_that_is_mounted_has_nothing_below_it(source: Path) -> None:
    (source / "file").touch()
    mount = Mount("/data", str(source / "file"), READ_WRITE)
    part = protect_mount(mount, SandboxSpec(mounts=(mount,)), tree(source / "file"))

    assert ([], [], []) == (part.steps, part.placeholders, part.locks)


def mounted(target: str, source: Path | None, access: str = READ_WRITE) -> ResolvedMount:
    return ResolvedMount(target, access, None if source is None else str(source))


@pytest.mark.anyone
def test_a_mount_point_is_made_in_the_innermost_writable_mount_alone(
    source: Path, tmp_path: Path
) -> None:
    inner, other = tmp_path / "inner", tmp_path / "other"
    inner.mkdir()
    other.mkdir()
    (other / "file").touch()
    around = [mounted("/", None), mounted("/data", source), mounted("/data/deep", inner)]
    made = prepare_mount_point("/data/deep/new", str(other), around)
    assert made is not None
    part, target = made
    assert "/data/deep" == target
    assert [("pin", "/data/deep/new")] == part.steps
    assert ([], ["new"]) == (everything(source), everything(inner))
    part.remove_placeholders()
    assert [] == everything(inner)

    (inner / "there").mkdir()
    (inner / "dangling").symlink_to("absent")
    for at, what, mounts in (
        ("/elsewhere", other, around[1:]),  # in no mount
        ("/data-beside", other, around[1:]),
        ("/elsewhere", other, around),  # in one that is not of the host
        ("/data/deep", other, around[1:2] + around[2:]),  # itself, and it is there
        ("/data/deep/new", other / "file", around),
        ("/data/deep/there", other, around),
        ("/data/deep/dangling", other, around),
        ("/data/deep/new", other, [mounted("/data/deep", inner, READ_ONLY)]),
        ("/data/deep/new", other, [*around[:2], mounted("/data/deep", inner, READ_ONLY)]),
    ):
        if at == "/data/deep":
            (source / "deep").mkdir()
        assert prepare_mount_point(at, str(what), mounts) is None, (at, what)
    assert ["dangling", "there"] == everything(inner)


@pytest.mark.anyone
def test_the_files_of_a_template_are_locked_while_they_are_mounted(tmp_path: Path) -> None:
    digest = "0123456789abcdef" * 4
    root = tmp_path / "roots" / digest
    (root / "tree").mkdir(parents=True)
    (root / "image").touch()
    held = hold_template(str(root / "tree"))
    assert held is not None
    assert is_locked(root / "image")
    held.remove_placeholders()
    assert not is_locked(root / "image")
    assert ["image", "tree"] == everything(root)

    for strange in (digest[:-1], digest + "0", "g" * 64, digest.upper()):
        assert hold_template(str(tmp_path / "roots" / strange / "tree")) is None, strange
    assert hold_template(str(tmp_path)) is None
    (root / "image").unlink()
    os.mkfifo(root / "image")  # as a guest can: nothing waits for it
    without = hold_template(str(root / "tree"))
    assert without is not None
    without.remove_placeholders()
