"""How `ringfence run` ends: in which order, whatever happens, and what it says of where mounts are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.backends import registry
from ringfence.cli import hints, run
from ringfence.cli.signals import Bell
from ringfence.errors import BackendUnavailable
from ringfence.model.spec import SandboxSpec

pytestmark = pytest.mark.anyone


@pytest.fixture
def bell() -> Iterator[Bell]:
    made = Bell()
    yield made
    os.close(made.wake)
    os.close(made._ring)


class Scene:
    """A sandbox and its supervisor that note what is done with them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.code: int | BaseException = 0
        self.refusal: Exception | None = None
        self.facts = {"timed_out": False, "ended_itself": True}
        self.fd = os.open("/dev/null", os.O_RDONLY)
        self.sandbox: Any = SimpleNamespace(
            terminate=lambda: self.done.append("terminate"), network_log=self.log
        )
        monkeypatch.setattr(run, "_provision", self.provision)
        monkeypatch.setattr(run, "_supervisor", lambda *_: self)
        monkeypatch.setattr(run, "_with_template", lambda spec, _given: (spec, self.fd))
        monkeypatch.setattr(registry, "close_all", lambda: self.done.append("close"))
        monkeypatch.setattr(registry, "mapped_mounts", lambda _: ["/work is /srv"])
        monkeypatch.setattr(hints, "hints", lambda *_: ["try this"])

    def __getattr__(self, name: str) -> Any:
        return self.facts[name]

    def log(self) -> list[Any]:
        self.done.append("log")
        return []

    def provision(self, _spec: SandboxSpec, _given: Any) -> Any:
        if self.refusal is not None:
            raise self.refusal
        return self.sandbox

    def run_through(self) -> int:
        self.done.append("run")
        if isinstance(self.code, BaseException):
            raise self.code
        return self.code

    def is_kept(self) -> bool:
        """Whether the packages of a template are still held."""
        return os.path.exists(f"/proc/self/fd/{self.fd}")


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


@pytest.mark.parametrize("code", [0, 3, KeyboardInterrupt()])
def test_the_network_is_told_of_once_the_sandbox_has_ended_however_it_does(
    scene: Scene, bell: Bell, tmp_path: Path, code: Any
) -> None:
    """Bytes of connections that were open are counted when they end."""
    scene.code = code
    given = {"net-log": str(tmp_path / "log")}
    if isinstance(code, int):
        assert code == run._run(given, ["true"], bell)
    else:
        with pytest.raises(KeyboardInterrupt):
            run._run(given, ["true"], bell)
    assert ["run", "terminate", "log", "close"] == scene.done
    assert (tmp_path / "log").exists()
    assert not scene.is_kept()


def test_where_there_is_no_sandbox_nothing_stays_open(scene: Scene, bell: Bell) -> None:
    scene.refusal = BackendUnavailable("no namespaces")
    with pytest.raises(BackendUnavailable):
        run._run({}, ["true"], bell)
    assert ["close"] == scene.done
    assert not scene.is_kept()


@pytest.mark.parametrize(
    ("given", "is_said"),
    [({"here": True}, True), ({"here": "rw"}, True), ({"mount": ["/tmp:/x"]}, True), ({}, False)],
)
def test_mounts_that_are_elsewhere_are_told_of(
    scene: Scene, bell: Bell, capfd: pytest.CaptureFixture[str], given: Any, is_said: bool
) -> None:
    assert 0 == run._run(given, ["true"], bell)
    assert is_said == ("--mount: /work is /srv here:" in capfd.readouterr().err)


@pytest.mark.parametrize(
    ("code", "facts", "is_said"),
    [
        (1, {}, True),
        (0, {}, False),
        (124, {"timed_out": True}, False),
        (137, {"ended_itself": False}, False),
    ],
)
def test_a_hint_is_for_a_command_that_has_failed_by_itself(
    scene: Scene,
    bell: Bell,
    capfd: pytest.CaptureFixture[str],
    code: int,
    facts: dict[str, bool],
    is_said: bool,
) -> None:
    scene.code = code
    scene.facts |= facts
    assert code == run._run({}, ["true"], bell)
    assert is_said == ("hint: try this" in capfd.readouterr().err)
