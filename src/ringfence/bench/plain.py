"""A client of the server with nothing of ours in it: `http.client` on its unix socket, kept open."""

from __future__ import annotations

import http.client
import json
import socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Self


class Plain(http.client.HTTPConnection):
    """A plain HTTP connection to the server.

    Args:
        address: `unix:PATH`.
    """

    def __init__(self, address: str) -> None:
        super().__init__("localhost", timeout=120)
        self._path = address.removeprefix("unix:")

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)

    def ask(self, method: str, path: str, form: Any = None) -> Any:
        headers = {} if form is None else {"content-type": "application/json"}
        self.request(method, path, None if form is None else json.dumps(form), headers)
        response = self.getresponse()
        text = response.read()
        if response.status >= 400:
            raise AssertionError(f"{method} {path}: {response.status} {text[:200]!r}")
        return json.loads(text)

    def cycle(self, *, use_pool: bool) -> None:
        at = "/v1/sandboxes/" + self.ask("POST", "/v1/sandboxes", {"use_pool": use_pool})["id"]
        self.true_in(at)
        self.ask("DELETE", at)

    def true_in(self, at: str) -> None:
        """Run an exec and check its result."""
        ran = self.ask("POST", f"{at}/execs", {"argv": ["/bin/true"], "wait": True})
        if ran["result"]["exit_code"] != 0:
            raise AssertionError(f"`true` failed in the sandbox: {ran}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()
