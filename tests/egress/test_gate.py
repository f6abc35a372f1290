"""What has been held until it was told apart is judged by the policy of then, not by that of its beginning."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

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
