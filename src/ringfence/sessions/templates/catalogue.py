"""`Templates`: names, builds and layers of all clients; who may have which, and what may go."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import replace

from ...errors import (
    InvalidRequest,
    LifecycleError,
    NotFound,
    QuotaExceeded,
    RingfenceError,
    SnapshotNotFound,
)
from ...model.base.ids import new_id
from ...model.spec import SandboxSpec
from ...model.template import DEFAULT_TAG, TemplateRequest, TemplateView
from ...store.templates import (
    BUILDING,
    FAILED,
    READY,
    RESERVED,
    WAITING,
    BuildRecord,
    LayerRecord,
    TemplateRecord,
)
from .. import snapshots
from ..keys import digest
from . import steps
from .build import LABEL, Build, client_of
from .built import Built
from .places import Log, Places, Upload
from .shared import SharedTemplates, Stored, view_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from typing import Any

    from .build import Host

PREFIX = "tpl"
_MOST_BUILDS = 20  # of a template that are remembered
_MOST_TRIES = 3
_KEYS = uuid.UUID("3d0a4c1e-7f43-4a5b-9c0e-2b1f6d8a7e55")  # name space of builds with a key
logger = logging.getLogger("ringfence.sessions")


class Templates:
    """Templates of a session manager. Every method may be called from any thread."""

    def __init__(self, manager: Host) -> None:
        self.manager, self.records = manager, manager.store.templates
        self.bounds, self.places = manager.config.templates, Places(manager.store.directory)
        self.index_url = self.bounds.index_url or os.environ.get("PIP_INDEX_URL") or steps.PYPI
        self._shared = SharedTemplates(manager.shared, self.records) if manager.shared else None
        self.changed = threading.Condition()
        self._waiting: list[tuple[str, str]] = []  # ids of owner and build
        self._running: dict[str, Build] = {}
        self._listeners: set[Callable[[], object]] = set()
        self._is_closed = False

    # -- asking for builds ----------------------------------------------------------------------

    def begin(self, request: TemplateRequest, owner: str, key: str = "") -> TemplateView:
        """Build a template; it replaces the owner's of the same name once it is ready.

        Args:
            key: Asking again under the same one begins nothing.

        Raises:
            QuotaExceeded: This owner has as many templates, bytes or builds as it may.
        """
        build_id = str(uuid.uuid5(_KEYS, digest([owner, key])) if key else uuid.uuid4())
        with self.manager.keys.turn(owner, f"template {key}"):
            if (known := self.records.build(build_id)) is not None:
                return self.view(known.template)
            record, build = self.reserve(request.name, owner, [DEFAULT_TAG], build_id)
            try:
                self.start(build.id, request, owner)
            except BaseException:
                self._forget(record, build)
                raise
        if request.public != bool(record.public):
            self._change(record.id, public=int(request.public))
        return self.view(record.id)

    def _forget(self, record: TemplateRecord, build: BuildRecord) -> None:
        self.records.remove_build(build.id)
        if not self.records.builds(record.id):
            self.records.remove(record.id)

    def reserve(
        self, name: str, owner: str, tags: Sequence[str], build_id: str = ""
    ) -> tuple[TemplateRecord, BuildRecord]:
        """A build of a template that is asked for later: its steps are still to come.

        Raises:
            QuotaExceeded: This owner has as many templates as it may.
        """
        self.manager.check_open()
        now = time.time()
        with self.manager.keys.turn(owner, "templates"):
            mine = self.records.every(owner)
            found = next((each for each in mine if each.name == name), None)
            if found is None and self._shared is not None:
                stored = self._shared.find(name, owner, is_mine=True)
                found = None if stored is None else self._shared.adopt(stored, anew=True)
            if found is None:
                if len(mine) >= self.bounds.templates:
                    raise QuotaExceeded(
                        f"this client has {len(mine)} templates, of at most {self.bounds.templates}",
                        field="name",
                        hint="delete one, or ask an admin to raise `manager.templates.templates`",
                    )
                found = TemplateRecord(new_id(PREFIX), owner, name, 0, {}, now, now)
                self.records.add(found)
            build = BuildRecord(
                build_id or str(uuid.uuid4()), found.id, RESERVED, "{}", [*tags], now
            )
            self.records.add(build)
        self._forget_old(found)
        return found, build

    def start(self, build_id: str, request: TemplateRequest, owner: str) -> None:
        """Have a reserved build begin when it is its turn.

        Raises:
            QuotaExceeded: This owner has as many builds waiting, or as many bytes, as it may.
            LifecycleError: It was started already.
        """
        self.check_bytes(owner, {step.copy for step in request.steps if step.copy})
        for i, step in enumerate(request.steps):
            if step.copy:
                try:
                    self.places.upload(owner, step.copy)
                except RingfenceError as exc:
                    raise InvalidRequest(
                        exc.message, field=f"steps[{i}].copy", hint=exc.hint
                    ) from None
        with self.changed:
            if self._is_closed:
                raise LifecycleError("the server is ending")
            waiting = sum(each == owner for each, _ in self._waiting)
            if waiting >= self.bounds.waiting_of_client:
                raise QuotaExceeded(
                    f"{waiting} builds of this client wait for their turn", hint="try again later"
                )
            record = self.records.build(build_id)
            if record is None or record.status != RESERVED:
                raise LifecycleError(f"build {build_id} was started already")
            self.records.change_build(
                build_id, status=WAITING, request=json.dumps(request.to_json())
            )
            self._waiting.append((owner, build_id))
            self._next()

    def refuse(self, build_id: str, step: int, why: str) -> None:
        """End a reserved build whose steps ask for what cannot be had.

        Args:
            step: Number of the step; 0 for what the build begins with.

        Raises:
            LifecycleError: It was started already.
        """
        with self.changed:
            record = self.records.build(build_id)
            if record is None or record.status != RESERVED:
                raise LifecycleError(f"build {build_id} was started already")
            ended = {"status": FAILED, "step": step, "error": why, "ended_at": time.time()}
            self.records.change_build(build_id, **ended)
        log = self.log_of(build_id)
        log.step = step
        log.say(why, "error")
        log.close()

    def check_bytes(self, owner: str, copies: Collection[str] = ()) -> None:
        """Free what an owner's templates do not need, where they are too large.

        Args:
            copies: Uploads that a build needs which is not written down yet.

        Raises:
            QuotaExceeded: All of it is needed.
        """
        if self.used_bytes(owner) < self.bounds.bytes:
            return
        self.collect(owner, keep_s=0.0, copies=copies)
        if (used := self.used_bytes(owner)) >= self.bounds.bytes:
            raise QuotaExceeded(
                f"this client's templates take up {used} bytes, of at most {self.bounds.bytes}",
                field="bytes",
                hint="delete one, or ask an admin to raise `manager.templates.bytes`",
            )

    def used_bytes(self, owner: str) -> int:
        layers = {each.snapshot: each.size_bytes for each in self.records.layers(owner)}
        return sum(layers.values()) + self.places.uploaded_bytes(owner)

    def upload(self, owner: str) -> Upload:
        def left() -> int:
            return self.bounds.bytes - self.used_bytes(owner)

        return Upload(self.places, owner, self.bounds.upload_bytes, left)

    # -- running them ---------------------------------------------------------------------------

    def _next(self) -> None:
        """Start what may be started. `changed` is held."""
        if self._is_closed:
            return
        for entry in [*self._waiting]:
            owner, build_id = entry
            mine = sum(each.owner == owner for each in self._running.values())
            if len(self._running) >= self.bounds.builds:
                return
            if mine >= self.bounds.builds_of_client:
                continue
            self._waiting.remove(entry)
            record = self.records.build(build_id)
            template = self.records.get(record.template) if record else None
            if record is not None and template is not None:
                build = self._running[build_id] = Build(self, template, record)
                build.start()

    def ended(self, build: Build, columns: dict[str, Any]) -> None:
        """Write down how a build ended; what comes of it is the template from now on."""
        now, record = time.time(), build.record
        with self.changed:
            is_left = self._is_closed and columns["status"] == FAILED  # for the next start
        try:
            if not is_left:
                template = self.records.get(record.template)
                if columns["status"] == READY and template is not None:
                    tags = {**template.tags, **dict.fromkeys(record.tags, record.id)}
                    template = replace(template, tags=tags, updated_at=now)
                    ended = replace(record, ended_at=now, layers=build.layers, **columns)
                    columns = self._shown(template, ended, columns)
                with self.manager.store.together():
                    self.records.change_build(record.id, ended_at=now, **columns)
                    if columns["status"] == READY and template is not None:
                        self.records.change(template.id, tags=template.tags, updated_at=now)
                self.collect(build.owner)
        except RingfenceError as exc:
            # The next start finds the build unended.
            logger.error("the end of the build %s was not stored: %s", record.id, exc)
        finally:
            with self.changed:
                self._running.pop(record.id, None)
                self._next()
            self._wake()

    def _shown(
        self, template: TemplateRecord, ended: BuildRecord, columns: dict[str, Any]
    ) -> dict[str, Any]:
        """Show a build to other nodes before anybody is told that it is ready; how it ended."""
        builds = [each for each in self.records.builds(template.id) if each.id != ended.id]
        try:
            if self._shared is not None:
                self._shared.put(template, [*builds, ended])
        except RingfenceError as exc:
            return {"status": FAILED, "error": exc.message}
        return columns

    def _change(self, template_id: str, **columns: Any) -> None:
        """Change a template, here and for other nodes."""
        with self.manager.keys.turn("", f"template {template_id}"):
            template = self.records.get(template_id)
            if template is not None and self._shared is not None:
                changed = replace(template, **columns)
                self._shared.put(changed, self.records.builds(template_id))
            self.records.change(template_id, **columns)

    def log_of(self, build_id: str) -> Log:
        return Log(self.places.log(build_id), self.bounds.output_bytes, self._wake)

    def _wake(self) -> None:
        with self.changed:
            self.changed.notify_all()
            for each in self._listeners:
                each()

    def listen(self, wake: Callable[[], object]) -> Callable[[], None]:
        """Have `wake` called with each line of a log and each end of a build; returns what stops that."""
        with self.changed:
            self._listeners.add(wake)

        def stop() -> None:
            with self.changed:
                self._listeners.discard(wake)

        return stop

    def recover(self) -> None:
        """Go on with builds that the end of an earlier manager broke off; remove what was half made."""
        for live in self.manager.index.all():
            if LABEL in live.spec.labels and live.client_id.startswith("template-builds-"):
                self.manager.end(live, "restart")
        for record in self.records.unended():
            template = self.records.get(record.template)
            if record.tries >= _MOST_TRIES or template is None:
                why = f"the server ended {record.tries} times in the middle of this build"
                self.records.change_build(record.id, status=FAILED, error=why, ended_at=time.time())
            else:
                self.records.change_build(record.id, status=WAITING)
                self._waiting.append((template.owner, record.id))
        self._collect_orphans()
        with self.changed:
            self._next()

    def close(self) -> None:
        """End builds; the next manager of the same state directory goes on with them."""
        with self.changed:
            self._is_closed = True
            running = [*self._running.values()]
        for build in running:
            build.stop("the server is ending")
        for build in running:
            build.join()

    def remove_places(self) -> None:
        """Remove files that no state directory keeps. Precondition: `close`."""
        self.places.close()

    # -- looking --------------------------------------------------------------------------------

    def view(self, template_id: str) -> TemplateView:
        record = self.records.get(template_id)
        if record is None:
            raise _missing(template_id)
        return view_of(record, self.records.builds(template_id))

    def find(self, any_name: str, sees: str | None, *, is_mine: bool = False) -> TemplateRecord:
        """A template by id or name: one's own, else a public one.

        Args:
            sees: Whose; None finds everything.
            is_mine: Only one's own.

        Raises:
            NotFound: There is none, or it is another client's: the message is the same.
            InvalidRequest: Of everything several have this name.
        """
        found = [*self.records.named(any_name), self.records.get(any_name)]
        every = [each for each in found if each is not None]
        # A build's sandboxes are a client's of its own; it starts from what its owner may.
        mine = [each for each in every if sees in (None, each.owner, client_of(each.owner))]
        others = [] if is_mine else [each for each in every if each.public]
        if sees is None:
            mine = _only(any_name, mine)
        if not mine and not others:
            # A gateway sends what changes one here if this node is in the place of a lost one.
            if (
                is_mine
                and self._shared
                and (stored := self._shared.find(any_name, sees, is_mine=True))
            ):
                return self._shared.adopt(stored)
            raise _missing(any_name)
        return (mine or others)[0]

    def look(self, any_name: str, sees: str | None) -> TemplateView:
        """A template as `find` finds it, also one of another node.

        Raises:
            NotFound: There is none, or it is another client's.
        """
        try:
            return self.view(self.find(any_name, sees).id)
        except NotFound:
            stored = self._shared.find(any_name, sees) if self._shared else None
            if stored is None:
                raise
            return stored.view()

    def list(self, sees: str | None) -> list[TemplateView]:
        """List a client's own templates and public ones, oldest first; also those of other nodes."""
        return [view_of(template, builds) for template, builds in self.every(sees)]

    def every(self, sees: str | None) -> Sequence[tuple[TemplateRecord, Sequence[BuildRecord]]]:
        """List templates as `list`, with their builds; of other nodes, those that tags mean."""
        found: dict[str, tuple[TemplateRecord, Sequence[BuildRecord]]] = {
            each.id: (each, self.records.builds(each.id))
            for each in self.records.every()
            if sees in (None, each.owner) or each.public
        }
        for stored in self._shared.every(sees) if self._shared else ():
            found.setdefault(stored.template.id, (stored.template, stored.builds))
        return [found[each] for each in sorted(found)]

    def build_of(self, template: TemplateRecord, build_id: str = "") -> BuildRecord:
        """A build of a template; the newest without an id.

        Raises:
            NotFound: It has none of that id.
        """
        builds = self.records.builds(template.id)
        for each in reversed(builds):
            if build_id in ("", each.id):
                return each
        raise NotFound(f"no build {build_id!r} of template {template.name!r}", field="build_id")

    def resolve(self, name: str, client: str | None, tag: str = DEFAULT_TAG) -> Built | None:
        """Return the meaning of a name, or id, of a template or build for a client; None: nothing.

        Raises:
            LifecycleError: It was not built yet.
        """
        build = self.records.build(name)
        stored: Stored | None = None
        try:
            template = self.find(build.template if build else name, client)
        except NotFound:
            stored = self._shared.find(name, client) if self._shared else None
            if stored is None:
                return None
            template = stored.template
        builds = stored.builds if stored else self.records.builds(template.id)
        known = {each.id: each for each in builds}
        build = known.get(name)
        if build is None:
            # A name without a tag means the newest build where none has the default tag.
            meant = [template.tags[tag]] if tag in template.tags else []
            meant = meant or ([*template.tags.values()] if tag == DEFAULT_TAG else [])
            if not meant and tag != DEFAULT_TAG:
                return None
            build = known.get(meant[-1]) if meant else None
        if build is None or build.status != READY:
            newest = self.view(template.id)
            why = f"template {template.name!r} is not built: {newest.status}"
            raise LifecycleError(why, hint=newest.error or "wait until its status is `ready`")
        return Built(
            template,
            build,
            build.layers[-1] if build.layers else None,
            SandboxSpec.from_json(json.loads(build.spec)),
            TemplateRequest.from_json(json.loads(build.request)),
        )

    # -- removing -------------------------------------------------------------------------------

    def delete(self, any_name: str, sees: str | None) -> None:
        """Remove a template with its builds, and the layers that no other one needs.

        Raises:
            NotFound: There is none, or it is another client's.
        """
        template = self.find(any_name, sees, is_mine=True)
        builds = self.records.builds(template.id)
        ids = {each.id for each in builds}
        with self.changed:
            self._waiting = [each for each in self._waiting if each[1] not in ids]
            running = [each for key, each in self._running.items() if key in ids]
        for build in running:
            build.stop("the template was deleted")
        for build in running:
            build.join()
        own = {each for build in self.records.builds(template.id) for each in build.layers}
        own &= {each.snapshot for each in self.records.layers(template.owner)}
        if self._shared is not None:
            self._shared.remove(template)
        self.records.remove(template.id)
        for build_id in ids:
            self.places.remove_log(build_id)
        for snapshot in own - self._needed(template.owner):
            self._remove_layer(snapshot)

    def publish(self, any_name: str, *, public: bool, sees: str | None) -> TemplateView:
        """Let every client use a template, or its owner alone."""
        template = self.find(any_name, sees, is_mine=True)
        self._change(template.id, public=int(public))
        return self.view(template.id)

    def tag(self, template: TemplateRecord, build_id: str, tags: Sequence[str]) -> None:
        """Let tags mean a build that is ready; with an empty id, nothing."""
        left = {key: value for key, value in template.tags.items() if key not in tags}
        more = dict.fromkeys(tags, build_id) if build_id else {}
        self._change(template.id, tags={**left, **more}, updated_at=time.time())

    def _forget_old(self, template: TemplateRecord) -> None:
        """Forget builds of a template that are many and that nothing means any more."""
        builds = self.records.builds(template.id)
        for each in builds[:-_MOST_BUILDS]:
            if each.status not in (WAITING, BUILDING) and each.id not in template.tags.values():
                self.records.remove_build(each.id)
                self.places.remove_log(each.id)

    def _needed(self, owner: str | None) -> set[str]:
        """The layers of builds that a tag means, also on other nodes, and of those that have not ended."""
        needed = self._shared.layers(owner) if self._shared else set()
        for template in self.records.every(owner):
            for build in self.records.builds(template.id):
                if build.id in template.tags.values() or build.status in (WAITING, BUILDING):
                    needed.update(build.layers)
        with self.changed:
            for running in self._running.values():
                needed.update(running.layers)
        return needed

    def collect(
        self, owner: str, keep_s: float | None = None, copies: Collection[str] = ()
    ) -> None:
        """Remove an owner's layers that nothing needs and that were not used for long."""
        needed, oldest = (
            self._needed(owner),
            time.time() - (self.bounds.keep_s if keep_s is None else keep_s),
        )
        for layer in self.records.layers(owner):
            if layer.snapshot not in needed and layer.used_at <= oldest:
                self._remove_layer(layer.snapshot)
        uploads = {
            step.copy
            for record in self.records.unended()
            for step in TemplateRequest.from_json(json.loads(record.request)).steps
        }
        uploads.update(copies)
        self.places.tidy(self.bounds.keep_s, uploads)
        if keep_s is not None:  # of others nothing goes for one who needs room
            self.places.tidy(keep_s, uploads, owner)

    def put(self, layer: LayerRecord) -> None:
        """Write a layer down; one of the same key goes, unless a build needs it."""
        old = self.records.layer(layer.owner, layer.key)
        self.records.add(layer)
        if old is not None and old.snapshot not in self._needed(layer.owner):
            self._remove_layer(old.snapshot)

    def _collect_orphans(self) -> None:
        """Remove snapshots of builds that were killed before they were written down as layers."""
        # A layer that was made anew under its key is still part of earlier builds.
        known = {each.snapshot for each in self.records.layers()} | self._needed(None)
        for record in self.manager.store.snapshots():
            if record.owner.startswith("template-builds-") and record.id not in known:
                self._remove_layer(record.id)

    def _remove_layer(self, snapshot: str) -> None:
        self.records.remove_layer(snapshot)
        with suppress(SnapshotNotFound):
            snapshots.delete(self.manager, snapshot, None)


def _only(any_name: str, found: list[TemplateRecord]) -> list[TemplateRecord]:
    """The template of this id, else the only one of this name."""
    of_id = [each for each in found if each.id == any_name]
    if len(found) > 1 and not of_id:
        raise InvalidRequest(
            f"{len(found)} clients have a template named {any_name!r}",
            field="template",
            hint="give its id: " + ", ".join(f"{each.id} is {each.owner}'s" for each in found[:5]),
        )
    return of_id or found


def _missing(name: str) -> NotFound:
    return NotFound(f"no template {name!r}", hint="list templates with GET /v1/templates")
