"""How many system calls an exec takes in gVisor, where each is a stop: as gVisor itself tells them."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from ringfence.backends.gvisor.backend import GvisorBackend
from ringfence.backends.gvisor.runsc import Runsc
from ringfence.backends.gvisor.sandbox import GvisorSandbox
from ringfence.launcher.machine_code import vforked
from ringfence.model.spec import STRONG, SandboxSpec
from ringfence.sandbox import Sandbox
from tests.features import require

pytestmark = pytest.mark.full

_RETURNED = re.compile(r" (\w+) X (\w+)\(")
_PATIENCE_S = 60.0


@pytest.fixture
def told(backend: GvisorBackend, monkeypatch: pytest.MonkeyPatch) -> GvisorBackend:
    """One whose gVisor writes down every call of its guests', into its jail."""
    require("root")  # to look into the jail
    flags = Runsc.flags

    def more(self: Runsc, *, rootless: bool, network: bool) -> list[str]:
        said = flags(self, rootless=rootless, network=network)
        return [*said, "--debug", "--strace", "--debug-log=/tmp/"]

    monkeypatch.setattr(Runsc, "flags", more)
    return backend


def _calls(sandbox: GvisorSandbox, ended: int) -> list[tuple[str, str]]:
    """By whom and which, in order, once that many programs have ended and been told of."""
    directory = Path(f"/proc/{sandbox.pid}/root/tmp")
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
        [log] = [each for each in os.listdir(directory) if ".boot." in each]
        text = (directory / log).read_text(errors="replace")
        calls = [(found[1], found[2]) for found in _RETURNED.finditer(text)]
        told_of = [call for call in calls if call == ("agent", "sendmsg")]
        if len(told_of) > ended:  # the first is that it is ready
            return calls
    raise AssertionError("gVisor has not written it down")


def test_an_exec_takes_few(told: GvisorBackend) -> None:
    if not vforked.is_here():
        pytest.skip("another processor")
    spec = SandboxSpec(tier=STRONG)
    inner = told.provision(spec)
    with Sandbox(inner, spec) as sandbox:
        for _ in range(2):
            assert sandbox.exec(["/bin/true"]).ok
        calls = _calls(inner, ended=2)

    last = [at for at, call in enumerate(calls) if call == ("agent", "recvmsg")][-1]
    ours = [name for who, name in calls[last:] if who == "agent"]
    ours = ours[: ours.index("sendmsg") + 1]
    assert "vfork" in ours, "the control: it is the exec that we see"
    assert ours.count("rt_sigaction") <= 2, "what Python ignores, and no more"
    assert len(ours) <= 60, ours  # with a look of the watchdog among them; it was 150
