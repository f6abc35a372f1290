"""The agent's code is complete: what its modules import of ours goes with it into guests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ringfence.backends.local.agents import agent_code

_LOAD = """
import marshal, sys
loader, modules = marshal.load(open(sys.argv[1], "rb"))
there = {"__name__": "loader"}
exec(loader, there)
there["install"](modules)
for name in modules:
    __import__(name)
print(len(modules))
"""


@pytest.mark.parametrize("machine", [False, True], ids=["in a guest", "in a machine"])
def test_every_module_of_the_agent_loads_without_the_package(machine: bool, tmp_path: Path) -> None:
    code = tmp_path / "agent"
    code.write_bytes(agent_code.packed(machine=machine))

    loaded = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _LOAD, str(code)], capture_output=True, check=False
    )

    assert loaded.stdout.strip().isdigit(), loaded.stderr.decode()
