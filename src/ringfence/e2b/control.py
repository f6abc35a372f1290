"""E2B's API of sandboxes and snapshots: REST, JSON, times as RFC 3339."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl, unquote

from starlette.responses import JSONResponse, Response

from ..api.routes.forks import hold_cells
from ..api.streaming.runs import Signal
from ..api.thread_pools import COPIES, ENDING
from ..errors import RingfenceError, SnapshotNotFound
from ..execs.live_forks import LiveForks
from ..model.client_session import SUSPEND, SessionState
from ..model.session import Snapshot
from ..model.spec import SandboxSpec
from ..sessions.catalogue.describe import describe_live
from ..sessions.live import Live
from . import lists, lives, network, template_steps, templates
from .call import ApiError, Call, Route
from .codec import field, timestamp
from .metering import sizes
from .notes import TEAM, Notes, notes_of, own_metadata, write_files
from .processes import note_copies

ENVD_VERSION = "0.6.4"
"""Decides what the SDK dares to ask for."""
_CLIENT = "ringfence"
_MOST_FORKS = 100
_LONGEST_NAME = 128  # of a snapshot
_CLOCK_SET_S = 0.5  # more than clocks drift apart: somebody has set one
_REFUSED = {
    "volumeMounts": "volumes are not supported by Ringfence: mount a directory by a template",
    "mcp": "the MCP gateway is not supported by Ringfence: run your MCP servers as commands",
    "iam": "workload identity is not supported by Ringfence: use network rules with credentials",
}


async def create(call: Call) -> Response:
    """Create a sandbox from a template, or from a snapshot by its id or name."""
    form = await call.form()
    for name, why in _REFUSED.items():
        if form.get(name):
            raise ApiError(501, why)
    template = field(form, "templateID", str, "base")
    timeout = lives.timeout_of(call, form)
    auto_resume = field(field(form, "autoResume", dict, {}), "enabled", bool, False)
    asked = field(form, "network", dict, {})
    notes = Notes(
        template=template,
        key=call.caller.key_id,
        auto_resume=auto_resume,
        keeps_memory=field(form, "autoPauseMemory", bool, True),
        is_public=field(asked, "allowPublicTraffic", bool, True),
        host_mask=network.host_mask(asked),
        https_ports=network.https_ports(asked),
        internet=field(form, "allow_internet_access", bool),
    )
    metadata = _texts(form, "metadata")
    env = _texts(form, "envVars")

    def make() -> Live:
        spec, snapshot_id = _spec_of(call, template)
        policy = network.policy_of(asked, notes.internet, call.shared.settings.internet, spec)
        spec = replace(spec, env={**spec.env, **env}, network=policy)
        return lives.create(
            call.service,
            call.caller,
            spec,
            notes,
            metadata,
            timeout_s=timeout,
            auto_pause=field(form, "autoPause", bool, False),
            snapshot_id=snapshot_id,
            key=call.request.headers.get("idempotency-key", "")[:255],
        )

    live = await call.call(make)
    call.shared.meter.begin()
    call.shared.introduce(live)
    return JSONResponse(_opened(call, live), 201)


def _texts(form: dict[str, Any], name: str) -> dict[str, str]:
    found = field(form, name, dict, {})
    if not all(isinstance(each, str) for each in found.values()):
        raise ApiError(400, f"{name}: every value must be a string")
    return {str(key): value for key, value in found.items()}


def _spec_of(call: Call, template: str) -> tuple[SandboxSpec, str | None]:
    spec = call.shared.settings.spec_of(template)
    if spec is not None:
        return spec, None
    if (built := template_steps.resolve(call, template)) is not None:
        return template_steps.spec_of(built), None
    found = _snapshot(call, template)
    if found is None:
        raise ApiError(404, f"template '{template}' not found")
    return lives.restored(call.service, call.caller, found.id), found.id


async def list_(call: Call) -> Response:
    """List sandboxes, newest first, page by page."""
    query = call.request.query_params
    states = set(query.get("state", "running,paused").split(","))
    # The SDKs quote names and values before they make a query of them.
    pairs = parse_qsl(query.get("metadata", ""), keep_blank_values=True)
    wanted = {unquote(key): unquote(value) for key, value in pairs}
    found = [
        live
        for live in call.service.manager.index.all()
        if call.caller.sees in (None, live.client_id)
        and _state(live) in states
        and all(live.metadata.get(key) == value for key, value in wanted.items())
    ]
    if text := query.get("startedAfter"):
        found = lists.started_after(text, found)
    if template := query.get("template"):
        found = await call.call(lists.of_template, call, template, found)
    found.sort(key=lambda live: live.id, reverse=query.get("order", "desc") != "asc")
    page, headers = lists.page(
        call, [(live.id, live) for live in found], query.get("order") != "asc"
    )
    return JSONResponse([_listed(call, live) for live in page], headers=headers)


def _state(live: Live) -> str:
    return "paused" if live.state == SessionState.SUSPENDED else "running"


def _domain(call: Call) -> str | None:
    """The domain, at the port at which the client has reached its API: an ordinary user has no 443."""
    domain = call.shared.settings.domain
    host, _, port = call.request.headers.get("host", "").partition(":")
    has_port = domain and port.isdecimal() and host.lower() == f"api.{domain}"
    return f"{domain}:{port}" if has_port else domain or None


def _opened(call: Call, live: Live) -> dict[str, Any]:
    """Describe a sandbox to the client that is to work with it."""
    tokens, notes = call.shared.tokens, notes_of(live.metadata)
    return {
        "sandboxID": live.sandbox_id,
        "templateID": notes.template,
        "alias": notes.template,
        "clientID": _CLIENT,
        "envdVersion": ENVD_VERSION,
        "envdAccessToken": tokens.of(live),
        "trafficAccessToken": tokens.of_traffic(live),
        "domain": _domain(call),
    }


def _listed(call: Call, live: Live) -> dict[str, Any]:
    notes, limits = notes_of(live.metadata), describe_live(live).limits
    return {
        "sandboxID": live.sandbox_id,
        "templateID": notes.template,
        "alias": notes.template,
        "clientID": _CLIENT,
        "startedAt": timestamp(live.created_at),
        "endAt": timestamp(_wall(call, live.expires)),
        **sizes(limits.to_json()),
        "metadata": own_metadata(live.metadata),
        "state": _state(live),
        "envdVersion": ENVD_VERSION,
    }


def _wall(call: Call, moment: float | None) -> float:
    """The wall time of a deadline, the same each time that it is asked for."""
    ahead_s = call.shared.ahead_s
    if abs(call.service.manager.clock.ahead_s - ahead_s) > _CLOCK_SET_S:
        ahead_s = call.shared.ahead_s = call.service.manager.clock.ahead_s
    return time.time() // 86_400 * 86_400 + 366 * 86_400 if moment is None else moment + ahead_s


def _detail(call: Call, live: Live) -> dict[str, Any]:
    notes = notes_of(live.metadata)
    form = {
        **_listed(call, live),
        "domain": _domain(call),
        "allowInternetAccess": notes.internet,
        "network": network.shown(live, notes),
        "lifecycle": {
            "onTimeout": "pause" if live.timeouts.on_expiry == SUSPEND else "kill",
            "autoResume": notes.auto_resume,
        },
    }
    if call.caller.scope != "read_only":
        form["envdAccessToken"] = call.shared.tokens.of(live)
    return form


def _live(call: Call) -> Live:
    sandbox_id = call.params["sandbox_id"]
    live = call.service.manager.index.find(sandbox_id, call.caller.sees)
    if live is None:
        raise ApiError(404, f"sandbox '{sandbox_id}' not found")
    return live


async def get(call: Call) -> Response:
    return JSONResponse(_detail(call, _live(call)))


async def kill(call: Call) -> Response:
    """End a sandbox, running or paused."""
    live = _live(call)
    call_, manager = call.service.thread_pools.call, call.service.manager
    await call_(manager.terminate, live.id, key=live.sandbox_id, pool=ENDING)
    return Response(status_code=204)


async def set_timeout(call: Call) -> Response:
    """Let a sandbox end so many seconds from now."""
    live, timeout = _live(call), lives.timeout_of(call, await call.form(), None)
    manager = call.service.manager
    await call.call(manager.extend, live.id, max(0.001, timeout))
    return Response(status_code=204)


async def connect(call: Call) -> Response:
    """Resume a sandbox if it is paused; its deadline is never brought closer."""
    live = _live(call)
    was_paused = await _wake(call, live)
    return JSONResponse(_opened(call, live), 201 if was_paused else 200)


async def resume(call: Call) -> Response:
    """Resume a paused sandbox, as older SDKs ask for it."""
    live = _live(call)
    if live.state != SessionState.SUSPENDED:
        raise ApiError(409, f"sandbox '{live.sandbox_id}' is already running")
    await _wake(call, live)
    return JSONResponse(_opened(call, live), 201)


async def _wake(call: Call, live: Live) -> bool:
    form = await call.form()
    timeout, manager = float(lives.timeout_of(call, form)), call.service.manager
    keeps_memory, execs = field(form, "memory", bool, True), call.shared.execs
    woken: bool = await call.call(
        lives.wake, manager, execs, live, timeout, keeps_memory=keeps_memory
    )
    return woken


async def pause(call: Call) -> Response:
    """Freeze a sandbox; its id stays."""
    live, form = _live(call), await call.form()
    keeps_memory = field(form, "memory", bool, True)
    manager, execs = call.service.manager, call.shared.execs
    if not await call.call(lives.pause, manager, execs, live, keeps_memory=keeps_memory):
        raise ApiError(409, f"sandbox '{live.sandbox_id}' is already paused")
    return Response(status_code=204)


async def metrics(call: Call) -> Response:
    """Return what a sandbox used, sampled every five seconds."""
    live, query = _live(call), call.request.query_params
    times = [query.get("start", "0"), query.get("end", "")]
    if not all(each.isdecimal() and len(each) < 12 for each in times if each):
        raise ApiError(400, "start, end: must be seconds since 1970")
    start, end = int(times[0] or 0), int(times[1]) + 1 if times[1] else time.time() + 60
    return JSONResponse(await call.shared.meter.points(live, start, end))


# -- snapshots -------------------------------------------------------------------------------------


def _names(snapshot: Snapshot) -> list[str]:
    name = snapshot.metadata.get("e2b.name")
    return [f"{name}:default"] if name else []


def _shown_id(snapshot: Snapshot) -> str:
    names = _names(snapshot)
    return f"{TEAM}/{names[0]}" if names else snapshot.id


def _snapshot(call: Call, any_name: str) -> Snapshot | None:
    """Find a snapshot of the caller by its id, or by `NAME`, `NAME:default` or `TEAM/NAME:default`."""
    for each in call.service.manager.snapshots(call.caller.sees):
        if any_name == each.id:
            return each
    name = any_name.rpartition("/")[2].removesuffix(":default")
    return _named(call, name, call.caller.client)


def _named(call: Call, name: str, client: str) -> Snapshot | None:
    """Find a client's newest snapshot of this name; an admin sees those of other clients as well."""
    for each in reversed(call.service.manager.snapshots(client)):
        if each.metadata.get("e2b.name") == name:
            return each
    return None


async def snapshot(call: Call) -> Response:
    """Save a sandbox's files; another snapshot of the same name is replaced."""
    live, form = _live(call), await call.form()
    name = field(form, "name", str, "").rpartition("/")[2].removesuffix(":default")
    if len(name) > _LONGEST_NAME:
        raise ApiError(400, f"name: over {_LONGEST_NAME} characters")
    metadata = {"e2b.name": name} if name else {}
    manager = call.service.manager

    def save() -> Snapshot:
        before = _named(call, name, live.client_id) if name else None
        if before is None:
            call.service.permissions.check_snapshots(
                call.caller, lambda: manager.snapshots(call.caller.sees)
            )
        made = manager.snapshot(live.id, metadata, call.caller.sees)
        if before is not None:
            manager.delete_snapshot(before.id, call.caller.sees)
        return made

    made = await call.service.thread_pools.call(save, key=live.sandbox_id, pool=COPIES)
    return JSONResponse({"snapshotID": _shown_id(made), "names": _names(made)}, 201)


async def snapshots(call: Call) -> Response:
    """List snapshots, newest first."""
    query = call.request.query_params
    every = await call.call(call.service.manager.snapshots, call.caller.sees)
    if sandbox_id := query.get("sandboxID"):
        every = [each for each in every if each.session_id == sandbox_id]
    if name := query.get("name"):
        short = name.rpartition("/")[2].removesuffix(":default")
        every = [each for each in every if short in (each.id, each.metadata.get("e2b.name"))]
    every = sorted(every, key=lambda each: each.id, reverse=True)
    page, headers = lists.page(call, [(each.id, each) for each in every], True)
    forms = [{"snapshotID": _shown_id(each), "names": _names(each)} for each in page]
    return JSONResponse(forms, headers=headers)


async def delete_template(call: Call) -> Response:
    """Remove a template of the caller's, or a snapshot by its id."""
    if await templates.delete(call):
        return Response(status_code=204)
    found = await call.call(_snapshot, call, call.params["template_id"])
    if found is None:
        raise ApiError(404, f"template '{call.params['template_id']}' not found")
    try:
        await call.call(call.service.manager.delete_snapshot, found.id, call.caller.sees)
    except SnapshotNotFound as exc:
        raise ApiError(404, exc.message) from exc
    return Response(status_code=204)


async def fork(call: Call) -> Response:
    """Create sandboxes with the files of this one and what runs in it, where that can be copied."""
    live, form = _live(call), await call.form()
    count = field(form, "count", int, 1)
    timeout = lives.timeout_of(call, form)
    if not 1 <= count <= _MOST_FORKS:
        raise ApiError(400, f"count: must be from 1 to {_MOST_FORKS}")
    notes = replace(notes_of(live.metadata), key=call.caller.key_id)
    going_on, execs = Signal(), call.shared.execs

    def create(snapshot_id: str) -> Live:
        return lives.create(
            call.service,
            call.caller,
            replace(live.spec, network=live.inner.spec.network),
            notes,
            own_metadata(live.metadata),
            timeout_s=timeout,
            auto_pause=live.timeouts.on_expiry == SUSPEND,
            snapshot_id=snapshot_id,
            client_id=live.client_id,
        )

    def make_all() -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = []
        for made in lives.forks(call.service.manager, live, count, carry, create):
            if isinstance(made, RingfenceError):
                answers.append({"error": {"code": 500, "message": made.message}})
                continue
            note_copies(call, made.sandbox_id, carry.execs)
            write_files(made)
            answers.append({"sandbox": _opened(call, made)})
        return answers

    async with AsyncExitStack() as held:
        busy = await hold_cells(call.service, execs, live, "auto", held)
        carry = LiveForks(execs, live.sandbox_id, busy, going_on.ring)
        pools = call.service.thread_pools
        forking = asyncio.ensure_future(pools.call(make_all, key=live.sandbox_id, pool=COPIES))
        forking.add_done_callback(lambda _: going_on.ring())
        await going_on.wait(None)
    return JSONResponse(await forking, 201)


# -- the rest --------------------------------------------------------------------------------------


async def set_network(call: Call) -> Response:
    """Replace what a sandbox may reach; a field that is not given is cleared."""
    live, form = _live(call), await call.form()
    settings, notes = call.shared.settings, notes_of(live.metadata)
    internet = field(form, "allow_internet_access", bool, notes.internet)
    template = settings.spec_of(notes.template) or SandboxSpec()

    def change() -> None:
        policy = network.policy_of(form, internet, settings.internet, template)
        judged = call.service.permissions.judge(call.caller, policy)
        live.sandbox.apply_network_policy(judged)
        call.service.manager.events.add("network", live)

    await call.call(change)
    return Response(status_code=204)


async def logs(call: Call) -> Response:
    """Return what E2B's agent inside has logged: there is none, and the output of a command is its own."""
    _live(call)
    return JSONResponse({"logs": [], "logEntries": []})


async def list_templates(call: Call) -> Response:
    """List the templates of the configuration, as old as this server's process, and the caller's."""
    settings, began = call.shared.settings, timestamp(call.shared.began)
    forms = [
        {
            "templateID": name,
            "aliases": [name],
            "names": [name],
            "public": True,
            "buildID": name,
            "buildStatus": "ready",
            "buildCount": 1,
            "spawnCount": 0,
            "lastSpawnedAt": None,
            "createdAt": began,
            "updatedAt": began,
            "createdBy": None,
            "envdVersion": ENVD_VERSION,
            **sizes((settings.spec_of(name) or SandboxSpec()).limits.to_json()),
        }
        for name in templates.configured(call)
    ]
    return JSONResponse([*forms, *await call.call(templates.own, call)])


async def nothing(_call: Call) -> Response:
    return JSONResponse([])


def _refusing(what: str) -> Any:
    async def refuse(_call: Call) -> Response:
        raise ApiError(501, what)

    return refuse


_VOLUMES = _refusing(_REFUSED["volumeMounts"])
_SECRETS = _refusing("secrets are not supported by Ringfence: use network rules with credentials")
_BUILDS = _refusing(
    "templates are built by E2B's v3 API here: use a newer SDK, with Template.build"
)
_SANDBOX = "/sandboxes/{sandbox_id}"

ROUTES = [
    Route("POST", "/sandboxes", create),
    Route("POST", "/v2/sandboxes", create),
    Route("GET", "/sandboxes", list_),
    Route("GET", "/v2/sandboxes", list_),
    Route("GET", _SANDBOX, get),
    Route("DELETE", _SANDBOX, kill),
    Route("POST", f"{_SANDBOX}/timeout", set_timeout),
    Route("POST", f"{_SANDBOX}/connect", connect),
    Route("POST", f"/v2{_SANDBOX}/connect", connect),
    Route("POST", f"{_SANDBOX}/resume", resume),
    Route("POST", f"{_SANDBOX}/pause", pause),
    Route("POST", f"{_SANDBOX}/fork", fork),
    Route("POST", f"{_SANDBOX}/snapshots", snapshot),
    Route("PUT", f"{_SANDBOX}/network", set_network),
    Route("GET", f"{_SANDBOX}/metrics", metrics),
    Route("GET", f"{_SANDBOX}/logs", logs),
    Route("GET", f"/v2{_SANDBOX}/logs", logs),
    Route("GET", "/snapshots", snapshots),
    Route("GET", "/templates", list_templates),
    Route("GET", "/v2/templates", list_templates),
    *templates.ROUTES,
    Route("DELETE", "/templates/{template_id:path}", delete_template),
    Route("GET", "/teams", nothing),
    *(
        Route(method, f"{prefix}{path}", handler)
        for prefix, handler in (("/volumes", _VOLUMES), ("/secrets", _SECRETS))
        for method in ("GET", "POST", "PUT", "DELETE")
        for path in ("", "/{rest:path}")
    ),
    Route("POST", "/v2/templates", _BUILDS),
    Route("POST", "/templates", _BUILDS),
]
