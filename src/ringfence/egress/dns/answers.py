"""Answers of a sandbox's resolver: allowed names get synthetic addresses, all others do not exist."""

from __future__ import annotations

from . import message as dns

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..io.streams import Stream
    from ..rules import Ruled

TTL_S = 30
_LOCALHOST = {dns.A: bytes([127, 0, 0, 1]), dns.AAAA: bytes(15) + b"\1"}
_MOST_QUERIES = 1000  # over one connection


def answer(sandbox: Ruled, data: bytes) -> bytes | None:
    """The answer to one query; None for what deserves none."""
    query = dns.parse(data)
    if query is None:
        return None
    if query.failure:
        return dns.answer(query)
    if query.name == "localhost" or query.name.endswith(".localhost"):
        return _found(query, _LOCALHOST[dns.A], _LOCALHOST[dns.AAAA])  # RFC 6761, 6.3
    if not query.is_host_name:
        return _refused(sandbox, query, "not a host name")
    decision = sandbox.judge_name(query.name, None)
    if not decision:
        return _refused(sandbox, query, decision.reason)
    sandbox.commons.record.add(
        sandbox.id, "dns", host=query.name, allowed=True, reason=decision.reason, rule=decision.rule
    )
    v4, v6 = sandbox.names.addresses(query.name)
    return _found(query, v4, v6 if sandbox.has_ipv6 else b"")


async def serve(sandbox: Ruled, stream: Stream) -> None:
    """Answer the queries that come over one TCP connection: RFC 7766."""
    for _ in range(_MOST_QUERIES):
        head = await _exactly(stream, 2)
        data = await _exactly(stream, int.from_bytes(head, "big"))
        reply = answer(sandbox, data) if data else None
        if reply is None:
            return
        await stream.write(len(reply).to_bytes(2, "big") + reply)


def _found(query: dns.Query, v4: bytes, v6: bytes) -> bytes:
    """Other types of a name that exists are answered with nothing: it has addresses only."""
    wanted = {dns.A: [v4], dns.AAAA: [v6], dns.ANY: [v4, v6]}.get(query.kind, [])
    return dns.answer(query, records=[address for address in wanted if address], ttl_s=TTL_S)


def _refused(sandbox: Ruled, query: dns.Query, reason: str) -> bytes:
    kind = dns.TYPES.get(query.kind, f"type {query.kind}")
    sandbox.commons.record.add(
        sandbox.id, "dns", host=query.name, allowed=False, reason=f"{reason} ({kind})"
    )
    return dns.answer(query, dns.NXDOMAIN)


async def _exactly(stream: Stream, count: int) -> bytes:
    """So many bytes; fewer when the stream ends."""
    data = b""
    while len(data) < count and (more := await stream.read(count - len(data))):
        data += more
    return data if len(data) == count else b""
