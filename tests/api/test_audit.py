"""The audit log: whoever has no key cannot push out what keys did, and rotation by rename works."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from ringfence.api.access import audit
from ringfence.api.access.audit import Audit, LogFile, address_of
from tests.api.conftest import Daemon, StartDaemon
from tests.native.outside import until

pytestmark = pytest.mark.anyone

FLOOD = 400


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def daemon(start_daemon: StartDaemon) -> Daemon:
    return start_daemon("--listen", "127.0.0.1:0")


@pytest.mark.full
def test_a_flood_without_a_key(start_daemon: StartDaemon, capfd: Any) -> None:
    daemon = start_daemon("--listen", "127.0.0.1:0")
    with daemon.client() as client:
        made = client.post("/v1/keys", json={"owner": "ann", "scope": "user"}).json()["key"]
    state, long = daemon.state_dir, "x" * 30_000
    before = (state / "audit.log").read_bytes()
    assert b"/v1/keys" in before, "the control: what keys do is there"
    with httpx.Client(base_url=daemon.tcp) as stranger:
        told = [stranger.post(f"/v1/{long}").status_code for _ in range(FLOOD)]
        good = stranger.get("/v1/info", headers={"authorization": f"Bearer {made}"})

    assert 200 == good.status_code, "a valid key of that address is answered meanwhile"
    assert before == (state / "audit.log").read_bytes()
    refused = state / "refused.log"
    assert until(lambda: FLOOD == sum(each.get("more", 1) for each in lines(refused)), 30)
    written = lines(refused)
    assert refused.stat().st_size < FLOOD * 300, "one line a second, none with the whole path"
    assert len(written) < FLOOD / 4
    whole = next(each for each in written if "path" in each)
    assert (256, len(long) + 4) == (len(whole["path"]), whole["path_length"])
    assert {401} <= set(told) <= {401, 429}
    assert "127.0.0.1" == next(each for each in written if "more" in each)["peer"]
    daemon.stop()
    said = [each for each in capfd.readouterr().err.splitlines() if '"status":4' in each]
    assert 0 < len(said) < FLOOD / 4, "stderr too"
    assert max(map(len, said)) < 1000


def test_an_address_that_is_refused_often_is_told_so() -> None:
    async def run() -> list[bool]:
        log, told = Audit(None), []
        for _ in range(audit.MOST_REFUSED + 1):
            told.append(log.has_enough("10.0.0.1:7"))
            log.write(peer="10.0.0.1:6", path="/", status=401, client=None, key=None)
        other = log.has_enough("10.0.0.2:6")
        log.close()
        return [*told, other]

    told = asyncio.run(run())
    assert [False] * audit.MOST_REFUSED + [True, False] == told


def test_many_addresses_are_counted_together(tmp_path: Path) -> None:
    async def run() -> None:
        log = Audit(str(tmp_path))
        for number in range(2000):
            for _ in range(2):
                peer = f"10.0.{number // 250}.{number % 250}:1"
                log.write(peer=peer, path="/", status=401, client=None, key=None)
        assert len(log._buckets) < 300
        log.close()

    asyncio.run(run())
    written = lines(tmp_path / "refused.log")
    assert len(written) < 600
    assert 4000 == sum(each.get("more", 1) for each in written)


def test_what_a_key_does_is_written_whole(tmp_path: Path) -> None:
    """And a key that is refused a thousand times does not fill that file."""

    async def run() -> None:
        log = Audit(str(tmp_path))
        for number in range(100):
            log.write(peer="uid 0", path="/", status=200, client="ann", key="k", number=number)
            log.write(peer="uid 0", path="/", status=403, client="ann", key="k")
        log.write(peer="uid 0", path="/", status=499, client="ann", key="k")
        code = {"code": "server_unreachable"}
        log.write(peer="uid 0", path="/", status=503, client="ann", key="k", **code)
        log.close()

    asyncio.run(run())
    done, refused = lines(tmp_path / "audit.log"), lines(tmp_path / "refused.log")
    assert [*range(100)] == [each["number"] for each in done[:100]]
    assert [499, 503] == [each["status"] for each in done[100:]], "it may have happened"
    assert audit.MOST_WITH_KEY + 1 == len(refused)
    assert {"client": "ann", "key": "k", "more": 80}.items() <= refused[-1].items()


def test_rotated_by_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, moved = tmp_path / "log", tmp_path / "moved"
    log = LogFile(str(path), 1000)
    log.append(b"one\n")
    path.rename(moved)
    log.reopen()  # SIGHUP
    log.append(b"two\n")
    assert (b"one\n", b"two\n") == (moved.read_bytes(), path.read_bytes())

    path.rename(moved)
    log._look_at = 0.0  # a second later, without a signal
    log.append(b"three\n")
    assert (b"two\n", b"three\n") == (moved.read_bytes(), path.read_bytes())

    log.append(b"x" * 1000)
    assert 1006 == (tmp_path / "log.1").stat().st_size
    os.truncate(tmp_path / "log.1", 0)
    log.append(b"four\n")
    assert b"four\n" == path.read_bytes(), "the bound holds"
    log.reopen()


def test_sighup_begins_new_files(daemon: Daemon, client: httpx.Client) -> None:
    path, moved = daemon.state_dir / "audit.log", daemon.state_dir / "moved"
    client.post("/v1/sandboxes", json={"nonsense": 1})
    key = client.post("/v1/keys", json={"owner": "bob", "scope": "user"}).json()["id"]
    path.rename(moved)
    daemon.process.send_signal(signal.SIGHUP)
    size = moved.stat().st_size

    def written_anew() -> bool:
        client.delete(f"/v1/keys/{key}")
        return path.exists()

    assert until(written_anew, 30)
    again = moved.stat().st_size
    client.post("/v1/keys", json={"owner": "bob", "scope": "user"})
    assert again == moved.stat().st_size >= size
    assert 0o600 == path.stat().st_mode & 0o777


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("uid 7", "uid 7"),
        ("10.0.0.1:80", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6:80", "2001:db8:1:2::/64"),
        ("::ffff:10.0.0.1:80", "10.0.0.1"),
        ("fe80::1%eth0:80", "fe80::/64"),
        ("?", ""),
    ],
)
def test_addresses(peer: str, address: str) -> None:
    assert address == address_of(peer)


@pytest.mark.parametrize(
    ("method", "status", "path", "is_written"),
    [
        ("GET", 200, "/v1/sandboxes", False),
        ("HEAD", 200, "/v1/sandboxes", False),
        ("OPTIONS", 204, "/v1/sandboxes", False),
        ("GET", 500, "/v1/sandboxes", False),
        *(("GET", status, "/v1/sandboxes/x", True) for status in (400, 401, 403, 404, 422, 429)),
        *(("GET", status, "/v1/sandboxes/x/files/stat", True) for status in (401, 403, 429)),
        *(("GET", status, "/v1/sandboxes/x/files/stat", False) for status in (400, 404, 422)),
        ("PUT", 404, "/v1/sandboxes/x/files/content", True),
        ("POST", 201, "/v1/sandboxes", True),
        ("DELETE", 500, "/v1/sandboxes/x", True),
        ("WEBSOCKET", 101, "/v1/sandboxes/x/ports/1/tcp", True),
    ],
)
def test_what_is_of_interest(method: str, status: int, path: str, is_written: bool) -> None:
    assert is_written == Audit.is_of_interest(method, status, path)


@pytest.mark.parametrize(
    ("status", "code", "name"),
    [
        *((status, "", "audit.log") for status in (101, 200, 204, 399, 499, 500, 502)),
        *((status, "", "refused.log") for status in (400, 401, 404, 422, 429, 498, 503)),
        (503, "resource_exhausted", "refused.log"),
        (503, "server_unreachable", "audit.log"),
    ],
)
async def test_only_what_changed_nothing_is_written_apart(
    tmp_path: Path, status: int, code: str, name: str
) -> None:
    log = Audit(str(tmp_path))
    log.write(peer="10.0.0.1:1", status=status, code=code, client="ann", key="k")
    log.close()
    assert [name] == os.listdir(tmp_path)
    assert [status] == [each["status"] for each in lines(tmp_path / name)]


@pytest.mark.parametrize(
    ("whose", "shown", "most"),
    [
        ({"client": None, "key": None}, {"peer": "10.0.0.1"}, audit.MOST_WITHOUT_KEY),
        ({"client": "ann", "key": "k"}, {"client": "ann", "key": "k"}, audit.MOST_WITH_KEY),
        ({"client": "ann", "key": ""}, {"peer": "10.0.0.1:7"}, audit.MOST_WITH_KEY),
    ],
)
async def test_so_many_refusals_are_lines_and_the_others_are_counted(
    tmp_path: Path, whose: dict[str, Any], shown: dict[str, str], most: int
) -> None:
    assert (1, 20) == (audit.MOST_WITHOUT_KEY, audit.MOST_WITH_KEY)
    log = Audit(str(tmp_path))
    for number in range(most + 2):
        port = 7 if shown.get("peer", "").endswith(":7") else number
        log.write(peer=f"10.0.0.1:{port}", path="/", status=403, **whose)
    other = {**whose, "key": "k2"} if whose["key"] else whose
    log.write(peer="10.0.0.2:1", path="/", status=403, **other)
    log.close()
    written = lines(tmp_path / "refused.log")
    assert most + 2 == len(written), "another's has a line of its own, and there is one sum"
    assert {**shown, "more": 2, "by_status": {"403": 2}}.items() <= written[-1].items()


async def test_addresses_are_counted_apart_up_to_a_bound(tmp_path: Path) -> None:
    log = Audit(str(tmp_path))
    for number in range(300):
        log.write(peer=f"10.0.{number >> 8}.{number & 255}:1", status=401, client=None)
    assert (257, 300 - 256) == (len(log._buckets), log._buckets["others"].seen)
    log.close()
    written = lines(tmp_path / "refused.log")
    assert 256 + 1 + 1 == len(written)
    assert {"peer": "others", "more": 300 - 256 - 1}.items() <= written[-1].items()


async def test_each_file_has_a_bound_of_its_own_and_what_is_lost_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 64 << 20 == audit.LARGEST > 2 * audit.LARGEST_REFUSED == 2 * (16 << 20)
    monkeypatch.setattr(audit, "LARGEST", 1000)
    monkeypatch.setattr(audit, "LARGEST_REFUSED", 100)
    log = Audit(str(tmp_path))
    for status in (200, 403):
        log.write(peer="uid 0", path="/" + "x" * 200, status=status, client="ann", key="k")
    assert {"audit.log", "refused.log.1"} == {*os.listdir(tmp_path)}
    assert 0 == log.lost
    (tmp_path / "refused.log").mkdir()
    log.write(peer="uid 0", status=403, client="ann", key="k")
    assert 1 == log.lost
    log.write(peer="uid 0", status=200, client="ann", key="k")
    assert 1 == log.lost
    log.close()
    assert [200, 200] == [each["status"] for each in lines(tmp_path / "audit.log")]


def test_a_file_of_exactly_the_bound_goes_on(tmp_path: Path) -> None:
    log = LogFile(str(tmp_path / "log"), 10)
    log.append(b"123456789\n")
    assert ["log"] == os.listdir(tmp_path)
    log.append(b"\n")
    assert ["log.1"] == os.listdir(tmp_path)
    log.reopen()
