"""Writable layers on disk: an exact size as root, a sampled one elsewhere; hidden, and gone at the end."""

from __future__ import annotations

import glob
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence import Limits, Mount, Sandbox, SandboxSpec
from ringfence.backends.local import journal
from ringfence.backends.local.host import cgroups
from ringfence.backends.local.mounts import disks
from ringfence.backends.native.backend import NativeBackend
from ringfence.errors import InvalidRequest, LifecycleError, StorageFull, Unsupported
from ringfence.model.state import State
from ringfence.testing.lab import Lab
from tests.native.conftest import MakeSandbox
from tests.native.outside import until

pytestmark = pytest.mark.full

MIB = 1 << 20
LIMITS = Limits(disk_bytes=32 * MIB, inodes=2048, memory_bytes=256 * MIB)
IS_ROOT = os.geteuid() == 0
FULL = "No space left on device"


@pytest.fixture(autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for writable layers that no other test uses."""
    # Beside what sandboxes may mount, and not below /tmp, which may be in memory.
    made = tmp_path_factory.mktemp("disks") if not IS_ROOT else Path("/var/tmp")
    if IS_ROOT:
        made = Path(
            subprocess.check_output(["mktemp", "-d", "/var/tmp/disks.XXXXXX"], text=True).strip()
        )
    monkeypatch.setenv(journal.DISKS, str(made))
    return made


@pytest.fixture(autouse=True)
def _nothing_is_left(place: Path) -> Iterator[None]:
    yield
    assert until(lambda: not loops(place))
    assert [] == glob.glob(f"{place}/.ringfence-*/disk.*")
    subprocess.run(["rm", "-rf", str(place)], check=True)


def loops(place: Path) -> set[str]:
    """The loop devices over files in `place`, and those files."""
    found = set()
    for path in glob.glob("/sys/block/loop*/loop/backing_file"):
        try:
            found.add(f"{path} {Path(path).read_text().strip()}")
        except OSError:
            continue  # it went meanwhile
    return {each for each in found if f" {place}/" in each}


@pytest.fixture
def on_disk(make: MakeSandbox) -> Sandbox:
    return make(disk_root=True, limits=LIMITS)


@pytest.fixture(params=["image", "directory"] if IS_ROOT else ["directory"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """As root also what a host without mke2fs or loop devices gets."""
    if request.param == "directory" and IS_ROOT:
        monkeypatch.setattr(disks, "_mke2fs", lambda: "")
    return str(request.param)


def test_files_are_on_disk_and_reports_name_how_the_size_is_kept(
    kind: str, make: MakeSandbox
) -> None:
    with make(disk_root=True, limits=LIMITS) as sandbox:
        assert b"" == sandbox.shell("head -c 8m /dev/zero > f; mkdir d; chmod 0 d").stderr
        found = {each.name: each for each in sandbox.protections()}
        assert "enforced" == found["root_file_system"].status
        assert "enforced" == found["read_only_mounts"].status
        expected = "enforced" if kind == "image" else "degraded"
        assert [expected] * 2 == [found[f"{each}_quota"].status for each in ("disk", "inode")]
        assert ("disk_quota" in sandbox.stats().degraded) == (kind == "directory")
        assert until(lambda: (sandbox.stats().disk_bytes or 0) >= 8 * MIB)


@pytest.mark.root
def test_at_the_limit_programs_get_an_error_and_the_sandbox_lives(on_disk: Sandbox) -> None:
    whole = on_disk.shell("head -c 31m /dev/zero > f && echo written")
    assert b"written\n" == whole.stdout
    assert FULL in on_disk.shell("head -c 2m /dev/zero > g").stderr.decode()
    assert 0 == on_disk.shell("rm f g && head -c 31m /dev/zero > f").exit_code


HOLDS = "import os; f = open('f', 'wb'); f.write(bytes(28 << 20)); f.flush(); os.remove('f')\n"
ATTACKS = {
    "allocated": "fallocate -l 24m f && fallocate -l 24m g",
    "many small files": "for i in $(seq 4000); do : > $i || exit 1; done",
    "many directories": 'python3 -c "import os; [os.mkdir(str(i)) for i in range(4000)]"',
    "many files with content": "python3 -c \"[open(str(i), 'wb').write(bytes(20000)) for i in range(1900)]\"",
    "deleted but open": f'python3 -c "{HOLDS}open(str(1), str(chr(119)+chr(98))).write(bytes(8 << 20))"',
    "hard links do not free": "head -c 28m /dev/zero > f; ln f g; rm f; head -c 8m /dev/zero > h",
    "in /tmp and /dev/shm": "head -c 20m /dev/zero > /tmp/f; head -c 20m /dev/zero > /dev/shm/f",
    "sparse, then filled": "truncate -s 30m f g && cat /dev/zero 1<>f; cat /dev/zero 1<>g",
}


@pytest.mark.root
@pytest.mark.parametrize("name", ATTACKS)
def test_no_attack_takes_more_than_the_limit(name: str, make: MakeSandbox, place: Path) -> None:
    sandbox = make(disk_root=True, limits=LIMITS.altered(output_bytes=MIB))
    free = os.statvfs(place).f_bavail
    result = sandbox.shell(ATTACKS[name])
    assert result.exit_code
    assert any(text in result.stderr.decode() for text in (FULL, "File too large"))
    assert (
        b"alive"
        in sandbox.shell("cd /; rm -rf ~/* /tmp/* /dev/shm/*; echo alive > ~/x; cat ~/x").stdout
    )
    # Its whole size was taken from the host at the start; others write there meanwhile.
    assert free - os.statvfs(place).f_bavail < 1 << 30


@pytest.mark.root
def test_a_hole_gives_bytes_back_inside_and_none_to_the_host(on_disk: Sandbox, place: Path) -> None:
    (device,) = loops(place)
    taken = os.statvfs(place).f_bavail
    for _ in range(3):
        assert 0 == on_disk.shell("head -c 30m /dev/zero > f && fallocate -p -l 30m f").exit_code
    assert device.endswith("(deleted)")
    assert taken - os.statvfs(place).f_bavail < 1 << 18  # blocks, which others write meanwhile


def test_neither_the_image_nor_the_directory_can_be_reached(
    kind: str, make: MakeSandbox, place: Path
) -> None:
    sandbox = make(disk_root=True, limits=LIMITS)
    seen = sandbox.shell(
        f"cat {place}/x; ls {place} /dev/loop0 /dev/loop-control; ls /proc/1/fd | wc -l"
    )
    assert 2 == seen.stderr.decode().count(str(place))
    assert 2 == seen.stderr.decode().count("/dev/loop")
    assert "upper" not in sandbox.shell("ls -a / /..").stdout.decode()
    if kind == "directory":
        with pytest.raises(InvalidRequest) as caught:
            make(disk_root=True, limits=LIMITS, mounts=[Mount("/mnt/x", str(place), "read_write")])
        assert "mounts" == caught.value.field
    else:
        assert [] == os.listdir(f"{place}/.ringfence-0")


def test_what_does_not_fit_the_disk_of_the_host_is_refused(kind: str, make: MakeSandbox) -> None:
    with pytest.raises(StorageFull) as caught:
        make(disk_root=True, limits=Limits(disk_bytes=60 << 40))
    assert "no room for a writable layer" in caught.value.message
    assert "limits.disk_bytes" in caught.value.hint


def test_a_place_in_memory_is_refused(monkeypatch: pytest.MonkeyPatch, make: MakeSandbox) -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no tmpfs to write to")
    monkeypatch.setenv(journal.DISKS, "/dev/shm")
    with pytest.raises(Unsupported) as caught:
        make(disk_root=True, limits=LIMITS)
    assert ("disk_root", True) == (caught.value.field, "in memory" in caught.value.message)
    subprocess.run(["rmdir", f"/dev/shm/.ringfence-{os.geteuid()}"], check=True)


def test_a_disk_limit_above_the_memory_limit_implies_it(make: MakeSandbox) -> None:
    sandbox = make(limits=Limits(memory_bytes=64 * MIB, disk_bytes=128 * MIB))
    assert 0 == sandbox.shell("head -c 100m /dev/zero > f && head -c 1k f > /dev/null").exit_code


FILLS = "mkdir d; cd d; chmod 300 .; for i in 1 2 3; do head -c 20m /dev/zero > $i; done; sleep 60"


@pytest.fixture
def sampled(kind: str, make: MakeSandbox) -> Sandbox:
    if kind != "directory":
        pytest.skip("an image has an exact size")
    return make(disk_root=True, limits=LIMITS)


@pytest.mark.full
def test_what_grows_a_directory_over_its_size_is_ended_and_told(sampled: Sandbox) -> None:
    """The sandbox stays with its files; other commands and contexts go on, and files can be removed."""
    with sampled.context() as context:
        context.run("open('mine', 'wb').write(bytes(1 << 20)); kept = 7")
        ended = sampled.shell(FILLS)
        assert ("disk", 9) == (ended.killed_by, ended.signal)
        assert "more than limits.disk_bytes" in ended.stderr_text
        assert "7" == context.run("kept").text

        found = context.run("import time\nfor i in range(10**6):\n"
            "    open(f'{i}', 'wb').write(bytes(1 << 20)); time.sleep(0.02)", timeout_s=60)  # fmt: skip
        assert found.error is not None
        assert "limits.disk_bytes" in found.error.value
    assert 0 == sampled.shell("chmod 700 d; rm -rf d [0-9]*").exit_code
    assert b"fits\n" == sampled.shell("head -c 8m /dev/zero > f && sleep 2 && echo fits").stdout


def test_shared_memory_is_in_memory_and_bounded(sampled: Sandbox) -> None:
    """Beside a directory on disk, whose size holds what lies there in no other way."""
    fits = "for i in 1 2 3 4; do head -c 30m /dev/zero > /dev/shm/$i || exit; done; stat -f -c %T /dev/shm"
    assert b"tmpfs\n1777\n" == sampled.shell(f"{fits}; stat -c %a /dev/shm").stdout
    assert FULL in sampled.shell("head -c 30m /dev/zero > /dev/shm/5").stderr.decode()
    code = "from multiprocessing import shared_memory as s; m = s.SharedMemory(create=True, size=9)"
    assert 0 == sampled.exec(["python3", "-c", f"{code}; m.unlink()"]).exit_code
    assert State.RUNNING == sampled.state


@pytest.mark.full
def test_many_small_files_are_counted_too(sampled: Sandbox) -> None:
    many = (
        "import os, time\nfor i in range(4000): open(str(i), 'w').write('x' * 4000)\ntime.sleep(60)"
    )
    ended = sampled.exec(["python3", "-c", many])
    assert "disk" == ended.killed_by
    assert "more than limits.inodes" in ended.stderr_text


@pytest.mark.full
def test_what_grows_on_in_the_background_ends_the_sandbox(sampled: Sandbox) -> None:
    """No command is there that could be ended for it."""
    loop = "i=0; while :; do i=$((i+1)); head -c 4m /dev/zero > $i; sleep 0.1; done"
    sampled.shell(f"({loop}) >/dev/null 2>&1 </dev/null & exit 0")
    assert until(lambda: sampled.state is State.TERMINATED, 60.0)
    with pytest.raises(LifecycleError) as caught:
        sampled.shell("true")
    assert "limits.disk_bytes" in caught.value.message


@pytest.mark.full
def test_snapshots_of_every_kind_of_file_and_generations(kind: str, make: MakeSandbox) -> None:
    """A snapshot's contents are equal, also over a layer, whose files the disk's overlay only shows."""
    script = "head -c 6m /dev/urandom > a; mkdir -p d/e; ln a d/b; ln -s a d/l; mkfifo f"
    script += "; truncate -s 1g s; chmod 0 d/e"
    listing = "find . -printf '%p %y %m %s %l\\n' | sort; cat a | sha256sum"
    first = make(disk_root=True, limits=LIMITS)
    first.shell(script)
    saved, expected = [first.snapshot()], first.shell(listing).stdout
    try:
        for _generation in range(3):
            with Sandbox.restore(saved[-1].id) as copy:
                assert expected == copy.shell(listing).stdout
                assert copy.spec.disk_root
                assert (
                    "enforced" == {e.name: e for e in copy.protections()}["root_file_system"].status
                )
                assert 0 == copy.shell("rm d/l; ln -s b d/l; echo more >> g").exit_code
                expected = copy.shell(listing).stdout
                saved.append(copy.snapshot())
                # An ordinary user cannot unpack a directory that is closed to itself.
                assert (saved[-1].size_bytes < MIB) == IS_ROOT
    finally:
        for each in saved:
            Sandbox.delete_snapshot(each.id)


def test_marks_forks_and_suspension(kind: str, make: MakeSandbox) -> None:
    sandbox = make(disk_root=True, limits=LIMITS)
    sandbox.shell("echo one > f")
    sandbox.suspend()
    sandbox.resume()
    (copy,) = sandbox.fork()
    with copy:
        assert b"one\n" == copy.shell("cat f; echo two > f").stdout
        assert copy.spec.disk_root
    assert b"one\n" == sandbox.shell("cat f").stdout


def test_one_of_a_pool_has_its_disk_before_it_is_claimed(kind: str, place: Path) -> None:
    backend = NativeBackend(state_dir=f"{place}/state")
    try:
        spec = SandboxSpec(disk_root=True, limits=LIMITS, allow_degraded=("*",))
        warm = backend.prewarm(spec)
        assert not warm.fits(SandboxSpec(allow_degraded=("*",)))
        assert not warm.fits(SandboxSpec(disk_root=True, allow_degraded=("*",)))
        sandbox = warm.claim(spec)
        found = {each.name: each for each in sandbox.protections()}
        assert "on disk" in found["disk_quota"].why
        if kind == "directory":
            size = Lab(sandbox, 60.0).sh("stat -f -c '%b %S' /dev/shm").text.split()
            assert 128 * MIB == int(size[0]) * int(size[1]), "half of the memory of this spec"
        sandbox.terminate()
        backend.prewarm(spec).discard()
    finally:
        backend.close()


KILLED = """
import sys, time
from ringfence import Limits, Sandbox
from ringfence.backends.local.mounts import disks
if sys.argv[1] == "directory":
    disks._mke2fs = lambda: ""
sandbox = Sandbox.create(disk_root=True, limits=Limits(disk_bytes=32 << 20))
sandbox.shell("echo left > f")
print(sandbox.id, flush=True)
time.sleep(600)
"""


def test_nothing_is_left_when_everybody_is_killed(kind: str, place: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, kind], stdout=subprocess.PIPE, start_new_session=True
    )
    assert child.stdout is not None
    assert child.stdout.readline()
    mine = descendants(child.pid)
    assert loops(place) if kind == "image" else glob.glob(f"{place}/.ringfence-*/disk.*")
    for pid in (child.pid, *mine):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    child.wait()
    child.stdout.close()
    assert until(lambda: not loops(place))
    cgroups.sweep(cgroups.Layout())  # the zygote, which removes them, was killed as well
    if kind == "directory":
        journal.sweep()
        assert [] == glob.glob(f"{place}/.ringfence-*/disk.*")


LEFT = """
import os, sys
from ringfence import Limits, SandboxSpec
from ringfence.backends.local.mounts import disks
from ringfence.backends.native.backend import NativeBackend
from ringfence.testing.lab import Lab
if sys.argv[1] == "directory":
    disks._mke2fs = lambda: ""
backend = NativeBackend(state_dir=sys.argv[2], restart_dir=sys.argv[3], outlive_s=60.0)
sandbox = backend.provision(SandboxSpec(disk_root=True, limits=Limits(disk_bytes=32 << 20)))
Lab(sandbox, 60.0).sh("echo kept > f")
print(sandbox.id, flush=True)
os.kill(os.getpid(), 9)
"""


def test_it_outlives_the_process_that_made_it_and_goes_with_its_end(kind: str, place: Path) -> None:
    state, restart = f"{place}/state", f"{place}/restart"
    os.mkdir(restart, 0o700)
    code = [sys.executable, "-c", LEFT, kind, state, restart]
    made = subprocess.run(code, stdout=subprocess.PIPE, text=True, check=False).stdout.strip()
    backend = NativeBackend(state_dir=state, restart_dir=restart, outlive_s=60.0)
    try:
        sandbox = backend.adopt(made)
        assert sandbox is not None
        lab = Lab(sandbox, 60.0)
        assert "kept\n" == lab.sh("cat f").text
        if kind == "directory":
            ended = lab.sh("for i in 1 2 3; do head -c 20m /dev/zero > $i; done; sleep 60")
            assert "disk" == ended.killed_by, "it is sampled again"
        sandbox.terminate()
        assert [] == glob.glob(f"{place}/.ringfence-*/disk.*")
    finally:
        backend.close()


def descendants(pid: int) -> set[int]:
    """Processes below `pid`, those inside included."""
    found: set[int] = set()
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            for word in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                found |= {int(word)} | descendants(int(word))
    except OSError:
        pass
    return found
