"""The head of one HTTP/1.1 response. No I/O."""

from __future__ import annotations

from ...model.base.model import Model
from ...model.base.record import dataclass
from ..refused import Refused
from .fields import CHUNKED, IN_VALUE, UNTIL_CLOSE, Fields, Length, parse_fields, plain_number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .head import RequestHead

_VERSIONS = (b"HTTP/1.1", b"HTTP/1.0")
_WEBSOCKET = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, section 1.3
BAD_GATEWAY = 502


@dataclass(frozen=True, eq=False, repr=False)
class AnswerHead(Model):
    version: str
    status: int
    reason: str
    fields: Fields

    @property
    def is_interim(self) -> bool:
        """True if another head follows: 100 Continue, 103 Early Hints."""
        return self.status < 200 and self.status != 101

    def encode(self, fields: Fields) -> bytes:
        """The head as bytes, with these fields."""
        line = f"HTTP/1.1 {self.status} {self.reason}\r\n".encode("latin-1")
        return line + fields.encode() + b"\r\n"


def parse_answer(data: bytes) -> AnswerHead:
    """Read a whole head, blank line included.

    Raises:
        Refused: 502, as it is the server that cannot be understood.
    """
    line, _, rest = data.partition(b"\r\n")
    version, _, said = line.partition(b" ")
    status, _, reason = said.partition(b" ")
    number = plain_number(status.decode("latin-1"))
    if version not in _VERSIONS or number is None or not 100 <= number <= 999 or len(status) > 3:
        raise Refused("the server's answer is not HTTP/1.1", status=BAD_GATEWAY)
    try:
        fields = parse_fields(rest.removesuffix(b"\r\n"))
    except Refused as exc:
        raise Refused(f"the server's answer: {exc}", status=BAD_GATEWAY) from None
    if reason.translate(None, IN_VALUE):
        raise Refused("the server's answer has an invalid reason phrase", status=BAD_GATEWAY)
    return AnswerHead(version.decode(), number, reason.decode("latin-1"), fields)


def answer_length(answer: AnswerHead, method: str) -> Length:
    """Bytes of body that follow, or `CHUNKED`, or `UNTIL_CLOSE`.

    Source: RFC 9112, section 6.3.

    Raises:
        Refused: 502; the length is said in two ways.
    """
    if method == "HEAD" or answer.status < 200 or answer.status in (204, 304):
        return 0
    lengths, codings = answer.fields.all("content-length"), answer.fields.all("transfer-encoding")
    if codings:
        if len(codings) > 1 or codings[0].lower() != "chunked" or answer.version != "HTTP/1.1":
            raise Refused(
                "the server's answer has an unsupported transfer coding", status=BAD_GATEWAY
            )
        return CHUNKED  # and a Content-Length beside it is not passed on
    if not lengths:
        return UNTIL_CLOSE
    length = plain_number(lengths[0])
    if len(set(lengths)) > 1 or length is None:
        raise Refused("the server's answer has an ambiguous length", status=BAD_GATEWAY)
    return length


def switches(request: RequestHead, answer: AnswerHead) -> bool:
    """Return whether both sides now speak WebSocket, as the client's key proves.

    A server that was tricked into a 101 cannot compute the reply to the key.
    """
    if answer.status != 101 or not request.upgrades:
        return False
    import binascii
    from _sha1 import sha1  # the C half: `hashlib` asks OpenSSL first, for milliseconds

    key = request.fields.get("sec-websocket-key").encode("latin-1") + _WEBSOCKET
    digest = sha1(key, usedforsecurity=False).digest()
    proof = binascii.b2a_base64(digest, newline=False).decode("ascii")
    return answer.fields.get("sec-websocket-accept") == proof
