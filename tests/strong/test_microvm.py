"""What makes a machine one of its own: its kernel, its randomness, its isolation, and its end."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence import Sandbox
from ringfence.backends.microvm import booted, kernel, qemu
from ringfence.backends.microvm.backend import MicrovmBackend
from ringfence.errors import BackendUnavailable, IsolationError, SandboxLost
from ringfence.model.capabilities import ENFORCED
from ringfence.model.limits import Limits
from ringfence.model.spec import STRONG, SandboxSpec
from tests.features import guest_kernel
from tests.machines import cache_dir, machine_backend, require_machines

pytestmark = pytest.mark.full

PATIENCE_S = 180.0
IDENTITY = "cat /proc/sys/kernel/random/boot_id; od -An -N16 -tx1 /dev/urandom; date +%s; uname -r"
CALLER = """
import sys
from ringfence import Sandbox
from ringfence.backends.microvm.backend import MicrovmBackend
backend = MicrovmBackend(kernel_place=sys.argv[1], cache_dir=sys.argv[2])
sandbox = Sandbox.create(backend=backend)
print(sandbox._inner.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def backend() -> Iterator[MicrovmBackend]:
    require_machines()
    made = machine_backend()
    yield made
    made.close()


@pytest.fixture(scope="module")
def sandbox(backend: MicrovmBackend) -> Iterator[Sandbox]:
    with Sandbox.create(backend=backend) as made:
        yield made


def test_two_continued_from_one_have_nothing_that_should_be_secret_in_common(
    backend: MicrovmBackend, sandbox: Sandbox
) -> None:
    before_s = int(time.time())
    with Sandbox.create(backend=backend) as other:
        said = [each.exec(["sh", "-c", IDENTITY]).text.splitlines() for each in (sandbox, other)]
    after_s = int(time.time())

    assert said[0][0] != said[1][0]
    assert said[0][1] != said[1][1]
    assert all(before_s <= int(each[2]) <= after_s + 1 for each in said)
    assert {guest_release()} == {each[3] for each in said}
    assert guest_release() != os.uname().release


def guest_release() -> str:
    return kernel.find(guest_kernel()).release


def test_isolation_is_read_back_from_both_kernels(sandbox: Sandbox) -> None:
    found = {each.name: each for each in sandbox.protections()}

    assert guest_release() in found["guest_kernel"].why
    names = ("guest_kernel", "capabilities", "no_new_privs", "seccomp", "namespaces", "network")
    assert {ENFORCED} == {found[name].status for name in (*names, "host_identity")}
    is_kvm = "KVM" in found["virtual_machine"].why
    assert is_kvm == (ENFORCED == found["virtual_machine"].status)


def test_the_hosts_files_cannot_be_changed(sandbox: Sandbox) -> None:
    """The control: another directory can."""
    script = "touch /usr/mine; echo $?; mount -o remount,rw /usr; echo $?; touch /tmp/mine; echo $?"

    said = sandbox.exec(["sh", "-c", script], user="root").text.split()

    assert "0" not in said[:2]
    assert "0" == said[2]
    assert not os.path.lexists("/usr/mine")


def test_the_settings_of_its_kernel_cannot_be_changed(sandbox: Sandbox) -> None:
    """Those of the whole machine; the control: they can be read."""
    place = "/proc/sys/kernel/ns_last_pid"

    written = sandbox.exec(["sh", "-c", f"echo 9 > {place}"], user="root")

    assert not written.ok
    assert sandbox.exec(["cat", place]).ok


@pytest.mark.root  # who has no cgroup has no such limit
def test_the_host_bounds_the_processor(backend: MicrovmBackend) -> None:
    with Sandbox.create(backend=backend, limits=Limits(cpus=0.1)) as slow:
        used_ns, began_ns = slow.stats().cpu_ns, time.monotonic_ns()
        slow.exec(["sh", "-c", "while :; do :; done"], timeout_s=3)
        passed_ns = time.monotonic_ns() - began_ns
        now_ns = slow.stats().cpu_ns

    assert used_ns is not None
    assert now_ns is not None
    assert now_ns - used_ns < passed_ns / 2


def test_the_processor_offers_no_hypervisor(sandbox: Sandbox) -> None:
    """Nested virtualisation and performance counters are code of the emulator that no guest needs."""
    lines = sandbox.shell("grep -m1 ^flags /proc/cpuinfo").stdout_text
    flags = set(lines.partition(":")[2].split())

    assert {"hypervisor", "nx"} <= flags
    assert not flags & {"svm", "vmx", "npt", "ept", "arch_perfmon", "perfctr_core", "rdpmc"}


def test_the_kernel_knows_how_wide_addresses_are(sandbox: Sandbox) -> None:
    """Else it cannot read its own memory with care: every path that it tells is of the letter x."""
    said = sandbox.shell("cd /usr/bin; readlink /proc/self/cwd; grep -c xxx /proc/self/mountinfo")

    assert "/usr/bin\n0\n" == said.stdout_text, said


def test_there_is_no_network_device(sandbox: Sandbox) -> None:
    lines = sandbox.exec(["cat", "/proc/net/dev"]).text.splitlines()[2:]

    assert ["lo"] == [line.partition(":")[0].strip() for line in lines]


def test_who_was_suspended_knows_what_time_it_is(sandbox: Sandbox) -> None:
    sandbox.suspend()
    time.sleep(2)  # of the host's time, which a machine that stands still does not see
    sandbox.resume()
    now_s = time.time()

    assert now_s - 1 <= int(sandbox.exec(["date", "+%s"]).text)


def test_an_emulator_that_ends_is_a_sandbox_that_is_lost(backend: MicrovmBackend) -> None:
    with Sandbox.create(backend=backend) as doomed:
        run = doomed.start(["sleep", "600"])
        os.pwrite(doomed._inner.errors, b"no memory\n", 0)  # type: ignore[attr-defined]
        os.kill(doomed._inner.pid, signal.SIGKILL)  # type: ignore[attr-defined]

        with pytest.raises(SandboxLost, match="the emulator: no memory"):
            run.wait(timeout_s=PATIENCE_S)


def test_whoever_is_killed_leaves_no_machine() -> None:
    require_machines()
    argv = [sys.executable, "-c", CALLER, str(guest_kernel()), cache_dir()]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as caller:
        assert caller.stdout is not None
        emulator = os.pidfd_open(int(caller.stdout.readline()))
        caller.kill()

    poll = select.poll()
    poll.register(emulator, select.POLLIN)
    assert poll.poll(PATIENCE_S * 1000)
    os.close(emulator)


def test_emulation_is_not_what_is_meant_by_strong_alone(backend: MicrovmBackend) -> None:
    spec = SandboxSpec(tier=STRONG)
    if backend.machines().accelerator == qemu.KVM:
        backend.provision_unasked(spec).terminate()
        return

    with pytest.raises(BackendUnavailable, match="KVM"):
        backend.provision_unasked(spec)


def test_without_a_kernel_there_is_no_machine(tmp_path: Path) -> None:
    report = MicrovmBackend(kernel_place=str(tmp_path), cache_dir=str(tmp_path)).report()

    assert not report.available
    assert report.protections[0].fix
    with pytest.raises(BackendUnavailable):
        kernel.find(str(tmp_path))


def test_a_kernel_without_its_modules_is_none(tmp_path: Path) -> None:
    (tmp_path / "boot").mkdir()
    (tmp_path / "boot/vmlinuz-9.9").write_bytes(b"")

    with pytest.raises(BackendUnavailable, match="fuse"):
        kernel.find(str(tmp_path))


def test_machines_that_others_could_change_are_not_used(tmp_path: Path) -> None:
    require_machines()
    place = tmp_path / "machines"
    machines = booted.Machines(str(place), kernel.find(guest_kernel()), qemu.find(), qemu.TCG)
    machines.prepare()  # the control
    place.chmod(0o777)

    with pytest.raises(IsolationError):
        machines.prepare()
