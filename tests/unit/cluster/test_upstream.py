"""Requests to nodes: what a client sends is one request, whatever is in it."""

from __future__ import annotations

import pytest

from ringfence.cluster.upstream import NotSent, Pool
from ringfence.errors import InvalidRequest

pytestmark = pytest.mark.anyone

NOWHERE = "unix:/nowhere/at/all"


@pytest.mark.parametrize(
    "field",
    [
        (b"last-event-id", b"1-1\r\n\r\nDELETE /v1/sandboxes/another HTTP/1.1"),
        (b"last-event-id", b"1-1\nx-ringfence-caller: forged"),
        (b"last-event-id", b"1-1\rx"),
        (b"last-event-id\r\nhost", b"localhost"),
        (b"last-event-id", b"1\x001"),
    ],
)
async def test_a_header_that_could_be_another_request_is_not_sent(
    field: tuple[bytes, bytes],
) -> None:
    """A node takes what comes by its unix socket without a seal for the operator's own."""
    pool = Pool()
    with pytest.raises(InvalidRequest, match="line break"):
        await pool.open(NOWHERE, b"GET", b"/v1/events", [field], b"")


async def test_others_are_sent() -> None:
    pool = Pool()
    with pytest.raises(NotSent):
        await pool.open(NOWHERE, b"GET", b"/v1/events", [(b"x-name", b"\xc3\xa9\t1")], b"")
