# Made by tools/make_sync_client.py of the file of the same name in _async; change that one.
"""An output stream of a process, read from the server's disk across as many connections as needed."""

from __future__ import annotations

from contextlib import closing

from ...errors import ServerUnreachable, TimeoutExceeded
from ...model.base.helpful import helpful
from ..answers import pause_s
from .pauses import pause
from .transport import Transport

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

_PATIENCE = 3  # connections in a row that bring nothing
_FOR_EVER = None


@helpful
class RemoteStream:
    """Every byte once, but for those that the server had no room for: they are counted.

    Attributes:
        offset: Of the next byte.
    """

    def __init__(self, transport: Transport, at: str, name: str) -> None:
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

    def read(self, timeout_s: float | None = None) -> bytes:
        """Read the bytes that arrived since the last read; wait for the first; empty at the end of
        the stream.

        Raises:
            TimeoutError: Nothing came within `timeout_s` seconds.
        """
        with closing(self._chunks(timeout_s)) as chunks:
            for chunk in chunks:
                return chunk
        return b""

    def getvalue(self) -> bytes:
        """All that comes from here on, to the end."""
        return b"".join([chunk for chunk in self])

    def __iter__(self) -> Iterator[bytes]:
        """Chunks until the end."""
        for chunk in self._chunks(_FOR_EVER):
            yield chunk

    def lines(self) -> Iterator[str]:
        """Text lines, without their newline, bad bytes replaced."""
        rest = b""
        for chunk in self:
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                yield line.decode("utf-8", "replace")
        if rest:
            yield rest.decode("utf-8", "replace")

    def _chunks(self, timeout_s: float | None) -> Generator[bytes, None, None]:
        failures = 0
        while not self._is_over:
            before = self.offset
            try:
                with closing(self._once(timeout_s)) as chunks:
                    for chunk in chunks:
                        yield chunk
            except TimeoutExceeded as exc:
                raise TimeoutError(f"no output within {timeout_s} s") from exc
            except ServerUnreachable:
                failures = 0 if self.offset > before else failures + 1
                if failures > _PATIENCE:
                    raise
                pause(pause_s(failures, {}))

    def _once(self, timeout_s: float | None) -> Generator[bytes, None, None]:
        waits = timeout_s is None or timeout_s > 0
        params = {"stream": self._name, "offset": self.offset, "follow": waits}
        with self._transport.stream(
            self._at,
            params=params,
            headers={"accept": "application/octet-stream"},
            timeout=timeout_s if waits else self._transport.timeout_s,
        ) as response:
            headers = response.headers
            self.offset = int(headers["x-ringfence-offset"])
            self._dropped += int(headers["x-ringfence-dropped-bytes"])
            for chunk in response.iter_raw():
                if chunk:
                    self.offset += len(chunk)
                    yield chunk
            self._is_over = headers.get("x-ringfence-end") == "true"
            if not (waits or self._is_over):
                raise TimeoutExceeded("no output is available")
