"""Keys, for admins."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from .. import forms, keys
from ..nouns import json_answer, page
from ..service import TheCaller, TheService

router = APIRouter(prefix="/v1/keys", tags=["keys"])
Scope = Annotated[str, Field(pattern="^(admin|user)$")]


class NewKey(forms.Form):
    """Whose the key is: `owner` is the client that everything made with it belongs to."""

    owner: Annotated[str, Field(min_length=1, max_length=255)]
    scope: Scope = keys.USER
    name: Annotated[str, Field(max_length=255)] = ""


class Key(BaseModel):
    """A key, without what opens."""

    id: str
    owner: str
    scope: str
    sandbox_id: str | None
    name: str
    created_at: float


class MadeKey(Key):
    """A new key; `key` is shown this once, and kept nowhere."""

    key: str


@router.post("", status_code=201, response_model=MadeKey)
async def make(body: NewKey, request: Request, service: TheService, _caller: TheCaller) -> Response:
    """A new key."""
    record, text = await service.lanes.call(
        keys.make, service.manager.store, owner=body.owner, scope=body.scope, name=body.name
    )
    service.doorkeeper.add(record)
    request.state.made = record.id
    return json_answer({**keys.shown(record), "key": text}, 201)


@router.get("", response_model=forms.Page[Key])
async def list_(service: TheService, _caller: TheCaller) -> Response:
    """Every key, oldest first."""
    found = await service.lanes.call(service.manager.store.every_key)
    return page([keys.shown(each) for each in found])


@router.delete("/{key_id}", status_code=204)
async def delete(key_id: forms.AnyId, service: TheService, _caller: TheCaller) -> Response:
    """Let a key open nothing more, at once."""
    await service.lanes.call(service.doorkeeper.remove, key_id)
    return Response(status_code=204)
