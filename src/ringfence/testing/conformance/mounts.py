"""Host and session directories inside a sandbox."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from ...errors import InvalidRequest, PermissionDenied, RingfenceError
from ...model import capabilities as can
from ...model.mount import READ_ONLY, READ_WRITE, Mount
from ...policy.protected import DEFAULTS, MAY_BE_MADE, WHERE
from ..running import read_until
from .base import ConformanceBase, needs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ..lab import Lab
    from .base import MakeSandbox


class Mounts(ConformanceBase):
    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        """A host directory with a file in it."""
        path = tmp_path / "source"
        path.mkdir()
        (path / "file").write_text("from the host\n")
        return path

    @needs(can.MOUNT)
    def test_read_only(self, make_sandbox: MakeSandbox, source: Path) -> None:
        lab = make_sandbox(mounts=(Mount("/data", str(source)),))

        assert "from the host\n" == lab.run("cat", "/data/file").text
        assert b"from the host\n" == lab.get("/data/file")

    @needs(can.MOUNT)
    def test_read_only_holds(self, make_sandbox: MakeSandbox, source: Path) -> None:
        lab = make_sandbox(mounts=(Mount("/data", str(source)),))

        assert not lab.sh("echo x > /data/new").ok
        assert not lab.sh("echo x >> /data/file").ok
        attempts: list[Callable[[], None]] = [
            lambda: lab.put("/data/new", b"x"),
            lambda: lab.put("/data/file", b"x"),
            lambda: lab.files.remove("/data/file"),
            lambda: lab.files.make_dir("/data/directory"),
            lambda: lab.files.move("/data/file", "/data/other"),
        ]
        for attempt in attempts:
            with pytest.raises(PermissionDenied):
                attempt()

        assert ["file"] == os.listdir(source)
        assert "from the host\n" == (source / "file").read_text()

    @needs(can.MOUNT)
    def test_read_write(self, make_sandbox: MakeSandbox, source: Path) -> None:
        """Files made inside appear outside, owned by the source's owner."""
        lab = make_sandbox(mounts=(Mount("/data", str(source), READ_WRITE, protect=()),))

        assert lab.sh("echo made > /data/made; echo more >> /data/file").ok
        lab.put("/data/put", b"put")
        lab.files.make_dir("/data/directory")

        assert "made\n" == (source / "made").read_text()
        assert "from the host\nmore\n" == (source / "file").read_text()
        assert b"put" == (source / "put").read_bytes()
        owner = source.stat().st_uid
        assert {owner} == {(source / name).stat().st_uid for name in os.listdir(source)}

    @needs(can.MOUNT)
    def test_nothing_is_left_behind(self, make_sandbox: MakeSandbox, source: Path) -> None:
        """Whatever holds protected paths in place is gone when the sandbox is."""
        lab = make_sandbox(mounts=(Mount("/data", str(source), READ_WRITE),))
        assert lab.sh("echo made > /data/made").ok

        lab.sandbox.terminate()

        assert ["file", "made"] == sorted(os.listdir(source))

    @needs(can.MOUNT)
    def test_a_mount_in_another_is_never_hidden(
        self, make_sandbox: MakeSandbox, source: Path
    ) -> None:
        """In whatever order they are given: what was to be read-only is."""
        inner = source / "inner"
        inner.mkdir()
        outer = Mount("/data", str(source), READ_WRITE, protect=())
        lab = make_sandbox(mounts=(Mount("/data/inner", str(inner)), outer))

        assert lab.sh("echo made > /data/made").ok
        assert not lab.sh("echo made > /data/inner/made").ok
        assert [] == os.listdir(inner)

    @needs(can.MOUNT)
    def test_removing_inside_removes_outside(self, make_sandbox: MakeSandbox, source: Path) -> None:
        lab = make_sandbox(mounts=(Mount("/data", str(source), READ_WRITE, protect=()),))

        lab.files.remove("/data/file")

        assert [] == os.listdir(source)

    @needs(can.MOUNT)
    def test_the_host_is_not_seen_elsewhere(self, make_sandbox: MakeSandbox, source: Path) -> None:
        secret = source.parent / "secret"
        secret.write_text("host only")
        (source / "link").symlink_to(secret)
        (source / "up").symlink_to("../secret")
        lab = make_sandbox(mounts=(Mount("/data", str(source)),))

        for path in (str(secret), "/data/link", "/data/up", "/data/../secret"):
            assert not lab.run("cat", path).ok

    @needs(can.MOUNT)
    def test_a_missing_host_path_is_refused_not_made(
        self, make_sandbox: MakeSandbox, tmp_path: Path
    ) -> None:
        with pytest.raises(InvalidRequest) as refusal:
            make_sandbox(mounts=(Mount("/data", str(tmp_path / "missing")),))

        assert refusal.value.field.endswith("source")
        assert not (tmp_path / "missing").exists()

    @needs(can.MOUNT)
    def test_a_source_link_is_resolved_once(self, make_sandbox: MakeSandbox, source: Path) -> None:
        other = source.parent / "other"
        other.mkdir()
        (other / "file").write_text("other")
        link = source.parent / "link"
        link.symlink_to(source)
        lab = make_sandbox(mounts=(Mount("/data", str(link)),))

        link.unlink()
        link.symlink_to(other)

        assert "from the host\n" == lab.run("cat", "/data/file").text

    @needs(can.MOUNT)
    def test_a_directory_of_the_session(self, make_sandbox: MakeSandbox) -> None:
        """Without a source it is made, and belongs to the session."""
        mounts = (Mount("/own", access=READ_WRITE), Mount("/own2", "sub/dir", READ_WRITE))
        lab = make_sandbox(mounts=mounts)

        assert lab.sh("echo one > /own/file; echo two > /own2/file").ok

        assert b"one\n" == lab.get("/own/file")
        assert b"two\n" == lab.get("sub/dir/file")

    @needs(can.MOUNT)
    def test_a_read_only_directory_of_the_session(self, make_sandbox: MakeSandbox) -> None:
        lab = make_sandbox(mounts=(Mount("/own"),))

        assert not lab.sh("echo x > /own/file").ok
        assert [] == lab.files.list("/own")

    @needs(can.MOUNT)
    def test_the_session_lists_its_mounts(self, make_sandbox: MakeSandbox, source: Path) -> None:
        """Host paths are for the admin alone."""
        lab = make_sandbox(mounts=(Mount("/one/", str(source)), Mount("/two", "", READ_WRITE)))

        session = lab.sandbox.session

        ours = [mount for mount in session.mounts if mount.target in ("/one", "/two")]
        assert [("/one", READ_ONLY), ("/two", READ_WRITE)] == [(m.target, m.access) for m in ours]
        assert os.path.realpath(source) == ours[0].host_path
        assert str(source) not in str(session.to_json())
        assert str(source) in str(session.to_json(admin=True))

    @needs(can.MOUNT, can.ATTACH)
    def test_the_newest_mount_wins(self, make_sandbox: MakeSandbox, source: Path) -> None:
        """Of those that were attached one after the other: two in one spec are refused."""
        other = source.parent / "other"
        other.mkdir()
        (other / "file").write_text("newer\n")
        lab = make_sandbox(mounts=(Mount("/data", str(source)),))
        lab.sandbox.attach(Mount("/data", str(other)))

        assert "newer\n" == lab.run("cat", "file", cwd="/data").text

    @needs(can.MOUNT)
    def test_a_mount_in_a_mount(self, make_sandbox: MakeSandbox, source: Path) -> None:
        inner = source.parent / "inner"
        inner.mkdir()
        (source / "inner").mkdir()
        mounts = (
            Mount("/data", str(source)),
            Mount("/data/inner", str(inner), READ_WRITE, protect=()),
        )
        lab = make_sandbox(mounts=mounts)

        assert lab.sh("echo x > /data/inner/new").ok
        assert not lab.sh("echo x > /data/new").ok

        assert ["new"] == os.listdir(inner)
        assert [] == os.listdir(source / "inner")

    @needs(can.MOUNT)
    def test_cwd_may_name_a_mount(self, make_sandbox: MakeSandbox, source: Path) -> None:
        lab = make_sandbox(mounts=(Mount("/data", str(source)),))

        assert "/data\n" == lab.run("pwd", cwd="/data").text
        assert "from the host\n" == lab.run("cat", "file", cwd="/data/").text

    @needs(can.MOUNT)
    def test_workdir_may_name_a_mount(self, make_sandbox: MakeSandbox, source: Path) -> None:
        lab = make_sandbox(
            mounts=(Mount("/data", str(source), READ_WRITE, protect=()),), workdir="/data"
        )

        assert lab.sh("echo x > made").ok

        assert "x\n" == (source / "made").read_text()
        assert b"x\n" == lab.get("made")

    @needs(can.MOUNT, can.ATTACH)
    def test_attach_to_a_live_sandbox(self, sandbox: Lab, source: Path) -> None:
        """A process that runs already sees it too."""
        script = "echo waiting; while [ ! -e /late/file ]; do sleep 0.05; done; cat /late/file"
        process = sandbox.start("sh", "-c", script)
        read_until(process.stdout, b"waiting", self.patience_s)

        resolved = sandbox.sandbox.attach(Mount("/late", str(source)))

        assert ("/late", READ_ONLY) == (resolved.target, resolved.access)
        assert resolved in sandbox.sandbox.session.mounts
        assert sandbox.finish(process).stdout.endswith(b"from the host\n")
        assert not sandbox.sh("echo x > /late/new").ok

    @needs(can.MOUNT, can.ATTACH)
    def test_attach_read_write(self, sandbox: Lab, source: Path) -> None:
        sandbox.sandbox.attach(Mount("/late", str(source), READ_WRITE, protect=()))

        assert sandbox.sh("echo made > /late/made").ok

        assert "made\n" == (source / "made").read_text()
        assert source.stat().st_uid == (source / "made").stat().st_uid

    @needs(can.MOUNT, can.ATTACH)
    def test_attach_a_missing_host_path(self, sandbox: Lab, tmp_path: Path) -> None:
        before = sandbox.sandbox.session.mounts

        with pytest.raises(InvalidRequest) as refusal:
            sandbox.sandbox.attach(Mount("/late", str(tmp_path / "missing")))

        assert refusal.value.field.endswith("source")
        assert before == sandbox.sandbox.session.mounts

    @needs(can.MOUNT, can.ATTACH, can.PROTECTED_PATHS)
    def test_what_is_attached_is_protected_too(self, sandbox: Lab, source: Path) -> None:
        sandbox.sandbox.attach(Mount("/late", str(source), READ_WRITE, protect=("hooks/new",)))

        assert not sandbox.sh("echo evil > /late/hooks/new").ok
        with pytest.raises(RingfenceError):
            sandbox.files.move("/late/hooks", "/late/elsewhere")
        assert sandbox.sh("echo fine > /late/other").ok

        sandbox.sandbox.terminate()
        assert ["file", "other"] == sorted(os.listdir(source))

    @needs(can.MOUNT, can.ATTACH)
    def test_attach_several(self, sandbox: Lab, source: Path, tmp_path: Path) -> None:
        """In one another, of the session's own, and where something is mounted already."""
        inner, newer = tmp_path / "inner", tmp_path / "newer"
        (source / "in" / "it").mkdir(parents=True)
        for path in (inner, newer):
            path.mkdir()
            (path / "file").write_text(f"{path.name}\n")

        for mount in (
            Mount("/home/sandbox/late", str(source), READ_WRITE, protect=()),
            Mount("/home/sandbox/late/in/it", str(inner)),
            Mount("/late/of/its/own", "", READ_WRITE),
            Mount("/late/shown", str(source)),
            Mount("/late/shown", str(newer)),
        ):
            sandbox.sandbox.attach(mount)

        shown = sandbox.run("cat", "late/file", "late/in/it/file", "/late/shown/file")
        assert "from the host\ninner\nnewer\n" == shown.text
        assert sandbox.sh("echo x > /late/of/its/own/file").ok
        assert not sandbox.sh("echo x > late/in/it/file").ok
        assert not sandbox.sh("echo x > /late/shown/file").ok
        assert sandbox.sh("echo x > late/more").ok

    @needs(can.MOUNT, can.ATTACH)
    def test_what_cannot_be_attached_leaves_nothing(self, sandbox: Lab, source: Path) -> None:
        before = sandbox.sandbox.session.mounts
        sandbox.put("/tmp/taken", b"")

        with pytest.raises(RingfenceError):
            sandbox.sandbox.attach(
                Mount("/tmp/taken/in", str(source), READ_WRITE, protect=("new",))
            )

        assert before == sandbox.sandbox.session.mounts
        assert ["file"] == os.listdir(source)
        sandbox.sandbox.attach(Mount("/late", str(source)))
        assert "from the host\n" == sandbox.run("cat", "/late/file").text

    @needs(can.MOUNT, can.ATTACH, can.SUSPEND, can.RESUME)
    def test_attach_to_a_suspended_sandbox(self, sandbox: Lab, source: Path) -> None:
        sandbox.sandbox.suspend()
        sandbox.sandbox.attach(Mount("/late", str(source)))
        sandbox.sandbox.resume()

        assert "from the host\n" == sandbox.run("cat", "/late/file").text

    @needs(can.MOUNT, can.DENIED_PATHS)
    def test_denied_paths(self, make_sandbox: MakeSandbox, source: Path) -> None:
        """The host's, in a mount or shown, and the sandbox's own: there, or not there yet."""
        (source / "secrets").mkdir()
        (source / "secrets" / "key").write_text("secret")
        mount = Mount("/data", str(source), READ_WRITE, protect=())
        denied = ("/data/file", "/data/secrets", "/data/later", "/tmp/own", "/usr/bin/env")
        control = make_sandbox(mounts=(mount,))
        assert control.run("cat", "/data/file", "/data/secrets/key", "/usr/bin/env").ok
        assert control.sh("echo x > /data/later && echo x > /tmp/own").ok
        control.files.remove("/data/later")
        control.sandbox.terminate()

        lab = make_sandbox(mounts=(mount,), deny=denied)

        for path in (*denied, "/data/secrets/key"):
            assert not lab.run("cat", path).ok
            assert not lab.sh(f"echo x > {path}").ok
            with pytest.raises(RingfenceError):
                lab.get(path)
        attempts: list[Callable[[], object]] = [
            lambda: lab.files.list("/data/secrets"),
            lambda: lab.files.remove("/data/secrets", recursive=True),
            lambda: lab.files.move("/data/secrets", "/data/elsewhere"),
        ]
        for attempt in attempts:
            with pytest.raises(RingfenceError):
                attempt()
        assert lab.sh("echo fine > /data/other").ok
        lab.sandbox.terminate()
        assert ["file", "other", "secrets"] == sorted(os.listdir(source))
        assert "from the host\n" == (source / "file").read_text()
        assert "secret" == (source / "secrets" / "key").read_text()

    @needs(can.DENIED_PATHS)
    def test_what_is_denied_is_not_made_again(self, make_sandbox: MakeSandbox) -> None:
        """Not even where all on the way to it is the sandbox's own, and may be moved elsewhere."""
        again = "mv own/deep own/moved; mv own moved; mkdir -p own/deep; echo x > own/deep/denied"
        control = make_sandbox()
        made = control.sh("mkdir -p own/deep")
        if 127 == made.exit_code:
            pytest.skip("the sandbox has no program that makes directories")
        assert made.ok
        assert control.sh(f"{again}; cat own/deep/denied").ok
        control.sandbox.terminate()

        lab = make_sandbox(deny=("/home/sandbox/own/deep/denied",))

        assert not lab.sh(again).ok
        assert not lab.run("cat", "own/deep/denied").ok

    @needs(can.MOUNT, can.DENIED_PATHS)
    def test_nothing_is_mounted_at_what_is_denied(
        self, make_sandbox: MakeSandbox, source: Path
    ) -> None:
        with pytest.raises(InvalidRequest):
            make_sandbox(mounts=(Mount("/data/in", str(source)),), deny=("/data",))

    @needs(can.MOUNT, can.ATTACH, can.DENIED_PATHS)
    def test_nothing_is_attached_at_what_is_denied(
        self, make_sandbox: MakeSandbox, source: Path
    ) -> None:
        lab = make_sandbox(deny=("/tmp/denied/in",))

        for target in ("/tmp/denied/in", "/tmp/denied/in/it", "/tmp/denied"):
            with pytest.raises(InvalidRequest):
                lab.sandbox.attach(Mount(target, str(source)))

    @needs(can.MOUNT)
    def test_memory_outlives_the_session(self, make_sandbox: MakeSandbox, tmp_path: Path) -> None:
        memory = tmp_path / "memory"
        memory.mkdir()
        first = make_sandbox(memory_dir=str(memory))
        assert first.sh('echo remember > "$RINGFENCE_MEMORY_DIR/note"').ok
        first.sandbox.terminate()

        second = make_sandbox(memory_dir=str(memory))

        assert "remember\n" == second.run("cat", "/mnt/memory/note").text

    def test_memory_is_private_by_default(self, make_sandbox: MakeSandbox) -> None:
        make_sandbox().put("/mnt/memory/note", b"x")

        assert [] == make_sandbox().files.list("/mnt/memory")

    @needs(can.MOUNT)
    def test_a_missing_memory_dir_is_refused(
        self, make_sandbox: MakeSandbox, tmp_path: Path
    ) -> None:
        with pytest.raises(InvalidRequest) as refusal:
            make_sandbox(memory_dir=str(tmp_path / "missing"))

        assert "memory_dir" == refusal.value.field

    @needs(can.MOUNT)
    def test_a_memory_dir_that_is_a_file_is_refused(
        self, make_sandbox: MakeSandbox, tmp_path: Path
    ) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(InvalidRequest) as refusal:
            make_sandbox(memory_dir=str(tmp_path / "file"))

        assert "memory_dir" == refusal.value.field

    @needs(can.MOUNT, can.PROTECTED_PATHS)
    def test_protected_paths_stay(self, make_sandbox: MakeSandbox, source: Path) -> None:
        """Existing and not yet existing protected paths stay read-only; the rest is writable."""
        (source / "hooks").mkdir()
        (source / "hooks" / "old").write_text("old")
        mount = Mount("/data", str(source), READ_WRITE, protect=("hooks", "agent/settings"))
        lab = make_sandbox(mounts=(mount,))

        assert not lab.sh("echo evil > /data/hooks/new").ok
        assert not lab.sh("echo evil > /data/hooks/old").ok
        lab.sh("echo evil > /data/agent/settings")
        assert lab.sh("echo fine > /data/other").ok

        assert "old" == (source / "hooks" / "old").read_text()
        assert ["old"] == os.listdir(source / "hooks")
        planted = source / "agent" / "settings"
        assert not planted.is_file() or "evil" not in planted.read_text()
        assert "fine\n" == (source / "other").read_text()

    @needs(can.MOUNT, can.PROTECTED_PATHS)
    def test_what_hosts_programs_obey_is_protected(
        self, make_sandbox: MakeSandbox, tmp_path: Path
    ) -> None:
        """Without being asked for: what is absent cannot be planted, what is there not changed."""
        absent, there, free = (tmp_path / name for name in ("absent", "there", "free"))
        for path in (absent / ".git", there / ".git/info", there / ".hg", free / ".git"):
            path.mkdir(parents=True)
        for name in DEFAULTS:
            (there / name).write_text("old")
        may_not_be_made = [name for name in DEFAULTS if name not in (*WHERE, *MAY_BE_MADE)]
        lab = make_sandbox(
            mounts=(
                Mount("/absent", str(absent), READ_WRITE),
                Mount("/there", str(there), READ_WRITE),
                Mount("/free", str(free), READ_WRITE, protect=()),
            )
        )
        for mount in ("absent", "there", "free"):
            lab.put(f"/{mount}/own", b"evil")
        lab.files.make_dir("/free/.git/info")
        lab.files.make_dir("/free/.hg")
        lab.files.move("/free/own", f"/free/{DEFAULTS[0]}")
        names = " ".join(DEFAULTS)
        lab.sh(f"cd /free; for name in {names}; do printf evil >own; mv own $name; done")
        for name in may_not_be_made:
            with pytest.raises(RingfenceError):
                lab.files.make_dir(f"/absent/{name}/evil")
            with pytest.raises(RingfenceError):
                lab.files.move("/absent/own", f"/absent/{name}")
        for name in DEFAULTS:
            with pytest.raises(RingfenceError):
                lab.files.move(f"/there/{name}", "/there/moved")
            with pytest.raises(RingfenceError):
                lab.files.move("/there/own", f"/there/{name}")
            with pytest.raises(RingfenceError):
                lab.files.remove(f"/there/{name}")
        lab.sh(f"cd /there; for name in {names}; do echo evil >>$name; done")

        assert {"old"} == {(there / name).read_text() for name in DEFAULTS}
        assert {"evil"} == {(free / name).read_text() for name in DEFAULTS}, "the control"
        files = [each for each in absent.rglob("*") if each.is_file()]
        assert ["own"] == [each.name for each in files if "evil" in each.read_text()]
        lab.sandbox.terminate()
        assert [".git", "own"] == sorted(os.listdir(absent))

    @needs(can.MOUNT, can.PROTECTED_PATHS)
    def test_protected_paths_cannot_be_moved_away(
        self, make_sandbox: MakeSandbox, source: Path
    ) -> None:
        (source / "a" / "hooks").mkdir(parents=True)
        (source / "a" / "hooks" / "old").write_text("old")
        mounts = (Mount("/data", str(source), READ_WRITE),)
        lab = make_sandbox(mounts=mounts, protect=("a/hooks",))

        for path in ("/data/a/hooks", "/data/a"):
            with pytest.raises(RingfenceError):
                lab.files.move(path, "/data/elsewhere")

        assert "old" == (source / "a" / "hooks" / "old").read_text()
