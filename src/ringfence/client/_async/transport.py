"""Requests to one server: addresses, keys, errors, and when to ask again."""

from __future__ import annotations

from contextlib import asynccontextmanager
from urllib.parse import quote

import httpx2

from ...errors import ServerUnreachable, TimeoutExceeded
from ..address import Address, key_of
from ..answers import BUSY, KEEP_ALIVE, error_of, pause_s, user_agent
from ..asked import as_json, with_query
from .pauses import let_go, pause, twin

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from typing import Any

    from .._sync.transport import Transport  # of the other kind

_MOST_CONNECTIONS = 256
# What a request that was not begun cannot have changed anything.
_NOT_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)


class AsyncTransport:
    """A pool of connections to one server.

    Args:
        timeout_s: Without a byte from the server. Waiting for a command is not bounded by it.
        retries: How often a request that is safe to repeat is repeated.
    """

    def __init__(self, server: str | None, key: str | None, timeout_s: float, retries: int) -> None:
        self.address, self._key = Address.parse(server), key_of(key)
        self.arguments = (server, key, timeout_s, retries)
        self.timeout_s, self._retries = timeout_s, retries
        self._blocking: Transport | None = None
        self._client = self._make_client()

    def _make_client(self) -> httpx2.AsyncClient:
        headers = {"user-agent": user_agent(), "accept": "*/*"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        limits = httpx2.Limits(
            max_connections=_MOST_CONNECTIONS, max_keepalive_connections=_MOST_CONNECTIONS
        )
        return httpx2.AsyncClient(
            transport=httpx2.AsyncHTTPTransport(
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
    ) -> Any:
        """The JSON that a request is answered with; None for an empty answer.

        Args:
            key: Sent as `Idempotency-Key`, which makes a POST safe to repeat.
            timeout_s: Instead of the transport's.
        """
        headers = {"idempotency-key": key} if key else {}
        content = None
        if body is not None:
            headers["content-type"] = "application/json"
            content = as_json(body)
        response = await self.request(
            method, path, content=content, params=params, headers=headers, timeout_s=timeout_s
        )
        return response.json() if response.content else None

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        once: bool = False,
        **body: Any,
    ) -> httpx2.Response:
        """A response below 400, whole.

        Args:
            once: Not to be repeated when the answer was lost.

        Raises:
            RingfenceError: What the server says, in the class that was raised there.
            ServerUnreachable: There is none, or it went away.
        """
        has_key = "idempotency-key" in (headers or {})
        safe = not once and (method in ("GET", "HEAD", "DELETE") or has_key)
        url, attempt = with_query(path, params), 0
        while True:
            last = attempt >= self._retries
            try:
                response = await self._client.request(
                    method,
                    url,
                    headers=headers,
                    timeout=self._client.timeout if timeout_s is None else timeout_s,
                    **body,
                )
            except httpx2.TransportError as exc:
                if last or not (safe or isinstance(exc, _NOT_SENT)):
                    raise self._lost(exc) from exc
                await pause(pause_s(attempt, {}))
            else:
                if response.status_code < 400:
                    return response
                if last or not safe or response.status_code not in BUSY:
                    raise _error(response)
                await pause(pause_s(attempt, response.headers))
            attempt += 1

    @asynccontextmanager
    async def stream(
        self, method: str, path: str, *, params: Mapping[str, Any] | None = None, **more: Any
    ) -> AsyncIterator[httpx2.Response]:
        """A response below 400 whose content is still to be read. Never repeated."""
        try:
            async with self._client.stream(method, with_query(path, params), **more) as response:
                if response.status_code >= 400:
                    await response.aread()
                    raise _error(response)
                yield response
        except httpx2.TransportError as exc:
            raise self._lost(exc) from exc

    @property
    def blocking(self) -> Transport:
        """The same for whoever cannot await; made when first asked for."""
        if self._blocking is None:
            self._blocking = twin(self)
        return self._blocking

    def websocket(self, path: str, params: Mapping[str, Any] | None = None) -> Any:
        """A WebSocket, as a context manager."""
        url = f"ws{self.address.url.removeprefix('http')}{with_query(path, params)}"
        return self._client.websocket(url, timeout=self.timeout_s)

    def _lost(self, exc: httpx2.TransportError) -> Exception:
        where = self.address.shown
        if isinstance(exc, httpx2.TimeoutException):
            return TimeoutExceeded(f"{where} did not answer in time")
        hint = ""
        if isinstance(exc, httpx2.ConnectError):
            hint = "start it with `ringfence serve`; if it is just being started, try again"
        return ServerUnreachable(f"{where}: {str(exc) or type(exc).__name__}", hint=hint)

    async def close(self) -> None:
        """Close the connections; idempotent."""
        if self._blocking is not None:
            let_go(self, self._blocking)
        await self._client.aclose()


def _error(response: httpx2.Response) -> Exception:
    media_type = response.headers.get("content-type", "")
    try:
        form = response.json()
    except ValueError:
        form = None
    return error_of(response.status_code, media_type, form)


def segment(text: str) -> str:
    """`text` as one part of a path: a slash in an id must not lead anywhere else."""
    return quote(text, safe="")
