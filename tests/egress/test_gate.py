"""What has been held until it was told apart is judged by the policy of then, not by that of its beginning."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.egress.first import HOLD, PASS, RAW
from ringfence.egress.gate import Gate


@pytest.mark.parametrize("is_ended", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_what_is_neither_tls_nor_http_passes_only_where_requests_are_not_judged(
    is_ended: bool, waits: bool
) -> None:
    passed: list[bytes] = []
    cut: list[str] = []
    relay = SimpleNamespace(start_out=passed.append, cut=cut.append)
    sandbox = SimpleNamespace(terminates=lambda *_: is_ended)
    connection = SimpleNamespace(sandbox=sandbox, host="a.example", port=9000, is_opaque=False)
    gate: Any = Gate.__new__(Gate)
    gate._connection, gate._relay, gate._patience = connection, relay, object() if waits else None

    gate._pass_on(b"raw")

    assert connection.is_opaque is (not is_ended and not waits)
    assert ([b"raw"] if connection.is_opaque else []) == passed
    assert len(cut) == (not connection.is_opaque)


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize(
    ("more", "kind", "verb", "is_decided"),
    [
        (b"more", RAW, "start_out", True),
        (b"more", PASS, "hand_over", False),
        (b"more", HOLD, "", False),
        (b"", HOLD, "start_out", True),
    ],
)
def test_what_was_held_goes_on_as_a_whole_and_else_what_came(
    held: bool, more: bytes, kind: str, verb: str, is_decided: bool
) -> None:
    """Handed over where what follows is still to be looked at; passed on for good where it is not."""
    done: list[tuple[str, bytes]] = []
    gate: Any = Gate.__new__(Gate)
    gate._relay = SimpleNamespace(
        start_out=lambda data: done.append(("start_out", data)),
        hand_over=lambda data: done.append(("hand_over", data)),
    )
    sandbox = SimpleNamespace(terminates=lambda *_: False)
    gate._connection = SimpleNamespace(sandbox=sandbox, host="a.example", port=9000)
    gate._patience, gate._limit = None, lambda: None
    opening = SimpleNamespace(verdict=HOLD if held else PASS, data=b"whole", objection="")
    opening.feed = lambda _: kind
    gate._opening = opening

    assert is_decided == gate._decide(more)

    assert ([(verb, b"whole" if held else more)] if verb else []) == done
