"""What one of the two passes runs for both: it cannot come out otherwise for another user.

As root the whole suite runs twice, side by side: as root and as an ordinary user. What is listed here
computes, or speaks with programs and servers that are nobody's in particular, or asks of a sandbox
what it does alike whoever made it: what an API says of it, what a policy lets out, what happens
inside. Who runs what is chosen so that both passes take the same time.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

ELSEWHERE = "RINGFENCE_TEST_ONCE_ELSEWHERE"
"""Set by tools/test.sh when there are two passes: each leaves out what the other runs for both."""
FOR_BOTH_AS_ROOT = (
    "api/test_express.py",
    "api/test_files.py",
    "api/test_once.py",
    "api/test_openapi.py",
    "api/test_streams.py",
    "bench/test_adapters.py",
    "bench/test_rows.py",
    "bench/test_turns.py",
    "cli/test_completion.py",
    "cli/test_network_options.py",
    "cli/test_options.py",
    "cli/test_run_refusals.py",
    "client/test_looking.py",
    "client/test_sandbox.py",
    "conformance/test_command.py::TestBubblewrapForAnybody",
    "conformance/test_fake.py",
    "daemon/test_killed.py::test_killed_at[create ",
    "daemon/test_killed.py::test_killed_at[resume ",
    "daemon/test_killed.py::test_killed_at[snapshot ",
    "daemon/test_killed.py::test_killed_at[suspend ",
    "docs/test_contract.py",
    "docs/test_promises.py",
    "docs/test_reference.py",
    "egress/inside/test_addresses.py",
    "egress/inside/test_faults.py::test_a_thousand_sandboxes_with_policies",
    "egress/inside/test_gvisor.py",
    "egress/inside/test_microvm.py::test_a_server_inside_is_its_own",
    "egress/inside/test_microvm.py::test_an_abstract_socket",
    "egress/inside/test_microvm.py::test_binding",
    "egress/inside/test_microvm.py::test_no_datagram_leaves",
    "egress/inside/test_microvm.py::test_nobody_inside_takes",
    "egress/inside/test_microvm.py::test_quic",
    "egress/inside/test_microvm.py::test_the_control_listens",
    "egress/inside/test_microvm.py::test_there_is_no_interface",
    "egress/inside/test_tls.py",
    "egress/test_parts.py",
    "egress/test_relay.py",
    "programs/test_programs.py::test_program[gvisor-",
    "programs/test_table.py",
    "sessions/test_at_once.py",
    "sessions/test_in_time.py",
    "sessions/test_outlive.py::test_killed_at[claim",
    "sessions/test_outlive.py::test_killed_at[closing",
    "sessions/test_outlive.py::test_killed_at[create",
    "sessions/test_outlive.py::test_killed_at[detach",
    "sessions/test_outlive.py::test_killed_at[prewarm",
    "sessions/test_restart.py::test_killed_at[delete",
    "sessions/test_restart.py::test_killed_at[exec",
    "sessions/test_restart.py::test_killed_at[resume",
    "sessions/test_restart.py::test_killed_at[snapshot",
    "sessions/test_restart.py::test_killed_at[suspend",
    "spool/",
    "strong/test_gvisor_server.py",
    "test_again.py",
    "test_layout.py",
    "typing/",
    "unit/model/",
    "unit/policy/test_addresses.py",
    "unit/policy/test_bpf.py",
    "unit/policy/test_filters.py",
    "unit/policy/test_learn.py",
    "unit/policy/test_network.py",
    "unit/policy/test_profiles.py",
    "unit/policy/test_redirects.py",
    "unit/policy/test_seccomp_policy.py",
    "unit/policy/test_syscall_tables.py",
    "unit/sessions/",
    "unit/store/",
    "unit/test_errors.py",
)
FOR_BOTH_AS_OTHERS = (
    "api/test_ports.py",
    "api/test_restart_streams.py",
    "client/test_crowd.py",
    "client/test_files_and_ports.py",
    "client/test_lost_answers.py",
    "conformance/test_gvisor.py::TestGvisorForAnybody",
    "daemon/test_killed.py::test_killed_at[delete ",
    "daemon/test_killed.py::test_killed_at[exec ",
    "docs/test_docs.py::test_page_runs_as_printed[docs/how-to/",
    "egress/inside/process/test_changes.py",
    "egress/inside/process/test_crowd.py",
    "egress/inside/process/test_faults.py",
    "egress/inside/process/test_limits.py",
    "egress/inside/process/test_passage.py",
    "egress/inside/test_http.py",
    "egress/inside/test_microvm.py::test_a_deny_rule",
    "egress/inside/test_microvm.py::test_a_host_is_allowed",
    "egress/inside/test_microvm.py::test_a_live_connection",
    "egress/inside/test_microvm.py::test_a_machine_with_rules",
    "egress/inside/test_microvm.py::test_a_server_inside_is_published",
    "egress/inside/test_microvm.py::test_addresses_",
    "egress/inside/test_microvm.py::test_nobody_inside_changes_the_tables",
    "egress/inside/test_microvm.py::test_none_and_back",
    "egress/inside/test_microvm.py::test_to_and_from",
    "egress/inside/test_names.py",
    "egress/inside/test_programs.py",
    "egress/inside/test_secrets.py::TestPrograms",
    "egress/test_dns.py",
    "egress/test_ferry.py",
    "egress/test_first.py",
    "egress/test_hostile.py",
    "egress/test_http.py",
    "egress/test_http_answer.py",
    "egress/test_http_body.py",
    "egress/test_http_head.py",
    "egress/test_http_readers.py",
    "egress/test_names.py",
    "egress/test_scrub.py",
    "egress/test_socks.py",
    "egress/test_terminate.py",
    "egress/test_tls.py",
    "egress/test_tls_clients.py",
    "egress/test_trust.py",
    "images/test_machines.py",
    "images/test_pulling.py",
    "native/test_programs.py",
    "programs/test_programs.py::test_program[gvisor+mount-",
    "programs/test_programs.py::test_program[native-",
    "sessions/test_bash.py",
    "sessions/test_outlive.py::test_killed_at[delete",
    "sessions/test_outlive.py::test_killed_at[exec",
    "sessions/test_outlive.py::test_killed_at[resume",
    "sessions/test_outlive.py::test_killed_at[snapshot",
    "sessions/test_outlive.py::test_killed_at[suspend",
    "sessions/test_pooled.py",
    "sessions/test_restart.py::test_killed_at[claim",
    "sessions/test_restart.py::test_killed_at[closing",
    "sessions/test_restart.py::test_killed_at[create",
    "sessions/test_restart.py::test_killed_at[detach",
    "sessions/test_restart.py::test_killed_at[prewarm",
)
"""What `FILE::TEST` or `FILE::CLASS::TEST` begins with, below tests/."""

ASKS_WHO = re.compile(r"mark\.root|geteuid|am_root")
"""What a test that depends on its user says somewhere: none that is listed may."""

_HERE = Path(__file__).parent


def is_run_elsewhere(item: pytest.Item) -> bool:
    """Whether the other pass runs this test."""
    if not os.environ.get(ELSEWHERE) or not item.path.is_relative_to(_HERE):
        return False
    place = f"{item.path.relative_to(_HERE).as_posix()}::{item.nodeid.partition('::')[2]}"
    return place.startswith(FOR_BOTH_AS_OTHERS if 0 == os.geteuid() else FOR_BOTH_AS_ROOT)
