"""What a gateway vouches for, with clocks that differ, and versions of Ray that were not tried."""

from __future__ import annotations

import time

import pytest

from ringfence.api.access import gateways
from ringfence.api.access.caller import TOKEN, Caller
from ringfence.cluster.directory import check_version
from ringfence.cluster.proxy import Proxy
from ringfence.cluster.upstream import Pool
from ringfence.errors import BackendUnavailable

pytestmark = pytest.mark.anyone
SECRET, TARGET = b"of the cluster", b"/v1/sandboxes"
CALLER = Caller("ann", TOKEN, sandbox="sbx-1", key="key-1", max_sandboxes=3)


def test_a_node_learns_whose_key_it_is_but_gets_no_key() -> None:
    """A key at a node would be looked up there, not found, and its streams cut."""
    found = gateways.unseal(
        SECRET, gateways.seal(SECRET, CALLER, "GET", TARGET).decode(), "GET", TARGET
    )

    assert found == Caller("ann", TOKEN, sandbox="sbx-1", max_sandboxes=3, gateway_key="key-1")
    assert "key-1" == found.key_id == CALLER.key_id
    again = gateways.seal(SECRET, found, "GET", TARGET).decode()
    assert found == gateways.unseal(SECRET, again, "GET", TARGET)


@pytest.mark.parametrize(
    ("apart_s", "opens"), [(60, True), (-60, True), (301, False), (-301, False)]
)
def test_clocks_may_be_a_minute_apart_and_not_five(
    monkeypatch: pytest.MonkeyPatch, apart_s: float, opens: bool
) -> None:
    now = time.time()
    sealed = gateways.seal(SECRET, CALLER, "GET", TARGET).decode()
    monkeypatch.setattr(time, "time", lambda: now + apart_s)

    assert opens == (gateways.unseal(SECRET, sealed, "GET", TARGET) is not None)


def test_the_seal_is_the_first_header_field_that_a_node_reads() -> None:
    """What a client wrote, whatever is in it, comes after the node knows that a gateway sends it."""
    proxy = Proxy(Pool(None), SECRET)
    given = [(b"last-event-id", b"1"), (gateways.HEADER.encode(), b"forged")]
    fields = proxy.headers(CALLER, "GET", TARGET, "request-1", given)

    assert gateways.HEADER.encode() == fields[0][0]
    found = gateways.unseal(SECRET, fields[0][1].decode(), "GET", TARGET)
    assert found is not None
    assert CALLER.key_id == found.key_id
    assert 1 == [name for name, _ in fields].count(fields[0][0])
    assert (b"last-event-id", b"1") in fields


@pytest.mark.parametrize("version", ["2.59.1", "2.61.0", "3.0.0", "2.6.0"])
def test_a_version_of_ray_that_was_not_tried_is_refused(version: str) -> None:
    check_version("2.60.3")  # the control
    with pytest.raises(BackendUnavailable, match=version) as refused:
        check_version(version)
    assert "2.60" in refused.value.hint
