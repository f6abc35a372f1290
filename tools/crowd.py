"""Many clients at once on one daemon, and a check of the history that they saw.

    python tools/crowd.py [--clients 100] [--seconds 300] [--kills 0] [--json]

Each client makes a sandbox, runs commands in it, writes and reads files, follows a stream, deletes it,
and begins anew. Others list meanwhile. At the end nothing may have failed, nothing may be left, and no
list may have shown a sandbox that was gone or missed one that was there: every sandbox is a register
that goes from absent to present to absent once, and every list a read of all of them within its time.

With --kills the daemon is killed that often meanwhile, at random moments, and started again. Who got no
answer asks again: a create under the same key, a delete, a read. What it asked for happened somewhere
between the first time and the answer, and still only once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from ringfence.bench.daemon import Daemon
from ringfence.client import AsyncClient, AsyncRemoteSandbox
from ringfence.errors import RingfenceError, SandboxLost, ServerUnreachable

MIB = 1 << 20
LISTERS = 3
BACK_WITHIN_S = 60.0


@dataclass(frozen=True)
class Span:
    """A call, from before it was sent until after it was answered, on one clock."""

    start: float
    end: float


@dataclass
class History:
    """What happened to which sandbox, and what lists showed."""

    created: dict[str, Span] = field(default_factory=dict)
    deleted: dict[str, Span] = field(default_factory=dict)
    lists: list[tuple[Span, frozenset[str]]] = field(default_factory=list)

    def violations(self) -> list[str]:
        """Every way in which the lists contradict the rest; empty when an order explains them all."""
        found = []
        first_gone: dict[str, float] = {}  # by id, the earliest moment it is known to be gone
        for span, seen in sorted(self.lists, key=lambda each: each[0].end):
            for each in seen:
                made, ended = self.created.get(each), self.deleted.get(each)
                if made is not None and made.start > span.end:
                    found.append(f"{each} was listed before it was asked for")
                if ended is not None and ended.end < span.start:
                    found.append(f"{each} was listed after it was deleted")
                if first_gone.get(each, span.start) < span.start:
                    found.append(f"{each} was gone from a list, and came back")
            for each, made in self.created.items():
                if made.end < span.start and each not in seen:
                    ended = self.deleted.get(each)
                    if ended is None or ended.start > span.end:
                        found.append(f"{each} was there, and not listed")
                    first_gone.setdefault(each, span.end)
        return found


@dataclass
class Report:
    """How it went."""

    clients: int
    seconds: float
    cycles: int
    calls: dict[str, int]
    errors: list[str]
    violations: list[str]
    left: int
    lists: int
    kills: int
    gone: int
    memory_bytes: list[int]

    @property
    def ok(self) -> bool:
        """Nothing failed, nothing is left, nothing contradicts itself."""
        return not (self.errors or self.violations or self.left)


class Crowd:
    """Clients of one daemon.

    Attributes:
        kills: How often the daemon was killed meanwhile.
        gone: Sandboxes that were being made just then, and were over when their client heard of them.
    """

    def __init__(self, address: str, clients: int, seconds: float) -> None:
        self.kills = self.gone = 0
        self.address, self.clients, self.seconds = address, clients, seconds
        self.run = f"{os.getpid()}"
        self.history, self.calls = History(), Counter[str]()
        self.errors: list[str] = []
        self.cycles = 0
        self.until = float("inf")

    async def go(self, daemon: Daemon | None = None, kills: int = 0) -> None:
        """All of them, until the time is over; with `kills`, of a daemon that is killed so often."""
        self.ready = asyncio.Barrier(self.clients + LISTERS + 1)  # to make clients takes a while
        async with asyncio.TaskGroup() as group:
            for number in range(self.clients):
                group.create_task(self._client(number))
            for _ in range(LISTERS):
                group.create_task(self._lister())
            await self.ready.wait()
            self.until = time.monotonic() + self.seconds
            if daemon is not None and kills:
                await self._kill(daemon, kills)

    async def _kill(self, daemon: Daemon, times: int) -> None:
        for _ in range(times):
            await asyncio.sleep(random.uniform(0.2, 1.8) * self.seconds / (times + 1))
            self.kills += 1
            await asyncio.to_thread(daemon.kill)
            await asyncio.to_thread(daemon.start)

    async def _client(self, number: int) -> None:
        async with AsyncClient(self.address, timeout_s=120) as client:
            await self.ready.wait()
            while time.monotonic() < self.until:
                try:
                    await self._cycle(client, number)
                    self.cycles += 1
                except (RingfenceError, AssertionError) as exc:
                    self.errors.append(f"client {number}: {type(exc).__name__}: {exc}")

    async def _cycle(self, client: AsyncClient, number: int) -> None:
        key, labels = uuid4().hex, {"crowd": self.run, "client": str(number)}
        sandbox, span = await self._answered(
            "create", lambda: client.create(labels=labels, idempotency_key=key)
        )
        self.history.created[sandbox.id] = span
        if "terminated" == sandbox._view.state:  # it was half made when the daemon was killed
            assert self.kills, sandbox._view
            self.history.deleted[sandbox.id] = span
            self.gone += 1
            return
        try:
            await self._use(sandbox, f"{number}-{self.cycles}")
        finally:
            kills = self.kills
            _, span = await self._answered("delete", sandbox.terminate)
            reasons = {"terminated"} | ({"restart"} if self.kills > kills else set())
            self.history.deleted[sandbox.id] = span
        path = f"/v1/sandboxes/{sandbox.id}"
        told, _ = await self._answered("get", lambda: client._transport.json("GET", path))
        assert "terminated" == told["state"], told
        # Killed while it deleted, a daemon could not write down that it was asked to.
        assert told["reason"] in reasons, told

    async def _use(self, sandbox: AsyncRemoteSandbox, token: str) -> None:
        with self._perhaps():
            result, _ = await self._timed("exec", sandbox.exec(["echo", token]))
            assert f"{token}\n" == result.stdout_text, result
        content = os.urandom(10_000)
        await self._answered("write", lambda: sandbox.files.write("file", content))
        with self._perhaps():
            await self._follow(sandbox, token)
        read, _ = await self._answered("read", lambda: sandbox.files.read("file"))
        assert content == read, "a file came back changed"

    @contextmanager
    def _perhaps(self) -> Iterator[None]:
        """Of a command that a daemon was killed over nobody may know how it ended."""
        try:
            yield
        except (ServerUnreachable, SandboxLost):
            if not self.kills:
                raise

    async def _follow(self, sandbox: AsyncRemoteSandbox, token: str) -> None:
        script = f"for i in 1 2 3; do echo {token} $i; done"
        process, _ = await self._timed("start", sandbox.start(["sh", "-c", script]))
        lines = [line async for line in process.stdout.lines()]
        self.calls["stream"] += 1
        result = await process.wait()  # one that was never begun is lost, which is raised here
        assert 0 == result.exit_code, result
        assert [f"{token} {i}" for i in (1, 2, 3)] == lines, lines

    async def _lister(self) -> None:
        async with AsyncClient(self.address, timeout_s=120) as client:
            await self.ready.wait()
            wanted = {"crowd": self.run}
            while time.monotonic() < self.until:
                found, span = await self._answered("list", lambda: client.list(labels=wanted))
                self.history.lists.append((span, frozenset(each.id for each in found)))
                await asyncio.sleep(0.05)  # so that lists do not take all of the processors

    async def _answered(self, name: str, call: Callable[[], Awaitable[Any]]) -> tuple[Any, Span]:
        """What may be asked again, asked until somebody answers; from the first time on."""
        began = time.monotonic()
        while True:
            try:
                answer, last = await self._timed(name, call())
            except ServerUnreachable:
                if not self.kills or time.monotonic() > began + BACK_WITHIN_S:
                    raise
                await asyncio.sleep(0.05)
            else:
                return answer, Span(began, last.end)

    async def _timed(self, name: str, call: Any) -> tuple[Any, Span]:
        began = time.monotonic()
        answer = await call
        self.calls[name] += 1
        return answer, Span(began, time.monotonic())


def run(daemon: Daemon, clients: int, seconds: float, kills: int = 0) -> Report:
    """Let a crowd loose on a daemon, and judge."""
    weighed: list[int] = []

    async def weigh() -> None:
        for _ in range(3):
            await asyncio.sleep(seconds / 3)
            weighed.append(daemon.memory_bytes)

    async def main() -> Crowd:
        warm = Crowd(daemon.address, clients, min(10.0, seconds / 2))
        await warm.go()  # threads, connections and what is read on first use are no growth
        weighed.append(daemon.memory_bytes)
        crowd = Crowd(daemon.address, clients, seconds)
        crowd.errors += warm.errors
        if kills:
            await crowd.go(daemon, kills)
        else:
            await asyncio.gather(crowd.go(), weigh())
        return crowd

    crowd = asyncio.run(main())
    left = asyncio.run(_left(daemon.address))
    return Report(
        clients,
        seconds,
        crowd.cycles,
        dict(crowd.calls),
        crowd.errors,
        crowd.history.violations(),
        left,
        len(crowd.history.lists),
        crowd.kills,
        crowd.gone,
        [*weighed, daemon.memory_bytes],
    )


async def _left(address: str) -> int:
    async with AsyncClient(address) as client:
        return len(await client.list())


def main(arguments: list[str]) -> int:
    """The command; 0 when all went well."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    with Daemon(max_sandboxes=given.clients + 50, max_waiting=given.clients) as daemon:
        report = run(daemon, given.clients, given.seconds, given.kills)
    if given.json:
        print(json.dumps({**asdict(report), "ok": report.ok}, indent=2))
        return int(not report.ok)
    print(f"{report.cycles} cycles of {report.clients} clients, {sum(report.calls.values())} calls")
    print(
        f"{len(report.errors)} errors, {report.left} sandboxes left, {report.lists} lists checked"
    )
    if report.kills:
        print(f"killed {report.kills} times; {report.gone} sandboxes ended half made")
    weights = " ".join(f"{each / MIB:.1f}" for each in report.memory_bytes)
    print(f"the daemon's MiB, before, at each third, and after: {weights}")
    for line in [*report.violations[:10], *report.errors[:10]]:
        print(f"  {line}")
    return int(not report.ok)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
