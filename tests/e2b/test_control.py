"""E2B's API of sandboxes and snapshots in one process: each route for its owner, and for others."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import httpx
import pytest

from ringfence import Limits, NetworkPolicy
from ringfence.api.access.ceilings import Ceilings
from ringfence.api.access.permissions import Permissions
from ringfence.api.service import Settings
from ringfence.e2b import control, metering
from ringfence.e2b.notes import Notes, notes_of
from ringfence.e2b.settings import E2BSettings
from ringfence.errors import StorageFull
from ringfence.model.client_session import SessionState
from ringfence.sessions.live import Live
from tests.e2b.here import Here

pytestmark = pytest.mark.anyone


@pytest.fixture
def here() -> Iterator[Here]:
    most = Ceilings(Limits(pids=50), ttl_s=5000.0, snapshots=3)
    with ExitStack() as stack:
        yield Here(
            stack,
            settings=Settings(permissions=Permissions(most=most)),
            e2b=E2BSettings(internet=NetworkPolicy.parse("public"), domain="sbx.test"),
        )


class Client:
    """A client with a key of its own."""

    def __init__(self, here: Here, owner: str, scope: str = "user", **more: Any) -> None:
        self.here, self.headers = here, {"x-api-key": here.key(owner, scope, **more)}

    async def __call__(
        self, method: str, path: str, form: Any = None, **more: Any
    ) -> httpx.Response:
        headers = {**self.headers, **more.pop("headers", {})}
        body = {} if form is None else {"json": form}
        answered = await self.here.ask(method, path, headers=headers, **body, **more)
        assert self.here.is_idle()
        return answered

    async def create(self, **form: Any) -> Live:
        made = await self("POST", "/v2/sandboxes", {"timeout": 60, **form})
        assert 201 == made.status_code, made.text
        live = self.here.manager.index.find(made.json()["sandboxID"])
        assert live is not None
        return live

    async def ids(self, **query: str) -> list[str]:
        answered = await self("GET", "/v2/sandboxes", params=query)
        assert 200 == answered.status_code, answered.text
        return [each["sandboxID"] for each in answered.json()]


@pytest.fixture
def ann(here: Here) -> Client:
    return Client(here, "ann")


@pytest.fixture
def bob(here: Here) -> Client:
    return Client(here, "bob")


ROUTES = (
    ("GET", ""),
    ("DELETE", ""),
    ("POST", "/timeout"),
    ("POST", "/connect"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("POST", "/fork"),
    ("POST", "/snapshots"),
    ("PUT", "/network"),
    ("GET", "/metrics"),
    ("GET", "/logs"),
)


async def test_a_sandbox_is_its_owners_and_an_administrators(
    here: Here, ann: Client, bob: Client
) -> None:
    live = await ann.create()
    admin = Client(here, "ops", "admin")
    of_sandboxes = {
        (each.method, each.path.removeprefix("/v2").removeprefix("/sandboxes/{sandbox_id}"))
        for each in control.ROUTES
        if "{sandbox_id}" in each.path
    }
    assert {*ROUTES} == of_sandboxes, "each is tried"
    for method, path in ROUTES:
        form = None if method in ("GET", "DELETE") else {"timeout": 30}
        refused = await bob(method, f"/sandboxes/{live.sandbox_id}{path}", form)
        assert 404 == refused.status_code, (method, path)
        assert f"sandbox '{live.sandbox_id}' not found" == refused.json()["message"]
        if path != "":
            assert (
                404
                != (await admin(method, f"/sandboxes/{live.sandbox_id}{path}", form)).status_code
            )
            here.manager.resume(live.id)
    assert [] == await bob.ids()
    assert {live.sandbox_id} <= {*await ann.ids()} == {*await admin.ids()}
    assert SessionState.ACTIVE == live.state


async def test_what_a_client_asks_for_is_kept_and_shown(here: Here, ann: Client) -> None:
    live = await ann.create(
        templateID="code-interpreter-v1",
        metadata={"a": "b"},
        envVars={"X": "y"},
        autoPause=True,
        autoPauseMemory=False,
        autoResume={"enabled": True},
        allow_internet_access=False,
        network={
            "allowPublicTraffic": False,
            "maskRequestHost": "h:${PORT}",
            "httpsPorts": [8443],
            "allowOut": ["a.test"],
        },
    )
    notes = notes_of(live.metadata)
    assert ("code-interpreter-v1", True, False, False, "h:${PORT}", [8443], False) == (
        notes.template,
        notes.auto_resume,
        notes.keeps_memory,
        notes.is_public,
        notes.host_mask,
        notes.https_ports,
        notes.internet,
    )
    caller = here.service.authenticator.caller(ann.headers["x-api-key"])
    assert caller is not None
    assert caller.key == notes.key
    assert "y" == live.spec.env["X"]
    assert ("a.test",) == live.spec.network.allowed_hosts
    shown = (await ann("GET", f"/sandboxes/{live.sandbox_id}")).json()
    assert ({"a": "b"}, "running", False) == (
        shown["metadata"],
        shown["state"],
        shown["allowInternetAccess"],
    )
    assert {"onTimeout": "pause", "autoResume": True} == shown["lifecycle"]
    assert here.shared.tokens.of(live) == shown["envdAccessToken"]
    reader = Client(here, "ann", "read_only")
    seen = (await reader("GET", f"/sandboxes/{live.sandbox_id}")).json()
    assert "envdAccessToken" not in seen, "with it, it could change something"
    plain = await ann.create()
    assert notes_of(plain.metadata).is_public
    assert here.shared.meter._task is not None, "what it uses is sampled from now on"
    assert ("public",) == plain.spec.network.allowed_hosts


@pytest.mark.parametrize(
    ("form", "status"),
    [
        ({"volumeMounts": [{}]}, 501),
        ({"mcp": {"x": 1}}, 501),
        ({"iam": {"x": 1}}, 501),
        ({"metadata": {"a": 1}}, 400),
        ({"envVars": {"a": None}}, 400),
        ({"metadata": {"e2b": "x"}}, 400),
        ({"templateID": "unknown"}, 404),
        ({"templateID": "Not/A/Name:"}, 404),
        ({"timeout": 5001}, 403),
        ({"timeout": "x"}, 400),
        ({"network": {"allowOut": ["127.0.0.1:80"]}}, 403),
        ({"network": {"maskRequestHost": "a b"}}, 400),
        ({"network": []}, 400),
        ({"autoResume": True}, 400),
    ],
)
async def test_what_is_refused_makes_nothing(
    here: Here, ann: Client, form: dict[str, Any], status: int
) -> None:
    assert status == (await ann("POST", "/sandboxes", form)).status_code
    assert [] == here.manager.index.all()
    assert 0 == len(here.backend.sandboxes)


async def test_lists_are_of_those_that_fit(ann: Client, bob: Client) -> None:
    first = await ann.create(metadata={"a": "1", "b": "x y"})
    second = await ann.create(metadata={"a": "1"})
    await bob.create(metadata={"a": "1"})
    await ann("POST", f"/sandboxes/{second.sandbox_id}/pause", {})
    one, two = first.sandbox_id, second.sandbox_id
    for query, found in (
        ({}, [two, one]),
        ({"order": "asc"}, [one, two]),
        ({"order": "desc"}, [two, one]),
        ({"state": "running"}, [one]),
        ({"state": "paused"}, [two]),
        ({"state": "paused,running"}, [two, one]),
        ({"state": "ended"}, []),
        ({"metadata": "a=1"}, [two, one]),
        ({"metadata": "a=1&b=x%20y"}, [one]),
        ({"metadata": "a=2"}, []),
        ({"metadata": "c="}, []),
        ({"metadata": "e2b="}, []),
        ({"limit": "1"}, [two]),
        ({"template": "base"}, [two, one]),
        ({"template": "other"}, []),
    ):
        assert found == await ann.ids(**query), query


async def test_a_sandbox_is_paused_once_and_woken_once(here: Here, ann: Client) -> None:
    live = await ann.create(timeout=1000)
    at = f"/sandboxes/{live.sandbox_id}"
    assert 409 == (await ann("POST", f"{at}/resume", {})).status_code
    assert 204 == (await ann("POST", f"{at}/pause", {})).status_code
    assert 409 == (await ann("POST", f"{at}/pause", {})).status_code
    assert "paused" == (await ann("GET", at)).json()["state"]
    assert 201 == (await ann("POST", f"{at}/resume", {"timeout": 50})).status_code
    assert live.left_s(here.manager.clock.now()) <= 50  # type: ignore[operator]
    assert 200 == (await ann("POST", f"/v2{at}/connect", {"timeout": 10})).status_code
    assert 40 < live.left_s(here.manager.clock.now()) <= 50  # type: ignore[operator]
    assert 204 == (await ann("POST", f"{at}/timeout", {"timeout": 10})).status_code
    assert live.left_s(here.manager.clock.now()) <= 10  # type: ignore[operator]
    assert 400 == (await ann("POST", f"{at}/timeout", {})).status_code, "it has no default"
    assert 204 == (await ann("POST", f"{at}/pause", {})).status_code
    assert 204 == (await ann("DELETE", at)).status_code, "paused, too"
    assert 404 == (await ann("DELETE", at)).status_code
    assert 404 == (await ann("GET", at)).status_code


async def test_a_network_is_replaced_by_what_is_asked_for_and_judged(ann: Client) -> None:
    live = await ann.create()
    at = f"/sandboxes/{live.sandbox_id}/network"
    for form, status in (
        ({"allowOut": ["a.test"], "allow_internet_access": False}, 204),
        ({"allowOut": ["127.0.0.1:80"]}, 403),
        ({"rules": [1]}, 501),
        ({"allowOut": 5}, 400),
    ):
        assert status == (await ann("PUT", at, form)).status_code, form


async def test_a_snapshot_of_a_name_takes_the_place_of_its_owners_of_that_name(
    here: Here, ann: Client, bob: Client
) -> None:
    live, other = await ann.create(), await bob.create()
    at = f"/sandboxes/{live.sandbox_id}/snapshots"
    first = (await ann("POST", at, {"name": "x"})).json()
    assert ["x:default"] == first["names"]
    theirs = (await bob("POST", f"/sandboxes/{other.sandbox_id}/snapshots", {"name": "x"})).json()
    await ann("POST", at, {"name": "ringfence/x:default"})
    assert 2 == len(here.manager.snapshots()), "one of each owner"
    assert 400 == (await ann("POST", at, {"name": "n" * 129})).status_code
    nameless = (await ann("POST", at, {"name": "n" * 128})).json()
    assert 201 == (await ann("POST", at, {})).status_code
    assert 429 == (await ann("POST", at, {})).status_code, "no more than a client may keep"
    assert 201 == (await ann("POST", at, {"name": "x"})).status_code, "it replaces one"
    assert 3 == len((await ann("GET", "/snapshots")).json())
    assert [theirs["snapshotID"]] == [
        each["snapshotID"] for each in (await bob("GET", "/snapshots")).json()
    ]
    for query, count in (
        ({"name": "x"}, 1),
        ({"name": "ringfence/x:default"}, 1),
        ({"name": "y"}, 0),
        ({"sandboxID": live.sandbox_id}, 3),
        ({"sandboxID": other.sandbox_id}, 0),
    ):
        assert count == len((await ann("GET", "/snapshots", params=query)).json()), query
    path = f"/templates/{nameless['snapshotID']}"
    assert 404 == (await bob("DELETE", path)).status_code
    assert [204, 404] == [(await ann("DELETE", path)).status_code for _ in range(2)]
    assert 404 == (await bob("POST", "/v2/sandboxes", {"templateID": "n" * 128})).status_code


async def test_a_snapshot_that_fails_leaves_the_one_of_its_name(
    here: Here, ann: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = await ann.create()
    at = f"/sandboxes/{live.sandbox_id}/snapshots"
    assert 201 == (await ann("POST", at, {"name": "x"})).status_code
    (before,) = here.manager.snapshots()

    def fail(*_: object) -> None:
        raise StorageFull("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(type(here.manager), "snapshot", fail)
        assert 507 == (await ann("POST", at, {"name": "x"})).status_code
    assert [before.id] == [each.id for each in here.manager.snapshots()]
    assert 201 == (await ann("POST", at, {"name": "x"})).status_code
    assert before.id not in [each.id for each in here.manager.snapshots()]


async def test_an_admin_replaces_the_snapshot_of_the_sandboxes_owner(
    here: Here, ann: Client
) -> None:
    admin = Client(here, "ops", "admin")
    live, own = await ann.create(), await admin.create()
    for client, each in ((ann, live), (admin, own), (admin, live)):
        at = f"/sandboxes/{each.sandbox_id}/snapshots"
        assert 201 == (await client("POST", at, {"name": "x"})).status_code
    assert [1, 1] == [len(here.manager.snapshots(each)) for each in ("ann", "ops")]


async def test_of_snapshots_of_one_name_the_newest_is_taken(here: Here, ann: Client) -> None:
    """A client of `/v1` writes metadata itself, and may give two of them one name."""
    live = await ann.create()
    for number in "12":
        with open(f"{here.root(live)}/home/user/kept", "w") as file:
            file.write(number)
        here.manager.snapshot(live.id, {"e2b.name": "x"}, "ann")
    for name in ("x", "x:default", "ringfence/x:default"):
        made = await ann.create(templateID=name)
        with open(f"{here.root(made)}/home/user/kept") as file:
            assert "2" == file.read(), name


async def test_a_network_that_was_changed_is_that_of_forks_and_is_told(
    here: Here, ann: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied: list[NetworkPolicy] = []
    live = await ann.create(allow_internet_access=False)
    monkeypatch.setattr(live.sandbox, "apply_network_policy", applied.append, raising=False)
    last, at = here.manager.events.last, f"/sandboxes/{live.sandbox_id}"
    assert 204 == (await ann("PUT", f"{at}/network", {})).status_code
    assert 204 == (await ann("PUT", f"{at}/network", {"allow_internet_access": True})).status_code
    assert [False, True] == [bool(each.all_rules) for each in applied], "as at the creation"
    assert 403 == (await ann("PUT", f"{at}/network", {"allowOut": ["127.0.0.1:80"]})).status_code
    told = [each.kind for each in here.manager.events.since(last)[0]]
    assert ["network"] * 2 == told, "a change that was refused is none"
    changed = NetworkPolicy.parse("a.test")
    monkeypatch.setattr(live.inner, "spec", replace(live.inner.spec, network=changed))
    forked = await ann("POST", f"{at}/fork", {})
    fork = here.manager.index.find(forked.json()[0]["sandbox"]["sandboxID"])
    assert fork is not None
    assert changed == fork.spec.network != live.spec.network


@pytest.mark.parametrize("scope", ["user", "read_only", "admin"])
async def test_a_key_that_only_reads_gets_no_token(here: Here, ann: Client, scope: str) -> None:
    live = await ann.create()
    found = await Client(here, "ann", scope)("GET", f"/sandboxes/{live.sandbox_id}")
    token = here.shared.tokens.of(live)
    assert (None if scope == "read_only" else token) == found.json().get("envdAccessToken")
    assert (scope == "read_only") == (token not in found.text)


async def test_a_timeout_of_nothing_ends_a_sandbox_at_once(here: Here, ann: Client) -> None:
    live = await ann.create()
    at = f"/sandboxes/{live.sandbox_id}/timeout"
    assert 204 == (await ann("POST", at, {"timeout": 0})).status_code
    assert live.left_s(here.manager.clock.now()) <= 0.001  # type: ignore[operator]
    assert 400 == (await ann("POST", at, {"timeout": -1})).status_code


@pytest.mark.parametrize("path", ["/timeout", "/connect", "/resume"])
async def test_a_life_that_is_prolonged_is_no_longer_than_the_ceiling(
    here: Here, ann: Client, path: str
) -> None:
    live = await ann.create()
    at = f"/sandboxes/{live.sandbox_id}"
    if path == "/resume":
        assert 204 == (await ann("POST", f"{at}/pause", {})).status_code
    before, state = live.expires, live.state
    refused = await ann("POST", f"{at}{path}", {"timeout": 5001})
    assert (403, before, state) == (refused.status_code, live.expires, live.state)
    assert (await ann("POST", f"{at}{path}", {"timeout": 5000})).is_success
    assert 4900 < live.left_s(here.manager.clock.now()) <= 5000  # type: ignore[operator]
    admin = Client(here, "ops", "admin")
    if path != "/resume":
        assert (await admin("POST", f"{at}{path}", {"timeout": 6000})).is_success
        assert 5900 < live.left_s(here.manager.clock.now()) <= 6000  # type: ignore[operator]


async def test_variables_of_a_client_win_over_those_of_the_template(
    here: Here, ann: Client
) -> None:
    live = await ann.create(envVars={"USER": "me", "A": "1"})
    base = here.e2b.spec_of("base")
    assert base is not None
    assert {**base.env, "USER": "me", "A": "1"} == dict(live.spec.env)


async def test_each_fork_that_cannot_be_made_is_told_of_beside_those_that_were(
    here: Here, ann: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[str] = []
    monkeypatch.setattr(control, "note_copies", lambda _call, made, _copies: noted.append(made))
    live, few = await ann.create(), Client(here, "ann", max_sandboxes=2)
    answered = await few("POST", f"/sandboxes/{live.sandbox_id}/fork", {"count": 3})
    made, *refused = answered.json()
    assert (201, 2) == (answered.status_code, len(refused))
    assert all(500 == each["error"]["code"] and each["error"]["message"] for each in refused)
    assert [made["sandbox"]["sandboxID"]] == noted, "its processes keep their tags"
    assert 2 == len(here.manager.index.all())
    assert 0 == len(here.backend.saved)
    assert (await few("POST", "/sandboxes", {"timeout": 60})).is_client_error, "nor by itself"


async def test_each_of_several_wanted_labels_must_fit(ann: Client) -> None:
    both = await ann.create(metadata={"a": "1", "b": "2"})
    one = await ann.create(metadata={"a": "1", "b": "3"})
    assert [both.sandbox_id] == await ann.ids(metadata="a=1&b=2")
    assert [one.sandbox_id, both.sandbox_id] == await ann.ids(metadata="a=1")
    assert [] == await ann.ids(metadata="a=1&c=")


async def test_a_sandbox_is_made_from_a_snapshot_of_its_own_client(
    here: Here, ann: Client, bob: Client
) -> None:
    live = await ann.create(envVars={"A": "1"})
    with open(f"{here.root(live)}/home/user/kept", "w") as file:
        file.write("yes")
    at = f"/sandboxes/{live.sandbox_id}/snapshots"
    made = (await ann("POST", at, {})).json()["snapshotID"]
    again = await ann.create(templateID=made)
    with open(f"{here.root(again)}/home/user/kept") as file:
        assert "yes" == file.read()
    assert "1" == again.spec.env["A"]
    assert 404 == (await bob("POST", "/v2/sandboxes", {"templateID": made})).status_code


async def test_a_key_of_a_request_makes_one_sandbox(ann: Client, bob: Client) -> None:
    headers = {"idempotency-key": "k"}
    made = [
        (await each("POST", "/sandboxes", {"timeout": 60}, headers=headers)).json()["sandboxID"]
        for each in (ann, ann, bob)
    ]
    assert made[0] == made[1] != made[2]
    long = {"idempotency-key": "k" * 300}
    answers = [await ann("POST", "/sandboxes", {"timeout": 60}, headers=long) for _ in range(2)]
    assert [201, 201] == [each.status_code for each in answers], "longer than we keep of one"
    first, second = (each.json()["sandboxID"] for each in answers)
    assert made[0] != first == second


@pytest.mark.parametrize(
    ("form", "status"),
    [({"count": 0}, 400), ({"count": 101}, 400), ({"count": "x"}, 400), ({"timeout": 5001}, 403)],
)
async def test_forks_are_so_many_and_live_so_long(
    here: Here, ann: Client, form: dict[str, Any], status: int
) -> None:
    live = await ann.create()
    assert status == (await ann("POST", f"/sandboxes/{live.sandbox_id}/fork", form)).status_code
    assert ([live], 0) == (here.manager.index.all(), len(here.backend.saved))


async def test_a_fork_has_the_notes_and_files_and_a_life_and_key_of_its_own(
    here: Here, ann: Client
) -> None:
    live = await ann.create(
        metadata={"m": "n"}, autoPause=True, network={"allowPublicTraffic": False}
    )
    again = Client(here, "ann")
    answered = await again("POST", f"/sandboxes/{live.sandbox_id}/fork", {"count": 2, "timeout": 9})
    assert 201 == answered.status_code
    ids = [each["sandbox"]["sandboxID"] for each in answered.json()]
    assert 2 == len({*ids, live.sandbox_id}) - 1
    for each in ids:
        fork = here.manager.index.find(each)
        assert fork is not None
        notes = notes_of(fork.metadata)
        assert ("n", False) == (fork.metadata["m"], notes.is_public)
        assert notes_of(live.metadata).key != notes.key
        assert fork.left_s(here.manager.clock.now()) <= 9  # type: ignore[operator]
        assert live.timeouts.on_expiry == fork.timeouts.on_expiry
        with open(f"{here.root(fork)}/run/e2b/.E2B_SANDBOX_ID") as file:
            assert each == file.read()
    assert 0 == len(here.backend.saved)


async def test_a_fork_by_an_administrator_is_the_owners(here: Here, ann: Client) -> None:
    live, admin = await ann.create(), Client(here, "ops", "admin")
    [made] = (await admin("POST", f"/sandboxes/{live.sandbox_id}/fork", {})).json()
    fork = here.manager.index.find(made["sandbox"]["sandboxID"])
    assert fork is not None
    assert live.client_id == fork.client_id
    assert 0 == len(here.backend.saved)


@pytest.mark.parametrize(
    ("query", "status"),
    [({}, 200), ({"start": "1", "end": "2"}, 200), ({"start": "x"}, 400), ({"end": "1" * 12}, 400)],
)
async def test_metrics_are_of_a_range(ann: Client, query: dict[str, str], status: int) -> None:
    live = await ann.create()
    assert (
        status
        == (await ann("GET", f"/sandboxes/{live.sandbox_id}/metrics", params=query)).status_code
    )


async def test_metrics_go_from_the_first_second_to_the_whole_of_the_last(ann: Client) -> None:
    live = await ann.create()
    now = int(time.time())
    ann.here.shared.meter._samples[live.sandbox_id] = deque(
        metering._Sample(at, 0, number, 0)
        for number, at in enumerate((1.0, 1.9, 2.0, 2.9, 3.1, now + 30.0))
    )
    for query, found in (
        ({"start": "2", "end": "2"}, [2, 3]),
        ({"end": "1"}, [0, 1, 2]),
        ({"start": "3"}, [4, 5]),
        ({}, [0, 1, 2, 3, 4, 5]),
    ):
        points = await ann("GET", f"/sandboxes/{live.sandbox_id}/metrics", params=query)
        assert found == [each["memUsed"] for each in points.json()], query


async def test_the_domain_is_told_with_the_port_of_the_api_by_its_own_name_alone(
    ann: Client,
) -> None:
    live = await ann.create()
    for host, domain in (
        ("api.sbx.test:8080", "sbx.test:8080"),
        ("API.SBX.TEST:8080", "sbx.test:8080"),
        ("localhost:8080", "sbx.test"),
        ("api.sbx.test", "sbx.test"),
    ):
        shown = await ann("GET", f"/sandboxes/{live.sandbox_id}", headers={"host": host})
        assert domain == shown.json()["domain"], host


async def test_what_there_is_none_of_says_so(ann: Client) -> None:
    for method, path, status in (
        ("GET", "/teams", 200),
        ("GET", "/volumes", 501),
        ("DELETE", "/volumes/x", 501),
        ("POST", "/secrets", 501),
        ("POST", "/v2/templates", 501),
        ("POST", "/templates", 501),
        ("GET", "/api-keys", 501),
        ("GET", "/templates", 200),
        ("GET", "/v2/templates", 200),
    ):
        assert status == (await ann(method, path)).status_code, (method, path)
    listed = {each["templateID"] for each in (await ann("GET", "/templates")).json()}
    assert {"base", "code-interpreter-v1"} <= listed


async def test_deadlines_are_told_alike_until_somebody_sets_the_clock(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = here.call(None)
    ahead = here.manager.clock.ahead_s
    assert abs(control._wall(call, 100.0) - 100.0 - ahead) < 1
    before = control._wall(call, 100.0)
    call.shared.ahead_s += 0.4
    assert before + 0.4 == pytest.approx(control._wall(call, 100.0), abs=0.05), "clocks drift"
    call.shared.ahead_s += 3600
    assert before == pytest.approx(control._wall(call, 100.0), abs=0.3)
    assert (
        control._wall(call, None)
        > control._wall(call, 0.0) + 365 * 86_400 - here.manager.clock.now()
    )


def test_a_bodys_size_is_bounded_also_where_it_is_compressed(here: Here) -> None:
    import asyncio
    import gzip

    live = here.live(notes=Notes())
    headers = {
        "e2b-sandbox-id": live.sandbox_id,
        "x-access-token": here.shared.tokens.of(live),
        "content-encoding": "gzip",
    }
    most = here.service.admission.bounds.body_bytes

    async def sent(size: int) -> int:
        body = gzip.compress(b"{}" + b" " * (size - 2), 1)
        answered = await here.ask("POST", "/process.Process/List", headers=headers, content=body)
        assert here.is_idle()
        return answered.status_code

    assert [200, 413] == [asyncio.run(sent(size)) for size in (most, most + 1)]


async def test_each_answer_that_opens_a_sandbox_has_each_token_by_its_own_name(
    here: Here, ann: Client
) -> None:
    """A token for ports is given to others: it must not open processes and files."""
    made = (await ann("POST", "/v2/sandboxes", {"timeout": 60})).json()
    at = f"/sandboxes/{made['sandboxID']}"
    answers = {"create": made}
    answers["connect"] = (await ann("POST", f"{at}/connect", {})).json()
    assert 204 == (await ann("POST", f"{at}/pause", {})).status_code
    answers["resume"] = (await ann("POST", f"{at}/resume", {})).json()
    answers["connect again"] = (await ann("POST", f"/v2{at}/connect", {})).json()
    answers["fork"] = (await ann("POST", f"{at}/fork", {})).json()[0]["sandbox"]
    for name, each in answers.items():
        live = here.manager.index.find(each["sandboxID"])
        assert live is not None
        tokens = here.shared.tokens.of(live), here.shared.tokens.of_traffic(live)
        assert tokens == (each["envdAccessToken"], each["trafficAccessToken"]), name
        for token, status in zip(tokens, (200, 401), strict=True):
            headers = {"e2b-sandbox-id": live.sandbox_id, "x-access-token": token}
            assert status == (await here.ask("GET", "/envs", headers=headers)).status_code, name
    shown = (await ann("GET", at)).json()
    assert answers["create"]["envdAccessToken"] == shown["envdAccessToken"]


async def test_a_snapshot_that_meanwhile_is_anothers_is_not_deleted(
    here: Here, ann: Client, bob: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked for as the caller's, and deleted as the caller's."""
    live = await bob.create()
    made = await bob("POST", f"/sandboxes/{live.sandbox_id}/snapshots", {})
    [theirs] = here.manager.snapshots("bob")
    assert theirs.id == made.json()["snapshotID"]
    monkeypatch.setattr(control, "_snapshot", lambda _call, _name: theirs)
    path = f"/templates/{theirs.id}"
    assert 404 == (await ann("DELETE", path)).status_code
    assert [theirs] == here.manager.snapshots("bob")
    assert 204 == (await bob("DELETE", path)).status_code
