"""A server of our own, for adapters to work over."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def serving() -> Iterator[str]:
    """`ringfence serve` with a state of its own; yields the address of its socket.

    That state is not below a test's own directory: the path of a socket must be short.
    """
    with tempfile.TemporaryDirectory(prefix="rf-") as place:
        command = ["ringfence", "serve", "--json", "--state-dir", f"{place}/state"]
        for (address,) in _serving(command):
            yield address


@contextmanager
def serving_e2b(templates: dict[str, Any] | None = None) -> Iterator[None]:
    """A server with E2B's API, and the variables by which E2B's SDKs find it. Its key is an admin's."""
    from ringfence.client import Client

    with tempfile.TemporaryDirectory(prefix="rf-") as place:
        command = ["ringfence", "serve", "--json", "--e2b", "--listen", "127.0.0.1:0"]
        with open(f"{place}/config.json", "w", encoding="utf-8") as file:
            json.dump({"e2b": {"templates": templates or {}}}, file)
        command += ["--state-dir", f"{place}/state", "--config", f"{place}/config.json"]
        for unix, tcp in _serving(command):
            with Client(unix) as admin:
                key = admin.make_key("ann", scope="admin")["key"].removeprefix("rf_").encode().hex()
            names = {"E2B_API_URL": tcp, "E2B_SANDBOX_URL": tcp, "E2B_API_KEY": f"e2b_{key}"}
            before = {name: os.environ.get(name) for name in names}
            os.environ.update(names)
            try:
                yield
            finally:
                for name, value in before.items():
                    os.environ.pop(name) if value is None else os.environ.update({name: value})


CLUSTER = os.environ.get("RINGFENCE_TEST_CLUSTER", "")
"""Address of a Ray cluster: the server is a gateway then, to nodes of its own on that cluster."""


def _serving(command: list[str]) -> Iterator[list[str]]:
    name = ["--cluster-name", f"suite-{os.getpid()}"]
    more = ["--cluster", CLUSTER, *name] if CLUSTER else []
    with subprocess.Popen([*command, *more], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield json.loads(server.stdout.readline())["listening"]
        finally:
            server.terminate()
            server.wait(30)
            if CLUSTER:
                down = ["ringfence", "cluster", "down", "--address", CLUSTER, *name]
                subprocess.run(down, check=True, stdout=subprocess.DEVNULL)
