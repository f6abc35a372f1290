"""The tables of templates on a real file: whose rows each method finds and changes, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringfence.errors import IoError
from ringfence.store.store import Store
from ringfence.store.templates import (
    BUILDING,
    FAILED,
    READY,
    RESERVED,
    WAITING,
    BuildRecord,
    LayerRecord,
    TemplateRecord,
    TemplateRecords,
)

pytestmark = pytest.mark.anyone

TIME = 1000.0


@pytest.fixture
def templates(tmp_path: Path) -> Iterator[TemplateRecords]:
    opened = Store(str(tmp_path / "state"))
    yield opened.templates
    opened.close()


def _template(name: str, owner: str = "ann", called: str = "") -> TemplateRecord:
    return TemplateRecord(name, owner, called or f"name-{name}", 0, {"default": "b"}, TIME, TIME)


def _build(name: str, template: str = "1", status: str = READY, at: float = TIME) -> BuildRecord:
    return BuildRecord(name, template, status, "{}", ["default"], at)


def _layer(owner: str, key: str, snapshot: str, used_at: float = TIME) -> LayerRecord:
    return LayerRecord(owner, key, snapshot, 7, used_at)


def test_templates_are_found_by_owner_and_by_name(templates: TemplateRecords) -> None:
    two, one, hers = _template("2"), _template("1"), _template("3", "bob", "name-1")
    for each in (two, hers, one):
        templates.add(each)

    assert ([one, two, hers], [one, two], []) == tuple(
        templates.every(owner) for owner in (None, "ann", "eve")
    )
    assert [one, hers] == templates.named("name-1")
    with pytest.raises(IoError, match="UNIQUE"):
        templates.add(_template("4", called="name-1"))
    with pytest.raises(IoError, match="UNIQUE"):
        templates.add(replace(one, name="other"))
    assert (one, None) == (templates.get("1"), templates.get("4"))

    templates.change("1", public=1, tags={"default": "c", "v1": "b"}, updated_at=TIME + 1)
    changed = replace(one, public=1, tags={"default": "c", "v1": "b"}, updated_at=TIME + 1)
    assert [changed, two, hers] == templates.every()


def test_builds_are_of_their_template_and_go_with_it(templates: TemplateRecords) -> None:
    for name in ("1", "2"):
        templates.add(_template(name))
    late, early, same = _build("a", at=TIME + 1), _build("c"), _build("b")
    other = _build("d", "2")
    for build in (late, early, same, other):
        templates.add(build)

    assert [same, early, late] == templates.builds("1")
    whole: dict[str, Any] = {
        "layers": ["snap-1", "snap-2"],
        "tags": ["v1"],
        "tries": 2,
        "size_bytes": 9,
    }
    templates.change_build("c", status=FAILED, error="why", ended_at=TIME + 2, **whole)
    changed = replace(early, status=FAILED, error="why", ended_at=TIME + 2, **whole)
    assert [same, changed, late] == templates.builds("1")
    templates.remove_build("b")
    assert [changed, late] == templates.builds("1")

    templates.remove("1")
    assert ([], None, None) == (templates.builds("1"), templates.build("a"), templates.get("1"))
    assert (other, [_template("2")]) == (templates.build("d"), templates.every())


def test_builds_that_were_asked_for_are_taken_up_in_their_order(templates: TemplateRecords) -> None:
    templates.add(_template("1"))
    states = (BUILDING, READY, WAITING, RESERVED, FAILED, WAITING)
    for number, status in enumerate(states):
        templates.add(_build(f"b{number}", status=status, at=TIME - number))

    assert ["b5", "b2", "b0"] == [each.id for each in templates.unended()]
    assert {BUILDING: 1, READY: 1, WAITING: 2, RESERVED: 1, FAILED: 1} == templates.counts()


def test_a_layer_is_its_owners_and_the_longest_unused_is_first(templates: TemplateRecords) -> None:
    new, old = _layer("ann", "k", "snap-1", TIME + 1), _layer("ann", "old", "snap-2")
    hers = _layer("bob", "k", "snap-3", TIME + 2)
    for each in (hers, new, old):
        templates.add(each)

    assert (new, hers, None) == tuple(
        templates.layer(owner, "k") for owner in ("ann", "bob", "eve")
    )
    assert ([old, new, hers], [old, new]) == (templates.layers(), templates.layers("ann"))
    templates.touch_layer("ann", "old", TIME + 3)
    assert ["snap-1", "snap-3", "snap-2"] == [each.snapshot for each in templates.layers()]
    templates.touch_layer("ann", "k", TIME + 4)
    assert hers == templates.layer("bob", "k"), "the same key of another owner"

    anew = _layer("ann", "k", "snap-4", TIME + 5)
    templates.add(anew)
    assert (anew, hers) == (templates.layer("ann", "k"), templates.layer("bob", "k"))
    templates.remove_layer("snap-2")
    templates.remove_layer("snap-1")
    assert [hers, anew] == templates.layers()
