"""Who may come in, and how much of them: each judgement at its boundary, without a server around it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message

from ringfence import Limits, Mount, SandboxSpec
from ringfence.api.access import keys, origin_policy
from ringfence.api.access.caller import ADMIN, METRICS, READ_ONLY, TOKEN, USER, Caller
from ringfence.api.access.ceilings import Ceilings
from ringfence.api.access.keys import Authenticator
from ringfence.api.access.open_requests import OpenRequests
from ringfence.api.access.origin_policy import OriginPolicy
from ringfence.api.access.permissions import (
    NOTHING,
    ROUTES,
    Found,
    Permissions,
    Rule,
    check_route,
    find,
)
from ringfence.api.admission import Admission, Body
from ringfence.api.bounds import Bounds
from ringfence.errors import (
    Forbidden,
    LifecycleError,
    QuotaExceeded,
    ResourceExhausted,
    TooLarge,
    TooManyRequests,
    TooSlow,
)
from ringfence.model.acquire import AcquireOptions, AttachRequest
from ringfence.model.client_session import SessionTimeouts
from ringfence.model.execs.exec import ExecRequest
from ringfence.model.execution.execution import ExecutionRequest
from ringfence.model.net.network import NetworkPolicy, NetworkRule
from ringfence.model.template import TemplateRequest, TemplateStep
from ringfence.sandbox.stream import DEFAULT_OUTPUT_BYTES
from ringfence.store.records import LIVE, SandboxRecord
from ringfence.store.store import Store

pytestmark = pytest.mark.anyone

ANN = Caller("ann", USER, key="key-ann")


class Clock:
    now = 1000.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


# -- keys ----------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(keys, "time", clock)
    return clock


@pytest.fixture
def authenticator(clock: Clock) -> Iterator[Authenticator]:
    store = Store(None)
    store.add_sandbox(SandboxRecord("sbx-1", "ann", "unconfined", LIVE, "{}", 1.0, "b"))
    yield Authenticator(store)
    store.close()


def test_a_key_opens_until_its_end_and_not_at_it(
    authenticator: Authenticator, clock: Clock
) -> None:
    _, text = authenticator.make(owner="ann", scope=USER, expires_at=1010.0)
    clock.now = 1009.999
    found = authenticator.caller(text)
    assert found is not None
    assert ("ann", USER, "") == (found.client, found.scope, found.sandbox)
    clock.now = 1010.0
    assert authenticator.caller(text) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-1],
        lambda text: text + "x",
        lambda text: text[:-1] + ("a" if text[-1] != "a" else "b"),
        lambda text: text.removeprefix("rf_"),
        lambda text: text.replace(".", ""),
        lambda text: text.partition(".")[0] + ".",
        lambda text: text.upper(),
        lambda text: text.replace("key-", "key-0"),
        lambda text: "",
    ],
)
def test_only_the_very_key_opens(authenticator: Authenticator, change: Any) -> None:
    _, text = authenticator.make(owner="ann", scope=USER)
    assert authenticator.caller(text)
    assert authenticator.caller(change(text)) is None


def test_an_old_secret_opens_until_its_end_and_not_at_it(
    authenticator: Authenticator, clock: Clock
) -> None:
    record, old = authenticator.make(owner="ann", scope=USER)
    _, new = authenticator.rotate(record.id, 10.0)
    clock.now = 1009.999
    assert authenticator.caller(old)
    clock.now = 1010.0
    assert authenticator.caller(old) is None
    assert authenticator.caller(new)
    _, newest = authenticator.rotate(record.id, 0.0)
    assert authenticator.caller(new) is None
    assert authenticator.caller(newest)


@pytest.mark.parametrize(
    ("expires_at", "overlap_s", "until"),
    [(None, 10.0, 1010.0), (1005.0, 10.0, 1005.0), (1050.0, 10.0, 1010.0), (None, 0.0, 0.0)],
)
def test_what_an_old_secret_opened_ends_when_it_opens_no_more(
    authenticator: Authenticator, expires_at: float | None, overlap_s: float, until: float
) -> None:
    """Streams end by a timer: the secret is not shown again."""
    record, old = authenticator.make(owner="ann", scope=USER, expires_at=expires_at)
    with_old = authenticator.caller(old)
    assert with_old is not None
    end = float("inf") if expires_at is None else expires_at
    assert end == authenticator.opens_until(with_old)

    _, new = authenticator.rotate(record.id, overlap_s)

    with_new = authenticator.caller(new)
    assert with_new is not None
    assert until == authenticator.opens_until(with_old)
    assert end == authenticator.opens_until(with_new)
    authenticator.remove(record.id, with_new, this_key=True)
    assert 0.0 == authenticator.opens_until(with_new)


def test_a_key_that_has_ended_speaks_for_nothing_that_was_made_with_it(
    authenticator: Authenticator, clock: Clock
) -> None:
    record, _ = authenticator.make(owner="ann", scope=USER, expires_at=1010.0)
    clock.now = 1009.999
    holder = authenticator.holder(record.id)
    assert holder is not None
    assert ("ann", USER, record.id) == (holder.client, holder.scope, holder.key)
    clock.now = 1010.0
    assert authenticator.holder(record.id) is None
    assert authenticator.holder("key-of-nobody") is None


async def test_a_stream_ends_with_its_key_whatever_other_keys_did_before() -> None:
    """Each look at the open requests plans the next one."""
    store = Store(None)
    authenticator = Authenticator(store)
    requests = OpenRequests(authenticator)

    async def stream(text: str) -> None:
        caller = authenticator.caller(text)
        assert caller is not None
        request = requests.begin(caller, "GET", None)
        try:
            await asyncio.Event().wait()
        finally:
            requests.end(request)

    end = time.time() + 0.3
    texts = [
        authenticator.make(owner="ann", scope=USER, expires_at=end + later)[1]
        for later in (0.0, 0.1, 3600.0)
    ]
    tasks = [asyncio.create_task(stream(text)) for text in texts]
    await asyncio.sleep(0)
    requests.look()  # another key was rotated or removed

    await asyncio.wait(tasks[:2], timeout=10)
    assert [True, True, False] == [task.done() for task in tasks]
    assert time.time() >= end
    tasks[2].cancel()
    await asyncio.wait(tasks)
    requests.look()
    store.close()


def test_a_token_ends_with_what_made_it(authenticator: Authenticator, clock: Clock) -> None:
    record, text = authenticator.make(owner="ann", scope=USER, expires_at=1010.0)
    maker = authenticator.caller(text)
    assert maker is not None
    short, _ = authenticator.make_token(maker, "sbx-1", "ann", 5.0)
    long, _ = authenticator.make_token(maker, "sbx-1", "ann", 50.0)
    endless, token = authenticator.make_token(maker, "sbx-1", "ann", None)
    assert (1005.0, 1010.0, 1010.0) == (short.expires_at, long.expires_at, endless.expires_at)
    assert authenticator.caller(token)

    with pytest.raises(LifecycleError):
        authenticator.remove(record.id, maker, this_key=False)
    assert authenticator.caller(token)
    authenticator.remove(record.id, maker, this_key=True)
    assert authenticator.caller(text) is None
    assert authenticator.caller(token) is None
    assert set() == {each for each in authenticator._known if each in (record.id, endless.id)}


def test_a_token_does_not_open_longer_than_a_maker_that_was_changed(
    authenticator: Authenticator, clock: Clock
) -> None:
    """By its maker's own end, and not only by the one that was written into it."""
    record, text = authenticator.make(owner="ann", scope=USER)
    maker = authenticator.caller(text)
    assert maker is not None
    _, token = authenticator.make_token(maker, "sbx-1", "ann", None)
    authenticator._known[record.id] = replace(record, expires_at=1005.0)
    assert authenticator.caller(token)
    clock.now = 1005.0
    assert authenticator.caller(token) is None


def test_a_sandbox_has_only_so_many_tokens(authenticator: Authenticator) -> None:
    for _ in range(100):
        authenticator.make_token(ANN, "sbx-1", "ann", 5.0)
    with pytest.raises(QuotaExceeded, match="100 tokens"):
        authenticator.make_token(ANN, "sbx-1", "ann", 5.0)
    assert 100 == len(authenticator._known)


# -- requests at once, and bodies ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("bounds", "caller", "most", "error"),
    [
        (Bounds(requests=3), ANN, 3, ResourceExhausted),
        (Bounds(requests_of_client=2), ANN, 2, TooManyRequests),
        (Bounds(), Caller("ann", USER, key="k", max_requests=1), 1, TooManyRequests),
    ],
)
def test_as_many_requests_as_may_be_and_not_one_more(
    bounds: Bounds, caller: Caller, most: int, error: type[Exception]
) -> None:
    admission = Admission(bounds)
    for _ in range(2):
        for _ in range(most):
            admission.begin(caller)
        for _ in range(2):  # a refusal takes nothing
            with pytest.raises(error):
                admission.begin(caller)
        assert most == admission.now
        for _ in range(most):
            admission.end(caller)
        assert 0 == admission.now
        assert 0 == len(admission._of)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("sizes", [[10], [4, 6], [10, 0], [11], [4, 7], [10, 1]])
async def test_a_body_is_as_large_as_it_may_be_and_no_larger(
    sizes: list[int], streamed: bool
) -> None:
    pieces = iter(sizes)
    left = [len(sizes)]

    async def receive() -> Message:
        left[0] -= 1
        return {"type": "http.request", "body": bytes(next(pieces)), "more_body": left[0] > 0}

    body = Body(receive, Admission(Bounds(body_bytes=10)), ANN, streamed=streamed)
    if sum(sizes) <= 10 or streamed:
        for size in sizes:
            assert size == len((await body())["body"])
        return
    for _ in sizes[:-1]:
        await body()
    with pytest.raises(TooLarge):
        await body()


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_body_that_does_not_come_is_not_waited_for(streamed: bool) -> None:
    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    bounds = Bounds(body_s=0.01, chunk_s=0.01)
    with pytest.raises(TooSlow):
        await Body(receive, Admission(bounds), ANN, streamed=streamed)()


async def test_pieces_that_come_in_time_do_not_lengthen_that_of_the_whole() -> None:
    async def receive() -> Message:
        await asyncio.sleep(0.005)
        return {"type": "http.request", "body": b"x", "more_body": True}

    admission = Admission(Bounds(body_s=0.05, chunk_s=30.0))
    whole = Body(receive, admission, ANN, streamed=False)
    streamed = Body(receive, admission, ANN, streamed=True)

    async def take(body: Body, pieces: int) -> None:
        for _ in range(pieces):
            await body()

    await take(streamed, 20)  # the control
    with pytest.raises(TooSlow):
        await take(whole, 200)


@pytest.mark.parametrize(
    ("bounds", "error"),
    [
        (Bounds(bodies_bytes=10), ResourceExhausted),
        (Bounds(bodies_bytes_of_client=10), TooManyRequests),
    ],
)
async def test_bodies_held_at_once_are_bounded(bounds: Bounds, error: type[Exception]) -> None:
    """A request that is refused, and one that has been served, hold nothing any more."""
    admission = Admission(bounds)

    def body(size: int, *, streamed: bool = False) -> Body:
        async def receive() -> Message:
            return {"type": "http.request", "body": bytes(size), "more_body": False}

        return Body(receive, admission, ANN, streamed=streamed)

    first, second, third = body(6), body(4), body(1)
    for each in (first, second, body(100, streamed=True)):
        await each()
    with pytest.raises(error):
        await third()
    third.close()
    for _ in range(2):  # what was given back is not given back again
        first.close()
    await body(6)()

    assert 10 == admission._bytes_of.total()


# -- names and pages -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("localhost", True),
        ("LOCALHOST:80", True),
        ("127.0.0.1:65535", True),
        ("[::1]:8080", True),
        ("ringfence.example", True),
        ("ringfence.example:443", True),
        ("a.ringfence.example", False),
        ("ringfence.example.evil.test", False),
        ("localhost.evil.test", False),
        ("128.0.0.1", False),
        ("10.0.0.1", False),
        ("[::2]", False),
        ("localhost:", False),
        ("localhost:123456", False),
        ("localhost@evil.test", False),
        ("localhost\n", False),
        ("", False),
    ],
)
def test_a_host_is_one_of_ours(host: str, is_ours: bool) -> None:
    where = OriginPolicy(hosts=frozenset({"ringfence.example"}))
    if is_ours:
        origin_policy.check_host(where, host)
        return
    with pytest.raises(Forbidden):
        origin_policy.check_host(where, host)


@pytest.mark.parametrize(
    ("origin", "site", "may"),
    [
        (None, None, True),
        (None, "same-origin", True),
        (None, "none", True),
        (None, "same-site", False),
        (None, "cross-site", False),
        ("https://app.example.com", "cross-site", True),
        ("HTTPS://APP.EXAMPLE.COM", None, True),
        ("http://app.example.com", None, False),
        ("https://app.example.com:444", None, False),
        ("https://app.example.com.evil.test", None, False),
        ("null", None, False),
        ("", None, False),
    ],
)
def test_only_pages_that_are_named_may_call(
    origin: str | None, site: str | None, may: bool
) -> None:
    where = OriginPolicy(origins=frozenset({"https://app.example.com"}))
    if may:
        origin_policy.check_origin(where, origin, site)
        return
    with pytest.raises(Forbidden):
        origin_policy.check_origin(where, origin, site)


# -- what a request says -------------------------------------------------------------------------


def field_of(caller: Caller, asked: Any, **judges: Any) -> str:
    """The field that only an admin may say so; empty where anybody may."""
    Permissions(**judges).judge(Caller("root", ADMIN), asked)  # the control
    try:
        Permissions(**judges).judge(caller, asked)
    except Forbidden as exc:
        return exc.field or "?"
    return ""


def test_every_mount_is_judged_and_every_part_of_its_path(tmp_path: Path) -> None:
    root = tmp_path / "given"
    (root / "in").mkdir(parents=True)
    (root / "link").symlink_to("/etc")
    (tmp_path / "given-not").mkdir()

    def judged(*sources: str) -> str:
        mounts = tuple(Mount(f"/m{i}", source) for i, source in enumerate(sources))
        return field_of(ANN, SandboxSpec(mounts=mounts), host_roots=[str(root)])

    assert "" == judged(str(root), str(root / "in"), f"{root}/")
    for bad in ("/etc", f"{root}/link", f"{root}/../given", f"{tmp_path}/given-not", str(tmp_path)):
        assert "mounts[0].source" == judged(bad), bad
        assert "mounts[2].source" == judged(str(root), str(root), bad), bad
        memory = SandboxSpec(memory_dir=bad)
        assert "memory_dir" == field_of(ANN, memory, host_roots=[str(root)]), bad
    assert "" == field_of(ANN, SandboxSpec(memory_dir=str(root)), host_roots=[str(root)])
    (tmp_path / "way").symlink_to(root)
    for source, refused in ((root, ""), (root / "in", ""), (tmp_path / "way", "mounts[0].source")):
        spec = SandboxSpec(mounts=(Mount("/m", str(source)),))
        assert refused == field_of(ANN, spec, host_roots=[str(tmp_path / "way")]), source


@pytest.mark.parametrize(
    ("spec", "refused"),
    [
        (SandboxSpec(), ""),
        (SandboxSpec(profile="debug"), ""),
        (SandboxSpec(profile="own_root"), "profile"),
        (SandboxSpec(profile="unrestricted"), "profile"),
        (SandboxSpec(python_env=True), "python_env"),
        (SandboxSpec(allow_degraded=("cpu_limit",)), "allow_degraded"),
        (SandboxSpec(allow_degraded=("*",)), "allow_degraded"),
    ],
)
def test_less_protection_is_an_admins_to_ask_for(spec: SandboxSpec, refused: str) -> None:
    assert refused == field_of(ANN, spec)
    attach = AttachRequest("sbx-1", "ann", create_if_missing=True, create_spec=spec)
    assert (f"create_spec.{refused}" if refused else "") == field_of(ANN, attach)


MAKERS: list[tuple[Any, Callable[[Any], SandboxSpec]]] = [
    (SandboxSpec(), lambda judged: judged),
    (
        AttachRequest("sbx-1", create_if_missing=True, create_spec=SandboxSpec()),
        lambda judged: judged.create_spec,
    ),
    (AttachRequest("sbx-1", create_if_missing=True), lambda judged: judged.create_spec),
    (TemplateRequest("x"), lambda judged: judged.base),
]


@pytest.mark.parametrize(("asked", "spec_of"), MAKERS)
def test_what_makes_a_sandbox_and_leaves_its_limits_out_gets_the_ceilings(
    asked: Any, spec_of: Callable[[Any], SandboxSpec]
) -> None:
    """Each request that has a spec, or stands for the default one."""
    alone = Permissions(most=Ceilings(ttl_s=60))
    if not isinstance(asked, TemplateRequest):  # whose sandboxes have lives of their own
        assert 60 == spec_of(alone.judge(ANN, asked)).ttl_s, "without a limit beside it, too"
    most = Limits(memory_bytes=2**25, pids=16, wall_time_s=5, cpus=0.5, network_bytes=100)
    permissions = Permissions(most=Ceilings(most, ttl_s=60))

    assert most == spec_of(permissions.judge(ANN, asked)).limits
    assert asked is permissions.judge(Caller("root", ADMIN), asked)


@pytest.mark.parametrize(
    ("asked", "most", "idle_s", "found"),
    [
        (None, 60, 300, 60),
        (None, 60, None, 60),
        (None, 600, 300, None),
        (None, None, 300, None),
        (20, 60, 300, 20),
        (60, 60, 30, 60),
    ],
)
def test_the_idle_time_is_the_servers_own_or_the_ceiling_where_that_is_lower(
    asked: float | None, most: float | None, idle_s: float | None, found: float | None
) -> None:
    permissions = Permissions(most=Ceilings(Limits(idle_timeout_s=most)), idle_s=idle_s)
    spec = SandboxSpec(limits=Limits(idle_timeout_s=asked))

    assert found == permissions.judge(ANN, spec).limits.idle_timeout_s


TIMEOUTS = [each.name for each in fields(SessionTimeouts) if each.name.endswith("_s")]


@pytest.mark.parametrize("name", TIMEOUTS)
def test_no_time_of_a_session_is_longer_than_the_ceiling(name: str) -> None:
    most = Permissions(most=Ceilings(Limits(idle_timeout_s=60)))
    for asked, found in ((60.0, ""), (60.5, f"timeouts.{name}"), (None, f"timeouts.{name}")):
        times: dict[str, Any] = {**dict.fromkeys(TIMEOUTS, 1.0), name: asked}
        options = AcquireOptions(timeouts=SessionTimeouts(**times))
        assert found == field_of(ANN, options, most=most.most)
        assert "" == field_of(ANN, options), "the control: no ceiling"


def test_so_is_what_is_kept_of_output() -> None:
    for most, found in ((DEFAULT_OUTPUT_BYTES - 1,) * 2, (DEFAULT_OUTPUT_BYTES, None), (0, 0)):
        permissions = Permissions(most=Ceilings(Limits(output_bytes=most)))
        assert found == permissions.judge(ANN, SandboxSpec()).limits.output_bytes


def test_nobody_acts_for_another_client() -> None:
    assert "" == field_of(ANN, AttachRequest("sbx-1", "ann"))
    assert "client_id" == field_of(ANN, AttachRequest("sbx-1", "bob"))


def test_a_token_opens_what_is_in_its_sandbox_and_no_list() -> None:
    token = Caller("ann", TOKEN, sandbox="sbx-1")

    def may(method: str, path: str, caller: Caller = token) -> bool:
        found = find(method, path)
        assert found is not None, path
        try:
            check_route(caller, found)
        except Forbidden:
            return False
        return True

    assert may("GET", "/v1/sandboxes/sbx-1")
    assert may("POST", "/v1/sandboxes/sbx-1/execs")
    for path in ("/v1/sandboxes", "/v1/health", "/v1/info", "/v1/sandboxes/sbx-2", "/v1/events"):
        assert not may("GET", path), path
    for path in ("tokens", "mounts", "extend", "snapshots", "suspend", "checkpoint"):
        assert not may("POST", f"/v1/sandboxes/sbx-1/{path}"), path
        assert may("POST", f"/v1/sandboxes/sbx-1/{path}", ANN), path
    assert not may("PUT", "/v1/sandboxes/sbx-1/network")
    assert not may("DELETE", "/v1/sandboxes/sbx-1")
    for method, path in (("GET", "/v1/pools"), ("PUT", "/v1/pools"), ("GET", "/v1/keys")):
        assert not may(method, path, ANN)
        assert may(method, path, Caller("root", ADMIN))


def test_no_key_may_do_more_than_its_scope_says_on_any_route() -> None:
    """Check the table against rules: a comparison of the server with its table finds no error in the table."""
    beyond = {"policy", "mounts", "life", "keys"}
    for (method, path), rule in ROUTES.items():
        assert ADMIN in rule.scopes, (method, path)
        if {READ_ONLY, METRICS} & {*rule.scopes}:
            assert ("GET", NOTHING, ()) == (method, rule.body, rule.changes), path
        if TOKEN in rule.scopes:
            assert path.startswith("/v1/sandboxes/{sandbox_id}"), path
            assert beyond.isdisjoint(rule.changes), path
        if path.startswith(("/v1/keys", "/v1/pools")) or path.endswith(("/config", "/evict")):
            assert (ADMIN,) == rule.scopes, path


def test_a_token_is_kept_to_its_sandbox_whatever_a_route_is_open_to() -> None:
    """The table has no such route: this stands behind it."""
    token = Caller("ann", TOKEN, sandbox="sbx-1")
    everybody = Rule((TOKEN, USER))
    check_route(token, Found("/v1/x", everybody, "sbx-1"))
    for other in ("", "sbx-2", "sbx-11"):
        with pytest.raises(Forbidden, match="its own sandbox"):
            check_route(token, Found("/v1/x", everybody, other))


HERE = NetworkPolicy.parse("127.0.0.1:80")
PLAIN = TemplateStep(run=("true",), timeout_s=5)


@pytest.mark.parametrize(
    ("step", "refused"),
    [
        (PLAIN, ""),
        (TemplateStep(run=("true",), network=NetworkPolicy.parse("a.test")), ""),
        (TemplateStep(pip_install=("x",), index_url="https://pypi.org/simple"), ""),
        (TemplateStep(run=("true",), timeout_s=5.5), "timeout_s"),
        (TemplateStep(run=("true",), network=HERE), "network.allowed_hosts[0]"),
        (
            TemplateStep(run=("true",), network=NetworkPolicy.parse("unrestricted")),
            "network.mode",
        ),
        (TemplateStep(pip_install=("x",), index_url="http://127.0.0.1/simple"), "index_url"),
    ],
)
def test_every_step_of_a_build_is_judged_by_its_number(step: TemplateStep, refused: str) -> None:
    most = Ceilings(Limits(wall_time_s=5))
    for at in range(2):
        steps = [PLAIN, PLAIN]
        steps[at] = step
        found = field_of(ANN, TemplateRequest("x", steps=tuple(steps)), most=most)
        assert (f"steps[{at}].{refused}" if refused else "") == found


def test_a_public_template_and_a_rule_for_what_is_around_the_host_are_an_admins() -> None:
    assert "public" == field_of(ANN, TemplateRequest("x", public=True))
    rules = NetworkPolicy(rules=(NetworkRule("127.0.0.1", "80"),))
    outside = NetworkPolicy(rules=(NetworkRule("a.test", "443", methods=("GET",)),))
    assert field_of(ANN, SandboxSpec(network=rules)).startswith("network.rules")
    assert field_of(ANN, rules).startswith("rules")
    assert "" == field_of(ANN, SandboxSpec(network=outside)) == field_of(ANN, outside)


@pytest.mark.parametrize("name", ["memory_mb", "cpus", "timeout_secs"])
def test_an_execution_gets_no_more_than_the_ceilings(name: str) -> None:
    most = Ceilings(Limits(memory_bytes=64 << 20, cpus=2.0, wall_time_s=30))
    bound = {"memory_mb": 64, "cpus": 2.0, "timeout_secs": 30}[name]
    for value, refused in ((bound, ""), (bound + 1, name)):
        given: dict[str, Any] = {name: value}
        asked = ExecutionRequest("true", **given)
        assert refused == field_of(ANN, asked, most=most)


@pytest.mark.parametrize(
    ("name", "ceiling"), [("timeout_s", "wall_time_s"), ("max_output_bytes", "output_bytes")]
)
def test_a_command_gets_no_more_than_the_ceilings(name: str, ceiling: str) -> None:
    most = Ceilings(Limits(**{ceiling: 30}))
    for value, refused in ((30, ""), (31, name)):
        given: dict[str, Any] = {name: value}
        asked = ExecRequest(("true",), **given)
        assert refused == field_of(ANN, asked, most=most)
