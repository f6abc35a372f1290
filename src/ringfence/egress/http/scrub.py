"""Takes a secret out of what a server sends back. Pure: bytes in, as many bytes out.

A server may show the credential it was given: an error page, a debugging header, an echo service.
What is replaced has the same length, so that no length that was told before is wrong.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from functools import cached_property

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

MASK = ord("*")
_SHORTEST = 4  # of what was only guessed to be a password, and of base64: shorter, it is everywhere
_PERCENT = re.compile("%..")
_WORD = re.compile(rb"[0-9A-Za-z]+")
_URL_SAFE = str.maketrans("+/", "-_")
# As encoders of JSON write characters that HTML could misread: PHP `\/`, .NET and Go `\u002B`.
_ESCAPED = tuple({ord(c): form % ord(c) for c in "+/&<>'\""} for form in ("\\u%04x", "\\u%04X"))
_HTML = tuple(
    {ord("&"): "&amp;", ord("<"): "&lt;", ord(">"): "&gt;", ord('"'): quot, ord("'"): apostrophe}
    for quot, apostrophe in (("&quot;", "&#x27;"), ("&#34;", "&#39;"), ("&quot;", "'"))
)


def spellings(secret: str) -> tuple[bytes, ...]:
    """The forms in which a server is likely to show a secret: as is, in JSON, in HTML, in a URL, in base64.

    Base64 of whatever contains the secret (a header's value, a whole request) has one of three
    forms of it, by the place where the secret begins; each is itself written in these ways.

    Others (encrypted, hashed, one character a line) cannot all be known: a server that means to
    give the secret away can. This is for those that do so by accident.
    """
    import binascii

    raw = secret.encode("utf-8")
    parts = [raw]
    try:  # of Basic authentication the server knows the two parts
        user_and_password = binascii.a2b_base64(raw, strict_mode=True)
    except ValueError:
        user_and_password = b""
    _user, colon, password = user_and_password.partition(b":")
    if colon and len(password) >= _SHORTEST:
        parts += [user_and_password, password]
    forms = set(parts)
    for part in parts:
        forms |= _written(part.decode("utf-8", "replace"))
        for coded in _base64(part):
            forms |= _written(coded)
            forms.add(coded.translate(_URL_SAFE).encode("ascii"))
    return tuple(sorted(form for form in forms if form))


def _written(text: str) -> set[bytes]:
    """A text as it is written in JSON, in HTML and in URLs."""
    import json
    from urllib.parse import quote, quote_plus

    if text.isascii() and text.isalnum():
        return {text.encode("ascii")}
    quoted = json.dumps(text)[1:-1]
    percent = (quote(text, safe=""), quote(text), quote_plus(text))
    lower = (_PERCENT.sub(lambda found: found[0].lower(), each) for each in percent)
    slashed = quoted.replace("/", "\\/")
    escaped = (json.dumps(text)[1:-1].translate(table) for table in _ESCAPED)
    html = (text.translate(table) for table in _HTML)
    forms = (text, quoted, *percent, *lower, slashed, *escaped, *html)
    return {form.encode("utf-8") for form in forms}


def _base64(data: bytes) -> set[str]:
    """Encode `data` in base64 at all three alignments, independent of the surrounding bytes.

    The characters at both ends that also hold bits of surrounding bytes are left out, except those
    at the end of the data: with padding and without.
    """
    import binascii

    forms: set[str] = set()
    for before in range(3):
        coded = binascii.b2a_base64(bytes(before) + data, newline=False).decode("ascii")
        first = -(-8 * before // 6)
        inner = coded[first : 8 * (before + len(data)) // 6]
        ends = (inner, coded[first:].rstrip("="), coded[first:])
        forms.update(form for form in ends if len(form.rstrip("=")) >= _SHORTEST or not before)
    return forms


class Forms:
    """All that is looked for, in the order and by the words that make looking quick."""

    def __init__(self, forms: Iterable[bytes]) -> None:
        self._sorted = sorted({form for form in forms if form})
        self._longest = max(map(len, self._sorted), default=1)
        self._firsts = frozenset(form[0] for form in self._sorted)
        # Most differ in punctuation only: the word that they share is looked for first, once for all.
        self._by_word: dict[bytes, list[bytes]] = {}
        for form in self._sorted:
            word = max(_WORD.findall(form), key=len, default=form)
            self._by_word.setdefault(word, []).append(form)

    def __repr__(self) -> str:
        return f"Forms({len(self._sorted)})"

    def occurrences(self, data: bytes | bytearray) -> list[tuple[int, int]]:
        """Every place of every form, overlapping ones too."""
        found = []
        for word, forms in self._by_word.items():
            for form in forms if word in data else ():
                at = data.find(form)
                while at >= 0:
                    found.append((at, at + len(form)))
                    at = data.find(form, at + 1)
        return found

    def possible_start(self, data: bytes | bytearray) -> int:
        """Where the longest end of `data` begins that a form begins with, and goes on."""
        before = max(0, len(data) - self._longest + 1)
        tail = bytes(data[before:])
        for at, byte in enumerate(tail, before):
            if byte in self._firsts:
                end = tail[at - before :]
                # A longer form that begins with `end` comes right behind it in the order.
                after = bisect_right(self._sorted, end)
                if after < len(self._sorted) and self._sorted[after].startswith(end):
                    return at
        return len(data)


class Secrets(dict[str, str]):
    """Values by name; they are never shown."""

    def __repr__(self) -> str:
        return f"Secrets({', '.join(self)})"

    @cached_property
    def forms(self) -> Forms:
        return Forms(form for value in self.values() for form in spellings(value))


class Scrubber:
    """A stream without any of `forms`, whatever pieces it comes in.

    Only the end of a piece that may be the beginning of a secret waits for the next piece.
    """

    def __init__(self, forms: Forms) -> None:
        self._forms = forms
        self._held = bytearray()
        self._masked = 0  # so many bytes of `_held` belong to a secret that was found already

    def __repr__(self) -> str:
        return f"Scrubber({self._forms!r})"

    @property
    def holds(self) -> bool:
        """True while bytes wait for the next piece."""
        return bool(self._held)

    def feed(self, data: bytes) -> bytes:
        if not self._held and not self._forms.occurrences(data):
            start = self._forms.possible_start(data)
            self._held += data[start:]
            return data[:start]
        self._held += data
        return self._pass(self._forms.possible_start(self._held))

    def finish(self) -> bytes:
        """The rest: the stream has ended, and what was only a beginning is no secret."""
        return self._pass(len(self._held))

    def whole(self, data: bytes) -> bytes:
        """All of `data`, when nothing comes before or after it."""
        return self.feed(data) + self.finish()

    def _pass(self, count: int) -> bytes:
        found = self._forms.occurrences(self._held)
        passed = self._held[:count]
        for start, end in [(0, self._masked), *found]:
            seen = min(end, count) - start
            if seen > 0:
                passed[start : start + seen] = bytes([MASK]) * seen
        del self._held[:count]
        # Forms that begin in the held bytes will be found again.
        ends = [self._masked, count, *(end for start, end in found if start < count)]
        self._masked = max(ends) - count
        return bytes(passed)
