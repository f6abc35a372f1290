"""Takes a secret out of what a server sends back. Pure: bytes in, as many bytes out.

A server may show the credential it was given: an error page, a debugging header, an echo service.
What is replaced has the same length, so that no length that was told before is wrong.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

MASK = ord("*")
_SHORTEST = 4  # of what was only guessed to be a password: shorter, it is in every other page


def spellings(secret: str) -> tuple[bytes, ...]:
    """The forms in which a server is likely to show a secret: as is, in JSON, in a URL, in base64.

    Others (encrypted, hashed, one character a line) cannot all be known: a server that means to
    give the secret away can. This is for those that do so by accident.
    """
    import binascii
    import json
    from urllib.parse import quote

    raw = secret.encode("utf-8")
    quoted = json.dumps(secret)[1:-1]
    texts = (quote(secret, safe=""), quote(secret), quoted, quoted.replace("/", "\\/"))
    forms = {
        raw,
        *(text.encode("ascii") for text in texts),
        binascii.b2a_base64(raw, newline=False),
    }
    try:  # of Basic authentication the server knows the two parts
        user_and_password = binascii.a2b_base64(raw, strict_mode=True)
    except ValueError:
        user_and_password = b""
    _user, colon, password = user_and_password.partition(b":")
    if colon and len(password) >= _SHORTEST:
        forms |= {user_and_password, password}
    return tuple(sorted(form for form in forms if form))


class Scrubber:
    """A stream without any of `secrets`, whatever pieces it comes in.

    Only the end of a piece that may be the beginning of a secret waits for the next piece.
    """

    def __init__(self, secrets: Iterable[bytes]) -> None:
        self._secrets = tuple(secret for secret in secrets if secret)
        self._held = bytearray()
        self._masked = 0  # so many bytes of `_held` belong to a secret that was found already

    def __repr__(self) -> str:
        return f"Scrubber({len(self._secrets)} secrets)"

    @property
    def holds(self) -> bool:
        """Whether something waits for the next piece."""
        return bool(self._held)

    def feed(self, data: bytes) -> bytes:
        """What can be passed on now."""
        self._held += data
        starts = (_possible_start(self._held, secret) for secret in self._secrets)
        return self._pass(min(starts, default=len(self._held)))

    def finish(self) -> bytes:
        """The rest: the stream has ended, and what was only a beginning is no secret."""
        return self._pass(len(self._held))

    def whole(self, data: bytes) -> bytes:
        """All of `data`, when nothing comes before or after it."""
        return self.feed(data) + self.finish()

    def _pass(self, count: int) -> bytes:
        found = [span for secret in self._secrets for span in _occurrences(self._held, secret)]
        passed = self._held[:count]
        for start, end in [(0, self._masked), *found]:
            seen = min(end, count) - start
            if seen > 0:
                passed[start : start + seen] = bytes([MASK]) * seen
        del self._held[:count]
        # What begins in what is still held will be found again.
        ends = [self._masked, count, *(end for start, end in found if start < count)]
        self._masked = max(ends) - count
        return bytes(passed)


def _occurrences(data: bytearray, secret: bytes) -> list[tuple[int, int]]:
    """Every place, overlapping ones too."""
    found = []
    at = data.find(secret)
    while at >= 0:
        found.append((at, at + len(secret)))
        at = data.find(secret, at + 1)
    return found


def _possible_start(data: bytearray, secret: bytes) -> int:
    """Where the longest end of `data` begins that `secret` begins with."""
    for at in range(max(0, len(data) - len(secret) + 1), len(data)):
        if secret.startswith(data[at:]):
            return at
    return len(data)
