"""Mounts of the landlock backend: rules on directories of the host, and names that lead there."""

from __future__ import annotations

import os
import sys
import tarfile
import time
from pathlib import Path

import pytest

from ringfence import Mount, Sandbox, SandboxSpec
from ringfence.backends.landlock import rules
from ringfence.backends.landlock.backend import LandlockBackend
from ringfence.backends.local.host.facts import host
from ringfence.errors import FileError, InvalidRequest, Unsupported
from ringfence.integrations.interpreter import Interpreter
from tests.features import require
from tests.native.test_without_namespaces import PYTHON, run_refused
from tests.strangers import let_others_in

pytestmark = pytest.mark.full


@pytest.fixture(scope="module", autouse=True)
def _landlock() -> None:
    require("landlock")


def test_a_mount_at_its_own_path_is_shown_read_only(tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    shown.mkdir()
    (shown / "file").write_text("canary")
    let_others_in(shown)
    backend = LandlockBackend()
    with Sandbox.create(backend=backend, mounts=[Mount(str(shown), str(shown))]) as sandbox:
        read = sandbox.exec(["cat", f"{shown}/file"])
        wrote = sandbox.exec(["sh", "-c", f"echo x > {shown}/file || echo x > {shown}/new"])
    for refused in (
        [Mount(str(shown), str(shown), "read_write")],
        [Mount("/own")],
    ):
        with pytest.raises(Unsupported):
            Sandbox.create(backend=backend, mounts=refused)
    backend.close()

    assert ("canary", False) == (read.text, wrote.ok)
    assert ["file"] == os.listdir(shown)


READS = "import os\nprint(open(os.path.dirname(__file__) + '/../file').read())"


@pytest.fixture
def shown(tmp_path: Path) -> Path:
    """A directory of the host with a file, and a script in a directory below."""
    path = tmp_path / "shown"
    (path / "below").mkdir(parents=True)
    (path / "file").write_text("from outside")
    (path / "below/step.py").write_text(READS)
    let_others_in(path / "below")
    return path


def test_a_mount_at_another_path_is_mapped(shown: Path) -> None:
    """By whole arguments, the working directory and the files API."""
    mounts = [Mount("/work", str(shown))]
    with Sandbox.create(backend="landlock", mounts=mounts, workdir="/work/below") as sandbox:
        told = sandbox.exec([PYTHON, "/work/below/step.py"])
        here = sandbox.exec(["ls"]).text, sandbox.exec(["ls"], cwd="/work").text
        read = sandbox.files.read("/work/file"), sandbox.files.read("../file")
        wrote = sandbox.exec(["sh", "-c", "echo x > step.py || echo x > new"])
        with pytest.raises(FileError):
            sandbox.files.write("/work/new", b"x")
        beside = sandbox.exec(["cat", str(shown.parent / "beside")])

    assert ("from outside\n", ("step.py\n", "below\nfile\n")) == (told.text, here), told
    assert (b"from outside",) * 2 == read
    assert not wrote.ok
    assert not beside.ok
    assert ["below", "file"] == sorted(os.listdir(shown))


def test_a_mount_in_the_home_is_a_link_that_no_snapshot_has(shown: Path, tmp_path: Path) -> None:
    backend = LandlockBackend(state_dir=str(tmp_path / "saved"))
    mounts = [
        Mount("/home/sandbox/src/step.py", str(shown / "below/step.py")),
        Mount("/tmp/data", str(shown)),
    ]
    look = "cat src/step.py $TMPDIR/data/file > both; echo x > src/step.py; ls -A src $TMPDIR"
    with Sandbox.create(backend=backend, mounts=mounts) as sandbox:
        told = sandbox.exec(["sh", "-c", look])
        sandbox.exec(["sh", "-c", "echo own > src/own"])
        saved = sandbox.snapshot()
    with open(shown / "file", "a") as file:
        file.write(", later")
    with Sandbox.restore(saved.id, backend=backend) as restored:
        again = restored.exec(["sh", "-c", "cat $TMPDIR/data/file src/own; cat both"])
    with (
        open(backend.catalogue().content(saved.id), "rb") as content,
        tarfile.open(fileobj=content) as tar,
    ):
        names = tar.getnames()
    backend.delete_snapshot(saved.id)
    backend.close()

    assert "src:\nstep.py\n" in told.text, told
    script = (shown / "below/step.py").read_text()
    assert f"from outside, laterown\n{script}from outside" == again.text, again
    assert not [each for each in names if each.endswith(("step.py", "/data"))]


def test_a_target_that_nothing_leads_to_is_refused(shown: Path) -> None:
    here = str(shown)
    link = shown.parent / "link"
    link.symlink_to(shown)
    for mounts in (
        [Mount("/usr/share/x", here)],
        [Mount("/etc/x.conf", f"{here}/file")],
        [Mount("/home", here)],
        [Mount("/home/sandbox", here)],
        [Mount("/mnt/session/outputs", here)],
        [Mount("/work", "/tmp")],
        [Mount("/work", here), Mount("/work/in", f"{here}/below")],
        [Mount("/work", here, "read_write")],
    ):
        with pytest.raises(Unsupported):
            Sandbox.create(backend="landlock", mounts=mounts)
    for mount in (Mount("/work", f"{here}/missing"), Mount("/work", str(link), nofollow=True)):
        with pytest.raises(InvalidRequest):
            Sandbox.create(backend="landlock", mounts=[mount])
    with Sandbox.create(
        backend="landlock",
        mounts=[Mount("/work", str(link)), Mount("/work/below", f"{here}/below")],
    ) as made:
        assert "step.py\n" == made.exec(["ls", "/work/below"]).text
    if host().changes_users:
        os.chmod(shown, 0o700)
        with pytest.raises(Unsupported, match=f"may not read {shown}"):
            Sandbox.create(backend="landlock", mounts=[Mount("/work", f"{here}/below")])


@pytest.fixture
def writable(tmp_path: Path) -> Path:
    if host().changes_users:
        pytest.skip("as root a sandbox has a user of its own, who may not write there")
    path = tmp_path / "writable"
    path.mkdir()
    (path / "file").write_text("old")
    (tmp_path / "beside").write_text("canary")
    return path


CHANGES = (
    "cd {0} && echo new > file && chmod 600 file && touch -d 2001-02-01 file && mkdir d && mv file d/moved"
    " && echo made > $HOME/made && mv $HOME/made . && ln made linked && test -x d"
)


def test_a_writable_mount_ends_at_its_border(writable: Path) -> None:
    beside = writable.parent / "beside"
    before = os.stat(beside)
    mount = Mount(str(writable), str(writable), "read_write", protect=())
    with Sandbox.create(backend="landlock", mounts=[mount], workdir=str(writable)) as sandbox:
        inside = sandbox.exec(["sh", "-ec", CHANGES.format(writable)])
        sandbox.files.write(f"{writable}/put", b"put")
        got = sandbox.files.read("put")
        out = [
            sandbox.exec(["sh", "-c", f"cd {writable}; {attempt}"]).exit_code
            for attempt in (
                "echo x > ../beside",
                "chmod 777 ../beside",
                "touch -d 2001-01-01 ../beside",
                "mv ../beside .",
                "ln ../beside linked2",
                "mv made ../",
                "rm ../beside",
                "ln -s ../beside link; chmod 777 link",
            )
        ]

    assert (0, b"put") == (inside.exit_code, got), inside
    moved = os.stat(writable / "d/moved")
    assert (0o100600, 2001) == (moved.st_mode, time.gmtime(moved.st_mtime).tm_year)
    assert "made" == (writable / "linked").read_text().strip()
    assert all(out), out
    now = os.stat(beside)
    assert "canary" == beside.read_text()
    assert (before.st_mode, before.st_mtime_ns, 1) == (now.st_mode, now.st_mtime_ns, now.st_nlink)


def test_a_directory_of_its_own_is_mapped(tmp_path: Path) -> None:
    """By the working directory, the files API and whole arguments; a snapshot has it under its name."""
    backend = LandlockBackend(state_dir=str(tmp_path / "saved"))
    own = Mount("/workspace", "", "rw")
    with Sandbox.create(backend=backend, mounts=[own], workdir="/workspace/deep") as made:
        made.files.write("/workspace/given", b"from outside\n")
        told = made.shell("cat ../given; echo from inside > made").text
        read = made.exec(["cat", "/workspace/deep/made"]).text
        saved = made.snapshot()
    with Sandbox.restore(saved.id, backend=backend) as restored:
        again = restored.files.read("/workspace/deep/made")
    backend.delete_snapshot(saved.id)
    with pytest.raises(Unsupported, match="make it writable"):
        Sandbox.create(backend=backend, mounts=[Mount("/workspace")])
    with pytest.raises(InvalidRequest):
        Sandbox.create(backend=backend, mounts=[Mount("/proc/own", "", "rw")])
    backend.close()

    assert ("from outside\n", "from inside\n") == (told, read)
    assert b"from inside\n" == again


def test_the_callers_python_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_others_in(tmp_path)
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    (tmp_path / "package").write_text("shown")
    for is_shown in (True, False):
        with Sandbox.create(backend="landlock", python_env=is_shown) as made:
            told = made.exec(["cat", str(tmp_path / "package")])
            path = made.exec(["sh", "-c", "echo $PATH"]).text
        assert ("shown" if is_shown else "") == told.text
        assert is_shown == path.startswith(f"{tmp_path}/bin:")
    if host().changes_users:
        tmp_path.chmod(0o700)
        monkeypatch.setattr(sys, "prefix", str(tmp_path / "below"))
        with pytest.raises(Unsupported, match="may not enter"):
            Sandbox.create(backend="landlock", python_env=True)


def test_what_landlock_cannot_hold_in_a_writable_mount_is_refused(writable: Path) -> None:
    path = str(writable)
    (writable / "inner").mkdir()
    free = Mount(path, path, "read_write", protect=())
    for mounts in (
        [Mount(path, path, "read_write")],
        [Mount(path, path, "read_write", protect=("hooks",))],
        [free, Mount(f"{path}/inner", f"{path}/inner")],
    ):
        with pytest.raises(Unsupported):
            Sandbox.create(backend="landlock", mounts=mounts)
    with pytest.raises(InvalidRequest):
        Sandbox.create(backend="landlock", mounts=[Mount("/var/tmp", "/var/tmp", protect=())])
    missing = f"{path}/missing"
    with pytest.raises(InvalidRequest, match="missing"):
        Sandbox.create(backend="landlock", mounts=[Mount(missing, missing)])
    with pytest.raises(InvalidRequest, match="missing"):
        Sandbox.create(backend="landlock", memory_dir=missing)


def test_memory_outlives_the_sandbox(writable: Path) -> None:
    for script in ('echo kept > "$RINGFENCE_MEMORY_DIR/note"', 'cat "$RINGFENCE_MEMORY_DIR/note"'):
        with Sandbox.create(backend="landlock", memory_dir=str(writable)) as sandbox:
            ran = sandbox.exec(["sh", "-c", script])
            read = sandbox.files.read("/mnt/memory/note")

    assert ("kept\n", b"kept\n") == (ran.text, read)


def test_as_root_a_writable_mount_is_refused(tmp_path: Path) -> None:
    if not host().changes_users:
        pytest.skip("the user's own directories can be written")
    own = str(tmp_path)
    with pytest.raises(Unsupported, match="its own user"):
        Sandbox.create(backend="landlock", mounts=[Mount(own, own, "read_write", protect=())])
    with pytest.raises(Unsupported, match="its own user"):
        Sandbox.create(backend="landlock", memory_dir=own)


def test_an_argument_that_is_a_path_of_its_own_is_mapped() -> None:
    """So code that a caller wrote to /tmp runs, as the adapters run it."""
    with Sandbox.create(backend="landlock") as sandbox:
        sandbox.files.write("/tmp/code.py", b"import sys; print(sys.argv[1:])")
        ran = sandbox.exec([PYTHON, "/tmp/code.py", "/tmpx", "/etc/passwd", "-c/tmp/a"])
        interpreter = Interpreter(sandbox)
        interpreter.run("x = 42", timeout_s=30)
        again = interpreter.run("print(x)", timeout_s=30).output

    assert "['/tmpx', '/etc/passwd', '-c/tmp/a']\n" == ran.text
    assert "42\n" == again


def test_anywhere_brings_the_script_in(shown: Path) -> None:
    (shown / "step.py").write_text("import os; print(os.path.exists('file'))")
    ran = run_refused("--anywhere", "--", "python3", "step.py", cwd=shown)

    assert (0, "False\n") == (ran.returncode, ran.stdout), ran
    assert "--mount" not in ran.stderr


@pytest.mark.parametrize(
    ("options", "target", "argv"),
    [
        (["--here"], "/work", ["python3", "below/step.py"]),
        (["--mount=.:/data"], "/data", ["cat", "/data/file"]),
    ],
)
def test_anywhere_says_where_a_mount_is(
    shown: Path, options: list[str], target: str, argv: list[str]
) -> None:
    ran = run_refused("--anywhere", *options, "--", *argv, cwd=shown)

    assert (0, "from outside") == (ran.returncode, ran.stdout.strip()), ran
    assert f"--mount: {target} is {shown} here: programs find it by an argument" in ran.stderr


@pytest.mark.parametrize("swapped", ["shown", "shown/below"])
def test_a_link_that_has_come_to_be_in_a_source_is_refused(shown: Path, swapped: str) -> None:
    """The paths were resolved before: a rule would hold for what another process leads it to."""
    inner, place = shown / "below", shown.parent / swapped
    mounts = [Mount("/usr/share", "/usr/share"), Mount(str(inner), str(inner))]
    control = rules.open_mounts(mounts)
    for fd, _ in control:
        os.close(fd)
    before = os.listdir("/proc/self/fd")
    os.rename(place, shown.parent / "moved")
    place.symlink_to(shown.parent / "moved")

    with pytest.raises(InvalidRequest, match="has a symlink in it now"):
        rules.open_mounts(mounts)

    assert [rules.READ] * 2 == [access for _, access in control]
    assert len(before) == len(os.listdir("/proc/self/fd"))


def test_names_that_begin_like_those_of_the_kernels_are_others(shown: Path) -> None:
    spec = SandboxSpec(mounts=(Mount("/device", str(shown)), Mount("/system/proc", str(shown))))
    rules.check_mounts(spec, "landlock", is_owner=True)

    for target in ("/dev/shm", "/sys/fs", "/proc/self"):
        with pytest.raises(InvalidRequest, match="cannot be"):
            rules.check_mounts(
                SandboxSpec(mounts=(Mount(target, str(shown)),)), "landlock", is_owner=True
            )


@pytest.mark.parametrize("is_turned", [False, True])
def test_a_mount_that_another_one_shows_there_is_no_second_link(
    shown: Path, is_turned: bool
) -> None:
    """In whatever order they are given; nothing is made in the directory of the host."""
    mounts = [
        Mount("/home/sandbox/own", str(shown)),
        Mount("/home/sandbox/own/below", str(shown / "below")),
    ]
    before = sorted(shown.rglob("*"))
    with Sandbox.create(backend="landlock", mounts=mounts[:: -1 if is_turned else 1]) as sandbox:
        ran = sandbox.exec([PYTHON, "own/below/step.py"])

    assert "from outside\n" == ran.stdout_text, ran.stderr_text
    assert before == sorted(shown.rglob("*"))
