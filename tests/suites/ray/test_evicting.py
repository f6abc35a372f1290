"""A drain moves what runs in gVisor to another node, with its memory; what cannot be moved stays."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringfence.client import Client
from ringfence.cluster import admin
from ringfence.cluster.directory import Directory
from ringfence.errors import BackendUnavailable, LifecycleError, SandboxNotFound
from ringfence.model.base.ids import node_of
from tests.features import require

from .conftest import node_options
from .test_cluster import Gateway, _until

pytestmark = pytest.mark.as_root  # gVisor restores no memory for an ordinary user
NAME = ("--cluster-name", "of-evicting")
COUNT = "i=0; while :; do i=$((i+1)); echo $i > ~/count; sleep 0.05; done"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store") / "shared"


@pytest.fixture(scope="module")
def gateway(
    cluster: Any, store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    """A gateway over two nodes with gVisor and a store for snapshots."""
    require("runsc")
    place = tmp_path_factory.mktemp("v")
    config = place / "config.json"
    form = {"snapshot_store": str(store), "backends": ["native", "gvisor"], "shards": 1}
    config.write_text(json.dumps(form))
    added = cluster.add_node(**node_options())
    found = Gateway(cluster.address, place, "--config", str(config), name=NAME)
    try:
        _until(lambda: 2 == len(_with_gvisor()), 120.0)
        yield found
    finally:
        found.end()
        _end(cluster, NAME)
        cluster.remove_node(added, allow_graceful=False)


@pytest.fixture(autouse=True)
def undrained(gateway: Gateway) -> Iterator[None]:
    """Whatever a test has drained takes sandboxes again."""
    del gateway
    yield
    for each in _with_gvisor():
        _undrain(each["node"])
    time.sleep(1.5)  # until the gateway has looked


def test_what_runs_goes_on_on_another_node_under_its_ids(cluster: Any, gateway: Gateway) -> None:
    """A program left in the background, an exec with output and input, and a context with variables."""
    with Client(gateway.unix) as client:
        moved = client.create(tier="strong", name="moved", metadata={"of": "a test"})
        tag = node_of(moved.id)
        busy = _created_on(client, tag)
        busy.start(["sleep", "1000"])
        moved.shell(f"({COUNT}) >/dev/null 2>&1 </dev/null &")
        writer = moved.start(["cat"], stream_stdin=True)
        assert writer.stdin is not None
        writer.stdin.write(b"before\n")
        assert "42" == moved.run_code("x = 41; x + 1").text
        _until(lambda: _count(moved) > 5)

        reached = _count(moved)
        left = _drained(cluster, tag)

        assert ("moved", "") == (left[moved.id]["outcome"], left[moved.id]["why"])
        assert ("stays", "it runs 1 commands") == (left[busy.id]["outcome"], left[busy.id]["why"])
        _until(lambda: _is_known(moved.id))
        began = time.monotonic()
        assert _count(moved) >= reached
        print(f"restored on request after {time.monotonic() - began:.2f} s")
        _until(lambda: _count(moved) > reached + 5)
        assert "43" == moved.run_code("x + 2").text
        assert ("moved", "a test") == (moved.view.name, moved.view.metadata["of"])
        writer.stdin.write(b"after\n")
        writer.stdin.close()
        result = writer.wait(20)
        assert (b"after\n", 7) == (result.stdout, result.stdout_dropped_bytes)
        bob = client.make_key("bob")["key"]
        with Client(gateway.tcp, key=bob) as other, pytest.raises(SandboxNotFound):
            other.get(moved.id)
        assert 1 == [each.id for each in client.list()].count(moved.id)
        assert [] == [each.id for each in client.snapshots() if each.has_memory]
        moved.terminate()
        with pytest.raises(LifecycleError, match="ended"):
            moved.exec(["true"])
        busy.terminate()


def test_it_goes_on_after_its_node_is_gone(cluster: Any, gateway: Gateway) -> None:
    """As in maintenance: the node is drained, and Ray is stopped there."""
    added = cluster.add_node(**node_options())
    with Client(gateway.unix) as client:
        _until(lambda: added.node_id in {each["ray_id"] for each in _with_gvisor()}, 120.0)
        (tag,) = (e["node"] for e in _with_gvisor() if e["ray_id"] == added.node_id)
        sandbox = _created_on(client, tag, tier="strong")
        sandbox.shell(f"({COUNT}) >/dev/null 2>&1 </dev/null &")
        _until(lambda: _count(sandbox) > 5)
        reached = _count(sandbox)
        assert "moved" == _drained(cluster, tag)[sandbox.id]["outcome"]
        cluster.remove_node(added, allow_graceful=False)
        _until(lambda: tag not in {each["node"] for each in _with_gvisor()})
        time.sleep(1.5)  # until the gateway has looked

        assert _count(sandbox) >= reached
        _until(lambda: _count(sandbox) > reached + 5)
        sandbox.terminate()


def test_what_is_attended_stays_until_it_is_not(cluster: Any, gateway: Gateway) -> None:
    """A command whose caller waits, and output that a client reads; the reasons are listed."""
    with Client(gateway.unix) as client:
        waited = client.create(tier="strong")
        tag = node_of(waited.id)
        followed = _created_on(client, tag, tier="strong")
        process = followed.start(["sh", "-c", "while :; do echo on; sleep 0.1; done"])
        events = process.events()
        next(events)
        waiting = threading.Thread(target=waited.exec, args=(["sleep", "8"],))
        waiting.start()
        _until(lambda: [each for each in waited.execs() if each.running])

        left = _drained(cluster, tag)

        assert "stays" == left[waited.id]["outcome"] == left[followed.id]["outcome"]
        assert "a client waits for the end" in left[waited.id]["why"]
        assert "a client is being served" in left[followed.id]["why"]
        waiting.join()
        events.close()
        left = _drained(cluster, tag)
        assert ("moved", "saved") == (left[followed.id]["outcome"], left[waited.id]["outcome"])
        _until(lambda: _is_known(followed.id))
        assert process.view.running
        for each in (waited, followed):
            each.terminate()


def test_a_suspended_one_comes_back_to_the_node_whose_drain_was_taken_back(
    cluster: Any, gateway: Gateway
) -> None:
    """No other node takes it then. While both drain, it has nowhere to go, and stays."""
    with Client(gateway.unix) as client:
        sandbox = client.create(tier="strong")
        tag = node_of(sandbox.id)
        (other,) = (each["node"] for each in _with_gvisor() if each["node"] != tag)
        process = sandbox.start(["sh", "-c", "echo once; exec sleep 1000"])
        _until(lambda: process.view.stdout_bytes)
        sandbox.suspend()
        assert "moved" == _drained(cluster, tag)[sandbox.id]["outcome"]
        _until(lambda: _is_known(sandbox.id))
        admin.drain(Directory(NAME[1]), other)
        _until(lambda: "draining" == _status(other))
        time.sleep(1.5)  # until the gateway has looked
        with pytest.raises(BackendUnavailable, match="no node that takes sandboxes restores it"):
            sandbox.resume()
        _undrain(tag)
        time.sleep(1.5)

        assert "suspended" == sandbox.state
        sandbox.resume()

        assert _has_it(tag, sandbox.id)
        assert process.view.running
        left = _drained(cluster, tag)
        assert "stays" == left[sandbox.id]["outcome"]
        assert "no other node that takes sandboxes has gvisor" in left[sandbox.id]["why"]
        process.kill()
        assert b"once\n" == process.wait(20).stdout
        sandbox.terminate()


def test_one_that_the_store_does_not_take_stays_and_goes_on(
    cluster: Any, gateway: Gateway, store: Path
) -> None:
    with Client(gateway.unix) as client:
        sandbox = client.create(tier="strong")
        tag = node_of(sandbox.id)
        assert "41" == sandbox.run_code("x = 41; x").text
        store.rename(store.with_name("away"))
        store.write_text("in its place")

        left = _drained(cluster, tag)

        assert "stays" == left[sandbox.id]["outcome"]
        assert "snapshot_store" in left[sandbox.id]["why"]
        assert "42" == sandbox.run_code("x + 1").text
        store.unlink()
        store.with_name("away").rename(store)
        sandbox.terminate()


def test_without_a_store_what_runs_stays(
    cluster: Any, gateway: Gateway, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The control: the same sandbox on the same nodes, of a cluster that has no store."""
    name = ("--cluster-name", "of-no-store")
    place = tmp_path_factory.mktemp("w")
    config = place / "config.json"
    config.write_text(json.dumps({"backends": ["gvisor"], "shards": 1}))
    found = Gateway(cluster.address, place, "--config", str(config), name=name)
    try:
        _until(lambda: 2 == len(admin.nodes(Directory(name[1]))), 120.0)
        with Client(found.unix) as client:
            sandbox = client.create(tier="strong")
            sandbox.start(["sleep", "1000"])

            left = _drained(cluster, node_of(sandbox.id), name)

            assert "stays" == left[sandbox.id]["outcome"]
            assert "no snapshot_store" in left[sandbox.id]["why"]
            assert 0 == sandbox.exec(["true"]).exit_code
    finally:
        found.end()
        _end(cluster, name)


def _with_gvisor() -> list[dict[str, Any]]:
    found = [each for each in admin.nodes(Directory(NAME[1])) if "lost" != each["status"]]
    return [each for each in found if "gvisor" in each["memory"]]


def _status(tag: str) -> str:
    return next(each["status"] for each in admin.nodes(Directory(NAME[1])) if each["node"] == tag)


def _has_it(tag: str, sandbox_id: str) -> bool:
    moved = Directory(NAME[1]).get(f"moved/{sandbox_id}")
    return moved is not None and tag == json.loads(moved)["node"]


def _is_known(sandbox_id: str) -> bool:
    """Return whether gateways have had the time to hear of a sandbox that has left."""
    if Directory(NAME[1]).get(f"moved/{sandbox_id}") is None:
        return False
    time.sleep(1.5)
    return True


def _count(sandbox: Any) -> int:
    return int(sandbox.shell("cat ~/count || echo 0").stdout or b"0")


def _created_on(client: Client, tag: str, **options: Any) -> Any:
    for _ in range(100):
        made = client.create(**options)
        if node_of(made.id) == tag:
            return made
        made.terminate()
    raise AssertionError(f"none of 100 sandboxes fell on node {tag}")


def _drained(cluster: Any, tag: str, name: tuple[str, ...] = NAME) -> dict[str, dict[str, Any]]:
    """Drain a node by the command line: what was told of each sandbox last."""
    command = [sys.executable, "-m", "ringfence", "nodes", "drain", tag, "--json", "--wait", "1s"]
    done = subprocess.run(
        [*command, "--address", cluster.address, *name],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    return {each["id"]: each for each in json.loads(done.stdout.splitlines()[-1])}


def _undrain(tag: str) -> None:
    admin.drain(Directory(NAME[1]), tag, draining=False)
    _until(lambda: "ready" == _status(tag))


def _end(cluster: Any, name: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "ringfence", "cluster", "down"]
    subprocess.run([*command, "--address", cluster.address, *name], check=True)
