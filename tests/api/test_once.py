"""What is asked for twice happens once, and what breaks off half way does not happen."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.api.conftest import Daemon, StartDaemon

pytestmark = pytest.mark.anyone

COUNT = {"script": "echo x >> runs; wc -l < runs"}


@pytest.fixture
def base(sandbox_id: str) -> str:
    return f"/v1/sandboxes/{sandbox_id}"


def test_an_exec_is_started_once_under_a_key(client: httpx.Client, base: str) -> None:
    key = {"idempotency-key": "build-1"}
    first = client.post(f"{base}/execs", json=COUNT, headers=key)
    again = client.post(f"{base}/execs", json={**COUNT, "wait": True}, headers=key)

    assert (201, 200) == (first.status_code, again.status_code)
    assert first.json()["id"] == again.json()["id"]
    assert "1\n" == again.json()["result"]["stdout"]
    other = client.post(f"{base}/execs", json={"script": "rm runs"}, headers=key)
    assert (422, "key") == (other.status_code, other.json()["field"])
    anew = client.post(f"{base}/execs", json={**COUNT, "wait": True}).json()
    assert "2\n" == anew["result"]["stdout"], "without a key each time is another time"
    assert 2 == len(client.get(f"{base}/execs").json()["items"])


def test_asked_by_many_at_once_it_is_started_once(client: httpx.Client, base: str) -> None:
    def ask(_: int) -> tuple[int, str]:
        body, key = {**COUNT, "wait": True}, {"idempotency-key": "at-once"}
        answer = client.post(f"{base}/execs", json=body, headers=key)
        return answer.status_code, answer.json()["result"]["stdout"]

    with ThreadPoolExecutor(8) as threads:
        assert {(200, "1\n")} == set(threads.map(ask, range(8)))


def test_what_failed_is_told_again_and_not_tried_again(client: httpx.Client, base: str) -> None:
    key = {"idempotency-key": "too-early"}
    body = {"script": "echo there", "cwd": "/home/sandbox/later", "wait": True}
    assert 422 == client.post(f"{base}/execs", json=body, headers=key).status_code
    client.post(f"{base}/files/dirs", json={"path": "later"})
    assert 422 == client.post(f"{base}/execs", json=body, headers=key).status_code
    assert 200 == client.post(f"{base}/execs", json=body).status_code


def test_the_next_daemon_knows_the_key(start_daemon: StartDaemon, tmp_path: Path) -> None:
    first = start_daemon(state_dir=tmp_path / "s")
    key = {"idempotency-key": "over-a-kill"}
    with first.client() as client:
        base = f"/v1/sandboxes/{client.post('/v1/sandboxes', json={}).json()['id']}"
        begun = client.post(f"{base}/execs", json=COUNT, headers=key).json()["id"]
    first.process.send_signal(signal.SIGKILL)
    first.stop()
    second = start_daemon(state_dir=tmp_path / "s")
    with second.client() as client:
        again = client.post(f"{base}/execs", json={**COUNT, "wait": True}, headers=key)
        assert (200, begun) == (again.status_code, again.json()["id"])
        assert "1\n" == again.json()["result"]["stdout"]


def breaking_off() -> Iterator[bytes]:
    yield b"half of it" * 200_000
    raise ConnectionError("the client goes away")


def test_an_upload_that_breaks_off_leaves_what_was_there(
    daemon: Daemon, client: httpx.Client, base: str
) -> None:
    at = {"path": "kept/file"}
    client.post(f"{base}/files/dirs", json={"path": "kept"})
    client.put(f"{base}/files/content", params={**at, "mode": "640"}, content=b"whole")
    for path in ("kept/file", "kept/new"):
        with pytest.raises(ConnectionError), daemon.client() as leaving:
            leaving.put(f"{base}/files/content", params={"path": path}, content=breaking_off())
    watched = {"script": "while ls -A kept | grep -v '^file$'; do sleep 0.05; done", "wait": True}
    assert 0 == client.post(f"{base}/execs", json=watched).json()["result"]["exit_code"]

    assert b"whole" == client.get(f"{base}/files/content", params=at).content
    replaced = client.put(f"{base}/files/content", params={**at, "mode": "600"}, content=b"anew")
    assert (200, 0o640, 4) == (
        replaced.status_code,
        replaced.json()["mode"],
        replaced.json()["size_bytes"],
    )


def test_what_may_not_be_written_is_not_replaced(client: httpx.Client, base: str) -> None:
    client.post(f"{base}/execs", json={"script": "echo a > f; chmod 444 f", "wait": True})
    at = {"path": "f"}
    refused = client.put(f"{base}/files/content", params=at, content=b"other")
    assert (403, "permission_denied") == (refused.status_code, refused.json()["code"])
    assert b"a\n" == client.get(f"{base}/files/content", params=at).content
    client.post(f"{base}/execs", json={"script": "chmod 644 f", "wait": True})
    assert 200 == client.put(f"{base}/files/content", params=at, content=b"other").status_code


def test_nobody_reads_half_of_a_file(daemon: Daemon, client: httpx.Client, base: str) -> None:
    """Written over and over, it is always one of the two, whoever looks."""
    one, two = b"1" * 3_000_000, b"2" * 2_000_000
    at = {"path": "busy"}
    client.put(f"{base}/files/content", params=at, content=one)
    over = threading.Event()

    def write() -> None:
        with daemon.client() as writer:
            while not over.is_set():
                for content in (two, one):
                    writer.put(f"{base}/files/content", params=at, content=content)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        script = "for i in $(seq 60); do wc -c < busy; done | sort -u"
        seen = client.post(f"{base}/execs", json={"script": script, "wait": True}).json()
    finally:
        over.set()
        thread.join()

    assert {"3000000", "2000000"} >= set(seen["result"]["stdout"].split())


def test_where_a_file_leads_elsewhere_or_is_a_mount_it_is_filled(
    client: httpx.Client, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    shared = tmp_path / "shared.txt"
    shared.write_text("host")
    os.chmod(shared, 0o666)
    mounts = [{"target": "/mnt/one.txt", "source": str(shared), "access": "read_write"}]
    made = client.post("/v1/sandboxes", json={"mounts": mounts})
    assert 201 == made.status_code, made.text
    base = f"/v1/sandboxes/{made.json()['id']}"
    script = "mkdir real; echo a > real/file; ln -s real/file link; ln -s real/none dangling"
    client.post(f"{base}/execs", json={"script": script, "wait": True})

    for path in ("link", "dangling", "/mnt/one.txt"):
        put = client.put(f"{base}/files/content", params={"path": path}, content=b"filled")
        assert 200 == put.status_code, put.text
    look = "cat real/file real/none /mnt/one.txt; ls -A real /mnt | grep ringfence; readlink link"
    told = client.post(f"{base}/execs", json={"script": look, "wait": True}).json()["result"]
    assert "filledfilledfilledreal/file\n" == told["stdout"]
    assert "filled" == shared.read_text()
    client.delete(base)


def test_a_slow_client_that_is_cut_leaves_nothing(
    daemon: Daemon, client: httpx.Client, base: str
) -> None:
    """As the kernel sees a client die: the socket is closed in the middle of the body."""
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(daemon.socket)
        head = f"PUT {base}/files/content?path=cut HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n"
        raw.sendall(head.encode() + b"four")
    script = "while ls -A | grep -q ringfence; do sleep 0.05; done; test ! -e cut"
    told = client.post(f"{base}/execs", json={"script": script, "wait": True}).json()
    assert 0 == told["result"]["exit_code"]
