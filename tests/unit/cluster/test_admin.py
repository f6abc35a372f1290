"""Starting a cluster: where nodes have their state, and what mistakes are told at once."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from ringfence.cluster import admin
from ringfence.cluster.node import make_private
from ringfence.errors import InvalidRequest, ServerUnreachable
from ringfence.store import directory

pytestmark = pytest.mark.anyone


def test_a_gateway_takes_the_state_directory_that_a_node_has_made(tmp_path: Path) -> None:
    """`ringfence cluster up` comes first, and the gateway's own state is in the same directory."""
    above = tmp_path / "above"
    place = above / "state" / "nodes" / "default" / "0a1b2c3d"
    mask = os.umask(0o022)
    try:
        make_private(str(above / "state"), str(place))
    finally:
        os.umask(mask)

    made = [place, *place.parents[:3]]
    assert [0o700] * 4 == [stat.S_IMODE(each.stat().st_mode) for each in made]
    assert 0o755 == stat.S_IMODE(above.stat().st_mode), "what is above is not the node's"
    os.close(directory.make_private(str(above / "state")))


@pytest.mark.parametrize(
    "address", ["10.0.0.5", ":6379", "head:", "head:0", "head:99999", "head:x"]
)
def test_what_is_no_address_of_a_head_is_refused(address: str) -> None:
    with pytest.raises(InvalidRequest, match="HOST:PORT"):
        admin.check_head(address)


def test_an_address_where_nothing_listens_is_refused_at_once() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ServerUnreachable, match=f"{address} refuses connections"):
            admin.check_head(address)
        listener.listen()
        admin.check_head(address)
