"""Daemons with state directories of their own."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.servers import Server
from tests.features import require


@pytest.fixture(scope="module", autouse=True)
def _user_namespaces() -> None:
    require("user namespaces")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    found = tmp_path_factory.mktemp("k")
    yield found
    shutil.rmtree(found, ignore_errors=True)


numbers = itertools.count()


@pytest.fixture
def server(place: Path) -> Iterator[Server]:
    """One that is not started yet, with a state directory of its own."""
    made = Server(place / str(next(numbers)))
    yield made
    made.stop()
    if made.state.exists():
        assert not (made.state / "fd-store.sock").exists()
