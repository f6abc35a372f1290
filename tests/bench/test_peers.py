"""A peer that is not here is named with the reason; one that is here leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

import pytest

from ringfence.bench.peers import gather, oci
from ringfence.bench.peers.gather import Gathered
from ringfence.bench.peers.peer import CommandPeer, PeerMissingError, call
from ringfence.bench.rows import Missing

pytestmark = pytest.mark.full


@pytest.fixture(name="no_programs")
def fixture_no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_args, **_options: None)


@pytest.mark.usefixtures("no_programs")
def test_peers_that_are_not_installed_are_all_named() -> None:
    openers = {**gather.BUBBLEWRAP, **gather.ONCE}
    with Gathered(openers) as gathered:
        assert {} == gathered.peers
        assert set(openers) == {one.peer for one in gathered.missing}
        assert all(one.why for one in gathered.missing)


def test_a_client_without_its_engine_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _program(tmp_path / "docker", "echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    with Gathered({"docker": gather.LIVE["docker"]}) as gathered:
        [missing] = gathered.missing

    assert "docker" == missing.peer
    assert missing.why.startswith("the client is there, the engine is not: Cannot connect")


def test_a_peer_that_fails_at_first_is_missing_with_its_last_words(tmp_path: Path) -> None:
    broken = _program(tmp_path / "jail", "echo starting >&2; echo no permission >&2; exit 3")

    with Gathered({"jail": lambda _: CommandPeer("jail", broken)}) as gathered:
        assert [Missing("jail", "no permission")] == gathered.missing


def test_a_peer_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    """As `pasta` does: a child in a session of its own, whose parent waits for it."""
    marks = tmp_path / "marks"
    hanging = _program(
        tmp_path / "hanging",
        f"sleep 1000 & echo $! >>{marks}; setsid sleep 1000 & echo $! >>{marks}; wait",
    )

    with pytest.raises(PeerMissingError, match=r"^did not end within 3 s$"):
        call(hanging, "a program's whole text", patience_s=3)

    pids = [int(line) for line in marks.read_text().split()]
    assert 2 == len(pids)
    assert [] == [pid for pid in pids if _lives(pid)]


def _lives(pid: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_everything_opened_is_closed_backwards_even_after_an_error() -> None:
    closed: list[str] = []

    class Engine:
        def __init__(self, name: str) -> None:
            self.name = name

        def run_true(self) -> float | None:
            return None

        def close(self) -> None:
            closed.append(self.name)

    def interrupted(_all: Gathered) -> Engine:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Gathered({"a": lambda _: Engine("a"), "b": lambda _: Engine("b"), "c": interrupted})

    assert ["b", "a"] == closed


@pytest.mark.root
@pytest.mark.parametrize("name", ["runc", "runsc"])
def test_a_runtime_that_is_here_runs_and_leaves_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Gathered({name: gather.LIVE[name]}) as gathered:
        if gathered.missing:
            pytest.skip(f"{name}: {gathered.missing[0].why}")
        gathered.peers[name].run_true()

    assert [] == list(tmp_path.iterdir())


@pytest.mark.rootless
def test_a_runtime_needs_root_and_says_so() -> None:
    with Gathered({"runc": gather.LIVE["runc"]}) as gathered:
        assert [Missing("runc", "needs root here")] == gathered.missing


def test_the_bundle_shows_programs_read_only() -> None:
    config = {"process": {"terminal": True}, "mounts": []}

    oci.fill(config, ["true"])

    assert False is config["process"]["terminal"]  # type: ignore[index]
    assert {"path": "rootfs", "readonly": True} == config["root"]
    assert all("ro" in mount["options"] for mount in config["mounts"])  # type: ignore[index]


def _program(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_peer_is_waited_for_not_polled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a timeout `subprocess` sleeps between looks, which would make every peer slower."""
    peer = CommandPeer("peer", _program(tmp_path / "peer", "exit 0"))
    monkeypatch.setattr(time, "sleep", lambda _s: pytest.fail("slept while a peer was timed"))

    peer.run_true()
