"""An emulator that ends is told from one that says nothing, whatever of ours it had not read yet."""

from __future__ import annotations

import os

import pytest

from ringfence.backends.microvm.line import Line
from ringfence.errors import IsolationError


@pytest.mark.parametrize("says", ["before", "after", "never"])
def test_an_emulator_that_has_ended(says: str) -> None:
    line = Line()
    itself = os.pidfd_open(os.getpid())  # lives: only the line tells
    try:
        if says == "before":
            line.say(b"unread")
        line.far.close()
        if says == "after":
            line.say(b"to nobody")
        with pytest.raises(IsolationError) as caught:
            line.first_word(itself, 60)
    finally:
        os.close(itself)
        line.close()

    assert "" == caught.value.message
