"""The unconfined backend for tests of what lies above backends, which take any spec."""

from __future__ import annotations

from typing import ClassVar

from ringfence.model import capabilities as can
from ringfence.model import spec as specs
from ringfence.testing.unconfined import UnconfinedBackend


class Unconfined(UnconfinedBackend):
    """Takes specs of every profile, and those without a network: none of these tests depends on that."""

    profile_names: tuple[str, ...] = (specs.OS_HARDENED, specs.DEBUG, specs.UNRESTRICTED)
    lacks: ClassVar = {
        name: why for name, why in UnconfinedBackend.lacks.items() if name != can.NETWORK_NONE
    }
