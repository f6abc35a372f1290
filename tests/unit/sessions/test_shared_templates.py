"""Templates in the store of a cluster: whose they are, what is kept of them, and what a node takes over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.shared_store import make_store

from ringfence.sessions.templates.build import client_of
from ringfence.sessions.templates.places import short
from ringfence.sessions.templates.shared import SharedTemplates, view_of
from ringfence.snapshots.shared import SharedSnapshots
from ringfence.store.store import Store
from ringfence.store.templates import (
    FAILED,
    READY,
    RESERVED,
    BuildRecord,
    LayerRecord,
    TemplateRecord,
)

pytestmark = pytest.mark.anyone


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SharedSnapshots:
    return make_store(tmp_path / "store", monkeypatch)


@pytest.fixture
def records() -> Iterator[Store]:
    made = Store(None)
    yield made
    made.close()


@pytest.fixture
def shared(store: SharedSnapshots, records: Store) -> SharedTemplates:
    return SharedTemplates(store, records.templates)


def template(name: str, owner: str = "ann", **more: Any) -> TemplateRecord:
    given = {"public": 0, "tags": {"default": f"b-{name}-{owner}"}, **more}
    return TemplateRecord(
        **{"id": f"tpl-{name}-{owner}", "owner": owner, "name": name, **given},
        created_at=1.0,
        updated_at=2.0,
    )


def build(of: TemplateRecord, build_id: str = "", *layers: str, **more: Any) -> BuildRecord:
    known = build_id or of.tags["default"]
    given = {"status": READY, "request": "{}", "tags": ["default"], "created_at": 1.0, **more}
    return BuildRecord(id=known, template=of.id, layers=[*layers], **given)


def put(shared: SharedTemplates, *templates: TemplateRecord) -> None:
    for each in templates:
        shared.put(each, [build(each)])


def ids(shared: SharedTemplates, sees: str | None) -> list[str]:
    return sorted(each.template.id for each in shared.every(sees))


def test_a_client_finds_its_own_and_public_ones(shared: SharedTemplates) -> None:
    own, hidden, common = (
        template("own"),
        template("hidden", "bob"),
        template("all", "bob", public=1),
    )
    put(shared, own, hidden, common)

    def found(name: str, sees: str | None, *, is_mine: bool = False) -> str:
        known = shared.find(name, sees, is_mine=is_mine)
        return "" if known is None else known.template.id

    for name in ("own", own.id, "b-own-ann"):
        assert own.id == found(name, "ann") == found(name, client_of("ann")) == found(name, None)
        assert "" == found(name, "bob") == found(name, client_of("bob"))
    for name in (hidden.name, hidden.id, "b-hidden-bob"):
        assert "" == found(name, "ann")
        assert hidden.id == found(name, "bob", is_mine=True)
    for name in (common.name, common.id, "b-all-bob"):
        assert common.id == found(name, "ann")
        assert "" == found(name, "ann", is_mine=True)
    assert sorted([own.id, common.id]) == ids(shared, "ann") == ids(shared, client_of("ann"))
    assert sorted([own.id, hidden.id, common.id]) == ids(shared, None)
    assert [common.id] == ids(shared, "eve")
    for name in ("../x", "public/x", "", "none"):
        assert "" == found(name, "ann")


def test_no_name_leads_out_of_a_clients_own_place(shared: SharedTemplates) -> None:
    """A name becomes a part of a path in the store."""
    put(shared, template("web"), template("web", "bob"))
    assert shared.find("web", "bob") is not None
    own, other = short("bob"), short("ann")
    for name in (
        f"../{other}/web",
        f"x/../../{other}/web",
        f"web/../../{other}/web",
        f"../{own}/web",
    ):
        assert shared.find(name, "bob") is None
    for name in ("web\n", "web/", "web/.", "./web", "w" * 64):
        assert shared.find(name, "bob") is None


def test_ones_own_comes_before_a_public_one_of_its_name(shared: SharedTemplates) -> None:
    put(shared, template("same", "bob", public=1), template("same"))

    for sees, owner in (("ann", "ann"), ("bob", "bob"), ("eve", "bob")):
        known = shared.find("same", sees)
        assert known is not None
        assert owner == known.template.owner


def test_what_no_tag_means_is_not_kept(
    shared: SharedTemplates, records: Store, store: SharedSnapshots
) -> None:
    one, other = template("one"), template("other", "bob")
    for owner, snapshot in (("ann", "s1"), ("ann", "s2"), ("ann", "s9"), ("bob", "s3")):
        records.templates.add(LayerRecord(owner, f"key-{snapshot}", snapshot, 1, 1.0))
    shared.put(one, [build(one, "old", "s9"), build(one, "", "s1", "s2", "s3")])
    shared.put(other, [build(other, "", "s3")])

    known = shared.find("one", "ann")
    assert known is not None
    assert ["b-one-ann"] == [each.id for each in known.builds]
    assert ["s1", "s2"] == sorted(each.snapshot for each in known.layers), "none of another owner"
    assert shared.find("old", "ann") is None
    assert {"s1", "s2", "s3"} == shared.layers("ann") == shared.layers(None)
    assert {"s3"} == shared.layers("bob")
    assert set() == shared.layers("eve")

    shared.put(replace(one, tags={}), [build(one)])
    assert shared.find("one", "ann") is None
    assert [] == store.names("templates", short("ann"))
    assert shared.find("other", "bob") is not None


def test_a_name_means_the_last_one_in_every_place(shared: SharedTemplates) -> None:
    first = template("same", public=1)
    second = replace(first, id="tpl-second", public=0)
    put(shared, first)
    assert [first.id] == ids(shared, "bob")
    put(shared, second)
    assert [] == ids(shared, "bob"), "nor the public one that it replaced"
    assert [second.id] == ids(shared, "ann")

    shared.remove(first)  # by a node that comes back
    assert [second.id] == ids(shared, "ann")
    put(shared, replace(second, public=1))
    assert [second.id] == ids(shared, "bob")
    put(shared, second)
    assert [] == ids(shared, "bob"), "no longer public"
    put(shared, replace(second, public=1))
    shared.remove(second)
    assert [] == ids(shared, "ann") == ids(shared, "bob")
    shared.remove(second)


def test_a_node_takes_over_what_it_does_not_have(shared: SharedTemplates, records: Store) -> None:
    known = template("one", public=1)
    layers = [LayerRecord("ann", f"k{i}", f"s{i}", 10, 1.0) for i in range(2)]
    for each in layers:
        records.templates.add(each)
    shared.put(known, [build(known, "", "s0", "s1")])
    stored = shared.find("one", "ann")
    assert stored is not None

    with_own = replace(layers[1], snapshot="own")
    here = Store(None)
    here.templates.add(with_own)
    node = SharedTemplates(shared._store, here.templates)
    assert known == node.adopt(stored)
    assert [known] == here.templates.every()
    assert stored.builds == here.templates.builds(known.id)
    assert {layers[0], with_own} == {LayerRecord(**vars(each)) for each in here.templates.layers()}
    here.close()

    here = Store(None)
    node = SharedTemplates(shared._store, here.templates)
    mine = node.adopt(stored, anew=True)
    assert known.id != mine.id == here.templates.every()[0].id
    assert [replace(stored.builds[0], template=mine.id)] == here.templates.builds(mine.id)
    assert replace(mine, id=known.id) == known
    here.templates.remove(mine.id)
    again = SharedTemplates(shared._store, here.templates).adopt(stored)
    assert known.id == again.id
    here.close()


def test_a_view_is_of_the_newest_build() -> None:
    known = template("one", tags={})
    none = view_of(known, [])
    assert (RESERVED, False, "", 0) == (none.status, none.is_ready, none.build_id, none.steps)
    request = '{"steps": [{"run": ["true"]}, {"user": "root"}]}'
    builds = [
        build(known, "first", size_bytes=5),
        build(known, "second", status=FAILED, error="why", step=2, request=request),
    ]
    view = view_of(replace(known, tags={"default": "first"}, public=1), builds)
    assert (FAILED, True, "second", "why") == (
        view.status,
        view.is_ready,
        view.build_id,
        view.error,
    )
    assert (2, 2, 0, True, "ann") == (
        view.step,
        view.steps,
        view.size_bytes,
        view.public,
        view.owner,
    )
    assert ({"default": "first"}, 1.0, 2.0) == (
        dict(view.tags),
        view.created_at,
        view.updated_at,
    )
