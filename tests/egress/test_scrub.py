"""A secret that a server sends back does not arrive."""

from __future__ import annotations

import base64
import html
import itertools
import json
import re
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.egress.http.scrub import Forms, Scrubber, Secrets, spellings

pytestmark = pytest.mark.anyone

# Few letters and short secrets: overlaps, repeats and near misses are the rule.
SECRETS = st.lists(st.text("ab", min_size=1, max_size=5).map(str.encode), min_size=1, max_size=3)
PIECES = st.lists(st.text("abc", max_size=6).map(str.encode), max_size=10)


def masked(data: bytes, secrets: list[bytes]) -> bytes:
    """The plain way: every byte of every occurrence."""
    hit: set[int] = set()
    for secret in secrets:
        for at in range(len(data)):
            if data.startswith(secret, at):
                hit.update(range(at, at + len(secret)))
    return bytes(ord("*") if i in hit else byte for i, byte in enumerate(data))


@given(SECRETS, PIECES)
def test_pieces_do_not_matter(secrets: list[bytes], pieces: list[bytes]) -> None:
    scrubber = Scrubber(Forms(secrets))
    out = b"".join(scrubber.feed(piece) for piece in pieces) + scrubber.finish()

    assert masked(b"".join(pieces), secrets) == out


@given(SECRETS, PIECES)
def test_nothing_waits_longer_than_it_must(secrets: list[bytes], pieces: list[bytes]) -> None:
    """A server that writes one line now and one later is heard now."""
    scrubber, data, out = Scrubber(Forms(secrets)), b"", b""
    for piece in pieces:
        data += piece
        out += scrubber.feed(piece)
        waiting = data[len(out) :]
        assert not waiting or any(secret.startswith(waiting[: len(secret)]) for secret in secrets)
        assert len(waiting) < max(map(len, secrets))


@given(SECRETS, PIECES)
def test_a_scrubber_can_be_used_again(secrets: list[bytes], pieces: list[bytes]) -> None:
    scrubber = Scrubber(Forms(secrets))

    for piece in pieces:
        assert masked(piece, secrets) == scrubber.whole(piece)


def test_without_secrets_everything_passes() -> None:
    scrubber = Scrubber(Forms([b""]))

    assert b"abc" == scrubber.feed(b"abc")
    assert b"" == scrubber.finish()


@pytest.mark.parametrize("secret", ['a"b\\c/d', "p%q r+s", "plain", "a&b=c"])
def test_spellings_of_web_pages(secret: str) -> None:
    text = (
        f"{secret} {json.dumps({'x': secret})} ?x={quote(secret, safe='')} {quote(secret)}".encode()
    )
    out = Scrubber(Forms(spellings(secret))).whole(text)

    assert len(text) == len(out)
    for form in (secret, json.dumps(secret)[1:-1], quote(secret), quote(secret, safe="")):
        assert form.encode() in text
        assert form.encode() not in out


HARD = 'Zm9v+/>?~~"a&b'  # its base64 has `+` and `/` in every place where it can begin


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


def through(scrubber: Scrubber, pieces: list[bytes]) -> bytes:
    return b"".join(scrubber.feed(piece) for piece in pieces) + scrubber.finish()


def lower(quoted: str) -> str:
    return re.sub("%..", lambda found: found[0].lower(), quoted)


def as_base64(data: bytes) -> list[bytes]:
    """As encoders write it, and what JSON and URLs make of that."""
    texts = [base64.b64encode(data).decode(), base64.urlsafe_b64encode(data).decode()]
    texts += [text.rstrip("=") for text in texts]
    plain = texts[0]
    texts += [plain.replace("/", "\\/"), quote(plain, safe=""), lower(quote(plain, safe=""))]
    texts += [plain.replace("+", "\\u002B").replace("/", "\\u002F")]
    return [text.encode() for text in texts]


@pytest.mark.parametrize("secret", ["hunter2-and-more", HARD, "ab+/", "schön-geheim", "?" * 61])
@pytest.mark.parametrize("scheme", ["", "Bearer ", "Token "])
def test_base64_of_a_header_in_every_place(secret: str, scheme: str) -> None:
    """What is left holds no six characters that only the secret can have made."""
    scrubber = Scrubber(Forms(spellings(secret)))
    value = scheme.encode() + secret.encode()
    for before, after in itertools.product(range(4), range(4)):
        text = b"\xff" * before + value + b"\x00" * after
        for coded in as_base64(text):
            whole = scrubber.whole(coded)
            assert whole == through(scrubber, [bytes([byte]) for byte in coded])
            assert len(coded) == len(whole)
            begin = -(-8 * (before + len(scheme)) // 6)
            end = 8 * (before + len(value)) // 6
            if not any(sign in coded for sign in (b"\\", b"%")):
                assert whole[begin:end] == b"*" * (end - begin)
            for at in range(begin, end - 6):
                sample = base64.b64encode(text)[at : at + 6]
                assert sample == b"*" * 6 or sample not in whole


@given(
    st.text(min_size=4, max_size=40),
    st.binary(max_size=7),
    st.binary(max_size=7),
    st.lists(st.integers(0, 400), max_size=8),
)
def test_cut_anywhere_it_is_found(
    secret: str, before: bytes, after: bytes, cuts: list[int]
) -> None:
    scrubber = Scrubber(Forms(spellings(secret)))
    raw = secret.encode()
    inner = slice(-(-8 * len(before) // 6), 8 * (len(before) + len(raw)) // 6)
    for coded in as_base64(before + raw + after)[:4]:
        assert set(through(scrubber, pieces_of(coded, cuts))[inner]) == {ord("*")}
    plain = b"<" + raw + b">"
    assert through(scrubber, pieces_of(plain, cuts))[1:-1] == b"*" * len(raw)


def test_fed_byte_by_byte() -> None:
    """One that is known, beside those that are drawn."""
    scrubber = Scrubber(Forms(spellings("hunter2")))
    data = b"<hunter2> huhunter2 hunte"

    assert b"<*******> hu******* hunte" == through(scrubber, [bytes([byte]) for byte in data])
    assert b"<*******> hu******* hunte" == through(scrubber, [data[:4], data[4:5], data[5:]])


def test_what_is_no_secret_stays() -> None:
    """The control: what merely resembles one in base64 is left as it is."""
    scrubber = Scrubber(Forms(spellings("hunter2-and-more")))
    for other in (b"hunter2-and-less", b"Bearer hunter2", bytes(range(256)) * 8):
        coded = base64.b64encode(other)
        assert coded == scrubber.whole(coded)


@pytest.mark.parametrize("secret", ['a<b>c&d"e', "it's", "a b+c"])
def test_spellings_of_pages_and_forms(secret: str) -> None:
    scrubber = Scrubber(Forms(spellings(secret)))
    for form in (html.escape(secret), quote_plus(secret), lower(quote(secret, safe=""))):
        assert b"*" * len(form) == scrubber.whole(form.encode())


def test_the_parts_of_a_basic_credential() -> None:
    secret = base64.b64encode(b"user:hunter2").decode()
    out = Scrubber(Forms(spellings(secret))).whole(f"user hunter2 {secret}".encode())

    assert f"user ******* {'*' * len(secret)}".encode() == out


@pytest.mark.parametrize(
    ("parts", "shown"), [("user:abcd", "user ****"), ("user:abc", "user abc"), ("user:", "user ")]
)
def test_a_password_that_is_everywhere_is_not_looked_for(parts: str, shown: str) -> None:
    """Nor is what only looks like both parts of one; what was given itself is hidden in any case."""
    secret = base64.b64encode(parts.encode()).decode()
    scrubber = Scrubber(Forms(spellings(secret)))

    assert shown.encode() == scrubber.whole(" ".join(parts.split(":")).encode())
    whole = b"*" * len(parts) if "*" in shown else parts.encode()
    assert whole == scrubber.whole(parts.encode())
    assert b"*" * len(secret) == scrubber.whole(secret.encode())


def test_secrets_are_not_shown() -> None:
    assert "hunter2" not in repr(Scrubber(Forms([b"hunter2"])))
    assert "Secrets(KEY)" == repr(Secrets({"KEY": "hunter2"}))


@pytest.mark.parametrize(
    ("secret", "data"), [(b"abab", b"xabababx"), (b"aa", b"xaaaax"), (b"aba", b"xabababax")]
)
def test_one_that_begins_inside_itself_is_covered_whole(secret: bytes, data: bytes) -> None:
    scrubber = Scrubber(Forms([secret]))
    covered = b"x" + b"*" * (len(data) - 2) + b"x"

    assert covered == scrubber.whole(data)
    assert covered == through(scrubber, [bytes([byte]) for byte in data])


@pytest.mark.parametrize("secret", ["hunter2", "hunter23", "hunter234"])
def test_base64_at_the_end_with_padding_and_without(secret: str) -> None:
    """Its last character has bits of the secret alone, so that it is covered too."""
    for before in ("", "x", "xy"):
        coded = base64.b64encode((before + secret).encode())
        first = -(-8 * len(before) // 6)
        for form in (coded, coded.rstrip(b"=")):
            out = Scrubber(Forms(spellings(secret))).whole(form)
            assert {ord("*")} == set(out[first:].rstrip(b"="))
