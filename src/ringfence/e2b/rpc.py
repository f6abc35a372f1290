"""Calls of Connect over HTTP: unary ones, and streams from and to the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

from starlette.responses import JSONResponse, Response, StreamingResponse

from ..errors import InvalidRequest
from . import codec
from .call import Call, Route
from .codec import RpcError, frame, last_frame, rpc_error
from .settings import HOME, HOME_OF_ROOT, ROOT

Unary = Callable[[Call, dict[str, Any]], Awaitable[dict[str, Any] | bytes]]
Stream = Callable[[Call, dict[str, Any]], Awaitable[AsyncIterator[dict[str, Any]]]]
_LONGEST_MS = 366 * 86_400_000
_LEAST_PING_S, _PING_S = 1.0, 90.0


def unary(path: str, handler: Unary) -> Route:
    """A route of one message and one answer, within the client's time limit."""

    async def answer(call: Call) -> Response:
        async with asyncio.timeout(deadline_s(call)):
            form = await call.form()
            found = await handler(call, form)
            if isinstance(found, bytes):  # JSON already
                return Response(found, media_type="application/json")
            return JSONResponse(found)

    async def in_time(call: Call) -> Response:
        try:
            return await answer(call)
        except TimeoutError:
            raise RpcError("deadline_exceeded", "the deadline of the request is over") from None

    return Route("POST", path, in_time)


def server_stream(path: str, handler: Stream) -> Route:
    """A route of one message and a stream of answers. Its errors come in the stream."""

    async def answer(call: Call) -> Response:
        try:
            request = await _only_message(call)
            messages = await handler(call, request)
        except Exception as exc:  # noqa: BLE001  as an end of the stream
            return Response(last_frame(rpc_error(exc)), media_type=codec.STREAM)
        return StreamingResponse(_frames(call, messages), media_type=codec.STREAM)

    return Route("POST", path, answer)


def client_stream(path: str, handler: Callable[[Call], Awaitable[dict[str, Any]]]) -> Route:
    async def answer(call: Call) -> Response:
        try:
            async with asyncio.timeout(deadline_s(call)):
                text = frame(await handler(call)) + last_frame()
        except TimeoutError:
            text = last_frame(RpcError("deadline_exceeded", "the deadline is over"))
        except Exception as exc:  # noqa: BLE001  as an end of the stream
            text = last_frame(rpc_error(exc))
        return Response(text, media_type=codec.STREAM)

    return Route("POST", path, answer, is_stream=True)


async def _frames(call: Call, messages: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    """Write each message in its turn: what goes on inside may be told without end."""
    try:
        async for each in messages:
            yield await call.service.share.run(partial(frame, each))
    except Exception as exc:  # noqa: BLE001  as an end of the stream
        yield last_frame(rpc_error(exc))
    else:
        yield last_frame()


async def _only_message(call: Call) -> dict[str, Any]:
    found: dict[str, Any] | None = None
    async for each in incoming(call):
        if found is not None:
            raise RpcError("invalid_argument", "one message was expected, and more came")
        found = each
    if found is None:
        raise RpcError("invalid_argument", "one message was expected, and none came")
    return found


async def incoming(call: Call) -> AsyncIterator[dict[str, Any]]:
    """Yield the messages of a client's stream."""
    encoding = call.request.headers.get("connect-content-encoding", "")
    frames = codec.Frames(is_gzip=encoding == "gzip")
    async for data in call.stream():
        for text, is_compressed in frames.feed(data):
            await call.service.share.take()
            yield await call.read(text, is_compressed=is_compressed)
    frames.finish()


def deadline_s(call: Call) -> float | None:
    """Seconds that the client gives its request; None: as long as it takes.

    Raises:
        RpcError: The header is no number.
    """
    given = call.request.headers.get("connect-timeout-ms", "")
    if not given:
        return None
    if not given.isdecimal() or len(given) > len(str(_LONGEST_MS)):
        raise RpcError("invalid_argument", "connect-timeout-ms is not a number of milliseconds")
    return max(1, min(int(given), _LONGEST_MS)) / 1000


def ping_s(call: Call) -> float:
    """Seconds between two keepalives of a stream."""
    given = call.request.headers.get("keepalive-ping-interval", "")
    return max(_LEAST_PING_S, float(given)) if given.isdecimal() and len(given) < 6 else _PING_S


def user_of(call: Call, name: str | None = None) -> str | None:
    """The user that a client names, as an exec takes it; None: the sandbox's own.

    Raises:
        RpcError: The sandbox has no such user.
    """
    import base64
    import binascii

    from ..model.spec import OWN_ROOT

    kind, _, text = call.request.headers.get("authorization", "").partition(" ")
    if name is None and kind.lower() == "basic":
        try:
            name = base64.b64decode(text).decode().partition(":")[0]
        except (binascii.Error, ValueError):
            raise RpcError("unauthenticated", "the Authorization header cannot be read") from None
    if name in (None, "", "user", "sandbox"):
        return None
    if call.inside.spec.profile == OWN_ROOT:
        return name  # root, or one that root has added
    raise unknown_user(name)


async def home_of(call: Call, user: str | None) -> str:
    """Return the home directory of a user that `user_of` returned; it need not exist.

    Raises:
        RpcError: The sandbox has no such user.
    """
    from ..backends.local.host import accounts

    if user is None or user == ROOT:
        return HOME if user is None else HOME_OF_ROOT
    try:
        account = await call.call(accounts.find, call.inside.inner.files, user)
    except InvalidRequest as exc:
        raise unknown_user(user) from exc
    return str(account.env.get("HOME", HOME))


def unknown_user(name: str) -> RpcError:
    return RpcError("unauthenticated", f"invalid username: '{name}'")
