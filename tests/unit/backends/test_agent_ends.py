"""What an agent reports once its host has hung up: nothing, as the sandbox is being ended."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.guest.agent import Agent

pytestmark = pytest.mark.anyone


@pytest.mark.parametrize("hangs_up", [False, True])
def test_what_ends_after_the_host_has_hung_up_is_not_reported(hangs_up: bool) -> None:
    """The programs may be killed while the agent takes in the end of another one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    signals, raise_one = os.pipe()
    os.write(raise_one, b"x")
    settled: list[str] = []

    def take() -> None:
        execs.has_ended = True
        if hangs_up:
            ours.shutdown(socket.SHUT_RDWR)

    def settle() -> None:
        settled.append("reported")
        execs.has_ended = False
        ours.shutdown(socket.SHUT_RDWR)

    execs = SimpleNamespace(take=take, settle=settle, has_ended=False)
    execs.enforce_deadlines = lambda: None
    agent: Any = Agent.__new__(Agent)
    agent.control, agent.signal_fd, agent.execs = theirs, signals, execs
    agent.groups = SimpleNamespace(prepare=lambda: None)
    agent.watchdog = SimpleNamespace(look=lambda: None)
    agent.flows, agent.listeners, agent.file_locks = [], {}, None
    agent._timeout_ms = lambda: 10_000
    agent._serve_one = lambda: False
    with ours, theirs:
        agent.run()
    os.close(signals)
    os.close(raise_one)

    assert ([] if hangs_up else ["reported"]) == settled
