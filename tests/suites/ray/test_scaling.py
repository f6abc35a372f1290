"""From one node to four under load and back, by Ray's autoscaler with its fake provider."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ringfence.client import Client
from ringfence.model.base.ids import node_of

from .test_cluster import Gateway, _until

pytestmark = pytest.mark.timeout(900)
NAME = ("--cluster-name", "scaled")
MOST, ON_EACH = 4, 2
SCALING: dict[str, Any] = {
    "max_nodes": MOST,
    "memory_mb": 1,
    "load": 0,  # it is one machine's: every node has it
    "idle_s": 3,
    "wait_s": 400,
}
PATIENCE_S = 300.0
COUNT = "i=0; while [ ! -e /tmp/over ]; do echo $i; i=$((i+1)); sleep 0.2; done"


@pytest.fixture
def scaled() -> Iterator[str]:
    """The address of a Ray cluster of one node, which Ray may make four of."""
    command = [sys.executable, "-m", "tests.suites.ray.autoscaled", str(MOST)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as program:
        assert program.stdout is not None
        address = program.stdout.readline().strip()
        assert address
        yield address
        program.communicate()


@pytest.fixture
def gateway(scaled: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    place = tmp_path_factory.mktemp("s")
    manager = {"max_sandboxes": ON_EACH, "pool": {"enabled": False}}
    path = place / "config.json"
    path.write_text(json.dumps({"scaling": SCALING, "manager": manager}))
    found = Gateway(scaled, place, "--config", str(path), name=NAME)
    yield found
    command = [sys.executable, "-m", "ringfence", "cluster", "down", "--address", scaled]
    subprocess.run([*command, *NAME], check=True)
    found.end()


class _User:
    """Lists, and executes in one sandbox, again and again: it notes what fails."""

    def __init__(self, address: str, any_id: str) -> None:
        self.done, self.failed = 0, list[str]()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(address, any_id))
        self._thread.start()

    def _run(self, address: str, any_id: str) -> None:
        with Client(address) as client:
            while not self._over.is_set():
                try:
                    assert any_id in {each.id for each in client.list()}
                    assert b"x\n" == client.get(any_id).exec(["echo", "x"]).stdout
                    self.done += 1
                except Exception as exc:  # noqa: BLE001  whatever it is, the test shows it
                    self.failed.append(repr(exc))

    def end(self) -> None:
        """End; once is enough."""
        self._over.set()
        self._thread.join(60)


def test_from_one_node_to_four_and_back_with_nobody_interrupted(
    scaled: str, gateway: Gateway, tmp_path: Path
) -> None:
    with (
        Client(gateway.unix) as client,
        ThreadPoolExecutor(9) as threads,
        contextlib.ExitStack() as stack,
    ):
        assert 1 == _alive(scaled)
        kept = client.create()
        lines = threads.submit(_lines, gateway.unix, kept.id)
        stack.callback(kept.terminate)
        user = _User(gateway.unix, kept.id)
        stack.callback(user.end)
        # Eight fill four nodes: each waits until there is one with room, and none is refused.
        began = time.monotonic()
        made = [*threads.map(_made, [gateway.unix] * (MOST * ON_EACH - 1))]
        print(f"{MOST} nodes after {time.monotonic() - began:.1f} s")
        homes = {node_of(each) for each in (*made, kept.id)}
        assert MOST == len(homes) == _alive(scaled)
        # One elsewhere than on the head stays: its node is not let go for hours, and not by any idle one.
        stays = next(each for each in made if node_of(each) != node_of(kept.id))
        for each in made:
            if each != stays:
                client.get(each).terminate()
        _until(lambda: _alive(scaled) <= 2, PATIENCE_S)
        assert b"kept\n" == client.get(stays).exec(["echo", "kept"]).stdout
        time.sleep(SCALING["idle_s"] + 8)  # Ray's own timeout, and ours, would have ended it by now
        assert b"kept\n" == client.get(stays).exec(["echo", "kept"]).stdout
        client.get(stays).terminate()
        _until(lambda: _alive(scaled) == 1, PATIENCE_S)
        print(f"back after {time.monotonic() - began:.1f} s")
        user.end()
        kept.files.write("/tmp/over", b"")
        found = lines.result(60)
        assert [*range(len(found))] == found
        assert [] == user.failed
        assert user.done > 10


def _made(address: str) -> str:
    with Client(address, timeout_s=SCALING["wait_s"] + 10) as client:
        made = client.create()
        assert 0 == made.exec(["true"]).exit_code
        return made.id


def _lines(address: str, any_id: str) -> list[int]:
    with Client(address) as client:
        done = client.get(any_id).exec(["sh", "-c", COUNT], timeout_s=1000)
        return [int(each) for each in done.stdout.split()]


def _alive(address: str) -> int:
    """Count Ray's nodes: this process has joined another Ray cluster, or none."""
    code = "import sys, ray; ray.init(sys.argv[1], log_to_driver=False, logging_level='ERROR');"
    code += "print(sum(each['Alive'] for each in ray.nodes()))"
    argv = [sys.executable, "-c", code, address]
    return int(subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout)
