"""Release of PID 1's clean pages while it is idle: those of programs, which are in files.

Pages needed again are mapped again, from the page cache shared with all others. Written pages
cannot be released.

Kept separate: the zygote learns the pages before a PID 1 exists, and PID 1 inherits the list.
"""

from __future__ import annotations

from ...linux import mappings

AFTER_S = 1.0  # of nothing to do: whoever runs one command after the other does not pay for it

# By the zygote: its children have the same, at the same places.
_learned: list[tuple[int, int]] = []


def learn() -> None:
    """Look what is mapped. Precondition: every library that will ever be needed is loaded."""
    _learned[:] = mappings.of_files()


def is_of_use() -> bool:
    """Return whether there are pages to release."""
    return bool(_learned)


def give_back() -> None:
    """Do it; where the kernel or a filter says no, it all stays as it was."""
    try:
        for start, length in _learned:
            mappings.give_back(start, length)
    except OSError:
        _learned.clear()  # it will not say otherwise the next time
