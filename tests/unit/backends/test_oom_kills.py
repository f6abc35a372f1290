"""How often the kernel killed for lack of memory, as either version of cgroups says it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence.backends.local.host.cgroups import Group

OF_V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
OF_V2 = "low 7\nhigh 8\nmax 9\noom 6\noom_kill {}\noom_group_kill 5\n"
OLD_V1 = "oom_kill_disable 0\nunder_oom 0\n"  # before Linux 4.13


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize(
    ("version", "text", "kills"),
    [
        (1, OF_V1.format(3), 3),
        (2, OF_V2.format(12), 12),
        (2, OF_V2.format(0), 0),
        (1, OLD_V1, None),
    ],
    ids=["v1", "v2", "none", "not told"],
)
def test_it_is_the_count_and_no_other(
    tmp_path: Path, version: int, text: str, kills: int | None, again: bool
) -> None:
    name = {1: "memory.oom_control", 2: "memory.events"}[version]
    (tmp_path / name).write_text(text)
    group = Group.known(version, {{1: "memory", 2: ""}[version]: str(tmp_path)}, 0)

    assert kills == group.oom_kills(again=again)
    group.asked_last()


def test_without_cgroups_nobody_counts() -> None:
    group = Group.known(0, {}, 0)

    assert group.oom_kills() is None
    group.asked_last()
