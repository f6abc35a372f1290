"""The store in which snapshots outlive their node: what was changed in it is not restored."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ringfence.errors import (
    BackendUnavailable,
    RingfenceError,
    SnapshotCorrupt,
    SnapshotNotFound,
)
from ringfence.model.spec import SandboxSpec
from ringfence.model.template import TemplateRequest, TemplateStep
from ringfence.sessions import eviction
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.manager import SessionManager
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


@pytest.fixture
def nodes(store: SharedSnapshots, tmp_path: Path) -> Iterator[list[SessionManager]]:
    """Two servers with one store, as nodes of a cluster."""
    config = ManagerConfig(pool=PoolConfig(enabled=False))
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                SessionManager(config, state_dir=str(tmp_path / name), shared=store)
            )
            for name in ("first", "second")
        ]


def _built(manager: SessionManager, name: str, script: str) -> str:
    """The id of a template of `ann`, once it is ready."""
    ended = threading.Event()
    stop = manager.templates.listen(ended.set)
    steps = (TemplateStep(run=("sh", "-c", script)),)
    made = manager.templates.begin(TemplateRequest(name=name, steps=steps), "ann")
    while (view := manager.templates.view(made.id)).status not in ("ready", "failed"):
        ended.wait(30)
        ended.clear()
    stop()
    assert "ready" == view.status, view.error
    return made.id


def _read(manager: SessionManager, template: str, client: str = "ann") -> str:
    """What a new sandbox of a template finds in its file."""
    spec = SandboxSpec(template=template)
    with manager.acquire(spec, client_id=client) as lease:
        return lease.sandbox.exec(["sh", "-c", "cat ~/built"]).stdout_text


def test_a_template_is_every_nodes_and_goes_everywhere(
    nodes: list[SessionManager], store: SharedSnapshots
) -> None:
    first, second = nodes
    made = _built(first, "app", "echo one > ~/built")

    assert "one\n" == _read(second, "app") == _read(second, made)
    assert [made] == [each.id for each in second.templates.list("ann")]
    assert [] == second.templates.list("bob")
    assert made == _built(first, "app", "echo two > ~/built")
    assert "two\n" == _read(second, "app")  # none keeps what it meant before
    with pytest.raises(RingfenceError):
        _read(second, "app", "bob")
    first.templates.publish("app", public=True, sees="ann")
    assert "two\n" == _read(second, "app", "bob")
    first.templates.publish("app", public=False, sees="ann")
    with pytest.raises(RingfenceError):
        _read(second, "app", "bob")
    first.templates.delete("app", "ann")
    assert [] == second.templates.list("ann")
    assert [] == store.names("templates", "public")
    with pytest.raises(RingfenceError):
        _read(second, "app")


def test_a_lost_nodes_template_is_taken_over_by_what_changes_it(
    nodes: list[SessionManager], store: SharedSnapshots, tmp_path: Path
) -> None:
    first, second = nodes
    kept, gone = (_built(first, each, "echo one > ~/built") for each in ("kept", "gone"))
    first.close()

    second.templates.delete(gone, "ann")
    log = []
    stop = second.templates.listen(lambda: log.append(1))
    again = _built(second, "kept", "echo one > ~/built")
    stop()
    assert kept != again
    assert [again] == [each.id for each in second.templates.list("ann")]
    build = second.templates.build_of(second.templates.find("kept", "ann"))
    with open(second.templates.places.log(build.id)) as file:
        assert "cached" in file.read()
    second.templates.delete("kept", "ann")
    assert [] == [*(tmp_path / "store").glob("snap-*")]


def test_a_snapshot_is_removed_from_the_store_by_its_owner_alone(
    nodes: list[SessionManager], store: SharedSnapshots
) -> None:
    """On its own node, and on another one that has not fetched it."""
    for manager in nodes:
        lease = nodes[0].acquire(client_id="ann")
        saved = nodes[0].snapshot(lease.id, client_id="ann").id
        with pytest.raises(SnapshotNotFound):
            manager.delete_snapshot(saved, "bob")
        assert "ann" == store.owner(saved)
        manager.delete_snapshot(saved, "ann")
        assert store.owner(saved) is None


@pytest.mark.parametrize("state", ["active", "detached", "suspended"])
@pytest.mark.parametrize("left_s", [None, 600.0, -5.0])
def test_an_evicted_sandbox_has_the_state_and_the_time_that_it_had(
    nodes: list[SessionManager], store: SharedSnapshots, state: str, left_s: float | None
) -> None:
    """One whose time was over meanwhile has a moment, and no more."""
    manager = nodes[0]
    live = manager.index.find(manager.acquire(client_id="ann").id)
    assert live is not None
    saved = manager.snapshot(live.id).id
    form: dict[str, Any] = {"owner": "ann", "snapshot": saved, "execs": []}
    form |= {"state": state, "left_s": left_s}
    store.write(form, "evicted", live.sandbox_id)
    eviction.settle(manager, live, form)

    left = live.left_s(manager.clock.now())
    assert (left is None) == (left_s is None)
    assert left is None or left_s is None or left <= max(left_s, 1.0)
    assert left_s != 600.0 or (left or 0) > 500.0
    is_over = ("terminated", "ttl") == (live.state, live.reason)
    assert state == live.state or (is_over and left_s == -5.0)
    assert ([], None) == (store.names("evicted"), store.owner(saved))


def test_a_changed_form_opens_nothing(
    nodes: list[SessionManager], store: SharedSnapshots, tmp_path: Path
) -> None:
    """Neither may one be put where another owner's are."""
    first, second = nodes
    _built(first, "app", "echo one > ~/built")
    (path,) = (tmp_path / "store" / "templates").glob("*/app")
    text = path.read_text()
    path.write_text(text.replace("ann", "bob"))
    with pytest.raises(SnapshotCorrupt, match="app"):
        _read(second, "app")
    path.write_text(text)
    bobs = path.parent.with_name(hashlib.sha256(b"bob").hexdigest()[:32])
    shutil.copytree(path.parent, bobs)
    with pytest.raises(SnapshotCorrupt, match="app"):
        _read(second, "app", "bob")
    assert "one\n" == _read(second, "app")
    for name in ("../../outside", "..", "app/../app"):
        assert second.templates.resolve(name, "ann") is None


def test_a_restart_leaves_what_other_nodes_have_built(
    nodes: list[SessionManager], store: SharedSnapshots, tmp_path: Path
) -> None:
    """A layer that was fetched is no orphan of a build that was killed."""
    first, second = nodes
    _built(first, "app", "echo one > ~/built")
    assert "one\n" == _read(second, "app")
    second.close()
    config = ManagerConfig(pool=PoolConfig(enabled=False))
    for name in ("second", "third"):
        place = str(tmp_path / name)
        with SessionManager(config, state_dir=place, shared=store) as again:
            assert "one\n" == _read(again, "app")
