"""The limit of memory around launchers and without namespaces: by a cgroup, or sampled by the agent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ringfence import Sandbox
from tests.features import require

MIB = 1 << 20
GROWS = "kept = []\nwhile True: kept.append(b'x' * (1 << 20))"
# 16 processes that see 100 MiB each, which they share.
SHARE = """
import os
kept = b"x" * (100 << 20)
read, write = os.pipe()
for _ in range(16):
    if not os.fork():
        os.close(write)
        os.read(read, 1)
        os._exit(kept[-1] != ord("x"))
os.close(read)
from time import monotonic, sleep
until = monotonic() + 1  # some twenty samples
while monotonic() < until: sleep(0.01)
os.close(write)
print(sum(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(16)))
"""


@pytest.fixture(name="sandbox", params=["bubblewrap", "landlock"])
def fixture_sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    require({"bubblewrap": "bwrap"}.get(request.param, request.param))
    with Sandbox.create(backend=request.param, limits={"memory_bytes": 256 * MIB}) as made:
        yield made


def test_a_command_that_grows_ends_and_says_why(sandbox: Sandbox) -> None:
    result = sandbox.exec(["/usr/bin/python3", "-c", GROWS], timeout_s=60)

    assert ("oom", 9) == (result.killed_by, result.signal)
    assert b"on\n" == sandbox.exec(["echo", "on"]).stdout
    (limit,) = (each for each in sandbox.protections() if each.name == "memory_limit")
    assert limit.status == "enforced" or "sampled every 50 ms" in limit.why


@pytest.mark.full
def test_pages_that_forks_share_count_once(sandbox: Sandbox) -> None:
    result = sandbox.exec(["/usr/bin/python3", "-c", SHARE], timeout_s=60)

    assert (b"0\n", None) == (result.stdout, result.killed_by), result.stderr
