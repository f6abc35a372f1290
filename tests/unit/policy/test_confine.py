"""What a process of ours gives up before it reads an image's layers or a snapshot's stream, step by step.

Each attempt runs in a process of its own, with the confinement and, as the control, without.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ringfence.linux import landlock
from ringfence.policy.seccomp import MACHINES

_SCRIPT = """
import ctypes, errno, json, os, resource, socket, stat, sys
from ringfence.policy import confine as module

target, confined, numbers, keep, whiteouts = json.loads(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
status = os.open("/proc/self/status", os.O_RDONLY)
held = os.open(target, os.O_RDONLY)
beside = os.path.dirname(target)
stranger = os.fork()
if not stranger:
    os.read(0, 1)
    os._exit(0)
def opened(fd):
    try:
        os.fstat(fd)
        return True
    except OSError:
        return False
before = [fd for fd in range(256) if opened(fd)]
if confined:
    module.confine(target, keep=keep, whiteouts=whiteouts)
after = [fd for fd in range(256) if opened(fd)]
lines = os.pread(status, 1 << 16, 0).decode().splitlines()
facts = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

def tried(action):
    try:
        action()
    except OSError as exc:
        return errno.errorcode[exc.errno]
    return "done"

def call(name, *arguments):
    ctypes.set_errno(0)
    libc.syscall(numbers[name], *map(ctypes.c_long, arguments))
    return errno.errorcode.get(ctypes.get_errno(), "done")

print(json.dumps({
    "facts": {name: facts[name] for name in ("CapEff", "CapPrm", "CapInh", "NoNewPrivs", "Seccomp")},
    "filters": int(facts.get("Seccomp_filters", confined)),
    "core": resource.getrlimit(resource.RLIMIT_CORE),
    "memory": resource.getrlimit(resource.RLIMIT_AS),
    "descriptors": [before, after],
    "calls": {
        "socket": call("socket", 1, 15, 0),
        "socketpair": call("socketpair", 1, 15, 0, 0),
        "execve": call("execve", 0, 0, 0),
        "execveat": call("execveat", -1, 0, 0, 0, 0),
        "ptrace": call("ptrace", 17, 0x7FFFFFF0, 0, 0),
        **({name: call(name) for name in ("fork", "vfork") if confined and name in numbers}),
    },
    "make inside": tried(lambda: os.mkdir(f"{target}/made")),
    "write inside": tried(lambda: os.close(os.open(f"{target}/file", os.O_CREAT | os.O_RDWR))),
    "link inside": tried(lambda: os.symlink("made", f"{target}/link")),
    "make outside": tried(lambda: os.mkdir(f"{beside}/made")),
    "write outside": tried(lambda: os.close(os.open(f"{beside}/file", os.O_CREAT | os.O_RDWR))),
    "read outside": tried(lambda: os.close(os.open("/etc/hosts", os.O_RDONLY))),
    "list outside": tried(lambda: os.listdir(beside)),
    "set-id": tried(lambda: os.chmod(f"{target}/file", 0o4755)),
    "mode": tried(lambda: os.chmod(f"{target}/file", 0o600)),
    "fifo": tried(lambda: os.mkfifo(f"{target}/fifo")),
    "whiteout": tried(lambda: os.mknod(f"{target}/whiteout", stat.S_IFCHR | 0o600, os.makedev(0, 0))),
    "signal": tried(lambda: os.kill(stranger, 0)),
}))
sys.stdout.flush()
os.kill(os.getpid(), 9)  # whatever the confinement is like: nothing of Python's end is of interest
"""


@cache
def _found(target: str, *, confined: bool, keep: int = 0, whiteouts: bool = False) -> Any:
    numbers = dict(MACHINES[os.uname().machine].numbers)
    asked = json.dumps([target, confined, numbers, keep, whiteouts])
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, asked],
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    made = []
    for name in ("free", "confined", "with whiteouts", "with a capability"):
        directory = tmp_path_factory.mktemp("place") / name
        directory.mkdir()
        made.append(str(directory))
    return made


def test_limits_and_rights_are_given_up(places: list[str]) -> None:
    free, found = _found(places[0], confined=False), _found(places[1], confined=True)

    # Whoever runs the tests may be confined already.
    assert found["filters"] == free["filters"] + 1, "the control"
    assert ("1", "2") == (found["facts"]["NoNewPrivs"], found["facts"]["Seccomp"])
    for name in ("CapEff", "CapPrm", "CapInh"):
        assert 0 == int(found["facts"][name], 16), name
    if not os.geteuid():
        assert int(free["facts"]["CapEff"], 16)
    hard = free["core"][1]
    assert [min(1, abs(hard))] * 2 == found["core"], (
        "1: with 0 a core_pattern with a pipe would run"
    )
    assert [2 << 30] * 2 == found["memory"] != free["memory"]


def test_no_descriptor_is_left_of_it(places: list[str]) -> None:
    before, after = _found(places[1], confined=True)["descriptors"]
    assert before == after


def test_no_call_is_left_that_starts_a_program_or_a_process_or_makes_a_socket(
    places: list[str],
) -> None:
    free, found = _found(places[0], confined=False), _found(places[1], confined=True)

    assert {"EPERM"} == {*found["calls"].values()}, found["calls"]
    assert "EPERM" not in free["calls"].values()


@pytest.mark.skipif(landlock.abi_version() < 2, reason="needs Landlock")
def test_only_the_target_is_written_and_nothing_is_read(places: list[str]) -> None:
    free, found = _found(places[0], confined=False), _found(places[1], confined=True)
    inside = ("make inside", "write inside", "link inside", "mode", "fifo")
    outside = ("make outside", "write outside", "read outside", "list outside")

    assert {"done"} == {free[name] for name in (*inside, *outside)}
    assert {"done"} == {found[name] for name in inside}
    assert dict.fromkeys(outside, "EACCES") == {name: found[name] for name in outside}


@pytest.mark.skipif(landlock.abi_version() < 6, reason="needs Landlock of ABI 6")
def test_no_other_process_is_signalled(places: list[str]) -> None:
    assert "done" == _found(places[0], confined=False)["signal"]
    assert "done" != _found(places[1], confined=True)["signal"]


def test_no_file_gets_the_rights_of_its_owner_for_others(places: list[str]) -> None:
    assert "done" == _found(places[0], confined=False)["set-id"]
    assert "EPERM" == _found(places[1], confined=True)["set-id"]


def test_whiteouts_are_made_where_they_are_asked_for(places: list[str]) -> None:
    """They are character devices 0, 0, which every user may make; in an image's layer they are files."""
    assert "done" == _found(places[0], confined=False)["whiteout"]
    assert _found(places[1], confined=True)["whiteout"] in ("EPERM", "EACCES")
    asked = _found(places[2], confined=True, whiteouts=True)
    assert "done" == asked["whiteout"]
    assert {"EPERM"} == {*asked["calls"].values()}, "and nothing else is allowed with it"


@pytest.mark.root
def test_capabilities_that_are_to_stay_do_and_no_other(places: list[str]) -> None:
    keep = 0b1011  # CHOWN, DAC_OVERRIDE, FOWNER
    found = _found(places[3], confined=True, keep=keep)["facts"]
    assert (keep, keep, 0) == tuple(int(found[name], 16) for name in ("CapEff", "CapPrm", "CapInh"))


def test_its_parts_stand_each_for_itself(tmp_path: Path) -> None:
    """The filter refuses devices by itself where no whiteouts are asked for, and so does Landlock."""
    script = """
import os, stat, struct, sys
from ringfence.linux import privileges, seccomp
from ringfence.policy import confine
target, part, whiteouts = sys.argv[1], sys.argv[2], sys.argv[3] == "1"
if part == "filter":
    program = confine._filter(whiteouts=whiteouts)
    privileges.set_no_new_privs()
    seccomp.install_filter(program)
else:  # all of it, with a filter that allows everything
    confine._filter = lambda **_: struct.pack("=HBBI", 6, 0, 0, 0x7FFF0000)
    confine.confine(target, whiteouts=whiteouts)
try:
    os.mknod(f"{target}/{part}{whiteouts}", stat.S_IFCHR | 0o600, os.makedev(0, 0))
    print("done")
except OSError as exc:
    print(exc.strerror)
"""
    for part in ("filter", *(("landlock",) if landlock.abi_version() >= 2 else ())):
        said = []
        for whiteouts in "01":
            argv = [sys.executable, "-c", script, str(tmp_path), part, whiteouts]
            said.append(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)
        assert "done\n" == said[1] != said[0], part


@pytest.mark.skipif(landlock.abi_version() < 4, reason="needs Landlock of ABI 4")
@pytest.mark.parametrize("restricts", [False, True])
def test_ports_are_refused_by_landlock_too(tmp_path: Path, restricts: bool) -> None:
    """A socket that was open before the filter came would be stopped by nothing else."""
    script = """
import socket, sys
from ringfence.linux import privileges
from ringfence.policy import confine
made = socket.socket()
privileges.set_no_new_privs()
if sys.argv[2] == "True":
    confine._restrict_files((sys.argv[1],), 0)
try:
    made.bind(("127.0.0.1", 0))
    print("done")
except OSError as exc:
    print(type(exc).__name__)
"""
    argv = [sys.executable, "-c", script, str(tmp_path), str(restricts)]
    said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert ("PermissionError\n" if restricts else "done\n") == said
