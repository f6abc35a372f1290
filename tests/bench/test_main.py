"""The command: which measures run, what it prints, what it leaves."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence import Sandbox
from ringfence.backends import registry
from ringfence.bench import main as bench
from ringfence.bench import processes
from ringfence.bench.measures import create, parked
from ringfence.bench.peers import gather
from ringfence.bench.peers.peer import PeerMissingError
from ringfence.bench.rows import Missing, Row, Target
from ringfence.bench.settings import Settings
from ringfence.cli.diagnosis.bench import main
from ringfence.errors import InvalidRequest, ResourceExhausted
from tests.features import require
from tests.native.outside import init_pid, until

pytestmark = pytest.mark.full


def _calm() -> bool:
    """Tell whether nothing sandboxed is left once the backends are closed, which keep the next one prebuilt."""
    registry.close_all()
    deadline_s = time.monotonic() + 60
    while processes.Launched().sandboxed and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return not processes.Launched().sandboxed


@pytest.fixture(name="measures")
def fixture_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    def made_up(settings: Settings) -> Iterator[Row | Missing]:
        yield Missing("nsjail", "not installed")
        yield Row("create", "a life", "ms", 4.0, "bwrap", 8.0, Target(must=0.8))
        yield Missing("nsjail", "not installed")

    def unwanted(settings: Settings) -> Iterator[Row | Missing]:
        yield from ()
        raise AssertionError("not asked for")

    monkeypatch.setattr(bench, "MEASURES", {"create": made_up, "exec": unwanted})


@pytest.mark.usefixtures("measures")
def test_json_is_one_object_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == main(["--json", "--quick", "create"])

    said = json.loads(capsys.readouterr().out)

    assert ["create"] == [row["measure"] for row in said["rows"]]
    assert [{"peer": "nsjail", "why": "not installed"}] == said["missing"]
    assert said["quick"] is True


@pytest.mark.usefixtures("measures")
def test_table_is_plain_when_piped_and_names_what_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert 0 == main(["create"])

    said = capsys.readouterr().out

    assert "\x1b" not in said
    assert "\r" not in said
    assert "0.50x" in said
    assert 1 == said.count("not measured: nsjail: not installed")


def test_unknown_measure_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="no measure 'crate'"):
        main(["crate"])


def test_every_measure_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == main(["--help"])

    said = capsys.readouterr().out

    assert all(f"\n  {name} " in said for name in bench.MEASURES)


def test_a_run_without_peers_names_only_what_targets_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(create, "one_life", lambda *_: None)
    monkeypatch.setattr(create, "first_life", lambda: None)
    monkeypatch.setattr(create, "_ALONE_S", 0.0)
    monkeypatch.setattr(gather, "BUBBLEWRAP", {"bwrap": lambda _: Quick()})

    rows = list(create.measure(Settings(quick=True)))

    assert CREATES == [row.what for row in rows if isinstance(row, Row)]
    for row in rows:
        assert isinstance(row, Row)
        assert "bwrap" == row.peer
        assert row.samples > 0
        assert (0.8 if row.what in CREATES[:2] else None) == row.target.must


CREATES = [create.WHAT, create.ALONE, create.COLD, create.FIRST]


class Quick:
    name = "bwrap"

    def run_true(self) -> float:
        return 0.008

    def close(self) -> None:
        pass


def test_live_stops_at_the_first_refusal_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Fake] = []

    class Fake:
        def __init__(self) -> None:
            self.ended = False
            made.append(self)

        @classmethod
        def create(cls) -> Fake:
            if len(made) == 3:
                raise ResourceExhausted("no ids left", hint="end some")
            return cls()

        def exec(self, _argv: list[str]) -> Fake:
            return self

        ok = True

        def terminate(self) -> None:
            self.ended = True

    monkeypatch.setattr(parked, "Sandbox", Fake)

    [row] = parked.measure_count(Settings())

    assert 3 == row.ours
    assert "miss" == row.verdict
    assert "stopped there: no ids left (end some)" in row.note
    assert all(fake.ended for fake in made)


def test_a_real_run_measures_and_leaves_nothing() -> None:
    require("user namespaces")
    fds = len(os.listdir("/proc/self/fd"))
    settings = Settings(quick=True)
    create.one_life()  # the zygote stays, with its descriptors

    rows, _missing = bench.measure(["create", "exec", "throughput"], settings)

    assert all(row.ours and row.ours > 0 for row in rows)
    assert {"create", "exec", "throughput"} == {row.measure for row in rows}
    assert _calm()
    assert len(os.listdir("/proc/self/fd")) <= fds + 8


def test_a_run_that_a_signal_ends_leaves_no_server(tmp_path: Path) -> None:
    require("user namespaces")
    with subprocess.Popen(
        [sys.executable, "-m", "ringfence", "bench", "--floods", "--quick"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
    ) as run:
        try:
            assert until(lambda: [*tmp_path.glob("rf-bench-*/s/ringfence.sock")])
            [path] = tmp_path.glob("rf-bench-*/s/ringfence.sock")
            with socket.socket(socket.AF_UNIX) as server:
                server.connect(str(path))
                run.terminate()
                assert 128 + signal.SIGTERM == run.wait(60)
                server.settimeout(60)
                try:
                    said = server.recv(1)
                except ConnectionResetError:  # as it ended before it accepted
                    said = b""
                assert b"" == said, "its server has ended"
        finally:
            run.kill()

    assert [] == [*tmp_path.iterdir()]


@pytest.mark.root
def test_memory_is_seen_from_outside() -> None:
    require("user namespaces")

    rows = list(parked.measure_memory(Settings(quick=True)))

    assert [1, 10] == [row.samples for row in rows]
    # Asleep it has a few pages; one that never falls asleep has a hundred times as much.
    assert all(row.ours and 0.001 < row.ours < 50 for row in rows)
    assert _calm()


@pytest.mark.rootless
def test_memory_nobody_may_see_is_not_invented() -> None:
    """That of a PID 1 that is awake; one that sleeps belongs to a user namespace of the caller's."""
    require("user namespaces")

    with Sandbox.create() as sandbox:
        sandbox.start(["sleep", "60"])
        with pytest.raises(PermissionError):
            processes.pss_bytes(init_pid(sandbox))


def test_what_was_not_seen_has_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    require("user namespaces")

    def refuse(_pid: int) -> int:
        raise PermissionError(errno.EACCES, "not yours")

    monkeypatch.setattr(processes, "pss_bytes", refuse)
    for row in parked.measure_memory(Settings(quick=True)):
        assert row.ours is None
        assert "" == row.verdict
        assert "needs root" in row.note


def test_create_says_its_time_without_bubblewrap_and_no_row_for_other_missing_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(_all: object) -> Quick:
        raise PeerMissingError("not installed")

    monkeypatch.setattr(create, "one_life", lambda *_: None)
    monkeypatch.setattr(create, "first_life", lambda: None)
    monkeypatch.setattr(create, "_ALONE_S", 0.0)
    monkeypatch.setattr(gather, "BUBBLEWRAP", {"bwrap": absent})
    monkeypatch.setattr(gather, "ONCE", {"nsjail": absent})

    missing_bwrap, *rows, missing_nsjail = create.measure(Settings(quick=True, peers=True))

    assert Missing("bwrap", "not installed") == missing_bwrap
    assert Missing("nsjail", "not installed") == missing_nsjail
    assert CREATES == [row.what for row in rows if isinstance(row, Row)]
    for each in rows:
        assert isinstance(each, Row)
        assert "" == each.peer
        assert each.ours is not None


@pytest.mark.slow
def test_live_stops_cleanly_at_the_limit_of_open_files() -> None:
    require("user namespaces")
    script = (
        "import resource, sys;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300));"
        "from ringfence.bench.measures import parked;"
        "from ringfence.bench.settings import Settings;"
        "parked._allow_open_files = lambda: None;"
        "[row] = parked.measure_count(Settings());"
        "print(row.ours, row.note)"
    )
    path = os.pathsep.join(sys.path)

    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )

    assert "" == done.stderr
    # Three descriptors each, four without root.
    assert 5 <= float(done.stdout.split()[0]) <= 300 / 3
    assert "stopped there: " in done.stdout
    assert "open files" in done.stdout
