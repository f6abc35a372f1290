"""Sandboxes for the system tests: real processes on the real kernel, as whoever runs them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ringfence import Sandbox
from ringfence.backends.local.host.cgroups import Layout
from ringfence.backends.native.backend import NativeBackend
from ringfence.backends.native.profiles import Profile
from tests.features import require

MakeSandbox = Callable[..., Sandbox]

CONTROLS = {
    "no-seccomp": Profile("no-seccomp", seccomp=False),
    "no-landlock": Profile("no-landlock", landlock=False),
    "unix-sockets": Profile("unix-sockets", unix_sockets=True),
}
"""Each with one protection switched off: what a refusal is compared with."""


@pytest.fixture(scope="module", autouse=True)
def _user_namespaces() -> None:
    require("user namespaces")


@pytest.fixture(scope="session")
def with_controls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NativeBackend]:
    """A backend that knows the profiles of `CONTROLS`."""
    backend = NativeBackend(
        profiles=CONTROLS, state_dir=str(tmp_path_factory.mktemp("snapshots-of-controls"))
    )
    yield backend
    backend.close()


@pytest.fixture
def make() -> Iterator[MakeSandbox]:
    """`make(**options of Sandbox.create)`: gone when the test is over, whatever its state."""
    with ExitStack() as stack:

        def create(**options: Any) -> Sandbox:
            return stack.enter_context(Sandbox.create(**options))

        yield create


@pytest.fixture
def sandbox(make: MakeSandbox) -> Sandbox:
    return make()


@pytest.fixture
def private_dir(tmp_path: Path) -> Path:
    """A host directory of ours to mount, under a short path."""
    made = tmp_path / "shared"
    made.mkdir(mode=0o755)
    return made


def am_root() -> bool:
    return 0 == os.geteuid()


@functools.cache
def has_cgroups() -> bool:
    """Whether limits are the kernel's here; else they are sampled, and told as degraded."""
    return 0 != Layout().version
