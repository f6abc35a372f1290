"""The same rules in a machine, whose connections come over a line: what tells most, and what differs.

What is written here lives in one machine, for each takes most of a second. What is taken from the modules
beside this one makes the same attempts in machines as it makes there in sandboxes of the native backend.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import pytest

from ringfence import Credential, NetworkPolicy, NetworkRule, Sandbox
from ringfence.backends.microvm.backend import MicrovmBackend
from ringfence.backends.microvm.network import MicrovmNetwork
from ringfence.errors import NetworkPolicyError, Unsupported
from ringfence.model.capabilities import ENFORCED
from ringfence.model.net.netlimits import NetworkLimits
from tests.egress.inside.conftest import MakeSandbox, attempt, new_sandbox
from tests.egress.inside.test_inbound import fetch, serve
from tests.egress.inside.test_live import (  # noqa: F401
    Talk,
    test_a_deny_rule_cuts_what_a_wider_rule_had_allowed,
    test_a_host_is_allowed_and_taken_away_again,
    test_a_live_connection_is_cut_by_the_policy_that_takes_its_host,
    test_a_live_connection_outlives_a_policy_that_keeps_its_host,
    test_addresses_and_ports_change_too,
    test_addresses_of_one_sandbox_mean_nothing_in_another,
    test_none_and_back,
    test_to_and_from_unrestricted_is_refused,
)
from tests.egress.inside.test_sockets import (  # noqa: F401
    CHANGES,
    POLICY,
    test_a_server_inside_is_its_own_affair,
    test_an_abstract_socket_of_the_host_is_out_of_reach,
    test_binding_to_somebody_elses_address_deceives_nobody,
    test_no_datagram_leaves,
    test_nobody_inside_takes_a_listeners_place,
    test_quic_fails_at_once_so_that_programs_fall_back,
    test_the_control_listens_elsewhere,
    test_there_is_no_interface_but_lo,
)
from tests.egress.world import World, places
from tests.machines import machine_backend, require_machines

pytestmark = [pytest.mark.in_world, pytest.mark.anyone, pytest.mark.full]

NAME, SECRET = "API_TOKEN", "sk-live-5e1f77"
PATIENCE_S = 100
_CONNECTED = """
import _socket
sock = _socket.socket()
sock.connect(("echo.test", 7))
print("up", flush=True)
try:
    print("ended", sock.recv(1))
except ConnectionResetError:
    print("cut", flush=True)
"""
NO_NAME, REFUSED = 6, 7
PLACES = ("a.test", "b.test")
RULE = NetworkRule("a.test", "443", credential=Credential(NAME))


@pytest.fixture(scope="module")
def backend(world: World) -> Iterator[MicrovmBackend]:
    require_machines()
    with closing(machine_backend()) as made:
        yield made


@pytest.fixture(scope="module")
def machine(world: World, backend: MicrovmBackend) -> Iterator[Sandbox]:
    """One that was made without any network: every test gives it the policy that it needs."""
    with new_sandbox(world, backend=backend) as sandbox:
        yield sandbox


@pytest.fixture
def make(world: World, backend: MicrovmBackend) -> Iterator[MakeSandbox]:
    """Machines, but for what they refuse."""
    with ExitStack() as stack:

        def create(**options: Any) -> Sandbox:
            if options.get("network") != "unrestricted":
                options["backend"] = backend
            return stack.enter_context(new_sandbox(world, **options))

        yield create


@pytest.fixture(scope="module")
def limited(world: World, backend: MicrovmBackend) -> Iterator[Sandbox]:
    with new_sandbox(world, network=POLICY, backend=backend) as sandbox:
        yield sandbox


def _network(sandbox: Sandbox) -> str:
    (found,) = [each for each in sandbox.protections() if each.name == "network"]
    assert ENFORCED == found.status, found
    return found.why


def _policy(hosts: str, *rules: NetworkRule) -> NetworkPolicy:
    """One that waits for a machine whose processor is imitated by one that has other things to do."""
    return replace(NetworkPolicy.parse(hosts), rules=rules, limits=NetworkLimits(header_s=100.0))


def _fetched(machine: Sandbox, *places_to_go: str) -> list[int]:
    """How curl ended for each, without any proxy; see EXIT CODES in curl(1)."""
    script = f"for url; do curl -s -o /dev/null --noproxy '*' -m {PATIENCE_S} $url; echo $?; done"
    urls = [f"http://{each}/" for each in places_to_go]
    return [int(word) for word in machine.exec(["sh", "-c", script, "sh", *urls]).text.split()]


def test_the_names_of_rules_are_reached_and_no_other(machine: Sandbox, world: World) -> None:
    machine.apply_network_policy(_policy("a.test:80,v6.test:80"))
    assert [0, 0] == _fetched(machine, "a.test", "v6.test")
    mark = world.mark()

    refused = _fetched(machine, "b.test", "a.test:8080", places.METADATA_V4, "[2606:4700::1111]")

    assert [NO_NAME, REFUSED, REFUSED, REFUSED] == refused
    assert [] == world.left(mark)
    assert "through it what 2 rules allow" in _network(machine)


def test_nobody_inside_changes_the_tables(machine: Sandbox) -> None:
    """The machine's own kernel, which has them too, belongs to nobody in there."""
    machine.apply_network_policy(_policy("a.test"))

    errors = attempt(machine, "netlink", messages=list(CHANGES.values()))["errors"]

    assert {"EPERM"} == set(errors)


def test_a_connection_is_cut_by_the_policy_that_takes_its_host(machine: Sandbox) -> None:
    machine.apply_network_policy(_policy("echo.test,a.test"))
    connection = Talk(machine, "echo.test", PATIENCE_S)
    assert connection.goes_on()

    machine.apply_network_policy(_policy("a.test"))

    assert not connection.goes_on()
    assert connection.process.wait().ok


def test_to_none_and_back(machine: Sandbox, world: World) -> None:
    machine.apply_network_policy(_policy("a.test"))
    machine.apply_network_policy("none")

    mark = world.mark()
    assert [NO_NAME] == _fetched(machine, "a.test")
    assert [] == world.left(mark)
    assert "nothing but lo" in _network(machine)

    machine.apply_network_policy(_policy("a.test"))
    assert [0] == _fetched(machine, "a.test")
    assert "a.test" in {event.host for event in machine.network_log()}


def test_a_server_inside_is_published(machine: Sandbox) -> None:
    serve(machine)

    with machine.expose(8000) as published:
        assert 70_000 == fetch(published.address, 70_000)


def test_whoever_kills_the_relay_cuts_all_and_opens_nothing(machine: Sandbox) -> None:
    """Another one begins, under the same policy."""
    machine.apply_network_policy(_policy("echo.test:7,a.test:80"))
    connection = Talk(machine, "echo.test", PATIENCE_S)
    assert connection.goes_on()

    network: MicrovmNetwork = machine._inner.network  # type: ignore[attr-defined]
    os.kill(network.relay_pid, signal.SIGKILL)

    assert not connection.goes_on()
    assert [0, NO_NAME, REFUSED] == _fetched(machine, "a.test", "b.test", places.METADATA_V4)
    machine.apply_network_policy(_policy("b.test"))
    assert [NO_NAME, 0] == _fetched(machine, "a.test", "b.test")


def test_a_relay_that_dies_again_and_again_is_not_replaced_for_ever(
    machine: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of this machine's network, and the last test in it."""
    monkeypatch.setattr("ringfence.backends.microvm.network._WITHIN_S", 3600.0)
    machine.apply_network_policy(_policy("a.test"))
    network: MicrovmNetwork = machine._inner.network  # type: ignore[attr-defined]
    ends = time.monotonic() + PATIENCE_S
    while network.is_carried and time.monotonic() < ends:
        with contextlib.suppress(ProcessLookupError):
            if pid := network.relay_pid:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)

    assert not network.is_carried
    assert [0] != _fetched(machine, "a.test")
    with pytest.raises(NetworkPolicyError):
        machine.apply_network_policy(_policy("b.test"))
    assert machine.exec(["true"]).ok


def test_a_machine_with_rules_is_saved_and_goes_on_under_them(
    world: World, backend: MicrovmBackend
) -> None:
    """What was connected is not; what is connected to then is, where the rules have it."""
    with new_sandbox(world, network=_policy("a.test,echo.test:7"), backend=backend) as first:
        first.shell(f"python3 -I -S -c '{_CONNECTED}' >/tmp/log 2>&1 </dev/null &")
        first.shell("until grep -q up /tmp/log; do sleep 0.05; done", timeout_s=PATIENCE_S)
        snapshot = first.checkpoint()
    with Sandbox.restore(snapshot.id, backend=backend) as second:
        second.shell("until grep -q cut /tmp/log; do sleep 0.05; done", timeout_s=PATIENCE_S)
        assert [0, NO_NAME] == _fetched(second, "a.test", "b.test")
        second.apply_network_policy("none")
        assert [NO_NAME] == _fetched(second, "a.test")


def test_a_secret_is_written_outside_also_after_a_restore(
    world: World, backend: MicrovmBackend
) -> None:
    """Who ends TLS outside is believed by programs inside, where no file or variable has the secret."""
    policy, mark = _policy("b.test", RULE), world.internet.mark()

    with Sandbox.create(backend=backend, network=policy, secrets={NAME: SECRET}) as first:
        _get(first)
        inside = first.exec(["sh", "-c", "env; cat /proc/*/environ"]).stdout
        with pytest.raises(Unsupported):  # what stands for the secret is known out here alone
            first.checkpoint()
        snapshot = first.snapshot()
    with Sandbox.restore(snapshot.id, secrets={NAME: SECRET}, backend=backend) as second:
        _get(second)

    assert NAME.encode() in inside
    assert SECRET.encode() not in inside
    requests = world.internet.seen(mark, kind="request")
    sent = [value for each in requests for key, value in each["headers"] if "Bearer" in value]
    assert 2 * [f"Bearer {SECRET}"] == sent


def _get(sandbox: Sandbox) -> None:
    result = sandbox.exec(["curl", "-sS", "https://a.test/"], timeout_s=PATIENCE_S)
    assert result.ok, result.stderr_text
    assert SECRET.encode() not in result.stdout


@pytest.mark.parametrize(
    ("before", "after"), [("none", "b.test"), ("a.test", "b.test"), ("a.test", "none")]
)
def test_a_copy_of_what_runs_has_its_own_policy_from_its_first_moment(
    make: MakeSandbox, before: str, after: str
) -> None:
    """Its jail's and its kernel's tables are those of the copy, and what runs goes on under them."""
    policies = {
        each: _policy(each) if each != "none" else NetworkPolicy.none() for each in (before, after)
    }
    source = make(network=policies[before])
    counter = source.start(
        ["sh", "-c", "read -r line; echo $line; read -r line"], stream_stdin=True
    )
    (copy,) = source.fork(processes="required", network=policies[after])
    with copy:
        reached = [
            each for each, code in zip(PLACES, _fetched(copy, *PLACES), strict=True) if not code
        ]
        assert [each for each in (after,) if each != "none"] == reached
        process = copy.process(counter.id)
        assert process.stdin is not None
        process.stdin.write(b"here\n")
        assert b"here\n" == next(iter(process.stdout))
        assert policies[after] == copy.spec.network
    reached = [
        each for each, code in zip(PLACES, _fetched(source, *PLACES), strict=True) if not code
    ]
    assert [each for each in (before,) if each != "none"] == reached
