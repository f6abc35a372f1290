"""The world's name server: static records, answers in turn, slow ones and none. UDP and TCP."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import struct
from collections import Counter
from typing import cast

from . import places
from .record import Record

TYPES = {1: "A", 2: "NS", 5: "CNAME", 15: "MX", 16: "TXT", 28: "AAAA", 64: "SVCB", 65: "HTTPS"}
_NUMBERS = {name: number for number, name in TYPES.items()}
_NO_ERROR, _SERVER_FAILURE, _NO_SUCH_NAME = 0, 2, 3


class Names:
    """The zone, and how often each of its names was asked for."""

    def __init__(self, record: Record) -> None:
        self.zone = dict(places.ZONE)
        self.record = record
        self._asked: Counter[tuple[str, str]] = Counter()

    def set(self, name: str, records: places.Records | list[places.Records]) -> None:
        self.zone[name] = records
        for key in [key for key in self._asked if key[0] == name]:
            del self._asked[key]

    async def answer(self, query: bytes, over: str) -> bytes | None:
        """The answer to one query; None when there is none."""
        try:
            name, kind, end = _question(query)
        except (IndexError, struct.error):
            self.record.add("dns", name=query.decode("latin-1"), type="?", over=over)
            return None
        self.record.add("dns", name=name, type=kind, over=over)
        lowered = name.lower()
        if lowered == "silent.test":
            return None
        if lowered == "slow.test":
            await asyncio.sleep(places.SLOW_S)
        code, answers = self._look_up(lowered, kind)
        header = query[:2] + struct.pack("!HHHHH", 0x8180 | code, 1, len(answers), 0, 0)
        return header + query[12:end] + b"".join(answers)

    def _look_up(self, name: str, kind: str) -> tuple[int, list[bytes]]:
        if name == "servfail.test":
            return _SERVER_FAILURE, []
        answers: list[bytes] = []
        owner = name
        for _ in range(4):
            records = self._records(owner, kind)
            if records is None:
                return (_NO_ERROR, answers) if answers else (_NO_SUCH_NAME, [])
            answers += [_resource(owner, kind, text) for text in records.get(kind, [])]
            if "CNAME" not in records or kind == "CNAME":
                break
            answers.append(_resource(owner, "CNAME", records["CNAME"][0]))
            owner = records["CNAME"][0]
        return _NO_ERROR, answers

    def _records(self, name: str, kind: str) -> places.Records | None:
        found = self.zone.get(name)
        if found is None:
            parents = (name.split(".", cut)[-1] for cut in range(1, name.count(".") + 1))
            found = next((self.zone[f"*.{p}"] for p in parents if f"*.{p}" in self.zone), None)
        if not isinstance(found, list):
            return found
        turn = self._asked[name, kind]
        self._asked[name, kind] += 1
        return found[min(turn, len(found) - 1)]


def _question(query: bytes) -> tuple[str, str, int]:
    """Name as it was spelled, type, and where the question ends."""
    labels, at = [], 12
    while length := query[at]:
        labels.append(query[at + 1 : at + 1 + length].decode("latin-1"))
        at += 1 + length
    number = struct.unpack_from("!H", query, at + 1)[0]
    return ".".join(labels), TYPES.get(number, str(number)), at + 5


def _name(name: str) -> bytes:
    return b"".join(bytes([len(p)]) + p.encode() for p in name.split(".")) + b"\0"


def _resource(owner: str, kind: str, text: str) -> bytes:
    if kind in ("A", "AAAA"):
        data = ipaddress.ip_address(text).packed
    elif kind == "TXT":
        data = bytes([len(text)]) + text.encode()
    else:
        data = _name(text)
    # TTL 0: whoever asks again, asks us.
    return _name(owner) + struct.pack("!HHIH", _NUMBERS[kind], 1, 0, len(data)) + data


class OverUdp(asyncio.DatagramProtocol):
    def __init__(self, names: Names) -> None:
        self._names = names
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, peer: tuple[str, int]) -> None:
        task = asyncio.ensure_future(self._answer(data, peer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, data: bytes, peer: tuple[str, int]) -> None:
        answer = await self._names.answer(data, "udp")
        if answer is not None:
            self._transport.sendto(answer, peer)


async def over_tcp(
    names: Names, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            (length,) = struct.unpack("!H", await reader.readexactly(2))
            answer = await names.answer(await reader.readexactly(length), "tcp")
            if answer is not None:
                writer.write(struct.pack("!H", len(answer)) + answer)
                await writer.drain()
    writer.close()
