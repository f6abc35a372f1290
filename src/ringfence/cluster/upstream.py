"""Requests from a gateway to a node: HTTP/1.1 on connections that are kept, bodies in pieces."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections import deque

import httptools

from ..errors import InvalidRequest, ServerUnreachable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from typing import Any

_MOST_IDLE = 64
_IDLE_S = 30.0  # a daemon closes a connection that is idle for 75 s
_CONNECT_S = 5.0
_MOST_UNREAD = 256 << 10
_MOST_WHOLE = 64 << 20
_TARGET = re.compile(rb"/[!-~\x80-\xff]*")
_RETRIED = (b"GET", b"HEAD")

Headers = list[tuple[bytes, bytes]]


class NotSent(ServerUnreachable):
    """Nothing listens at the node: it has not seen the request."""


class Pool:
    """Connections to nodes. Of one event loop.

    Args:
        tls: For nodes on other machines.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.tls = tls
        self._idle: dict[str, deque[tuple[float, _Connection]]] = {}

    async def exchange(
        self, address: str, method: bytes, target: bytes, headers: Headers, body: bytes | None
    ) -> Answer:
        """Send a request, and wait for the head of the answer.

        Args:
            address: `unix:PATH` or `https://HOST:PORT`.
            body: The whole of it; None: the caller sends it in pieces, with `Answer.connection`.

        Raises:
            NotSent: There is no connection.
            ServerUnreachable: It was lost before the answer began.
        """
        answer = await self.open(address, method, target, headers, body)
        try:
            await answer.head()
        except ServerUnreachable:
            # The node may have closed an idle connection just then. What reads can be asked again.
            if not answer.is_reused or method not in _RETRIED or body is None:
                raise
            answer = await self.open(address, method, target, headers, body, is_new=True)
            await answer.head()
        except asyncio.CancelledError:
            answer.abort()
            raise
        return answer

    async def open(
        self,
        address: str,
        method: bytes,
        target: bytes,
        headers: Headers,
        body: bytes | None,
        *,
        is_new: bool = False,
    ) -> Answer:
        """Send the head of a request, and the body if there is one.

        Raises:
            InvalidRequest: The target or a header could be read as more than one; nothing was sent.
            NotSent: There is no connection.
        """
        if not _TARGET.fullmatch(target):
            raise InvalidRequest("has characters that no address has", field="path")
        lines = [b"%b %b HTTP/1.1\r\n" % (method, target)]
        lines += [b"%b: %b\r\n" % each for each in headers]
        if body is not None and (body or method not in (b"GET", b"HEAD", b"DELETE")):
            lines.append(b"content-length: %d\r\n" % len(body))
        head = b"".join(lines)
        # A node reads what follows a line break as a header, or as a request, of the gateway's own.
        if not head.count(b"\r") == head.count(b"\n") == len(lines) or b"\0" in head:
            raise InvalidRequest("has a line break or a null byte", field="headers")
        connection = None if is_new else self._take(address)
        is_reused = connection is not None
        if connection is None:
            connection = await _connect(address, self)
        answer = connection.begin(method, is_reused)
        connection.transport.write(b"".join((head, b"\r\n", body or b"")))
        return answer

    def _take(self, address: str) -> _Connection | None:
        waiting, now = self._idle.get(address), asyncio.get_running_loop().time()
        while waiting:
            since, found = waiting.pop()
            if not found.transport.is_closing():
                if now - since < _IDLE_S:
                    return found
                found.transport.close()
        return None

    def give_back(self, connection: _Connection) -> None:
        """Keep a connection whose exchange is over."""
        waiting = self._idle.setdefault(connection.address, deque())
        waiting.append((asyncio.get_running_loop().time(), connection))
        if len(waiting) > _MOST_IDLE:
            waiting.popleft()[1].transport.close()

    def forget(self, address: str) -> None:
        """Close what is kept of a node that is gone."""
        for _, each in self._idle.pop(address, ()):
            each.transport.close()

    def close(self) -> None:
        for address in [*self._idle]:
            self.forget(address)


class Answer:
    """An answer as it comes in.

    Attributes:
        status: Once the head is there.
        headers: As they were sent.
        is_over: The whole body is there.
        is_sent: The whole body of the request was sent.
        is_aborted: It was given up here; the node is not at fault.
    """

    def __init__(self, connection: _Connection, method: bytes, is_reused: bool) -> None:
        self.connection, self.is_reused = connection, is_reused
        self.status, self.headers = 0, Headers()
        self.is_over = self.is_aborted = False
        self.is_sent = True
        self._is_head = method == b"HEAD"
        self._head: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pieces: deque[bytes] = deque()
        self._unread = 0
        self._news = asyncio.Event()
        self._lost: ServerUnreachable | None = None

    async def head(self) -> None:
        await self._head

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body, as it comes.

        Raises:
            ServerUnreachable: The rest cannot be had.
        """
        while True:
            while self._pieces:
                piece = self._pieces.popleft()
                self._unread -= len(piece)
                yield piece
            if self.is_over:
                return
            self.connection.read_on(self._unread)
            if self._lost is not None:
                raise self._lost
            self._news.clear()
            await self._news.wait()

    async def whole(self) -> bytes:
        """The whole body.

        Raises:
            ServerUnreachable: It is too long, or the rest of it cannot be had.
        """
        found = []
        size = 0
        async for piece in self.pieces():
            found.append(piece)
            size += len(piece)
            if size > _MOST_WHOLE:
                self.abort()
                raise ServerUnreachable("a node's answer is too long")
        return b"".join(found)

    def taken(self) -> bytes:
        """The part of the body that has come already; it is not given again."""
        found = b"".join(self._pieces)
        self._pieces.clear()
        self._unread = 0
        return found

    def abort(self) -> None:
        """Stop listening: the node notices that nobody waits any more, or sends the rest of a body."""
        if not self.is_over:
            self.is_aborted = True
        if not (self.is_over and self.is_sent):  # else it serves others now
            self.connection.transport.abort()

    # -- called by the connection ---------------------------------------------------------------

    def begin(self, status: int) -> bool:
        """The head is whole; return whether the body is left out."""
        self.status = status
        if not self._head.done():
            self._head.set_result(None)
        return self._is_head

    def add(self, piece: bytes) -> int:
        """Return how many bytes wait to be read."""
        self._pieces.append(piece)
        self._unread += len(piece)
        self._news.set()
        return self._unread

    def end(self) -> None:
        self.is_over = True
        self._news.set()

    def lose(self, why: str) -> None:
        if self.is_over:
            return
        hint = "the result of the request is unknown: look, or ask again with an idempotency key"
        self._lost = ServerUnreachable(f"the node went away: {why}", hint=hint)
        if not self._head.done():
            self._head.set_exception(self._lost)
            self._head.exception()  # it may be that nobody waits
        self._news.set()


class _Connection(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, address: str, pool: Pool) -> None:
        self.address, self._pool = address, pool
        self._answer: Answer | None = None
        self._is_paused = False
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._is_to_close = False

    def begin(self, method: bytes, is_reused: bool) -> Answer:
        self._answer = Answer(self, method, is_reused)
        self._parser = httptools.HttpResponseParser(self)
        self._is_to_close = False
        self._is_sent = True
        return self._answer

    # -- sending --------------------------------------------------------------------------------

    def hold_open(self) -> None:
        """Note that pieces of a body follow: the connection is not free until `sent`."""
        self._is_sent = False

    async def send(self, data: bytes) -> None:
        """Write, as fast as the node reads."""
        if self.transport.is_closing():
            return  # the answer tells why
        self.transport.write(data)
        await self._may_write.wait()

    def sent(self) -> None:
        self._is_sent = True
        if self._answer is None:
            self._free()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    # -- receiving ------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self._answer is None:
            self.transport.abort()  # nothing was asked for
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self._lose(f"it answered in another protocol: {exc}")
            self.transport.abort()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._may_write.set()
        if self._answer is not None and self._answer.status and self._ends_with_connection:
            self._answer.end()
        self._lose(str(exc) if exc else "the connection was closed")

    def _lose(self, why: str) -> None:
        if self._answer is not None:
            answer, self._answer = self._answer, None
            answer.lose(why)

    def read_on(self, unread: int) -> None:
        """Read again, when little is left unread."""
        if self._is_paused and unread < _MOST_UNREAD and not self.transport.is_closing():
            self._is_paused = False
            self.transport.resume_reading()

    def _free(self) -> None:
        if self._is_to_close or self._is_paused or not self._is_sent:
            if self._is_to_close:
                self.transport.close()
            return
        self._pool.give_back(self)

    # -- the parser's ---------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self._answer is not None
        self._answer.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        answer = self._answer
        assert answer is not None
        status = self._parser.get_status_code()
        if status < 200:
            answer.headers.clear()  # 100: the final one follows
            return
        names = {name for name, _ in answer.headers}
        self._ends_with_connection = not names & {b"content-length", b"transfer-encoding"}
        self._is_to_close = not self._parser.should_keep_alive()
        if answer.begin(status):
            self._is_to_close = True  # the parser waits for a body that HEAD has not
            self._complete()

    _ends_with_connection = False

    def on_body(self, body: bytes) -> None:
        answer = self._answer
        if answer is not None and answer.add(body) > _MOST_UNREAD and not self._is_paused:
            self._is_paused = True
            self.transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._answer is not None and self._answer.status:
            self._complete()

    def _complete(self) -> None:
        answer, self._answer = self._answer, None
        if self._is_paused:
            self._is_paused = False
            self.transport.resume_reading()
        self._free()
        assert answer is not None
        answer.end()


def host_of(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("https://").rpartition(":")
    return host.strip("[]"), int(port)


async def _connect(address: str, pool: Pool) -> _Connection:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_CONNECT_S):
            if address.startswith("unix:"):
                path = address.removeprefix("unix:")
                _, made = await loop.create_unix_connection(
                    lambda: _Connection(address, pool), path
                )
            else:
                host, port = host_of(address)
                _, made = await loop.create_connection(
                    lambda: _Connection(address, pool), host, port, ssl=pool.tls
                )
    except (OSError, TimeoutError) as exc:  # an ssl.SSLError is an OSError
        raise NotSent(f"the node does not answer: {str(exc) or 'it is too slow'}") from exc
    return made


def without(headers: Iterable[tuple[bytes, bytes]], names: frozenset[bytes]) -> Headers:
    """Headers that a proxy passes on: not those of one connection (RFC 9110 section 7.6.1)."""
    found = [*headers]
    named = {
        name.strip().lower()
        for key, value in found
        if key == b"connection"
        for name in value.split(b",")
    }
    return [each for each in found if each[0] not in names and each[0] not in named]


HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding")
) | {b"upgrade", b"proxy-authenticate", b"proxy-authorization"}

__all__ = ["HOP_BY_HOP", "Answer", "NotSent", "Pool", "host_of", "without"]
