"""TLS over any stream, as either end of it."""

from __future__ import annotations

import ssl

from ..io.loop import current, pause

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..io.loop import Task
    from ..io.streams import Stream

_PIECE = 1 << 16


class TlsStream:
    """A `Stream` whose bytes are encrypted on the one below, which it owns.

    The far end's end of TLS is an end; that of the stream below it alone is an error, because then
    somebody may have cut the rest off.

    Args:
        server_name: Whom to ask for and to verify; None: this is the server.
    """

    def __init__(
        self, below: Stream, context: ssl.SSLContext, *, server_name: str | None = None
    ) -> None:
        self._below = below
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming,
            self._outgoing,
            server_side=server_name is None,
            server_hostname=server_name,
        )
        self._flushing = False
        self._waiting: list[Task] = []

    async def handshake(self) -> None:
        """Agree with the far end.

        Raises:
            ssl.SSLError: No agreement; it was told, where TLS has words for it.
        """
        try:
            await self._until_done(self._tls.do_handshake)
        finally:
            await self._flush()  # an alert, too

    async def read(self, most: int) -> bytes:
        while True:
            try:
                data = self._tls.read(most)
            except ssl.SSLWantReadError:
                await self._flush()  # an answer to a change of keys
                await self._fill()
            except ssl.SSLZeroReturnError:
                return b""
            else:
                return data

    async def write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[self._tls.write(left[:_PIECE]) :]
            except ssl.SSLWantReadError:
                await self._fill()
            await self._flush()

    async def end(self) -> None:
        try:
            self._tls.unwrap()
        except ssl.SSLError:
            pass  # it wants the far end's end, which `read` will see
        await self._flush()
        await self._below.end()

    def close(self) -> None:
        self._below.close()

    def abort(self) -> None:
        self._below.abort()

    async def _until_done(self, step: Callable[[], object]) -> None:
        while True:
            try:
                step()
            except ssl.SSLWantReadError:
                await self._flush()
                await self._fill()
            else:
                return

    async def _fill(self) -> None:
        data = await self._below.read(_PIECE)
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()

    async def _flush(self) -> None:
        """Hand on what is encrypted. One at a time, as the stream below has one writer."""
        while self._flushing:
            self._waiting.append(current())
            await pause()
        self._flushing = True
        try:
            while data := self._outgoing.read():
                await self._below.write(data)
        finally:
            self._flushing = False
            waiting, self._waiting = self._waiting, []
            for task in waiting:
                task.wake()
