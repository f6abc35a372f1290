"""The command line, driven from outside as a script or a person does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.features import require


@pytest.fixture(scope="session", autouse=True)
def _user_namespaces() -> None:
    require("user namespaces")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory of the caller's; its parents can be entered by a sandbox's owner as well."""
    directory = tmp_path / "project"
    directory.mkdir()
    for each in (tmp_path.parent.parent, tmp_path.parent, tmp_path):
        if each.stat().st_uid == directory.stat().st_uid:
            os.chmod(each, 0o755)
    return directory
