"""Warm sandboxes over the files of a snapshot: what may differ at the claim, and what becomes of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.sessions.whole import Whole

from ringfence.errors import IoError
from ringfence.model.limits import Limits
from ringfence.model.net.network import NetworkPolicy
from ringfence.model.spec import SandboxSpec
from ringfence.sessions.pools.restored import Restored

pytestmark = pytest.mark.anyone

SPEC = SandboxSpec(id="sbx-1", env={"A": "1"}, allow_degraded=("*",))
OPEN = NetworkPolicy.unrestricted()


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[Whole]:
    made = Whole(str(tmp_path))
    yield made
    made.close()


@pytest.fixture
def inner(backend: Whole) -> Any:
    return backend.provision(SPEC)


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({}, True),
        ({"id": "sbx-2"}, True),
        ({"id": None}, True),
        ({"labels": {"a": "b"}}, True),
        ({"ttl_s": 60.0}, True),
        ({"network": OPEN}, True),
        ({"limits": Limits(idle_timeout_s=5.0)}, True),
        ({"limits": Limits(idle_timeout_s=5.0, memory_bytes=1 << 30)}, False),
        ({"env": {"A": "2"}}, False),
        ({"user": "root"}, False),
    ],
)
def test_it_is_for_the_spec_that_it_was_made_for_but_for_what_can_change(
    inner: Any, changes: dict[str, Any], fits: bool
) -> None:
    assert fits == Restored(inner, SPEC).fits(SPEC.altered(**changes))
    assert fits == Restored(inner, SPEC.altered(**changes)).fits(SPEC)


def test_a_claim_sets_another_network_and_calls_back_once_it_holds(
    inner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []
    monkeypatch.setattr(inner, "apply_network_policy", done.append)
    warm = Restored(inner, SPEC)
    assert inner is warm.claim(SPEC, lambda: done.append("meanwhile"))
    assert ["meanwhile"] == done, "it has that network"
    assert inner is warm.claim(SPEC.altered(network=OPEN), lambda: done.append("meanwhile"))
    assert ["meanwhile", OPEN, "meanwhile"] == done
    assert inner is warm.claim(SPEC)


def test_one_that_has_ended_or_does_not_answer_is_not_alive(
    backend: Whole, inner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm = Restored(inner, SPEC)
    assert "sbx-1" == warm.id
    assert warm.alive

    def fail(_self: object) -> None:
        raise IoError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(type(inner), "session", property(fail))
        assert not warm.alive
    assert warm.alive
    warm.discard()
    assert not warm.alive
    assert {} == backend.sandboxes
