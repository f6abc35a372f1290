"""Names, users and steps of E2B's templates in our form, judged one by one."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence import Limits, NetworkPolicy, SandboxSpec
from ringfence.api.access.caller import ADMIN, Caller
from ringfence.api.access.ceilings import Ceilings
from ringfence.api.access.permissions import Permissions
from ringfence.api.service import Settings
from ringfence.e2b import template_steps, templates
from ringfence.e2b.call import ApiError
from ringfence.e2b.settings import E2BSettings
from ringfence.e2b.template_steps import StepError, split_name
from ringfence.errors import Forbidden, ImageNotFound
from ringfence.images.store import ImageStore
from ringfence.model import Mount
from tests.e2b.here import Here

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


INTERNET = NetworkPolicy.parse("public")
OWN = SandboxSpec(env={"A": "own", "USER": "alice"}, workdir="/srv", ttl_s=60.0)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    """A server with templates of its own, which has one image."""

    def find(_store: Any, reference: str) -> None:
        if reference != "there:1":
            raise ImageNotFound(f"no {reference}")

    monkeypatch.setattr(ImageStore, "find", find)
    most = Permissions(most=Ceilings(Limits(pids=50), ttl_s=5000.0))
    named = {"own": OWN, "img:v1": OWN, "plain": SandboxSpec()}
    with ExitStack() as stack:
        e2b = E2BSettings(templates=named, internet=INTERNET)
        yield Here(stack, settings=Settings(permissions=most), e2b=e2b)


def test_a_build_begins_with_what_its_image_or_template_stands_for(here: Here) -> None:
    call, host = here.call(None), here.e2b.spec_of("base")
    assert host is not None

    def base(image: str = "", **form: Any) -> SandboxSpec:
        return template_steps._base(call, {"fromImage": image, **form})

    for image in ("", "e2bdev/base", "docker.io/e2bdev/base:latest", "e2bdev/code-interpreter"):
        assert host == base(image), image
    assert here.e2b.spec_of("own") == base("no", fromTemplate="own:v2"), "a template comes first"
    for image in ("own", "docker.io/library/own", "img:v1"):
        found = base(image)
        assert "/srv" == found.workdir
        assert {**host.env, "A": "own", "USER": "alice"} == found.env, "its own variables win"
    assert "/home/user" == base("plain").workdir
    found = base("there:1")
    assert ("there:1", "/home/user") == (found.image, found.workdir)
    assert ["/home/user"] == [each.target for each in found.mounts]
    login = {"HOME": "/home/user", "USER": "user", "LOGNAME": "user"}
    assert login == found.env, "the PATH is the image's own"
    for image in ("own:v1", "img", "img:v2", "there:2"):
        with pytest.raises(ApiError, match="is not on this server") as refused:
            base(image)
        assert 400 == refused.value.status
    assert 404 == status_of(lambda: base(fromTemplate="none"))
    with pytest.raises(ApiError, match="NAME:PASSWORD there:1"):
        base("there:1", fromImageRegistry={"type": "registry"})


@pytest.mark.parametrize(
    ("name", "tag", "is_hosts"),
    [
        ("python", "", True), ("python", "latest", True), ("python", "{major}", True),
        ("python", "{major}.{minor}", True), ("python", "{major}.{minor}-slim", True),
        ("python", "2", False), ("python", "{major}.{minor}.1", False), ("node", "", True),
        ("node", "lts-slim", True), ("node", "1", False), ("debian", "", False), ("debian", "latest", False),
    ],
)  # fmt: skip
def test_an_official_image_is_the_hosts_own_program_of_that_version(
    monkeypatch: pytest.MonkeyPatch, name: str, tag: str, is_hosts: bool
) -> None:
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    monkeypatch.setattr(os.path, "realpath", lambda _: f"/usr/bin/python{version}")
    found: list[str | None] = ["/usr/bin/node", None]
    monkeypatch.setattr(shutil, "which", lambda _: found[0])
    major, _, minor = version.partition(".")
    tag = tag.format(major=major, minor=minor)
    assert is_hosts == template_steps._is_hosts(name, tag)
    found.reverse()
    assert (is_hosts and name != "node") == template_steps._is_hosts(name, tag)


def request(here: Here, form: dict[str, Any], limits: Limits, **caller: Any) -> Any:
    call = here.call(None, Caller("ann", **caller))
    template: Any = SimpleNamespace(name="app", owner="ann")
    return template_steps.request_of(call, form, template, limits)


def test_a_build_is_what_was_asked_for_with_the_servers_network(here: Here) -> None:
    steps = [
        {"type": "RUN", "args": ["x"], "force": True},
        {"type": "ENV", "args": ["A", "1"]},
    ]
    form = {"steps": steps, "fromTemplate": "own", "startCmd": "s", "readyCmd": "r"}
    found = request(here, form, Limits(cpus=2, memory_bytes=1 << 26))
    assert ("app", "s", "r", False, False) == (
        found.name, found.start, found.ready, found.fresh, found.keep_env
    )  # fmt: skip
    assert [True, False] == [each.fresh for each in found.steps]
    assert [("bash", "-c", "x"), ()] == [each.run for each in found.steps]
    base = found.base
    assert (INTERNET, None, None, "/srv") == (base.network, base.ttl_s, base.id, base.workdir)
    assert (2, 1 << 26, 50) == (base.limits.cpus, base.limits.memory_bytes, base.limits.pids)
    assert isinstance(base.mounts[0], Mount)
    again = request(here, {"steps": steps, "force": True}, Limits())
    assert (True, [True, False]) == (again.fresh, [each.fresh for each in again.steps])


def test_a_build_is_for_the_tier_that_the_server_has(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tiers, tier in ((("light", "strong"), "light"), (("strong",), "strong")):
        monkeypatch.setattr(here.backend, "tiers", tiers, raising=False)
        assert tier == request(here, {}, Limits()).base.tier


def test_a_build_asks_for_no_more_than_its_client_gets(here: Here) -> None:
    with pytest.raises(Forbidden) as refused:
        request(here, {}, Limits(pids=51))
    assert "limits.pids" == refused.value.field
    assert 51 == request(here, {}, Limits(pids=51), scope=ADMIN).base.limits.pids


def test_the_step_that_is_to_blame_is_told_by_its_number(here: Here) -> None:
    good, bad = {"type": "RUN", "args": ["x"]}, {"type": "RUN", "args": []}
    for form, number, status in (
        ({"steps": [good, bad, bad]}, 2, 400),
        ({"steps": [bad]}, 1, 400),
        ({"steps": [good], "fromTemplate": "none"}, 0, 404),
        ({"steps": [good, {"type": "FROM", "args": ["x"]}]}, 2, 501),
    ):
        with pytest.raises(StepError) as refused:
            request(here, form, Limits())
        assert (number, status) == (refused.value.step, refused.value.status)
    assert 400 == status_of(request, here, {"steps": [good, "x"]}, Limits())


def test_processors_are_bounded_where_a_backend_can_do_that() -> None:
    for able in (["b"], []):
        report = lambda name, able=able: SimpleNamespace(can=lambda _what: name in able)  # noqa: E731
        maker = SimpleNamespace(backends={"a": 1, "b": 2}, report=report)
        manager = SimpleNamespace(maker=maker)
        call: Any = SimpleNamespace(service=SimpleNamespace(manager=manager))
        limits = template_steps._bounded(call, Limits(cpus=2, pids=7))
        assert (2 if able else None, 7) == (limits.cpus, limits.pids)
