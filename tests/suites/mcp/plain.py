"""Fixtures that the conformance suite calls by name: content, errors, progress, resources, prompts."""

from __future__ import annotations

import base64
import json
from typing import Any, TypeAlias

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.prompts.base import Prompt, UserMessage
from mcp_types import (
    AudioContent,
    Completion,
    EmbeddedResource,
    EmptyResult,
    ImageContent,
    SetLevelRequestParams,
    SubscribeRequestParams,
    TextContent,
    TextResourceContents,
    UnsubscribeRequestParams,
)

Ctx: TypeAlias = Context[Any, Any]
FIXTURE = "Called by the conformance suite."

# One red pixel, and a tenth of a second of nothing.
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg=="
WAV = base64.b64encode(
    b"RIFF\x24\0\0\0WAVEfmt \x10\0\0\0\1\0\1\0\x40\x1f\0\0\x40\x1f\0\0\1\0\x08\0data\0\0\0\0"
)


def _text(text: str) -> TextContent:
    return TextContent(type="text", text=text)


def _embedded(uri: str, mime_type: str, text: str) -> EmbeddedResource:
    contents = TextResourceContents(uri=uri, mime_type=mime_type, text=text)
    return EmbeddedResource(type="resource", resource=contents)


def _image() -> ImageContent:
    return ImageContent(type="image", data=PNG, mime_type="image/png")


def add_content(server: MCPServer[Any]) -> None:
    """Tools that answer with every kind of content."""

    @server.tool(description=FIXTURE)
    def test_simple_text() -> str:
        return "This is a simple text response for testing."

    @server.tool(description=FIXTURE)
    def test_image_content() -> list[ImageContent]:
        return [_image()]

    @server.tool(description=FIXTURE)
    def test_audio_content() -> list[AudioContent]:
        return [AudioContent(type="audio", data=WAV.decode(), mime_type="audio/wav")]

    @server.tool(description=FIXTURE)
    def test_embedded_resource() -> list[EmbeddedResource]:
        text = "This is an embedded resource content."
        return [_embedded("test://embedded-resource", "text/plain", text)]

    @server.tool(description=FIXTURE)
    def test_multiple_content_types() -> list[TextContent | ImageContent | EmbeddedResource]:
        text = '{"test": "data", "value": 123}'
        resource = _embedded("test://mixed-content-resource", "application/json", text)
        return [_text("Multiple content types test:"), _image(), resource]

    @server.tool(description=FIXTURE)
    def test_error_handling() -> str:
        raise ToolError("This tool intentionally returns an error for testing")

    @server.tool(description=FIXTURE)
    async def test_tool_with_progress(ctx: Ctx) -> str:
        for done in (0, 50, 100):
            await ctx.report_progress(done, 100, f"Completed step {done} of 100")
        return "done"


def add_logging(server: MCPServer[Any]) -> None:
    """Tools that log, and what changes the lists."""

    @server.tool(description=FIXTURE)
    async def test_tool_with_logging(ctx: Ctx) -> str:
        for step in ("Tool execution started", "Tool processing data", "Tool execution completed"):
            await ctx.info(step)
        return "Tool with logging executed successfully"

    @server.tool(description=FIXTURE)
    async def test_logging_tool(ctx: Ctx) -> str:
        await ctx.info("test_logging_tool ran")
        return "logged"

    @server.tool(description=FIXTURE)
    async def test_trigger_tool_change(ctx: Ctx) -> str:
        server.add_tool(lambda: "dynamic", name="test_dynamic_tool", description=FIXTURE)
        server.remove_tool("test_dynamic_tool")
        await ctx.notify_tools_changed()
        return "tool list changed"

    @server.tool(description=FIXTURE)
    async def test_trigger_prompt_change(ctx: Ctx) -> str:
        def dynamic() -> str:
            return "dynamic"

        server.add_prompt(Prompt.from_function(dynamic, name="test_dynamic_prompt"))
        server.remove_prompt("test_dynamic_prompt")
        await ctx.notify_prompts_changed()
        return "prompt list changed"


def add_resources(server: MCPServer[Any]) -> None:
    """Resources, and the requests of 2025-11-25 that the SDK leaves to the server."""

    @server.resource("test://static-text")
    def static_text() -> str:
        return "This is the content of the static text resource."

    @server.resource("test://static-binary")
    def static_binary() -> bytes:
        return base64.b64decode(PNG)

    @server.resource("test://template/{id}/data")
    def template(id: str) -> str:
        return json.dumps({"id": id, "templateTest": True, "data": f"Data for ID: {id}"})

    @server.resource("test://watched-resource")
    def watched() -> str:
        return "Watched resource content"

    async def nothing(*_: Any) -> EmptyResult:
        return EmptyResult()

    for method, params in (
        ("logging/setLevel", SetLevelRequestParams),
        ("resources/subscribe", SubscribeRequestParams),
        ("resources/unsubscribe", UnsubscribeRequestParams),
    ):
        server._lowlevel_server.add_request_handler(method, params, nothing)

    @server.completion()
    async def complete(ref: Any, argument: Any, context: Any) -> Completion:
        return Completion(values=[], total=0, has_more=False)


def add_prompts(server: MCPServer[Any]) -> None:
    """Prompts."""

    @server.prompt(description=FIXTURE)
    def test_simple_prompt() -> list[UserMessage]:
        return [UserMessage(content=_text("This is a simple prompt for testing."))]

    @server.prompt(description=FIXTURE)
    def test_prompt_with_arguments(arg1: str, arg2: str) -> list[UserMessage]:
        text = f"Prompt with arguments: arg1='{arg1}', arg2='{arg2}'"
        return [UserMessage(content=_text(text))]

    @server.prompt(description=FIXTURE)
    def test_prompt_with_embedded_resource(resourceUri: str) -> list[UserMessage]:  # noqa: N803
        resource = _embedded(resourceUri, "text/plain", "Embedded resource content for testing.")
        ask = _text("Please process the embedded resource above.")
        return [UserMessage(content=resource), UserMessage(content=ask)]

    @server.prompt(description=FIXTURE)
    def test_prompt_with_image() -> list[UserMessage]:
        ask = _text("Please analyze the image above.")
        return [UserMessage(content=_image()), UserMessage(content=ask)]
