"""Health and capabilities of the server."""

from __future__ import annotations

import resource
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel
from starlette.responses import Response

from ... import __version__
from ...model.manager_stats import Health, ManagerStats
from ...sessions.counts import metrics
from ..access.caller import ADMIN, METRICS, Caller
from ..measured import of_process
from ..models import AsModel, answer, json_answer
from ..routers import Router
from ..service import Service, TheCaller, TheService
from ..streaming.runs import TheExecs

router = Router(tags=["server"])
_OWN = (
    "uptime_s",
    "active_sandboxes",
    "active_sessions",
    "detached_sessions",
    "suspended_sessions",
    "max_sandboxes",
)
_OF_A_BACKEND = ("backend", "available", "tiers")
_Health = Annotated[Health, AsModel()]


@router.get("/v1/health", response_model=_Health, responses={503: {"model": _Health}})
async def health(service: TheService, caller: TheCaller) -> Response:
    """Check the server: 200 while any backend can make sandboxes; with each check, made now.

    Details of the checks are for admins and `metrics` keys.
    """
    found = await service.thread_pools.call(service.manager.health)
    if not _measures(caller):
        checks = tuple(replace(each, detail="") for each in found.checks)
        found = replace(found, checks=checks)
    return answer(found, 200 if found.ok else 503)


def _measures(caller: Caller) -> bool:
    """Return whether the caller may see metrics of the whole server."""
    return caller.scope in (METRICS, ADMIN)


@router.get("/v1/stats", response_model=Annotated[ManagerStats, AsModel()])
async def stats(service: TheService, caller: TheCaller) -> Response:
    """Counts and times: of all clients together for admins and `metrics` keys, else of one's own.

    Then what is there now, and no more: other fields are left out.
    """
    if _measures(caller):
        return answer(await service.thread_pools.call(service.manager.stats))
    found = await service.thread_pools.call(service.manager.stats_of, caller.client)
    form = found.to_json()
    form["max_sandboxes"] = _most_sandboxes(service, caller)
    return json_answer({name: form[name] for name in _OWN})


class Info(BaseModel):
    """The server, and the capabilities of its backends on this host."""

    version: str
    client: str
    scope: str
    is_admin: bool
    max_sandboxes: int
    backends: list[dict[str, Any]]


@router.get("/v1/info", response_model=Info)
async def info(service: TheService, caller: TheCaller) -> Response:
    """Return the version, the caller's identity, and the backends that work on this host.

    Details of the host and its protections are for admins.
    """
    maker = service.manager.maker
    reports = await service.thread_pools.call(
        lambda: [maker.report(name) for name in maker.backends]
    )
    backends = [each.to_json() for each in reports]
    if not caller.is_admin:
        backends = [{name: each[name] for name in _OF_A_BACKEND} for each in backends]
    return json_answer(
        {
            "version": __version__,
            "client": caller.client,
            "scope": caller.scope,
            "is_admin": caller.is_admin,
            "max_sandboxes": _most_sandboxes(service, caller),
            "backends": backends,
        }
    )


def _most_sandboxes(service: Service, caller: Caller) -> int:
    """How many the caller may have."""
    config = service.manager.config
    bounds = (config.max_sandboxes, config.max_of_client, caller.max_sandboxes)
    return min(each for each in bounds if each is not None)


class PlainText(Response):
    """Prometheus' text format."""

    media_type = metrics.CONTENT_TYPE


@router.get("/metrics", response_class=PlainText)
async def prometheus(service: TheService, execs: TheExecs) -> Response:
    """For Prometheus, in its text format; for admins and `metrics` keys."""
    found = await service.thread_pools.call(service.manager.stats)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    text = metrics.render(found) + service.requests.render(service.admission.now)
    text += execs.counts.render(execs.live_count) + of_process()
    text += await service.thread_pools.call(_of_templates, service)
    text += (
        "# HELP ringfence_daemon_peak_memory_bytes Of the daemon, without sandboxes.\n"
        "# TYPE ringfence_daemon_peak_memory_bytes gauge\n"
        f"ringfence_daemon_peak_memory_bytes {memory}\n"
        "# HELP ringfence_audit_lines_lost_total Lines that could not be written.\n"
        "# TYPE ringfence_audit_lines_lost_total counter\n"
        f"ringfence_audit_lines_lost_total {service.audit.lost}\n"
    )
    return PlainText(text)


def _of_templates(service: Service) -> str:
    records = service.manager.templates.records
    counts, templates = records.counts(), len(records.every())
    lines = [
        "# HELP ringfence_templates Templates that clients have built, or are building.",
        "# TYPE ringfence_templates gauge",
        f"ringfence_templates {templates}",
        "# HELP ringfence_template_builds Builds that are remembered, by status.",
        "# TYPE ringfence_template_builds gauge",
        *(f'ringfence_template_builds{{status="{k}"}} {n}' for k, n in sorted(counts.items())),
    ]
    return "\n".join(lines) + "\n"
