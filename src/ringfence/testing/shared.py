"""A sandbox shared by several tests, tidied between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import FileNotFound, RingfenceError
from ..model.mount import ALWAYS_THERE
from ..model.state import State

if TYPE_CHECKING:
    from .lab import Lab

_PLACES = (".", "/tmp", *ALWAYS_THERE.values())
"""Where tests leave files: one that writes elsewhere asks for a sandbox of its own."""


class SharedLab:
    """A sandbox, and what it held when it was made: `tidy` takes away what a test has added."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self._made_with = self._entries()

    def tidy(self) -> bool:
        """Restore the initial files and end all processes; False if that failed: then make a new sandbox."""
        try:
            self.lab.end_started()
            for path in self._entries() - self._made_with:
                self.lab.files.remove(path, recursive=True)
            return State.RUNNING == self.lab.state and self._made_with == self._entries()
        except RingfenceError:
            return False

    def _entries(self) -> set[str]:
        """Absolute paths; a directory's own entries are not looked at."""
        found: set[str] = set()
        for place in _PLACES:
            try:
                found |= {entry.path for entry in self.lab.files.list(place)}
            except FileNotFound:
                continue  # the suite has one test of what must be there
        return found
