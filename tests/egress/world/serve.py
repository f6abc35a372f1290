"""The world's servers, in one process for each of its two network namespaces.

    python -m tests.egress.world.serve {internet|host} DIRECTORY

DIRECTORY holds certificates and repositories; `ROLE.control` in it takes requests, one JSON object
a line: see `control.py`. Says "ready" on standard output.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from . import dns, http, places, sites, streams
from .record import Record

EVERYWHERE = ("0.0.0.0", "::")
_IP_FREEBIND, _IPV6_FREEBIND = 15, 78  # include/uapi/linux/in.h, in6.h
# Datagrams must be answered from the address that they were sent to: one socket for each.
DATAGRAM_ADDRESSES = (
    *(places.DNS_V4, places.WEB_V4, places.WEB_V6, places.OTHER_V4, places.OTHER_V6),
    *("8.8.8.8", "10.0.0.5", places.METADATA_V4),
)

Verb = Callable[..., Awaitable[Any]]


class Process:
    """Everything that one of the two processes serves."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.record = Record()
        self.names = dns.Names(self.record)
        self._programs: dict[int, subprocess.Popen[bytes]] = {}
        self._kept: list[Any] = []
        self.verbs: dict[str, Verb] = {
            "mark": self._mark,
            "since": self._since,
            "wait": self.record.wait,
            "zone": self._zone,
            "spawn": self._spawn,
            "end": self._end,
        }

    async def listen(
        self, serve: streams.Serve, port: int, hosts: tuple[str, ...] = EVERYWHERE, **options: Any
    ) -> None:
        for host in hosts:
            if ":" in host and not Path("/proc/net/if_inet6").exists():
                continue
            self._kept.append(
                # Of two on one port, the one of the address itself is asked.
                await asyncio.start_server(
                    serve, host, port, backlog=2048, reuse_port=True, **options
                )
            )

    async def listen_datagrams(
        self, make: Callable[[], asyncio.DatagramProtocol], host: str, port: int
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_DGRAM)
        level = socket.IPPROTO_IPV6 if ":" in host else socket.IPPROTO_IP
        sock.setsockopt(level, _IPV6_FREEBIND if ":" in host else _IP_FREEBIND, 1)
        sock.bind((host, port))
        loop = asyncio.get_running_loop()
        self._kept.append(await loop.create_datagram_endpoint(make, sock=sock))

    # -- what tests ask for --------------------------------------------------------------------

    async def _mark(self) -> int:
        return len(self.record.events)

    async def _since(self, number: int) -> list[Any]:
        return self.record.since(number)

    async def _zone(self, name: str, records: Any) -> None:
        self.names.set(name, records)

    async def _spawn(self, argv: list[str], log: str, **options: Any) -> int:
        with open(log, "ab") as file:
            program = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file, **options
            )
        self._programs[program.pid] = program
        return program.pid

    async def _end(self, pid: int) -> int:
        program = self._programs.pop(pid)
        program.send_signal(signal.SIGINT)
        try:
            return await asyncio.to_thread(program.wait, 10)
        except subprocess.TimeoutExpired:
            program.kill()
            return await asyncio.to_thread(program.wait)

    async def control(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            verb, arguments = json.loads(line)
            try:
                answer = {"answer": await self.verbs[verb](**arguments)}
            except Exception as exc:  # noqa: BLE001  the test that asked shall fail, not the world
                answer = {"error": f"{type(exc).__name__}: {exc}"}
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        writer.close()

    def close(self) -> None:
        for program in self._programs.values():
            program.kill()
            program.wait()


async def serve_internet(process: Process) -> None:
    record, directory = process.record, process.directory
    server = http.Server(
        "internet",
        record,
        {
            "pypi.test": sites.python_index(),
            "npm.test": sites.npm_registry(),
            "git.test": sites.repositories(directory / "repositories"),
        },
    )
    certificates = {
        "": str(directory / "server.pem"),
        "untrusted.test": str(directory / "untrusted.pem"),
        "wrongname.test": str(directory / "wrongname.pem"),
    }
    for port in places.HTTP_PORTS:
        await process.listen(server.serve, port)
    for port in places.HTTPS_PORTS:
        await process.listen(server.serve, port, ssl=http.tls_context(certificates))
    early = streams.recorded("early", record, streams.speaking_first(streams.BANNER))
    for port in (*places.HTTP_PORTS, *places.HTTPS_PORTS):
        await process.listen(early, port, (places.EARLY,))
    for name, port, serve in (
        ("echo", places.ECHO, streams.echo),
        ("discard", places.DISCARD, streams.discard),
        ("source", places.SOURCE, streams.source),
        ("banner", places.BANNER, streams.speaking_first(streams.BANNER)),
        ("smtp", places.SMTP, streams.speaking_first(streams.GREETING)),
    ):
        await process.listen(streams.recorded(name, record, serve), port)

    async def dns_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await dns.over_tcp(process.names, reader, writer)

    await process.listen(streams.recorded("dns", record, dns_stream), places.DNS)
    for host in DATAGRAM_ADDRESSES:
        await process.listen_datagrams(lambda: dns.OverUdp(process.names), host, places.DNS)
        for name, port in (("quic", places.QUIC), ("udp-echo", places.ECHO)):
            await process.listen_datagrams(
                lambda name=name: streams.Datagrams(name, record),  # type: ignore[misc]
                host,
                port,
            )


async def serve_host(process: Process) -> None:
    record = process.record
    server = http.Server("host", record)
    await process.listen(server.serve, places.HOST_PORT, ("127.0.0.1", "::1"))
    await process.listen(server.serve, places.HOST_PORT_EVERYWHERE)
    for host in ("127.0.0.1", "::1"):
        await process.listen_datagrams(
            lambda: streams.Datagrams("host", record), host, places.HOST_PORT
        )

    async def greet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        record.add("connection", server="host-unix")
        writer.write(b"the host\n")
        await writer.drain()
        writer.close()

    for path in ("\0ringfence-world", str(process.directory / "host.sock")):
        process._kept.append(await asyncio.start_unix_server(greet, path))


async def main(role: str, directory: str) -> None:
    process = Process(Path(directory))
    await {"internet": serve_internet, "host": serve_host}[role](process)
    control = await asyncio.start_unix_server(
        process.control, str(process.directory / f"{role}.control"), limit=1 << 24
    )
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    print("ready", flush=True)
    async with control:
        await stop.wait()
        process.close()
        # Connections that are still open end with us.
        sys.stdout.flush()
        raise SystemExit


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
