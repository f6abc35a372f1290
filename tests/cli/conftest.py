"""The command line, driven from outside as a script or a person does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.features import require
from tests.strangers import let_others_in


@pytest.fixture(scope="session", autouse=True)
def _user_namespaces() -> None:
    require("user namespaces")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory of the caller's; its parents can be entered by a sandbox's owner as well."""
    directory = tmp_path / "project"
    directory.mkdir()
    let_others_in(directory)
    return directory
