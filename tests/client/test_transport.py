"""Where a client's requests and its key go, and how often: servers that are none."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from ringfence.client import Client, _async, _sync
from ringfence.errors import ServerUnreachable, TimeoutExceeded

pytestmark = pytest.mark.anyone


class Stub(http.server.ThreadingHTTPServer):
    """Answers each request alike.

    Attributes:
        moved_to: It is answered with a redirection there; empty: with an empty object.
        is_silent: Nothing is answered before the end.
        keys: What requests had for authorization.
    """

    daemon_threads = True
    moved_to, is_silent = "", False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.keys: list[str | None] = []
        self.ended = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Stub

    def do_GET(self) -> None:
        self.server.keys.append(self.headers["authorization"])
        if self.server.is_silent:
            self.server.ended.wait(60)
        self.send_response(307 if self.server.moved_to else 200)
        if self.server.moved_to:
            self.send_header("location", f"{self.server.moved_to}{self.path}")
        self.send_header("content-type", "application/json")
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def _serving(server: Stub) -> Iterator[Stub]:
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.ended.set()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def stubs() -> Iterator[tuple[Stub, Stub]]:
    with ExitStack() as stack:
        yield stack.enter_context(_serving(Stub())), stack.enter_context(_serving(Stub()))


def _ask(server: Stub, timeout_s: float = 60.0) -> object:
    with Client(server.url, key="secret", timeout_s=timeout_s) as client:
        return client._transport.json("GET", "/v1/info")


def test_a_redirection_takes_no_request_to_another_server(stubs: tuple[Stub, Stub]) -> None:
    first, other = stubs
    first.moved_to = other.url
    with pytest.raises(ServerUnreachable, match=f"redirects to '{other.url}"):
        _ask(first)

    assert (["Bearer secret"], []) == (first.keys, other.keys)


def test_a_proxy_of_the_environment_sees_no_key(
    stubs: tuple[Stub, Stub], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, proxy = stubs
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, proxy.url)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)

    assert {} == _ask(server)
    assert (["Bearer secret"], []) == (server.keys, proxy.keys)


def test_a_request_that_takes_too_long_is_not_sent_again(stubs: tuple[Stub, Stub]) -> None:
    server, _ = stubs
    server.is_silent = True
    with pytest.raises(TimeoutExceeded):
        _ask(server, timeout_s=0.3)

    assert 1 == len(server.keys)


@pytest.mark.parametrize("half", [_sync, _async])
def test_an_id_is_one_part_of_a_path(half: object) -> None:
    segment = half.transport.segment  # type: ignore[attr-defined]

    assert "a%2Fb%3Fc%23d%25..%2F" == segment("a/b?c#d%../")
    assert "sbx-1_.~" == segment("sbx-1_.~")
