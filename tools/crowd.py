"""Many clients at once on one daemon, and a check of the history that they saw.

    python tools/crowd.py [--clients 100] [--seconds 300] [--json]

Each client makes a sandbox, runs commands in it, writes and reads files, follows a stream, deletes it,
and begins anew. Others list meanwhile. At the end nothing may have failed, nothing may be left, and no
list may have shown a sandbox that was gone or missed one that was there: every sandbox is a register
that goes from absent to present to absent once, and every list a read of all of them within its time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from ringfence.bench.daemon import Daemon
from ringfence.client import AsyncClient, AsyncRemoteSandbox
from ringfence.errors import RingfenceError

MIB = 1 << 20
LISTERS = 3


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
    memory_before_bytes: int
    memory_after_bytes: int

    @property
    def ok(self) -> bool:
        """Nothing failed, nothing is left, nothing contradicts itself."""
        return not (self.errors or self.violations or self.left)


class Crowd:
    """Clients of one daemon."""

    def __init__(self, address: str, clients: int, seconds: float) -> None:
        self.address, self.clients, self.seconds = address, clients, seconds
        self.run = f"{os.getpid()}"
        self.history, self.calls = History(), Counter[str]()
        self.errors: list[str] = []
        self.cycles = 0
        self.until = 0.0

    async def go(self) -> None:
        """All of them, until the time is over."""
        self.until = time.monotonic() + self.seconds
        async with asyncio.TaskGroup() as group:
            for number in range(self.clients):
                group.create_task(self._client(number))
            for _ in range(LISTERS):
                group.create_task(self._lister())

    async def _client(self, number: int) -> None:
        async with AsyncClient(self.address, timeout_s=120) as client:
            while time.monotonic() < self.until:
                try:
                    await self._cycle(client, number)
                    self.cycles += 1
                except (RingfenceError, AssertionError) as exc:
                    self.errors.append(f"client {number}: {type(exc).__name__}: {exc}")

    async def _cycle(self, client: AsyncClient, number: int) -> None:
        sandbox, span = await self._timed(
            "create", client.create(labels={"crowd": self.run, "client": str(number)})
        )
        self.history.created[sandbox.id] = span
        try:
            await self._use(sandbox, f"{number}-{self.cycles}")
        finally:
            began = time.monotonic()
            await sandbox.terminate()
            self.calls["delete"] += 1
            self.history.deleted[sandbox.id] = Span(began, time.monotonic())
        told = await client._transport.json("GET", f"/v1/sandboxes/{sandbox.id}")
        self.calls["get"] += 1
        assert "terminated" == told["state"], told

    async def _use(self, sandbox: AsyncRemoteSandbox, token: str) -> None:
        result, _ = await self._timed("exec", sandbox.exec(["echo", token]))
        assert f"{token}\n" == result.stdout_text, result
        content = os.urandom(10_000)
        await self._timed("write", sandbox.files.write("file", content))
        read, _ = await self._timed("read", sandbox.files.read("file"))
        assert content == read, "a file came back changed"
        process, _ = await self._timed(
            "start", sandbox.start(["sh", "-c", f"for i in 1 2 3; do echo {token} $i; done"])
        )
        lines = [line async for line in process.stdout.lines()]
        self.calls["stream"] += 1
        assert [f"{token} {i}" for i in (1, 2, 3)] == lines, lines

    async def _lister(self) -> None:
        async with AsyncClient(self.address, timeout_s=120) as client:
            while time.monotonic() < self.until:
                found, span = await self._timed("list", client.list(labels={"crowd": self.run}))
                self.history.lists.append((span, frozenset(each.id for each in found)))
                await asyncio.sleep(0.05)  # so that lists do not take all of the processors

    async def _timed(self, name: str, call: Any) -> tuple[Any, Span]:
        began = time.monotonic()
        answer = await call
        self.calls[name] += 1
        return answer, Span(began, time.monotonic())


def run(daemon: Daemon, clients: int, seconds: float) -> Report:
    """Let a crowd loose on a daemon, and judge."""

    async def main() -> tuple[Crowd, int]:
        warm = Crowd(daemon.address, clients, min(10.0, seconds / 2))
        await warm.go()  # threads, connections and what is read on first use are no growth
        before = daemon.memory_bytes
        crowd = Crowd(daemon.address, clients, seconds)
        crowd.errors += warm.errors
        await crowd.go()
        return crowd, before

    crowd, before = asyncio.run(main())
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
        before,
        daemon.memory_bytes,
    )


async def _left(address: str) -> int:
    async with AsyncClient(address) as client:
        return len(await client.list())


def main(arguments: list[str]) -> int:
    """The command; 0 when all went well."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    with Daemon(max_sandboxes=given.clients + 50, max_waiting=given.clients) as daemon:
        report = run(daemon, given.clients, given.seconds)
    if given.json:
        print(json.dumps({**asdict(report), "ok": report.ok}, indent=2))
        return int(not report.ok)
    grown = (report.memory_after_bytes - report.memory_before_bytes) / MIB
    print(f"{report.cycles} cycles of {report.clients} clients, {sum(report.calls.values())} calls")
    print(
        f"{len(report.errors)} errors, {report.left} sandboxes left, {report.lists} lists checked"
    )
    print(f"the daemon grew by {grown:.1f} MiB to {report.memory_after_bytes / MIB:.1f} MiB")
    for line in [*report.violations[:10], *report.errors[:10]]:
        print(f"  {line}")
    return int(not report.ok)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
