"""What a drain says of a sandbox that it has saved."""

from __future__ import annotations

from typing import Any

import pytest

from ringfence.cluster.draining import Draining

pytestmark = pytest.mark.anyone

_SANDBOX: dict[str, Any] = {
    "id": "sbx-1",
    "owner": "ann",
    "name": "",
    "session_state": "active",
    "last_active_at": 10.0,
    "timeouts": {},
    "metadata": {},
}


def ask(method: str, path: str, _body: bytes | None) -> Any:
    """A server on which the snapshot counts as a use of the sandbox."""
    if "POST" == method:
        return {"id": "snap-1"}
    if path.endswith("/execs"):
        return {"items": []}
    if path.endswith("/sbx-1"):
        return {**_SANDBOX, "last_active_at": 11.0}
    return {"items": [_SANDBOX], "next_cursor": None}


@pytest.mark.parametrize(
    ("seen", "is_whole"), [(10.0, True), (11.0, True), (11.000001, True), (11.01, False)]
)
def test_a_snapshot_is_whole_unless_the_sandbox_was_used_since(seen: float, is_whole: bool) -> None:
    """Be what is seen of it older than the snapshot."""
    draining = Draining(ask, has_store=True)
    assert ["saved"] == [each["outcome"] for each in draining.settle()]

    kept = draining.kept({**_SANDBOX, "last_active_at": seen})

    assert ("snap-1", is_whole) == (kept["snapshot"], kept["is_whole"])
