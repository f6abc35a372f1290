"""A daemon that cannot start for lack of threads leaves the sandboxes of the one before alone."""

from __future__ import annotations

import subprocess

import pytest

from tests.daemon.servers import Server


@pytest.mark.full
def test_a_failed_start_leaves_the_sandboxes_alone(server: Server) -> None:
    """It fails at each thread that the start needs, one after the other, and says why."""
    server.module = "tests.daemon.no_thread"
    server.start()
    sandbox = server.make(network={"mode": "limited", "rules": [{"host": "example.org"}]})
    run = server.run(sandbox, "read x; echo $x; exit 5", stream_stdin=True)
    server.kill()

    failed = 0
    while True:
        server.step.write_text(str(failed))
        server.begin(stderr=subprocess.PIPE)
        process = server.process
        assert process is not None
        assert process.stdout is not None
        assert process.stderr is not None
        if process.stdout.readline():
            break
        assert 125 == process.wait(30)
        with process.stdout, process.stderr as stderr:
            text = stderr.read()
        assert "no thread can be started" in text or "no thread could be started" in text
        assert "`ulimit -u`" in text
        assert "Traceback" not in text
        failed += 1
    assert failed >= 6, "the control: the start needs threads"
    process.stderr.close()
    server.kill()
    server.start()

    assert "running" == server.ask("GET", f"/sandboxes/{sandbox}")["state"]
    server.ask("POST", f"/sandboxes/{sandbox}/execs/{run}/stdin?offset=0", content=b"on\n")
    assert 5 == server.wait(sandbox, run)["status"]["exit_code"]
    assert b"on\n" == server.output(sandbox, run)
