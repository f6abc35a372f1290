"""A Python process that counts in memory: what a checkpoint saves, and others of it go on from."""

from __future__ import annotations

import json
import time
from typing import Any

from ringfence import Sandbox

PATIENCE_S = 120.0
_COUNTER = """
import json, os, socket, time
kept = os.urandom(8).hex()
count = 0
while True:
    count += 1
    said = {"count": count, "kept": kept, "hostname": socket.gethostname(), "pid": os.getpid(),
            "random": os.urandom(16).hex(), "time": time.time()}
    with open("said.new", "w") as file:
        json.dump(said, file)
    os.rename("said.new", "said")
    time.sleep(0.02)
"""


def start_counting(sandbox: Sandbox) -> None:
    """It goes on without anybody."""
    sandbox.files.write("counter.py", _COUNTER.encode())
    sandbox.exec(["sh", "-c", "/usr/bin/python3 counter.py >log 2>&1 </dev/null &"])


def wait_for(sandbox: Sandbox, count: int) -> dict[str, Any]:
    """What it says once it has come so far."""
    ends = time.monotonic() + PATIENCE_S
    while time.monotonic() < ends:
        text = sandbox.exec(["cat", "said"]).stdout
        said: dict[str, Any] = json.loads(text) if text else {"count": 0}
        if said["count"] >= count:
            return said
    raise AssertionError(f"it did not come as far as {count}")


def check_two(before: dict[str, Any], after: list[dict[str, Any]]) -> None:
    """Both are the same process, with what it had in memory; and yet each is itself."""
    assert {(before["kept"], before["pid"])} == {(said["kept"], said["pid"]) for said in after}
    assert 3 == len({said["hostname"] for said in (before, *after)})
    assert 3 == len({said["random"] for said in (before, *after)})
    assert all(abs(said["time"] - time.time()) < PATIENCE_S for said in after)
