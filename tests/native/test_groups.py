"""Supplementary groups of whoever creates sandboxes: no process of a sandbox has them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from tests.features import require

pytestmark = [pytest.mark.root, pytest.mark.full]

# Prints the groups of the caller, and those of each process of its sandbox by name: those of our user serve it.
_SCRIPT = """
import json, os, sys
from pathlib import Path
from ringfence import Sandbox
from tests.native.outside import descendants_of, until

def status(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {line.partition(":")[0]: line.partition(":")[2].split() for line in lines}

os.setgroups([4242, 4343])
with Sandbox.create(backend=sys.argv[1]) as sandbox:
    running = [sandbox.start(["sleep", "1000"], user=user) for user in json.loads(sys.argv[2])]
    with sandbox.files.watch("/tmp"):
        look = lambda: [status(pid) for pid in descendants_of(os.getpid())]
        until(lambda: len(running) == sum(each["Name"] == ["sleep"] for each in look()))
        found = [[*each["Name"], *each["Groups"]] for each in look() if each["Uid"] != ["0"] * 4]
print(json.dumps([os.getgroups(), sorted(found)]))
"""


@pytest.mark.parametrize(
    ("backend", "users", "names"),
    [
        ("native", [None, "root", "1500"], ["ringfence"] * 3 + ["ringfence-init"] + ["sleep"] * 3),
        ("landlock", [None], ["ringfence-guard", *["ringfence-init"] * 2, "sleep"]),
    ],
)
def test_no_process_of_a_sandbox_has_the_callers_groups(
    backend: str, users: list[str | None], names: list[str]
) -> None:
    """PID 1, agents of other users, a helper for files, and programs of each."""
    require({"native": "user namespaces"}.get(backend, backend))
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, backend, json.dumps(users)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )

    assert "" == done.stderr
    own, found = json.loads(done.stdout)
    assert [4242, 4343] == own
    assert [] == [each for each in found if len(each) > 1]
    assert Counter(names) <= Counter(name for (name,) in found), "all were looked at"
