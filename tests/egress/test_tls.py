"""ClientHello: whom a TLS client asks for, read as TLS libraries read it, or not at all."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ringfence.egress.refused import Refused
from ringfence.egress.tls.hello import MOST_BYTES, Hello, asks_again, client_hello
from tests.egress.hellos import (
    ALPN,
    ECH,
    SNI,
    OpenSsl,
    alpn,
    message,
    of_this_library,
    records,
    sni,
    vector,
)
from tests.features import require

pytestmark = pytest.mark.anyone

PLAIN = message(sni(b"a.test"), alpn(b"h2", b"http/1.1"))


@pytest.fixture(scope="module")
def openssl(tmp_path_factory: pytest.TempPathFactory) -> OpenSsl:
    require("openssl")
    file = tmp_path_factory.mktemp("certificate") / "both.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-subj", "/CN=any", "-keyout", str(file), "-out", str(file) + ".crt"],
        check=True,
        capture_output=True,
    )  # fmt: skip
    file.write_bytes(file.read_bytes() + Path(f"{file}.crt").read_bytes())
    return OpenSsl(file)


def whole(data: bytes) -> Hello:
    hello = client_hello(data)
    assert hello is not None
    return hello


class TestWhatIsRead:
    def test_name_and_protocols(self) -> None:
        data = records(PLAIN)

        assert Hello("a.test", ("h2", "http/1.1"), False, len(data)) == client_hello(data)

    def test_a_library_s(self) -> None:
        hello = whole(of_this_library("A.Test", ["http/1.1"]))

        assert ("a.test", ("http/1.1",), False) == (
            hello.server_name,
            hello.alpn,
            hello.is_encrypted,
        )

    def test_no_name(self) -> None:
        assert whole(of_this_library(None)).server_name is None
        assert whole(records(message(no_extensions=True))).server_name is None
        assert whole(records(message())).server_name is None

    @pytest.mark.parametrize("number", [ECH, 0xFE0A, 0xFE09, 0xFE08, 0xFFCE])
    def test_an_encrypted_hello_is_told(self, number: int) -> None:
        assert whole(records(message(sni(b"a.test"), (number, b"")))).is_encrypted

    def test_what_follows_is_not_read(self) -> None:
        early_data = b"\x17\x03\x03\x00\x05hello"

        assert len(records(PLAIN)) == whole(records(PLAIN) + early_data).size

    @pytest.mark.parametrize("version", [b"\x03\x00", b"\x03\x01", b"\x03\x03", b"\x03\x04"])
    def test_the_record_s_version_means_nothing(self, version: bytes) -> None:
        assert "a.test" == whole(records(PLAIN, version=version)).server_name

    @given(st.integers(3, 200), st.integers(0, 400))
    def test_pieces_do_not_matter(self, size: int, shown: int) -> None:
        data = records(PLAIN, size)
        hello = client_hello(data[:shown])

        assert hello is None if shown < len(data) else hello == whole(data)
        assert ("a.test", len(data)) == (whole(data).server_name, whole(data).size)

    def test_a_second_one_may_come_after_a_change_of_cipher(self) -> None:
        change = b"\x14\x03\x03\x00\x01\x01"
        data = change + records(PLAIN)

        assert "a.test" == getattr(client_hello(data, second=True), "server_name", "")
        for shown in range(len(data)):
            assert client_hello(data[:shown], second=True) is None
        with pytest.raises(Refused):
            client_hello(data)
        with pytest.raises(Refused):
            client_hello(change + data, second=True)
        with pytest.raises(Refused):
            client_hello(b"\x14\x03\x03\x00\x01\x02" + records(PLAIN), second=True)


BARE = len(message(sni(b"a.test"), (21, b""))) - 4  # without the message's own header
LONG = message(sni(b"a.test"), (21, bytes(6400)))
ODD = {
    "not TLS": b"GET / HTTP/1.1\r\n\r\n",
    "an alert": b"\x15\x03\x01\x00\x02\x02\x28",
    "application data": b"\x17\x03\x03\x00\x05hello",
    "SSL 2": b"\x80\x2e\x01\x03\x01" + bytes(60),
    "another version of the record": records(PLAIN, version=b"\x02\x00"),
    "an empty record": b"\x16\x03\x01\x00\x00" + records(PLAIN),
    "a record too long": b"\x16\x03\x01\x40\x01" + PLAIN,
    "many tiny records": records(PLAIN, 1),
    "another record in between": records(PLAIN[:20])
    + b"\x15\x03\x01\x00\x02\x01\x00"
    + records(PLAIN[20:]),
    "another message": records(message(sni(b"a.test"), kind=2)),
    "a hello request": records(b"\0\0\0\0"),
    "a message too long": records(b"\x01" + vector(3, bytes(MOST_BYTES + 1))),
    "two messages in a record": records(PLAIN + PLAIN),
    "half a message more": records(PLAIN + b"\x01"),
    "SSL 3": records(message(version=b"\x03\x00")),
    "TLS 1.3 where it does not belong": records(message(version=b"\x03\x04")),
    "DTLS": records(message(version=b"\xfe\xfd")),
    "session id of 33 bytes": records(message(session=b"s" * 33)),
    "no cipher suites": records(message(suites=b"")),
    "half a cipher suite": records(message(suites=b"\x13\x01\x13")),
    "no compression": records(message(compression=b"")),
    "only odd compression": records(message(compression=b"\x01")),
    "bytes behind the extensions": records(message(sni(b"a.test"), behind=b"x")),
    "one byte of extensions": records(message(no_extensions=True, behind=b"\0")),
    "extensions longer than the message": records(message(no_extensions=True, behind=b"\xff\xff")),
    "extensions cut": records(message(no_extensions=True, behind=vector(2, b"\0\0\0\x05ab"))),
    "two names": records(message(sni(b"a.test", b"b.test"))),
    "the same name twice": records(message(sni(b"a.test", b"a.test"))),
    "two name extensions": records(message(sni(b"a.test"), sni(b"b.test"))),
    "a name extension without names": records(message((SNI, b""))),
    "an empty list of names": records(message((SNI, b"\0\0"))),
    "an empty name": records(message(sni(b""))),
    "a name of another type": records(message(sni(b"a.test", kind=1))),
    "bytes behind the names": records(message((SNI, sni(b"a.test")[1] + b"x"))),
    "bytes behind the name": records(
        message((SNI, vector(2, b"\0" + vector(2, b"a.test") + b"x")))
    ),
    "a list longer than the extension": records(
        message((SNI, b"\xff\xff\0" + vector(2, b"a.test")))
    ),
    "NUL in the name": records(message(sni(b"a.test\0.b.test"))),
    "a line end in the name": records(message(sni(b"a.test\n"))),
    "other letters in the name": records(message(sni("ä.test".encode()))),
    "an empty list of protocols": records(message((ALPN, b"\0\0"))),
    "an empty protocol": records(message(alpn(b"h2", b""))),
    "bytes behind the protocols": records(message((ALPN, alpn(b"h2")[1] + b"x"))),
    "no extensions, and some behind the message": records(message(no_extensions=True) + b"\0\0"),
    "a byte too long": records(message(sni(b"a.test"), (21, bytes(MOST_BYTES - BARE + 1)))),
    "cut into a record too many": records(LONG, -(-len(LONG) // 64) - 1),
    "protocols cut": records(message((ALPN, b"\0\x03\x05h2"))),
}


def test_one_as_long_and_in_as_many_records_as_may_be_is_read() -> None:
    longest = records(message(sni(b"a.test"), (21, bytes(MOST_BYTES - BARE))))

    assert "a.test" == whole(longest).server_name
    assert "a.test" == whole(records(LONG, -(-len(LONG) // 64))).server_name
    assert (None, ()) == (whole(records(message(no_extensions=True))).server_name, ())


def test_a_change_of_cipher_comes_once_and_first() -> None:
    change = b"\x14\x03\x03\x00\x01\x01"
    halves = records(PLAIN[:20]), records(PLAIN[20:])
    for data in (
        change + change + b"".join(halves),
        change.join(halves),
        change.join((b"", *halves)),
    ):
        with pytest.raises(Refused):
            client_hello(data, second=True)


@pytest.mark.parametrize("data", ODD.values(), ids=ODD.keys())
def test_odd_hellos_are_refused(data: bytes) -> None:
    with pytest.raises(Refused):
        client_hello(data)
    # Nor does one byte after the other make a hello of it.
    for shown in range(len(data)):
        try:
            assert client_hello(data[:shown]) is None
        except Refused:
            break


@given(st.binary(max_size=300), st.booleans())
def test_arbitrary_bytes_are_refused_or_waited_for(data: bytes, second: bool) -> None:
    for start in (b"", b"\x16\x03\x01", b"\x16\x03\x01\x01\x00\x01\x00\x00\xfc\x03\x03"):
        try:
            client_hello(start + data, second=second)
            asks_again(start + data)
        except Refused:
            pass


@st.composite
def bent_hellos(draw: st.DrawFn) -> bytes:
    """A real hello with some bytes changed, put in or left out, in records of any size."""
    name = draw(st.sampled_from(["a.test", "b.example.test", None]))
    data = bytearray(of_this_library(name, draw(st.sampled_from([None, ["h2", "http/1.1"]])))[5:])
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(data) - 1))
        match draw(st.sampled_from(["change", "add", "remove"])):
            case "change":
                data[at] = draw(st.integers(0, 255))
            case "add":
                data.insert(at, draw(st.integers(0, 255)))
            case "remove":
                del data[at]
    # The message's own length right again, so that what lies deeper is looked at.
    if draw(st.booleans()):
        data[1:4] = (len(data) - 4).to_bytes(3, "big")
    return records(bytes(data), draw(st.sampled_from([1 << 14, 400, 100, 60])))


@pytest.mark.full
@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(bent_hellos())
def test_openssl_never_reads_another_name(openssl: OpenSsl, data: bytes) -> None:
    """Whatever we let through, a server reads the name that was judged."""
    try:
        hello = client_hello(data)
    except Refused:
        return
    understood, name = openssl.reads(data)
    if understood:
        assert hello is not None
        assert hello.server_name == (name.lower() if name is not None else None)


def test_openssl_reads_a_plain_one(openssl: OpenSsl) -> None:
    """The control: it is OpenSSL that reads, and it does read names."""
    assert (True, "a.test") == openssl.reads(of_this_library("a.test"))
    assert (True, None) == openssl.reads(of_this_library(None))
    assert (False, None) == openssl.reads(b"\x16\x03\x01\x00\x05hello")


class TestASecondHello:
    def test_a_retry_is_recognised(self, openssl: OpenSsl) -> None:
        """A server that wants another key share asks again; the client's second hello says whom."""
        client, server = _pair(openssl, "prime256v1")

        assert asks_again(server) is True
        assert [None] * 43 == [asks_again(server[:n]) for n in range(43)]
        second = client_hello(client, second=True)
        assert second is not None
        assert "a.test" == second.server_name

    def test_any_other_answer_is_none(self, openssl: OpenSsl) -> None:
        _client, server = _pair(openssl, None)

        assert asks_again(server) is False
        assert asks_again(b"\x15\x03\x03\x00\x02\x02\x28") is False


def _pair(openssl: OpenSsl, server_curve: str | None) -> tuple[bytes, bytes]:
    """What the client sends second, and what the server sent first."""
    context = openssl.context()
    if server_curve:
        context.set_ecdh_curve(server_curve)  # which the client supports, and has no share of
    client_context = ssl.create_default_context()
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server, server_hostname="a.test")
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(incoming, outgoing, server_side=True)
    for side in (client, server):
        if side is server:
            incoming.write(to_server.read())
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            pass
    answer = outgoing.read()
    to_client.write(answer)
    try:
        client.do_handshake()
    except ssl.SSLError:
        pass
    return to_server.read(), answer
