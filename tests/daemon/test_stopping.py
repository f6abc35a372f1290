"""SIGTERM while somebody waits: they are told, and the log has nothing to alarm anybody."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.daemon.servers import Server
from tests.native.outside import until

pytestmark = pytest.mark.anyone


@pytest.mark.full
def test_who_waits_is_told_that_it_stops(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    server.start()
    assert server.process is not None
    execs = f"/sandboxes/{server.make()}/execs"
    with ThreadPoolExecutor(1) as client:
        body = {"argv": ["sleep", "1000"], "wait": True}
        waiting = client.submit(server.http.post, f"/v1{execs}", json=body)
        assert until(lambda: server.ask("GET", execs)["items"], 30)
        (begun,) = server.ask("GET", execs)["items"]

        server.process.send_signal(signal.SIGTERM)
        answer = waiting.result(60)

    assert (503, "server_unreachable") == (answer.status_code, answer.json()["code"])
    assert "retry-after" in answer.headers
    assert 0 == server.process.wait(60)
    said = capfd.readouterr().err
    assert "sandbox ended" in said, "the control: this is its log"
    assert "Traceback" not in said
    assert '"level":"error"' not in said

    assert server.process.stdout is not None
    server.process.stdout.close()
    server.start()
    status = server.ask("GET", f"{execs}/{begun['id']}")["status"]
    assert (None, 9, "terminate") == (
        status["exit_code"],
        status["signal"],
        status["killed_by"],
    )


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGUSR1])
def test_who_has_connected_is_answered(server: Server, how: int) -> None:
    """At any moment, on a new connection or one that is kept: answered, or not connected at all."""
    server.start("--outlive", "0", faulty=False)
    assert server.process is not None
    busy = threading.Barrier(13)

    def ask(is_kept: bool) -> str:
        transport = httpx.HTTPTransport(uds=str(server.state / "ringfence.sock"), verify=False)
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=60) as client:
            headers = {} if is_kept else {"connection": "close"}
            busy.wait()
            while True:
                try:
                    assert 200 == client.get("/v1/info", headers=headers).status_code
                except httpx.ConnectError:
                    return "not there"
                except httpx.TransportError as exc:
                    return repr(exc)

    with ThreadPoolExecutor(12) as clients:
        ends = [clients.submit(ask, each % 2 == 0) for each in range(12)]
        busy.wait()
        server.ask("GET", "/info")
        server.process.send_signal(how)
        assert {"not there": 12} == Counter(each.result(60) for each in ends)
    assert 0 == server.process.wait(60)
