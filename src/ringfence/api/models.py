"""The model classes in FastAPI: their own JSON form is read, written and documented."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic_core import core_schema
from starlette.responses import Response

from ..model.base.model import Model

_LONG = 50  # items of a list
_as_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode

MARK = "x-ringfence-model"
"""Stands for a reference to the schema of a model until `openapi` puts it there."""


class AsModel:
    """Makes pydantic read a model by `from_json`; its errors are ours, with the field's name."""

    def __get_pydantic_core_schema__(self, source: Any, _handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            lambda given: given if type(given) is source else source.from_json(given),
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda model: model.to_json()
            ),
            metadata={"model": source},
        )

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        model: type[Model] = schema["metadata"]["model"]
        return {MARK: model.__name__, "x-mode": handler.mode}


def answer(model: Model, status: int = 200, **options: Any) -> Response:
    """A model as the response; `options` go to `to_json`."""
    return json_answer(model.to_json(**options), status)


def json_answer(form: Any, status: int = 200) -> Response:
    """Build the response for a JSON form; where it has a long list, call it in a thread.

    Each item of a long list is encoded by a call of its own: the C encoder holds the GIL, and with it
    the daemon's loop, for a whole call.
    """
    is_long = isinstance(form, dict) and any(
        isinstance(value, list) and len(value) > _LONG for value in form.values()
    )
    text = _in_turns(form) if is_long else _as_json(form)
    return Response(text, status, media_type="application/json")


def _in_turns(form: dict[str, Any]) -> str:
    fields = [
        f"{_as_json(name)}:"
        + (f"[{','.join(map(_as_json, value))}]" if isinstance(value, list) else _as_json(value))
        for name, value in form.items()
    ]
    return f"{{{','.join(fields)}}}"


def page(items: list[Any], next_cursor: str | None = None) -> Response:
    return json_answer({"items": items, "next_cursor": next_cursor})


def page_of(models: Iterable[Model], next_cursor: str | None = None, **options: Any) -> Response:
    """Build the response for a page of many model objects; call it in a thread, as it may take
    long.

    Each object is encoded by a call of its own: the C encoder holds the GIL for a whole call.
    `options` go to `to_json`.
    """
    return page_of_texts([_as_json(each.to_json(**options)) for each in models], next_cursor)


def page_of_texts(texts: Iterable[str], next_cursor: str | None = None) -> Response:
    """Build the response for a page of objects that are JSON already."""
    text = f'{{"items":[{",".join(texts)}],"next_cursor":{_as_json(next_cursor)}}}'
    return Response(text, media_type="application/json")


__all__ = [
    "MARK",
    "Annotated",
    "AsModel",
    "answer",
    "json_answer",
    "page",
    "page_of",
    "page_of_texts",
]
