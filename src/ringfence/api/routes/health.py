"""How the server is doing, and what it is."""

from __future__ import annotations

import resource
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.responses import Response

from ... import __version__
from ...model.manager_stats import Health, ManagerStats
from ...sessions import metrics
from ..nouns import AsNoun, answer, json_answer
from ..runs import TheExecs
from ..service import TheCaller, TheService

router = APIRouter(tags=["server"])
_Health = Annotated[Health, AsNoun()]


@router.get("/v1/health", response_model=_Health, responses={503: {"model": _Health}})
async def health(service: TheService, _caller: TheCaller) -> Response:
    """Whether everything that the server needs works, each looked at now; 503 when not."""
    found = await service.lanes.call(service.manager.health)
    return answer(found, 200 if found.ok else 503)


@router.get("/v1/stats", response_model=Annotated[ManagerStats, AsNoun()])
async def stats(service: TheService, _caller: TheCaller) -> Response:
    """Counts and times, of all clients together."""
    return answer(await service.lanes.call(service.manager.stats))


class Info(BaseModel):
    """What the server is, and what its backends can do on this host."""

    version: str
    client: str
    is_admin: bool
    max_sandboxes: int
    backends: list[dict[str, Any]]


@router.get("/v1/info", response_model=Info)
async def info(service: TheService, caller: TheCaller) -> Response:
    """What the server is, whom it takes the caller for, and what works on its host."""
    maker = service.manager.maker
    reports = [await service.lanes.call(maker.report, name) for name in maker.backends]
    return json_answer(
        {
            "version": __version__,
            "client": caller.client,
            "is_admin": caller.is_admin,
            "max_sandboxes": service.manager.config.max_sandboxes,
            "backends": [each.to_json() for each in reports],
        }
    )


class PlainText(Response):
    """Prometheus' text format."""

    media_type = metrics.CONTENT_TYPE


@router.get("/metrics", response_class=PlainText)
async def prometheus(service: TheService, execs: TheExecs, _caller: TheCaller) -> Response:
    """For Prometheus, in its text format; admins only."""
    found = await service.lanes.call(service.manager.stats)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    text = metrics.render(found) + service.requests.render(service.admission.now)
    text += execs.counts.render(execs.live_count)
    text += (
        "# HELP ringfence_daemon_peak_memory_bytes Of the daemon, without sandboxes.\n"
        "# TYPE ringfence_daemon_peak_memory_bytes gauge\n"
        f"ringfence_daemon_peak_memory_bytes {memory}\n"
        "# HELP ringfence_audit_lines_lost_total Lines that could not be written.\n"
        "# TYPE ringfence_audit_lines_lost_total counter\n"
        f"ringfence_audit_lines_lost_total {service.audit.lost}\n"
    )
    return PlainText(text)
