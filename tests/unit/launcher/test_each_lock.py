"""Every step of the lock-down alone, in a process of its own: none is left to the one that stands behind it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ringfence
from ringfence.launcher.wire import AGENT_UID
from ringfence.linux.landlock import abi_version
from ringfence.policy.landlock import plan_landlock

# Each attempt is 0, or the number of the error that refused it.
SCRIPT = """
import array, ctypes, errno, json, os, signal, socket, sys
from ringfence.launcher import lockdown
from ringfence.launcher.pid1 import notifications
from ringfence.linux import libc, privileges, seccomp

libc_ = ctypes.CDLL(None, use_errno=True)
order = json.loads(sys.argv[1])
plan = {"keep_capabilities": False, "uid": 1000, "gid": 1000, "root_capabilities": 0, "no_new_privs": False,
        "landlock": None, "seccomp": b"", "tag_key": 0, "connects": False, **order["plan"]}
plan["seccomp"] = b"" if not plan["seccomp"] else notifications.program(
    [([(0, libc.number("sethostname"))], seccomp.RET_ERRNO | errno.EXDEV)])

def attempt(function, *args):
    try:
        done = function(*args)
    except OSError as exc:
        return exc.errno
    return (ctypes.get_errno() if done == -1 else 0) if isinstance(done, int) else 0

def opened(*args):
    with socket.socket(*args):
        pass

def bound():
    with socket.socket(socket.AF_INET) as sock:
        sock.bind(("127.0.0.1", 0))

def in_a_program(function):
    "The number of the error, in a child that has become the user for good, and its ids."
    says, say = os.pipe()
    pid = os.fork()
    if pid == 0:
        lockdown.Becoming(plan)()
        os.write(say, json.dumps([attempt(function), os.getresuid(), os.getresgid()]).encode())
        os._exit(0)
    os.close(say)
    os.waitpid(pid, 0)
    found = json.loads(os.read(says, 999))
    os.close(says)
    return found

def status():
    with open("/proc/self/status") as file:
        pairs = dict(line.split(":", 1) for line in file)
    death = ctypes.c_int(-1)
    libc_.prctl(2, ctypes.byref(death), 0, 0, 0)
    return {
        "ids": [list(os.getresuid()), list(os.getresgid())],
        **{name: int(pairs[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")},
        "NoNewPrivs": int(pairs["NoNewPrivs"]), "Seccomp": int(pairs["Seccomp"]),
        "securebits": libc_.prctl(27, 0, 0, 0, 0), "dumpable": libc_.prctl(3, 0, 0, 0, 0),
        "death": death.value, "open": len(os.listdir("/proc/self/fd")),
    }

before = status()
if order.get("bound"):
    lockdown.bound(plan)
if order.get("user"):
    lockdown.become_user(plan, plan["uid"], plan["gid"])
if order.get("init"):
    lockdown.become_init(plan)
if order.get("agent"):
    lockdown.become_agent(plan, plan["uid"], plan["gid"])
listener = lockdown.seal(plan, **order["seal"]) if "seal" in order else -1
after = status()
attempts = {
    "inside": lambda: os.mkdir(order["inside"]),
    "outside": lambda: os.mkdir(order["outside"]),
    "signal": lambda: os.kill(os.getppid(), 0),
    "hostname": lambda: libc_.sethostname(b"", -1),
    "netlink": lambda: opened(socket.AF_NETLINK, socket.SOCK_RAW),
    "unix": lambda: opened(socket.AF_UNIX),
    "inet": lambda: opened(socket.AF_INET),
    "pidfd_getfd": lambda: libc_.syscall(libc.number("pidfd_getfd"), -1, 0, 0),
    "bind": lambda: bound(),
    "root": lambda: os.setresuid(0, 0, 0),
    "group": lambda: os.setresgid(0, 0, 0),
    "agent": lambda: [os.setresuid(*ids) for ids in order["becomes"]],
    "scheduling": lambda: os.setpriority(os.PRIO_PROCESS, os.getpid(), 19),
}
results = {}
if listener < 0:
    for name in order.get("attempts", ()):
        results[name] = attempt(attempts[name])
program = in_a_program(lambda: os.kill(os.getppid(), 0)) if order.get("signals") else None
print(json.dumps({"before": before, "after": after, "listener": listener, "attempts": results,
                  "program": program}))
"""

AS_ROOT = pytest.mark.root
NOT_PERMITTED = errno.EPERM


def run(tmp_path: Path, **order: Any) -> dict[str, Any]:
    """What a process is and may do once the steps in `order` are taken."""
    order.setdefault("plan", {})
    order |= {"inside": str(tmp_path / "in" / "made"), "outside": str(tmp_path / "out")}
    (tmp_path / "in").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(order)],
        env={**os.environ, "PYTHONPATH": str(Path(ringfence.__file__).parent.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@AS_ROOT
@pytest.mark.parametrize(
    ("uid", "mask", "kept"), [(1000, 0, 0), (1000, 0x23, 0), (0, 0, 0), (0, 0x23, 0x23)]
)
def test_nothing_executed_gains_what_is_not_in_the_bounding_set(
    tmp_path: Path, uid: int, mask: int, kept: int
) -> None:
    found = run(tmp_path, bound=True, plan={"uid": uid, "root_capabilities": mask})

    assert found["before"]["CapBnd"] & 0x23 == 0x23
    assert (kept, 0) == (found["after"]["CapBnd"], found["after"]["CapAmb"])
    assert found["before"]["CapEff"] == found["after"]["CapEff"]


@AS_ROOT
@pytest.mark.parametrize(
    ("uid", "mask", "kept"), [(1000, 0, 0), (1000, 0x23, 0), (0, 0, 0), (0, 0x23, 0x23)]
)
def test_a_user_is_one_for_good_and_has_no_capability(
    tmp_path: Path, uid: int, mask: int, kept: int
) -> None:
    """Of the bounding set, which comes first, nothing is needed for that."""
    plan = {"uid": uid, "gid": uid, "root_capabilities": mask}
    order = {"plan": plan, "attempts": ["root", "group"]}
    found = run(tmp_path, user=True, **order)
    after = found["after"]

    assert [[uid] * 3] * 2 == after["ids"]
    assert [kept, kept, 0] == [after[name] for name in ("CapEff", "CapPrm", "CapInh")]
    assert (0 if kept else 0xEF) == after["securebits"]
    if uid:
        assert {"root": NOT_PERMITTED, "group": NOT_PERMITTED} == found["attempts"]


KILL, TRACE = 1 << 5, 1 << 19  # of capabilities(7)


@AS_ROOT
@pytest.mark.parametrize("connects", [False, True])
@pytest.mark.parametrize(("uid", "mask"), [(1000, 0), (1000, 0x23), (0, 0), (0, 0x3)])
def test_an_agent_has_ids_by_which_no_program_of_it_may_signal_it(
    tmp_path: Path, uid: int, mask: int, connects: bool
) -> None:
    """Both that kill(2) looks at, and the group that is not the number of the user."""
    plan = {"uid": uid, "gid": 1001, "root_capabilities": mask, "connects": connects}
    found = run(tmp_path, agent=True, signals=not mask, plan=plan)
    after, root = found["after"], mask if uid == 0 else 0

    assert [[AGENT_UID, uid, AGENT_UID], [1001] * 3] == after["ids"]
    kept = root | (KILL if root else 0) | (TRACE if connects else 0)
    assert [kept, kept, 0] == [after[name] for name in ("CapEff", "CapPrm", "CapInh")]
    assert (0 if root else 0xEF) == after["securebits"]
    if not mask:
        assert [NOT_PERMITTED, [uid] * 3, [1001] * 3] == found["program"]


@AS_ROOT
def test_a_program_may_signal_a_process_with_its_own_ids(tmp_path: Path) -> None:
    """The control of the test above: what it starts may, unless the ids differ."""
    found = run(tmp_path, user=True, signals=True, plan={"gid": 1001})

    assert [0, [1000] * 3, [1001] * 3] == found["program"]


@AS_ROOT
@pytest.mark.parametrize(
    ("uid", "mask", "kept"), [(1000, 0, 0), (1000, 0x3, 0), (0, 0, 0), (0, 0x3, 0x3 | KILL)]
)
def test_pid_1_may_end_what_became_another_user_and_is_no_more_than_its_user(
    tmp_path: Path, uid: int, mask: int, kept: int
) -> None:
    plan = {"uid": uid, "gid": 1001, "root_capabilities": mask}
    after = run(tmp_path, init=True, plan=plan)["after"]

    assert [[uid] * 3, [1001] * 3] == after["ids"]
    assert [kept, kept, 0] == [after[name] for name in ("CapEff", "CapPrm", "CapInh")]


@AS_ROOT
@pytest.mark.parametrize("step", ["user", "init", "agent"])
def test_where_capabilities_are_kept_each_of_them_is_its_user_all_the_same(
    tmp_path: Path, step: str
) -> None:
    plan = {"keep_capabilities": True, "gid": 1001, "root_capabilities": 0x3, "connects": True}
    found = run(tmp_path, plan=plan, **{step: True})

    assert [[1000] * 3, [1001] * 3] == found["after"]["ids"]
    assert found["before"]["CapEff"] == found["after"]["CapEff"] > 0
    assert 0x04 == found["after"]["securebits"]


@AS_ROOT
@pytest.mark.parametrize("is_agent", [True, False])
@pytest.mark.parametrize("mask", [0, 0x80])
def test_root_inside_may_become_anybody_but_an_agent(
    tmp_path: Path, mask: int, is_agent: bool
) -> None:
    """And have no agent wait, whose number PID 1 does not have."""
    results = []
    for place in range(3):
        ids = [-1, -1, -1]
        ids[place] = AGENT_UID
        plan = {"no_new_privs": True, "seccomp": "y", "root_capabilities": mask}
        attempts = {"attempts": ["agent", "scheduling"], "becomes": [ids]}
        (tmp_path / f"{place}").mkdir()
        found = run(tmp_path / f"{place}", seal={"is_agent": is_agent}, plan=plan, **attempts)
        results.append(found["attempts"])

    expected = {
        "agent": NOT_PERMITTED if mask else 0,
        "scheduling": NOT_PERMITTED if is_agent else 0,
    }
    assert [expected] * 3 == results


@AS_ROOT
def test_where_capabilities_are_kept_on_purpose_they_are(tmp_path: Path) -> None:
    """The control of what the steps above take away."""
    found = run(tmp_path, bound=True, user=True, plan={"keep_capabilities": True})

    assert found["before"]["CapEff"] == found["after"]["CapEff"] > 0
    assert found["before"]["CapBnd"] == found["after"]["CapBnd"]


@pytest.mark.parametrize("with_parent", [True, False])
def test_a_sealed_process_dies_with_its_parent_where_it_is_to(
    tmp_path: Path, with_parent: bool
) -> None:
    after = run(tmp_path, seal={"with_parent": with_parent})["after"]

    assert (9 if with_parent else 0) == after["death"]


@AS_ROOT
def test_it_dies_with_its_parent_although_it_has_changed_its_ids(tmp_path: Path) -> None:
    assert 9 == run(tmp_path, bound=True, user=True, seal={})["after"]["death"]


def test_nobody_may_trace_it(tmp_path: Path) -> None:
    found = run(tmp_path, seal={})

    assert (1, 0) == (found["before"]["dumpable"], found["after"]["dumpable"])


@pytest.mark.parametrize("wanted", [True, False])
def test_no_new_privileges_alone(tmp_path: Path, wanted: bool) -> None:
    found = run(tmp_path, seal={}, plan={"no_new_privs": wanted})
    before, after = (found[when]["NoNewPrivs"] for when in ("before", "after"))

    assert after == (1 if wanted else before)  # the tests of an ordinary user are begun with it


def test_landlock_alone(tmp_path: Path) -> None:
    """Without the mounts and the filter, which would refuse most of it as well."""
    abi = abi_version()
    if abi < 2:
        pytest.skip("needs Landlock")
    plan = plan_landlock(abi, writable=[str(tmp_path / "in")])
    rules = [plan.handled_fs, plan.handled_net, plan.scoped, abi, plan.rules]
    attempts = ["inside", "outside", "signal"]
    without = run(tmp_path, seal={}, plan={"no_new_privs": True}, attempts=attempts)
    (tmp_path / "out").rmdir()
    (tmp_path / "in" / "made").rmdir()
    (tmp_path / "in").rmdir()
    plan_of_it = {"no_new_privs": True, "landlock": rules}
    found = run(tmp_path, seal={}, plan=plan_of_it, attempts=attempts)

    assert {"inside": 0, "outside": 0, "signal": 0} == without["attempts"]
    assert 0 == found["after"]["Seccomp"]
    refused_signal = NOT_PERMITTED if abi >= 6 else 0
    assert {"inside": 0, "outside": errno.EACCES, "signal": refused_signal} == found["attempts"]
    assert found["before"]["open"] == found["after"]["open"], "the rules are still open"


@pytest.mark.parametrize("network", [True, False])
def test_landlock_alone_refuses_ports_where_there_is_no_network(
    tmp_path: Path, network: bool
) -> None:
    abi = abi_version()
    if abi < 4:
        pytest.skip("needs Landlock for the network, Linux 6.7")
    plan = plan_landlock(abi, writable=[], network=network)
    rules = [plan.handled_fs, plan.handled_net, plan.scoped, abi, plan.rules]
    plan_of_it = {"no_new_privs": True, "landlock": rules}
    found = run(tmp_path, seal={}, plan=plan_of_it, attempts=["bind"])

    assert {"bind": 0 if network else errno.EACCES} == found["attempts"]


@pytest.mark.parametrize(
    ("connects", "refused"),
    [
        (False, {"netlink": errno.EAFNOSUPPORT, "unix": 0, "pidfd_getfd": errno.EBADF}),
        (
            True,
            {
                "netlink": errno.EAFNOSUPPORT,
                "unix": errno.EAFNOSUPPORT,
                "pidfd_getfd": NOT_PERMITTED,
            },
        ),
    ],
)
def test_where_nobody_answers_what_would_be_asked_is_refused(
    tmp_path: Path, connects: bool, refused: dict[str, int]
) -> None:
    """And the filter of the plan holds beside it."""
    plan = {"no_new_privs": True, "seccomp": "y", "connects": connects, "tag_key": 1 << 40 | 7}
    found = run(tmp_path, seal={}, plan=plan, attempts=[*refused, "inet", "hostname"])

    assert -1 == found["listener"]
    assert {**refused, "inet": 0, "hostname": errno.EXDEV} == found["attempts"]
    assert 2 == found["after"]["Seccomp"]


def test_who_serves_gets_where_the_others_ask(tmp_path: Path) -> None:
    plan = {"no_new_privs": True, "seccomp": "y"}
    found = run(tmp_path, seal={"serves": True}, plan=plan)

    assert found["listener"] >= 0
    assert found["before"]["open"] + 1 == found["after"]["open"]
