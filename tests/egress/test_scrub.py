"""A secret that a server sends back does not arrive."""

from __future__ import annotations

import base64
import json
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.egress.scrub import Scrubber, spellings

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
    scrubber = Scrubber(secrets)
    out = b"".join(scrubber.feed(piece) for piece in pieces) + scrubber.finish()

    assert masked(b"".join(pieces), secrets) == out


@given(SECRETS, PIECES)
def test_nothing_waits_longer_than_it_must(secrets: list[bytes], pieces: list[bytes]) -> None:
    """A server that writes one line now and one later is heard now."""
    scrubber, data, out = Scrubber(secrets), b"", b""
    for piece in pieces:
        data += piece
        out += scrubber.feed(piece)
        waiting = data[len(out) :]
        assert not waiting or any(secret.startswith(waiting[: len(secret)]) for secret in secrets)
        assert len(waiting) < max(map(len, secrets))


@given(SECRETS, PIECES)
def test_a_scrubber_can_be_used_again(secrets: list[bytes], pieces: list[bytes]) -> None:
    scrubber = Scrubber(secrets)

    for piece in pieces:
        assert masked(piece, secrets) == scrubber.whole(piece)


def test_without_secrets_everything_passes() -> None:
    scrubber = Scrubber([b""])

    assert b"abc" == scrubber.feed(b"abc")
    assert b"" == scrubber.finish()


@pytest.mark.parametrize("secret", ['a"b\\c/d', "p%q r+s", "plain", "a&b=c"])
def test_spellings_of_web_pages(secret: str) -> None:
    text = (
        f"{secret} {json.dumps({'x': secret})} ?x={quote(secret, safe='')} {quote(secret)}".encode()
    )
    out = Scrubber(spellings(secret)).whole(text)

    assert len(text) == len(out)
    for form in (secret, json.dumps(secret)[1:-1], quote(secret), quote(secret, safe="")):
        assert form.encode() in text
        assert form.encode() not in out


def test_the_parts_of_a_basic_credential() -> None:
    secret = base64.b64encode(b"user:hunter2").decode()
    out = Scrubber(spellings(secret)).whole(f"user hunter2 {secret}".encode())

    assert f"user ******* {'*' * len(secret)}".encode() == out


def test_secrets_are_not_shown() -> None:
    assert "hunter2" not in repr(Scrubber([b"hunter2"]))
