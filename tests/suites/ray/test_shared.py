"""The store in which snapshots outlive their node: what was changed in it is not restored."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ringfence.errors import BackendUnavailable, SnapshotCorrupt
from ringfence.model.spec import SandboxSpec
from ringfence.snapshots.catalogue import Catalogue
from ringfence.snapshots.shared import SharedSnapshots

SECRET = b"of the cluster"
RECORD = {"owner": "ann", "sandbox": "sbx-1"}


@pytest.fixture
def here(tmp_path: Path) -> Catalogue:
    return Catalogue(str(tmp_path / "here"), "native")


@pytest.fixture
def store(tmp_path: Path) -> SharedSnapshots:
    return SharedSnapshots(str(tmp_path / "store"), SECRET)


def _save(catalogue: Catalogue, snapshot_id: str, *lower: str) -> str:
    read, write = os.pipe()
    os.write(write, f"content of {snapshot_id}".encode())
    os.close(write)
    facts: dict[str, Any] = {"session_id": "sess-1", "created_at": 1.0}
    catalogue.save(read, snapshot_id, SandboxSpec(), 1 << 20, lower=lower, **facts)
    os.close(read)
    return snapshot_id


def _content(catalogue: Catalogue, snapshot_id: str) -> bytes:
    fd = catalogue.content(snapshot_id)
    try:
        return os.read(fd, 100)
    finally:
        os.close(fd)


def test_a_snapshot_comes_back_on_another_machine_with_those_below_it(
    here: Catalogue, store: SharedSnapshots, tmp_path: Path
) -> None:
    _save(here, "snap-a")
    _save(here, "snap-b", "snap-a")
    store.push(here.directory, "snap-b", RECORD)
    there = Catalogue(str(tmp_path / "there"), "native")

    assert store.pull(there.directory, "snap-a") is None  # nobody's by itself
    assert RECORD == store.pull(there.directory, "snap-b")
    assert [b"content of snap-a", b"content of snap-b"] == [
        _content(there, each) for each in ("snap-a", "snap-b")
    ]
    assert ["snap-b"] == [each.id for each in there.list()]


def test_what_others_lie_over_is_removed_with_the_last_of_them(
    here: Catalogue, store: SharedSnapshots, tmp_path: Path
) -> None:
    _save(here, "snap-a")
    store.push(here.directory, "snap-a", RECORD)
    _save(here, "snap-b", "snap-a")
    store.push(here.directory, "snap-b", RECORD)

    store.remove("snap-a")
    assert store.owner("snap-a") is None
    assert RECORD == store.pull(str(tmp_path / "there"), "snap-b")
    store.remove("snap-b")
    store.remove("snap-b")

    assert [] == [*(tmp_path / "store").glob("snap-*")]


@pytest.mark.parametrize("name", ["content.tar", "snapshot.json", "manifest.json"])
@pytest.mark.parametrize("how", ["other", "longer", "shorter"])
def test_what_was_changed_in_the_store_is_refused_and_nothing_is_kept(
    here: Catalogue, store: SharedSnapshots, tmp_path: Path, name: str, how: str
) -> None:
    store.push(here.directory, _save(here, "snap-a"), RECORD)
    path, there = tmp_path / "store" / "snap-a" / name, tmp_path / "there"
    data = path.read_bytes()
    changed = {"other": b"#" + data[1:], "longer": data + b"#", "shorter": data[:-1]}
    path.write_bytes(changed[how])

    with pytest.raises(SnapshotCorrupt):
        store.pull(str(there), "snap-a")

    assert [] == ([*there.iterdir()] if there.exists() else [])
    path.write_bytes(data)  # the control
    assert RECORD == store.pull(str(there), "snap-a")


def test_another_owner_cannot_be_written_into_it(
    here: Catalogue, store: SharedSnapshots, tmp_path: Path
) -> None:
    store.push(here.directory, _save(here, "snap-a"), RECORD)
    path = tmp_path / "store" / "snap-a" / "manifest.json"
    form = json.loads(path.read_text())
    path.write_text(json.dumps({**form, "record": {**RECORD, "owner": "bob"}}))
    with pytest.raises(SnapshotCorrupt, match="another cluster's"):
        store.owner("snap-a")
    # Nor is the manifest of one snapshot good for another.
    path.write_text(json.dumps(form))
    (tmp_path / "store" / "snap-a").rename(tmp_path / "store" / "snap-b")
    with pytest.raises(SnapshotCorrupt):
        store.owner("snap-b")
    with pytest.raises(SnapshotCorrupt):
        SharedSnapshots(str(tmp_path / "store"), b"another").owner("snap-b")


def test_a_store_that_cannot_be_had_says_what_it_needs() -> None:
    with pytest.raises(BackendUnavailable, match="snapshot_store"):
        SharedSnapshots("s3://bucket/snapshots", SECRET)
    with pytest.raises(BackendUnavailable, match="no-such"):
        SharedSnapshots("no-such://bucket", SECRET)
