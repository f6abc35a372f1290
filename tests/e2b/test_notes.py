"""Files that tell programs inside which sandbox they are in, where they cannot be written."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.e2b.notes import write_files
from ringfence.errors import NotADirectory

pytestmark = pytest.mark.anyone


def test_files_that_are_not_written_are_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    written: list[str] = []

    def write(path: str, *_value: Any, **_more: Any) -> None:
        if written:
            raise NotADirectory("/run/e2b is a file")
        written.append(path)

    live: Any = SimpleNamespace(
        sandbox_id="sbx-1", metadata={}, sandbox=SimpleNamespace(files=SimpleNamespace(write=write))
    )
    with caplog.at_level(logging.WARNING, "ringfence.e2b"):
        write_files(live)

    assert ["/run/e2b/.E2B_SANDBOX"] == written
    (said,) = caplog.messages
    assert "files in /run/e2b of sbx-1 were not written: /run/e2b is a file" in said
