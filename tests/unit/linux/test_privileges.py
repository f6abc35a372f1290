"""Rights that a process gives up for good, each read back from the kernel."""

from __future__ import annotations

import os
import struct

import pytest
from tests.unit.linux.child import alone, result_of, status_of

from ringfence.linux import namespaces, privileges

KEPT = privileges.CAP_KILL | 1 << 38  # one in each half of a mask


def test_of_the_bounding_set_stays_what_is_to_be_kept() -> None:
    def emptied() -> list[int]:
        alone(namespaces.CLONE_NEWUSER)
        before = int(status_of("CapBnd"), 16)
        privileges.empty_bounding_set(privileges.CAP_KILL)
        kept = int(status_of("CapBnd"), 16)
        privileges.empty_bounding_set()
        return [before & KEPT, kept, int(status_of("CapBnd"), 16), int(status_of("CapAmb"), 16)]

    assert [KEPT, privileges.CAP_KILL, 0, 0] == result_of(emptied)


def test_ambient_capabilities_go_with_the_bounding_set() -> None:
    def emptied() -> list[int]:
        alone(namespaces.CLONE_NEWUSER)
        mask = privileges.CAP_KILL
        _set_inheritable(mask)
        privileges.prctl(privileges.PR_CAP_AMBIENT, 2, 5)  # PR_CAP_AMBIENT_RAISE, CAP_KILL
        raised = int(status_of("CapAmb"), 16)
        privileges.empty_bounding_set(mask)
        return [raised, int(status_of("CapAmb"), 16)]

    assert [privileges.CAP_KILL, 0] == result_of(emptied)


def _set_inheritable(mask: int) -> None:
    every = int(status_of("CapPrm"), 16)
    low, high = every & 0xFFFFFFFF, every >> 32
    sets = struct.pack("6I", low, low, mask, high, high, 0)
    assert 0 == privileges._capset(struct.pack("Ii", 0x20080522, 0), sets)


def test_who_may_not_give_up_the_bounding_set_is_told() -> None:
    def refused() -> int:
        privileges.empty_capability_sets()
        try:
            privileges.empty_bounding_set()
        except PermissionError:
            return 1
        return 0

    assert 1 == result_of(refused)


def test_of_capabilities_stay_what_is_to_be_kept_and_none_is_inherited() -> None:
    def emptied() -> list[int]:
        alone(namespaces.CLONE_NEWUSER)
        _set_inheritable(privileges.CAP_KILL | 1 << 7)
        found = []
        for keep in (KEPT, 0):
            privileges.empty_capability_sets(keep)
            found += [int(status_of(name), 16) for name in ("CapEff", "CapPrm", "CapInh")]
        return found

    assert [KEPT, KEPT, 0, 0, 0, 0] == result_of(emptied)


def test_securebits_are_locked() -> None:
    """Each of the three with its lock, and the lock of KEEP_CAPS: what root's uid meant is gone."""

    def locked() -> list[object]:
        alone(namespaces.CLONE_NEWUSER)
        privileges.lock_securebits()
        try:
            privileges.prctl(privileges.PR_SET_SECUREBITS, 0)
        except PermissionError:
            return [privileges.prctl(27), "locked"]  # PR_GET_SECUREBITS
        return [privileges.prctl(27)]

    assert [0b11101111, "locked"] == result_of(locked)


def test_settings_of_a_process() -> None:
    def settings() -> dict[str, object]:
        privileges.set_no_new_privs()
        privileges.set_dumpable(False)
        found: dict[str, object] = {"undumpable": privileges.prctl(3)}
        privileges.set_dumpable(True)
        found["dumpable"] = privileges.prctl(3)  # PR_GET_DUMPABLE
        found["no_new_privs"] = privileges.prctl(privileges.PR_GET_NO_NEW_PRIVS)
        privileges.set_name(b"a name of more than 15")
        found["name"] = status_of("Name")
        return found

    assert {
        "undumpable": 0,
        "dumpable": 1,
        "no_new_privs": 1,
        "name": "a name of more",
    } == result_of(settings)


def test_orphans_come_to_who_adopts_them() -> None:
    def adopts() -> bool:
        privileges.adopt_orphans()
        reading, writing = os.pipe()
        if (child := namespaces.fork_with(0)) == 0:
            orphan = namespaces.fork_with(0)
            if orphan:
                os.write(writing, b"%d" % orphan)
            os._exit(0)
        os.waitpid(child, 0)
        orphan = int(os.read(reading, 99))
        return orphan == os.waitpid(-1, 0)[0]

    assert result_of(adopts)


def test_who_is_to_end_with_its_parent_does() -> None:
    def ends() -> int:
        privileges.adopt_orphans()
        reading, writing = os.pipe()
        if (parent := namespaces.fork_with(0)) == 0:
            ready, say = os.pipe()
            if (child := namespaces.fork_with(0)) == 0:
                privileges.die_with_parent(10)
                os.write(say, b"!")
                while True:
                    os.read(reading, 1)  # its end is never seen: we have the other one too
            os.read(ready, 1)
            os.write(writing, b"")
            os._exit(child % 2)
        os.waitpid(parent, 0)
        return os.WTERMSIG(os.waitpid(-1, 0)[1])

    assert 10 == result_of(ends)


@pytest.mark.root
def test_groups_are_given_up() -> None:
    def given_up() -> list[list[int]]:
        os.setgroups([7, 8])
        before = os.getgroups()
        privileges.drop_groups()
        return [before, os.getgroups()]

    assert [[7, 8], []] == result_of(given_up)


def test_where_a_user_namespace_keeps_groups_they_stay() -> None:
    def kept() -> bool:
        before = os.getgroups()
        namespaces.unshare(namespaces.CLONE_NEWUSER)
        with open("/proc/self/setgroups", "w", encoding="ascii") as file:
            file.write("deny")
        privileges.drop_groups()
        return len(before) == len(os.getgroups())

    assert result_of(kept)
