"""What the published suite makes of a backend that lacks a directory: one failure, not one per test."""

from __future__ import annotations

import pytest
from tests.unconfined import Unconfined

from ringfence.model.spec import SandboxSpec
from ringfence.testing import shared
from ringfence.testing.lab import Lab

pytestmark = pytest.mark.anyone


def test_a_place_that_is_not_there_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_PLACES", (".", "/mnt/not-there"))
    backend = Unconfined()
    lab = Lab(backend.provision(SandboxSpec()), 10)
    lab.run("true")
    common = shared.SharedLab(lab)
    lab.put("left", b"behind")

    assert common.tidy()
    assert [] == [each.path for each in lab.files.list(".")]
    backend.close()
