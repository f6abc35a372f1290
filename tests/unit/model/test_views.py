"""What models say of a thing: ids, states, forms for a client, and what a helper inside reported."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ringfence.errors import BadJson, InvalidRequest, LifecycleError
from ringfence.model.base import ids, jsonform
from ringfence.model.calls import make_request, make_spec, parse_limits, parse_mount, parse_network
from ringfence.model.client_session import (
    ClientSession,
    SessionState,
    SessionTimeouts,
    check_session_step,
    id_of,
)
from ringfence.model.create import CreateRequest
from ringfence.model.execs.exec import ExecRequest, ExecResult, ExecStatus
from ringfence.model.execs.exec_start import StartRequest
from ringfence.model.execution.config import ExecutionConfig, is_at_or_below, mount_of
from ringfence.model.execution.execution import (
    ExecutionRequest,
    ExecutionResult,
    ExecutionStatus,
    check_execution_step,
)
from ringfence.model.execution.info import ExecutionInfo
from ringfence.model.found import MOST_LINE_BYTES, read_answer
from ringfence.model.mount import Mount, outermost_first
from ringfence.model.net.network import NetworkPolicy
from ringfence.model.net.rules import NetworkRule
from ringfence.model.sandbox import SandboxView
from ringfence.model.session import ResolvedMount, Session
from ringfence.model.spec import SandboxSpec
from ringfence.model.state import State
from ringfence.model.stats import SandboxStats
from ringfence.model.template import TemplateRequest, TemplateStep

pytestmark = pytest.mark.anyone


# -- ids ------------------------------------------------------------------------------------------


@pytest.fixture
def node() -> Iterator[str]:
    ids.set_node("0badcafe")
    yield "0badcafe"
    ids.set_node("")


def test_ids_name_the_node_that_made_them(node: str) -> None:
    made = [ids.new_id("sbx") for _ in range(50)]

    assert {node} == {ids.node_of(each) for each in made}
    assert made == sorted(set(made))
    assert len("sbx-") + 36 == len(made[0])
    assert node == ids.node_of(ids.check_id(made[0]))
    for other in ("short", "sbx-", "", "a-0badcafg0000"):
        assert "" == ids.node_of(other)


def test_a_clock_that_is_set_back_makes_no_id_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ids.new_id("a")
    monkeypatch.setattr(time, "time_ns", lambda: 0)

    assert before < ids.new_id("a") < ids.new_id("a")


def test_an_id_that_is_derived_is_always_the_same_and_like_no_other() -> None:
    one, other = ids.new_id("sbx"), ids.new_id("sbx")

    assert ids.derived_id(one, "x") == ids.derived_id(one, "x")
    assert one[:-18] == ids.derived_id(one, "x")[:-18]
    assert ids.check_id(ids.derived_id(one, "x"))
    assert len(one) == len(ids.derived_id(one, "x"))
    different = [(one,), (one, "x"), (one, "y"), (one, "x", "y"), (one, "xy"), (other, "x")]
    assert len(different) == len({ids.derived_id(*each) for each in different} | {one}) - 1


# -- sessions -------------------------------------------------------------------------------------


def a_session(**fields: Any) -> ClientSession:
    given = {"state": SessionState.ACTIVE, "created_at": 0.0, "last_active_at": 0.0, **fields}
    return ClientSession("s", "b", "c", backend="native", **given)


def test_which_state_of_a_session_follows_which() -> None:
    active, detached, suspended, over = SessionState
    steps = {
        active: {active, detached, suspended, over}, detached: {active, detached, suspended, over},
        suspended: {suspended, active, over}, over: {over},
    }  # fmt: skip
    for now in SessionState:
        for then in SessionState:
            if then in steps[now]:
                assert then == check_session_step(now, then)
            else:
                with pytest.raises(LifecycleError) as told:
                    check_session_step(now, then)
                assert told.value.hint == (
                    "resume it first" if now == suspended else "acquire a new one"
                )


def test_each_state_of_a_session_has_a_time_of_its_own() -> None:
    timeouts = SessionTimeouts(idle_s=1, detach_s=2, suspend_s=None)

    assert [1.0, 2.0, None, 0.0] == [timeouts.of(each) for each in SessionState]
    assert a_session(time_remaining_s=0).is_timed_out
    assert a_session(state=SessionState.TERMINATED, time_remaining_s=5).is_timed_out
    for left in (None, 0.001):
        assert not a_session(time_remaining_s=left).is_timed_out


def test_a_session_is_known_by_itself_its_sandbox_or_its_id() -> None:
    class Sandbox:
        id = "native-1"

    assert ["s", "native-1", "x"] == [id_of(each) for each in (a_session(), Sandbox(), "x")]
    with pytest.raises(InvalidRequest) as told:
        id_of(5, "given")  # type: ignore[arg-type]
    assert "given" == told.value.field


# -- what a client is shown -----------------------------------------------------------------------


def test_only_an_admin_sees_paths_of_the_host() -> None:
    mounts = (ResolvedMount("/work", "read_only", "/home/of/someone"),)
    view = SandboxView(
        "s", "x", "c", State.RUNNING, SessionState.ACTIVE, "native", 0.0, 0.0, mounts=mounts
    )
    info = ExecutionInfo(
        "1", (), (), ExecutionConfig(allowed_paths=("/home/of/someone",), denied_paths=("/srv",))
    )
    for shown in (Session("s", "native", State.RUNNING, mounts), view, info):
        assert "/home/of/someone" not in json.dumps(shown.to_json())
        assert "/home/of/someone" in json.dumps(shown.to_json(admin=True))
    assert "denied_paths" not in info.to_json()["config"]


def test_states_are_plain_words_in_json() -> None:
    for form in (SandboxStats(State.RUNNING).to_json(), a_session().to_json()):
        assert str is type(form["state"])


def test_what_holds_a_secret_says_so() -> None:
    def starts(**fields: Any) -> bool:
        return StartRequest(ExecRequest(("a",), **fields)).is_secret

    assert [False, True, True, True] == [
        starts(), starts(env={"A": "b"}), starts(stdin=b"x"), starts(stdin=b""),
    ]  # fmt: skip
    some: list[dict[str, Any]] = [
        {"labels": {"A": "b"}},
        {"env": {"A": "b"}},
        {"secrets": {"A": "b"}},
    ]
    assert [False, True, True] == [CreateRequest(SandboxSpec(**each)).is_secret for each in some]
    sent = CreateRequest(SandboxSpec(secrets={"A": "value"})).to_json()
    assert {"A": "value"} == sent["secrets"]


def test_only_what_was_given_of_a_spec_is_sent_on() -> None:
    """The rest is for the snapshot to say."""
    made = CreateRequest.from_json({"tier": "light", "snapshot_id": "snap-1", "idle_timeout_s": 5})

    assert {"tier", "limits"} == set(made.given)
    assert 5 == made.spec.limits.idle_timeout_s
    form = made.to_json()
    assert {"tier", "limits"} == form.keys() & SandboxSpec.__dataclass_fields__.keys()
    assert made == CreateRequest.from_json(form)
    both = CreateRequest.from_json({"limits": {"pids": 7}, "idle_timeout_s": 5}).spec.limits
    assert (7, 5) == (both.pids, both.idle_timeout_s)


def test_how_an_exec_ended() -> None:
    kinds: tuple[Any, ...] = (ExecStatus, ExecResult)
    for kind in kinds:
        assert kind(exit_code=0).ok
        assert not kind(exit_code=1).ok
        assert not kind(exit_code=0, timed_out=True).ok
        assert not kind(signal=9).ok
        with pytest.raises(InvalidRequest):
            kind()
        with pytest.raises(InvalidRequest):
            kind(exit_code=0, signal=9)
    assert not ExecResult(exit_code=0).truncated
    assert ExecResult(exit_code=0, stdout_dropped_bytes=1).truncated
    assert ExecResult(exit_code=0, stderr_dropped_bytes=1).truncated
    assert not ExecRequest(("a",)).has_stdin
    assert ExecRequest(("a",), stdin=b"").has_stdin
    assert ExecRequest(("a",), stream_stdin=True).has_stdin


# -- templates ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "kind", "title"),
    [
        (TemplateStep(run=("sh", "-c", "make all")), "run", "RUN make all"),
        (TemplateStep(run=("sh", "-c", "make", "x")), "run", "RUN sh -c make x"),
        (TemplateStep(run=("make", "all")), "run", "RUN make all"),
        (TemplateStep(pip_install=("a", "b>1")), "pip_install", "PIP INSTALL a b>1"),
        (TemplateStep(copy="0" * 64, to="/a/"), "copy", "COPY . /a/"),
        (TemplateStep(copy="0" * 64, source="x", to="/a"), "copy", "COPY x /a"),
        (TemplateStep(env={"A": "secret", "B": "c"}), "env", "ENV A B"),
        (TemplateStep(workdir="/a"), "workdir", "WORKDIR /a"),
        (TemplateStep(user="a"), "user", "USER a"),
        (TemplateStep(run=("a",), user="b"), "run", "RUN a"),
    ],
)
def test_a_step_is_told_in_a_line(step: TemplateStep, kind: str, title: str) -> None:
    assert (kind, title) == (step.kind, step.title)
    assert step == TemplateStep.from_json(step.to_json())


def test_a_later_variable_of_a_template_wins() -> None:
    steps = (
        TemplateStep(env={"A": "1", "B": "1"}),
        TemplateStep(run=("a",)),
        TemplateStep(env={"A": "2"}),
    )

    assert {"A": "2", "B": "1"} == TemplateRequest("x", steps).variables
    assert ("sh", "-c", "a b") == TemplateStep.from_json({"run": "a b"}).run


# -- what a helper inside reported ----------------------------------------------------------------


def test_an_answer_is_whole_or_none() -> None:
    item, done = b'{"path": "/a"}', b'{"done": true, "truncated": true}'

    assert {"items": [{"path": "/a"}], "truncated": True} == read_answer(item + b"\n" + done)
    deep = read_answer(b'{"done": true, "truncated": false, "too_deep": 1}\n')
    assert {"items": [], "truncated": False, "too_deep": True} == deep
    long = json.dumps({"path": "x" * (MOST_LINE_BYTES - len('{"path": ""}'))}).encode()
    assert MOST_LINE_BYTES == len(long)
    assert read_answer(long + b"\n" + done)
    for other in (
        b"", item, done + b"\n" + item, item + b"\n" + done[:-1], b"[]\n" + done, b"5\n" + done,
        b'{"done": false}', long[:-2] + b'x"}\n' + done, b"[" * 5000 + b"\n" + done,
    ):  # fmt: skip
        assert read_answer(other) is None


# -- the execution service ------------------------------------------------------------------------


def test_which_state_of_an_execution_follows_which() -> None:
    pending, running, completed, failed, timeout, killed = ExecutionStatus
    legal = {(pending, each) for each in (running, failed, killed)}
    legal |= {(running, each) for each in (completed, failed, timeout, killed)}
    for now in ExecutionStatus:
        assert now.is_final == (now not in (pending, running))
        for then in ExecutionStatus:
            if (now, then) in legal:
                assert then == check_execution_step(now, then)
            else:
                with pytest.raises(LifecycleError):
                    check_execution_step(now, then)


def test_zeros_of_other_clients_are_nothing_and_false_is_no_zero() -> None:
    zeros = {
        "timeout_secs": 0,
        "memory_mb": 0,
        "cpus": 0,
        "work_dir": "",
        "tier": "",
        "id": "",
        "env": None,
    }

    assert ExecutionRequest("a") == ExecutionRequest.from_json({"command": "a", **zeros})
    for name in ("timeout_secs", "memory_mb", "cpus"):
        with pytest.raises(InvalidRequest) as told:
            ExecutionRequest.from_json({"command": "a", name: False})
        assert name == told.value.field
    with pytest.raises(InvalidRequest) as told:
        ExecutionRequest.from_json({"command": "a", "timeout": None})
    assert "timeout" == told.value.field


def test_a_result_is_written_for_other_clients_and_read_again() -> None:
    result = ExecutionResult(
        "x", ExecutionStatus.FAILED, started_at=0.5, ended_at=2.0, duration_s=1.5,
        error={"code": "execution_timeout", "message": "too long"},
    )  # fmt: skip
    for plain in (None, False):
        assert result == ExecutionResult.from_json(result.to_json(plain=plain))
    assert "duration" not in result.to_json()
    form = result.to_json(plain=True)
    assert ("1970-01-01T00:00:00.500000+00:00", "1970-01-01T00:00:02.000000+00:00") == (
        form["start_time"],
        form["end_time"],
    )
    assert (1_500_000_000, -1, "execution timeout: too long") == (
        form["duration"],
        form["exit_code"],
        form["error"],
    )
    fine = ExecutionResult("x", ExecutionStatus.COMPLETED, exit_code=0).to_json(plain=True)
    assert (0, "", None, None) == (
        fine["exit_code"], fine["error"], fine["start_time"], fine["duration"],
    )  # fmt: skip


def test_a_config_is_changed_as_a_whole_or_not_at_all() -> None:
    config = ExecutionConfig(max_cpus=2)

    changed = config.changed({"default_cpus": 2, "network_enabled": True})
    assert (2, 2, True) == (changed.default_cpus, changed.max_cpus, changed.network_enabled)
    assert config.network.is_none
    assert changed.network == changed.network_policy
    wrongs: tuple[object, ...] = ({"default_cpus": 3}, {"no": 1}, [])
    for wrong in wrongs:
        with pytest.raises(InvalidRequest):
            config.changed(wrong)
    strong = ExecutionConfig(strong_runtime={"memory_mb": 100})  # type: ignore[dict-item]
    assert (100, 1) == (strong.strong_default("memory_mb"), strong.strong_default("cpus"))


def test_paths_of_the_execution_service() -> None:
    assert [Mount("/a", "/a"), Mount("/a", "/a", "rw"), Mount("/a", "/a")] == [
        mount_of(each, "x") for each in ("/a/", "/a/:rw", "/a:ro")
    ]
    for path, above, does in (
        ("/a", "/a", True), ("/a/b", "/a", True), ("/ab", "/a", False), ("/a", "/a/b", False),
        ("/a", "/", True),
    ):  # fmt: skip
        assert does == is_at_or_below(path, above)


# -- from what a caller gives ----------------------------------------------------------------------


def test_a_spec_or_its_parts_and_not_both() -> None:
    spec = SandboxSpec(tier="strong")

    assert spec is make_spec(spec, (), "none", None, {})
    parts: list[tuple[Any, ...]] = [
        (["/a:/b"], "none", None, {}), ((), "a.com", None, {}), ((), "none", {"pids": 5}, {}),
        ((), "none", None, {"tier": "light"}),
    ]  # fmt: skip
    for part in parts:
        with pytest.raises(InvalidRequest) as told:
            make_spec(spec, *part)
        assert "spec" == told.value.field
        assert make_spec(None, *part) != SandboxSpec() or {"tier": "light"} in part
    assert "7" == make_spec(None, (), "none", None, {"user": 7, "image": None}).user


def test_relative_sources_begin_here(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert f"{tmp_path}/x" == parse_mount("x:/work:rw").source
    assert "/x" == parse_mount("/x:/work").source
    assert Mount("/a") == parse_mount(Mount("/a"))


def test_networks_in_every_form() -> None:
    rule = NetworkRule("b.com", methods=("GET",))
    listed = parse_network(["a.com:443", rule])

    assert NetworkPolicy(allowed_hosts=("a.com:443",), rules=(rule,)) == listed
    assert listed == parse_network(listed.to_json())
    assert listed is parse_network(listed)
    assert parse_network("unrestricted").is_unrestricted
    for wrong, field in (
        (["a b"], "network.allowed_hosts[0]"), ({"mode": "x"}, "network.mode"), ([5], "network.rules[0]"),
        ("localhost:80", "network.allowed_hosts[0]"), ("0.0.0.0", "network.allowed_hosts[0]"),
        ("::,a.com", "network.allowed_hosts[0]"),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest) as told:
            parse_network(wrong)  # type: ignore[arg-type]
        assert field == told.value.field
    for fine in ("0.0.0.0/0", "a.com,!0.0.0.0", "127.0.0.1:80"):
        assert parse_network(fine).allowed_hosts


def test_requests_of_the_library() -> None:
    made = make_request(["a"], stdin="é", user=5, cwd=None)

    assert ("é".encode(), "5", None) == (made.stdin, made.user, made.cwd)
    for wrong in ("ls -l", b"ls", {"ls": 1}, {"ls"}, 5):
        with pytest.raises(InvalidRequest) as told:
            make_request(wrong)  # type: ignore[arg-type]
        assert "argv" == told.value.field
    with pytest.raises(InvalidRequest):
        make_request(["ls"], "-l")
    assert 5 == parse_limits({"pids": 5}).pids
    with pytest.raises(InvalidRequest) as told:
        parse_limits({"pid": 5})
    assert "limits.pid" == told.value.field


def test_what_holds_another_mount_is_made_before_it() -> None:
    """Of two of one depth the older one first."""
    mounts = [Mount(each) for each in ("/a/b/c", "/x", "/a", "/a/b")]

    assert ["/x", "/a", "/a/b", "/a/b/c"] == [each.target for each in outermost_first(mounts)]


# -- JSON ------------------------------------------------------------------------------------------


def test_a_name_that_is_there_twice() -> None:
    for text in ('{"a": 1, "a": 2}', '{"x": [{"a": 1, "a": 1}]}'):
        assert jsonform.loads(text)
        with pytest.raises(BadJson, match="twice"):
            jsonform.loads(text, unique=True)
    assert {"a": {"a": 1}} == jsonform.loads('{"a": {"a": 1}}', unique=True)


@pytest.mark.parametrize(
    ("outer", "inner", "joined"),
    [("a", "b", "a.b"), ("a", "[0].b", "a[0].b"), ("", "b", "b"), ("a", "", "a"), ("", "", "")],
)
def test_names_of_fields(outer: str, inner: str, joined: str) -> None:
    assert joined == jsonform.join(outer, inner)


def test_numbers_of_json_stay_within_64_bits() -> None:
    for value in (2**63 - 1, -(2**63 - 1)):
        assert jsonform._read(value, "n", "int", None) == value
    for wrong in (2**63, -(2**63), True, 1.0):
        with pytest.raises(InvalidRequest):
            jsonform._read(wrong, "n", "int", None)
    with pytest.raises(InvalidRequest):
        jsonform._read(None, "n", "int", None)
    assert jsonform._read(None, "n", "int | None", None) is None
