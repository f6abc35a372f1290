"""The nouns of `model` in FastAPI: their own JSON form is what is read, written and documented."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic_core import core_schema
from starlette.responses import Response

from ..model.noun import Noun

_as_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode

MARK = "x-ringfence-noun"
"""Stands for a reference to the schema of a noun until `openapi` puts it there."""


class AsNoun:
    """Makes pydantic read a noun by `from_json`; its errors are ours, with the field's name."""

    def __get_pydantic_core_schema__(self, source: Any, _handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            lambda given: given if type(given) is source else source.from_json(given),
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda noun: noun.to_json()
            ),
            metadata={"noun": source},
        )

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        noun: type[Noun] = schema["metadata"]["noun"]
        return {MARK: noun.__name__, "x-mode": handler.mode}


def answer(noun: Noun, status: int = 200, **options: Any) -> Response:
    """A noun as the response; `options` go to `to_json`."""
    return json_answer(noun.to_json(**options), status)


def json_answer(form: Any, status: int = 200) -> Response:
    """Plain data as the response."""
    return Response(_as_json(form), status, media_type="application/json")


def page(items: list[Any], next_cursor: str | None = None) -> Response:
    """One page of a list."""
    return json_answer({"items": items, "next_cursor": next_cursor})


def page_of(nouns: Iterable[Noun], next_cursor: str | None = None, **options: Any) -> Response:
    """One page of many nouns; for a thread, as it may take long.

    The encoder does not let other threads have the interpreter before it is done, so it gets one noun
    after the other. `options` go to `to_json`.
    """
    items = ",".join([_as_json(each.to_json(**options)) for each in nouns])
    text = f'{{"items":[{items}],"next_cursor":{_as_json(next_cursor)}}}'
    return Response(text, media_type="application/json")


__all__ = ["MARK", "Annotated", "AsNoun", "answer", "json_answer", "page", "page_of"]
