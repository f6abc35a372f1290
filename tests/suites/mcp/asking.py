"""Fixtures that ask the client: by a request on the way (2025-11-25), or by a result that wants input."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeAlias

from mcp.server.mcpserver import Context, Elicit, ElicitationResult, MCPServer, Resolve
from mcp.server.mcpserver.prompts.base import UserMessage
from mcp.shared.exceptions import MCPError
from mcp_types import (
    MISSING_REQUIRED_CLIENT_CAPABILITY,
    CreateMessageRequest,
    CreateMessageRequestParams,
    ElicitRequest,
    ElicitRequestFormParams,
    InputRequiredResult,
    ListRootsRequest,
    SamplingMessage,
    TextContent,
)
from pydantic import BaseModel, Field

from tests.suites.mcp.plain import FIXTURE

Ctx: TypeAlias = Context[Any, Any]


def _says(text: str) -> SamplingMessage:
    return SamplingMessage(role="user", content=TextContent(type="text", text=text))


def _sample(text: str) -> CreateMessageRequest:
    params = CreateMessageRequestParams(messages=[_says(text)], max_tokens=50)
    return CreateMessageRequest(params=params)


def _elicit(message: str, **properties: str) -> ElicitRequest:
    schema = {
        "type": "object",
        "properties": {name: {"type": kind} for name, kind in properties.items()},
        "required": list(properties),
    }
    return ElicitRequest(params=ElicitRequestFormParams(message=message, requested_schema=schema))


def _ask_name(message: str = "What is your name?") -> ElicitRequest:
    return _elicit(message, name="string")


def _wants(requests: dict[str, Any], state: str | None = None) -> InputRequiredResult:
    return InputRequiredResult(input_requests=requests, request_state=state)


class Reply(BaseModel):
    response: str = Field(description="User's response")


class Defaults(BaseModel):
    name: str = "John Doe"
    age: int = 30
    score: float = 95.5
    status: Annotated[str, Field(json_schema_extra={"enum": ["active", "inactive", "pending"]})] = (
        "active"
    )
    verified: bool = True


_KINDS: list[Any] = ["active", "inactive", "pending"]
_TITLED: list[Any] = [{"const": name, "title": name.title()} for name in ("low", "medium", "high")]
_LEGACY: dict[str, Any] = {
    "enum": ["small", "medium", "large"],
    "enumNames": ["Small", "Medium", "Large"],
}


class Enums(BaseModel):
    untitledSingle: str = Field(json_schema_extra={"enum": _KINDS})  # noqa: N815
    titledSingle: str = Field(json_schema_extra={"oneOf": _TITLED})  # noqa: N815
    untitledMulti: list[str] = Field(  # noqa: N815
        json_schema_extra={"items": {"type": "string", "enum": ["read", "write"]}}
    )
    titledMulti: list[str] = Field(json_schema_extra={"items": {"anyOf": _TITLED}})  # noqa: N815
    legacyEnum: str = Field(json_schema_extra=_LEGACY)  # noqa: N815


def _probe() -> Elicit[Reply]:
    return Elicit("A word, please", Reply)


def add_requests(server: MCPServer[Any]) -> None:
    """Tools that send the client a request while they run."""

    @server.tool(description=FIXTURE)
    async def test_sampling(prompt: str, ctx: Ctx) -> str:
        answer = await ctx.session.create_message(
            messages=[_says(prompt)], max_tokens=100, related_request_id=ctx.request_id
        )
        return f"LLM response: {answer.content.text}"

    async def elicit(ctx: Ctx, message: str, schema: type[BaseModel], words: str) -> str:
        answer = await ctx.elicit(message=message, schema=schema)
        content = answer.data.model_dump_json() if answer.action == "accept" else "{}"
        return f"{words}: action={answer.action}, content={content}"

    @server.tool(description=FIXTURE)
    async def test_elicitation(message: str, ctx: Ctx) -> str:
        return await elicit(ctx, message, Reply, "User response")

    @server.tool(description=FIXTURE)
    async def test_elicitation_sep1034_defaults(ctx: Ctx) -> str:
        return await elicit(ctx, "Please review", Defaults, "Elicitation completed")

    @server.tool(description=FIXTURE)
    async def test_elicitation_sep1330_enums(ctx: Ctx) -> str:
        return await elicit(ctx, "Please select", Enums, "Elicitation completed")

    @server.tool(description=FIXTURE)
    async def test_missing_capability(ctx: Ctx) -> str:
        if getattr(ctx.client_capabilities, "sampling", None) is None:
            data: dict[str, Any] = {"requiredCapabilities": {"sampling": {}}}
            raise MCPError(MISSING_REQUIRED_CLIENT_CAPABILITY, "needs sampling", data)
        return "declared"

    @server.tool(description=FIXTURE)
    async def test_streaming_elicitation(
        answer: Annotated[ElicitationResult[Reply], Resolve(_probe)],
    ) -> str:
        return f"elicitation {answer.action}"


Simple = Literal["elicitation", "sampling", "list_roots", "multiple_inputs"]
_SIMPLE: dict[Simple, dict[str, Any]] = {
    "elicitation": {"user_name": _ask_name()},
    "sampling": {"capital_question": _sample("What is the capital of France?")},
    "list_roots": {"client_roots": ListRootsRequest()},
    "multiple_inputs": {
        "user_name": _ask_name(),
        "greeting": _sample("Generate a greeting"),
        "client_roots": ListRootsRequest(),
    },
}


def add_input_required(server: MCPServer[Any]) -> None:
    """Tools whose first answer is a question."""
    for name, questions in _SIMPLE.items():
        _add_simple(server, name, questions)

    @server.tool(description=FIXTURE)
    async def test_input_required_result_request_state(ctx: Ctx) -> str | InputRequiredResult:
        if "confirm" in (ctx.input_responses or {}) and ctx.request_state == "nonce":
            return "state-ok: confirmed"
        return _wants({"confirm": _elicit("Please confirm", ok="boolean")}, "nonce")

    @server.tool(description=FIXTURE)
    async def test_input_required_result_tampered_state(ctx: Ctx) -> str | InputRequiredResult:
        if ctx.request_state is not None:
            return f"state-ok: {ctx.request_state}"
        return _wants({"confirm": _elicit("Please confirm", ok="boolean")}, "round-1")

    _add_rounds(server)
    _add_conditional(server)


def _add_rounds(server: MCPServer[Any]) -> None:
    @server.tool(description=FIXTURE)
    async def test_input_required_result_multi_round(ctx: Ctx) -> str | InputRequiredResult:
        state = json.loads(ctx.request_state or '{"round": 0}')
        answers = ctx.input_responses or {}
        if state["round"] == 1 and "step1" in answers:
            second = {"step2": _elicit("Step 2: which colour?", color="string")}
            return _wants(second, json.dumps({"round": 2}))
        if state["round"] == 2 and "step2" in answers:
            return "Both steps answered."
        return _wants({"step1": _ask_name("Step 1: your name?")}, json.dumps({"round": 1}))


def _add_conditional(server: MCPServer[Any]) -> None:
    @server.tool(description=FIXTURE)
    async def test_input_required_result_capabilities(ctx: Ctx) -> InputRequiredResult:
        can = ctx.client_capabilities
        questions: dict[str, Any] = {}
        if can is None or can.sampling is not None:
            questions["sample"] = _sample("Say hello")
        if can is None or can.elicitation is not None:
            questions["ask"] = _ask_name()
        return _wants(questions, "gated")

    @server.prompt(description=FIXTURE)
    async def test_input_required_result_prompt(
        ctx: Ctx,
    ) -> list[UserMessage] | InputRequiredResult:
        if "user_context" in (ctx.input_responses or {}):
            return [UserMessage(content=TextContent(type="text", text="With that context."))]
        return _wants({"user_context": _elicit("Which context?", context="string")})


def _add_simple(server: MCPServer[Any], name: str, questions: dict[str, Any]) -> None:
    async def ask(ctx: Ctx) -> str | InputRequiredResult:
        if (ctx.input_responses or {}).keys() >= questions.keys():
            return "All inputs received."
        return _wants(questions, name if len(questions) > 1 else None)

    server.add_tool(ask, name=f"test_input_required_result_{name}", description=FIXTURE)
