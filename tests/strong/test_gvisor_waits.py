"""gVisor's processes do not wait for the host's kernel where one does not have to; a guest loses nothing."""

from __future__ import annotations

import errno
import os

import pytest

from ringfence import Sandbox
from ringfence.backends.gvisor import runsc
from ringfence.backends.gvisor.backend import GvisorBackend
from ringfence.backends.gvisor.inspection import Inspection
from ringfence.backends.local.jailed.bare_jail import filter_of_jail
from ringfence.backends.local.launched import last_words
from ringfence.model.spec import STRONG, SandboxSpec
from ringfence.policy.seccomp import MACHINES, SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO
from tests.unit.policy import simulator

pytestmark = pytest.mark.full

HERE = MACHINES[os.uname().machine]
MEMBARRIER = HERE.numbers["membarrier"]
QUERY, GLOBAL, REGISTER = 0, 1, 16


def test_the_table_of_descriptors_has_its_size_from_the_start(backend: GvisorBackend) -> None:
    sandbox = backend.provision(SandboxSpec(tier=STRONG))
    try:
        seen = Inspection(sandbox)
        sizes = [int(process.status["FDSize"]) for process in (*seen.kernel, *seen.server)]
        open_here = os.listdir(f"/proc/{seen.kernel[0].pid}/fd")
    finally:
        sandbox.terminate()

    assert sizes
    assert min(sizes) >= runsc.DESCRIPTORS
    # The control: no process has so many open that its table would have had to grow to that.
    assert len(open_here) < runsc.DESCRIPTORS // 2


def test_only_registering_for_a_barrier_of_its_own_is_refused() -> None:
    with_rule = simulator.decode(filter_of_jail(runsc.NO_REGISTERING))
    without = simulator.decode(filter_of_jail())

    def asks(program: list[simulator.Instruction], command: int) -> int:
        return simulator.run(program, MEMBARRIER, (command,), HERE.audit_arch).value

    assert SECCOMP_RET_ERRNO | errno.ENOSYS == asks(with_rule, REGISTER)
    assert {SECCOMP_RET_ALLOW} == {asks(with_rule, each) for each in (QUERY, GLOBAL)}
    assert SECCOMP_RET_ALLOW == asks(without, REGISTER)


def test_what_it_says_of_that_is_not_why_it_ended() -> None:
    errors = os.memfd_create("says")
    os.write(
        errors, b"W1 membarrier.go:48] membarrier(REGISTER) failed: not implemented\nno room\n" * 2
    )
    try:
        assert "no room / no room" == runsc.last_words(errors)
        assert "membarrier" in last_words(errors), "the control"
        os.write(errors, b"panic: no thread\n\ngoroutine 1 [running]:\n" + b"stack\n" * 99)
        assert "panic: no thread" == runsc.last_words(errors)
    finally:
        os.close(errors)


def test_a_guest_has_its_barriers(backend: GvisorBackend) -> None:
    """Its kernel offers them where the host's does the global one, which is left."""
    code = (
        f"import ctypes; call = ctypes.CDLL(None).syscall;"
        f"offered = call({MEMBARRIER}, {QUERY}, 0);"
        f"print(offered & {REGISTER}, call({MEMBARRIER}, {REGISTER}, 0))"
    )
    with Sandbox.create(backend=backend) as sandbox:
        result = sandbox.exec(["python3", "-c", code])

    assert (f"{REGISTER} 0\n".encode(), b"") == (result.stdout, result.stderr)
