"""A mount that cannot be had names the file system that it is on."""

from __future__ import annotations

import errno

import pytest

from ringfence.backends.local.answers import Refused
from ringfence.backends.local.host import mountinfo
from ringfence.backends.local.refusals import error_of

LINES = """\
20 1 8:1 / / rw - ext4 /dev/sda1 rw
21 20 0:30 / /data rw - tmpfs tmpfs rw
22 21 0:31 / /data/in\\040it rw - nfs4 server:/ rw
23 20 0:32 / /twice rw - tmpfs tmpfs rw
24 20 0:33 / /twice rw - overlay overlay rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/database", "ext4"),
        ("/data", "tmpfs"),
        ("/data/in", "tmpfs"),
        ("/data/in it/x", "nfs4"),
        ("/twice/x", "overlay"),
    ],
)
def test_the_error_names_source_and_file_system(
    monkeypatch: pytest.MonkeyPatch, path: str, kind: str
) -> None:
    monkeypatch.setattr(mountinfo, "read_text", lambda _path: LINES)

    error = error_of(Refused(errno.EINVAL, f"mount {path}: mount_setattr: Invalid argument"))

    assert kind == mountinfo.kind_at(path)
    assert path in error.message
    assert f"its file system, {kind}, cannot map ids" in error.hint
