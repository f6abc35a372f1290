"""A small world for the tests of what leaves a sandbox: see README.md."""

from __future__ import annotations

from .network import CannotEnterError
from .world import World, enter

__all__ = ["CannotEnterError", "World", "enter"]
