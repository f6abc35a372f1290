"""The same rules in gVisor, whose sockets are those of its jail: the same attempts, and what differs.

The controls of what is imported here stand beside it, where it comes from.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from ringfence import Credential, NetworkPolicy, NetworkRule, Sandbox
from ringfence.backends.gvisor.backend import GvisorBackend
from ringfence.backends.native.backend import NativeBackend
from ringfence.backends.protocol import Backend
from ringfence.errors import NetworkPolicyError, Unsupported
from tests.egress.inside.conftest import MakeSandbox, attempt, new_sandbox
from tests.egress.inside.test_live import (
    reaches,
    test_a_deny_rule_cuts_what_a_wider_rule_had_allowed,
    test_a_host_is_allowed_and_taken_away_again,
    test_a_live_connection_is_cut_by_the_policy_that_takes_its_host,
    test_to_and_from_unrestricted_is_refused,
)
from tests.egress.inside.test_sockets import (
    CHANGES,
    test_a_server_inside_is_its_own_affair,
    test_an_abstract_socket_of_the_host_is_out_of_reach,
    test_binding_to_somebody_elses_address_deceives_nobody,
    test_no_datagram_leaves,
    test_nobody_inside_takes_a_listeners_place,
    test_only_the_usual_sockets_can_be_opened,
    test_quic_fails_at_once_so_that_programs_fall_back,
    test_the_control_listens_elsewhere,
    test_the_filter_tables_cannot_be_reached,
    test_there_is_no_interface_but_lo,
)
from tests.egress.inside.test_sockets import POLICY as POLICY
from tests.egress.world import World, places
from tests.features import require

__all__ = [
    "test_a_deny_rule_cuts_what_a_wider_rule_had_allowed",
    "test_a_host_is_allowed_and_taken_away_again",
    "test_a_live_connection_is_cut_by_the_policy_that_takes_its_host",
    "test_a_server_inside_is_its_own_affair",
    "test_an_abstract_socket_of_the_host_is_out_of_reach",
    "test_binding_to_somebody_elses_address_deceives_nobody",
    "test_no_datagram_leaves",
    "test_nobody_inside_takes_a_listeners_place",
    "test_only_the_usual_sockets_can_be_opened",
    "test_quic_fails_at_once_so_that_programs_fall_back",
    "test_the_control_listens_elsewhere",
    "test_the_filter_tables_cannot_be_reached",
    "test_there_is_no_interface_but_lo",
    "test_to_and_from_unrestricted_is_refused",
]
pytestmark = [pytest.mark.in_world, pytest.mark.anyone, pytest.mark.full]

NAME, SECRET = "API_TOKEN", "sk-live-5e1f77"
RULE = NetworkRule("a.test", "443", credential=Credential(NAME))


@pytest.fixture(scope="module", autouse=True)
def _gvisor() -> None:
    require("runsc")


@pytest.fixture
def make(world: World) -> Iterator[MakeSandbox]:
    """Of gVisor, but for what it refuses."""
    with ExitStack() as stack:

        def create(**options: Any) -> Sandbox:
            if options.get("network") != "unrestricted":
                options["backend"] = "gvisor"
            return stack.enter_context(new_sandbox(world, **options))

        yield create


@pytest.fixture(scope="module")
def limited(world: World) -> Iterator[Sandbox]:
    with new_sandbox(world, network=POLICY, backend="gvisor") as sandbox:
        yield sandbox


def _network(sandbox: Sandbox) -> str:
    (found,) = [each for each in sandbox.protections() if each.name == "network"]
    assert "enforced" == found.status, found
    return found.why


def test_the_name_of_a_rule_is_reached_and_no_other(limited: Sandbox, world: World) -> None:
    assert reaches(limited, "a.test")
    mark = world.mark()
    addresses = (places.METADATA_V4, "10.0.0.5", "1.1.1.1", "2606:4700::1111")

    for host in ("b.test", *addresses):
        found = attempt(limited, "tcp", host=host, port=80, say=["GET / HTTP/1.0\r\n\r\n"])
        assert "" == found["heard"], (host, found)
    assert [] == world.left(mark)
    assert "through it what 3 rules allow" in _network(limited)


def test_the_tables_cannot_be_changed(limited: Sandbox) -> None:
    """gVisor answers for the tables itself, and lets nobody change what it shows."""
    errors = attempt(limited, "netlink", messages=list(CHANGES.values()))["errors"]

    assert {"EACCES"} == set(errors)


def test_without_rules_there_is_no_way_out_and_none_comes_later(make: MakeSandbox) -> None:
    sandbox = make()

    assert "gVisor's own loopback" in _network(sandbox)
    with pytest.raises(NetworkPolicyError, match="started without"):
        sandbox.apply_network_policy("a.test")
    sandbox.apply_network_policy("none")


def test_to_none_and_back(make: MakeSandbox, world: World) -> None:
    sandbox = make(network="a.test")
    assert reaches(sandbox, "a.test")

    sandbox.apply_network_policy("none")
    mark = world.mark()
    assert not reaches(sandbox, "a.test")
    assert [] == world.left(mark)
    assert "nothing but lo" in _network(sandbox)

    sandbox.apply_network_policy("a.test")
    assert reaches(sandbox, "a.test")
    assert {"a.test"} == {event.host for event in sandbox.network_log() if event.host}


def test_sockets_of_the_host_s_kernel_are_no_part_of_a_checkpoint(limited: Sandbox) -> None:
    with pytest.raises(Unsupported):
        limited.checkpoint()
    assert limited.exec(["true"]).ok


@pytest.mark.parametrize("made_by", [NativeBackend, GvisorBackend])
def test_a_secret_is_written_outside_also_after_a_restore(
    world: World, made_by: type[NativeBackend | GvisorBackend], tmp_path: Path
) -> None:
    """The files by which programs inside trust us are each sandbox's own, and no part of a snapshot."""
    policy, mark = NetworkPolicy(rules=(RULE,)), world.internet.mark()
    with closing(made_by(state_dir=str(tmp_path))) as backend:
        _go_out_twice(backend, policy)

    requests = world.internet.seen(mark, kind="request")
    sent = [value for each in requests for key, value in each["headers"] if "Bearer" in value]
    assert 2 * [f"Bearer {SECRET}"] == sent


def _go_out_twice(backend: Backend, policy: NetworkPolicy) -> None:
    with Sandbox.create(backend=backend, network=policy, secrets={NAME: SECRET}) as first:
        _get(first)
        snapshot = first.snapshot()
    with Sandbox.restore(snapshot.id, secrets={NAME: SECRET}, backend=backend) as second:
        _get(second)


def _get(sandbox: Sandbox) -> None:
    result = sandbox.exec(["curl", "-sS", "--max-time", "20", "https://a.test/"], timeout_s=30)
    assert result.ok, result.stderr_text
    assert SECRET.encode() not in result.stdout + sandbox.exec(["env"]).stdout
