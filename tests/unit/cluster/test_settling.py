"""What a gateway gives to nodes when it starts, and what it asks of them: its own settings stay its own."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.unit.cluster.stored import Stored

from ringfence.cluster import admin
from ringfence.cluster import serve as module
from ringfence.cluster.directory import Directory
from ringfence.cluster.e2b import Front
from ringfence.cluster.scaling import BY_OPERATOR
from ringfence.daemon.config import DaemonConfig
from ringfence.e2b.settings import E2BSettings
from ringfence.errors import InvalidRequest, NotFound, ServerUnreachable
from ringfence.model.places import state_directory
from ringfence.sessions.config import ManagerConfig

A, B, C = "0000000a", "0000000b", "0000000c"


@pytest.fixture
def directory() -> Any:
    return cast("Directory", Stored())


def test_nodes_get_the_settings_of_the_first_gateway_but_not_its_own(
    tmp_path: Path, directory: Any, caplog: pytest.LogCaptureFixture
) -> None:
    own: dict[str, Any] = {"state_dir": str(tmp_path), "listen": "127.0.0.1:1"}
    own |= {"allowed_hosts": ("h",), "allowed_origins": ("https://x",)}
    first = DaemonConfig(**own, manager=ManagerConfig(max_sandboxes=3))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            module.settle(directory, first)
        assert [] == caplog.records
        module.settle(directory, DaemonConfig(**own, manager=ManagerConfig(max_sandboxes=4)))
        assert 1 == len(caplog.records)

    form = json.loads(directory.get("config"))
    assert 3 == form["manager"]["max_sandboxes"]
    assert f"{tmp_path}/nodes" == form["base"]
    assert not form.keys() & {"state_dir", "listen", "allowed_hosts", "allowed_origins", "bounds"}
    assert not form.keys() & {"membership", "tls_key", "tls_certificate", "allow_public"}

    other: Any = Stored()
    module.settle(other, DaemonConfig(state_dir=state_directory()))
    assert "" == json.loads(other.get("config"))["base"]


def test_e2bs_api_is_served_as_the_cluster_was_started(directory: Any) -> None:
    app = object()
    behind: Any = SimpleNamespace(directory=directory, service=SimpleNamespace())
    assert app is module._front(DaemonConfig(), app, behind)
    config = DaemonConfig(e2b=E2BSettings(domain="mine.test"))
    with pytest.raises(InvalidRequest) as refused:
        module._front(config, app, behind)
    assert "e2b" == refused.value.field
    directory.config = lambda: {"e2b": {"domain": "cluster.test"}}
    front = module._front(config, app, behind)
    assert isinstance(front, Front)
    assert "cluster.test" == front.domain


class TestOperators:
    def put(self, directory: Any, tag: str, *, living: bool = True, **changes: Any) -> None:
        form = {"node": tag, "ray_id": f"ray-{tag}", "is_draining": False, "is_empty": False}
        directory.put(f"node/{tag}", json.dumps({**form, **changes}).encode())
        if living:
            directory.living[f"ray-{tag}"] = ("127.0.0.1", 1)

    def test_a_node_is_shown_as_it_is(self, directory: Any) -> None:
        self.put(directory, C, is_draining=True)
        self.put(directory, A)
        self.put(directory, B, living=False)
        assert {A: "ready", B: "lost", C: "draining"} == {
            each["node"]: each["status"] for each in admin.nodes(directory)
        }
        assert [A, B, C] == [each["node"] for each in admin.nodes(directory)]
        directory.put(f"lost/{A}", b"1")
        assert "lost" == admin.nodes(directory)[0]["status"]
        directory.put(f"trouble/{A}", b"no \xff")
        assert {A: "no \ufffd"} == admin.troubles(directory)

    def test_a_drain_is_an_operators_until_it_is_taken_back(self, directory: Any) -> None:
        self.put(directory, A)
        admin.drain(directory, A)
        assert BY_OPERATOR.encode() == directory.get(f"drain/{A}")
        admin.drain(directory, A, draining=False)
        assert directory.get(f"drain/{A}") is None
        with pytest.raises(NotFound):
            admin.drain(directory, B)
        assert directory.get(f"drain/{B}") is None

    def test_a_drain_is_waited_for_until_its_node_is_empty(
        self, directory: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        left = [[{"id": "x"}], [{"id": "x"}], [{"id": "y"}], []]
        told: list[Any] = []

        def settle(_directory: Any, tag: str) -> Any:
            assert A == tag
            found = left.pop(0)
            if not left:
                self.put(directory, A, is_draining=True, is_empty=True)
            return found

        monkeypatch.setattr(admin, "settle", settle)
        monkeypatch.setattr(admin, "_LOOK_S", 0.0)
        self.put(directory, A, is_draining=True)
        assert admin.wait_drained(directory, A, 100.0, told.append)
        assert [[{"id": "x"}], [{"id": "y"}], []] == told

        self.put(directory, A, is_draining=True)
        left += [[{"id": "x"}], [{"id": "x"}]]
        told.clear()
        assert not admin.wait_drained(directory, A, 0.0, told.append)
        assert [[{"id": "x"}]] == told
        with pytest.raises(NotFound):
            admin.wait_drained(directory, B, 0.0, told.append)

    def test_a_node_that_never_says_that_it_drains_is_not_waited_for(
        self, directory: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(admin, "_LOOK_S", 0.0)
        monkeypatch.setattr(admin, "_HEARD_S", 0.02)
        self.put(directory, A)
        with pytest.raises(ServerUnreachable, match="does not say that it drains"):
            admin.wait_drained(directory, A, 0.01, lambda _: None)

    def test_a_node_that_is_taken_back_meanwhile_saves_nothing_more(
        self, directory: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[str] = []

        def settle(_directory: Any, tag: str) -> Any:
            asked.append(tag)
            self.put(directory, A)
            return [{"id": "x"}]

        monkeypatch.setattr(admin, "settle", settle)
        monkeypatch.setattr(admin, "_LOOK_S", 0.0)
        self.put(directory, A, is_draining=True)
        assert not admin.wait_drained(directory, A, 0.02, lambda _: None)
        assert [A] == asked
