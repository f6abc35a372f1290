"""Ringfence and Ray in one process: the library inside a task, and the refusal of another Ray."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import ray


@ray.remote
def _hello() -> str:
    from ringfence import Sandbox

    with Sandbox.create() as sandbox:
        return sandbox.exec(["echo", "from a task"]).stdout_text


def test_a_task_has_a_sandbox(cluster: Any) -> None:
    assert "from a task\n" == ray.get(_hello.remote())


def test_another_ray_is_refused_in_words() -> None:
    code = "import ray; ray.__version__ = '3.1.0'; import ringfence.ray"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert 1 == ran.returncode
    assert "tried with Ray 2.60, and this is Ray 3.1.0" in ran.stderr
