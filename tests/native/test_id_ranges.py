"""A root of its own in a sandbox of an ordinary user, whose account has a range of ids."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ringfence.launcher.wire import AGENT_UID
from tests.features import require
from tests.images.conftest import small
from tests.native.callers import Caller
from tests.native.outside import until
from tests.native.test_agents_of_users import ATTACK
from tests.native.test_own_root import ADD_BOB, SETS
from tests.strangers import AS_RANGED, PYTHON, RANGE, RANGED_UID, package_for_others

pytestmark = pytest.mark.root

_SERVE = """
from ringfence import Limits, Mount
from ringfence.backends.registry import backend_named
from ringfence.errors import RingfenceError
from ringfence.images import archive

made = []

def create(limits=None, **options):
    made.append(Sandbox.create(limits=Limits(**(limits or {})), **options))
    return [len(made) - 1, made[-1]._inner.pid]

def run(index, script, user=None):
    result = made[index].exec(["sh", "-c", script], user=user)
    return [result.ok, result.stdout_text + result.stderr_text]

def run_python(index, code, user=None):
    return made[index].exec(["/usr/bin/python3", "-I", "-S", "-c", code], user=user).ok

def create_with(helper):
    from unittest import mock
    from ringfence.backends.local.host import ranges
    known = ranges.Ranges(ranges.find().slots, [helper] * 2)
    with mock.patch.object(ranges, "find", lambda: known):
        return create(profile="own_root")

def attach(index, mount):
    return str(made[index].mount(Mount.parse(mount)))

def load(layout, name):
    archive.load(layout, name)

def suspend(index):
    made[index].suspend()
    made[index].resume()

def capability(name):
    found = [c for c in backend_named("native").report().capabilities if c.name == name]
    return [[c.available, c.reason] for c in found]

def protections(index):
    return {p.name: [p.status, p.why] for p in made[index].protections()}

def end(index):
    made[index].terminate()

while line := listen():
    name, args, more = json.loads(line)
    try:
        say([None, globals()[name](*args, **more)])
    except RingfenceError as exc:
        say([type(exc).__name__, getattr(exc, "field", None) or str(exc)])
for each in made:
    each.terminate()
"""

Ask = Callable[..., Any]


class RefusedError(Exception):
    """What the user's process was told: the kind of error and its field, or all of it."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require("id ranges")
    return package_for_others(tmp_path_factory.mktemp("ranged"))


def _serving(source: Path, under: tuple[str, ...]) -> Iterator[Ask]:
    home = source.parent / "home"
    home.mkdir(exist_ok=True)
    os.chown(home, RANGED_UID, RANGED_UID)
    env = {"PYTHONPATH": str(source), "HOME": str(home), "XDG_RUNTIME_DIR": ""}
    env |= {"RINGFENCE_IMAGES": f"{home}/images"}
    with Caller(_SERVE, python=PYTHON, under=under, env=env) as caller:

        def ask(name: str, *args: Any, **more: Any) -> Any:
            caller.tell(json.dumps([name, args, more]))
            kind, value = caller.hear(60.0)
            if kind is not None:
                raise RefusedError(kind, value)
            return value

        yield ask
        assert caller.process.stdin is not None
        caller.process.stdin.close()
        caller.process.stdin = None
        assert (0, "") == caller.finish()


@pytest.fixture(scope="module")
def ask(source: Path) -> Iterator[Ask]:
    """`ask(name, ...)` calls a function of `_SERVE` in a process of the user with a range."""
    yield from _serving(source, AS_RANGED)


@pytest.fixture(scope="module")
def of_another_process(source: Path) -> Iterator[Ask]:
    """The same in a second process."""
    yield from _serving(source, AS_RANGED)


@pytest.fixture(scope="module")
def own(ask: Ask) -> int:
    """The number of a sandbox with a root of its own."""
    index: int = ask("create", profile="own_root")[0]
    return index


def test_root_rules_the_sandboxs_own_users(ask: Ask, own: int) -> None:
    usual = ask("create")[0]

    assert [True, ""] == ask("run", own, ADD_BOB, "root")
    whoami = "echo $(whoami) $(id -u) $HOME; touch /home/bob/mine; echo said > /dev/stdout"
    assert [True, "bob 1500 /home/bob\nsaid\n"] == ask("run", own, whoami, "bob")
    assert [True, "1500\n"] == ask("run", own, "stat -c %u /home/bob/mine", "root")
    for user in (None, "nobody", "bob"):
        assert [True, "0" * 16 + "\n"] == ask("run", own, SETS, user)
        assert not ask("run", own, "touch /home/bob/mine.too", user)[0] or user == "bob"
    with pytest.raises(RefusedError, match="user"):
        ask("run", usual, "true", "root")
    ask("end", usual)


@pytest.mark.parametrize(
    "attempt",
    [
        "mount -t tmpfs none /mnt",
        "mknod /tmp/null c 1 3",
        "chown 0 /usr/bin/env",
        "touch /usr/bin/mine",
        "hostname other",
        "unshare --user true",
        "echo 0 0 1 > /proc/self/uid_map",
        "cat /proc/1/environ",
        "cp /bin/sh /tmp/sh && chmod u+s /tmp/sh && setpriv --reuid=1500 /tmp/sh -p -c 'exit $(id -u)'",
    ],
)
def test_root_has_no_rights_over_the_kernel(ask: Ask, own: int, attempt: str) -> None:
    assert not ask("run", own, attempt, "root")[0]
    assert ask("run", own, "chown 7 /tmp", "root")[0]  # the control


def test_no_program_reaches_an_agent_or_ends_its_sandbox(ask: Ask) -> None:
    """Nor root as the maker's own id, which the first user has."""
    index = ask("create", profile="own_root")[0]
    for user in ("root", "nobody"):
        assert ask("run", index, "true", user)[0]
        ask("run", index, "kill -9 -1; exit 0", user)
    for each in ("root", "nobody", None):
        assert [True, "\n"] == ask("run", index, f"python3 -c '{ATTACK}'", each)
    assert [True, "\n"] == ask("run", index, f"setpriv --reuid=1000 python3 -c '{ATTACK}'", "root")
    for uid, is_ok in ((1500, True), (AGENT_UID, False)):
        assert is_ok == ask("run", index, f"setpriv --reuid={uid} true", "root")[0]
    ask("end", index)


def test_the_hosts_files_stay_their_owners(ask: Ask, source: Path) -> None:
    """A mount of an ordinary user cannot be mapped: what root inside made there would be nobody's."""
    mine = source.parent / "mine"
    mine.mkdir(mode=0o700)
    (mine / "file").write_text("x")
    for path in (mine, mine / "file"):
        os.chown(path, RANGED_UID, RANGED_UID)
    with pytest.raises(RefusedError, match="mounts"):
        ask("create", profile="own_root", mounts=[f"{mine}:/work:rw"])
    usual = ask("create", mounts=[f"{mine}:/work:rw"])[0]
    assert ask("run", usual, "echo y > /work/file")[0]  # the control
    ask("end", usual)

    index = ask("create", profile="own_root", mounts=[f"{mine}:/work"])[0]
    with pytest.raises(RefusedError, match="mounts"):
        ask("attach", index, f"{mine}:/mnt/more:rw")
    ask("attach", index, f"{mine}:/mnt/more")
    assert [True, "y\n"] == ask("run", index, "cat /work/file")
    for change in ("chown 7 /work/file", "rm /work/file", "chmod 777 /mnt/more"):
        assert not ask("run", index, change, "root")[0]
    assert RANGED_UID == (mine / "file").stat().st_uid
    ask("end", index)


@pytest.mark.parametrize(
    ("helper", "why"),
    [
        ("/bin/false", "/bin/false failed"),
        ("/bin/true", "another uid_map"),
        ("/nonexistent", "No such file"),
    ],
)
def test_without_the_very_maps_nothing_starts(ask: Ask, helper: str, why: str) -> None:
    with pytest.raises(RefusedError, match=why):
        ask("create_with", helper)
    ask("end", ask("create", profile="own_root")[0])  # the control


def _host_ids(pid: int) -> set[int]:
    rows = [line.split() for line in Path(f"/proc/{pid}/uid_map").read_text().splitlines()]
    return {n for _in, first, count in rows for n in range(int(first), int(first) + int(count))}


def test_no_two_have_an_id_but_their_makers(ask: Ask, of_another_process: Ask) -> None:
    (one, pid), (two, its) = (ask("create", profile="own_root") for _ in range(2))
    other, others = of_another_process("create", profile="own_root")
    found = [_host_ids(each) - {RANGED_UID} for each in (pid, its, others)]

    assert all(ids and ids <= set(RANGE) for ids in found)
    assert sum(map(len, found)) == len(set.union(*found))
    for index in (one, two):
        ask("end", index)
    of_another_process("end", other)


def test_it_is_told(ask: Ask, own: int) -> None:
    found = ask("protections", own)

    assert "enforced" == found["host_identity"][0]
    assert "your own uid as uid 1000 inside" in found["host_identity"][1]
    assert "degraded" == found["capabilities"][0]
    assert [[True, ""]] == ask("capability", "several_users")


_CROWD = """
import os, time
for uid in range(1100, 1120):
    if os.fork() == 0:
        os.setgid(uid)
        os.setuid(uid)
        kept = bytearray(b"x") * {each}
        time.sleep(120)
time.sleep({seconds})
"""


def test_limits_hold_for_all_users_together(ask: Ask) -> None:
    """Each is below what one process may have; nobody inside may kill all of them."""
    limit = 256 << 20
    index, pid = ask("create", profile="own_root", limits={"memory_bytes": limit})
    space = os.readlink(f"/proc/{pid}/ns/pid")

    assert ask("run_python", index, _CROWD.format(each=1 << 10, seconds=0), "root")  # the control
    assert 20 < len(_memory_in(space))
    with suppress(RefusedError):  # the sandbox itself may have ended
        ask("run_python", index, _CROWD.format(each=24 << 20, seconds=20), "root")
    assert until(lambda: sum(_memory_in(space)) <= limit, 60.0)
    ask("end", index)


def _memory_in(space: str) -> list[int]:
    """Bytes that each process in a PID namespace has to itself."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            if os.readlink(status.with_name("ns") / "pid") == space:
                text = status.read_text()
                found.append(int(text.partition("RssAnon:")[2].split()[0]) << 10)
        except (OSError, IndexError):
            continue  # it has ended
    return found


def test_all_users_stand_still_or_it_is_refused(ask: Ask, own: int) -> None:
    if ask("protections", own)["pids_limit"][0] == "enforced":
        ask("suspend", own)  # there is a cgroup that freezes them
        return
    with pytest.raises(RefusedError, match="can freeze"):
        ask("suspend", own)


def test_without_rights_to_gain_there_is_one_user(source: Path) -> None:
    """Under no_new_privs the helpers are programs like any other: all is as without a range."""
    for ask in _serving(source, (*AS_RANGED, "setpriv", "--no-new-privs")):
        with pytest.raises(RefusedError, match="profile"):
            ask("create", profile="own_root")
        ((available, why),) = ask("capability", "several_users")
        assert (False, True) == (available, "no_new_privs" in why)
        index, pid = ask("create")
        assert {RANGED_UID} == _host_ids(pid)
        ask("end", index)


def test_an_images_files_are_its_users(ask: Ask, source: Path) -> None:
    """As in every sandbox; but here root can give them away, and others take them."""
    layout = small().as_layout(source.parent / "layout")
    ask("load", layout, "small:1")
    index = ask("create", profile="own_root", image="small:1", user="app")[0]

    assert [True, "1234 app\n"] == ask("run", index, "busybox stat -c '%u %U' /srv/app/new")
    assert not ask("run", index, "echo taken > /srv/app/new", "nobody")[0]
    assert ask("run", index, "busybox chown 65534 /srv/app/new", "root")[0]
    assert ask("run", index, "echo taken > /srv/app/new", "nobody")[0]
    assert [True, "taken\n"] == ask("run", index, "cat /srv/app/new")
    ask("end", index)


@pytest.mark.parametrize(("user", "uid"), [("root", 0), ("nobody", 65534), ("5000", 5000)])
def test_whoever_is_the_first_user_is_the_maker(ask: Ask, user: str, uid: int) -> None:
    index, pid = ask("create", profile="own_root", user=user)
    lines = Path(f"/proc/{pid}/uid_map").read_text().splitlines()

    assert [uid, RANGED_UID, 1] in [list(map(int, line.split())) for line in lines]
    assert [True, f"{uid}\n"] == ask("run", index, "id -u")
    assert [True, "7\n"] == ask("run", index, "id -u", "7")
    assert ask("run", index, "chown 7 /tmp", "root")[0]
    ask("end", index)
