"""Servers of raw TCP and UDP: an echo, a sink, an endless source, two that speak first."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import cast

from .http import PIECE, connection_facts
from .record import Record

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

BANNER = b"SSH-2.0-World_1.0\r\n"
GREETING = b"220 world ESMTP\r\n"


def recorded(name: str, record: Record, serve: Serve) -> Serve:
    """`serve`, with every connection put on record, and how many bytes came, when it is over."""

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        record.add("connection", server=name, **connection_facts(writer))
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await serve(reader, writer)
        with contextlib.suppress(ConnectionError):
            writer.close()

    return run


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(1 << 18):
        writer.write(piece)
        await writer.drain()


async def discard(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Take everything, then say how much it was."""
    taken = 0
    while piece := await reader.read(1 << 18):
        taken += len(piece)
    writer.write(b"%d\n" % taken)
    await writer.drain()


async def source(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(PIECE)
        await writer.drain()


def speaking_first(greeting: bytes) -> Serve:
    """Say `greeting`, wait for one line, say it back."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        await writer.drain()
        writer.write(b"you said " + await reader.readline())
        await writer.drain()

    return serve


class Datagrams(asyncio.DatagramProtocol):
    """An echo that puts every datagram on record."""

    def __init__(self, name: str, record: Record) -> None:
        self._name, self._record = name, record

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)
        self._address, self._port = self._transport.get_extra_info("sockname")[:2]

    def datagram_received(self, data: bytes, peer: tuple[str, int]) -> None:
        self._record.add(
            "datagram",
            server=self._name,
            address=self._address,
            port=self._port,
            peer=peer[0],
            bytes=len(data),
        )
        self._transport.sendto(data, peer)
