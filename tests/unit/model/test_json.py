"""One JSON form: what is written is read back, and nothing else is accepted."""

from __future__ import annotations

import copy
import importlib
import json
import pickle
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.model import strategies as some

import ringfence.model
from ringfence.errors import BadJson, InvalidRequest
from ringfence.model import (
    ExecRequest,
    ExecResult,
    ExecStatus,
    Limits,
    NetworkPolicy,
    SandboxSpec,
    Session,
)
from ringfence.model.base.checks import FrozenMap
from ringfence.model.base.jsonform import loads, readers_of
from ringfence.model.base.model import Model

pytestmark = pytest.mark.anyone

MODELS = st.one_of(
    some.policies, some.mounts, some.limits, some.requests, some.statuses, some.results,
    some.usages, some.snapshots, some.capabilities, some.protections, some.reports,
    some.session_models, some.stats, some.infos, some.rules, some.credentials, some.network_limits, some.events,
)  # fmt: skip


def through_json(form: dict[str, Any]) -> Any:
    return json.loads(json.dumps(form))


@given(MODELS)
def test_every_model_comes_back(model: Any) -> None:
    again = type(model).from_json(through_json(model.to_json()))

    assert model == again
    assert hash(model) == hash(again)


@given(MODELS)
def test_every_model_can_be_pickled_and_copied(model: Any) -> None:
    assert model == pickle.loads(pickle.dumps(model)) == copy.deepcopy(model)


@pytest.mark.full
@given(some.specs)
def test_a_spec_comes_back_with_secrets_only_when_asked(spec: SandboxSpec) -> None:
    whole = SandboxSpec.from_json(through_json(spec.to_json(with_secrets=True)))
    public = SandboxSpec.from_json(through_json(spec.to_json()))

    assert spec == whole
    assert {} == public.secrets
    assert spec.to_json() == public.to_json()


def test_secrets_are_not_in_the_repr() -> None:
    spec = SandboxSpec(secrets={"TOKEN": "hunter2"})

    assert "hunter2" not in repr(spec)
    assert "hunter2" not in json.dumps(spec.to_json())


@given(some.sessions)
def test_host_paths_are_for_the_admin(session: Session) -> None:
    public = Session.from_json(through_json(session.to_json()))

    assert session == Session.from_json(through_json(session.to_json(admin=True)))
    assert all(mount.host_path is None for mount in public.mounts)
    assert "host_path" not in json.dumps(session.to_json()["mounts"])


@given(MODELS, some.names)
def test_unknown_keys_are_refused_by_name(model: Any, name: str) -> None:
    """A misspelt limit must never mean no limit."""
    form = {**model.to_json(), f"x_{name}": 1}

    with pytest.raises(InvalidRequest) as refusal:
        type(model).from_json(form)

    assert f"x_{name}" == refusal.value.field


@given(MODELS, st.none() | st.integers() | st.text() | st.lists(st.integers()))
def test_only_objects_are_models(model: Any, data: object) -> None:
    with pytest.raises(InvalidRequest):
        type(model).from_json(data)


@given(MODELS, st.data())
def test_wrong_types_are_refused_never_crash(model: Any, data: st.DataObject) -> None:
    form = model.to_json()
    if not form:
        return
    key = data.draw(st.sampled_from(sorted(form)))
    wrong = data.draw(st.sampled_from([{"a": {}}, [[1]], [None], object, float("nan")]))
    form[key] = wrong

    with pytest.raises(InvalidRequest):
        type(model).from_json(form)


@pytest.mark.parametrize(
    ("form", "field"),
    [
        ({"limits": {"memory_bytes": -1}}, "limits.memory_bytes"),
        ({"limits": {"memory_byte": 1}}, "limits.memory_byte"),
        ({"limits": 7}, "limits"),
        ({"network": {"mode": "open"}}, "network.mode"),
        ({"network": {"allowed_hosts": []}}, "network.mode"),
        ({"network": {"mode": "limited", "allowed_hosts": ["a b"]}}, "network.allowed_hosts[0]"),
        ({"mounts": [{"target": "/ok"}, {"target": "/a/../b"}]}, "mounts[1].target"),
        ({"mounts": [{}]}, "mounts[0].target"),
        ({"mounts": {}}, "mounts"),
        ({"env": {"A": 1}}, "env.A"),
        ({"env": None}, "env"),
        ({"labels": ["a"]}, "labels"),
        ({"python_env": "yes"}, "python_env"),
        ({"protect": ["../x"]}, "protect[0]"),
    ],
)
def test_errors_name_the_nested_field(form: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        SandboxSpec.from_json(form)

    assert field == refusal.value.field


def test_the_network_policy_of_the_contract() -> None:
    assert {"mode": "unrestricted"} == NetworkPolicy.unrestricted().to_json()
    assert {"mode": "limited", "allowed_hosts": []} == NetworkPolicy.none().to_json()
    assert NetworkPolicy.none() == NetworkPolicy.from_json({"mode": "limited"})
    assert NetworkPolicy.none() == NetworkPolicy()


def test_limits_say_only_what_is_set() -> None:
    assert {"pids": 5} == Limits(pids=5).to_json()
    assert Limits() == Limits.from_json({"pids": None})


@given(st.binary())
def test_output_keeps_its_bytes(data: bytes) -> None:
    form = ExecResult(stdout=data, exit_code=0).to_json()

    assert data.decode("utf-8", "replace") == form["stdout"]
    assert ("stdout_base64" in form) == (data != form["stdout"].encode())
    assert data == ExecResult.from_json(through_json(form)).stdout


@pytest.mark.parametrize("value", ["?", "QQ", "Ü", 7, "QQ==="])
def test_bad_base64_is_refused(value: object) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        ExecRequest.from_json({"argv": ["a"], "stdin_base64": value})

    assert "stdin_base64" == refusal.value.field


@pytest.mark.parametrize("ending", [{}, {"exit_code": 0, "signal": 9}])
def test_an_exec_ended_in_exactly_one_way(ending: dict[str, Any]) -> None:
    """Exit codes are never invented."""
    with pytest.raises(InvalidRequest):
        ExecStatus(**ending)
    with pytest.raises(InvalidRequest):
        ExecResult(**ending)


@pytest.mark.parametrize(
    ("result", "ok"),
    [
        (ExecResult(exit_code=0), True),
        (ExecResult(exit_code=1), False),
        (ExecResult(signal=9), False),
        (ExecResult(exit_code=0, timed_out=True), False),
    ],
)
def test_success_is_exit_0_in_time(result: ExecResult, ok: bool) -> None:
    assert ok == result.ok


def test_dropped_bytes_mean_truncated() -> None:
    assert ExecResult(exit_code=0, stderr_dropped_bytes=1).truncated
    assert not ExecResult(exit_code=0).truncated


def test_text_is_decoded_with_replacement() -> None:
    result = ExecResult(stdout=b"a\xff", stderr=b"\xc3\xa9", exit_code=0)

    assert ("a\ufffd", "a\ufffd", "é") == (result.text, result.stdout_text, result.stderr_text)


@given(st.text())
def test_text_that_is_not_json(text: str) -> None:
    try:
        json.loads(text)
    except ValueError:
        with pytest.raises(BadJson):
            loads(text)


def test_json_nested_too_deep() -> None:
    with pytest.raises(BadJson):
        loads("[" * 100_000)


def test_frozen_maps_do_not_change() -> None:
    given = {"A": "1"}
    spec = SandboxSpec(env=given)
    given["A"] = "2"

    assert {"A": "1"} == spec.env
    frozen: Any = spec.env
    for attempt in (
        lambda: frozen.update(B="2"),
        lambda: frozen.pop("A"),
        lambda: frozen.__setitem__("A", "2"),
        lambda: frozen.setdefault("B", "2"),
        frozen.clear,
    ):
        with pytest.raises(TypeError):
            attempt()
    assert FrozenMap({"A": "1"}) == frozen == copy.copy(frozen)


@pytest.mark.parametrize(
    "read", [SandboxSpec.from_json, lambda form: ExecRequest.from_json({"argv": ["id"], **form})]
)
def test_a_user_may_be_a_number(read: Any) -> None:
    """As the OpenAPI document says."""
    assert "1000" == read({"user": 1000}).user
    for wrong in (-1, 2**32 - 1, True, 1.5):
        with pytest.raises(InvalidRequest):
            read({"user": wrong})


def _kinds_of(cls: type[Any]) -> Iterator[type[Any]]:
    for each in cls.__subclasses__():
        yield each
        yield from _kinds_of(each)


def test_every_field_that_is_a_model_or_a_word_is_read_as_one() -> None:
    """A reader is found by the name in an annotation, which its module must import when it runs."""
    for each in pkgutil.walk_packages(ringfence.model.__path__, "ringfence.model."):
        importlib.import_module(each.name)
    for name in ("api.access.ceilings", "daemon.config", "sessions.config"):
        importlib.import_module(f"ringfence.{name}")
    kinds = [each for each in _kinds_of(Model) if hasattr(each, "__match_args__")]
    known = {each.__name__ for each in kinds} | {
        "ExecState",
        "ExecutionStatus",
        "SessionState",
        "State",
    }
    checked = 0
    for kind in kinds:
        for name, field in kind.__dataclass_fields__.items():
            if known.intersection(re.findall(r"\w+", field.type)) and "bool |" not in field.type:
                checked += 1
                assert name in readers_of(kind), f"{kind.__name__}.{name}: {field.type} is not read"
    assert checked > 40
