"""What the egress process has given up, seen from outside and tried from inside."""

from __future__ import annotations

import json
import os
import resource
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ringfence
from ringfence.egress import confine
from ringfence.egress.host.line import Line
from ringfence.linux import landlock
from tests.strangers import let_others_in

SOURCE = Path(ringfence.__file__).parents[1]


@pytest.fixture(name="line")
def fixture_line() -> Iterator[Line]:
    made = Line("plain")
    made.flush()
    yield made
    made.close()


def status(pid: int) -> dict[str, list[str]]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.split() for name, _, value in (line.partition(":") for line in lines)}


def test_it_is_nobody_and_may_nothing(line: Line) -> None:
    found = status(line.pid)

    for kind in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        assert ["0000000000000000"] == found[kind], kind
    assert ["1"] == found["NoNewPrivs"]
    assert ["2"] == found["Seccomp"]
    if 0 == os.geteuid():
        assert [str(confine.UID)] * 4 == found["Uid"] == found["Gid"]
        assert [] == found["Groups"]
        assert ["0000000000000000"] == found["CapBnd"]
    else:
        assert [str(os.geteuid())] * 4 == found["Uid"]
    assert [] == line.missing


_STARTED_WITH_GROUPS = """
import os, sys
sys.path[:0] = [{source!r}]
os.setgroups([0, 4, 998])
from ringfence.egress.host.line import Line
line = Line("plain")
line.flush()
print(open("/proc/self/status").read().partition("Groups:")[2].splitlines()[0])
print(open(f"/proc/{{line.pid}}/status").read().partition("Groups:")[2].splitlines()[0])
line.close()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can have such groups, and take them off")
def test_it_keeps_no_group_of_who_started_it() -> None:
    """As from a login: the runner of these tests may have none, and so show nothing."""
    code = _STARTED_WITH_GROUPS.format(source=str(SOURCE))
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    started, confined = run.stdout.splitlines()

    assert ["0", "4", "998"] == started.split(), "the control"
    assert not confined.split()


_READS = """
import os, sys
sys.path[:0] = [{source!r}]
from ringfence.egress import confine
def tried(flags, path):
    try: os.close(os.open(path, flags))
    except OSError as exc: return exc.strerror
    return "opened"
def both(): return [tried(os.O_RDONLY, "/etc/hosts"), tried(os.O_RDWR, {place!r})]
print(*both(), sep="\\n")
confine._RESOLVER_FILES += ({directory!r},)
assert confine._restrict_files()
print(*both(), sep="\\n")
"""


@pytest.mark.skipif(landlock.abi_version() < 1, reason="needs Landlock")
def test_it_may_read_what_a_resolver_reads_and_write_nothing_there(tmp_path: Path) -> None:
    """By Landlock alone: as root no mode of a file says no."""
    place = tmp_path / "file"
    place.touch()
    code = _READS.format(source=str(SOURCE), place=str(place), directory=str(tmp_path))
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )

    assert ["opened", "opened", "opened", "Permission denied"] == run.stdout.splitlines()


_CONFIGURED = """
import os, sys
sys.path[:0] = [{source!r}]
from ringfence.egress import confine
def tried():
    try: os.close(os.open({place!r}, os.O_RDONLY))
    except OSError as exc: return exc.strerror
    return "opened"
confine._configured = lambda: [{configured!r}]
print(tried())
assert confine._restrict_files()
print(tried())
"""


@pytest.mark.skipif(landlock.abi_version() < 1, reason="needs Landlock")
@pytest.mark.parametrize("is_root", [False, True])
def test_configuration_beside_the_root_opens_not_all_there_is(
    tmp_path: Path, is_root: bool
) -> None:
    """Where /etc/resolv.conf leads to a file in / itself, that is no reason to read every other."""
    place = tmp_path / "file"
    place.touch()
    configured = "/" if is_root else str(tmp_path)
    code = _CONFIGURED.format(source=str(SOURCE), place=str(place), configured=configured)
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )

    after = "Permission denied" if is_root else "opened"
    assert ["opened", after] == run.stdout.splitlines()


def test_it_leaves_no_core_and_has_all_descriptors_that_it_may(line: Line) -> None:
    """A core would have the secrets of every sandbox."""
    limits = Path(f"/proc/{line.pid}/limits").read_text().splitlines()
    found = {text[:26].strip(): text[26:].split()[:2] for text in limits}

    assert ["0", "0"] == found["Max core file size"]
    soft, hard = found["Max open files"]
    assert soft == hard == str(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def test_others_of_its_uid_cannot_look_into_it(line: Line) -> None:
    """Its memory has the secrets of every sandbox. Files of what is not dumpable are root's."""
    assert 0 == Path(f"/proc/{line.pid}/maps").stat().st_uid
    if os.geteuid():
        with pytest.raises(PermissionError):
            os.open(f"/proc/{line.pid}/mem", os.O_RDONLY)


@pytest.mark.root
def test_it_holds_nothing_of_the_host_process(line: Line) -> None:
    """Standard error is the host process's own; the rest is known one by one."""
    held = [os.readlink(f"/proc/{line.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{line.pid}/fd")]
    held.remove(os.readlink("/proc/self/fd/2"))

    kinds = sorted(name.partition(":[")[0] for name in held)

    # The host's and netlink's sockets; the loop, the resolver's threads, and who started it.
    assert [
        "/dev/null", "/dev/null",
        "anon_inode", "anon_inode", "anon_inode",
        "socket", "socket",
    ] == sorted("anon_inode" if each.startswith("anon_inode") else each for each in kinds)  # fmt: skip


_TRIES = """
import json, os, sys
sys.path[:0] = [{source!r}]
import socket
from ringfence.egress import confine
from ringfence.egress.dns import resolve
if {confined}:
    confine.confine()
def tried(what):
    try:
        what()
        return "done"
    except OSError as exc:
        return type(exc).__name__
print(json.dumps({{
    "read": tried(lambda: open({secret!r}).read()),
    "list": tried(lambda: os.listdir({place!r})),
    "write": tried(lambda: open({place!r} + "/new", "w")),
    "temporary": tried(lambda: open("/tmp/ringfence-new", "x")),
    "resolve": tried(lambda: resolve.system_look_up("localhost")),
    "hosts": tried(lambda: open("/etc/hosts").read()),
    "connect": tried(lambda: socket.socket(type=socket.SOCK_DGRAM).connect(("127.0.0.1", 9))),
}}))
"""


@pytest.mark.parametrize("confined", [False, True])
def test_it_reads_what_the_resolver_needs_and_writes_nothing(
    tmp_path: Path, confined: bool
) -> None:
    if landlock.abi_version() < 1:
        pytest.skip("this kernel has no Landlock")
    place = tmp_path / "place"
    place.mkdir()
    for each in (tmp_path, place):
        each.chmod(0o777)
    secret = place / "secret"
    secret.write_text("secret")
    secret.chmod(0o644)
    let_others_in(tmp_path.parent)
    script = _TRIES.format(
        source=str(SOURCE),
        confined=confined,
        secret=str(secret),
        place=str(place),
    )

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    Path("/tmp/ringfence-new").unlink(missing_ok=True)

    found = json.loads(done.stdout)
    needed = {"resolve", "hosts", "connect"}
    assert {"done"} == {found[name] for name in needed}, done.stderr
    others = {name: what for name, what in found.items() if name not in needed}
    assert {"PermissionError" if confined else "done"} == set(others.values()), others


_ABSTRACT = """
import socket, sys
sys.path[:0] = [{source!r}]
from ringfence.egress import confine
{confine}
try:
    socket.socket(socket.AF_UNIX).connect("\\0" + {name!r})
except OSError as exc:
    print(type(exc).__name__)
else:
    print("done")
"""


@pytest.mark.skipif(landlock.abi_version() < 6, reason="needs Landlock of ABI 6")
@pytest.mark.parametrize(
    ("confined", "told"),
    [
        ("", "done"),
        ("confine._restrict_files()", "PermissionError"),
        ("confine.confine()", "PermissionError"),
    ],
)
def test_it_reaches_no_abstract_socket_of_the_host(confined: str, told: str) -> None:
    """Desktops and daemons listen on them in the host's network namespace; only Landlock refuses them."""
    name = f"ringfence-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        code = _ABSTRACT.format(source=str(SOURCE), confine=confined, name=name)
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
        )

    assert [told] == run.stdout.splitlines()


_CALLS = """
import json, os, sys, threading
sys.path[:0] = [{source!r}]
import socket
from ringfence.egress import confine
if {confined}:
    confine.confine()
def tried(what):
    try:
        what()
        return "done"
    except OSError as exc:
        return type(exc).__name__
def fork():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
def thread():
    made = threading.Thread(target=int)
    made.start()
    made.join()
print(json.dumps({{
    "thread": tried(thread),
    "name server": tried(lambda: socket.socket(type=socket.SOCK_DGRAM).connect(("127.0.0.1", 53))),
    "program": tried(lambda: os.posix_spawn("/bin/true", ["true"], {{}})),
    "fork": tried(fork),
    "listen": tried(lambda: socket.create_server(("127.0.0.1", 0)).close()),
    "signal": tried(lambda: os.kill(os.getpid(), 0)),
    "write": tried(lambda: os.open("/dev/null", os.O_WRONLY)),
    "priority": tried(lambda: os.setpriority(os.PRIO_PROCESS, 0, 19)),
}}))
"""


@pytest.mark.parametrize("confined", [False, True])
def test_it_asks_nothing_else_of_the_kernel(confined: bool) -> None:
    script = _CALLS.format(source=str(SOURCE), confined=confined)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )

    found = json.loads(done.stdout)
    needed = {"thread", "name server"}
    assert {"done"} == {found[name] for name in needed}, done.stderr
    others = {name: what for name, what in found.items() if name not in needed}
    assert {"PermissionError" if confined else "done"} == set(others.values()), others


def test_a_uid_that_a_container_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is assumed about which ids exist: a rootless container has 65,536."""
    real = open

    def opened(path: str, *args: object, **more: object) -> object:
        return real(tmp_path / "map", *args, **more) if path.endswith("uid_map") else real(path)  # type: ignore[call-overload]

    monkeypatch.setattr("builtins.open", opened)
    for text, expected in (
        ("0 0 4294967295\n", confine.UID),
        ("0 100000 65536\n", 65533),
        ("0 1000 1\n1 100000 1000\n", 1000),
        ("0 1000 1\n", 0),
    ):
        (tmp_path / "map").write_text(text)
        assert expected == confine._uid_to_be()


def test_it_ends_when_it_is_told(line: Line) -> None:
    pid = line.pid
    line.close()

    assert not Path(f"/proc/{pid}").exists()
