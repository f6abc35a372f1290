"""Steps of a template for a server: each as data, with the options that it has there, and no others."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.client.scripted import Request, as_json, problem, served
from tests.client.test_asked_again import sandbox_view

from ringfence.client import AsyncClient, Client
from ringfence.errors import Forbidden, InvalidRequest
from ringfence.model.net.network import NetworkPolicy
from ringfence.model.template import TemplateRequest, TemplateStep
from ringfence.sandbox import remote
from ringfence.sandbox.template import Template

pytestmark = pytest.mark.anyone


class Server:
    """What a client asks of a server's templates."""

    def __init__(self, *lines: str) -> None:
        self.uploaded, self.asked = list[str](), list[TemplateRequest]()
        self._lines = lines

    def upload(self, path: str) -> str:
        self.uploaded.append(path)
        return f"{len(self.uploaded):064x}"

    def build(self, request: TemplateRequest, on_log: Callable[[dict[str, Any]], None]) -> str:
        self.asked.append(request)
        for line in self._lines:
            on_log({"type": "log", "message": line})
        return "view"


@pytest.fixture
def server() -> Server:
    return Server("one", "two")


@pytest.fixture
def built(server: Server, monkeypatch: pytest.MonkeyPatch) -> Callable[[Template], TemplateRequest]:
    """Have `server` build a template; what it was asked for."""
    client = cast(Client, SimpleNamespace(templates=server))
    monkeypatch.setattr(remote, "_client", lambda given: (given, False))

    def build(template: Template) -> TemplateRequest:
        assert "view" == cast(Any, template.build("mine", server=client))
        return server.asked[-1]

    return build


def step_of(**parts: Any) -> TemplateStep:
    return TemplateStep(**{"network": NetworkPolicy(), **parts})


def test_each_step_is_sent_as_what_it_is(
    built: Callable[[Template], TemplateRequest], server: Server, tmp_path: Path
) -> None:
    (tmp_path / "dir").mkdir()
    (tmp_path / "file").touch()
    request = built(
        Template.from_image("alpine:3")
        .env({"A": "1"})
        .workdir("/w")
        .user("app")
        .run("make", timeout_s=3.0, user="root", network=["a.example"])
        .copy(str(tmp_path / "dir"), "/d")
        .copy(str(tmp_path / "file"), "/f/renamed")
    )

    assert ("mine", "alpine:3") == (request.name, request.base.image)
    env, workdir, user, run, directory, file = request.steps
    assert (TemplateStep(env={"A": "1"}), TemplateStep(workdir="/w")) == (env, workdir)
    assert TemplateStep(user="app") == user
    assert (("sh", "-c", "make"), 3.0, "root") == (run.run, run.timeout_s, run.user)
    assert NetworkPolicy.parse("a.example") == run.network
    assert TemplateStep(copy=f"{1:064x}", to="/d") == directory
    assert TemplateStep(copy=f"{2:064x}", source="file", to="/f/renamed") == file
    assert [str(tmp_path / "dir"), str(tmp_path / "file")] == server.uploaded


def test_over_the_hosts_files_fonts_are_the_servers_to_see_to(
    built: Callable[[Template], TemplateRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://of-this-machine.example/simple")
    index = "https://b.example/simple"
    request = built(
        Template.from_host()
        .pip_install("a>=1", "b", timeout_s=5.0, user="app")
        .pip_install("c", index_url=index)
        .run(["make", os.fspath("/x")])
    )

    assert request.base.image is None
    assert (
        TemplateStep(pip_install=("a>=1", "b"), timeout_s=5.0, user="app"),
        TemplateStep(pip_install=("c",), index_url=index),
        step_of(run=("make", "/x")),
    ) == request.steps


@pytest.mark.parametrize(
    ("template", "field"),
    [
        (Template.from_host().run("true", mounts=["/etc:/etc"]), "mounts"),
        (Template.from_host().run("true", workdir="/x"), "workdir"),
        (Template.from_host().run("true", secrets={"A": "1"}), "secrets"),
        (Template.from_host().pip_install("a", env={"A": "1"}), "env"),
        (Template.from_host().pip_install("a", find_links="/wheels"), "find_links"),
        (Template.from_image("x").command("true"), "Entrypoint"),
    ],
)
def test_what_only_this_machine_could_keep_is_refused(
    template: Template, field: str, built: Callable[[Template], TemplateRequest], server: Server
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        built(template)
    assert (field, []) == (refused.value.field, server.asked)
    assert "machine" in refused.value.hint or "run pip with" in refused.value.hint


def test_a_log_is_passed_on_line_by_line_where_it_is_wanted(
    built: Callable[[Template], TemplateRequest], server: Server
) -> None:
    said: list[bytes] = []
    client = cast(Client, SimpleNamespace(templates=server))
    Template.from_host().build("mine", server=client, on_output=said.append)
    assert [b"one\n", b"two\n"] == said
    built(Template.from_host())  # nobody listens
    with pytest.raises(InvalidRequest):
        Template.from_host().build("", server=client)


# -- whose the client is ---------------------------------------------------------------------------


async def test_an_asynchronous_client_made_for_a_call_is_closed_and_one_of_the_caller_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the call where it failed, with the sandbox where it was made."""

    def script(request: Request) -> Any:
        if request.method == "POST" and request.form.get("name") == "refused":
            return problem(403, "forbidden")
        if request.path == "/v1/snapshots":
            return as_json({"items": [], "next_cursor": None})
        return as_json(sandbox_view().to_json())

    made_here: list[AsyncClient] = []
    plain = remote._client_async

    def seen(server: Any) -> tuple[AsyncClient, bool]:
        client, is_ours = plain(server)
        made_here.append(client)
        return client, is_ours

    monkeypatch.setattr(remote, "_client_async", seen)
    with served(tmp_path / "s", script):
        address = f"unix:{tmp_path}/s"
        async with AsyncClient(address) as mine:
            for server, is_ours in ((address, True), (mine, False)):
                made = await remote.make_async(server, "create")
                assert (is_ours, False) == (made.owns_transport, made._transport._is_released)
                await made.terminate()
                assert is_ours == made._transport._is_released
                async with remote.opened_async(server) as client:
                    assert [] == await client.snapshots()
                assert is_ours == client._transport._is_released
                with pytest.raises(Forbidden):
                    await remote.make_async(server, "create", name="refused")
                assert is_ours == made_here[-1]._transport._is_released


def test_a_backend_of_a_server_is_its_name() -> None:
    assert ("", "gvisor") == (remote.name_of(None), remote.name_of("gvisor"))
    with pytest.raises(InvalidRequest) as refused:
        remote.name_of(object())
    assert "backend" == refused.value.field
