"""Header fields of HTTP/1.1, read strictly, and what they say about the length of the body."""

from __future__ import annotations

from ..refused import Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_IN_NAME = b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
IN_VALUE = b"\t" + bytes(range(0x20, 0x7F)) + bytes(range(0x80, 0x100))  # RFC 9110, 5.5
_MOST_DIGITS = 15
MOST_FIELDS = 94  # http.client and http.server read 99, and some are added on the way
CHUNKED = -1
UNTIL_CLOSE = -2
Length = int  # bytes of body, or CHUNKED, or, of a response, UNTIL_CLOSE

# Gateways to CGI and WSGI turn `-` and `_` into the same character: these would be read twice.
_NO_TWINS = frozenset(("content-length", "transfer-encoding"))
# Of one connection, not of the request. Source: RFC 9110, 7.6.1; RFC 2616, 13.5.1.
_HOP_BY_HOP = frozenset(
    (
        "connection",
        "http2-settings",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
# A client may not have these dropped by calling them its connection's.
_NOT_DROPPED = frozenset(
    ("authorization", "content-length", "cookie", "expect", "host", "transfer-encoding")
)


class Fields:
    """Name and value pairs in the order they came; names keep their spelling."""

    __slots__ = ("pairs",)

    def __init__(self, pairs: Iterable[tuple[str, str]] = ()) -> None:
        self.pairs = tuple(pairs)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self.pairs)

    def __repr__(self) -> str:
        """The names alone: values may be somebody's secret."""
        return f"Fields({', '.join(name for name, _ in self.pairs)})"

    @property
    def names(self) -> set[str]:
        """In lower case, with `-` where one is spelled with `_`."""
        return {name.lower().replace("_", "-") for name, _ in self.pairs}

    def all(self, name: str) -> list[str]:
        """Every value of a field; `name` in lower case."""
        return [value for key, value in self.pairs if key.lower() == name]

    def get(self, name: str) -> str:
        """The only value of a field; "" when there is none, or more than one."""
        values = self.all(name)
        return values[0] if len(values) == 1 else ""

    def tokens(self, name: str) -> set[str]:
        """The members of a comma-separated field, in lower case."""
        members = ",".join(self.all(name)).split(",")
        return {member.strip(" \t").lower() for member in members} - {""}

    def without(self, names: Iterable[str]) -> Fields:
        """All but the fields of these names (lower case), spelled with `-` or with `_`."""
        gone = set(names)
        return Fields((n, v) for n, v in self.pairs if n.lower().replace("_", "-") not in gone)

    def end_to_end(self) -> Fields:
        """Without what belongs to this connection alone."""
        return self.without(_HOP_BY_HOP | self.tokens("connection"))

    def encode(self) -> bytes:
        """As lines, each with its CRLF."""
        return b"".join(f"{name}: {value}\r\n".encode("latin-1") for name, value in self.pairs)


def parse_fields(data: bytes) -> Fields:
    """Read field lines, each with its CRLF; without the blank line after them.

    Raises:
        Refused: A line is not `name: value` (also: folded, bare LF or CR, NUL, space before
            the colon), or there are too many, or the body's length is said ambiguously.
    """
    lines = data.split(b"\r\n")
    if lines.pop():
        raise Refused("the last header line has no end", status=400)
    if len(lines) > MOST_FIELDS:
        raise Refused(f"more than {MOST_FIELDS} header fields", status=431)
    pairs = []
    for line in lines:
        raw, colon, value = line.partition(b":")
        if not (raw and colon) or raw.translate(None, _IN_NAME) or value.translate(None, IN_VALUE):
            raise Refused("a header line is not `name: value` in the plainest form", status=400)
        name = raw.decode()
        folded = name.lower().replace("_", "-")
        if "_" in name and folded in _NO_TWINS:
            raise Refused(f"a header name that some read as {folded}", status=400)
        pairs.append((name, value.strip(b" \t").decode("latin-1")))
    return Fields(pairs)


def check_connection(fields: Fields) -> None:
    """Refuse a client that would have what others decide by dropped on the way.

    Raises:
        Refused: `Connection` names a field that is not the connection's.
    """
    wrong = fields.tokens("connection") & _NOT_DROPPED
    if wrong:
        raise Refused(f"Connection names {min(wrong)}", status=400)


def body_length(fields: Fields, version: str) -> Length:
    """Bytes of body that a request has, or `CHUNKED`.

    Raises:
        Refused: Two readers could disagree: both headers, either one twice, a number in any
            but the plainest form, any coding but `chunked`, chunks in HTTP/1.0.
    """
    lengths, codings = fields.all("content-length"), fields.all("transfer-encoding")
    if lengths and codings:
        raise Refused("both Content-Length and Transfer-Encoding", status=400)
    if len(lengths) > 1 or len(codings) > 1:
        raise Refused("the body has two lengths", status=400)
    if codings:
        if version != "HTTP/1.1":
            raise Refused("Transfer-Encoding in HTTP/1.0", status=400)
        if codings[0].lower() != "chunked":
            raise Refused("a Transfer-Encoding other than chunked", status=501)
        return CHUNKED
    if not lengths:
        return 0
    length = plain_number(lengths[0])
    if length is None or lengths[0] != str(length):
        raise Refused("Content-Length is not a plain number", status=400)
    return length


def plain_number(text: str) -> int | None:
    """Parse a number of digits only; None for the other forms that `int` accepts."""
    plain = text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
    return int(text) if plain else None
