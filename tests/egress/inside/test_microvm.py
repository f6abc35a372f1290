"""The same rules in a machine, whose connections come over a line: the same attempts, and what differs.

The controls of what is imported here stand beside it, where it comes from.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from ringfence import Sandbox
from ringfence.backends.microvm.backend import MicrovmBackend
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
    test_quic_fails_at_once_so_that_programs_fall_back,
    test_the_control_listens_elsewhere,
    test_there_is_no_interface_but_lo,
)
from tests.egress.inside.test_sockets import POLICY as POLICY
from tests.egress.world import World, places
from tests.machines import machine_backend, require_machines

__all__ = [
    "test_a_deny_rule_cuts_what_a_wider_rule_had_allowed",
    "test_a_host_is_allowed_and_taken_away_again",
    "test_a_live_connection_is_cut_by_the_policy_that_takes_its_host",
    "test_a_server_inside_is_its_own_affair",
    "test_an_abstract_socket_of_the_host_is_out_of_reach",
    "test_binding_to_somebody_elses_address_deceives_nobody",
    "test_no_datagram_leaves",
    "test_nobody_inside_takes_a_listeners_place",
    "test_quic_fails_at_once_so_that_programs_fall_back",
    "test_the_control_listens_elsewhere",
    "test_there_is_no_interface_but_lo",
    "test_to_and_from_unrestricted_is_refused",
]
pytestmark = pytest.mark.in_world


@pytest.fixture(scope="module")
def backend(world: World) -> Iterator[MicrovmBackend]:
    require_machines()
    with closing(machine_backend()) as made:
        yield made


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


def test_the_name_of_a_rule_is_reached_and_no_other(limited: Sandbox, world: World) -> None:
    assert reaches(limited, "a.test")
    mark = world.mark()
    addresses = (places.METADATA_V4, "10.0.0.5", "1.1.1.1", "2606:4700::1111")

    for host in ("b.test", *addresses):
        found = attempt(limited, "tcp", host=host, port=80, say=["GET / HTTP/1.0\r\n\r\n"])
        assert "" == found["heard"], (host, found)
    assert [] == world.left(mark)


def test_the_tables_cannot_be_changed(limited: Sandbox) -> None:
    errors = attempt(limited, "netlink", messages=list(CHANGES.values()))["errors"]

    assert {"EPERM"} == set(errors)
