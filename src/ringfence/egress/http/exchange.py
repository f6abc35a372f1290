"""A request and its response between a sandbox and a server: read strictly, judged, rewritten.

A connection carries one request. Later data of the client is discarded.
"""

from __future__ import annotations

from time import monotonic

from ..io.aside import Aside
from ..io.loop import Deadline, both
from ..refused import Refused
from . import onward as http_onward
from .answer import answer_length, parse_answer, switches
from .body import LAST_CHUNK, Body, chunk
from .fields import CHUNKED, UNTIL_CLOSE
from .head import check_beginning, parse_request
from .reader import Reader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ...model.net.network import NetworkLimits
    from ..io.streams import Stream
    from .answer import AnswerHead
    from .head import RequestHead
    from .onward import Header
    from .site import Site

_LONGEST_ANSWER_HEAD = 1 << 16  # of the server's, which no rule limits: cookies and policies
_MOST_INTERIM = 32
_DRAIN_S, _DRAIN_BYTES = 1.0, 1 << 20
_FLUSH_S = 0.2  # the beginning of a secret does not hold a message of a WebSocket up for longer
_REASONS = {
    400: "Bad Request",
    403: "Forbidden",
    405: "Method Not Allowed",
    408: "Request Timeout",
    417: "Expectation Failed",
    431: "Request Header Fields Too Large",
    501: "Not Implemented",
    502: "Bad Gateway",
    504: "Gateway Timeout",
    505: "HTTP Version Not Supported",
}


async def exchange(
    client: Stream, site: Site, reach: Callable[[], Awaitable[Stream]], *, first: bytes = b""
) -> None:
    """Serve the one request of a connection that was let through to `site`; closes both streams.

    The client of a refused request is told why before its connection ends.

    Args:
        reach: Connects to the server; called once the request is allowed. May raise Refused.
        first: What was read from `client` already.

    Raises:
        Refused: Nothing was passed on, or it was broken off; for the record.
        OSError: The client went away.
    """
    reader = Reader(client, first)
    try:
        head = await read_request(reader, site.limits, scheme=site.scheme, port=site.port)
        if head is None:
            client.close()
            return
        await pass_on(reader, head, site, reach)
    except Refused as refused:
        await tell(reader, refused, method=site.request.method if site.request else "")
        raise
    except BaseException:
        client.abort()
        raise
    await part(reader)


async def read_request(
    reader: Reader, limits: NetworkLimits, *, scheme: str = "http", port: int | None = None
) -> RequestHead | None:
    """Read the head of a request; None when the client ended the connection instead.

    Raises:
        Refused: It is malformed, too long, or took too long.
    """
    try:
        with Deadline(limits.header_s):
            data = await reader.head(limits.header_bytes, status=431, check=check_beginning)
    except TimeoutError:
        raise Refused(f"no request head within {limits.header_s:g} s", status=408) from None
    return parse_request(data, scheme, port) if data else None


async def pass_on(
    reader: Reader, head: RequestHead, site: Site, reach: Callable[[], Awaitable[Stream]]
) -> None:
    """Judge a request that was read, and carry it and its answer; closes the server's stream.

    Raises:
        Refused: By rule, or because of what the server said. The client is still to be told, unless
            it has seen part of an answer: then this is BrokenOff.
        OSError: The client went away.
    """
    credentials = site.admit(head)
    server = await _reached(reach)
    try:
        await _Passing(reader, head, site, server).run(credentials)
    except BaseException:
        server.abort()
        raise
    server.close()


async def _reached(reach: Callable[[], Awaitable[Stream]]) -> Stream:
    try:
        return await reach()
    except TimeoutError:
        raise Refused("the server cannot be reached in time", status=504) from None
    except OSError as exc:
        raise Refused(f"the server cannot be reached: {exc.strerror or exc}", status=502) from exc


class BrokenOff(Refused):
    """It went wrong after the client had seen part of an answer: its connection must break, too."""


async def tell(reader: Reader, refused: Refused, *, method: str = "") -> None:
    """Tell a client why it was refused, and end its connection; broken off, just end it."""
    if isinstance(refused, BrokenOff):
        reader.stream.abort()
        return
    body = f"ringfence: {refused.reason}\n".encode("ascii", "backslashreplace")
    head = (
        f"HTTP/1.1 {refused.status} {_REASONS.get(refused.status, 'Refused')}\r\n"
        f"Content-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    try:
        with Deadline(_DRAIN_S):
            await reader.stream.write(head.encode("ascii") + (b"" if method == "HEAD" else body))
    except (OSError, TimeoutError):
        reader.stream.abort()
        return
    await part(reader)


async def part(reader: Reader) -> None:
    """End a connection so that what was written arrives.

    Closing one with bytes unread sends a reset, which takes away what the client has not read yet:
    so what it still says is read, for a moment, and dropped.
    """
    client, left = reader.stream, _DRAIN_BYTES
    try:
        with Deadline(_DRAIN_S):
            await client.end()
            while left > 0 and (data := await reader.read()):
                left -= len(data)
    except (OSError, TimeoutError):
        pass
    client.close()


class _Passing:
    def __init__(self, reader: Reader, head: RequestHead, site: Site, server: Stream) -> None:
        self._reader, self._head, self._site = reader, head, site
        self._server = Reader(server)
        self._scrubber = site.scrubber()
        self._active_at = monotonic()
        self._begun = False  # the client has seen part of the answer

    async def run(self, credentials: Sequence[Header]) -> None:
        onward = http_onward.request(self._head, credentials, scrubbed=self._site.has_secrets)
        try:
            await self._begin(onward)
            async with Aside(self._send_body()):
                answer = await self._final_answer()
                if answer.status != 101:
                    await self._answer_body(answer)
            if answer.status == 101:
                await self._switch(answer)
        except Refused as refused:
            if self._begun:
                raise BrokenOff(refused.reason, status=refused.status) from refused
            raise

    # -- the request --------------------------------------------------------------------------

    async def _begin(self, head: bytes) -> None:
        try:
            await self._to_server(head)
        except OSError as exc:
            raise Refused(
                f"the server closed the connection: {exc.strerror or exc}", status=502
            ) from exc

    async def _send_body(self) -> None:
        """All of the body, and not one byte more."""
        body = Body(self._head.length)
        while not body.done:
            data = await self._reader.read()
            if not data:
                body.close()
            payload = body.feed(data)
            if self._head.length == CHUNKED:
                payload = chunk(payload) + (LAST_CHUNK if body.done else b"")
            try:
                await self._to_server(payload)
            except OSError:
                return  # it may have answered before it closed: the answer tells
        if not self._head.upgrades:
            # Discard later data of the client: another request, or an end. A reset raises: no one
            # waits for the response any more.
            await self._reader.read()

    # -- the answer ---------------------------------------------------------------------------

    async def _final_answer(self) -> AnswerHead:
        for _ in range(_MOST_INTERIM):
            answer = parse_answer(await self._from_server(self._answer_head))
            if not answer.is_interim:
                self._site.status = answer.status
                return answer
            await self._to_client(self._scrubber.whole(http_onward.answer(answer, 0)))
        raise Refused("the server sent too many interim answers", status=502)

    async def _answer_head(self) -> bytes:
        try:
            head = await self._server.head(_LONGEST_ANSWER_HEAD, status=502)
        except Refused as refused:
            raise Refused(f"the server: {refused.reason}", status=502) from None
        if not head:
            raise Refused("the server ended the connection without an answer", status=502)
        return head

    async def _answer_body(self, answer: AnswerHead) -> None:
        length = answer_length(answer, self._head.method)
        if length and self._site.has_secrets:
            _check_whole(answer)
        # A client of HTTP/1.0 knows no chunks; its answer lasts as long as the connection.
        chunked = length == CHUNKED and self._head.version == "HTTP/1.1"
        told = UNTIL_CLOSE if length == CHUNKED and not chunked else length
        await self._to_client(self._scrubber.whole(http_onward.answer(answer, told)))
        body = Body(length, lenient=True)
        while not body.done:
            data = await self._from_server(self._server.read)
            payload = self._scrubber.feed(body.feed(data))
            if not data:
                body.close()
            if body.done:
                payload += self._scrubber.finish()
            if chunked:
                payload = chunk(payload) + (LAST_CHUNK if body.done else b"")
            await self._to_client(payload)

    # -- a WebSocket --------------------------------------------------------------------------

    async def _switch(self, answer: AnswerHead) -> None:
        if not switches(self._head, answer):
            raise Refused("the server switched to another protocol than requested", status=502)
        head = http_onward.answer(answer, 0, switched=True)
        await self._to_client(self._scrubber.whole(head))
        await both(self._out(), self._back())

    async def _out(self) -> None:
        while data := await self._patiently(self._reader.read):
            await self._to_server(data)
        await self._server.stream.end()

    async def _back(self) -> None:
        """The server's bytes, without secrets; what may be the beginning of one waits, but not long."""
        while True:
            try:
                with Deadline(_FLUSH_S if self._scrubber.holds else None):
                    data = await self._from_server(self._server.read)
            except TimeoutError:
                await self._to_client(self._scrubber.finish())
                continue
            await self._to_client(self._scrubber.feed(data) if data else self._scrubber.finish())
            if not data:
                await self._reader.stream.end()
                return

    # -- both ways ----------------------------------------------------------------------------

    async def _to_server(self, data: bytes) -> None:
        self._active_at = monotonic()
        if data:
            await self._server.stream.write(data)

    async def _to_client(self, data: bytes) -> None:
        self._active_at = monotonic()
        if data:
            self._begun = True
            with Deadline(self._site.limits.idle_s):
                await self._reader.stream.write(data)

    async def _from_server(self, read: Callable[[], Awaitable[bytes]]) -> bytes:
        try:
            return await self._patiently(read)
        except OSError as exc:
            raise Refused(
                f"the server closed the connection: {exc.strerror or exc}", status=502
            ) from exc

    async def _patiently(self, read: Callable[[], Awaitable[bytes]]) -> bytes:
        """Read for as long as something moves, in whichever direction.

        Raises:
            Refused: Nothing moves any more.
        """
        while True:
            left_s = self._active_at + self._site.limits.idle_s - monotonic()
            if left_s <= 0:
                raise Refused("idle for too long", status=504)
            deadline = Deadline(left_s)
            try:
                with deadline:
                    data = await read()
            except TimeoutError:
                if not deadline.expired:
                    raise
                continue
            self._active_at = monotonic()
            return data


def _check_whole(answer: AnswerHead) -> None:
    """Refuse what was not asked for: a coded answer, a part of one (206), a difference (226)."""
    coding = answer.fields.tokens("content-encoding") - {"identity"}
    is_part = answer.status in (206, 226)
    if coding or is_part:
        raise Refused(
            f"the server's answer is {'a part' if is_part else f'coded ({min(coding)})'} although that"
            " was not requested, so it cannot be searched for secrets",
            status=502,
        )
