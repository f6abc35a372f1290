"""A daemon that is being started: who asks meanwhile is answered, and not told that nobody is there."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.daemon.servers import Server

pytestmark = pytest.mark.anyone

HELD_UP = """
import sys
from ringfence.cli import main, serve

load = serve._load

def held_up():
    print("loading", flush=True)
    sys.stdin.readline()
    load()

serve._load = held_up
sys.exit(main.main())
"""


def test_who_asks_while_it_starts_waits_for_the_answer(server: Server) -> None:
    server.start()
    made = server.make()
    server.kill()
    with socket.socket(socket.AF_UNIX) as alone, pytest.raises(ConnectionRefusedError):
        alone.connect(str(server.state / "ringfence.sock"))  # the control: what it left refuses
    said = [sys.executable, "-c", HELD_UP, "serve", "--state-dir", str(server.state), "--json"]
    path = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    with subprocess.Popen(
        said, env=path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert "loading\n" == process.stdout.readline()
        with ThreadPoolExecutor(1) as client:
            asked = client.submit(server.http.get, "/v1/sandboxes")
            with pytest.raises(TimeoutError):
                asked.result(0.2)  # it waits, which can only be seen by waiting
            process.stdin.write("\n")
            process.stdin.flush()
            answer = asked.result(60)
        process.send_signal(signal.SIGTERM)

    assert [made] == [each["id"] for each in answer.json()["items"]]
    assert 0 == process.returncode
    assert not (server.state / "ringfence.sock").exists()
