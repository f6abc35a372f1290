"""Host directories in a machine: what its user and its kernel can do to them, and what they cannot."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ringfence import Sandbox
from ringfence.model.mount import READ_ONLY, READ_WRITE, Mount
from tests.machines import machine_backend, require_machines

pytestmark = pytest.mark.full

SCRIPT = """
umask 027
echo made >/rw/made; mkdir /rw/more; mv /rw/made /rw/more/; echo again >>/rw/more/made
ln /rw/more/made /rw/also
ln -s /secret /rw/link; cat /rw/link; cat /rw/out/secret
echo x >/ro/new; echo x >>/ro/file; echo x >/rw/inner/new; echo x >/rw/.git/hooks/pre-commit
rm -r /rw/old; chmod 4755 /rw/also; chown 0 /rw/also; mknod /rw/disk b 8 1; mkfifo /rw/pipe
cat /ro/file; stat -c %U /rw /rw/also; ls -a /ro
"""


@pytest.mark.timeout(600)
def test_what_can_be_done_to_what_is_mounted(tmp_path: Path) -> None:
    """The guest's root, too, is held by who serves, and by the mounts of the emulator's isolation."""
    require_machines()
    (tmp_path / "secret").write_text("secret")
    source, shown = tmp_path / "source", tmp_path / "shown"
    for path in (source, shown, source / "old", source / ".git", source / "inner"):
        path.mkdir()
    (shown / "file").write_text("shown\n")
    (source / "out").symlink_to(tmp_path)
    mounts = (
        Mount("/rw", str(source), READ_WRITE),
        Mount("/rw/inner", str(shown), READ_ONLY),
        Mount("/ro", str(shown), READ_ONLY),
    )
    backend = machine_backend()
    try:
        with Sandbox.create(backend=backend, mounts=mounts) as sandbox:
            said = sandbox.exec(["sh", "-c", SCRIPT], user="root")
            (source / "later").write_text("later")
            assert b"later" == sandbox.files.read("/rw/later")
    finally:
        backend.close()

    assert "shown\nsandbox\nsandbox\n.\n..\nfile\n" == said.stdout_text, said
    assert "secret" not in said.stdout_text
    for refused in ("/ro/new", "/ro/file", "/rw/inner/new", "hooks/pre-commit"):
        assert f"cannot create {refused}" in said.stderr_text or refused in said.stderr_text
    assert "made\nagain\n" == (source / "also").read_text()
    found = (source / "also").stat()
    assert (0o755, source.stat().st_uid, 2) == (
        found.st_mode & 0o7777,
        found.st_uid,
        found.st_nlink,
    )
    left = {".git", "also", "inner", "later", "link", "more", "out", "pipe"}
    assert left == set(os.listdir(source))
    assert [] == os.listdir(source / "inner")
    assert ["file"] == os.listdir(shown)


READS = "cat /rw/secret /rw/dir/key /usr/bin/env; ls /rw/dir; echo x >>/rw/secret; rm -r /rw/dir"


@pytest.mark.timeout(600)
def test_not_even_the_guests_root_reads_what_is_denied(tmp_path: Path) -> None:
    """What is the host's is hidden in the jail, so the guest's own kernel has no say in it."""
    require_machines()
    (tmp_path / "secret").write_text("hidden")
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "key").write_text("hidden")
    mounts = (Mount("/rw", str(tmp_path), READ_WRITE, protect=()),)
    backend = machine_backend()
    try:
        with Sandbox.create(backend=backend, mounts=mounts) as control:
            shown = control.exec(["cat", "/rw/secret", "/rw/dir/key"], user="root").text
        deny = ("/rw/secret", "/rw/dir", "/usr/bin/env")
        with Sandbox.create(backend=backend, mounts=mounts, deny=deny) as sandbox:
            said = sandbox.exec(["sh", "-c", READS], user="root")
    finally:
        backend.close()

    assert "hiddenhidden" == shown
    assert "" == said.stdout_text
    assert 0 != said.exit_code
    assert {"secret", "dir"} == set(os.listdir(tmp_path))
    assert ["hidden", "hidden"] == [(tmp_path / each).read_text() for each in ("secret", "dir/key")]


@pytest.mark.timeout(600)
def test_what_was_attached_goes_on_with_the_machine(tmp_path: Path) -> None:
    require_machines()
    (tmp_path / "file").write_text("shown\n")
    backend = machine_backend()
    sandbox = Sandbox.create(backend=backend)
    try:
        sandbox.mount(Mount("/late", str(tmp_path), READ_WRITE))
        sandbox.mount(Mount("/own", "", READ_WRITE))
        sandbox.mount(Mount("/late/new/deep", str(tmp_path)))
        assert "shown\n" == sandbox.exec(["cat", "/late/new/deep/file"]).text
        assert sandbox.shell("echo kept >/own/file").ok
        snapshot = sandbox.checkpoint()
        with Sandbox.restore(snapshot.id, backend=backend) as again:
            assert "shown\nkept\n" == again.exec(["cat", "/late/file", "/own/file"]).text
            assert not again.shell("echo x >/late/.git/hooks/pre-commit").ok
            again.mount(Mount("/later", str(tmp_path)))
            assert "shown\n" == again.exec(["cat", "/later/file"]).text
            targets = [each.target for each in again.session.mounts]
    finally:
        backend.close()

    assert ["/late", "/own", "/late/new/deep", "/later"] == targets[-4:]
    assert ["file"] == os.listdir(tmp_path)
