"""Small bodies, parameters and pages that are not model classes."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any, Generic, TypeVar

from fastapi import Path, Query
from pydantic import BaseModel, ConfigDict, Field

from ..errors import InvalidRequest
from ..model.base import checks
from ..model.base.ids import check_id

T = TypeVar("T")

_ID = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
ID_OR_NONE = r"^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)?$"
LINE = r"^[^\x00-\x1f\x7f-\xa0]*$"
"""Text of one line, without control characters; which others are printable is Unicode's to say."""
SandboxId = Annotated[str, Path(pattern=_ID, description="of the sandbox, or of its session")]
AnyId = Annotated[str, Path(pattern=_ID)]
BYTES: dict[str, Any] = {
    "application/octet-stream": {"schema": {"type": "string", "format": "binary"}}
}
Limit = Annotated[int, Query(ge=1, le=1000)]
_CURSOR = "`next_cursor` of the page before"
Cursor = Annotated[str, Query(max_length=200, pattern="^[A-Za-z0-9_=-]*$", description=_CURSOR)]
Label = Annotated[str, Field(pattern="^[^=]+=")]


class Form(BaseModel):
    """A JSON object that has these keys and no others."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Page(BaseModel, Generic[T]):
    """A page of a list; `next_cursor` is null on the last."""

    items: list[T]
    next_cursor: str | None = None


class Problem(BaseModel):
    """RFC 9457, with what every error of Ringfence says."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str
    code: str
    message: str
    hint: str
    field: str
    retryable: bool


def _problem(text: str) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Problem"}
    return {"description": text, "content": {"application/problem+json": {"schema": schema}}}


PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: _problem("The body is not JSON."),
    401: _problem("The API key is missing or not valid."),
    403: _problem("The caller, or the sandbox's user, lacks permission."),
    404: _problem("The resource does not exist or belongs to another client."),
    405: _problem("The route does not support this method."),
    408: _problem("The request did not arrive in time."),
    409: _problem("The current state does not allow the operation."),
    410: _problem("The sandbox ended unexpectedly."),
    413: _problem("The request exceeds a size limit of the server."),
    422: _problem("The request is malformed; `field` names the part."),
    429: _problem("Too many concurrent requests; see `Retry-After`."),
    502: _problem("The sandbox or its server did not answer."),
    503: _problem("No capacity now; see `Retry-After`."),
    507: _problem("A disk is full."),
}
"""Problem responses common to all routes."""


def write_cursor(text: str | None) -> str | None:
    """Encode the position of the next page; opaque to clients."""
    return None if text is None else base64.urlsafe_b64encode(text.encode()).decode()


def read_cursor(cursor: str) -> str:
    """Decode a cursor of `write_cursor`; empty is the beginning."""
    try:
        found = base64.b64decode(cursor.encode(), altchars=b"-_", validate=True).decode()
        return check_id(found, "cursor") if found else ""
    except (binascii.Error, UnicodeError, InvalidRequest):
        raise InvalidRequest("is not the next_cursor of a page", field="cursor") from None


def read_labels(given: list[str]) -> dict[str, str]:
    """`K=V` each."""
    labels = {}
    for each in given:
        key, equals, value = each.partition("=")
        if not key or not equals:
            raise InvalidRequest(f"{each!r} is not KEY=VALUE", field="label")
        labels[checks.text(key, "label")] = checks.text(value, "label")
    return labels
