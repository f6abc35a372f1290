"""Snapshots: damaged, partial, taken at a bad time or on a full disk; and what they keep."""

from __future__ import annotations

import errno
import os
import random
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ringfence import Sandbox
from ringfence.backends.native.backend import NativeBackend
from ringfence.errors import (
    FileError,
    InvalidRequest,
    IoError,
    ResourceExhausted,
    SnapshotCorrupt,
    SnapshotNotFound,
)
from ringfence.model.session import Snapshot
from tests.native.callers import Caller
from tests.native.conftest import MakeSandbox
from tests.native.outside import PATIENCE_S, until

MIB = 1 << 20


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def backend(state_dir: Path) -> Iterator[NativeBackend]:
    made = NativeBackend(state_dir=str(state_dir))
    yield made
    made.close()


@pytest.fixture
def saved(backend: NativeBackend) -> Snapshot:
    """A small snapshot, of a sandbox that is gone."""
    with Sandbox.create(backend=backend, limits={"pids": 50}, env={"WORD": "kept"}) as sandbox:
        assert sandbox.shell("mkdir d; echo content > d/file; head -c 50000 /dev/urandom > r").ok
        return sandbox.snapshot({"name": "small"})


def contents(directory: Path, snapshot: Snapshot) -> tuple[Path, Path]:
    return directory / snapshot.id / "content.tar", directory / snapshot.id / "snapshot.json"


_RESTORE = """
from ringfence.backends.native.backend import NativeBackend
backend = NativeBackend(state_dir=sys.argv[1])
with Sandbox.restore(sys.argv[2], backend=backend) as sandbox:
    run = sandbox.shell("cat d/file; echo $WORD")
    say([run.stdout_text.split(), sandbox.spec.limits.pids])
backend.close()
"""


def test_restored_in_another_process_after_the_sandbox_is_gone(
    state_dir: Path, backend: NativeBackend, saved: Snapshot
) -> None:
    backend.close()
    with Caller(_RESTORE, state_dir, saved.id) as caller:
        assert [["content", "kept"], 50] == caller.hear(40)


@pytest.mark.parametrize("which", [0, 1], ids=["content", "description"])
def test_every_flipped_bit_is_noticed(
    state_dir: Path, backend: NativeBackend, saved: Snapshot, which: int
) -> None:
    path = contents(state_dir, saved)[which]
    whole, dice = path.read_bytes(), random.Random(which)
    for _ in range(100):
        damaged = bytearray(whole)
        damaged[dice.randrange(len(damaged))] ^= 1 << dice.randrange(8)
        path.write_bytes(damaged)

        with pytest.raises(SnapshotCorrupt):
            Sandbox.restore(saved.id, backend=backend)

    path.write_bytes(whole)
    with Sandbox.restore(saved.id, backend=backend) as sandbox:
        assert "content\n" == sandbox.files.read_text("d/file")


@pytest.mark.parametrize("which", [0, 1], ids=["content", "description"])
def test_what_is_cut_longer_or_missing_is_noticed(
    state_dir: Path, backend: NativeBackend, saved: Snapshot, which: int
) -> None:
    path = contents(state_dir, saved)[which]
    whole = path.read_bytes()
    for damaged in (b"", whole[:1], whole[: len(whole) // 2], whole[:-1], whole + b"\0" * 512):
        path.write_bytes(damaged)
        if which == 1 and damaged.strip(b"\0") == whole:
            continue  # not JSON any more, or the same JSON

        with pytest.raises(SnapshotCorrupt):
            Sandbox.restore(saved.id, backend=backend)

    path.unlink()
    with pytest.raises((SnapshotCorrupt, SnapshotNotFound)):
        Sandbox.restore(saved.id, backend=backend)
    backend.delete_snapshot(saved.id)
    assert [] == backend.snapshots()


def test_a_partial_snapshot_is_none(
    state_dir: Path, backend: NativeBackend, saved: Snapshot
) -> None:
    """What a crash leaves half written has another name."""
    (state_dir / saved.id).rename(state_dir / f".partial-{saved.id}")

    assert [] == backend.snapshots()
    with pytest.raises(SnapshotNotFound):
        Sandbox.restore(saved.id, backend=backend)
    with pytest.raises(InvalidRequest):
        Sandbox.restore(f".partial-{saved.id}", backend=backend)


@pytest.mark.root
def test_files_of_several_users_keep_their_owners(backend: NativeBackend) -> None:
    script = "umask 077; mkdir /tmp/$1; echo $1 > /tmp/$1/file; stat -c '%u %g %a' /tmp/$1/file"
    users = ["root", "sandbox", "nobody", "77"]
    with Sandbox.create(backend=backend) as sandbox:
        said = [
            sandbox.exec(["sh", "-c", script, "sh", user], user=user).stdout_text for user in users
        ]
        snapshot = sandbox.snapshot()

    with Sandbox.restore(snapshot.id, backend=backend) as restored:
        for user, before in zip(users, said, strict=True):
            look = f"cat /tmp/{user}/file; stat -c '%u %g %a' /tmp/{user}/file"
            assert f"{user}\n{before}" == restored.shell(look, user=user).stdout_text
        assert not restored.shell("cat /tmp/root/file").ok


def test_links_modes_and_times_are_kept(backend: NativeBackend) -> None:
    script = """
        echo x > a; ln a b; ln -s a c; mkfifo p; chmod 640 a; touch -d @1000000000 a
        mkdir locked; echo y > locked/z; chmod 500 locked; mkdir -p e/m/p/t/y
    """
    look = (
        "stat -c '%A %h %Y' a b; readlink c; test -p p && ls -ldR locked e | cut -c1-10; ls -i a b"
    )
    with Sandbox.create(backend=backend) as sandbox:
        assert sandbox.shell(script).ok
        before = sandbox.shell(look).stdout_text.splitlines()
        snapshot = sandbox.snapshot()

    with Sandbox.restore(snapshot.id, backend=backend) as restored:
        after = restored.shell(look).stdout_text.splitlines()

    assert before[:-2] == after[:-2]
    assert after[-2].split()[0] == after[-1].split()[0], "two names, one file"


_WRITE_IN_STEP = """
import os
def put(name, n):
    with open(name + ".new", "w") as file: file.write(str(n))
    os.rename(name + ".new", name)
n = 0
while True:
    n += 1
    put("first", n); put("second", n)
    if n == 100: print("ready", flush=True)
"""


@pytest.mark.full
def test_a_snapshot_is_of_one_moment(backend: NativeBackend) -> None:
    """A writer that keeps two files in step is never caught with the second ahead of the first."""
    with Sandbox.create(backend=backend) as sandbox:
        writer = sandbox.start(["python3", "-c", _WRITE_IN_STEP])
        assert b"ready\n" == writer.stdout.read(PATIENCE_S)
        # Something to copy in between, so that a moment is not over at once.
        sandbox.files.write("firstly", os.urandom(8 * MIB))
        snapshots = [sandbox.snapshot() for _ in range(3)]
        assert writer.running
        then = int(sandbox.files.read("first"))
        assert until(lambda: int(sandbox.files.read("first")) > then), "it did not go on"

    counts = []
    for snapshot in snapshots:
        with Sandbox.restore(snapshot.id, backend=backend) as restored:
            first, second = (int(restored.files.read(name)) for name in ("first", "second"))
        assert first - second in (0, 1)
        counts.append(first)
    assert sorted([*counts, then]) == [*counts, then]


def test_a_snapshot_of_nothing_but_holes_is_refused(
    state_dir: Path, backend: NativeBackend
) -> None:
    with Sandbox.create(backend=backend) as sandbox:
        assert sandbox.shell("truncate -s 1T nothing").ok

        with pytest.raises((ResourceExhausted, FileError, IoError)):
            sandbox.snapshot()

        assert sandbox.exec(["true"]).ok
    assert [] == [path.name for path in state_dir.iterdir()]


def test_a_full_host_disk(
    backend: NativeBackend, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing half written is kept, and the sandbox goes on."""

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Sandbox.create(backend=backend) as sandbox:
        with monkeypatch.context() as patch:
            patch.setattr("ringfence.snapshots.catalogue.os.fsync", full)
            with pytest.raises(ResourceExhausted):
                sandbox.snapshot()
        assert [] == os.listdir(state_dir)
        assert sandbox.exec(["true"]).ok
        assert sandbox.snapshot().id


def test_two_restored_from_one_live_apart(backend: NativeBackend, saved: Snapshot) -> None:
    with (
        Sandbox.restore(saved.id, backend=backend) as one,
        Sandbox.restore(saved.id, backend=backend) as other,
    ):
        one.files.write("d/file", "changed")

        assert "content\n" == other.files.read_text("d/file")
        assert one.id != other.id
        socket_code = (
            "import uuid; print(uuid.uuid4(), open('/proc/sys/kernel/random/uuid').read())"
        )
        words = [each.exec(["python3", "-c", socket_code]).stdout for each in (one, other)]
        assert words[0] != words[1]


def test_mounts_are_not_in_it(make: MakeSandbox, backend: NativeBackend, private_dir: Path) -> None:
    (private_dir / "private").write_text("of the host")
    with Sandbox.create(backend=backend, mounts=[f"{private_dir}:/work:rw"]) as sandbox:
        sandbox.files.write("mine", "x")
        snapshot = sandbox.snapshot()
    (private_dir / "private").unlink()

    with Sandbox.restore(snapshot.id, backend=backend) as restored:
        assert [] == [each.name for each in restored.files.list("/work") if each.name == "private"]
        assert "x" == restored.files.read_text("mine")


def test_unix_sockets_do_not_break_it(backend: NativeBackend) -> None:
    code = "import socket; s = socket.socket(socket.AF_UNIX); s.bind('/tmp/s'); print('ok')"
    with Sandbox.create(backend=backend) as sandbox:
        assert sandbox.exec(["python3", "-c", code]).ok
        snapshot = sandbox.snapshot()
    with Sandbox.restore(snapshot.id, backend=backend) as restored:
        assert not restored.files.exists("/tmp/s")
    assert socket.AF_UNIX


@pytest.mark.full
def test_holes_take_no_room_again(backend: NativeBackend) -> None:
    """A file that claims 200 MiB and has little of it comes back so, its bytes where they were."""
    code = (
        "import os\nfile = open('sparse', 'wb')\nfor at in (100 << 20, 150 << 20):\n"
        "    file.seek(at)\n    file.write(b'x' * 10)\nfile.truncate(200 << 20)"
    )
    look = (
        "import hashlib, os\ninfo = os.stat('sparse')\n"
        "print(info.st_size, info.st_blocks * 512 < 4 << 20,"
        " hashlib.sha256(open('sparse', 'rb').read()).hexdigest())"
    )
    with Sandbox.create(backend=backend) as sandbox:
        assert sandbox.exec(["python3", "-c", code]).ok
        before = sandbox.exec(["python3", "-c", look]).stdout_text
        snapshot = sandbox.snapshot()
    with Sandbox.restore(snapshot.id, backend=backend) as restored:
        assert before == restored.exec(["python3", "-c", look]).stdout_text
    assert before.startswith(f"{200 << 20} True ")


def test_a_restore_that_fails_leaves_no_sandbox(backend: NativeBackend) -> None:
    """There is no room for the files in it: all was made by then."""
    with Sandbox.create(backend=backend) as sandbox:
        assert sandbox.shell("head -c 3000000 /dev/urandom > file").ok
        saved = sandbox.snapshot()
    _, spec, _ = backend.catalogue().describe(saved.id)
    assert spec.limits.disk_bytes is None

    with Sandbox.restore(saved.id, backend=backend) as control:
        assert 3000000 == len(control.files.read("file"))
    small = replace(spec, id=None, limits=replace(spec.limits, disk_bytes=MIB))
    with pytest.raises(SnapshotCorrupt, match="No space left"):
        backend.restore(saved.id, small)

    assert [] == backend.living()
