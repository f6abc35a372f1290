"""Where the daemon listens: an address that others reach is never taken unasked."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from ringfence.daemon import sockets
from ringfence.errors import InvalidRequest

pytestmark = pytest.mark.anyone


@pytest.mark.parametrize(
    ("where", "port"),
    [("127.0.0.1:0", 0), ("localhost:65535", 65535), ("[::1]:80", 80), ("127.255.255.254:1", 1)],
)
def test_loopback_is_taken(where: str, port: int) -> None:
    for public in (False, True):
        address, found = sockets.check_address(where, public=public)
        assert address.is_loopback
        assert port == found


@pytest.mark.parametrize("where", ["0.0.0.0:80", "[::]:80", "128.0.0.1:80", "10.0.0.1:80"])
def test_what_others_reach_needs_leave(where: str) -> None:
    with pytest.raises(InvalidRequest, match="other machines can reach"):
        sockets.check_address(where, public=False)
    assert 80 == sockets.check_address(where, public=True)[1]


@pytest.mark.parametrize(
    "where",
    [
        *("localhost:", "localhost", ":80", "localhost:٣", "localhost:²"),
        *("localhost:+1", "localhost: 1", "localhost:1_0", "127.1:80", "a:80", ""),
    ],
)
def test_what_is_no_address_and_port_is_refused(where: str) -> None:
    with pytest.raises(InvalidRequest, match="is not ADDRESS:PORT"):
        sockets.read_address(where)


@pytest.mark.parametrize("port", ["65536", "-1", "9" * 5000])
def test_a_number_that_is_no_port_is_refused(port: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a port: 0 to 65535"):
        sockets.read_address(f"localhost:{port}")


def test_only_a_socket_of_before_is_replaced_and_others_may_not_connect(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    mask = os.umask(0)
    try:
        sockets.listen_unix(str(path)).close()
        listener = sockets.listen_unix(str(path))
    finally:
        os.umask(mask)
    assert 0o600 == stat.S_IMODE(path.stat().st_mode)
    listener.close()

    (tmp_path / "file").write_text("kept")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Exception, match="cannot listen"):
        sockets.listen_unix(str(tmp_path / "file"))
    assert before == len(os.listdir("/proc/self/fd"))
    assert "kept" == (tmp_path / "file").read_text()


def test_a_path_is_as_long_as_it_may_be_and_no_longer(tmp_path: Path) -> None:
    most = str(tmp_path / "x")
    most += "x" * (107 - len(most))
    sockets.listen_unix(most).close()
    with pytest.raises(InvalidRequest, match="too long"):
        sockets.listen_unix(most + "x")
