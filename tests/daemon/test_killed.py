"""The daemon is killed, at any moment, and started again: clients see one truth, and nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.daemon.faulty import LABELS
from tests.daemon.servers import SERVE, Server
from tests.native.outside import PATIENCE_S, cgroups_of, pids_with, survivors, until

pytestmark = [pytest.mark.full, pytest.mark.anyone]

# -- killed while things run -----------------------------------------------------------------------


def test_output_and_results_are_whole(server: Server) -> None:
    server.start(faulty=False)
    sandbox = server.make(labels={"a": "b"})
    server.run(sandbox, "mkfifo go", wait=True)
    lines = "".join(f"line {i}\n" for i in range(3000)).encode()
    many = "i=0; while [ $i -lt 3000 ]; do echo line $i; i=$((i+1)); done"
    writes = server.run(sandbox, many + "; cat go; exit 7")
    over = server.run(sandbox, "echo over; exit 3")
    reads = server.run(sandbox, "read x; echo got $x; exit 4", stream_stdin=True)
    assert 3 == server.wait(sandbox, over)["status"]["exit_code"]
    server.ask("PATCH", f"/sandboxes/{sandbox}", json={"name": "n", "labels": {"c": "d"}})
    before = server.ask("GET", f"/sandboxes/{sandbox}")
    for _ in range(3):
        server.kill()
        server.start(faulty=False)
    after = server.ask("GET", f"/sandboxes/{sandbox}")
    del before["last_active_at"], after["last_active_at"]
    assert before == after
    server.run(sandbox, "echo on > go", wait=True)
    assert 7 == server.wait(sandbox, writes)["status"]["exit_code"]
    assert lines + b"on\n" == server.output(sandbox, writes)
    assert 3 == server.wait(sandbox, over)["status"]["exit_code"]
    assert b"over\n" == server.output(sandbox, over)
    path = f"/sandboxes/{sandbox}/execs/{reads}/stdin?offset=0"
    server.ask("POST", path, content=b"hi\n")
    assert 4 == server.wait(sandbox, reads)["status"]["exit_code"]
    assert b"got hi\n" == server.output(sandbox, reads)


def test_replaced_and_stopped(server: Server) -> None:
    """--take-over leaves everything running, --stop leaves nothing."""
    server.start(faulty=False)
    sandbox = server.make()
    server.run(sandbox, "mkfifo go", wait=True)
    run = server.run(sandbox, "echo begun; read x < go; echo $x; exit 5")
    old = server.process
    assert old is not None
    server.start("--take-over", faulty=False)
    assert 0 == old.wait(10)
    assert old.stdout is not None
    old.stdout.close()
    server.run(sandbox, "echo on > go", wait=True)
    assert 5 == server.wait(sandbox, run)["status"]["exit_code"]
    assert b"begun\non\n" == server.output(sandbox, run)

    marker = f"70{os.getpid():07d}"
    server.run(sandbox, f"exec sleep {marker}")
    assert until(lambda: 1 == len(pids_with(marker)))
    server.kill()
    assert 1 == len(pids_with(marker)), "the control: it lives on"
    stop = [*SERVE, "serve", "--stop", "--state-dir", str(server.state)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    said = [subprocess.run(stop, env=env, check=True, capture_output=True).stdout for _ in "12"]
    assert b"stopped\n" == said[0]
    assert said[1].startswith(b"nothing serves")
    assert until(lambda: [] == pids_with(marker) and [] == cgroups_of(sandbox))
    server.start(faulty=False)
    assert "terminated" == server.ask("GET", f"/sandboxes/{sandbox}")["state"]


def test_with_nothing_to_outlive_it(server: Server) -> None:
    server.start("--outlive", "0", faulty=False)
    sandbox = server.make()
    family = server.family()
    server.kill()
    assert [] == survivors(family, PATIENCE_S)
    server.start(faulty=False)
    assert "terminated" == server.ask("GET", f"/sandboxes/{sandbox}")["state"]
    assert [] == cgroups_of(sandbox)


# -- killed at a step ------------------------------------------------------------------------------

_ENDLESS = "exec sleep {}"
_SHORT = {"script": "echo x >> ~/ran; echo short; exit 8", "wait": True}


@pytest.fixture(scope="module")
def stepping(place: Path) -> Iterator[Server]:
    """One daemon for all steps: it is started again after each."""
    made = Server(place / "steps")
    config = {"manager": {"max_sandboxes": 20, "pool": {"enabled": False}}}
    (place / "config").write_text(json.dumps(config))
    made.start("--config", str(place / "config"))
    families = [made.family()]
    made.families = families  # type: ignore[attr-defined]
    yield made
    families.append(made.family())
    made.stop()
    for family in families:
        assert [] == survivors(family, PATIENCE_S)


@pytest.mark.anyone
@pytest.mark.parametrize(("verb", "label"), LABELS, ids=[" ".join(each) for each in LABELS])
def test_killed_at(verb: str, label: str, stepping: Server) -> None:
    server, marker = stepping, f"68{os.getpid():07d}{LABELS.index((verb, label)):04d}"
    key = {"Idempotency-Key": marker}
    sandbox = server.make(metadata={"step": marker})
    runs = server.run(sandbox, "echo begun; read x; echo $x; exit 6", stream_stdin=True)
    sleeps = server.run(sandbox, _ENDLESS.format(marker))
    assert until(lambda: 1 == len(pids_with(marker)))
    if verb == "resume":
        server.ask("POST", f"/sandboxes/{sandbox}/suspend")
    server.step.write_text(label)
    with contextlib.suppress(httpx.TransportError):
        if verb == "create":
            server.ask("POST", "/sandboxes", json={}, headers=key)
        elif verb == "exec":
            server.ask("POST", f"/sandboxes/{sandbox}/execs", json=_SHORT, headers=key)
        elif verb == "snapshot":
            server.ask("POST", f"/sandboxes/{sandbox}/snapshots")
        elif verb == "delete":
            server.ask("DELETE", f"/sandboxes/{sandbox}")
        else:
            server.ask("POST", f"/sandboxes/{sandbox}/{verb}")
    server.gone()
    server.start("--config", str(server.state.parent / "config"))

    view = server.ask("GET", f"/sandboxes/{sandbox}")
    alive = {each["id"] for each in server.ask("GET", "/sandboxes")["items"]}
    if verb == "delete" and view["state"] == "terminated":
        assert sandbox not in alive
        assert until(lambda: [] == pids_with(marker))
        for run in (runs, sleeps):
            end = server.wait(sandbox, run)
            assert "lost" == end["state"] or 9 == end["status"]["signal"]
    else:
        check_goes_on(server, verb, sandbox, view, runs)
        check_effect(server, verb, sandbox, alive, key)
    ended = server.ask("DELETE", f"/sandboxes/{sandbox}")
    assert "terminated" == ended["state"]
    for _ in range(2):  # and it stays so, with the same reason
        again = server.ask("GET", f"/sandboxes/{sandbox}")
        assert (ended["state"], ended["reason"]) == (again["state"], again["reason"])
    assert until(lambda: [] == pids_with(marker) and [] == cgroups_of(sandbox))
    assert [] == server.ask("GET", "/sandboxes")["items"]
    for snapshot in server.ask("GET", "/snapshots")["items"]:
        server.ask("DELETE", f"/snapshots/{snapshot['id']}")
    kept = server.state / "snapshots"
    assert not kept.exists() or [] == os.listdir(kept)


def check_goes_on(server: Server, verb: str, sandbox: str, view: Any, runs: str) -> None:
    """What ran before runs on, and its input and output are whole."""
    assert view["state"] in (
        ("suspended", "running") if verb in ("suspend", "resume") else ("running",)
    )
    if view["state"] == "suspended":
        server.ask("POST", f"/sandboxes/{sandbox}/resume")
    run = server.ask("GET", f"/sandboxes/{sandbox}/execs/{runs}")
    assert "running" == run["state"], run
    path = f"/sandboxes/{sandbox}/execs/{runs}/stdin?offset=0"
    server.ask("POST", path, content=b"on\n")
    assert 6 == server.wait(sandbox, runs)["status"]["exit_code"]
    assert b"begun\non\n" == server.output(sandbox, runs)


def check_effect(server: Server, verb: str, sandbox: str, alive: set[str], key: Any) -> None:
    """What was being done is done, or not; asking again under the same key does it once."""
    if verb == "create":
        assert len(alive) <= 2
        again = server.ask("POST", "/sandboxes", json={}, headers=key)["id"]
        assert {sandbox, again} >= alive
        server.ask("DELETE", f"/sandboxes/{again}")
    elif verb == "exec":
        execs = server.ask("GET", f"/sandboxes/{sandbox}/execs")["items"]
        assert len(execs) <= 3
        for each in execs[2:]:
            end = server.wait(sandbox, each["id"])
            if end["state"] == "failed":
                assert ("exec_not_started", True) == (
                    end["problem"]["code"],
                    end["problem"]["retryable"],
                )
            else:
                assert 8 == end["status"]["exit_code"]
                assert b"short\n" == server.output(sandbox, each["id"])
        again = server.ask("POST", f"/sandboxes/{sandbox}/execs", json=_SHORT, headers=key)
        assert (8, "short\n") == (again["status"]["exit_code"], again["result"]["stdout"])
        ran = server.run(sandbox, "cat ~/ran", wait=True)
        assert b"x\n" == server.output(sandbox, ran), "once, whether or not it was begun before"
    elif verb == "snapshot":
        for each in server.ask("GET", "/snapshots")["items"]:
            restored = server.make(snapshot_id=each["id"])
            server.ask("DELETE", f"/sandboxes/{restored}")
