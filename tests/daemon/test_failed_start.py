"""A daemon whose start fails leaves what an earlier one started to the next."""

from __future__ import annotations

import subprocess

import pytest

from tests.daemon.servers import Server

pytestmark = pytest.mark.anyone


@pytest.mark.full
def test_a_start_that_a_wrong_file_ends_leaves_the_sandboxes_alone(server: Server) -> None:
    server.start(faulty=False)
    sandbox = server.make()
    run = server.run(sandbox, "read x; echo $x; exit 5", stream_stdin=True)
    server.kill()
    wrong = server.state / "execution.json"
    wrong.write_text("{")

    server.begin(faulty=False, stderr=subprocess.PIPE)
    process = server.process
    assert process is not None
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        assert "execution.json" in process.stderr.read()
    assert 0 != process.wait(30)

    wrong.unlink()
    server.start(faulty=False)
    assert "running" == server.ask("GET", f"/sandboxes/{sandbox}")["state"]
    server.ask("POST", f"/sandboxes/{sandbox}/execs/{run}/stdin?offset=0", content=b"on\n")
    assert 5 == server.wait(sandbox, run)["status"]["exit_code"]
    assert b"on\n" == server.output(sandbox, run)
