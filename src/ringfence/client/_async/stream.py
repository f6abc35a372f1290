"""An output stream of a process, read from the server's disk across as many connections as needed."""

from __future__ import annotations

from contextlib import aclosing

from ...errors import ServerUnreachable, TimeoutExceeded
from ...model.base.helpful import helpful
from ..answers import pause_s
from .pauses import pause
from .transport import AsyncTransport

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

_PATIENCE = 3  # connections in a row that bring nothing
_FOR_EVER = None


@helpful
class AsyncRemoteStream:
    """Every byte once, but for those that the server had no room for: they are counted.

    Attributes:
        offset: Of the next byte.
    """

    def __init__(self, transport: AsyncTransport, at: str, name: str) -> None:
        self._transport, self._at, self._name = transport, f"{at}/output", name
        self.offset = self._dropped = 0
        self._is_over = False

    @property
    def dropped_bytes(self) -> int:
        """Bytes missing between those that were read."""
        return self._dropped

    @property
    def missed_bytes(self) -> int:
        """The same, by the name that it has for a sandbox of this machine."""
        return self._dropped

    async def read(self, timeout_s: float | None = None) -> bytes:
        """Read the bytes that arrived since the last read; wait for the first; empty at the end of
        the stream.

        Raises:
            TimeoutError: Nothing came within `timeout_s` seconds.
        """
        async with aclosing(self._chunks(timeout_s)) as chunks:
            async for chunk in chunks:
                return chunk
        return b""

    async def getvalue(self) -> bytes:
        """All that comes from here on, to the end."""
        return b"".join([chunk async for chunk in self])

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Chunks until the end."""
        async for chunk in self._chunks(_FOR_EVER):
            yield chunk

    async def lines(self) -> AsyncIterator[str]:
        """Text lines, without their newline, bad bytes replaced."""
        rest = b""
        async for chunk in self:
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                yield line.decode("utf-8", "replace")
        if rest:
            yield rest.decode("utf-8", "replace")

    async def _chunks(self, timeout_s: float | None) -> AsyncGenerator[bytes, None]:
        failures = 0
        while not self._is_over:
            before = self.offset
            try:
                async with aclosing(self._once(timeout_s)) as chunks:
                    async for chunk in chunks:
                        yield chunk
            except TimeoutExceeded as exc:
                raise TimeoutError(f"no output within {timeout_s} s") from exc
            except ServerUnreachable:
                failures = 0 if self.offset > before else failures + 1
                if failures > _PATIENCE:
                    raise
                await pause(pause_s(failures, {}))

    async def _once(self, timeout_s: float | None) -> AsyncGenerator[bytes, None]:
        waits = timeout_s is None or timeout_s > 0
        params = {"stream": self._name, "offset": self.offset, "follow": waits}
        async with self._transport.stream(
            self._at,
            params=params,
            headers={"accept": "application/octet-stream"},
            timeout=timeout_s if waits else self._transport.timeout_s,
        ) as response:
            headers = response.headers
            self.offset = int(headers["x-ringfence-offset"])
            self._dropped += int(headers["x-ringfence-dropped-bytes"])
            async for chunk in response.aiter_raw():
                if chunk:
                    self.offset += len(chunk)
                    yield chunk
            self._is_over = headers.get("x-ringfence-end") == "true"
            if not (waits or self._is_over):
                raise TimeoutExceeded("no output is available")
