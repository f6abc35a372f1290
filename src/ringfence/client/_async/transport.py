"""Requests to one server: addresses, keys, errors, and when to ask again."""

from __future__ import annotations

import threading
from contextlib import asynccontextmanager
from urllib.parse import quote

import httpx2

from ...errors import ServerUnreachable, TimeoutExceeded
from ...model.base import checks
from ..address import Address, hint_of, key_of
from ..answers import (
    BUSY,
    KEEP_ALIVE,
    as_json,
    error_of,
    object_of,
    pause_s,
    user_agent,
    with_query,
)
from .pauses import close_when_dropped, let_go, make_blocking, pause

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping
    from typing import Any

    from .._sync.transport import Transport  # of the other kind

_MOST_CONNECTIONS = 256
_UNHEARD = 3
# Errors before the request was sent: the server cannot have changed anything.
_NOT_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)


class AsyncTransport:
    """A pool of connections to one server.

    Args:
        timeout_s: Without a byte from the server. Waiting for a command is not bounded by it.
        retries: How often a request that is safe to repeat is repeated. Three times at most where no server
            was seen yet: none may ever come. An answer, a connection and a Unix socket that refuses all
            show one.
    """

    def __init__(self, server: str | None, key: str | None, timeout_s: float, retries: int) -> None:
        checks.number(timeout_s, "timeout_s", 0.001, 366 * 86_400)
        checks.integer(retries, "retries", 0, 1000)
        self.address, self._key = Address.parse(server), key_of(key)
        self.arguments = (server, key, timeout_s, retries)
        self.timeout_s, self._retries = timeout_s, retries
        self._blocking: Transport | None = None
        self._lock, self._users = threading.Lock(), 0
        self._client: httpx2.AsyncClient | None = None
        self._was_seen = self._is_released = False

    def _take(self) -> httpx2.AsyncClient:
        """The connections; to be given back."""
        with self._lock:
            if self._client is None:
                self._client = self._make_client()
                close_when_dropped(self, self._client)
            self._users += 1
            return self._client

    async def _give_back(self) -> None:
        with self._lock:
            self._users -= 1
            unused = self._unused()
        if unused is not None:
            await unused.aclose()

    def _unused(self) -> httpx2.AsyncClient | None:
        """Take the client that must be closed now. `_lock` is held."""
        if self._users or not self._is_released:
            return None
        unused, self._client = self._client, None
        return unused

    def _make_client(self) -> httpx2.AsyncClient:
        headers = {"user-agent": user_agent(), "accept": "*/*"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        limits = httpx2.Limits(
            max_connections=_MOST_CONNECTIONS, max_keepalive_connections=_MOST_CONNECTIONS
        )
        return httpx2.AsyncClient(
            transport=httpx2.AsyncHTTPTransport(
                verify=self.address.tls_context(),
                uds=self.address.unix or None,
                limits=limits,
                socket_options=None if self.address.unix else KEEP_ALIVE,
            ),
            base_url=self.address.url,
            headers=headers,
            timeout=httpx2.Timeout(self.timeout_s, connect=10.0),
            follow_redirects=False,
            trust_env=False,
        )

    async def json(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        params: Mapping[str, Any] | None = None,
        key: str = "",
        timeout_s: float | None = None,
        repeat: bool | None = None,
    ) -> Any:
        """The JSON object that a request is answered with; None for an empty answer.

        Args:
            key: Sent as `Idempotency-Key`, which makes a POST safe to repeat.
            timeout_s: Instead of the transport's.
            repeat: See `request`.
        """
        headers = {"idempotency-key": key} if key else {}
        content = None
        if body is not None:
            headers["content-type"] = "application/json"
            content = as_json(body)
        response = await self.request(
            method,
            path,
            content=content,
            params=params,
            headers=headers,
            timeout_s=timeout_s,
            repeat=repeat,
        )
        return object_of(response.content) if response.content else None

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        repeat: bool | None = None,
        content: bytes | Callable[[], Iterable[bytes]] | None = None,
    ) -> httpx2.Response:
        """A response below 400, whole.

        Args:
            repeat: Whether a lost answer is asked for again; None for what reads, what deletes, and
                what has a key.
            content: A function is called anew for each repetition.

        Raises:
            RingfenceError: What the server says, in the class that was raised there.
            ServerUnreachable: There is none, or it went away.
        """
        if repeat is None:
            repeat = method in ("GET", "DELETE") or "idempotency-key" in (headers or {})
        more: dict[str, Any] = {} if timeout_s is None else {"timeout": timeout_s}
        client = self._take()
        try:
            url = with_query(path, params)
            return await self._ask(
                client, repeat, method, url, content, headers=headers, stream=False, **more
            )
        finally:
            await self._give_back()

    async def _ask(
        self,
        client: httpx2.AsyncClient,
        repeat: bool,
        method: str,
        url: str,
        content: bytes | Callable[[], Iterable[bytes]] | None = None,
        *,
        stream: bool,
        **more: Any,
    ) -> httpx2.Response:
        attempt = 0
        while True:
            body: Any = content() if callable(content) else content
            request = client.build_request(method, url, content=body, **more)
            try:
                response = await client.send(request, stream=stream)
                self._was_seen = True
                if response.status_code < 300:
                    return response
                await response.aread()
                await response.aclose()
            except httpx2.RequestError as exc:
                self._was_seen |= not isinstance(exc, _NOT_SENT) or self._is_stale_socket(exc)
                may = isinstance(exc, _NOT_SENT) or (
                    repeat and not isinstance(exc, httpx2.TimeoutException)
                )
                if not may or attempt >= self._most():
                    raise self._lost(exc) from exc
                wait_s = pause_s(attempt, {})
            else:
                if response.status_code < 400:
                    raise self._moved(response)
                if not repeat or response.status_code not in BUSY or attempt >= self._most():
                    raise _error(response)
                wait_s = pause_s(attempt, response.headers)
            await pause(wait_s)
            attempt += 1

    def _most(self) -> int:
        """How often to ask again: a server that was seen before may be just restarting."""
        return self._retries if self._was_seen else min(self._retries, _UNHEARD)

    def _is_stale_socket(self, exc: BaseException | None) -> bool:
        """Return whether a Unix socket file has no listener, as a killed daemon leaves it for the next."""
        while exc is not None and not isinstance(exc, ConnectionRefusedError):
            exc = exc.__context__
        return bool(self.address.unix) and exc is not None

    @asynccontextmanager
    async def stream(
        self,
        path: str,
        *,
        method: str = "GET",
        params: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> AsyncIterator[httpx2.Response]:
        """A response below 400, whose content is still to be read.

        Until it begins, GET is repeated; where it breaks off, its reader knows where to go on.
        """
        client = self._take()
        try:
            url = with_query(path, params)
            response = await self._ask(client, method == "GET", method, url, stream=True, **more)
            try:
                yield response
            finally:
                await response.aclose()
        except httpx2.RequestError as exc:
            raise self._lost(exc) from exc
        finally:
            await self._give_back()

    @property
    def blocking(self) -> Transport:
        """The same for whoever cannot await; made when first asked for."""
        if self._blocking is None:
            self._blocking = make_blocking(self)
        return self._blocking

    @asynccontextmanager
    async def websocket(
        self, path: str, params: Mapping[str, Any] | None = None
    ) -> AsyncIterator[Any]:
        """A WebSocket.

        Raises:
            ServerUnreachable: There is no server.
        """
        url = f"ws{self.address.url.removeprefix('http')}{with_query(path, params)}"
        client = self._take()
        try:
            async with client.websocket(url, timeout=self.timeout_s) as channel:
                yield channel
        except httpx2.TransportError as exc:
            raise self._lost(exc) from exc
        finally:
            await self._give_back()

    def _moved(self, response: httpx2.Response) -> Exception:
        """An error for a redirection, which is not followed: another server must not see the key."""
        there = response.headers.get("location", "")[:200]
        return ServerUnreachable(
            f"{self.address.shown} redirects to {there!r}",
            hint="give the client the address of the server itself",
        )

    def _lost(self, exc: httpx2.RequestError) -> Exception:
        where = self.address.shown
        if isinstance(exc, httpx2.TimeoutException):
            return TimeoutExceeded(f"{where} did not answer in time")
        hint = ""
        if isinstance(exc, httpx2.ConnectError):
            hint = hint_of(self.address, exc)
        return ServerUnreachable(f"{where}: {str(exc) or type(exc).__name__}", hint=hint)

    async def close(self) -> None:
        """Close the connections as soon as no request uses them; idempotent.

        What is asked for later has a connection for itself: whatever outlives this can still be read.
        """
        if self._blocking is not None:
            let_go(self, self._blocking)
        with self._lock:
            self._is_released = True
            unused = self._unused()
        if unused is not None:
            await unused.aclose()


def _error(response: httpx2.Response) -> Exception:
    media_type = response.headers.get("content-type", "")
    try:
        form = response.json()
    except (ValueError, RecursionError):
        form = None
    return error_of(response.status_code, media_type, form)


def segment(text: str) -> str:
    """`text` as one part of a path: a slash in an id must not lead anywhere else."""
    return quote(text, safe="")
