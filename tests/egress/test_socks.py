"""SOCKS 5: whom a client asks for, and what it is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.egress import socks
from ringfence.egress.io.loop import Loop
from ringfence.egress.refused import Refused

pytestmark = pytest.mark.anyone


class Talk:
    """A stream whose client said everything at once, in pieces of one size."""

    def __init__(self, data: bytes, piece: int = 1) -> None:
        self.data, self.piece = data, piece
        self.said = b""

    async def read(self, most: int) -> bytes:
        size = min(most, self.piece)
        data, self.data = self.data[:size], self.data[size:]
        return data

    async def write(self, data: bytes) -> None:
        self.said += data

    async def end(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    abort = close


def ask(talk: Talk) -> tuple[str, int]:
    loop = Loop()
    try:
        return loop.run_until_done(socks.target(talk))
    finally:
        loop.close()


HELLO = b"\5\1\0"


def named(name: bytes, port: int = 443) -> bytes:
    return HELLO + b"\5\1\0\3" + bytes([len(name)]) + name + port.to_bytes(2, "big")


@given(
    st.from_regex(r"[a-zA-Z0-9.-]{1,255}", fullmatch=True),
    st.integers(0, 65535),
    st.integers(1, 99),
)
def test_a_name_is_read(name: str, port: int, piece: int) -> None:
    talk = Talk(named(name.encode(), port) + b"rest", piece)

    assert (name, port) == ask(talk)
    assert b"\5\0" == talk.said
    assert b"rest" == talk.data


def test_addresses_are_read() -> None:
    v4 = Talk(HELLO + b"\5\1\0\1\xcb\0\x71\7\0\x50")
    v6 = Talk(HELLO + b"\5\1\0\4" + bytes.fromhex("20010db8" + "00" * 11 + "07") + b"\0\x50")

    assert ("203.0.113.7", 80) == ask(v4)
    assert ("2001:db8::7", 80) == ask(v6)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\4\1\0\x50\x7f\0\0\1user\0", b""),  # SOCKS 4
        (b"\5\0", b"\5\xff"),
        (b"\5\1\2", b"\5\xff"),  # only with a password
        (HELLO + b"\5\2\0\1\x7f\0\0\1\0\x50", b"\7"),  # BIND
        (HELLO + b"\5\3\0\1\x7f\0\0\1\0\x50", b"\7"),  # UDP ASSOCIATE
        (HELLO + b"\5\1\0\2\x7f\0\0\1\0\x50", b"\x08"),
        (HELLO + b"\5\1\1\1\x7f\0\0\1\0\x50", b""),
        (HELLO + b"\4\1\0\1\x7f\0\0\1\0\x50", b""),
        (named(b""), b"\2"),
        (named(b"a.test\0.evil.test"), b"\2"),
        (named(b"a.test\r\nx"), b"\2"),
        (named(b"\xe4.test"), b"\2"),
        (named(b"a.test")[:-1], b""),  # ends within
        (b"", b""),
    ],
)
def test_what_is_no_request_by_name_or_address_is_refused(data: bytes, said: bytes) -> None:
    talk = Talk(data, 4096)

    with pytest.raises(Refused):
        ask(talk)

    assert talk.said.removeprefix(b"\5\0").startswith(
        said and (said if 2 == len(said) else b"\5" + said)
    )


@given(st.binary(max_size=300))
def test_anything_is_survived(data: bytes) -> None:
    talk = Talk(data, 4096)

    try:
        host, port = ask(talk)
    except Refused:
        return

    assert host.isascii()
    assert host.isprintable()
    assert 0 <= port < 65536
