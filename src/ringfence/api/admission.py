"""How much is taken in at once, and how patiently."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from ..errors import ResourceExhausted, TooLarge, TooManyRequests, TooSlow

TYPE_CHECKING = False
if TYPE_CHECKING:
    from starlette.types import Message, Receive

    from .access.caller import Caller
    from .bounds import Bounds


class Admission:
    """Counts requests that are being served."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._of: Counter[str] = Counter()
        self.now = 0
        self._bytes_of: Counter[str] = Counter()

    def begin(self, caller: Caller) -> None:
        """A request of this caller is being served, until `end`.

        Raises:
            ResourceExhausted: As many as may be are being served.
            TooManyRequests: As many of this client's, or with this key.
        """
        if self.now >= self.bounds.requests:
            raise ResourceExhausted(f"{self.now} requests are in progress")
        mine = self._of[_client(caller)]
        if mine >= self.bounds.requests_of_client:
            raise TooManyRequests(f"{mine} requests of this client are in progress")
        with_key = self._of[caller.key]
        if caller.max_requests is not None and with_key >= caller.max_requests:
            raise TooManyRequests(
                f"{with_key} requests with this key are in progress", field="max_requests"
            )
        self.now += 1
        self._of.update((_client(caller), caller.key))

    def end(self, caller: Caller) -> None:
        self.now -= 1
        self._of -= Counter((_client(caller), caller.key))  # one less, and never a name with none

    def hold(self, caller: Caller, size: int) -> None:
        """Count bytes of a body as held in memory, until `drop`.

        Raises:
            ResourceExhausted: As many as may be are held.
            TooManyRequests: As many for this client.
        """
        if self._bytes_of.total() + size > self.bounds.bodies_bytes:
            raise ResourceExhausted(f"bodies of {self.bounds.bodies_bytes} bytes are being served")
        if self._bytes_of[caller.client] + size > self.bounds.bodies_bytes_of_client:
            raise TooManyRequests(
                f"bodies of {self.bounds.bodies_bytes_of_client} bytes of this client are being served",
                hint="send fewer long bodies at once",
            )
        self._bytes_of[caller.client] += size

    def drop(self, caller: Caller, size: int) -> None:
        self._bytes_of -= Counter({caller.client: size})


def _client(caller: Caller) -> str:
    return f"client {caller.client}"  # no key is called that


class Body:
    """A request's body, bounded in size and time; `close` once the request has been served."""

    def __init__(
        self, receive: Receive, admission: Admission, caller: Caller, *, streamed: bool
    ) -> None:
        self._receive, self._bounds, self._streamed = receive, admission.bounds, streamed
        self._admission, self._caller = admission, caller
        self._held = 0
        self._taken, self._whole = 0, False
        self._until = time.monotonic() + self._bounds.body_s

    async def __call__(self) -> Message:
        """The next piece.

        Raises:
            TooLarge: There is more than may be.
            TooSlow: It does not come.
        """
        if self._whole:
            return await self._receive()  # the client's leaving, which may take as long as it likes
        left = self._bounds.chunk_s if self._streamed else self._until - time.monotonic()
        try:
            async with asyncio.timeout(left):  # not `wait_for`, which makes a task of each piece
                message = await self._receive()
        except TimeoutError:
            raise TooSlow("the body did not arrive in time") from None
        if message["type"] == "http.request":
            size = len(message.get("body", b""))
            self._taken += size
            self._whole = not message.get("more_body", False)
            if not self._streamed and self._taken > self._bounds.body_bytes:
                raise TooLarge(f"the body is larger than {self._bounds.body_bytes} bytes")
            if not self._streamed:
                self._admission.hold(self._caller, size)
                self._held += size
        else:
            self._whole = True
        return message

    def close(self) -> None:
        self._admission.drop(self._caller, self._held)
        self._held = 0
