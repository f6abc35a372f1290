"""Denied paths: what hides each, and which mounts would show them after all."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.backends.local.mounts import denied
from ringfence.errors import InvalidRequest
from ringfence.model.mount import READ_ONLY, READ_WRITE
from ringfence.model.session import ResolvedMount

pytestmark = pytest.mark.anyone


def steps_of(deny: list[str], mounts: list[ResolvedMount], *, image: str | None = None) -> Any:
    spec: Any = SimpleNamespace(deny=deny, image=image)
    return denied.deny_paths(spec, mounts)


def test_what_is_nobodys_to_make_is_hidden_only_where_it_is() -> None:
    given = ["/usr/x", "/etc/y", "/lib9/z", "/home/a", "/users", "/opt/lib/b"]
    steps, made = steps_of(given, [])
    assert [("hide", path, path in given[3:]) for path in given] == steps
    assert [] == made
    steps, _ = steps_of(given, [], image="image")
    assert [("hide", path, True) for path in given] == steps


def test_a_link_of_the_system_is_hidden_where_it_leads() -> None:
    steps, _ = steps_of(["/bin/x/y"], [])
    aim = os.path.join("/", os.readlink("/bin")) if os.path.islink("/bin") else "/bin"
    assert [("hide", f"{aim}/x/y", not aim.startswith("/usr"))] == steps


def test_in_a_directory_of_the_host_an_absent_path_gets_a_stand_in(tmp_path: Path) -> None:
    (tmp_path / "outer").mkdir()
    (tmp_path / "inner" / "there").mkdir(parents=True)
    mounts = [
        ResolvedMount("/work", READ_WRITE, str(tmp_path / "outer")),
        ResolvedMount("/work/in", READ_WRITE, str(tmp_path / "inner")),
        ResolvedMount("/tmp", READ_WRITE),
    ]
    steps, made = steps_of(["/work/in/there/secret", "/work/a", "/tmp/b", "/workshop"], mounts)
    try:
        assert [
            ("pin", "/work/in/there"),
            ("hide", "/work/in/there/secret", False),
            ("hide", "/work/a", False),
            ("hide", "/tmp/b", True),
            ("hide", "/workshop", True),
        ] == steps
        assert ["a"] == os.listdir(tmp_path / "outer")
        assert ["secret"] == os.listdir(tmp_path / "inner" / "there")
    finally:
        for each in made:
            each.remove_placeholders()
    assert [] == os.listdir(tmp_path / "outer") == os.listdir(tmp_path / "inner" / "there")


@pytest.mark.parametrize("target", ["/work/secret", "/work/secret/below"])
def test_a_mount_in_a_denied_path_is_refused_and_leaves_no_stand_in(
    tmp_path: Path, target: str
) -> None:
    mounts = [ResolvedMount("/work", READ_WRITE, str(tmp_path)), ResolvedMount(target, READ_ONLY)]
    with pytest.raises(InvalidRequest, match=f"/work/secret is denied, and {target}") as refused:
        steps_of(["/work/a", "/work/secret"], mounts)
    assert "deny" == refused.value.field
    assert [] == os.listdir(tmp_path)


def test_what_is_mounted_later_neither_shows_nor_covers_what_is_denied() -> None:
    for target in ("/a/b", "/a/b/c", "/a", "/"):
        with pytest.raises(InvalidRequest, match="/a/b is denied") as refused:
            denied.check_mount(target, ["/a/b", "/x"])
        assert "target" == refused.value.field
    for target in ("/a/bc", "/a/c", "/xy", "/b"):
        denied.check_mount(target, ["/a/b", "/x"])
