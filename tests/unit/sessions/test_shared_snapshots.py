"""Snapshots that only the shared store has: whose they are is asked before anything is done with them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.errors import SnapshotNotFound
from ringfence.sessions import snapshots

pytestmark = pytest.mark.anyone


@pytest.mark.parametrize(("client", "may"), [("ann", True), (None, True), ("bob", False)])
def test_only_its_owner_or_an_admin_removes_one(client: str | None, may: bool) -> None:
    removed: list[str] = []
    shared = SimpleNamespace(owner=lambda _id: "ann", remove=removed.append)
    store = SimpleNamespace(snapshot=lambda _id: None, sandbox=lambda _id: None)
    manager: Any = SimpleNamespace(
        shared=shared, store=store, maker=SimpleNamespace(backends={"native": None})
    )
    if may:
        snapshots.delete(manager, "snap-1", client)
    else:
        with pytest.raises(SnapshotNotFound):
            snapshots.delete(manager, "snap-1", client)
    assert removed == ["snap-1"] * may
