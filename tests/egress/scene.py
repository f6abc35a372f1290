"""A client, what is between, and a server: three ends of real connections, in one loop."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringfence.egress.http.exchange import exchange
from ringfence.egress.http.scrub import Secrets
from ringfence.egress.http.site import Site
from ringfence.egress.io.loop import Loop, Task, current, pause
from ringfence.egress.io.streams import SocketStream
from ringfence.egress.refused import Refused
from ringfence.model.net.network import NetworkLimits, NetworkPolicy
from ringfence.model.net.rules import NetworkRule
from ringfence.policy.network import Judge

if TYPE_CHECKING:
    from ringfence.egress.io.streams import Stream

Script = Callable[["Stream"], Coroutine[None, None, None]]
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
QUICK = NetworkLimits(header_s=0.3, idle_s=0.5, connect_s=0.5)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return one, other


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Whatever needs a new descriptor meanwhile gets EMFILE."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    least_free = os.open("/dev/null", os.O_RDONLY)
    os.close(least_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (least_free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def a_site(
    *rules: NetworkRule,
    host: str = "a.test",
    port: int = 80,
    scheme: str = "http",
    secrets: dict[str, str] | None = None,
    limits: NetworkLimits | None = None,
) -> Site:
    """A site of `a.test`, under these rules or one that allows everything of it."""
    given = rules or (NetworkRule("a.test"), NetworkRule("127.0.0.0/8"))
    policy = NetworkPolicy(rules=given, limits=limits or NetworkLimits())
    return Site(host, port, Judge(policy), scheme=scheme, secrets=Secrets(secrets or {}))


async def all_of(stream: Stream) -> bytes:
    """Everything up to the end; a reset leaves the mark `<reset>`."""
    received = b""
    try:
        while data := await stream.read(1 << 16):
            received += data
    except ConnectionResetError:
        received += b"<reset>"
    return received


async def until(stream: Stream, end: bytes) -> bytes:
    """Bytes up to and with `end`; fewer when the stream ends before."""
    received = b""
    try:
        while end not in received and (data := await stream.read(1 << 16)):
            received += data
    except ConnectionResetError:
        received += b"<reset>"
    return received


@dataclass
class Outcome:
    """What each end got.

    Attributes:
        served: What the server read; None when nobody connected to it.
        error: What the exchange raised.
    """

    received: bytes = b""
    served: bytes | None = None
    error: BaseException | None = None

    @property
    def reason(self) -> str:
        assert isinstance(self.error, Refused), repr(self.error)
        return self.error.reason


def answering(answer: bytes, *, after: bytes = b"\r\n\r\n") -> Callable[[Outcome], Script]:
    """A server that reads up to `after`, says `answer`, and notes everything that comes."""

    def make(outcome: Outcome) -> Script:
        async def serve(stream: Stream) -> None:
            outcome.served = await until(stream, after)
            if not outcome.served.endswith(b"<reset>"):
                await stream.write(answer)
                await stream.end()
                outcome.served += await all_of(stream)
            stream.close()

        return serve

    return make


def saying(request: bytes) -> Callable[[Outcome], Script]:
    """A client that says `request` and reads to the end."""

    def make(outcome: Outcome) -> Script:
        async def talk(stream: Stream) -> None:
            await stream.write(request)
            outcome.received = await all_of(stream)
            stream.close()

        return talk

    return make


Middle = Callable[["Stream", Site, Callable[[], Awaitable["Stream"]]], Awaitable[None]]


def play(
    client: Callable[[Outcome], Script],
    server: Callable[[Outcome], Script],
    site: Site,
    middle: Middle = exchange,
) -> Outcome:
    """Let all three run to their ends."""
    outcome = Outcome()

    async def between(stream: Stream, reach: Callable[[], Awaitable[Stream]]) -> None:
        try:
            await middle(stream, site, reach)
        except (Refused, OSError) as exc:
            outcome.error = exc

    async def scene() -> None:
        me = current()

        def start(coroutine: Coroutine[None, None, None]) -> None:
            task = Task(me.loop, coroutine)
            task.on_done = me.wake
            tasks.append(task)
            task.step()

        async def reach() -> Stream:
            ours, theirs = tcp_pair()
            start(server(outcome)(SocketStream(theirs)))
            return SocketStream(ours)

        tasks: list[Task] = []
        ours, theirs = tcp_pair()
        start(client(outcome)(SocketStream(theirs)))
        start(between(SocketStream(ours), reach))
        while not all(task.done for task in tasks):
            await pause()
        for task in tasks:
            task.result()

    loop = Loop()
    try:
        loop.run_until_done(scene())
    finally:
        loop.close()
    return outcome
