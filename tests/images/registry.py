"""Debian's docker-registry on loopback, and a wire in front of it that can be cut."""

from __future__ import annotations

import contextlib
import selectors
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urljoin

import httpx2

from tests.features import require
from tests.images.making import Made, digest_of

# bcrypt of "password", for "user": the registry takes no other kind of hash.
_USERS = "user:$2y$05$abcdefghijklmnopqrstuuWG29KuyeAicPCJODk1zjyGvyQUU2awu\n"
_CONFIG = """
version: 0.1
log: {{level: error, accesslog: {{disabled: true}}}}
storage: {{filesystem: {{rootdirectory: {root}}}}}
http: {{addr: 127.0.0.1:{port}}}
{auth}
"""
_AUTH = "auth: {{htpasswd: {{realm: tests, path: {path}}}}}"


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextlib.contextmanager
def serving(place: Path, *, private: bool = False) -> Iterator[str]:
    """A registry; its `host:port`."""
    require("docker-registry")
    port = _free_port()
    (place / "users").write_text(_USERS)
    auth = _AUTH.format(path=place / "users") if private else ""
    config = place / "config.yml"
    config.write_text(_CONFIG.format(root=place / "data", port=port, auth=auth))
    with subprocess.Popen(
        ["docker-registry", "serve", str(config)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            with httpx2.Client(transport=httpx2.HTTPTransport(retries=10)) as http:
                http.get(f"http://127.0.0.1:{port}/v2/")
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()


def push(
    made: Made, host: str, repository: str, tag: str, *, auth: tuple[str, str] | None = None
) -> None:
    """Upload an image, as a client of the distribution API does."""
    with httpx2.Client(auth=auth) as http:
        base = f"http://{host}/v2/{repository}/"
        for data in (made.configuration, *made.blobs):
            begun = http.post(f"{base}blobs/uploads/")
            begun.raise_for_status()
            where = urljoin(base, begun.headers["location"])
            joint = "&" if "?" in where else "?"
            http.put(
                f"{where}{joint}digest={digest_of(data)}",
                content=data,
                headers={"content-type": "application/octet-stream"},
            ).raise_for_status()
        http.put(
            f"{base}manifests/{tag}",
            content=made.manifest,
            headers={"content-type": "application/vnd.oci.image.manifest.v1+json"},
        ).raise_for_status()


class Wire:
    """Passes connections on to `host`, and cuts the first that brought `cut_after` bytes back."""

    def __init__(self, host: str, cut_after: int) -> None:
        name, _, port = host.partition(":")
        self._target, self._cut_after = (name, int(port)), cut_after
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.host = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.requests = b""
        self.cuts = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with client, socket.create_connection(self._target) as server:
                self._pass_on(client, server)

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        back = 0
        with selectors.DefaultSelector() as selector:
            selector.register(client, selectors.EVENT_READ, server)
            selector.register(server, selectors.EVENT_READ, client)
            while True:
                for key, _ in selector.select():
                    source, to = key.fileobj, key.data
                    assert isinstance(source, socket.socket)
                    data = source.recv(65536)
                    if not data:
                        return
                    if source is client:
                        self.requests += data
                    else:
                        back += len(data)
                    if not self.cuts and back > self._cut_after:
                        self.cuts += 1
                        return
                    to.sendall(data)
