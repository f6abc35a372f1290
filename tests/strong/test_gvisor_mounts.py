"""What a gVisor sandbox sees of the host's directories: decided in its jail, where no guest has a say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringfence.backends.gvisor.backend import GvisorBackend
from ringfence.backends.gvisor.inspection import Inspection
from ringfence.backends.local.host.mountinfo import MountLine
from ringfence.errors import InvalidRequest, Unsupported
from ringfence.model.capabilities import ENFORCED, MISSING
from ringfence.model.mount import READ_WRITE, Mount
from ringfence.model.spec import OWN_ROOT, STRONG, SandboxSpec
from ringfence.sandbox import Sandbox
from tests.features import require

pytestmark = pytest.mark.full

_BARE = SandboxSpec(tier=STRONG)
DENY = ("/rw/secret", "/rw/dir", "/usr/bin/env", "/tmp/own/later")
UNDO = """
umount /rw/secret /rw/dir /rw; umount -l /rw/secret; mount -o remount,rw,bind /rw/secret
mkdir /tmp/under; mount --bind /rw /tmp/under; cat /tmp/under/secret
chmod 777 /rw/secret /rw/dir; rm -rf /rw/secret; mv /rw/dir /rw/elsewhere; mv /tmp/own /tmp/moved
ln /rw/secret /rw/link; cat /rw/link /rw/secret /rw/dir/key /usr/bin/env /tmp/own/later
mkdir -p /tmp/own; echo x >/tmp/own/later && cat /tmp/own/later
"""


@pytest.fixture
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GvisorBackend]:
    require("user namespaces")
    require("runsc")
    made = GvisorBackend(state_dir=str(tmp_path_factory.mktemp("state")))
    yield made
    made.close()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("hidden")
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "key").write_text("hidden")
    return tmp_path


def _spec(source: Path, **more: Any) -> SandboxSpec:
    mounts = (Mount("/rw", str(source), READ_WRITE, protect=()),)
    return SandboxSpec(tier=STRONG, mounts=mounts, **more)


def _served(backend: GvisorBackend, spec: SandboxSpec) -> list[str]:
    """What lies at the first of the denied paths for who serves the guest's files."""
    inner = backend.provision(spec)
    try:
        paths = [f"/proc/{each.pid}/root/rw/secret" for each in Inspection(inner).server]
        return [Path(path).read_text() for path in paths]
    finally:
        inner.terminate()


def test_who_serves_the_files_has_nothing_of_what_is_denied(
    backend: GvisorBackend, source: Path
) -> None:
    """So a guest that rules its kernel, and asks the file server what it likes, gets nothing either."""
    require("root")  # to look with its eyes

    assert ["hidden"] == _served(backend, _spec(source))
    assert [""] == _served(backend, _spec(source, deny=DENY))


def test_no_root_inside_undoes_it(backend: GvisorBackend, source: Path) -> None:
    require("root")
    spec = _spec(source, deny=DENY, profile=OWN_ROOT)
    with Sandbox(backend.provision(spec), spec) as sandbox:
        said = sandbox.exec(["sh", "-c", UNDO], user="root")

    assert "" == said.stdout_text, said
    assert "hidden" == (source / "secret").read_text()
    assert "hidden" == (source / "dir" / "key").read_text()
    assert {"secret", "dir"} == {each.name for each in source.iterdir()}


def test_what_is_denied_is_in_no_snapshot(backend: GvisorBackend, source: Path) -> None:
    spec = _spec(source, deny=DENY)
    with Sandbox(backend.provision(spec), spec) as sandbox:
        assert sandbox.shell("echo kept >/home/sandbox/file").ok
        saved = sandbox.snapshot()
    for deny in (DENY, ()):
        with Sandbox.restore(saved.id, _spec(source, deny=deny), backend=backend) as again:
            shown = again.shell("cat /home/sandbox/file; cat /tmp/own/later /rw/secret")
            assert shown.stdout_text == ("kept\n" if deny else "kept\nhidden"), shown


def _access(pid: int) -> dict[str, str]:
    """Of what one process has there: whether the host's kernel lets it write."""
    with open(f"/proc/{pid}/mountinfo", encoding="utf-8") as file:
        lines = [MountLine(line) for line in file.read().splitlines()]
    place = "/.ringfence-mounts"
    return {
        each.target.partition(place)[2]: "ro" if "ro" in each.options else "rw"
        for each in lines
        if place in each.target
    }


def test_what_is_attached_is_read_only_for_who_serves_it(
    backend: GvisorBackend, source: Path
) -> None:
    """Also for a guest's kernel that is somebody's: the host's own says no. Writable ones are the control."""
    require("root")
    inner = backend.provision(_BARE)
    with Sandbox(inner, _BARE) as sandbox:
        sandbox.mount(Mount("/writable", str(source), READ_WRITE, protect=("dir",)))
        sandbox.mount(Mount("/shown", str(source)))
        said = sandbox.exec(["sh", "-c", "cat /.ringfence-mounts/0/secret; ls /.ringfence-mounts"])
        found = [_access(each.pid) for each in Inspection(inner).server]
        status = {each.name: each.status for each in inner.protections()}

    assert "" == said.stdout_text
    assert [{"": "ro", "/0": "rw", "/0/dir": "ro", "/1": "ro"}] == found
    assert {ENFORCED} == {status["read_only_mounts"], status["protected_paths"]}
    assert MISSING not in status.values()


def test_no_link_inside_leads_a_mount_elsewhere(backend: GvisorBackend, source: Path) -> None:
    with Sandbox(backend.provision(_BARE), _BARE) as sandbox:
        assert sandbox.shell(
            "mkdir real; ln -s real link; ln -s real/file file; echo x >real/file"
        ).ok
        for target, what in (("link/in", source), ("link", source), ("file", source / "secret")):
            with pytest.raises(InvalidRequest):
                sandbox.mount(Mount(f"/home/sandbox/{target}", str(what)))
        assert "file\n" == sandbox.exec(["ls", "real"]).text
        sandbox.mount(Mount("/home/sandbox/real/file", str(source / "secret")))
        assert "hidden" == sandbox.exec(["cat", "file"]).text


def test_own_directories_are_attached(backend: GvisorBackend) -> None:
    with Sandbox(backend.provision(_BARE), _BARE) as sandbox:
        for mount in (
            Mount("/own", "", READ_WRITE),
            Mount("/also", "work/in", READ_WRITE),
            Mount("/shown", "work/in"),
            Mount("/empty"),
        ):
            sandbox.mount(mount)
        assert sandbox.shell("echo x >/own/file; echo y >/also/file").ok
        assert "x\ny\ny\n" == sandbox.exec(["cat", "/own/file", "/shown/file", "work/in/file"]).text
        for path in ("/shown/new", "/shown/file", "/empty/new"):
            assert not sandbox.shell(f"echo z >{path}").ok


def test_memory_is_not_saved_with_what_was_attached(backend: GvisorBackend, source: Path) -> None:
    require("root")
    with Sandbox(backend.provision(_BARE), _BARE) as sandbox:
        sandbox.mount(Mount("/own", "work", READ_WRITE))
        saved = sandbox.checkpoint()
    with Sandbox.restore(saved.id, backend=backend) as sandbox:
        assert sandbox.shell("echo x >/own/file; cat work/file").ok
        sandbox.mount(Mount("/late", str(source)))
        assert "hidden" == sandbox.exec(["cat", "/late/secret"]).text
        with pytest.raises(Unsupported):
            sandbox.checkpoint()
        files = sandbox.snapshot()
    with Sandbox.restore(files.id, backend=backend) as again:
        assert "x\n" == again.exec(["cat", "work/file"]).text


def test_memory_goes_on_with_what_was_denied(backend: GvisorBackend, source: Path) -> None:
    require("root")
    spec = _spec(source, deny=DENY)
    with Sandbox(backend.provision(spec), spec) as sandbox:
        saved = sandbox.checkpoint()
    with Sandbox.restore(saved.id, backend=backend) as again:
        assert not again.exec(["cat", "/rw/secret"]).ok
        assert again.exec(["ls", "/rw"]).ok


@pytest.mark.parametrize("target", ["/etc/app", "/etc/app/conf", "/etc/passwd", "/srv/a/b"])
def test_a_mount_makes_its_point_where_the_root_is_read_only(
    backend: GvisorBackend, source: Path, target: str
) -> None:
    """Without root the guest's /etc is protected before gVisor starts."""
    shown = source / "secret" if target == "/etc/passwd" else source
    spec = SandboxSpec(tier=STRONG, mounts=(Mount(target, str(shown)),))
    file = target if shown.is_file() else f"{target}/secret"

    with Sandbox.create(spec, backend=backend) as sandbox:
        assert b"hidden" == sandbox.files.read(file)


def test_a_target_that_nothing_can_be_mounted_on_is_told(
    backend: GvisorBackend, source: Path
) -> None:
    for mount, why in (
        (Mount("/usr/share/none-such", str(source)), "Read-only file system"),
        (Mount("/tmp", str(source / "secret")), "a file cannot be mounted on a directory"),
        (Mount("/etc/passwd", str(source)), "Not a directory"),
    ):
        spec = SandboxSpec(tier=STRONG, mounts=(mount,))
        with pytest.raises(InvalidRequest, match=why):
            Sandbox.create(spec, backend=backend)
