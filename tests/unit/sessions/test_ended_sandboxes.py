"""What is kept of ended sandboxes: the newest of a long log, and no more than the bounds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.errors import SandboxLost
from ringfence.model.net.netlog import NetworkEvent
from ringfence.model.net.network import NetworkPolicy
from ringfence.sessions.catalogue import ended

pytestmark = pytest.mark.anyone


def sandbox(name: str, *hosts: str) -> Any:
    events = [
        NetworkEvent(time=float(n), sandbox_id=name, kind="connect", host=host)
        for n, host in enumerate(hosts)
    ]
    return SimpleNamespace(
        id=name,
        network_log=lambda: [*events],
        learned_policy=lambda: NetworkPolicy(allowed_hosts=("a.example",)),
        protections=tuple,
    )


def test_of_a_long_log_the_newest_is_kept_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = ended.EndedSandbox(sandbox("s", "a", "b", "c"))
    assert ["a", "b", "c"] == [each.host for each in kept.network_log()]
    assert ("a.example",) == kept.learned_policy().allowed_hosts
    assert () == kept.protections()
    monkeypatch.setattr(ended, "_LOG_BYTES", 1)
    assert ["c"] == [e.host for e in ended.EndedSandbox(sandbox("s", "a", "b", "c")).network_log()]


def test_the_last_are_kept_and_one_that_ends_again_is_the_last_again() -> None:
    store = ended.EndedSandboxes()
    for number in range(ended._MOST + 1):
        store.keep(sandbox(f"s{number}"))
    assert store.find("s0") is None
    assert store.find("s1") is not None
    store.keep(sandbox("s1", "again"))
    store.keep(sandbox("new"))
    found = store.find("s1")
    assert found is not None
    assert ["again"] == [each.host for each in found.network_log()]
    assert store.find("s2") is None


def test_one_that_cannot_be_read_is_passed_over() -> None:
    def fails() -> None:
        raise SandboxLost("it is gone")

    store, lost = ended.EndedSandboxes(), sandbox("lost")
    lost.learned_policy = fails
    store.keep(lost)
    store.keep(sandbox("kept"))
    assert store.find("lost") is None
    assert store.find("kept") is not None
