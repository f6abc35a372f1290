"""Mounts in mounts, and many of them."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from ringfence import Mount, Sandbox
from ringfence.backends.local.mounts.protect import protect_mount
from ringfence.backends.native import attach
from ringfence.backends.native.backend import NativeBackend
from ringfence.errors import FileExists, InvalidRequest, IsolationError, LifecycleError
from ringfence.model.mount import READ_WRITE
from tests.native.conftest import MakeSandbox


@pytest.fixture
def outer(tmp_path: Path) -> Path:
    """A host directory with a directory, a file and a link in it."""
    path = tmp_path / "outer"
    (path / "inner").mkdir(parents=True)
    (path / "file").write_text("file")
    (path / "link").symlink_to("inner")
    return path


@pytest.fixture
def other(tmp_path: Path) -> Path:
    path = tmp_path / "other"
    path.mkdir()
    (path / "kept").write_text("kept")
    return path


def test_a_mount_point_lives_as_long_as_the_sandbox(
    make: MakeSandbox, outer: Path, other: Path
) -> None:
    """Absent in the writable mount around it, it is made there, for as long as it is needed."""
    mounts = [Mount("/data", str(outer), READ_WRITE), Mount("/data/new/deep", str(other))]
    sandbox = make(mounts=mounts)

    shown = sandbox.shell("cat /data/new/deep/kept; echo x > /data/new/deep/kept")
    assert "kept" == shown.stdout_text
    assert not shown.ok
    assert not sandbox.shell("mv /data/new /data/moved || rmdir /data/new/deep").ok
    assert "kept" == (other / "kept").read_text()

    sandbox.terminate()
    assert ["file", "inner", "link"] == sorted(os.listdir(outer))


def test_whoever_has_a_copy_of_a_descriptor_keeps_no_placeholder(
    make: MakeSandbox, outer: Path
) -> None:
    """An fd store that has not yet heard of the end, a child that has not yet executed its program."""
    mounts = [Mount("/data", str(outer), READ_WRITE, protect=("kept",))]
    one, two = make(mounts=mounts), make(mounts=mounts)
    copies = [
        os.dup(lock)
        for sandbox in (one, two)
        for part in sandbox._inner.protected  # type: ignore[attr-defined]
        for lock in part.locks
    ]
    try:
        one.terminate()
        assert (outer / "kept").exists(), "the control: another sandbox needs it"
        two.terminate()
        assert not (outer / "kept").exists()
    finally:
        for copy in copies:
            os.close(copy)


@pytest.mark.parametrize(
    ("inside", "is_file"),
    [("/data/absent", False), ("/data/inner", True), ("/data/file", False), ("/data/link", False)],
)
def test_where_nothing_can_be_mounted(
    make: MakeSandbox, outer: Path, other: Path, inside: str, is_file: bool
) -> None:
    """In a read-only mount nothing is made, and kinds must fit: the target is named, with the reason."""
    source = str(other / "kept" if is_file else other)
    mounts = [Mount("/data", str(outer)), Mount(inside, source)]

    with pytest.raises(InvalidRequest, match=f"{inside}: nothing can be mounted there") as refusal:
        make(mounts=mounts)

    assert "mounts.target" == refusal.value.field
    assert refusal.value.hint


def test_as_many_mounts_as_there_may_be(make: MakeSandbox, other: Path) -> None:
    """And one more is refused; neither costs the sandboxes that live already anything."""
    before = make()
    mounts = [Mount(f"/data/{i}", str(other)) for i in range(201)]

    sandbox = make(mounts=mounts[:-1])
    assert "200\n" == sandbox.shell("cat /data/*/kept | grep -o kept | wc -l").stdout_text
    with pytest.raises(InvalidRequest, match="201 are more than 200"):
        Sandbox.create(mounts=mounts)

    assert before.shell("true").ok


CONNECT = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"


def reaches(sandbox: Sandbox, source: Path, target: str, path: str) -> bool:
    """Whether a socket is connected to, once `source` was attached, if that was let through."""
    try:
        sandbox.mount(f"{source}:{target}")
    except IsolationError:
        return False
    return sandbox.exec(["python3", "-c", CONNECT, path], timeout_s=30.0).ok


def test_a_socket_of_the_host_is_not_reached_through_what_is_attached(
    make: MakeSandbox, with_controls: NativeBackend, other: Path, private_dir: Path
) -> None:
    """Nor in the second directory, nor when it is the source itself."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(private_dir / "s"))
        server.listen()
        sandbox, control = make(), make(backend=with_controls, profile="unix-sockets")
        sandbox.mount(f"{other}:/first")

        assert reaches(control, private_dir, "/late", "/late/s")
        assert not reaches(sandbox, private_dir, "/late", "/late/s")
        assert not reaches(sandbox, private_dir / "s", "/socket", "/socket")


BIND = "import socket, sys; socket.socket(socket.AF_UNIX).bind(sys.argv[1])"


def test_no_socket_is_made_in_a_directory_that_is_attached(
    make: MakeSandbox, outer: Path, other: Path
) -> None:
    """Programs of the host could take it for one of theirs; nor in one that is mounted from the start."""
    sandbox = make(mounts=[Mount("/data", str(other), READ_WRITE)])
    if not sandbox._inner.lockdown["connects"]:  # type: ignore[attr-defined]
        pytest.skip("needs what PID 1 connects by")
    sandbox.mount(Mount("/late", str(outer), READ_WRITE))
    sandbox.mount(Mount("/tmp/late", str(outer / "inner"), READ_WRITE))  # where sockets may be made
    assert sandbox.shell("echo x > /late/written; echo x > /tmp/late/written").ok

    made = {
        path: sandbox.exec(["python3", "-c", BIND, f"{path}/s"]).ok
        for path in ("/tmp", "/home/sandbox", "/data", "/late", "/tmp/late")
    }

    own, hosts = ("/tmp", "/home/sandbox"), ("/data", "/late", "/tmp/late")
    assert {**dict.fromkeys(own, True), **dict.fromkeys(hosts, False)} == made
    assert not (outer / "s").exists()
    assert (outer / "inner/written").exists()
    assert not (outer / "inner/s").exists()


def test_a_mounted_file_takes_no_sockets_away(make: MakeSandbox, other: Path) -> None:
    """There can be none of the host's in it; a mounted directory is another matter."""
    bind = "import socket; socket.socket(socket.AF_UNIX).bind('/tmp/s')"
    with_file = make(mounts=[f"{other / 'kept'}:/data/kept"])
    assert with_file.exec(["python3", "-c", bind]).ok
    assert "enforced" == {p.name: p.status for p in with_file.protections()}["unix_sockets"]


def test_what_is_attached_in_another_mount_has_its_place_made_and_removed(
    make: MakeSandbox, outer: Path, other: Path
) -> None:
    sandbox = make(mounts=[Mount("/data", str(outer), READ_WRITE)])

    sandbox.mount(Mount("/data/new/deep", str(other)))

    assert "kept" == sandbox.shell("cat /data/new/deep/kept").stdout_text
    assert not sandbox.shell("mv /data/new /data/moved || rmdir /data/new/deep").ok
    sandbox.terminate()
    assert ["file", "inner", "link"] == sorted(os.listdir(outer))


def test_what_is_attached_and_cannot_be_protected_is_not_there(
    make: MakeSandbox, outer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that fails after the mount, as what it is about was removed meanwhile; the control is attached."""
    sandbox = make()
    protect = protect_mount

    def then_gone(*args: Any) -> Any:
        protected = protect(*args)
        protected.steps.append(("protect", "/late/gone"))
        return protected

    sandbox.mount(Mount("/control", str(outer), READ_WRITE))
    monkeypatch.setattr(attach, "protect_mount", then_gone)
    with pytest.raises(InvalidRequest, match="gone"):
        sandbox.mount(Mount("/late", str(outer), READ_WRITE))

    shown = sandbox.shell("ls /control").stdout_text.splitlines()
    assert {"file", "inner", "link"} <= set(shown)
    assert "" == sandbox.shell("ls /late").stdout_text
    sandbox.terminate()
    assert ["file", "inner", "link"] == sorted(os.listdir(outer))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may look everywhere")
@pytest.mark.parametrize("closed", ["", ".git"])
def test_what_cannot_be_looked_into_cannot_be_protected(
    make: MakeSandbox, tmp_path: Path, closed: str
) -> None:
    """Whoever owns a directory may open it again, and so may the sandbox."""
    (tmp_path / "project" / ".git").mkdir(parents=True)
    source = tmp_path / "project"
    (source / closed).chmod(0)
    try:
        with pytest.raises(InvalidRequest, match="Permission denied") as refused:
            make(mounts=[f"{source}:/work:rw"])
        assert "mounts.source" == refused.value.field
        make(mounts=[f"{source}:/work"])  # the controls
        make(mounts=[f"{source}:/work:rw"], unprotect=["all"])
    finally:
        (source / closed).chmod(0o700)


def test_a_link_that_a_sandbox_left_is_not_followed(make: MakeSandbox, tmp_path: Path) -> None:
    """Step two mounts what step one has made: `nofollow` refuses a link, in its last part or before."""
    work, secret = tmp_path / "work", tmp_path / "secret"
    (work / "plain/in").mkdir(parents=True)
    (secret / "in").mkdir(parents=True)
    with make(mounts=[Mount("/work", str(work), READ_WRITE)]) as first:
        assert first.shell(f"ln -s {secret} /work/out").ok

    for source in ("out", "out/in"):
        with pytest.raises(InvalidRequest) as refusal:
            make(mounts=[f"{work}/{source}:/data:ro,nofollow"])
        assert "mounts.source" == refusal.value.field
        assert str(secret) in refusal.value.hint
        assert make(mounts=[f"{work}/{source}:/data"]).shell("ls /data").ok, "the control"
    assert "in\n" == make(mounts=[f"{work}/plain:/data:nofollow"]).shell("ls /data").stdout_text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's link")
def test_another_users_link_is_not_followed(make: MakeSandbox, outer: Path, tmp_path: Path) -> None:
    os.lchown(outer / "link", 23456, 23456)
    with pytest.raises(InvalidRequest) as refusal:
        make(mounts=[f"{outer}/link:/data"])
    assert "user 23456" in str(refusal.value)
    os.lchown(outer / "link", 0, 0)
    assert make(mounts=[f"{outer}/link:/data"]).shell("true").ok, "the control"


def test_what_is_attached_behind_a_link_leaves_nothing_in_its_source(
    make: MakeSandbox, outer: Path, other: Path
) -> None:
    """What is protected in it was prepared by then."""
    sandbox = make(mounts=[Mount("/data", str(outer), READ_WRITE)])

    with pytest.raises(InvalidRequest, match="symbolic link"):
        sandbox.mount(Mount("/data/link/new", str(other), READ_WRITE))

    assert ["kept"] == os.listdir(other)
    sandbox.mount(Mount("/data/inner/new", str(other), READ_WRITE))
    assert "kept" == sandbox.shell("cat /data/inner/new/kept").stdout_text
    assert {"kept"} < set(os.listdir(other))


def test_a_directory_of_the_sandboxs_own_is_attached(make: MakeSandbox, other: Path) -> None:
    """Where it may be written although Landlock was fixed before; a part of the session's root by its name."""
    sandbox = make(mounts=[Mount("/data", str(other))], deny=("/secret",))
    inner = sandbox._inner
    assert sandbox.shell("mkdir part; echo x > part/file").ok

    sandbox.mount(Mount("/own", access=READ_WRITE))
    sandbox.mount(Mount("/shown", "part"))
    sandbox.mount(Mount("/tmp/shown", "part"))  # Landlock lets it be written
    sandbox.mount(Mount("/both", "part", READ_WRITE))
    sandbox.mount(Mount("/tmp/inside", "part", READ_WRITE))

    assert sandbox.shell("echo a > /own/file; cat /own/file").ok
    assert "x\n" == sandbox.shell("cat /shown/file").stdout_text
    for place in ("/shown", "/tmp/shown"):
        assert not sandbox.shell(f"echo y > {place}/file || rm {place}/file").ok
    assert sandbox.shell("echo y > /both/file; echo z >> /tmp/inside/file").ok
    assert "y\nz\n" == sandbox.shell("cat part/file /shown/file | head -2").stdout_text
    listed = {each.target: (each.access, each.host_path) for each in sandbox.session.mounts}
    assert ("read_only", None) == listed["/shown"]
    assert (READ_WRITE, None) == listed["/own"]
    for target, access, kind, field in (
        ("/both", READ_WRITE, FileExists, ""),
        ("/data/new", READ_WRITE, InvalidRequest, "mount"),
        ("/data/new", "read_only", InvalidRequest, "mount"),
        ("/secret/in", READ_WRITE, InvalidRequest, "target"),
    ):
        before = len(inner.session.mounts)
        with pytest.raises(kind) as refused:
            sandbox.mount(Mount(target, access=access))
        assert not field or field in str(refused.value.field)
        assert before == len(inner.session.mounts)
        assert "/data" not in target or "no read-only mount covers" in refused.value.hint
    sandbox.terminate()
    with pytest.raises(LifecycleError):
        sandbox.mount(Mount("/late", access=READ_WRITE))
    assert ["kept"] == os.listdir(other)


def test_whether_a_host_directory_is_shown_is_known_from_then_on(
    make: MakeSandbox, other: Path
) -> None:
    """A file of the host's, or a directory of its own, holds no socket of the host's."""
    sandbox = make()
    inner: Any = sandbox._inner
    for mount, is_directory in (
        (Mount("/own"), False),
        (Mount("/file", str(other / "kept")), False),
        (Mount("/late", str(other)), True),
        (Mount("/file2", str(other / "kept")), True),
    ):
        sandbox.mount(mount)
        assert is_directory is inner.host_directory


def test_what_is_attached_and_refused_leaves_no_note_and_no_descriptor(
    make: MakeSandbox, outer: Path, other: Path
) -> None:
    """Also in its source; what was noted of another before stays noted."""
    sandbox = make(mounts=[Mount("/data", str(outer), READ_WRITE, protect=("first",))])
    inner: Any = sandbox._inner
    note = Path(inner.note).read_bytes()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(InvalidRequest):
        sandbox.mount(Mount("/data/file/x", str(other), READ_WRITE, protect=("second",)))
    assert ["kept"] == os.listdir(other)
    assert (note, before) == (Path(inner.note).read_bytes(), len(os.listdir("/proc/self/fd")))
    sandbox.mount(Mount("/late", str(other), READ_WRITE, protect=("second",)))
    assert b"second" in Path(inner.note).read_bytes()
    assert b"first" in Path(inner.note).read_bytes()
    path = inner.note
    sandbox.terminate()
    assert (["kept"], False) == (os.listdir(other), os.path.exists(path))
