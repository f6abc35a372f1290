"""Names, tags and public templates of E2B's API in one process; no build is run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from ringfence import Limits, SandboxSpec
from ringfence.e2b import template_steps, templates
from ringfence.e2b.settings import E2BSettings
from ringfence.model.template import TemplateRequest, TemplateStep
from ringfence.store.templates import FAILED, READY
from tests.e2b.here import Here

pytestmark = pytest.mark.anyone

MIB = 1 << 20


@pytest.fixture
def here() -> Iterator[Here]:
    with ExitStack() as stack:
        yield Here(stack, e2b=E2BSettings(templates={"theirs": SandboxSpec()}))


class Client:
    """A client with a key of its own."""

    def __init__(self, here: Here, owner: str, scope: str = "user") -> None:
        self.here, self.headers = here, {"x-api-key": here.key(owner, scope)}

    async def __call__(self, method: str, path: str, form: Any = None) -> httpx.Response:
        body = {} if form is None else {"json": form}
        return await self.here.ask(method, path, headers=self.headers, **body)

    async def reserve(self, name: str, **form: Any) -> dict[str, Any]:
        made = await self("POST", "/v3/templates", {"name": name, **form})
        assert 202 == made.status_code, made.text
        found: dict[str, Any] = made.json()
        return found

    async def ready(self, name: str, **form: Any) -> dict[str, Any]:
        """A template as it is once its build has ended."""
        made = await self.reserve(name, **form)
        templates = self.here.manager.templates
        limits = Limits(
            **json.loads(templates.records.builds(made["templateID"])[-1].request)["limits"]
        )
        asked = TemplateRequest(name="app", base=SandboxSpec(limits=limits))
        columns = {"spec": json.dumps(SandboxSpec().to_json()), "ended_at": 9.0}
        request = json.dumps(asked.to_json())
        templates.records.change_build(made["buildID"], status=READY, request=request, **columns)
        record = templates.records.get(made["templateID"])
        assert record is not None
        templates.tag(record, made["buildID"], made["tags"])
        return made

    async def tags(self, template: str) -> dict[str, str]:
        found = await self("GET", f"/templates/{template}/tags")
        assert 200 == found.status_code, found.text
        return {each["tag"]: each["buildID"] for each in found.json()}

    async def listed(self) -> list[str]:
        return [each["templateID"] for each in (await self("GET", "/templates")).json()]


@pytest.fixture
def ann(here: Here) -> Client:
    return Client(here, "ann")


@pytest.fixture
def bob(here: Here) -> Client:
    return Client(here, "bob")


async def test_a_build_is_asked_for_by_a_name_and_up_to_fifty_tags(ann: Client) -> None:
    for form, tags in (
        ({"name": "app"}, ["default"]),
        ({"alias": "app"}, ["default"]),
        ({"name": "Team/App:v1"}, ["v1"]),
        ({"name": "app", "tags": ["a", "b", "a"]}, ["a", "b"]),
        ({"name": "app:v1", "tags": ["a", "v1"]}, ["v1", "a"]),
        ({"name": "app", "tags": ["default"]}, ["default"]),
        ({"name": "app", "tags": [f"t{each}" for each in range(50)]}, 50),
    ):
        made = await ann("POST", "/v3/templates", form)
        assert 202 == made.status_code, form
        found = made.json()
        assert (["app"], False) == (found["names"], found["public"])
        assert tags == (len(found["tags"]) if tags == 50 else found["tags"]), form
    for wrong, status in (
        ({"name": "app", "tags": [f"t{each}" for each in range(51)]}, 400),
        ({"name": "app", "tags": ["A B"]}, 400),
        ({"name": "app", "tags": [1]}, 400),
        ({"name": "theirs"}, 403),
        ({"name": "theirs:v1"}, 403),
        ({"name": "base"}, 403),
        ({"name": "app", "cpuCount": -1}, 400),
    ):
        assert status == (await ann("POST", "/v3/templates", wrong)).status_code, wrong


async def test_sizes_that_were_asked_for_are_those_of_the_template(here: Here, ann: Client) -> None:
    made = await ann.ready("app", cpuCount=3, memoryMB=512)
    shown = (await ann("GET", f"/templates/{made['templateID']}")).json()
    assert (3, 512) == (shown["cpuCount"], shown["memoryMB"])
    assert ("ready", 1, made["buildID"]) == (
        shown["buildStatus"],
        shown["buildCount"],
        shown["buildID"],
    )
    (build,) = shown["builds"]
    assert (made["buildID"], "ready", "1970-01-01T00:00:09.000000000Z") == (
        build["buildID"],
        build["status"],
        build["finishedAt"],
    )
    call = here.call(None)
    built = template_steps.resolve(call, "app")
    assert built is not None
    spec = template_steps.spec_of(built)
    assert (made["buildID"], None) == (spec.template, spec.image)
    assert Limits(cpus=3, memory_bytes=512 * MIB) == spec.limits
    assert template_steps.resolve(call, "no name") is None
    waiting = await ann.reserve("app")
    shown = (await ann("GET", "/templates/app")).json()
    assert ("waiting", 2, made["buildID"]) == (
        shown["buildStatus"],
        shown["buildCount"],
        shown["buildID"],
    )
    assert [None] == [
        each["finishedAt"] for each in shown["builds"] if each["buildID"] == waiting["buildID"]
    ]


async def test_tags_mean_a_build_until_they_mean_another_or_nothing(
    ann: Client, bob: Client
) -> None:
    first = await ann.ready("app:v1")
    second = await ann.ready("app:v2")
    theirs = await bob.ready("app:v1")
    given = await ann("POST", "/templates/tags", {"target": "app:v1", "tags": ["v2", "stable"]})
    assert (201, first["buildID"]) == (given.status_code, given.json()["buildID"])
    assert dict.fromkeys(("v1", "v2", "stable"), first["buildID"]) == await ann.tags("app")
    await ann("POST", "/templates/tags", {"target": "team/app:stable", "tags": ["default"]})
    assert first["buildID"] == (await ann.tags("app"))["default"]
    removed = await ann("DELETE", "/templates/tags", {"name": "app", "tags": ["v1", "other"]})
    assert 204 == removed.status_code
    assert {"v2", "stable", "default"} == {*await ann.tags(first["templateID"])}
    assert {"v1": theirs["buildID"]} == await bob.tags("app"), "another owner's stay"
    assert second["templateID"] == first["templateID"]
    for form, status in (
        ({"target": "app:v1", "tags": ["x"]}, 404),
        ({"target": "other:v1", "tags": ["x"]}, 404),
        ({"target": "app:v2", "tags": []}, 400),
        ({"target": "app:v2"}, 400),
        ({"target": "app:v2", "tags": ["A"]}, 400),
        ({"target": "app:v2", "tags": [1]}, 400),
    ):
        assert status == (await ann("POST", "/templates/tags", form)).status_code, form
    refused = await ann("DELETE", "/templates/tags", {"name": "app", "tags": []})
    assert 400 == refused.status_code
    assert {"v2", "stable", "default"} == {*await ann.tags("app")}


async def test_a_public_template_is_used_by_all_and_changed_by_its_owner(
    here: Here, ann: Client, bob: Client
) -> None:
    made = await ann.ready("app")
    path = f"/templates/{made['templateID']}"
    assert 403 == (await ann("PATCH", path, {"public": True})).status_code
    assert made["templateID"] not in await bob.listed()
    assert 404 == (await bob("GET", "/templates/aliases/app")).status_code
    admin = Client(here, "root", "admin")
    for version in ("", "/v2"):
        shown = await admin("PATCH", f"{version}{path}", {"public": True})
        assert (200, ["app"]) == (shown.status_code, shown.json()["names"])
    assert made["templateID"] in await bob.listed()
    alias = (await bob("GET", "/templates/aliases/team/app:v9")).json()
    assert {"templateID": made["templateID"], "public": True} == alias
    assert {"default": made["buildID"]} == await bob.tags("app")
    assert template_steps.resolve(here.call(None), "app") is not None
    for method, where, form in (
        ("PATCH", path, {"public": False}),
        ("GET", path, None),
        ("DELETE", path, None),
        ("GET", f"{path}/builds/{made['buildID']}/status", None),
        ("GET", f"{path}/builds/{made['buildID']}/logs", None),
        ("POST", f"/v2{path}/builds/{made['buildID']}", {}),
        ("GET", f"{path}/files/{'0' * 64}", None),
        ("POST", "/templates/tags", {"target": "app", "tags": ["x"]}),
        ("DELETE", "/templates/tags", {"name": "app", "tags": ["default"]}),
    ):
        assert 404 == (await bob(method, where, form)).status_code, (method, where)
    assert {"default": made["buildID"]} == await ann.tags("app")
    assert 200 == (await ann("PATCH", path, {"public": False})).status_code, "by its owner"
    assert made["templateID"] not in await bob.listed()
    for name in ("theirs", "base", "theirs:v1"):
        alias = (await ann("GET", f"/templates/aliases/{name}")).json()
        assert {"templateID": name, "public": True} == alias


async def test_a_build_is_of_its_template(ann: Client) -> None:
    made, other = await ann.ready("app"), await ann.ready("other")
    for path in ("status", "logs"):
        at = f"/templates/app/builds/{made['buildID']}/{path}"
        assert 200 == (await ann("GET", at)).status_code
        wrong = f"/templates/app/builds/{other['buildID']}/{path}"
        assert 404 == (await ann("GET", wrong)).status_code
    status = f"/templates/app/builds/{made['buildID']}/status"
    for offset in ("x", "-1", "1" * 10):
        assert 400 == (await ann("GET", f"{status}?logsOffset={offset}")).status_code, offset
    assert 404 == (await ann("GET", "/templates/app/builds/nothing/status")).status_code
    begun = await ann("POST", f"/v2/templates/app/builds/{other['buildID']}", {"steps": []})
    assert 404 == begun.status_code
    for name, code in (("0" * 63, 400), ("A" * 64, 400), ("0" * 64, 201)):
        assert code == (await ann("GET", f"/templates/app/files/{name}")).status_code, name


async def test_files_are_those_of_the_templates_owner_whoever_asks(
    here: Here, ann: Client, bob: Client
) -> None:
    admin, name = Client(here, "root", "admin"), "0a" * 32
    of_ann, of_bob, own = [await each.reserve("app") for each in (ann, bob, admin)]

    async def asked(client: Client, template: dict[str, Any]) -> dict[str, Any]:
        found = await client("GET", f"/templates/{template['templateID']}/files/{name}")
        assert 201 == found.status_code, found.text
        form: dict[str, Any] = found.json()
        return form

    for client, template in ((ann, of_ann), (admin, of_ann), (bob, of_bob), (admin, own)):
        assert not (await asked(client, template))["present"]
    put = await here.ask("PUT", (await asked(admin, of_ann))["url"], content=b"files")
    assert 200 == put.status_code, put.text
    present = [
        (await asked(client, template))["present"]
        for client, template in ((ann, of_ann), (admin, of_ann), (bob, of_bob), (admin, own))
    ]
    assert [True, True, False, False] == present


async def test_an_upload_is_for_a_hash_and_a_template_that_are_there(
    here: Here, ann: Client
) -> None:
    template, until = (await ann.reserve("app"))["templateID"], int(time.time()) + 60
    for at, name, status in (
        (template, "0" * 64, 200),
        (template, "A" * 64, 404),
        (template, "0" * 63, 404),
        ("none", "0" * 64, 404),
    ):
        signature = here.shared.tokens.upload(at, name, until)
        url = f"/templates/{at}/files/{name}?until={until}&signature={signature}"
        of_no_time = here.shared.tokens.upload(at, name, 0)
        for wrong in ("x", "", "-1", "1" * 12, "0"):
            refused = f"/templates/{at}/files/{name}?until={wrong}&signature={of_no_time}"
            assert 401 == (await here.ask("PUT", refused, content=b"files")).status_code, wrong
        assert status == (await here.ask("PUT", url, content=b"x")).status_code, (at, name)


async def test_a_build_that_failed_says_at_which_step_and_why(here: Here, ann: Client) -> None:
    """Of a user whom the sandbox does not have in the words that E2B's programs look for."""
    made = await ann.reserve("app")
    steps = [TemplateStep(run=("bash", "-c", each)) for each in ("first", "second")]
    steps.append(TemplateStep(env={"A": "b"}))
    form = TemplateRequest(name="app", steps=tuple(steps), base=SandboxSpec()).to_json()
    why = "unknown user 'alice'"

    def refused(command: str) -> str:
        said = "unauthenticated: invalid username: 'alice'"
        return f"failed to run command '{command}': command failed: {said} ({why})"

    for step, request, error, shown, message in (
        (0, form, "no base", "0", "no base"),
        (1, form, "it failed", "1", "it failed"),
        (1, form, why, "1", refused("first")),
        (2, form, why, "2", refused("second")),
        (3, form, why, "3", refused("")),
        (4, form, "it ended", "finalize", "it ended"),
        (7, {"limits": {}}, "is not supported", "7", "is not supported"),
        (1, form, f"so: {why}", "1", f"so: {why}"),
    ):
        columns = {"step": step, "error": error, "request": json.dumps(request)}
        here.manager.templates.records.change_build(made["buildID"], status=FAILED, **columns)
        found = (await ann("GET", f"/templates/app/builds/{made['buildID']}/status")).json()
        assert "error" == found["status"]
        assert {"message": message, "step": shown, "logEntries": []} == found["reason"]


async def test_a_template_that_meanwhile_is_anothers_is_not_removed(
    here: Here, ann: Client, bob: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked for as the caller's, and removed as the caller's."""
    made = await ann.reserve("app")
    record = here.manager.templates.records.get(made["templateID"])
    assert record is not None
    with monkeypatch.context() as patch:
        patch.setattr(templates, "_find", lambda _call: record)
        assert 404 == (await bob("DELETE", f"/templates/{record.id}")).status_code
    assert here.manager.templates.records.get(record.id) is not None
    assert 204 == (await ann("DELETE", f"/templates/{record.id}")).status_code
    assert here.manager.templates.records.get(record.id) is None
