"""Which host ids an ordinary user's sandboxes get, how they are mapped, and who is not believed."""

from __future__ import annotations

import errno
import os
import pwd
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.backends.local.host import identity, ranges
from ringfence.errors import ResourceExhausted
from ringfence.launcher import ranges as launcher
from ringfence.launcher.plan import Shape
from ringfence.linux import privileges
from ringfence.linux.namespaces import parse_id_map

pytestmark = pytest.mark.anyone

EACH = identity.IDS_EACH
USUAL = (200_704, 200_704 + 4 * EACH)

extents = st.lists(
    st.tuples(st.integers(0, 1 << 33), st.integers(0, 1 << 18)).map(lambda e: (e[0], e[0] + e[1])),
    max_size=4,
)


@given(extents, extents, extents)
def test_a_slot_is_all_ours(
    uids: list[ranges.Extent], gids: list[ranges.Extent], foreign: list[ranges.Extent]
) -> None:
    for slot in ranges.usable(uids, gids, foreign):
        for owned in (uids, gids):
            assert any(first <= slot and slot + EACH <= end for first, end in owned)
        for first, end in (*foreign, identity.OF_ROOT, (0, 1 << 16)):
            assert end <= first or end <= slot or slot + EACH <= first


def test_slots_are_there_and_do_not_overlap() -> None:
    assert [USUAL[0] + n * EACH for n in range(4)] == ranges.usable([USUAL], [USUAL], [])
    # One id of somebody else's in the second of them.
    foreign = [(USUAL[0] + EACH + 7, USUAL[0] + EACH + 8)]
    assert [USUAL[0] + n * EACH for n in (0, 2, 3)] == ranges.usable([USUAL], [USUAL], foreign)


def test_slots_of_roots_sandboxes_are_no_users() -> None:
    first, end = identity.OF_ROOT
    before, behind = (first - EACH, first + EACH), (end - EACH, end + EACH)

    assert [first - EACH, end] == ranges.usable([before, behind], [before, behind], [])


@pytest.mark.parametrize(
    ("text", "own", "others"),
    [
        ("me:100:50\n", [(100, 150)], []),
        ("1234:100:50\nyou:7:1\n", [(100, 150)], [(7, 8)]),
        ("me:100\nme:x:5\nme:1:-5\nme:\u0661:5\n:::\nme:1:2:3\n", [], []),
    ],
)
def test_lines_of_subuid(text: str, own: list[ranges.Extent], others: list[ranges.Extent]) -> None:
    assert own == ranges._extents(text, ("me", "1234"), own=True)
    assert others == ranges._extents(text, ("me", "1234"), own=False)


@pytest.mark.parametrize("uid", [0, 1, 1000, 1999, 2000, 65_533, identity.NOBODY])
def test_the_map_has_the_makers_id_once_and_no_other_twice(uid: int) -> None:
    rows = parse_id_map(identity.shared_map(USUAL[0], uid, 4711))

    assert (uid, 4711, 1) in rows
    outside = [n for _inside, first, count in rows for n in range(first, first + count)]
    inside = [n for first, _outside, count in rows for n in range(first, first + count)]
    assert len(set(inside)) == len(inside) == len(set(outside)) == len(outside)
    assert {0, 1, 1999, uid, identity.NOBODY} <= set(inside)
    assert set(outside) - {4711} <= set(range(USUAL[0], USUAL[0] + EACH))
    for other in (0, 1, 1999, identity.NOBODY):
        if other != uid:
            (host,) = [o + other - i for i, o, n in rows if i <= other < i + n]
            assert identity.host_id(USUAL[0], other) == host


def test_no_two_processes_have_a_slot(tmp_path: Path) -> None:
    held: list[int] = []
    slots = ranges.usable([USUAL], [USUAL], [])
    one, two = (identity.HostIds(f"{tmp_path}/a/ids", held.append, slots) for _ in range(2))

    assert sorted(slots) == sorted([one.take(), two.take(), one.take(), two.take()])
    with pytest.raises(ResourceExhausted):
        one.take()
    two.close()
    assert one.take() in slots
    assert one.take() in slots
    one.close()
    assert [] == os.listdir(tmp_path)


# -- helpers are not believed ----------------------------------------------------------------------


def _helper(tmp_path: Path, script: str) -> str:
    path = tmp_path / "helper"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def _map_with(helper: str) -> None:
    maps = identity.shared_map(USUAL[0], 1000, 4711)
    shape: Shape = {"id_helpers": [helper] * 2, "uid_map": maps, "gid_map": maps}  # type: ignore[typeddict-item]
    launcher.write_id_maps(os.getpid(), shape)


def test_one_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="range 200704 not allowed") as caught:
        _map_with(_helper(tmp_path, "echo range $3 not allowed >&2; exit 1"))

    assert errno.EPROTO == caught.value.errno


def test_one_that_lies_is_found_out(tmp_path: Path) -> None:
    """It says that all is well; our own map is the kernel's still."""
    with pytest.raises(OSError, match="another uid_map") as caught:
        _map_with(_helper(tmp_path, "exit 0"))

    assert errno.EPROTO == caught.value.errno


def test_one_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spawned, spawn = [], os.posix_spawn

    def note(*args: Any, **more: Any) -> int:
        spawned.append(spawn(*args, **more))
        return spawned[-1]

    monkeypatch.setattr(launcher, "_WAIT_S", 0.3)
    monkeypatch.setattr("posix.posix_spawn", note)
    with pytest.raises(OSError, match="did not end") as caught:
        _map_with(_helper(tmp_path, "exec sleep 6071"))

    assert errno.ETIMEDOUT == caught.value.errno
    (pid,) = spawned
    assert signal.SIGKILL == os.waitpid(pid, 0)[1]  # the zygote reaps it with its other children


class TestFinding:
    """An account's ranges are those of both files that are nobody else's."""

    @pytest.fixture
    def texts(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
        both = f"me:{USUAL[0]}:{4 * EACH}\n"
        found = {"/etc/subuid": both, "/etc/subgid": both, "/etc/passwd": "", "/etc/group": ""}
        monkeypatch.setattr(ranges, "_text", found.__getitem__)
        monkeypatch.setattr(ranges, "_helper", lambda name: f"/usr/bin/{name}")
        monkeypatch.setattr(privileges, "prctl", lambda *_: 0)
        monkeypatch.setattr(pwd, "getpwuid", lambda _: SimpleNamespace(pw_name="me"))
        return found

    def test_slots_and_helpers(self, texts: dict[str, str]) -> None:
        found = ranges.find()
        assert [USUAL[0] + n * EACH for n in range(4)] == found.slots
        assert ["/usr/bin/newuidmap", "/usr/bin/newgidmap"] == found.helpers

    @pytest.mark.parametrize(
        ("file", "line", "left"),
        [
            ("/etc/passwd", f"other:x:{USUAL[0]}:1::/:/bin/sh\n", [1, 2, 3]),
            ("/etc/group", f"other:x:{USUAL[0] + EACH}:\n", [0, 2, 3]),
            ("/etc/subuid", f"other:{USUAL[0] + 2 * EACH}:1\n", [0, 1, 3]),
            ("/etc/subgid", f"other:{USUAL[0] + 3 * EACH}:1\n", [0, 1, 2]),
        ],
    )
    def test_what_is_anothers_in_any_file_is_left_out(
        self, texts: dict[str, str], file: str, line: str, left: list[int]
    ) -> None:
        texts[file] += line
        assert [USUAL[0] + n * EACH for n in left] == ranges.find().slots

    def test_none_to_use_says_why_and_what_to_do(
        self, texts: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        texts["/etc/subgid"] = f"other:{USUAL[0]}:{4 * EACH}\n"
        with pytest.raises(ranges.NoRangeError, match="have no id range for me") as refused:
            ranges.find()
        assert "usermod --add-subuids" in refused.value.fix
        texts["/etc/subgid"] = f"me:{USUAL[0]}:{EACH - 1}\n"
        with pytest.raises(ranges.NoRangeError, match=f"no {EACH} ids together"):
            ranges.find()
        monkeypatch.setattr(privileges, "prctl", lambda *_: 1)
        with pytest.raises(ranges.NoRangeError, match="no_new_privs"):
            ranges.find()


def test_a_slot_comes_back_last_and_ids_in_use_are_left_out(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    shared: list[int] = []
    slots = [USUAL[0], USUAL[0] + EACH, USUAL[0] + 2 * EACH]
    ids = identity.HostIds(f"{tmp_path}/a/ids", shared.append)
    first, second = ids.take(), ids.take()
    assert EACH == second - first
    assert shared == ids.locks()
    ids.give_back(first)
    assert first not in (ids.take(), ids.take()), "as long as there are others"
    [path] = Path(f"{tmp_path}/a/ids").iterdir()
    lock = os.dup(ids.locks()[0])
    ids.leave()
    ids.leave()
    assert [] == ids.locks()
    assert path.exists(), "another goes on with it"
    following = identity.HostIds(f"{tmp_path}/a/ids", shared.append)
    following.go_on_with(str(path), lock, {first, second})
    assert second + EACH == following.take()
    following.close()
    assert [] == os.listdir(tmp_path), "with its directories"
    own = identity.HostIds(f"{tmp_path}/b/ids", lambda _: None, slots)
    assert {*slots} == {own.take() for _ in slots}
    with pytest.raises(ResourceExhausted):
        own.take()
    own.close()
    assert before == len(os.listdir("/proc/self/fd"))
