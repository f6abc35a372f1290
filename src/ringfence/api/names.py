"""File names in requests: bytes that are not UTF-8 become surrogate escapes, as in Python's own file names."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import parse_qsl

from fastapi import Query
from pydantic import PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError
from starlette.datastructures import QueryParams

from . import bodies


def _is_text(least: int, most: int) -> tuple[PlainValidator, WithJsonSchema]:
    """A string as pydantic has none: `os.fsdecode` makes lone surrogates of what is no UTF-8."""

    def check(value: object) -> str:
        if not isinstance(value, str):
            raise PydanticCustomError("string_type", "must be a string")
        if not least <= len(value) <= most:
            said = "must have {least} to {most} characters"
            raise PydanticCustomError("length", said, {"least": least, "most": most})
        return value

    form: dict[str, Any] = {"type": "string", "maxLength": most}
    return PlainValidator(check), WithJsonSchema({**form, "minLength": least} if least else form)


Path = Annotated[str, *_is_text(1, 4095)]
FilePath = Annotated[Path, Query(description="absolute inside, or from the session's root")]
LastName = Annotated[str, *_is_text(0, 1024), Query(description="the last name seen")]


class _Request(bodies.BodyRequest):
    """A request whose query parameters preserve bytes that are not UTF-8; the framework makes them U+FFFD."""

    @property
    def query_params(self) -> QueryParams:
        if not hasattr(self, "_query_params"):
            text = self.scope["query_string"].decode("latin-1")
            pairs = parse_qsl(text, keep_blank_values=True, errors="surrogateescape")
            self._query_params: QueryParams = QueryParams(pairs)
        return self._query_params


class Route(bodies.Route):
    """A route to which names of files come as they are."""

    request_class = _Request
