"""A daemon of its own for each module, as a user starts it, and a client on its unix socket."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.features import require


@pytest.fixture(scope="module", autouse=True)
def _user_namespaces() -> None:
    require("user namespaces")


@dataclass
class Daemon:
    """A running `ringfence serve`."""

    process: subprocess.Popen[str]
    state_dir: Path
    addresses: list[str]

    @property
    def socket(self) -> str:
        """Of the unix socket."""
        return str(self.state_dir / "ringfence.sock")

    @property
    def tcp(self) -> str:
        """The base URL of the TCP listener."""
        return next(each for each in self.addresses if not each.startswith("unix:"))

    def client(self, **options: Any) -> httpx.Client:
        """On the unix socket."""
        transport = httpx.HTTPTransport(uds=self.socket, verify=False)
        return httpx.Client(transport=transport, base_url="http://localhost", timeout=60, **options)

    def end(self) -> None:
        """Stop it, and end the nodes of a cluster's gateway."""
        self.stop()
        if CLUSTER:
            command = [*_RINGFENCE, "cluster", "down", *_of_cluster(self.state_dir, "address")]
            subprocess.run(command, env=_environment(), check=True, stdout=subprocess.DEVNULL)

    def stop(self) -> int:
        """SIGTERM, and its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(30)
        if self.process.stdout:
            self.process.stdout.close()
        return code


StartDaemon = Callable[..., Daemon]
CLUSTER = os.environ.get("RINGFENCE_TEST_CLUSTER", "")
"""Address of a Ray cluster: each daemon is a gateway then, to nodes of its own on that cluster."""
_KEYS = "a gateway keeps keys in the store of Ray's head, not in a file of its own"
OF_ONE_SERVER = {
    "test_what_did_not_outlive_its_daemon_is_lost": "the killed process is the gateway: sandboxes go on",
    "test_keys_are_kept_as_digests": _KEYS,
    "test_when_a_key_was_used_last_is_kept": _KEYS,
    "test_keys_of_an_older_version_open": _KEYS,
    "test_what_happens_is_said_in_json_lines": "what happens to sandboxes is in the logs of the nodes",
    "test_results_and_config_survive_a_restart_and_a_file_is_read_again": "nodes have that file",
    "test_packages_of_one_owner_are_not_those_of_another": "looks into a node's state directory",
    "test_a_build_goes_on_after_the_daemon_was_killed": "the killed process is the gateway: the build goes on",
    "test_a_layer_made_anew_leaves_earlier_builds_what_they_have": "its nodes are not started anew",
    "test_a_slow_reader_neither_stops_the_command_nor_grows_the_daemon": "counts a node's files",
}
"""Tests that differ by design where the server is a gateway, with the reason."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, over a cluster, what is about one server alone."""
    for item in items if CLUSTER else ():
        if why := OF_ONE_SERVER.get(item.name.partition("[")[0]):
            item.add_marker(pytest.mark.skip(reason=why))


def metrics_of(client: httpx.Client) -> dict[str, float]:
    """Metrics by name and labels; those of a cluster's nodes together."""
    found: dict[str, float] = defaultdict(float)
    for line in client.get("/metrics").text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[re.sub('node="[^"]*",?', "", name).replace("{}", "")] += float(value)
    return found


_RINGFENCE = (sys.executable, "-m", "ringfence")


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def _of_cluster(state_dir: Path, option: str) -> list[str]:
    name = hashlib.sha256(str(state_dir).encode()).hexdigest()[:16]
    return [f"--{option}", CLUSTER, "--cluster-name", name] if CLUSTER else []


def start(state_dir: Path, *options: str) -> Daemon:
    """Start one and wait until it listens."""
    process = subprocess.Popen(
        [
            *(*_RINGFENCE, "serve", "--json", "--state-dir", str(state_dir)),
            *_of_cluster(state_dir, "cluster"),
            *options,
        ],
        stdout=subprocess.PIPE,
        text=True,
        env=_environment(),
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        process.wait(10)
        process.stdout.close()
        raise AssertionError(f"it ended with {process.returncode}")
    return Daemon(process, state_dir, json.loads(line)["listening"])


@pytest.fixture(scope="module")
def start_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartDaemon]:
    """Start daemons, which end with the module; each in a state directory of its own unless told."""
    started: list[Daemon] = []

    def make(*options: str, state_dir: Path | None = None) -> Daemon:
        daemon = start(state_dir or tmp_path_factory.mktemp("d"), *options)
        started.append(daemon)
        return daemon

    yield make
    for daemon in started:
        daemon.end()


@pytest.fixture(scope="session")
def common_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One for all modules of a directory that neither configure nor end theirs: starts are slow."""
    started = start(tmp_path_factory.mktemp("d"))
    yield started
    started.end()


@pytest.fixture(scope="module")
def daemon(common_daemon: Daemon) -> Daemon:
    """A daemon that others have used, and will."""
    return common_daemon


@pytest.fixture
def client(daemon: Daemon) -> Iterator[httpx.Client]:
    """On the unix socket of `daemon`, where the caller is an admin."""
    with daemon.client() as found:
        yield found


@pytest.fixture
def sandbox_id(client: httpx.Client) -> Iterator[str]:
    """A sandbox that ends with the test."""
    made = client.post("/v1/sandboxes", json={})
    assert 201 == made.status_code, made.text
    found: str = made.json()["id"]
    yield found
    assert 200 == client.delete(f"/v1/sandboxes/{found}").status_code
