"""Templates in the cluster's store: any node makes sandboxes from them, also when their own is lost.

The layers are there as snapshots. `templates/OWNER/NAME` is a form with the records of a template and
of the builds that its tags mean; of a public one, `templates/public/ID` is the same.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, replace

from ...model.base.checks import FrozenMap
from ...model.base.ids import new_id
from ...model.template import TemplateView
from ...store.templates import RESERVED, BuildRecord, LayerRecord, TemplateRecord
from .places import short

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from ...snapshots.shared import SharedSnapshots
    from ...store.templates import TemplateRecords

_PLACE, _PUBLIC = "templates", "public"
_BUILDER = re.compile("template-builds-([0-9a-f]{32})")
_NAME = re.compile("[a-z0-9_][a-z0-9_.-]{0,62}")


@dataclass(frozen=True)
class Stored:
    """A template as it is in the store."""

    template: TemplateRecord
    builds: list[BuildRecord]
    layers: list[LayerRecord]

    def means(self, name: str) -> bool:
        """Return whether a name, or an id of a template or build, means it."""
        return name in (self.template.name, self.template.id, *(each.id for each in self.builds))

    def view(self) -> TemplateView:
        return view_of(self.template, self.builds)


class SharedTemplates:
    """The templates in a store. Its methods block, and raise `IoError` where the store does not answer."""

    def __init__(self, store: SharedSnapshots, records: TemplateRecords) -> None:
        self._store, self._records = store, records

    def put(self, template: TemplateRecord, builds: Sequence[BuildRecord]) -> None:
        """Write down what a template means now, in place of what its name meant before."""
        meant = [each for each in builds if each.id in template.tags.values()]
        if not meant:
            self.remove(template)
            return
        needed = {snapshot for each in meant for snapshot in each.layers}
        layers = [e for e in self._records.layers(template.owner) if e.snapshot in needed]
        form = {
            "template": asdict(template),
            "builds": [asdict(each) for each in meant],
            "layers": [asdict(each) for each in layers],
        }
        before = self._read(short(template.owner), template.name)
        self._store.write(form, _PLACE, short(template.owner), template.name)
        if before is not None and before.template.id != template.id:
            self._store.forget(_PLACE, _PUBLIC, before.template.id)
        if template.public:
            self._store.write(form, _PLACE, _PUBLIC, template.id)
        else:
            self._store.forget(_PLACE, _PUBLIC, template.id)

    def remove(self, template: TemplateRecord) -> None:
        """Remove a template, unless its name means another one by now."""
        known = self._read(short(template.owner), template.name)
        if known is not None and known.template.id == template.id:
            self._store.forget(_PLACE, short(template.owner), template.name)
        self._store.forget(_PLACE, _PUBLIC, template.id)

    def find(self, name: str, sees: str | None, *, is_mine: bool = False) -> Stored | None:
        """Find a template by its name or id, or by that of a build: one's own, else a public one.

        Args:
            sees: Whose; None finds everything.
            is_mine: Only one's own.
        """
        if not _NAME.fullmatch(name):  # it becomes a part of a path
            return None
        for place in self._places(sees, is_mine=is_mine):
            # Names are most of what is asked for, and found without reading others.
            known = self._read(place, name) if place != _PUBLIC else None
            if known is not None:
                return known
            for each in self._all(place):
                if each.means(name):
                    return each
        return None

    def every(self, sees: str | None) -> list[Stored]:
        """List a client's own templates and public ones."""
        found = {e.template.id: e for place in self._places(sees) for e in self._all(place)}
        return [*found.values()]

    def layers(self, owner: str | None) -> set[str]:
        """The ids of all layers that templates of an owner need; None: of every owner."""
        stored = (e for place in self._places(owner, is_mine=True) for e in self._all(place))
        return {layer for each in stored for build in each.builds for layer in build.layers}

    def adopt(self, stored: Stored, *, anew: bool = False) -> TemplateRecord:
        """Take a template over, whose node is lost.

        Args:
            anew: Under an id of this node; its node may live, and drain.
        """
        template = stored.template
        template = replace(template, id=new_id("tpl")) if anew else template
        for layer in stored.layers:
            if self._records.layer(layer.owner, layer.key) is None:
                self._records.add(layer)
        self._records.add(template)
        for build in stored.builds:
            if self._records.build(build.id) is None:
                self._records.add(replace(build, template=template.id))
        return template

    def _places(self, sees: str | None, *, is_mine: bool = False) -> list[str]:
        if sees is None:
            return [each for each in self._store.names(_PLACE) if each != _PUBLIC]
        built = _BUILDER.fullmatch(sees)
        own = built[1] if built else short(sees)
        return [own] if is_mine else [own, _PUBLIC]

    def _all(self, place: str) -> Iterator[Stored]:
        for name in self._store.names(_PLACE, place):
            if (found := self._read(place, name)) is not None:
                yield found

    def _read(self, place: str, name: str) -> Stored | None:
        form: dict[str, Any] | None = self._store.read(_PLACE, place, name)
        if form is None:
            return None
        return Stored(
            TemplateRecord(**form["template"]),
            [BuildRecord(**each) for each in form["builds"]],
            [LayerRecord(**each) for each in form["layers"]],
        )


def view_of(record: TemplateRecord, builds: Sequence[BuildRecord]) -> TemplateView:
    newest = builds[-1] if builds else BuildRecord("", record.id, RESERVED, "{}", [], 0.0)
    return TemplateView(
        id=record.id,
        name=record.name,
        owner=record.owner,
        public=bool(record.public),
        status=newest.status,
        is_ready=bool(record.tags),
        build_id=newest.id,
        step=newest.step,
        steps=len(json.loads(newest.request).get("steps", ())),
        error=newest.error,
        size_bytes=newest.size_bytes,
        created_at=record.created_at,
        updated_at=record.updated_at,
        tags=FrozenMap(record.tags),
    )


__all__ = ["SharedTemplates", "Stored", "view_of"]
