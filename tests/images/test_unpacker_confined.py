"""What unpacks a stranger's layers is confined, whatever the kernel has."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from ringfence.policy.seccomp import MACHINES

pytestmark = pytest.mark.full

_SCRIPT = """
import json, os, resource, socket, sys
from ringfence.images import unpacker
from ringfence.linux import landlock

target, abi, confined = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"
if abi >= 0:
    landlock.abi_version = lambda: abi
status = os.open("/proc/self/status", os.O_RDONLY)
outside = os.path.dirname(target)
if confined:
    unpacker.confine(target)
lines = os.pread(status, 1 << 16, 0).decode().splitlines()

def attempt(action):
    try:
        action()
    except OSError as exc:
        return type(exc).__name__
    return "done"

print(json.dumps({
    "filter": next(line.split()[1] for line in lines if line.startswith("Seccomp:")),
    "core": resource.getrlimit(resource.RLIMIT_CORE)[0],
    "socket": attempt(lambda: socket.socket()),
    "program": attempt(lambda: os.execv("/bin/false", ["false"]) if confined else None),
    "inside": attempt(lambda: os.mkdir(f"{target}/made-{confined}")),
    "outside": attempt(lambda: os.mkdir(f"{outside}/made-{confined}-{abi}")),
}))
"""


def _found(target: Path, abi: int, *, confined: bool) -> dict[str, object]:
    argv = [sys.executable, "-c", _SCRIPT, str(target), str(abi), str(confined)]
    said = subprocess.run(argv, capture_output=True, check=True, text=True)
    found: dict[str, object] = json.loads(said.stdout)
    return found


@pytest.mark.parametrize("abi", [-1, 0], ids=["as-it-is", "without-landlock"])
def test_it_makes_no_socket_and_starts_no_program(tmp_path: Path, abi: int) -> None:
    target = tmp_path / "target"
    target.mkdir()
    control = _found(target, abi, confined=False)
    assert ("0", "done", "done") == (control["filter"], control["socket"], control["outside"])

    found = _found(target, abi, confined=True)

    assert ("2", "PermissionError") == (found["filter"], found["socket"])
    _soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    assert ("PermissionError", min(1, abs(hard))) == (found["program"], found["core"])
    assert "done" == found["inside"], "and it can do its work"
    if abi < 0:
        assert "PermissionError" == found["outside"]


# Arguments with which a call that is allowed fails for another reason: nothing is started or traced.
_REFUSED = {
    "execve": (0, 0, 0),
    "execveat": (-1, 0, 0, 0, 0),
    "ptrace": (17, 0x7FFFFFF0, 0, 0),  # PTRACE_DETACH, of nobody
    "socket": (1, 0xF, 0),
    "socketpair": (1, 0xF, 0, 0),
}
_CALLS = """
import ctypes, json, sys
from ringfence.images import unpacker

target, calls, confined = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3] == "True"
libc = ctypes.CDLL(None, use_errno=True)
if confined:
    unpacker.confine(target)

def error(number, arguments):
    ctypes.set_errno(0)
    libc.syscall(number, *map(ctypes.c_long, arguments))
    return ctypes.get_errno()

print(json.dumps({name: error(*call) for name, call in calls.items()}))
"""


def test_no_call_that_starts_a_program_or_makes_a_socket_is_left(tmp_path: Path) -> None:
    numbers = MACHINES[os.uname().machine].numbers
    calls = json.dumps({name: (numbers[name], given) for name, given in _REFUSED.items()})

    def errors(*, confined: bool) -> dict[str, int]:
        argv = [sys.executable, "-c", _CALLS, str(tmp_path), calls, str(confined)]
        said = subprocess.run(argv, capture_output=True, check=True, text=True)
        found: dict[str, int] = json.loads(said.stdout)
        return found

    assert dict.fromkeys(_REFUSED, errno.EPERM) == errors(confined=True)
    assert errno.EPERM not in errors(confined=False).values()
