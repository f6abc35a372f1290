"""OpenAI Agents' own tests of local sandboxes and resumed runs, as far as a sandbox can answer them.

Left out is what asks for the local client's own doings: how it unmounts and removes directories of the
host, which of the host's variables it inherits, that it takes no users, and minus signs in exit codes.
"""

from __future__ import annotations

from typing import Any

import pytest

from ringfence.integrations.openai_agents import processes
from tests.suites.openai.hosted import HostedClient, as_their_own
from tests.suites.sources import beside

PATIENCE_MS = 4000
# What a state is written down as has nothing to do with what a sandbox runs in.
once = pytest.mark.once
PROJECT = "openai-agents"
local: Any = beside(PROJECT, "sandbox.test_unix_local")
runtime: Any = beside(PROJECT, "sandbox.test_runtime")
resumed: Any = beside(PROJECT, "sandbox.integration_tests.test_runner_pause_resume")
for _module in (local, runtime, resumed):
    _module.UnixLocalSandboxClient = HostedClient


@pytest.fixture(autouse=True)
def _theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    as_their_own(monkeypatch)
    # A quarter of a second is what theirs give a terminal to answer.
    for name in ("clamp_pty_yield_time_ms", "resolve_pty_write_yield_time_ms"):
        monkeypatch.setattr(processes, name, lambda *_given, **_named: PATIENCE_MS)


class TestPatches:
    """Moves by `apply_patch`."""

    test_move = (
        local.TestUnixLocalApplyPatchRename.test_move_to_an_existing_directory_keeps_the_source
    )


test_hard_links = local.test_unix_local_snapshot_round_trips_hardlinks
test_stale_links = local.test_unix_local_snapshot_resume_removes_stale_link_without_following_target
test_outside = runtime.test_unix_local_read_and_write_reject_paths_outside_workspace_root
test_removing_what_is_missing = runtime.test_unix_local_rm_recursive_ignores_missing_paths
test_removing_one = runtime.test_unix_local_rm_non_recursive_still_errors_for_missing_paths
test_links_outside = runtime.test_wrapped_unix_local_helpers_reject_symlink_escape_paths
test_own_root = runtime.test_unix_local_runner_cleanup_preserves_resumed_caller_owned_workspace_root
test_resumed = runtime.test_runner_persists_workspace_and_tool_choice_state_across_sandbox_resume
test_handoffs = once(runtime.test_runner_restores_all_sandbox_agents_from_run_state_across_handoffs)
test_same_names = once(
    runtime.test_runner_serializes_unique_sandbox_resume_keys_for_duplicate_agent_names
)
test_same_names_from_json = once(
    runtime.test_runner_restores_duplicate_name_sandbox_sessions_after_json_roundtrip
)
test_old_payload = once(
    runtime.test_runner_restores_legacy_current_sandbox_payload_after_json_roundtrip
)
test_a_whole_life = resumed.test_runner_preserves_unix_local_lifecycle_state_across_pause_and_resume
