"""The one reader of HTTP paths: what a path rule says and what a request asks, in one spelling.

A server may decode, merge and resolve what the judge took literally. So whatever two servers could
read differently is refused, not repaired.
"""

from __future__ import annotations

from ..base import checks

# RFC 3986, section 2.3: these mean the same with and without percent-encoding.
_UNRESERVED = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~")
# Characters allowed unencoded in a path: section 3.3, without `;`, whose parameters some servers
# cut off (`/a/..;/b` is `/b` to Tomcat).
_PLAIN = _UNRESERVED | frozenset(b"!$&'()*+,=:@/")
_WRITTEN = _PLAIN - frozenset(b"*")  # `*` is always the end of a pattern
# Some servers decode these before they resolve the path, others treat them as data.
_TREACHEROUS = frozenset(b"/\\.;%") | frozenset(range(0x20)) | {0x7F}
_HEX = frozenset("0123456789abcdefABCDEF")


def read_path(given: str, field: str = "path") -> str:
    """The canonical spelling of the path of a request target, its query cut off.

    Raises:
        InvalidRequest: Not absolute, or ambiguous: an empty or dotted segment, a raw or encoded
            backslash, control character or `;`, an encoded slash, dot or percent sign.
    """
    path = given.partition("?")[0]
    if not path.startswith("/"):
        checks.refuse(field, f"{path!r} does not start with a slash")
    decoded = _decode(path, field)
    segments = decoded.split(b"/")[1:]
    for at, segment in enumerate(segments):
        # "...", ".. " and "." are the parent or the directory itself to one server or another.
        if not segment.strip(b". ") and (segment or at < len(segments) - 1):
            checks.refuse(field, f"{path!r} has an empty or dotted segment")
    return "".join(chr(byte) if byte in _WRITTEN else f"%{byte:02X}" for byte in decoded)


def read_pattern(given: str, field: str) -> str:
    """A path rule in canonical spelling: exact, or a prefix that ends in `*`."""
    if "?" in given:
        checks.refuse(field, f"{given!r} has a query; a rule has only a path")
    prefix = given.removesuffix("*")
    if "*" in prefix:
        checks.refuse(field, f"{given!r} has a * before its end", "write %2A for a literal *")
    if prefix == given:
        return read_path(given, field)
    # The last segment is only begun: what it becomes is for the request to answer.
    return read_path(prefix + "x", field)[:-1] + "*"


def matches(pattern: str, path: str) -> bool:
    """Return whether canonical `path` matches `pattern`."""
    if pattern.endswith("*"):
        return path.startswith(pattern[:-1])
    return path == pattern


def _decode(path: str, field: str) -> bytes:
    """The bytes of `path`; refuses what could be read in two ways."""
    found = bytearray()
    at = 0
    while at < len(path):
        char = path[at]
        if char == "%":
            digits = path[at + 1 : at + 3]
            if len(digits) != 2 or not _HEX.issuperset(digits):
                checks.refuse(field, f"{path!r} has a % without two hexadecimal digits")
            byte = int(digits, 16)
            if byte in _TREACHEROUS:
                checks.refuse(field, f"{path!r} hides a character: %{digits}")
            at += 3
        else:
            byte = ord(char)
            if byte not in _PLAIN:
                checks.refuse(field, f"{path!r} has an invalid character: {char!r}")
            at += 1
        found.append(byte)
    return bytes(found)
