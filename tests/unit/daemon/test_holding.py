"""What a daemon holds, given up by each of its servers in turn."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from ringfence.daemon.config import DaemonConfig
from ringfence.daemon.holding import held

pytestmark = pytest.mark.anyone


def test_the_second_server_may_find_the_listener_of_the_first_closed(tmp_path: Path) -> None:
    """The one on TCP may have ended before the one on the unix socket begins to."""
    config = DaemonConfig(state_dir=str(tmp_path / "s"), listen="127.0.0.1:0")

    with held(config) as mine:
        mine.hide()
        mine.listeners[1][0].close()
        mine.hide()

        assert not (tmp_path / "s" / "ringfence.sock").exists()


def test_nobody_connects_any_more_once_it_is_hidden(tmp_path: Path) -> None:
    """The kernel's queue of the listener on TCP takes nothing new; that of the unix socket has no name."""
    config = DaemonConfig(state_dir=str(tmp_path / "s"), listen="127.0.0.1:0")
    path = tmp_path / "s" / "ringfence.sock"

    with held(config) as mine:
        (unix, _), (tcp, is_tls) = mine.listeners
        assert (str(path), False) == (unix.getsockname(), is_tls)
        assert path.exists()
        assert _most_waiting(tcp) > 0
        mine.hide()
        assert (False, 0) == (path.exists(), _most_waiting(tcp))
        path.write_text("the next daemon's")
        mine.hide()
        assert path.exists(), "a second time removes nothing"
        path.unlink()


def _most_waiting(listener: socket.socket) -> int:
    """The bound of its queue: tcpi_sacked of struct tcp_info, which a listener uses for it."""
    info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
    return int.from_bytes(info[28:32], sys.byteorder)
