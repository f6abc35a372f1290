"""A policy that changes while the sandbox runs: new connections at once, old ones cut if need be."""

from __future__ import annotations

import pytest

from ringfence import NetworkPolicy, Sandbox
from ringfence.errors import RingfenceError
from tests.egress.inside.conftest import MakeSandbox, attempt
from tests.egress.world import World, places
from tests.native.conftest import am_root

pytestmark = pytest.mark.in_world

GET = ["GET / HTTP/1.1\r\nHost: a.test\r\n\r\n"]
# Says a line whenever one came back; ends when the connection does.
TALK = """
import _socket, sys
family, kind, *_, address = _socket.getaddrinfo(sys.argv[1], 7, 0, _socket.SOCK_STREAM)[0]
sock = _socket.socket(family, kind)
sock.settimeout(float(sys.argv[2]))
sock.connect(address)
try:
    while True:
        sock.sendall(b"x")
        if not sock.recv(10):
            break
        print("back", flush=True)
        sys.stdin.readline()
    print("ended", flush=True)
except OSError as exc:
    print("cut", flush=True)
"""


class Talk:
    """A connection inside that says and hears one byte at a time."""

    def __init__(self, sandbox: Sandbox, host: str, patience_s: float = 20.0) -> None:
        argv = ["python3", "-I", "-S", "-c", TALK, host, str(patience_s)]
        self.process = sandbox.start(argv, stream_stdin=True)
        self._lines = self.process.stdout.lines()
        assert "back" == self.hear()

    def hear(self) -> str:
        return next(self._lines).strip()

    def goes_on(self) -> bool:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        return "back" == self.hear()


def reaches(sandbox: Sandbox, host: str, port: int = 80) -> bool:
    say = [f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n"]
    found = attempt(sandbox, "tcp", host=host, port=port, say=say, until=" 200 ")
    return " 200 " in found["heard"][:20]


def test_a_host_is_allowed_and_taken_away_again(make: MakeSandbox, world: World) -> None:
    sandbox = make(network="b.test")
    assert not reaches(sandbox, "a.test")

    sandbox.apply_network_policy("a.test,b.test")
    assert reaches(sandbox, "a.test")

    sandbox.apply_network_policy("b.test")
    assert not reaches(sandbox, "a.test")
    assert reaches(sandbox, "b.test")


def test_a_live_connection_is_cut_by_the_policy_that_takes_its_host(make: MakeSandbox) -> None:
    sandbox = make(network="echo.test,a.test")
    connection = Talk(sandbox, "echo.test")

    sandbox.apply_network_policy("a.test")

    assert not connection.goes_on()
    assert connection.process.wait(timeout_s=5).ok


def test_a_live_connection_outlives_a_policy_that_keeps_its_host(make: MakeSandbox) -> None:
    sandbox = make(network="echo.test,a.test")
    connection = Talk(sandbox, "echo.test")

    sandbox.apply_network_policy("echo.test:7")

    assert all(connection.goes_on() for _ in range(3))
    connection.process.kill()


def test_a_deny_rule_cuts_what_a_wider_rule_had_allowed(make: MakeSandbox) -> None:
    sandbox = make(network="*.wild.test")
    connection = Talk(sandbox, "x.wild.test")

    sandbox.apply_network_policy("*.wild.test,!x.wild.test")

    assert not connection.goes_on()
    assert not reaches(sandbox, "x.wild.test")
    assert reaches(sandbox, "y.wild.test")


def test_a_live_connection_is_cut_by_the_policy_that_denies_its_address(make: MakeSandbox) -> None:
    """The name stays allowed: what is judged again is where the connection leads as well."""
    sandbox = make(network="v4.test")
    connection, other = Talk(sandbox, "v4.test"), "203.0.113.77"

    sandbox.apply_network_policy(f"v4.test,!{other}")
    assert connection.goes_on(), "the control: another address is denied"
    sandbox.apply_network_policy(f"v4.test,!{places.WEB_V4}")

    assert not connection.goes_on()
    assert not reaches(sandbox, "v4.test")
    assert connection.process.wait(timeout_s=5).ok


def test_none_and_back(make: MakeSandbox, world: World) -> None:
    sandbox = make(network="none")
    assert not reaches(sandbox, "a.test")

    sandbox.apply_network_policy("a.test")
    assert reaches(sandbox, "a.test")
    connection = Talk(sandbox, "a.test")

    sandbox.apply_network_policy("none")
    mark = world.mark()
    assert not reaches(sandbox, "a.test")
    assert [] == world.left(mark)
    assert not connection.goes_on()

    sandbox.apply_network_policy("a.test")
    assert reaches(sandbox, "a.test")


@pytest.mark.parametrize(
    ("first", "then"), [("a.test", "unrestricted"), ("unrestricted", "a.test")]
)
def test_to_and_from_unrestricted_is_refused(make: MakeSandbox, first: str, then: str) -> None:
    sandbox = make(network=first)

    with pytest.raises(RingfenceError):
        sandbox.apply_network_policy(then)
    assert sandbox.exec(["true"]).ok


def test_addresses_and_ports_change_too(make: MakeSandbox) -> None:
    sandbox = make(network="a.test:80")
    assert not reaches(sandbox, places.WEB_V4)

    sandbox.apply_network_policy(f"a.test:8080,{places.WEB_V4}:80")

    assert reaches(sandbox, places.WEB_V4)
    assert not reaches(sandbox, "a.test")
    say = [GET[0].replace("a.test", "a.test:8080")]
    found = attempt(sandbox, "tcp", host="a.test", port=8080, say=say, until=" 200 ")
    assert " 200 " in found["heard"][:20]


def test_a_hundred_changes(make: MakeSandbox) -> None:
    sandbox = make(network="a.test")
    for turn in range(100):
        sandbox.apply_network_policy("b.test" if turn % 2 else "a.test")

    assert reaches(sandbox, "b.test")
    assert not reaches(sandbox, "a.test")


def test_a_sandbox_has_no_part_in_anothers_policy(make: MakeSandbox) -> None:
    one, other = make(network="a.test"), make(network="b.test")

    assert [True, False] == [reaches(one, name) for name in ("a.test", "b.test")]
    assert [False, True] == [reaches(other, name) for name in ("a.test", "b.test")]
    one.apply_network_policy(NetworkPolicy.none())
    assert reaches(other, "b.test")
    assert am_root() or not reaches(one, "a.test")


def test_addresses_of_one_sandbox_mean_nothing_in_another(make: MakeSandbox, world: World) -> None:
    """A synthetic address is known only where its name was asked for, or allowed."""
    one, other = make(network="a.test,echo.test"), make(network="b.test")
    addresses = attempt(one, "resolve", name="a.test")["addresses"]
    mark = world.mark()

    for address in addresses:
        found = attempt(other, "tcp", host=address, port=80, say=GET)
        assert "" == found["heard"]
        assert "timeout" != found["error"]
    assert [] == world.left(mark, kind="request")
