"""A child process that changes itself: what it does for good does not stay with the tests."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from typing import Any

from ringfence.linux import namespaces


def result_of(function: Callable[[], Any]) -> Any:
    """What the function returns in a child, in JSON's types; what it raises fails the test."""
    reading, writing = os.pipe()
    pid = namespaces.fork_with(0)
    if pid == 0:
        _answer(function, writing)
    os.close(writing)
    with open(reading, encoding="utf-8") as file:
        said = file.read()
    os.waitpid(pid, 0)
    assert said, "the child ended without an answer"
    error, value = json.loads(said)
    assert not error, error
    return value


def _answer(function: Callable[[], Any], writing: int) -> None:
    try:
        said = json.dumps(["", function()])
    except BaseException:  # noqa: BLE001  it is told to who waits
        said = json.dumps([traceback.format_exc(), None])
    os.write(writing, said.encode())
    os._exit(0)


def alone(flags: int) -> None:
    """Enter new namespaces with every right in them, whoever we are."""
    namespaces.unshare(flags | (0 if os.geteuid() == 0 else namespaces.CLONE_NEWUSER))


def status_of(name: str) -> str:
    """A line of this process's /proc/self/status."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(line for line in file if line.startswith(f"{name}:")).partition(":")[2].strip()
