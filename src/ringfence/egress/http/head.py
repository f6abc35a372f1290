"""The head of one HTTP/1.1 request, read strictly: there is one reading of it, or there is none.

Requests are smuggled where two readers of the same bytes disagree. So whatever readers are known
to disagree about is refused here, even where RFC 9112 would let a recipient be lenient, and what is
forwarded is written anew from what was read. No I/O: bytes in, a `RequestHead` or `Refused` out.
"""

from __future__ import annotations

from ...errors import InvalidRequest
from ...model.base.model import Model
from ...model.base.record import dataclass
from ...model.net import hosts
from ..refused import Refused
from .fields import Fields, Length, body_length, check_connection, parse_fields

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

END = b"\r\n\r\n"
DEFAULT_PORTS = {"http": 80, "https": 443}
_CAPITALS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_LONGEST_METHOD = 24
# RFC 3986 has no raw `#` or `\` in a request target; some readers end it there, or read `/`.
_IN_TARGET = bytes(range(0x21, 0x7F)).translate(None, b"#\\")


@dataclass(frozen=True, eq=False, repr=False)
class Authority(Model):
    """A host in canonical spelling, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, eq=False, repr=False)
class RequestHead(Model):
    """Head of a request, which every reader reads alike.

    Attributes:
        target: origin-form (`/path?query`), or `*`; of a CONNECT the authority as text.
        authority: Destination by Host and, in absolute-form, by the target too.
        is_absolute: The target came in absolute-form, as sent to a proxy.
        scheme: `http`, or `https` inside a TLS connection that was ended here.
        version: `HTTP/1.1` or `HTTP/1.0`.
        length: Bytes of body, or `CHUNKED`.
    """

    method: str
    target: str
    authority: Authority
    is_absolute: bool
    scheme: str
    version: str
    fields: Fields
    length: Length

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def upgrades(self) -> bool:
        """True if it asks for a WebSocket; no other upgrade is allowed.

        Source: RFC 6455, section 4.1.
        """
        return (
            self.method == "GET"
            and self.version == "HTTP/1.1"
            and self.length == 0
            and self.fields.get("upgrade").lower() == "websocket"
            and "upgrade" in self.fields.tokens("connection")
            and self.fields.get("sec-websocket-version") == "13"
            and bool(self.fields.get("sec-websocket-key"))
        )


def head_end(data: bytes | bytearray, limit: int) -> int:
    """Where the head that starts at `data[0]` ends, its blank line included; 0: not yet.

    Raises:
        Refused: It is longer than `limit` bytes.
    """
    end = data.find(END, 0, limit)
    if end < 0:
        if len(data) >= limit:
            raise Refused(f"the request head is longer than {limit} bytes", status=431)
        return 0
    return end + len(END)


def check_beginning(data: bytes | bytearray) -> None:
    """Refuse at once what can be no request any more, before its head has ended.

    Who speaks another protocol waits for an answer, and would until its time is up.

    Raises:
        Refused: As `parse_request` would.
    """
    end = data.find(b"\n")
    if end >= 0:
        _request_line(bytes(data[:end]).removesuffix(b"\r"))
    else:
        _check_method(bytes(data[: _LONGEST_METHOD + 1]).partition(b" ")[0])


def parse_request(data: bytes, scheme: str = "http", port: int | None = None) -> RequestHead:
    """Read a whole head, as `head_end` cut it out.

    Args:
        port: What a Host without a port means: the port that the client connected to; None: the
            scheme's own.

    Raises:
        Refused: With the HTTP status that tells the client.
    """
    line, _, rest = data.partition(b"\r\n")
    method, target, version = _request_line(line)
    fields = parse_fields(rest.removesuffix(b"\r\n"))
    if method == "CONNECT":
        return _connect(target, version, fields)
    host = _authority(_host(fields), port or DEFAULT_PORTS[scheme])
    authority, path = _target(method, target, scheme, host)
    if authority != host:
        _bad(f"the target is for {authority} and Host for {host}")
    _check_expectation(fields)
    check_connection(fields)
    return RequestHead(
        method,
        path,
        authority,
        is_absolute=path != target,
        scheme=scheme,
        version=version,
        fields=fields,
        length=body_length(fields, version),
    )


def _bad(reason: str, status: int = 400) -> NoReturn:
    raise Refused(f"not a request that can be passed on: {reason}", status=status)


def _request_line(line: bytes) -> tuple[str, str, str]:
    parts = line.split(b" ")
    if len(parts) != 3:
        _bad("its first line is not METHOD TARGET VERSION")
    method, target, version = parts
    _check_method(method)
    if version not in (b"HTTP/1.1", b"HTTP/1.0"):
        _bad("its version is not HTTP/1.1 or HTTP/1.0", 505)
    if not target or target.translate(None, _IN_TARGET):
        _bad("its target has a character that no URI has")
    if method in (b"TRACE", b"TRACK"):
        # They send the head back as it arrived: with headers that were added on the way.
        _bad(f"{method.decode()} would echo the credentials added on the way", 405)
    return method.decode(), target.decode(), version.decode()


def _check_method(method: bytes) -> None:
    # Upper case only: methods are case-sensitive, and a rule for GET must not be passed by `get`.
    is_word = 0 < len(method) <= _LONGEST_METHOD and method[:1] != b"-"
    if not is_word or method.translate(None, _CAPITALS + b"-"):
        _bad("its method is not a word in capitals")


def _host(fields: Fields) -> str:
    values = fields.all("host")
    if len(values) != 1:
        _bad(f"it has {len(values)} Host fields, not one")
    return values[0]


def _target(method: str, target: str, scheme: str, host: Authority) -> tuple[Authority, str]:
    """The authority that the target names, and its origin-form."""
    if target.startswith("/"):
        return host, target
    if target == "*":
        if method != "OPTIONS":
            _bad("only OPTIONS is asked of *")
        return host, target
    given, separator, rest = target.partition("://")
    if not separator:
        _bad("its target is neither a path nor a URL")
    if given.lower() != scheme:
        _bad(f"its target is not {scheme}")
    end = min(at for at in (rest.find("/"), rest.find("?"), len(rest)) if at >= 0)
    path = rest[end:]
    authority = _authority(rest[:end], DEFAULT_PORTS[scheme])
    return authority, path if path.startswith("/") else "/" + path


def _connect(target: str, version: str, fields: Fields) -> RequestHead:
    """CONNECT names a tunnel and has no body: what follows is the tunnel's."""
    authority = _authority(target, 0)
    if authority.port == 0:
        _bad("CONNECT needs host:port")
    if fields.all("content-length") or fields.all("transfer-encoding"):
        _bad("CONNECT has no body")
    hosts = [_authority(value, authority.port) for value in fields.all("host")]
    # Some clients leave Host out here, or name it without the port.
    if len(hosts) > 1 or any(host.host != authority.host for host in hosts):
        _bad(f"the target is for {authority} and Host is not")
    return RequestHead("CONNECT", target, authority, False, "http", version, fields, 0)


def _check_expectation(fields: Fields) -> None:
    if fields.all("expect") and fields.get("expect").lower() != "100-continue":
        _bad("it expects something other than 100-continue", 417)


def _authority(text: str, default_port: int) -> Authority:
    """`host`, `host:port`, `[v6]` or `[v6]:port`; nothing else, and userinfo least of all."""
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        if not closed or ":" not in host or (rest and rest[0] != ":"):
            _bad("its host is not [address] with an optional port")
        colon, port = rest[:1], rest[1:]
    else:
        host, colon, port = text.partition(":")
    return Authority(_read_host(host), _read_port(port) if colon else default_port)


def _read_host(text: str) -> str:
    """A name or an address, as rules are read."""
    try:
        if "/" in text:
            raise InvalidRequest("a network is not a host")
        if hosts.looks_like_address(text):
            return hosts.read_address(text, "host")
        return hosts.read_name(text, "host")
    except InvalidRequest:
        _bad("its host is neither a name nor an address in its usual form")


def _read_port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) <= 65535):
        _bad("its port is not 1 to 65535")
    return int(text)
