"""Keys, for admins."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from .. import bodies, forms, keys
from ..caller import USER
from ..nouns import json_answer, page
from ..service import TheCaller, TheService

router = APIRouter(route_class=bodies.Route, prefix="/v1/keys", tags=["keys"])
Scope = Annotated[str, Field(pattern="^(admin|user|read_only|metrics)$")]
_LONGEST_S = 366 * 86_400
_LONGEST_OVERLAP_S = 30 * 86_400
_MOST = 100_000


class NewKey(forms.Form):
    """Whose the key is: `owner` is the client that everything made with it belongs to.

    It opens for `expires_in_s` seconds, or until it is deleted. `max_sandboxes` is how many its owner
    has at most when it makes one more with it; `max_requests` how many are served at once.
    """

    owner: Annotated[str, Field(min_length=1, max_length=255)]
    scope: Scope = USER
    name: Annotated[str, Field(max_length=255)] = ""
    expires_in_s: Annotated[float | None, Field(gt=0, le=_LONGEST_S)] = None
    max_sandboxes: Annotated[int | None, Field(ge=0, le=_MOST)] = None
    max_requests: Annotated[int | None, Field(ge=1, le=_MOST)] = None


class Rotate(forms.Form):
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
    record, text = await service.lanes.call(
        service.doorkeeper.make,
        owner=body.owner,
        scope=body.scope,
        name=body.name,
        expires_at=None if life is None else time.time() + life,
        max_sandboxes=body.max_sandboxes,
        max_requests=body.max_requests,
    )
    request.state.made = record.id
    return json_answer({**keys.shown(record), "key": text}, 201)


@router.get("", response_model=forms.Page[Key])
async def list_(service: TheService) -> Response:
    """Every key, oldest first."""
    return page(await service.lanes.call(service.doorkeeper.every))


@router.post("/{key_id}/rotate", response_model=MadeKey)
async def rotate(key_id: forms.AnyId, service: TheService, body: Rotate | None = None) -> Response:
    """Another secret for a key, which keeps its id, its bounds and the tokens made with it."""
    overlap_s = body.overlap_s if body else 0.0
    record, text = await service.lanes.call(service.doorkeeper.rotate, key_id, overlap_s)
    return json_answer({**keys.shown(record), "key": text})


_THIS_KEY = Query(description="the key of this very request may be meant")


@router.delete("/{key_id}", status_code=204)
async def delete(
    key_id: forms.AnyId,
    service: TheService,
    caller: TheCaller,
    this_key: Annotated[bool, _THIS_KEY] = False,
) -> Response:
    """Let a key, and every token made with it, open nothing more, at once."""
    remove = service.doorkeeper.remove
    await service.lanes.call(remove, key_id, caller, this_key=this_key)
    return Response(status_code=204)
