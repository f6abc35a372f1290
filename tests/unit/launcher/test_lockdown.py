"""Limits are lowered to what was asked for, and never raised; in a process of their own."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import ringfence

INF = resource.RLIM_INFINITY
SCRIPT = """
import json, resource, sys
from ringfence.launcher.lockdown import apply_rlimits
before, soft, hard = json.loads(sys.argv[1])
resource.setrlimit(resource.RLIMIT_CORE, (before, before))
apply_rlimits([(resource.RLIMIT_CORE, soft, hard)])
print(json.dumps(resource.getrlimit(resource.RLIMIT_CORE)))
"""


@pytest.mark.parametrize(
    ("before", "soft", "hard", "after"),
    [
        (1000, 999, 999, [999, 999]),
        (1000, 1000, 1000, [1000, 1000]),
        (1000, 1001, 1001, [1000, 1000]),
        (1000, INF, INF, [1000, 1000]),
        (1000, 7, INF, [7, 1000]),
        (1000, 7, 9, [7, 9]),
        (1000, 10, 9, [9, 9]),
        (1000, INF, 9, [9, 9]),
        (1000, 0, 0, [0, 0]),
        (0, 1, 1, [0, 0]),
    ],
)
def test_a_limit_is_only_ever_lowered(before: int, soft: int, hard: int, after: list[int]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([before, soft, hard])],
        env={**os.environ, "PYTHONPATH": str(Path(ringfence.__file__).parent.parent)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert after == json.loads(done.stdout)
