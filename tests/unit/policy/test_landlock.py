"""Landlock rules: decided for every ABI, and tried on this kernel beside a control."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringfence
from ringfence.linux.landlock import abi_version
from ringfence.policy import landlock
from ringfence.policy.landlock import plan_landlock

SOURCE = Path(ringfence.__file__).parent.parent
ABIS = range(landlock.NEWEST_ABI + 3)
READ = landlock.EXECUTE | landlock.READ_FILE | landlock.READ_DIR
PATHS = st.sampled_from(["/tmp", "/home/sandbox", "/mnt/memory", "/work", "/work/.git", "/dev/shm"])


@pytest.mark.parametrize(
    ("abi", "handled_fs"),
    [
        (0, 0),
        (1, 0),
        (2, 0x3FFF),
        (3, 0x7FFF),
        (4, 0x7FFF),
        (5, 0xFFFF),
        (6, 0xFFFF),
        (8, 0xFFFF),
        (9, 0x1FFFF),
        (10, 0x1FFFF),
        (99, 0x1FFFF),
    ],
)
def test_an_abi_handles_what_it_knows(abi: int, handled_fs: int) -> None:
    plan = plan_landlock(abi, writable=["/tmp"])

    assert hex(handled_fs) == hex(plan.handled_fs)
    assert 0 == plan.handled_net
    assert (3 if abi >= 6 else 0) == plan.scoped
    assert plan.is_empty == (abi < 2)
    assert plan.refuses_host_sockets == (abi >= 9)
    assert plan.refuses_abstract_sockets == (abi >= 6)


@pytest.mark.parametrize(("abi", "handled_net"), [(3, 0), (4, 3), (9, 3), (10, 15)])
def test_no_network_handles_ports(abi: int, handled_net: int) -> None:
    assert handled_net == plan_landlock(abi, writable=[], network=False).handled_net


@pytest.mark.parametrize(
    ("abi", "missing"),
    [
        (0, ["no Landlock"]),
        (1, ["any rule", "truncating", "ioctl", "signals", "unix sockets by path"]),
        (2, ["truncating", "ioctl", "signals", "unix sockets by path"]),
        (4, ["ioctl", "signals", "unix sockets by path"]),
        (6, ["unix sockets by path"]),
        (8, ["unix sockets by path"]),
        (9, []),
        (10, []),
    ],
)
def test_what_an_abi_cannot_is_said(abi: int, missing: list[str]) -> None:
    said = plan_landlock(abi, writable=["/tmp"]).missing

    assert len(missing) == len(said)
    assert all(words in line for words, line in zip(missing, said, strict=True))


def test_the_network_is_said_only_when_it_matters() -> None:
    said = plan_landlock(3, writable=[], network=False).missing

    assert ["TCP", "UDP"] == [line[:3] for line in said if "bind" in line]


def test_reading_everywhere_writing_where_told() -> None:
    rules = dict(plan_landlock(10, writable=["/tmp", "/home/sandbox/"]).rules)

    assert {"/", "/dev", "/tmp", "/home/sandbox"} == set(rules)
    assert READ == rules["/"]
    assert landlock.READ_FILE | landlock.WRITE_FILE | landlock.IOCTL_DEV == rules["/dev"]
    everything = (1 << 15) - 1  # EXECUTE to TRUNCATE
    assert everything & ~landlock.MAKE_CHAR & ~landlock.MAKE_BLOCK == rules["/tmp"]


def test_a_file_gets_only_what_a_file_can_have() -> None:
    """A directory's access on a file is EINVAL."""
    rules = dict(plan_landlock(10, writable=[], writable_files=["/work/notes"]).rules)

    wanted = landlock.EXECUTE | landlock.READ_FILE | landlock.WRITE_FILE | landlock.TRUNCATE
    assert wanted == rules["/work/notes"]


def test_read_only_inside_writable_is_said() -> None:
    plan = plan_landlock(10, writable=["/work"], read_only=["/work/.git", "/data", "/workshop"])

    assert ("read-only /work/.git lies in writable /work: its mount alone keeps it",) == (
        plan.missing
    )


@pytest.mark.parametrize("path", ["/", "//", "/tmp/..", "", "tmp", "/proc", "/proc/sys"])
def test_what_must_not_be_writable(path: str) -> None:
    with pytest.raises(ValueError, match="not a directory of a sandbox"):
        plan_landlock(10, writable=[path])


@pytest.mark.parametrize("path", ["/", "/proc", "/proc/self/mem", "etc/passwd"])
def test_what_must_not_be_a_writable_file(path: str) -> None:
    with pytest.raises(ValueError, match="not a directory of a sandbox"):
        plan_landlock(10, writable=[], writable_files=[path])


@pytest.mark.parametrize(
    ("without", "with_sockets"),
    [
        ([], ["/tmp", "/work", "/work/inner"]),
        (["/work"], ["/tmp"]),  # and what is in it: the rules of both add up
        (["/work/inner"], ["/tmp"]),
        (["/work/inner/"], ["/tmp"]),
        (["/work/in"], ["/tmp", "/work/inner"]),
        (["/tmp", "/wor"], ["/work", "/work/inner"]),
    ],
)
def test_no_sockets_in_a_tree_with_a_directory_of_the_host(
    without: list[str], with_sockets: list[str]
) -> None:
    """Asked after the same without: a decision that is kept must not serve for another question."""
    trees = ["/work", "/tmp", "/work/inner"]
    plan_landlock(10, writable=trees)
    rules = dict(plan_landlock(10, writable=trees, without_sockets=without).rules)

    allowed = sorted(path for path in trees if rules[path] & landlock.MAKE_SOCK)
    assert with_sockets == allowed == sorted(landlock.socket_trees(trees, without))
    assert all(rules[path] & landlock.MAKE_FIFO for path in trees)


@given(st.sampled_from(ABIS), st.sets(PATHS), st.sets(PATHS), st.sets(PATHS), st.booleans())
def test_no_rule_allows_what_is_not_handled(
    abi: int, writable: set[str], files: set[str], read_only: set[str], network: bool
) -> None:
    """The kernel would refuse it with EINVAL."""
    plan = plan_landlock(
        abi, writable=writable, writable_files=files, read_only=read_only, network=network
    )

    assert all(access and access & ~plan.handled_fs == 0 for _, access in plan.rules)
    assert plan.is_empty == (not plan.rules)
    no_devices = landlock.MAKE_BLOCK | landlock.MAKE_CHAR | landlock.RESOLVE_UNIX
    assert not any(access & no_devices for _, access in plan.rules)
    writers = {path for path, access in plan.rules if access & landlock.WRITE_FILE}
    assert writers <= {"/dev", *writable, *files}


# -- on this kernel ----------------------------------------------------------------------------

SCRIPT = """
import json, os, signal, socket, sys, termios
from ringfence.linux.landlock import allow_beneath, create_ruleset, restrict_self
from ringfence.linux.privileges import set_no_new_privs

inside, outside, socket_name, plan = json.loads(sys.argv[1])
os.chdir(inside)
if plan:
    handled_fs, handled_net, scoped, abi, rules = plan
    set_no_new_privs()
    ruleset = create_ruleset(handled_fs, handled_net, scoped, abi=abi)
    for path, access in rules:
        allow_beneath(ruleset, path, access)
    restrict_self(ruleset)

def terminal():
    _, follower = os.openpty()
    return termios.tcgetattr(follower)

def child():
    pid = os.fork()
    if not pid:
        signal.pause()
    os.kill(pid, 9)
    os.waitpid(pid, 0)

def abstract():
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect("\\0" + socket_name)

def tcp():
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).close()

SETTING = "/proc/sys/kernel/domainname"
ACTIONS = {
    "read outside": lambda: open(outside + "/file").read(),
    "list outside": lambda: os.listdir(outside),
    "run": lambda: os.waitstatus_to_exitcode(os.system("true")),
    "write outside": lambda: open(outside + "/file", "r+").close(),
    "make outside": lambda: os.mkdir(outside + "/new"),
    "truncate outside": lambda: os.truncate(outside + "/file", 0),
    "move out": lambda: os.rename("moved", outside + "/moved"),
    "write inside": lambda: open("file", "w").close(),
    "make inside": lambda: os.makedirs("a/b"),
    "move inside": lambda: os.rename("file", "a/b/file"),
    "link inside": lambda: os.link("a/b/file", "file"),
    "fifo inside": lambda: os.mkfifo("fifo"),
    "remove inside": lambda: os.remove("file"),
    "write to a device": lambda: open("/dev/null", "w").write("x"),
    "write to proc": lambda: open("/proc/self/comm", "w").write("x"),
    "write a kernel setting": lambda: os.close(os.open(SETTING, os.O_WRONLY)),
    "terminal": terminal,
    "kill a child": child,
    "signal the parent": lambda: os.kill(os.getppid(), 0),
    "an abstract socket of outside": abstract,
    "tcp": tcp,
}
found = {}
for name, action in ACTIONS.items():
    try:
        action()
        found[name] = "ok"
    except OSError as exc:
        found[name] = type(exc).__name__ if exc.errno != 18 else "EXDEV"
print(json.dumps(found))
"""


def run_script(directory: Path, socket_name: str, *, restricted: bool) -> dict[str, str]:
    """What each action came to, in fresh directories, of which one may be written."""
    inside, outside = directory / "inside", directory / "outside"
    for made in (inside, outside):
        made.mkdir(parents=True)
        (made / "file").write_text("x")
    (inside / "moved").write_text("x")
    abi = abi_version()
    plan = plan_landlock(abi, writable=[str(inside)])
    words = (plan.handled_fs, plan.handled_net, plan.scoped, abi, plan.rules)
    argument = [str(inside), str(outside), socket_name, words if restricted else None]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(argument)],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_the_kernel_enforces_the_rules(tmp_path: Path, require: Callable[[str], None]) -> None:
    require("landlock")
    abi = abi_version()
    if abi < 2:
        pytest.skip("the kernel's Landlock is too old for any rule")
    name = str(tmp_path)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("\0" + name)
        listening.listen()
        under = run_script(tmp_path / "under", name, restricted=True)
        control = run_script(tmp_path / "control", name, restricted=False)

    refused = {"write outside", "make outside", "move out", "write to proc"}
    if abi >= 3:
        refused.add("truncate outside")
    if abi >= 6:
        refused |= {"signal the parent", "an abstract socket of outside"}
    if "ok" == control["write a kernel setting"]:  # only root may, even without Landlock
        refused.add("write a kernel setting")
    else:
        del control["write a kernel setting"], under["write a kernel setting"]
    assert {"ok"} == set(control.values())
    assert refused == {name for name, result in under.items() if result != "ok"}
    assert {"PermissionError"} == {under[name] for name in refused}


@pytest.mark.anyone
def test_plans_that_are_remembered_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landlock, "_MOST_DECIDED", 3)
    monkeypatch.setattr(landlock, "_decided", {})
    made = [landlock.plan_landlock(6, writable=[f"/w{n}"]) for n in range(10)]

    assert 1 <= len(landlock._decided) <= 3
    assert made[-1] is landlock.plan_landlock(6, writable=["/w9"])
    assert made[-1].rules != made[0].rules
