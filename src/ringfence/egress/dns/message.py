"""DNS messages: one strict reader of queries, and the few answers that there are. No I/O.

What is refused here never becomes a packet elsewhere: nothing is forwarded to any resolver.
Source: RFC 1035, section 4; RFC 6891 (EDNS).
"""

from __future__ import annotations

import _struct as struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

A, AAAA, OPT, ANY = 1, 28, 41, 255
NOERROR, FORMERR, NXDOMAIN, NOTIMP, REFUSED, BADVERS = 0, 1, 3, 4, 5, 16
IN = 1

_HEADER = struct.Struct(">HHHHHH")
_FIXED = struct.Struct(">HHIH")  # of a record, behind its name: type, class, TTL, length
_RESPONSE, _OPCODE, _TRUNCATED, _RECURSE, _CAN_RECURSE, _NO_CHECKS = (
    0x8000,
    0x7800,
    0x0200,
    0x0100,
    0x0080,
    0x0010,
)
_QUESTION_AT = b"\xc0\x0c"  # a pointer to the name of the question, which is always there
_OUR_PAYLOAD_BYTES = 1232  # what any path carries; no answer of ours comes near it
_LONGEST_NAME = 255
_LDH = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789-_")
TYPES = {1: "A", 2: "NS", 5: "CNAME", 6: "SOA", 12: "PTR", 15: "MX", 16: "TXT", 28: "AAAA"}
TYPES |= {33: "SRV", 64: "SVCB", 65: "HTTPS", 255: "ANY"}


class Query:
    """A DNS query.

    Attributes:
        name: In lower case, without the last dot; a name that is no host name has `\\DDD` escapes.
        is_host_name: Every label consists of letters, digits, `-` and `_`.
        failure: The response code of a query that is answered with an error; 0 otherwise.
    """

    __slots__ = ("edns", "failure", "flags", "id", "is_host_name", "kind", "name", "question")

    def __init__(self, number: int, flags: int, failure: int = NOERROR) -> None:
        self.id, self.flags, self.failure = number, flags, failure
        self.question = b""  # as it came: clients compare the spelling of the name
        self.name = ""
        self.is_host_name = False
        self.kind = 0
        self.edns = False


class _MalformedError(Exception):
    pass


def parse(data: bytes) -> Query | None:
    """Read a query; None for what deserves no answer at all."""
    if len(data) < _HEADER.size:
        return None
    number, flags, questions, answers, authorities, additional = _HEADER.unpack_from(data)
    if flags & _RESPONSE:
        return None  # answering an answer would make two of us talk for ever
    query = Query(number, flags)
    if flags & _OPCODE:
        query.failure = NOTIMP
        return query
    if (questions, answers, authorities) != (1, 0, 0) or additional > 1 or flags & _TRUNCATED:
        query.failure = FORMERR
        return query
    try:
        end = _read_question(query, data)
        end = _read_edns(query, data, end) if additional else end
        if end != len(data):
            raise _MalformedError
    except _MalformedError:
        query.failure = FORMERR
        query.question = b""
    return query


def _read_question(query: Query, data: bytes) -> int:
    labels, end = _labels(data, _HEADER.size)
    if len(data) < end + 4:
        raise _MalformedError
    query.question = data[_HEADER.size : end + 4]
    query.kind, kind_of_class = struct.unpack_from(">HH", data, end)
    if kind_of_class != IN:
        query.failure = REFUSED
    lowered = [label.lower() for label in labels]
    query.is_host_name = bool(labels) and all(map(_LDH.issuperset, lowered))
    query.name = ".".join(map(_shown, lowered))
    return end + 4


def _labels(data: bytes, at: int) -> tuple[list[bytes], int]:
    """The labels of the name at `at`, and where it ends. No pointers: there is nothing before."""
    labels: list[bytes] = []
    start = at
    while True:
        length = data[at] if at < len(data) else 0xFF
        at += 1
        if length == 0:
            return labels, at
        label = data[at : at + length]
        # 0x40 and up: a pointer, or what no RFC defines.
        if length > 63 or len(label) != length or at + length - start >= _LONGEST_NAME:
            raise _MalformedError
        labels.append(label)
        at += length


def _read_edns(query: Query, data: bytes, at: int) -> int:
    """The one record that a query may carry: OPT, at the root."""
    if data[at : at + 1] != b"\0" or len(data) < at + 1 + _FIXED.size:
        raise _MalformedError
    extended: int
    length: int
    kind, _payload, extended, length = _FIXED.unpack_from(data, at + 1)
    if kind != OPT:
        raise _MalformedError
    query.edns = True
    if extended >> 16 & 0xFF and not query.failure:
        query.failure = BADVERS
    return at + 1 + _FIXED.size + length


def _shown(label: bytes) -> str:
    """A label as text that is safe to show. Source: RFC 1035, 5.1 (the `\\DDD` form)."""
    if _LDH.issuperset(label):
        return label.decode("ascii")
    return "".join(chr(c) if c in _LDH else f"\\{c:03}" for c in label)


def answer(
    query: Query, code: int = NOERROR, records: Sequence[bytes] = (), ttl_s: int = 0
) -> bytes:
    """The answer to `query`.

    Args:
        records: Addresses in network order; 4 bytes make an A, 16 an AAAA record.
    """
    code = query.failure or code
    body = b"".join(
        _QUESTION_AT
        + _FIXED.pack(AAAA if len(address) == 16 else A, IN, ttl_s, len(address))
        + address
        for address in records
    )
    flags = _RESPONSE | _CAN_RECURSE | query.flags & (_OPCODE | _RECURSE | _NO_CHECKS) | code & 0xF
    head = _HEADER.pack(query.id, flags, bool(query.question), len(records), 0, query.edns)
    edns = b""
    if query.edns:
        edns = b"\0" + _FIXED.pack(OPT, _OUR_PAYLOAD_BYTES, code >> 4 << 24, 0)
    return head + query.question + body + edns
