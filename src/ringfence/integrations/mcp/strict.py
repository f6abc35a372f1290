"""Tools as models need them: wrong arguments are refused by name, and answers are short."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools.base import Tool
from mcp_types import CallToolResult, TextContent
from pydantic import ValidationError

from .results import Answer

if TYPE_CHECKING:
    from collections.abc import Callable

    from mcp.server.mcpserver import Context
    from mcp_types import ContentBlock, ToolAnnotations


class StrictTool(Tool):
    """A tool of the SDK that takes no unknown argument and sends no default value."""

    @classmethod
    def of(cls, function: Callable[..., Any], annotations: ToolAnnotations) -> Self:
        """From a method whose docstring and annotations say what it does."""
        tool = cls.from_function(function, annotations=annotations)
        tool.parameters = {**_untitled(tool.parameters), "additionalProperties": False}
        if tool.fn_metadata.output_schema is not None:
            tool.fn_metadata.output_schema = _untitled(tool.fn_metadata.output_schema)
        assert isinstance(tool, cls)
        return tool

    async def run(
        self, arguments: dict[str, Any], context: Context[Any, Any], convert_result: bool = False
    ) -> Any:
        """Run it; see the SDK.

        Raises:
            ToolError: With one line for the model.
        """
        known = self.parameters["properties"]
        unknown = sorted(arguments.keys() - known.keys())
        if unknown:
            raise ToolError(f"no argument {unknown[0]!r}: {self.name} takes {', '.join(known)}")
        try:
            result = await super().run(arguments, context, convert_result=False)
        except ToolError as exc:
            cause = exc.__cause__
            if isinstance(cause, ValidationError):
                raise ToolError(f"{self.name}: {_problems(cause)}") from cause
            raise
        if not convert_result:
            return result
        if isinstance(result, Answer):
            return answered(result)
        return self.fn_metadata.convert_result(result)


def answered(answer: Answer, *more: ContentBlock) -> CallToolResult:
    """The answer on the wire: as text for models, structured for programs."""
    return CallToolResult(
        content=[TextContent(type="text", text=answer.text()), *more],
        structured_content=answer.model_dump(mode="json", exclude_defaults=True),
    )


def _problems(error: ValidationError) -> str:
    found = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
    return "; ".join(found)


def _untitled(schema: Any) -> Any:
    """Without titles, which repeat the names of the fields."""
    if isinstance(schema, list):
        return [_untitled(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _untitled(value)
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str))
    }
