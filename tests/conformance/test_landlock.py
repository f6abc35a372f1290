"""The landlock backend passes the suite, without what only namespaces and mounts can give."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.connecting import Connecting
from tests.features import require

from ringfence.backends.landlock.backend import LandlockBackend
from ringfence.errors import FileError
from ringfence.testing.conformance import BackendConformance
from ringfence.testing.lab import Lab

pytestmark = pytest.mark.full


@pytest.fixture(scope="module", autouse=True)
def _landlock() -> None:
    require("landlock")


class TestLandlock(Connecting, BackendConformance):
    # Paths inside are paths of the host, and /tmp is TMPDIR.
    test_a_profile_is_defined_holds_and_is_removed = None  # type: ignore[assignment]
    test_what_a_command_wrote_is_read = None  # type: ignore[assignment]
    test_restored_after_the_session_is_gone = None  # type: ignore[assignment]
    test_reading_follows_links_inside = None  # type: ignore[assignment]
    test_the_always_there_directories = None  # type: ignore[assignment]
    test_cwd_may_be_absolute = None  # type: ignore[assignment]
    test_workdir_moves_the_session_root = None  # type: ignore[assignment]
    # It has a memory although it reports no mounts: tests/native/test_without_namespaces.py.
    test_memory_outlives_the_session = None  # type: ignore[assignment]
    test_a_missing_memory_dir_is_refused = None  # type: ignore[assignment]
    test_a_memory_dir_that_is_a_file_is_refused = None  # type: ignore[assignment]
    # Declared as missing: its report says what follows.
    test_nothing_is_missing_that_was_not_allowed = None  # type: ignore[assignment]
    test_sandboxes_do_not_see_each_other = None  # type: ignore[assignment]
    # Without a filter nothing would keep its processes apart from the host's.
    test_the_unrestricted_profile_is_reported = None  # type: ignore[assignment]

    def make_backend(self) -> LandlockBackend:
        return LandlockBackend()

    def test_a_tree_may_be_deeper_than_a_path_is_long(self, sandbox: Lab, tmp_path: Path) -> None:
        """It is refused: the agent judges by its path whose times are set."""
        with pytest.raises(FileError, match="File name too long"):
            super().test_a_tree_may_be_deeper_than_a_path_is_long(sandbox, tmp_path)
