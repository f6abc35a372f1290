"""A build: each step in a sandbox over the snapshot of the one before."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from ...errors import (
    ExecError,
    InvalidRequest,
    LifecycleError,
    RingfenceError,
    SnapshotNotFound,
    TimeoutExceeded,
)
from ...images.store import ImageStore
from ...model.acquire import AcquireOptions
from ...model.base.checks import FrozenMap
from ...model.client_session import SessionTimeouts
from ...model.spec import SandboxSpec
from ...model.template import TemplateRequest, TemplateStep
from ...store.templates import BUILDING, FAILED, READY, LayerRecord
from .. import snapshots
from ..catalogue.records import spec_text
from ..keys import digest
from ..parts import Manager
from . import steps
from .places import Log, short

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ...model.session import Snapshot
    from ...store.templates import BuildRecord, TemplateRecord
    from ..lease import Lease
    from .built import Built
    from .catalogue import Templates

logger = logging.getLogger("ringfence.sessions")
LABEL = "ringfence.template"
_LONGEST_ERROR = 2000
_GRACE_S = 60.0


class Host(Manager, Protocol):
    """A session manager, as builds need it."""

    def acquire(self, spec: SandboxSpec, options: AcquireOptions, *, client_id: str) -> Lease: ...
    def snapshot(self, session: str, metadata: dict[str, str], client_id: str) -> Snapshot: ...


def client_of(owner: str) -> str:
    """The client that an owner's builds run as: the owner's own keys do not reach into them."""
    return f"template-builds-{short(owner)}"


class Build:
    """A build in a thread of its own."""

    def __init__(self, templates: Templates, template: TemplateRecord, record: BuildRecord) -> None:
        self._templates, self._manager = templates, templates.manager
        self.template, self.record, self.owner = template, record, template.owner
        self._client, self._bounds = client_of(template.owner), templates.bounds
        self._lock, self._why = threading.Lock(), ""
        self._lease: Lease | None = None
        self._thread = threading.Thread(target=self._run, name="ringfence-template", daemon=True)
        self.layers: list[str] = []
        self._needs_fonts = self._is_fresh = False
        self._over: Built | None = None  # the template that this one lies over

    def start(self) -> None:
        self._thread.start()

    def stop(self, why: str) -> None:
        """End its sandbox; the build ends with that."""
        with self._lock:
            self._why = self._why or why
            lease = self._lease
        if lease is not None:
            with suppress(RingfenceError):
                lease.release()

    def join(self) -> None:
        if self._thread is not threading.current_thread():
            self._thread.join()

    # -- in its thread --------------------------------------------------------------------------

    def _run(self) -> None:
        log = self._templates.log_of(self.record.id)
        columns: dict[str, Any] = {"status": FAILED}
        try:
            self._note(status=BUILDING, tries=self.record.tries + 1)
            columns = self._build(TemplateRequest.from_json(json.loads(self.record.request)), log)
            log.say("template ready")
        except RingfenceError as exc:
            why = exc.message if not exc.hint else f"{exc.message}; {exc.hint}"
            columns["error"] = (self._why or why)[:_LONGEST_ERROR]
        except Exception:
            logger.exception("the build of template %s failed", self.template.name)
            columns["error"] = "the server failed; its log says why"
        finally:
            try:
                if columns.get("error"):
                    log.end_lines()
                    log.say(columns["error"], "error")
                log.close()
            finally:
                self._templates.ended(self, columns)

    def _note(self, **columns: Any) -> None:
        self._templates.records.change_build(self.record.id, **columns)

    def _build(self, request: TemplateRequest, log: Log) -> dict[str, Any]:
        ends = time.monotonic() + min(request.timeout_s or 1e9, self._bounds.build_s)
        spec, key = self._base(request)
        own = spec.env
        size, self._is_fresh = 0, request.fresh
        # Nothing but the host's programs has run.
        is_clean = spec.image is None and spec.template == "default"
        for number, step in enumerate(request.steps, 1):
            log.step = number
            if step.fresh:
                self._is_fresh, step = True, replace(step, fresh=False)
            log.say(f"[{number}/{len(request.steps)}] {step.title}")
            self._note(step=number)
            self._check(ends)
            if step.kind in ("env", "workdir", "user"):
                before, spec = spec, _changed(spec, step)
                if not step.workdir or not steps.is_hidden(spec, step.workdir):
                    key = digest([key, step.to_json()])
                    continue
                # Below a mount it is not made when a sandbox starts.
                spec, step = before, TemplateStep(run=("mkdir", "-p", step.workdir))
            key = digest([key, step.to_json(), spec.network.to_json(), self._templates.index_url])
            size += self._add(
                step, key, spec, request, log, ends, is_clean and bool(step.pip_install)
            )
            spec = steps.environment(step, _changed(spec, request.steps[number - 1]))
            is_clean = False
        key = digest([key, steps.FONTS.to_json()])
        if self._needs_fonts or (self.layers and self._known(key)):
            try:
                size += self._add(steps.FONTS, key, spec, request, log, ends)
            except ExecError as exc:
                log.say(f"no list of fonts is kept: {exc.message}", "warn")
        if request.start or request.ready:
            log.say("starting the start command")
            self._note(step=len(request.steps) + 1)
            with self._sandbox(spec, request.backend, ends) as lease:
                steps.start(lease.sandbox, request, self._left(ends, steps.READY_S))
        if not self.layers and self._over is not None and self._over.snapshot is not None:
            self.layers.append(self._over.snapshot)
            self._note(layers=self.layers)
        if not request.keep_env:
            later = {name: spec.env[name] for name in spec.env.keys() - request.variables.keys()}
            spec = replace(spec, env={**own, **later})
        shown = replace(spec, network=SandboxSpec().network, template="default")
        made = {"spec": spec_text(shown), "size_bytes": size, "step": len(request.steps)}
        return {"status": READY, **made, "error": ""}

    def _add(
        self,
        step: TemplateStep,
        key: str,
        spec: SandboxSpec,
        request: TemplateRequest,
        log: Log,
        ends: float,
        has_cache: bool = False,
    ) -> int:
        """Put a step's layer on top, made where it is not known; its size."""
        with self._manager.keys.turn(self._client, key):
            layer = None if self._is_fresh else self._known(key)
            if layer is None:
                layer = self._layer(step, key, spec, request.backend, log, ends, has_cache)
            elif step is not steps.FONTS:
                log.say("cached")
        self.layers.append(layer.snapshot)
        self._note(layers=self.layers)
        return layer.size_bytes

    def _base(self, request: TemplateRequest) -> tuple[SandboxSpec, str]:
        """The spec that the build begins with, and a key of all that its first step sees."""
        spec = request.base
        if spec.template != "default":
            self._over = self._templates.resolve(spec.template, self.owner)
            if self._over is None:
                hint = "build it first; templates of the server's user are no base"
                raise InvalidRequest("not found", field="base.template", hint=hint)
            # What it means may change while this is built.
            spec = replace(self._over.merged(spec), template=self._over.build.id)
        elif spec.image is not None:
            # By its id: what the name means may change.
            spec = replace(spec, image=ImageStore().find(spec.image).id)
        python = os.path.realpath("/usr/bin/python3") if spec.image is None else ""
        seen = replace(spec, limits=SandboxSpec().limits, network=SandboxSpec().network)
        return spec, digest([seen.to_json(), request.backend, python])

    def _known(self, key: str) -> LayerRecord | None:
        records = self._templates.records
        layer = records.layer(self.owner, key)
        if layer is None:
            return None
        try:
            snapshots.need(self._manager, layer.snapshot, None)
        except SnapshotNotFound:
            records.remove_layer(layer.snapshot)
            return None
        records.touch_layer(self.owner, key, time.time())
        return layer

    def _layer(
        self,
        step: TemplateStep,
        key: str,
        spec: SandboxSpec,
        backend: str,
        log: Log,
        ends: float,
        has_cache: bool,
    ) -> LayerRecord:
        templates, index = self._templates, self._templates.index_url
        templates.check_bytes(self.owner)
        cache = templates.places.pip(self.owner) if has_cache else ""
        wanted = steps.spec_of(step, spec, index, cache)
        with self._sandbox(wanted, backend, ends) as lease:
            steps.run(
                step,
                lease.sandbox,
                log,
                self._left(ends),
                cwd=spec.workdir,
                index=index,
                upload=lambda sha256: templates.places.upload(self.owner, sha256),
                has_cache=has_cache,
            )
            self._needs_fonts = steps.needs_fonts(lease.sandbox)
            self._check(ends)
            made = self._manager.snapshot(lease.id, {LABEL: self.template.id}, self._client)
        layer = LayerRecord(self.owner, key, made.id, made.size_bytes, time.time())
        templates.put(layer)
        return layer

    def _sandbox(self, spec: SandboxSpec, backend: str, ends: float) -> _Leased:
        labels = {**spec.labels, LABEL: self.template.name}
        spec = replace(spec, labels=labels, ttl_s=self._left(ends) + _GRACE_S)
        if self.layers:
            spec = replace(spec, template="default")
        elif spec.template != "default":
            spec = replace(spec, image=None)  # the template's own
        options = AcquireOptions(
            snapshot_id=self.layers[-1] if self.layers else None,
            preferred_backend=backend,
            use_pool=False,
            timeouts=SessionTimeouts(None, None, None),
        )
        return _Leased(self, self._manager, spec, options)

    def _left(self, ends: float, most: float = 1e9) -> float:
        return max(0.001, min(most, ends - time.monotonic()))

    def _check(self, ends: float) -> None:
        if self._why:
            raise LifecycleError(self._why)
        if time.monotonic() > ends:
            raise TimeoutExceeded("the build took longer than it may")


class _Leased:
    """A build's sandbox, which `stop` finds."""

    def __init__(
        self, build: Build, manager: Host, spec: SandboxSpec, options: AcquireOptions
    ) -> None:
        self._build, self._manager, self._spec, self._options = build, manager, spec, options

    def __enter__(self) -> Lease:
        build = self._build
        lease = self._manager.acquire(self._spec, self._options, client_id=build._client)
        with build._lock:
            build._lease, why = lease, build._why
        if why:
            lease.release()
            raise LifecycleError(why)
        return lease

    def __exit__(self, *_exc: object) -> None:
        with self._build._lock:
            lease, self._build._lease = self._build._lease, None
        if lease is not None:
            lease.release()


def _changed(spec: SandboxSpec, step: TemplateStep) -> SandboxSpec:
    if step.env:
        return replace(spec, env=FrozenMap({**spec.env, **step.env}))
    if step.workdir:
        return replace(spec, workdir=step.workdir)
    return replace(spec, user=step.user) if step.kind == "user" else spec
