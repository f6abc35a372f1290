"""A connection of a sandbox, from its arrival to its entry in the record."""

from __future__ import annotations

from time import time

from .io.loop import Cancelled, Task
from .io.relay import Relay
from .io.streams import SocketStream, prepare
from .refused import Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket as socket
    from collections.abc import Coroutine
    from typing import Any

    from .http.site import Site
    from .io.streams import Stream
    from .rules import Ruled


_OF_SERVERS = (502, 504)  # HTTP statuses that say: it was allowed, and the server failed


class Connection:
    """Made for every socket that a sandbox's listener accepts.

    Attributes:
        kind: As in the record: `tcp`, `connect`, `socks`, `http`.
        host: The name it is for; empty for an address.
        address: Where it leads, as text; empty until it is known.
        is_opaque: What is said over it is not looked at any more.
    """

    def __init__(self, sandbox: Ruled, sock: socket.socket) -> None:
        self.sandbox, self.client = sandbox, sock
        self.loop = sandbox.commons.loop
        self.kind = "tcp"
        self.host = self.address = ""
        self.port = 0
        self.rule = ""
        self.is_opaque = False
        self.is_recorded = True
        self.site: Site | None = None
        self.relay: Relay | None = None
        self.streams: list[Stream] = []  # to be broken off with it
        self.bytes_in = self.bytes_out = 0
        self._task: Task | None = None
        self._why = ""
        self._is_over = False
        self._began_at, self._began = self.loop.now, time()
        sandbox.commons.connections += 1

    # -- beginning ----------------------------------------------------------------------------

    def aim(self, name: str | None, address: str) -> None:
        """Say whom it is for: a name, or without one an address.

        Raises:
            Refused: The policy does not allow it.
        """
        if name is not None:
            self.host = name
            decision = self.sandbox.judge_name(name, self.port)
        else:
            self.address = address
            decision = self.sandbox.judge_address(None, address, self.port)
        self.rule = decision.rule
        if not decision:
            raise Refused(decision.reason)

    def stream(self, first: bytes = b"") -> SocketStream:
        """The client's side, to be read and written."""
        stream = SocketStream(self.client, first)
        self.streams.append(stream)
        return stream

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = task = Task(self.loop, self._run(work))
        task.on_done = self._task_ended
        task.step()

    def join(self, client: SocketStream, server: SocketStream) -> Relay:
        """A relay between both, yet to be started; what was read already is to be passed on."""
        commons = self.sandbox.commons
        self.streams.clear()
        self.relay = relay = Relay(
            self.loop,
            commons.pipes,
            client.release(),
            server.release(),
            meter=self.sandbox.meter,
            idle_s=self.sandbox.limits.idle_s,
            on_end=self._end,
        )
        relay.out.put(client.first)
        relay.back.put(server.first)
        return relay

    # -- ending -------------------------------------------------------------------------------

    def refuse(self, reason: str) -> None:
        """Break it off before anything was let through."""
        self._end(reason, allowed=False)

    def count_out(self, count: int) -> None:
        self.bytes_out += count

    def count_in(self, count: int) -> None:
        self.bytes_in += count

    def cut(self, reason: str) -> None:
        """Break it off: the client sees a reset."""
        self._why = reason
        if self.relay is not None:
            self.relay.cut(reason)
        elif self._task is not None:
            self._task.cancel()
        else:
            self._end(reason)

    def judge_again(self) -> None:
        """Cut it, if the policy that holds now does not allow it."""
        if self._is_over or not self.port or not (self.host or self.address):
            return
        if self.site is not None:
            self.site.renew(self.sandbox.judge, self.sandbox.secrets)
        if reason := self._objection():
            self.cut(f"no longer allowed: {reason}")

    def _objection(self) -> str:
        sandbox, name = self.sandbox, self.host or None
        if name is not None:
            decision = sandbox.judge_name(name, self.port)
            if not decision:
                return decision.reason
            if self.is_opaque and sandbox.terminates(name, self.port):
                return "the policy checks each request to it"
            request = self.site.request if self.site else None
            if request is not None:
                decision = sandbox.judge.http_allowed(
                    name, self.port, request.method, request.target
                )
                if not decision:
                    return decision.reason
        if self.address:
            decision = sandbox.judge_address(name, self.address, self.port)
            if not decision:
                return decision.reason
        return ""

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Refused as exc:
            self._end(exc.reason, allowed=exc.status in _OF_SERVERS)
        except TimeoutError as exc:
            self._end(str(exc) or "it exceeded its time limit")
        except OSError as exc:
            self._end(exc.strerror or str(exc))
        except Cancelled:
            self._end(self._why)
        else:
            if self.relay is None:
                self._end("")

    def _task_ended(self) -> None:
        task, self._task = self._task, None
        error = task.error if task is not None else None
        if error is not None:
            self._end("an internal error of the egress process")
            self.loop.on_fault(error)

    def _end(self, reason: str, *, allowed: bool = True) -> None:
        if self._is_over:
            return
        self._is_over = True
        for stream in self.streams:
            stream.abort()
        if self.relay is None and not self.streams:
            prepare(self.client)
            self.client.close()
        self.streams.clear()
        self.sandbox.connections.discard(self)
        self.sandbox.commons.connections -= 1
        if self.is_recorded:
            self._record(reason, allowed)
        self.sandbox.part()
        self.relay = None

    def _record(self, reason: str, allowed: bool) -> None:
        sandbox = self.sandbox
        sandbox.commons.record.add(sandbox.id, **self.event(reason, allowed=allowed))

    def event(self, reason: str = "", *, allowed: bool = True) -> dict[str, Any]:
        """The line in the record, as far as it can be written now."""
        relay = self.relay
        more: dict[str, Any] = {}
        if self.site is not None and self.site.request is not None:
            request = self.site.request
            more = {"method": request.method, "path": request.target}
        return {
            "kind": "http" if more else self.kind,
            "time": self._began,
            "host": self.host,
            "address": self.address,
            "port": self.port,
            "allowed": allowed,
            "reason": reason,
            "rule": (self.site.rule if self.site else "") or self.rule,
            "bytes_in": self.bytes_in + (relay.back.count if relay is not None else 0),
            "bytes_out": self.bytes_out + (relay.out.count if relay is not None else 0),
            "duration_s": round(self.loop.now - self._began_at, 6),
            **more,
        }
