"""A PID 1 that reads nothing: requests to it fail in time, and what they took is bounded."""

from __future__ import annotations

import os
import signal

import pytest

from ringfence import Sandbox
from ringfence.errors import IsolationError
from ringfence.sandbox.process import Process
from tests.native.outside import init_pid

pytestmark = pytest.mark.anyone

REQUESTS = 300
LONG = "x" * 15_000  # a request that long still travels in the socket itself


@pytest.mark.full
def test_requests_to_a_stopped_pid_1_fail_and_those_of_others_do_not(sandbox: Sandbox) -> None:
    pidfd = os.pidfd_open(init_pid(sandbox))
    processes: list[Process] = []
    try:
        assert sandbox.exec(["true"]).ok
        signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
        with pytest.raises(IsolationError, match="agent took no request for"):
            processes.extend(sandbox.start(["true", LONG]) for _ in range(REQUESTS))
        assert len(processes) < REQUESTS
        with Sandbox.create() as other:  # the control
            assert other.exec(["true"]).ok
        signal.pidfd_send_signal(pidfd, signal.SIGCONT)
        assert all(process.wait().exit_code == 0 for process in processes), "none is lost"
        assert sandbox.exec(["true"]).ok, "what was refused leaves nothing behind"
    finally:
        os.close(pidfd)
