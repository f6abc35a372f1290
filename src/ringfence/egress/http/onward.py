"""Forwarded heads of requests and responses, rewritten from the parsed ones. No I/O."""

from __future__ import annotations

from .answer import AnswerHead
from .fields import CHUNKED, Fields
from .head import DEFAULT_PORTS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from .fields import Length
    from .head import RequestHead

# Requests for an answer that could hide a secret: as a hash or a difference, in other characters.
_COULD_HIDE = ("a-im", "im", "accept-charset", "sec-websocket-extensions", "unless-modified-since")
_DIGESTS = ("want-digest", "want-content-digest", "want-repr-digest")
# Of what is sent, not of the answer: an upload in parts, a copy of a part within the server.
_OF_WHAT_IS_SENT = ("content", "source")


class Header:
    """A header that carries a secret; never shown."""

    __slots__ = ("name", "value")

    def __init__(self, name: str, value: str) -> None:
        self.name, self.value = name, value

    def __repr__(self) -> str:
        return f"Header({self.name!r}, ...)"


def request(
    head: RequestHead, credentials: Sequence[Header] = (), *, scrubbed: bool = False
) -> bytes:
    """The head of the request as the server gets it.

    Host comes from what was judged. The client's own headers of the credentials' names are taken
    out; every other end-to-end header stays as it was.

    Args:
        scrubbed: Secrets will be looked for in the answer: nothing is asked for that could hide one.
    """
    gone = [
        "host",
        "content-length",
        *(each.name.lower().replace("_", "-") for each in credentials),
    ]
    added = [(each.name, each.value) for each in credentials]
    if scrubbed:
        gone += filter(could_hide, head.fields.names)
        added.append(("Accept-Encoding", "identity"))
    fields = head.fields.end_to_end().without(gone)
    pairs = [("Host", _host(head)), *fields, *added, *_length(head.length, head.method)]
    pairs += _connection(head.upgrades)
    line = f"{head.method} {head.target} {head.version}\r\n".encode("ascii")
    return line + Fields(pairs).encode() + b"\r\n"


def could_hide(name: str) -> bool:
    """Return whether a request header asks for a response in which a secret could not be found.

    Args:
        name: In lower case, with `-`.

    Compressed: `Accept-Encoding`, and gRPC's own. Cut: `Range`, `If-Range`, Apache's
    `Request-Range`, Azure's `x-ms-range`, and similar names of other servers.
    """
    words = name.split("-")
    if "range" in words:
        return not any(word in words for word in _OF_WHAT_IS_SENT)
    return name in (*_COULD_HIDE, *_DIGESTS) or name.endswith("accept-encoding")


def answer(head: AnswerHead, length: Length, *, switched: bool = False) -> bytes:
    if head.is_interim:
        return head.encode(
            head.fields.without(("connection", "content-length", "transfer-encoding"))
        )
    fields = head.fields.without(("connection", "keep-alive", "proxy-connection", "upgrade"))
    fields = fields.without(("transfer-encoding", "trailer"))
    added = []
    if length != 0:  # of HEAD and 304 it tells what would have followed, and stays
        fields = fields.without(("content-length",))
    if length == CHUNKED:
        added = [("Transfer-Encoding", "chunked")]
    elif length > 0:
        added = [("Content-Length", str(length))]
    return head.encode(Fields([*fields, *added, *_connection(switched)]))


def _host(head: RequestHead) -> str:
    host, port = head.authority.host, head.authority.port
    if port != DEFAULT_PORTS[head.scheme]:
        return str(head.authority)
    return f"[{host}]" if ":" in host else host


def _length(length: Length, method: str) -> list[tuple[str, str]]:
    if length == CHUNKED:
        return [("Transfer-Encoding", "chunked")]
    if length or method in ("POST", "PUT", "PATCH"):  # RFC 9110, 8.6: say 0 where one is expected
        return [("Content-Length", str(length))]
    return []


def _connection(upgrades: bool) -> list[tuple[str, str]]:
    if upgrades:
        return [("Connection", "Upgrade"), ("Upgrade", "websocket")]
    return [("Connection", "close")]
