"""One daemon for a state directory, and none for the files of a later version."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.daemon.servers import SERVE, Server

pytestmark = pytest.mark.anyone


def serve(state: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [*SERVE, "serve", "--state-dir", str(state)]
    return subprocess.run(command, check=False, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.full
def test_a_second_one_is_refused(server: Server) -> None:
    server.start(faulty=False)
    assert server.process is not None
    second = serve(server.state)
    assert 0 != second.returncode
    assert f"held by process {server.process.pid}" in second.stderr
    assert [] == server.ask("GET", "/sandboxes")["items"], "the first one goes on"


@pytest.mark.full
def test_what_a_later_version_wrote_is_left_alone(server: Server) -> None:
    server.start(faulty=False)
    sandbox = server.make()
    server.ask("DELETE", f"/sandboxes/{sandbox}")
    process = server.process
    assert process is not None
    process.terminate()
    assert 0 == process.wait(30)
    connection = sqlite3.connect(server.state / "state.sqlite3")
    known = connection.execute("PRAGMA user_version").fetchone()[0]
    connection.execute("PRAGMA user_version = 999")
    refused = serve(server.state)
    assert 0 != refused.returncode
    assert "version 999" in refused.stderr
    assert 999 == connection.execute("PRAGMA user_version").fetchone()[0]

    connection.execute(f"PRAGMA user_version = {known}")
    connection.close()
    assert process.stdout is not None
    process.stdout.close()
    server.start(faulty=False)
    assert "terminated" == server.ask("GET", f"/sandboxes/{sandbox}")["state"]
