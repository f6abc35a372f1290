"""Limits are lowered to what was asked for, and never raised; in a process of their own."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.linux.child import result_of

import ringfence
from ringfence.launcher import lockdown
from ringfence.launcher.pid1 import notifications
from ringfence.linux import libc, privileges, seccomp

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


def test_a_filter_that_keeps_an_agent_from_becoming_its_user_is_known_before_any_program() -> None:
    def inside() -> list[int]:
        plan: Any = {"uid": os.getuid()}
        becoming = lockdown.Becoming(plan)
        code = notifications.program(
            [([(0, libc.number("setresuid"))], seccomp.RET_ERRNO | errno.EXDEV)]
        )
        found = [number_of(becoming.check)]
        privileges.set_no_new_privs()
        seccomp.install_filter(code)
        return [*found, number_of(becoming.check)]

    assert [0, errno.EXDEV] == result_of(inside)


def number_of(function: Callable[[], None]) -> int:
    """The number with which it is refused; 0: it is not."""
    try:
        function()
    except OSError as exc:
        return exc.errno or 0
    return 0
