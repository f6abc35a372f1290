"""Whoever makes a sandbox may ignore signals, and PID 1 does: no program inside is handed that."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ringfence import Sandbox
from ringfence.backends.command import launchers
from ringfence.backends.command.backend import CommandBackend
from ringfence.backends.gvisor.backend import GvisorBackend
from ringfence.backends.native.backend import NativeBackend
from ringfence.images.archive import load
from ringfence.images.store import ImageStore
from tests.features import require
from tests.images.making import Made, layer, program
from tests.signalled import assert_nothing_is_ignored_or_blocked

pytestmark = pytest.mark.full


@pytest.fixture(autouse=True)
def _hang_ups_are_ignored() -> Iterator[None]:
    """As below nohup(1)."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


def _bubblewrap() -> CommandBackend:
    require("bwrap")
    return CommandBackend(launchers.bubblewrap())


def _gvisor() -> GvisorBackend:
    require("runsc")
    return GvisorBackend()


@pytest.mark.parametrize("make", [NativeBackend, _gvisor, _bubblewrap])
def test_a_program_finds_every_signal_at_its_default(make: Callable[[], Any]) -> None:
    require("user namespaces")
    backend = make()
    try:
        with Sandbox.create(backend=backend) as sandbox:
            assert_nothing_is_ignored_or_blocked(sandbox)
    finally:
        backend.close()


def test_so_does_one_of_an_image(
    backend: GvisorBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGFENCE_IMAGES", str(tmp_path / "images"))
    image = Made([layer(*_with_libraries("/usr/bin/env", "/usr/bin/sleep"))], {})
    load(image.as_layout(tmp_path / "layout"), "signals:1", store=ImageStore())
    with Sandbox.create(image="signals:1", backend=backend) as sandbox:
        assert_nothing_is_ignored_or_blocked(sandbox)


def _with_libraries(*programs: str) -> list[Any]:
    said = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=True).stdout
    libraries = {word for word in said.split() if word.startswith("/") and word[-1] != ":"}
    return [program(path.lstrip("/"), path) for path in sorted({*programs, *libraries})]
