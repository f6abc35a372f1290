"""Addresses of the host that lead into a sandbox: who may connect, and what closing leaves."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.errors import ConnectError, InvalidRequest, LifecycleError
from ringfence.sandbox import expose
from ringfence.sandbox.expose import Exposure, listen

pytestmark = pytest.mark.anyone
PATIENCE_S = 30.0


def sandbox_of(forward: Callable[[int, socket.socket], None], state: str = "ready") -> Any:
    return SimpleNamespace(forward=forward, session=SimpleNamespace(state=state))


def connect(exposure: Exposure) -> bytes:
    """Connect, and read what comes until the end."""
    is_path = isinstance(exposure.address, str)
    with socket.socket(socket.AF_UNIX if is_path else socket.AF_INET) as client:
        client.settimeout(PATIENCE_S)
        client.connect(exposure.address)
        return client.recv(100)


def saying(word: bytes) -> Callable[[int, socket.socket], None]:
    def forward(port: int, client: socket.socket) -> None:
        with client:
            client.sendall(b"%b %d" % (word, port))

    return forward


def test_each_connection_leads_to_the_port_of_the_sandbox() -> None:
    with Exposure(sandbox_of(saying(b"one")), 80, listen("127.0.0.1", 0, None)) as exposure:
        assert b"one 80" == connect(exposure)
        exposure.lead_to(sandbox_of(saying(b"two")))
        assert b"two 80" == connect(exposure)
    with pytest.raises(ConnectionRefusedError):
        connect(exposure)
    assert not exposure._thread.is_alive()
    exposure.close()


def test_a_client_that_left_before_it_was_accepted_ends_nothing() -> None:
    class Listener(socket.socket):
        left = 2

        def accept(self) -> Any:
            if self.left:
                self.left -= 1
                raise ConnectionAbortedError
            return super().accept()

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        listener = Listener(fileno=os.dup(free.fileno()))
        listener.listen()
        with Exposure(sandbox_of(saying(b"one")), 80, listener) as exposure:
            assert b"one 80" == connect(exposure)
    assert 0 == listener.left


def test_a_path_is_for_its_user_alone_and_removed_by_closing(tmp_path: Path) -> None:
    path = tmp_path / "s"
    before = os.umask(0)
    try:
        listener = listen("", 0, str(path))
    finally:
        os.umask(before)
    assert 0o600 == stat.S_IMODE(path.stat().st_mode)
    exposure = Exposure(sandbox_of(saying(b"x")), 1, listener)
    assert b"x 1" == connect(exposure)
    exposure.close()
    assert not path.exists()


@pytest.mark.parametrize("is_socket", [True, False])
def test_what_took_the_place_of_its_socket_is_left_alone(is_socket: bool, tmp_path: Path) -> None:
    path = tmp_path / "s"
    exposure = Exposure(sandbox_of(saying(b"x")), 1, listen("", 0, str(path)))
    (tmp_path / "kept").hardlink_to(path)  # or the next one could have its number
    path.unlink()
    other = socket.socket(socket.AF_UNIX)
    if is_socket:
        other.bind(str(path))
    else:
        path.touch()
    exposure.close()
    assert path.exists()
    other.close()


@pytest.mark.parametrize("state", ["ready", "suspended", "terminated"])
def test_it_closes_itself_once_the_sandbox_is_gone(state: str) -> None:
    tried = threading.Event()

    def forward(_port: int, client: socket.socket) -> None:
        client.close()
        tried.set()
        raise LifecycleError("not now")

    exposure = Exposure(sandbox_of(forward, state), 1, listen("127.0.0.1", 0, None))
    connect(exposure)
    assert tried.wait(PATIENCE_S)
    if state == "terminated":
        exposure._thread.join(PATIENCE_S)
        assert not exposure._thread.is_alive()
    else:
        tried.clear()
        connect(exposure)
        assert tried.wait(PATIENCE_S)
    exposure.close()


@pytest.mark.parametrize("error", [None, ConnectError("none"), LifecycleError("suspended")])
def test_every_connection_gives_its_place_back(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expose, "_MOST_DIALLING", 2)
    count = iter(range(100))
    done = threading.Semaphore(0)

    def forward(_port: int, client: socket.socket) -> None:
        client.close()
        next(count)
        done.release()
        if error is not None:
            raise error

    with Exposure(sandbox_of(forward), 1, listen("127.0.0.1", 0, None)) as exposure:
        for _ in range(6):
            connect(exposure)
            assert done.acquire(timeout=PATIENCE_S)
    assert 6 == next(count)


@pytest.mark.parametrize(
    ("host", "port", "unix", "field"),
    [
        ("localhost", 0, None, "host"),
        ("no such", 0, None, "host"),
        ("127.0.0.1", -1, None, "host_port"),
        ("127.0.0.1", 65536, None, "host_port"),
        ("", 0, "/no/such/place/s", "unix"),
        ("", 0, "/tmp/" + "x" * 200, "unix"),
    ],
)
def test_what_is_no_address_is_refused(host: str, port: int, unix: str | None, field: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(InvalidRequest) as refused:
        listen(host, port, unix)
    assert field == refused.value.field
    assert before == len(os.listdir("/proc/self/fd"))


def test_an_address_that_is_taken_is_refused(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0, None) as taken, pytest.raises(InvalidRequest, match="in use"):
        listen("127.0.0.1", taken.getsockname()[1], None)
    with listen("", 0, str(tmp_path / "s")), pytest.raises(InvalidRequest, match="in use"):
        listen("", 0, str(tmp_path / "s"))
