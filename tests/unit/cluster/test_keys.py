"""Keys in the cluster's store: what a gateway removes or changes holds at every gateway."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.cluster.stored import Stored

from ringfence.cluster.directory import KeyRing
from ringfence.store.records import KeyRecord

pytestmark = pytest.mark.anyone

NOW = 1_800_000_000.0
KEY = KeyRecord("key-1", b"\x00digest\xff", "ann", "user", 1.0)
TOKEN = KeyRecord("key-2", b"two", "ann", "sandbox", 2.0, sandbox="sbx-1", maker="key-1")
OTHER = replace(TOKEN, id="key-3", maker="key-0", created_at=3.0)


@pytest.fixture
def directory() -> Any:
    return Stored()


@pytest.fixture
def ring(directory: Any) -> KeyRing:
    made = KeyRing(directory)
    for each in (KEY, TOKEN, OTHER):
        made.add_key(each)
    return made


def test_tokens_go_with_the_key_that_they_were_made_with(ring: KeyRing, directory: Any) -> None:
    ring.note_keys({"key-1": 5.0, "key-2": 6.0, "key-3": 7.0}, NOW)
    before = ring.version()
    ring.remove_key("key-1")

    assert [replace(OTHER, used_at=7.0)] == KeyRing(directory).every_key()
    assert ["used/key-3"] == directory.list("used/")
    assert before != ring.version()


def test_a_key_is_read_as_it_was_changed(ring: KeyRing, directory: Any) -> None:
    changed: dict[str, Any] = {"digest": b"new\x00", "old_digest": KEY.digest, "old_until": NOW}
    before = ring.version()
    ring.change_key("key-1", **changed)
    ring.change_key("key-unknown", **changed)

    assert [replace(KEY, **changed), TOKEN, OTHER] == KeyRing(directory).every_key()
    assert before != ring.version()


def test_tokens_that_have_expired_are_forgotten_and_keys_are_not(ring: KeyRing) -> None:
    ring.add_key(replace(KEY, id="key-4", created_at=4.0, expires_at=NOW - 1))
    ring.add_key(replace(TOKEN, id="key-5", created_at=5.0, expires_at=NOW - 1))
    ring.add_key(replace(TOKEN, id="key-6", created_at=6.0, expires_at=NOW + 1))
    ring.note_keys({}, NOW)

    assert ["key-1", "key-2", "key-3", "key-4", "key-6"] == [each.id for each in ring.every_key()]


def test_keys_are_told_oldest_first(ring: KeyRing) -> None:
    ring.add_key(replace(KEY, id="key-0", created_at=4.0))
    ring.add_key(replace(KEY, id="key-9", created_at=1.0))

    order = ["key-1", "key-9", "key-2", "key-3", "key-0"]
    assert order == [each.id for each in ring.every_key()]
