"""What a daemon holds, given up by each of its servers in turn."""

from __future__ import annotations

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
