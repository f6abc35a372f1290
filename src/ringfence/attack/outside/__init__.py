"""Probes judged from the host: bombs, timeouts, neighbours, residue, and helper tasks for guests."""

from __future__ import annotations

from . import bombs, descriptors, host_side, neighbours, races, residue, timeouts
from .register import PROBES, OutsideProbe

AREAS = (host_side, races, descriptors, bombs, neighbours, residue, timeouts)


def registered() -> dict[str, OutsideProbe]:
    """Every probe that runs on the host, in order."""
    return PROBES
