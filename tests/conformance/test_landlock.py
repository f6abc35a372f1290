"""The landlock backend passes the suite, without what only namespaces and mounts can give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.connecting import Connecting
from tests.features import require
from tests.strangers import let_others_in

from ringfence.backends.landlock.backend import LandlockBackend
from ringfence.errors import FileError
from ringfence.testing.conformance import BackendConformance
from ringfence.testing.lab import Lab

pytestmark = pytest.mark.full


@pytest.fixture(scope="module", autouse=True)
def _landlock() -> None:
    require("landlock")


def unconditional(test: Any) -> Any:
    """The test without its condition, that the report declares a capability."""
    return test.__wrapped__


class TestLandlock(Connecting, BackendConformance):
    # Paths inside are paths of the host, and /tmp is TMPDIR.
    test_a_profile_is_defined_holds_and_is_removed = None  # type: ignore[assignment]
    test_what_a_command_wrote_is_read = None  # type: ignore[assignment]
    test_restored_after_the_session_is_gone = None  # type: ignore[assignment]
    test_reading_follows_links_inside = None  # type: ignore[assignment]
    test_the_always_there_directories = None  # type: ignore[assignment]
    test_cwd_may_be_absolute = None  # type: ignore[assignment]
    test_workdir_moves_the_session_root = None  # type: ignore[assignment]
    # It has a memory although it reports no mounts: tests/native/test_mounts_without_namespaces.py.
    test_memory_outlives_the_session = None  # type: ignore[assignment]
    test_a_missing_memory_dir_is_refused = None  # type: ignore[assignment]
    test_a_memory_dir_that_is_a_file_is_refused = None  # type: ignore[assignment]
    # No shell knows the name of a mapped mount: tests/native/test_mounts_without_namespaces.py.
    test_read_write = None  # type: ignore[assignment]
    test_removing_inside_removes_outside = None  # type: ignore[assignment]
    test_cwd_may_name_a_mount = None  # type: ignore[assignment]
    test_workdir_may_name_a_mount = None  # type: ignore[assignment]
    test_denied_paths = None  # type: ignore[assignment]
    # What holds of it although the report says that there are no mounts.
    test_read_only = unconditional(BackendConformance.test_read_only)
    test_read_only_holds = unconditional(BackendConformance.test_read_only_holds)
    test_the_host_is_not_seen_elsewhere = unconditional(
        BackendConformance.test_the_host_is_not_seen_elsewhere
    )
    test_a_missing_host_path_is_refused_not_made = unconditional(
        BackendConformance.test_a_missing_host_path_is_refused_not_made
    )
    test_a_source_link_is_resolved_once = unconditional(
        BackendConformance.test_a_source_link_is_resolved_once
    )
    test_the_session_lists_its_mounts = unconditional(
        BackendConformance.test_the_session_lists_its_mounts
    )
    test_what_is_read_only_is_not_said_to_be_writable = unconditional(
        BackendConformance.test_what_is_read_only_is_not_said_to_be_writable
    )
    test_host_directories_are_not_copied = unconditional(
        BackendConformance.test_host_directories_are_not_copied
    )
    # Declared as missing: its report says what follows.
    test_nothing_is_missing_that_was_not_allowed = None  # type: ignore[assignment]
    test_sandboxes_do_not_see_each_other = None  # type: ignore[assignment]
    # Without a filter nothing would keep its processes apart from the host's.
    test_the_unrestricted_profile_is_reported = None  # type: ignore[assignment]

    @pytest.fixture(autouse=True)
    def _shown_to_all(self, tmp_path: Path) -> None:
        """As root a sandbox has a user of its own, who must be able to read what is mounted."""
        let_others_in(tmp_path)

    def make_backend(self) -> LandlockBackend:
        return LandlockBackend()

    def test_a_tree_may_be_deeper_than_a_path_is_long(self, sandbox: Lab, tmp_path: Path) -> None:
        """It is refused: the agent judges by its path whose times are set."""
        with pytest.raises(FileError, match="File name too long"):
            super().test_a_tree_may_be_deeper_than_a_path_is_long(sandbox, tmp_path)
