"""A server with E2B's API, and clients that speak it byte by byte."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from ringfence.api.access.keys import e2b_form
from tests.api.conftest import Daemon, _user_namespaces, start, start_daemon

__all__ = ["_user_namespaces", "start_daemon"]


@dataclass
class Client:
    """A client with one API key."""

    http: httpx.Client
    key: str

    def api(self, method: str, path: str, **more: Any) -> httpx.Response:
        """Call the control plane."""
        headers = {"X-API-Key": self.key, **more.pop("headers", {})}
        return self.http.request(method, path, headers=headers, **more)

    def create(self, **form: Any) -> Box:
        """Create a sandbox."""
        made = self.api("POST", "/v2/sandboxes", json={"timeout": 60, **form})
        assert 201 == made.status_code, made.text
        return Box(self.http, made.json())


@dataclass
class Box:
    """A sandbox by its token."""

    http: httpx.Client
    made: dict[str, Any]

    @property
    def id(self) -> str:
        """The sandbox's id."""
        found: str = self.made["sandboxID"]
        return found

    @property
    def headers(self) -> dict[str, str]:
        """Those of each request to it."""
        return {"E2b-Sandbox-Id": self.id, "X-Access-Token": self.made["envdAccessToken"]}

    def call(self, method: str, path: str, **more: Any) -> httpx.Response:
        """Call what is inside."""
        headers = {**self.headers, **more.pop("headers", {})}
        return self.http.request(method, path, headers=headers, **more)

    def rpc(self, path: str, form: dict[str, Any], **more: Any) -> httpx.Response:
        """A unary call."""
        return self.call("POST", path, json=form, **more)

    def stream(
        self, path: str, form: dict[str, Any], headers: dict[str, str] | None = None, **more: Any
    ) -> list[dict[str, Any]]:
        """All messages of a stream; the last one is its end."""
        text = json.dumps(form).encode()
        body = b"\0" + len(text).to_bytes(4, "big") + text
        kind = {"content-type": "application/connect+json", **(headers or {})}
        return frames_of(self.call("POST", path, content=body, headers=kind, **more).content)

    def signed(self, path: str, operation: str = "read", until: str = "") -> dict[str, str]:
        """The query of a signed URL."""
        token = self.made["envdAccessToken"]
        text = ":".join([path, operation, "", token, *([until] if until else [])])
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
        query = {"path": path, "signature": f"v1_{digest}"}
        return {**query, "signature_expiration": until} if until else query

    def run(self, script: str, **more: Any) -> list[dict[str, Any]]:
        """Run a command, and return all messages."""
        process = {"cmd": "/bin/bash", "args": ["-l", "-c", script]}
        return self.stream("/process.Process/Start", {"process": process, "stdin": False}, **more)


def frames_of(data: bytes) -> list[dict[str, Any]]:
    """The messages of a stream."""
    found = []
    while data:
        size = int.from_bytes(data[1:5], "big")
        found.append(json.loads(data[5 : 5 + size]))
        data = data[5 + size :]
    return found


MakeClient = Callable[..., Client]


@pytest.fixture(scope="session")
def common_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One that serves E2B's API, for all modules that neither configure nor end theirs."""
    options = ("--e2b", "--domain", "sbx.test", "--listen", "127.0.0.1:0")
    started = start(tmp_path_factory.mktemp("d"), *options)
    yield started
    started.end()


@pytest.fixture(scope="module")
def daemon(common_daemon: Daemon) -> Daemon:
    """A daemon that serves E2B's API, and that others have used."""
    return common_daemon


@pytest.fixture(scope="module")
def make_client(daemon: Daemon) -> Iterator[MakeClient]:
    """Make clients, each of an owner."""
    opened: list[httpx.Client] = []

    def make(owner: str = "ann", scope: str = "user") -> Client:
        with daemon.client() as admin:
            key = admin.post("/v1/keys", json={"owner": owner, "scope": scope}).json()["key"]
        http = httpx.Client(base_url=daemon.tcp, timeout=60)
        opened.append(http)
        return Client(http, e2b_form(key))

    yield make
    for each in opened:
        each.close()


@pytest.fixture(scope="module")
def client(make_client: MakeClient) -> Client:
    """A client of the module."""
    return make_client()


@pytest.fixture(scope="module")
def box(client: Client) -> Iterator[Box]:
    """A sandbox of the module."""
    made = client.create(metadata={"a": "b c", "x": "1"}, envVars={"GREETING": "hi"}, timeout=600)
    yield made
    client.api("DELETE", f"/sandboxes/{made.id}")
