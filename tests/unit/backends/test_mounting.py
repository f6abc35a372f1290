"""A mount into a live sandbox that fails leaves nothing on the host."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ringfence import Mount, SandboxSpec
from ringfence.backends.local.answers import Refused
from ringfence.backends.local.mounts.mounting import Mounting, OrNothing
from ringfence.errors import InvalidRequest, IsolationError, SandboxLost
from ringfence.model.mount import READ_WRITE

FAILURES = [
    (IsolationError("a socket is in it"), IsolationError),
    (SandboxLost("it has ended"), SandboxLost),
    (KeyboardInterrupt(), KeyboardInterrupt),
    (Refused(1, "Operation not permitted"), InvalidRequest),
]


def _fail(mount: Mount, failure: BaseException) -> None:
    more = Mounting(SandboxSpec())
    with OrNothing("/data", more):
        more.add(mount, None)
        raise failure


@pytest.mark.parametrize(("failure", "told"), FAILURES, ids=lambda value: type(value).__name__)
def test_whatever_fails_no_placeholder_is_left(
    tmp_path: Path, failure: BaseException, told: type[BaseException]
) -> None:
    mount, descriptors = Mount("/data", str(tmp_path), READ_WRITE), os.listdir("/proc/self/fd")
    done = Mounting(SandboxSpec())
    with OrNothing("/data", done):
        done.add(mount, None)
    assert os.listdir(tmp_path), "the control: what is mounted keeps its placeholders"
    for each in done.protected:
        each.remove_placeholders()

    with pytest.raises(told):
        _fail(mount, failure)

    assert [] == os.listdir(tmp_path)
    assert len(descriptors) == len(os.listdir("/proc/self/fd"))
