"""Keys, for admins."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import Query, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from .. import bodies, schemas
from ..access import keys
from ..access.caller import USER
from ..models import json_answer, page
from ..routers import Router
from ..service import TheCaller, TheService

router = Router(route_class=bodies.Route, prefix="/v1/keys", tags=["keys"])
Scope = Annotated[str, Field(pattern="^(admin|user|read_only|metrics)$")]
_LONGEST_S = 366 * 86_400
_LONGEST_OVERLAP_S = 30 * 86_400
_MOST = 100_000


class NewKey(schemas.Form):
    """A new key; everything made with it belongs to the client `owner`.

    It opens for `expires_in_s` seconds, or until it is deleted. `max_sandboxes` bounds the
    sandboxes of its owner, including one made with this key; `max_requests` bounds its concurrent
    requests.
    """

    owner: Annotated[str, Field(min_length=1, max_length=255, pattern=schemas.LINE)]
    scope: Scope = USER
    name: Annotated[str, Field(max_length=255, pattern=schemas.LINE)] = ""
    expires_in_s: Annotated[float | None, Field(gt=0, le=_LONGEST_S)] = None
    max_sandboxes: Annotated[int | None, Field(ge=0, le=_MOST)] = None
    max_requests: Annotated[int | None, Field(ge=1, le=_MOST)] = None


class Rotate(schemas.Form):
    """For how long the secret before still opens."""

    overlap_s: Annotated[float, Field(ge=0, le=_LONGEST_OVERLAP_S)] = 0.0


class Key(BaseModel):
    """A key, without what opens. `last_used_at` is exact to about a minute."""

    id: str
    owner: str
    scope: str
    sandbox_id: str | None
    name: str
    created_at: float
    expires_at: float | None
    last_used_at: float | None
    made_with: str | None
    max_sandboxes: int | None
    max_requests: int | None


class MadeKey(Key):
    """A new key; `key` is shown this once, and kept nowhere."""

    key: str


@router.post("", status_code=201, response_model=MadeKey)
async def make(body: NewKey, request: Request, service: TheService) -> Response:
    """A new key."""
    life = body.expires_in_s
    record, text = await service.thread_pools.call(
        service.authenticator.make,
        owner=body.owner,
        scope=body.scope,
        name=body.name,
        expires_at=None if life is None else time.time() + life,
        max_sandboxes=body.max_sandboxes,
        max_requests=body.max_requests,
    )
    request.state.made = record.id
    return json_answer({**keys.shown(record), "key": text}, 201)


@router.get("", response_model=schemas.Page[Key])
async def list_(service: TheService) -> Response:
    """Every key, oldest first."""
    return page(await service.thread_pools.call(service.authenticator.every))


@router.post("/{key_id}/rotate", response_model=MadeKey)
async def rotate(
    key_id: schemas.AnyId, service: TheService, body: Rotate | None = None
) -> Response:
    """Another secret for a key, which keeps its id, its bounds and the tokens made with it."""
    overlap_s = body.overlap_s if body else 0.0
    record, text = await service.thread_pools.call(service.authenticator.rotate, key_id, overlap_s)
    service.open_requests.look()
    return json_answer({**keys.shown(record), "key": text})


_THIS_KEY = Query(description="the key of this very request may be meant")


@router.delete("/{key_id}", status_code=204)
async def delete(
    key_id: schemas.AnyId,
    service: TheService,
    caller: TheCaller,
    this_key: Annotated[bool, _THIS_KEY] = False,
) -> Response:
    """Let a key, and every token made with it, open nothing more, at once; what they opened is cut."""
    remove = service.authenticator.remove
    await service.thread_pools.call(remove, key_id, caller, this_key=this_key)
    service.open_requests.look()
    return Response(status_code=204)
