"""Kill -9 of Ray's head whose state is in a real Redis: by hand, alone, with RINGFENCE_TEST_HEAD=1.

It takes a minute, and a process can join one Ray cluster only. It needs Debian's redis-server.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringfence.client import Client
from ringfence.errors import RingfenceError

from .conftest import free_ports, node_options

pytestmark = [pytest.mark.by_hand, pytest.mark.timeout(500)]
NAME = ("--cluster-name", "head")
_AWAY_S = 20.0  # longer than the lease of a node


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    (port,) = free_ports(1)
    place = str(tmp_path_factory.mktemp("redis"))
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", place]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 30
    while True:
        with socket.socket() as probe:
            if not probe.connect_ex(("127.0.0.1", port)):
                break
        assert time.monotonic() < until
        time.sleep(0.05)
    yield f"127.0.0.1:{port}"
    server.terminate()
    server.wait(30)


@pytest.fixture(scope="module")
def durable(redis: str) -> Iterator[Any]:
    """Three Ray nodes, of which the head keeps its state in Redis."""
    directory = os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="rf-ray-", dir="/tmp")
    os.mkdir(f"{directory}/ray")
    os.environ["RAY_REDIS_ADDRESS"] = redis
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        cluster.add_node(**node_options(), include_dashboard=False)
        for _ in range(2):
            cluster.add_node(**node_options())
        yield cluster
    finally:
        cluster.shutdown()
        del os.environ["RAY_REDIS_ADDRESS"]
        shutil.rmtree(directory, ignore_errors=True)


def _start(address: str, place: Path) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "ringfence", "serve", "--json", "--cluster", address]
    gateway = subprocess.Popen(
        [*command, "--state-dir", str(place), *NAME], stdout=subprocess.PIPE, text=True
    )
    assert gateway.stdout is not None
    with gateway.stdout as told:
        return gateway, json.loads(told.readline())["listening"][0]


def _nodes(address: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "ringfence", "nodes", "--json", "--address", address, *NAME]
    found: list[dict[str, Any]] = json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    )
    return [each for each in found if each["status"] != "lost"]


class _Load:
    """Creates, executes and ends sandboxes until told; what it was not told to have ended, lives."""

    def __init__(self, address: str) -> None:
        self._address, self._over = address, threading.Event()
        self.done, self.refused, self.unknown = 0, 0, set[str]()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with Client(self._address) as client:
            while not self._over.is_set():
                try:
                    made = client.create()
                    self.unknown.add(made.id)
                    assert b"x\n" == made.exec(["echo", "x"]).stdout
                    made.terminate()
                    self.unknown.discard(made.id)
                    self.done += 1
                except RingfenceError:
                    self.refused += 1

    def end(self) -> None:
        self._over.set()
        self._thread.join(120)


def test_sandboxes_and_gateways_survive_a_killed_head(durable: Any, tmp_path: Path) -> None:
    gateway, address = _start(durable.address, tmp_path / "g")
    until = time.monotonic() + 60
    while len(before := _nodes(durable.address)) < 3:
        assert time.monotonic() < until
    with Client(address) as client:
        kept = {each.id: each for each in (client.create() for _ in range(6))}
        for each in kept.values():
            each.files.write("/tmp/kept", each.id)
        load = _Load(address)
        head = durable.head_node
        head.all_processes["gcs_server"][0].process.send_signal(signal.SIGKILL)
        began = time.monotonic()
        rounds = 0
        while time.monotonic() - began < _AWAY_S:
            for each in kept.values():  # no head, and they answer
                assert each.id == each.files.read("/tmp/kept").decode()
            rounds += 1
        without = load.done
        head.kill_gcs_server(check_alive=False)
        head.start_gcs_server()
        while load.done < without + 20:
            assert time.monotonic() - began < 200, "the gateway does not come back"
            time.sleep(0.1)
        load.end()
        print(f"{rounds} rounds and {without} creates without a head, {load.refused} refused")
        # The census: what gateways and nodes list is what there is, once.
        after = _nodes(durable.address)
        assert {each["node"] for each in before} == {each["node"] for each in after}
        other, beside = _start(durable.address, tmp_path / "other")
        with Client(beside) as second:
            listed = [each.id for each in client.list()]
            assert sorted(listed) == sorted(each.id for each in second.list())
        there: list[str] = []
        for node in after:
            with Client(f"unix:{node['socket']}") as direct:
                there += [each.id for each in direct.list()]
        assert sorted(listed) == sorted(there)
        assert len(there) == len({*there})
        assert {*kept} <= {*there} <= {*kept} | load.unknown
        for each in kept.values():
            assert each.id == each.files.read("/tmp/kept").decode()
    for program in (gateway, other):
        program.terminate()
        program.wait(30)
    down = [sys.executable, "-m", "ringfence", "cluster", "down", "--address", durable.address]
    subprocess.run([*down, *NAME], check=True)
