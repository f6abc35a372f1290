"""What a launcher says goes to a file that nobody can fill the host's memory with."""

from __future__ import annotations

import errno
import os

import pytest

from ringfence.backends.local.launched import last_words, room_for_words

FAR = 64 << 20


def test_words_are_read_back_and_take_no_more_than_their_room() -> None:
    errors, plain = room_for_words("says"), os.memfd_create("says")
    try:
        os.write(errors, b"first\n\nsecond\nthird\nfourth\n")

        assert "second / third / fourth" == last_words(errors)
        with pytest.raises(OSError) as refused:
            os.pwrite(errors, b"x", FAR)
        assert errno.EPERM == refused.value.errno
        assert 1 == os.pwrite(plain, b"x", FAR), "the control"
    finally:
        os.close(errors)
        os.close(plain)


def test_nobody_gives_it_more_room_by_its_descriptor() -> None:
    errors = room_for_words("says")
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(errors, FAR)
        assert "" == last_words(errors)
    finally:
        os.close(errors)
