"""TLS by name: the handshake must ask for the name that was connected to, or it is cut."""

from __future__ import annotations

import pytest

from ringfence import NetworkLimits, NetworkPolicy, NetworkRule, Sandbox
from tests.egress.inside.conftest import MakeSandbox, attempt
from tests.egress.world import World, places

pytestmark = [pytest.mark.in_world, pytest.mark.anyone]

POLICY = ("a.test", "b.test", "*.wild.test", f"{places.OTHER_V4}:443")
MISMATCHES = {
    "another allowed name": "b.test",
    "a name that is not allowed": "evil.test",
    "a longer name": "www.a.test",
    "none": None,
}


@pytest.mark.parametrize("connect", ["", "a.test:443"], ids=["transparent", "CONNECT"])
@pytest.mark.parametrize("mismatch", MISMATCHES)
def test_a_handshake_for_another_name_is_cut(
    limited: Sandbox, world: World, mismatch: str, connect: str
) -> None:
    mark = world.mark()

    found = attempt(limited, "tls", host="a.test", sni=MISMATCHES[mismatch], connect=connect)

    assert "" == found["heard"]
    assert "timeout" != found["error"]
    assert [] == world.left(mark, kind="request")
    assert {None} >= {e["sni"] for e in world.left(mark, kind="connection")}


@pytest.mark.parametrize("mismatch", MISMATCHES)
def test_the_control_shakes_hands_for_any_name(
    unrestricted: Sandbox, world: World, mismatch: str
) -> None:
    mark = world.mark()

    found = attempt(unrestricted, "tls", host="a.test", sni=MISMATCHES[mismatch])

    assert found["heard"], found
    assert world.left(mark, kind="request", sni=MISMATCHES[mismatch])


@pytest.mark.parametrize("connect", ["", "a.test:443"], ids=["transparent", "CONNECT"])
@pytest.mark.parametrize("sni", ["a.test", "A.Test"])
def test_a_handshake_for_the_name_goes_through(limited: Sandbox, sni: str, connect: str) -> None:
    found = attempt(limited, "tls", host="a.test", sni=sni, connect=connect)

    assert "200" in found["heard"][:20], found


HELLOS: dict[str, tuple[str | None, str, int, int, bool]] = {
    # name, change, pieces, records, allowed
    "plain": ("a.test", "", 1, 1, True),
    "in three pieces": ("a.test", "", 3, 1, True),
    "byte by byte": ("a.test", "", 64, 1, True),
    "in four records": ("a.test", "", 1, 4, True),
    "in four records and nine pieces": ("a.test", "", 9, 4, True),
    "another name in four records": ("evil.test", "", 1, 4, False),
    "another name in pieces": ("evil.test", "", 16, 1, False),
    "encrypted client hello": ("a.test", "ech", 1, 1, False),
    "encrypted client hello in records": ("a.test", "ech", 1, 5, False),
    "two names": ("a.test", "second-sni", 1, 1, False),
    "NUL in the name": ("a.test\0.evil.test", "", 1, 1, False),
    "no name": (None, "", 1, 1, False),
}


@pytest.mark.parametrize("hello", HELLOS)
def test_a_client_hello_is_read_as_the_server_reads_it(
    limited: Sandbox, world: World, hello: str
) -> None:
    sni, change, pieces, records, allowed = HELLOS[hello]

    found = attempt(
        limited,
        "hello",
        host="a.test",
        port=443,
        sni=sni,
        change=change,
        pieces=pieces,
        records=records,
    )

    assert "timeout" != found["error"]
    assert allowed == found["answered"], found


@pytest.mark.parametrize(("sni", "answered"), [("a.test", True), ("evil.test", False)])
def test_an_encrypted_name_goes_nowhere_where_tls_is_ended(
    make: MakeSandbox, sni: str, answered: bool
) -> None:
    """Browsers send one with every hello; the request behind it is read, and the name beside it counts."""
    sandbox = make(network=NetworkPolicy(rules=(NetworkRule("a.test", inspect=True),)))

    found = attempt(sandbox, "hello", host="a.test", port=443, sni=sni, change="ech")

    assert answered == found["answered"], found
    assert "timeout" != found["error"]


@pytest.mark.parametrize(
    "hello", ["encrypted client hello", "another name in four records", "no name"]
)
def test_the_control_has_its_hello_answered(unrestricted: Sandbox, hello: str) -> None:
    sni, change, pieces, records, _ = HELLOS[hello]

    found = attempt(
        unrestricted,
        "hello",
        host="a.test",
        port=443,
        sni=sni,
        change=change,
        pieces=pieces,
        records=records,
    )

    assert found["answered"], found


NOT_TLS = {
    "HTTP": ["GET / HTTP/1.1\r\nHost: a.test\r\n\r\n"],
    "SSH": ["SSH-2.0-x\r\n"],
    "SSL 2": ["\x80\x2e\x01\x00\x02" + "\0" * 41],
    "an alert": ["\x15\x03\x01\0\2\2\0"],
    "application data": ["\x17\x03\x03\0\5hello"],
    "an empty record": ["\x16\x03\x01\0\0"],
    "a record too long": ["\x16\x03\x01\xff\xff" + "x" * 70000],
    "another handshake message": ["\x16\x03\x01\0\5\x02\0\0\1x"],
    "garbage": ["\x16\x03\x01\0\x40\1\0\0\x3c" + "\xff" * 60],
}


@pytest.mark.full
@pytest.mark.parametrize("port", [443, 8443])
@pytest.mark.parametrize("what", NOT_TLS)
def test_a_tls_port_takes_nothing_but_tls(
    limited: Sandbox, world: World, what: str, port: int
) -> None:
    mark = world.mark()

    found = attempt(limited, "tcp", host="a.test", port=port, say=NOT_TLS[what])

    assert "" == found["heard"]
    assert "timeout" != found["error"]
    assert [] == world.left(mark, kind="request")


def test_a_hello_that_never_ends_is_cut(make: MakeSandbox) -> None:
    policy = NetworkPolicy(allowed_hosts=("a.test",), limits=NetworkLimits(header_s=0.5))
    sandbox = make(network=policy)

    found = attempt(sandbox, "tcp", host="a.test", port=443, say=["\x16\x03\x01\x02\0\1\0"])

    assert "timeout" != found["error"]


def test_an_address_by_its_own_rule_needs_no_name(limited: Sandbox) -> None:
    found = attempt(limited, "tls", host=places.OTHER_V4, sni=None)

    assert "200" in found["heard"][:20], found


def test_resumed_and_early_data_change_nothing(limited: Sandbox, world: World) -> None:
    """Two handshakes that share a session: the second one's name is looked at as well."""
    script = """
import socket, ssl
context = ssl.create_default_context(cafile="/etc/ssl/certs/ca-certificates.crt")
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
session = None
for name in ("a.test", "b.test"):
    with socket.create_connection(("a.test", 443), 4) as plain:
        try:
            with context.wrap_socket(plain, server_hostname=name, session=session) as sock:
                sock.sendall(b"GET / HTTP/1.0\\r\\nHost: a.test\\r\\n\\r\\n")
                print(name, len(sock.recv(100)) > 0)
                session = sock.session
        except OSError as exc:
            print(name, "refused")
"""
    result = limited.exec(["python3", "-c", script], timeout_s=20)

    assert "a.test True\nb.test refused\n" == result.stdout_text, result.stderr_text
