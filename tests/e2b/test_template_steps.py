"""Names, users and steps of E2B's templates in our form, judged one by one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ringfence import SandboxSpec
from ringfence.e2b import template_steps, templates
from ringfence.e2b.call import ApiError
from ringfence.e2b.template_steps import split_name

pytestmark = pytest.mark.anyone

HASH = "0123456789abcdef" * 4
HOST, IMAGE = SandboxSpec(env={"USER": "user"}), SandboxSpec(image="debian:12")
ROOTED = SandboxSpec(profile="own_root")


def status_of(action: Any, *args: Any) -> int:
    with pytest.raises(ApiError) as refused:
        action(*args)
    return refused.value.status


@pytest.mark.parametrize(
    ("text", "name", "tag"),
    [
        ("a", "a", "default"),
        ("a:v1", "a", "v1"),
        ("team/a:v1", "a", "v1"),
        ("Team/A", "a", "default"),
        ("a_b.c-d", "a_b.c-d", "default"),
        ("a:", "a", "default"),
        ("x" * 63, "x" * 63, "default"),
    ],
)
def test_a_name_has_a_team_and_a_tag(text: str, name: str, tag: str) -> None:
    assert (name, tag) == split_name(text)


@pytest.mark.parametrize(
    "text",
    ["", ":v1", "a b", "a/b/c", "-a", "a:-v", ".a", "é", "x" * 64, "a:" + "x" * 64, "a\n", "../a"],
)
def test_what_is_no_name_is_refused(text: str) -> None:
    assert 400 == status_of(split_name, text)


@pytest.mark.parametrize(
    ("base", "name", "found"),
    [
        (HOST, "user", ""), (HOST, "root", ""), (HOST, "0", ""), (HOST, "alice", "alice"), (HOST, "", ""),
        (IMAGE, "user", ""), (IMAGE, "root", "root"), (IMAGE, "alice", "alice"),
        (ROOTED, "user", ""), (ROOTED, "root", "root"), (ROOTED, "0", "0"),
    ],
)  # fmt: skip
def test_root_is_the_ordinary_user_where_there_is_no_other(
    base: SandboxSpec, name: str, found: str
) -> None:
    assert found == template_steps._user(name, base)


def call_with(uploads: dict[tuple[str, str], str]) -> Any:
    places = SimpleNamespace(named=lambda owner, name: uploads.get((owner, name), ""))
    manager = SimpleNamespace(templates=SimpleNamespace(places=places))
    return SimpleNamespace(service=SimpleNamespace(manager=manager))


DIGEST = "sha256-" + "0" * 64


@pytest.mark.parametrize(
    ("form", "base", "found"),
    [
        ({"type": "RUN", "args": ["x"]}, HOST, {"run": ("bash", "-c", "x"), "user": ""}),
        ({"type": "RUN", "args": ["x", "root"]}, IMAGE, {"run": ("sh", "-c", "x"), "user": "root"}),
        ({"type": "RUN", "args": ["x", "alice"]}, HOST, {"user": "alice"}),
        ({"type": "ENV", "args": ["A", "1", "B", "2"]}, HOST, {"env": {"A": "1", "B": "2"}}),
        ({"type": "WORKDIR", "args": ["a"]}, HOST, {"workdir": "/home/user/a"}),
        ({"type": "WORKDIR", "args": ["/a/../b"]}, HOST, {"workdir": "/b"}),
        ({"type": "USER", "args": ["alice"]}, HOST, {"user": "alice"}),
        ({"type": "USER", "args": ["root"]}, HOST, {"env": {"USER": "user"}}),
    ],
)  # fmt: skip
def test_each_step_is_one_of_ours(form: Any, base: SandboxSpec, found: dict[str, Any]) -> None:
    step = template_steps._step(call_with({}), form, "ann", base)
    assert found == {name: getattr(step, name) for name in found}


@pytest.mark.parametrize(
    ("form", "status"),
    [
        ({"type": "RUN", "args": []}, 400),
        ({"type": "RUN"}, 400),
        ({"type": "RUN", "args": [1]}, 400),
        ({"type": "ENV", "args": ["A"]}, 400),
        ({"type": "ENV", "args": ["A", "1", "B"]}, 400),
        ({"type": "ENV", "args": ["A=B", "1"]}, 400),
        ({"type": "FROM", "args": ["x"]}, 501),
        ({"type": "", "args": ["x"]}, 501),
    ],
)
def test_a_step_that_cannot_be_had_is_refused(form: Any, status: int) -> None:
    assert status == status_of(template_steps._step, call_with({}), form, "ann", HOST)


def test_files_of_a_copy_are_those_that_its_owner_uploaded() -> None:
    import hashlib

    digest = hashlib.sha256(b"x").hexdigest()
    call = call_with({("ann", HASH): digest, ("ann", "../x"): digest})

    def copied(owner: str, name: str, *args: str) -> Any:
        form = {"type": "COPY", "args": [*args], "filesHash": name}
        return template_steps._step(call, form, owner, HOST)

    step = copied("ann", HASH, "./a/", "/to", "", "100644")
    assert (digest, "a", "/to", "0644") == (step.copy, step.source, step.to, step.mode)
    assert "" == copied("ann", HASH, ".", "/to").source
    for owner, name in (("bob", HASH), ("ann", HASH[:-1]), ("ann", "../x"), ("ann", "")):
        assert 400 == status_of(copied, owner, name, "a", "/to"), (owner, name)


@pytest.mark.parametrize("tags", [[], ["a", "B"], ["-a"], [1], ["x" * 64], ["a b"]])
def test_tags_are_names(tags: list[Any]) -> None:
    assert 400 == status_of(templates._given_tags, {"tags": tags})
    assert ["a"] == templates._given_tags({"tags": ["a"]})
    assert 50 == len(templates._given_tags({"tags": ["a"] * 51}))


@pytest.mark.parametrize(
    ("method", "path", "headers", "is_one"),
    [
        ("PUT", f"/templates/t/files/{HASH}", {}, True),
        ("PUT", f"/templates/t/files/{HASH}", {"x-api-key": "k"}, False),
        ("GET", f"/templates/t/files/{HASH}", {}, False),
        ("POST", f"/templates/t/files/{HASH}", {}, False),
        ("PUT", f"/templates/t/files/{HASH}/x", {}, False),
        ("PUT", "/templates/t", {}, False),
        ("PUT", f"/x/templates/t/files/{HASH}", {}, False),
    ],
)
def test_only_an_upload_by_a_signed_url_needs_no_key(
    method: str, path: str, headers: dict[str, str], is_one: bool
) -> None:
    assert is_one == templates.is_upload(method, path, headers)


def test_entries_of_a_log_are_told_from_one_on_so_many_at_once(tmp_path: Any) -> None:
    import json

    log = tmp_path / "log"
    lines = [{"at": 1.0, "message": str(n), "level": "info", "step": n} for n in range(150)]
    log.write_text("".join(json.dumps(each) + "\n" for each in lines) + '{"cut')
    assert 100 == len(templates._entries(str(log), 0))
    assert [str(n) for n in range(60, 150)] == [
        e["message"] for e in templates._entries(str(log), 60)
    ]
    assert [] == templates._entries(str(log), 150), "one that is being written is not told"
    assert [] == templates._entries(str(tmp_path / "none"), 0)
    odd = [
        {"at": 1.0, "message": "m", "level": each, "step": 1} for each in ("debug", "odd", "error")
    ]
    log.write_text("".join(json.dumps(each) + "\n" for each in odd))
    assert ["info", "info", "error"] == [each["level"] for each in templates._entries(str(log), 0)]
