"""Links of a guest into /proc: they would lead PID 1, which opens files for the host, to its own."""

from __future__ import annotations

import pytest

from ringfence import Sandbox
from ringfence.errors import PermissionDenied


def test_a_link_into_proc_is_not_followed_for_the_host(sandbox: Sandbox) -> None:
    made = "ln -s /proc/self/status status; ln -s /proc/self own; echo text > file; ln -s file link"
    assert sandbox.exec(["sh", "-c", made]).ok

    for name in ("status", "own/status"):
        with pytest.raises(PermissionDenied):
            sandbox.files.read(name)
    assert b"text\n" == sandbox.files.read("link")  # the control
