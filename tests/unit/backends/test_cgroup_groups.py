"""What is written into the cgroups of a sandbox and read back, as files of either version have it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ringfence.backends.local.host import cgroups
from ringfence.backends.local.host.cgroups import Group, Layout
from ringfence.launcher import cgroups as launcher_cgroups
from ringfence.model.limits import Limits

MOST_PIDS = 4_194_304


def layout(version: int, top: Path) -> Layout:
    """One that was found by another process, with its directories."""
    names = {1: ("memory", "pids", "cpu", "cpuacct", "freezer"), 2: ("",)}[version]
    bases = {name: str(top / name) for name in names}
    for base in bases.values():
        os.makedirs(base, exist_ok=True)
    return Layout((version, bases, ""))


def group_of(version: int, top: Path, *, cpus: bool = True) -> tuple[Group, dict[str, Path]]:
    """A group, with its directory for each controller."""
    found = layout(version, top)
    if version == 2:
        (top / "cgroup.subtree_control").write_text("cpu memory pids\n")
    group = Group(found, "ringfence.x", cpus=cpus)
    places = {name: Path(path) for name, path in group.paths.items()}
    for place in places.values():
        place.mkdir(exist_ok=True)
    return group, places


class TestLimits:
    def values(self, group: Group, limits: Limits, pids: int = 50) -> dict[str, str]:
        found = group.values(limits, 1 << 28, pids)
        assert len({name for name, _ in found}) == len(found)
        return dict(found)

    def test_version_2_has_no_swap_and_room_for_pid_1(self, tmp_path: Path) -> None:
        group, places = group_of(2, tmp_path)
        place = places[""]

        assert {
            f"{place}/memory.max": str(1 << 28),
            f"{place}/memory.swap.max": "0",
            f"{place}/pids.max": "51",
            f"{place}/cpu.max": "50000 100000",
        } == self.values(group, Limits(cpus=0.5))
        assert 50_000 == group.quota
        assert "1000 100000" == self.values(group, Limits(cpus=0.001))[f"{place}/cpu.max"]
        assert str(MOST_PIDS) == self.values(group, Limits(), MOST_PIDS)[f"{place}/pids.max"]

    def test_version_1_bounds_swap_and_sockets_where_it_can(self, tmp_path: Path) -> None:
        group, places = group_of(1, tmp_path)
        memory, cpu = places["memory"], places["cpu"]
        expected = {
            f"{memory}/memory.limit_in_bytes": str(1 << 28),
            f"{places['pids']}/pids.max": "51",
            f"{cpu}/cpu.cfs_period_us": "100000",
            f"{cpu}/cpu.cfs_quota_us": "50000",
        }
        assert expected == self.values(group, Limits(cpus=0.5))
        (tmp_path / "memory/memory.memsw.limit_in_bytes").touch()
        (tmp_path / "memory/memory.kmem.tcp.limit_in_bytes").touch()
        expected[f"{memory}/memory.memsw.limit_in_bytes"] = str(1 << 28)
        expected[f"{memory}/memory.kmem.tcp.limit_in_bytes"] = str(1 << 26)
        assert expected == self.values(group, Limits(cpus=0.5))
        names = [name.rpartition("/")[2] for name, _ in group.values(Limits(), 1 << 28, 50)]
        order = [names.index(f"memory.{each}limit_in_bytes") for each in ("", "memsw.")]
        assert order == sorted(order), "the kernel refuses the sum below its part"
        assert (
            str(256 << 20)
            == dict(group.values(Limits(), 1 << 40, 50))[f"{memory}/memory.kmem.tcp.limit_in_bytes"]
        )

    @pytest.mark.parametrize("version", [1, 2])
    def test_where_no_processor_is_limited_no_quota_is_lifted(
        self, tmp_path: Path, version: int
    ) -> None:
        group, _places = group_of(version, tmp_path, cpus=False)
        names = " ".join(self.values(group, Limits(cpus=0.5)))
        assert (0, False) == (group.quota, group.holds_cpus)
        assert "cpu." not in names
        group.unthrottle(True)  # writes nothing: there is no such file
        assert "quota" not in str(list(tmp_path.rglob("*")))

    def test_a_processor_is_limited_only_where_its_controller_is_there(
        self, tmp_path: Path
    ) -> None:
        found = layout(2, tmp_path)
        (tmp_path / "cgroup.subtree_control").write_text("memory pids cpuset\n")
        assert (False, True) == (found.has("cpu"), found.has("pids"))
        assert not Group(found, "x", cpus=True).holds_cpus
        first = layout(1, tmp_path / "first")
        assert (True, False) == (first.has("cpu"), first.has("blkio"))
        nothing = Layout((0, {"cpu": "/x"}, "none"))
        assert not nothing.has("cpu")
        group = Group(nothing, "x", cpus=True)
        assert ([], {}, []) == (group.directories, group.paths, group.of_programs)
        assert [] == group.values(Limits(cpus=1.0), 1 << 28, 50)
        assert not group.can_freeze

    @pytest.mark.parametrize("version", [1, 2])
    def test_a_quota_is_lifted_and_comes_back(self, tmp_path: Path, version: int) -> None:
        group, places = group_of(version, tmp_path)
        self.values(group, Limits(cpus=0.5))
        path = places[""] / "cpu.max" if version == 2 else places["cpu"] / "cpu.cfs_quota_us"
        texts = []
        for on in (True, False):
            path.write_text("")
            group.unthrottle(on)
            texts.append(path.read_text())
        path.write_text("")
        assert texts == (["max 100000", "50000 100000"] if version == 2 else ["-1", "50000"])
        known = Group.known(group.version, group.paths, group.quota)
        assert (True, group.directories) == (known.holds_cpus, known.directories)
        known.unthrottle(True)
        assert texts[0] == path.read_text(), "of one that another process made"
        assert not Group.known(group.version, group.paths, 0).holds_cpus

    def test_programs_are_apart_only_where_a_hierarchy_is_one_controllers(
        self, tmp_path: Path
    ) -> None:
        group, places = group_of(1, tmp_path)
        assert [str(places["memory"]), str(places["cpu"])] == group.of_programs
        shared = Layout((1, {"memory": "/m", "pids": "/p", "cpu": "/c", "cpuacct": "/c"}, ""))
        group = Group(shared, "x", cpus=True)
        assert ["/m/x"] == group.of_programs
        assert ["/m/x", "/p/x", "/c/x"] == group.directories
        assert [] == group_of(2, tmp_path / "second")[0].of_programs


class TestReading:
    def test_version_2_is_read(self, tmp_path: Path) -> None:
        group, places = group_of(2, tmp_path)
        place = places[""]
        for name, text in {
            "memory.current": "4096\n",
            "memory.peak": "8192\n",
            "pids.current": "4\n",
            "pids.events": "max 3\n",
            "cpu.stat": "user_usec 2\nusage_usec 7\nsystem_usec 5\n",
            "memory.events": "oom 9\noom_kill 2\n",
        }.items():
            (place / name).write_text(text)

        assert (4096, 8192) == (group.memory_bytes(), group.peak_memory_bytes())
        assert (3, 3, 7000, 2) == (
            group.pids(), group.forks_refused(), group.cpu_ns(), group.oom_kills(),
        )  # fmt: skip
        (place / "memory.current").write_text("max\n")
        for name in ("memory.peak", "pids.current", "pids.events", "cpu.stat"):
            (place / name).unlink()
        assert [None] * 5 == [
            group.memory_bytes(), group.peak_memory_bytes(), group.pids(), group.cpu_ns(),
            group.forks_refused(),
        ]  # fmt: skip

    def test_version_1_is_read_in_its_hierarchies(self, tmp_path: Path) -> None:
        group, places = group_of(1, tmp_path)
        for place, name, text in (
            ("memory", "memory.usage_in_bytes", "4096\n"),
            ("memory", "memory.max_usage_in_bytes", "8192\n"),
            ("pids", "pids.current", "1\n"),
            ("pids", "pids.events", "max 3\n"),
            ("cpuacct", "cpuacct.usage", "7\n"),
        ):
            (places[place] / name).write_text(text)

        assert (4096, 8192) == (group.memory_bytes(), group.peak_memory_bytes())
        assert (0, 3, 7) == (group.pids(), group.forks_refused(), group.cpu_ns())
        without = Group.known(1, {"memory": str(places["memory"])}, 0)
        assert without.cpu_ns() is None

    def test_without_cgroups_nothing_is_known(self) -> None:
        group = Group.known(0, {}, 0)
        assert [None] * 6 == [
            group.memory_bytes(), group.peak_memory_bytes(), group.pids(), group.cpu_ns(),
            group.forks_refused(), group.open_if_full(),
        ]  # fmt: skip

    @pytest.mark.parametrize("version", [1, 2])
    def test_memory_is_full_where_no_program_could_start(
        self, tmp_path: Path, version: int
    ) -> None:
        group, places = group_of(version, tmp_path)
        names = {1: ("usage_in_bytes", "limit_in_bytes"), 2: ("current", "max")}[version]
        used, most = (places["memory" if version == 1 else ""] / f"memory.{n}" for n in names)
        most.write_text(f"{64 << 20}\n")
        used.write_text(f"{60 << 20}\n")
        assert group.open_if_full() is None
        used.write_text(f"{(60 << 20) + 1}\n")
        found = group.open_if_full()
        assert found is not None
        fd, bound = found
        assert (str((60 << 20) + 1), 60 << 20) == (os.read(fd, 99).decode().strip(), bound)
        assert not os.get_inheritable(fd)
        os.close(fd)
        most.write_text("max\n")
        assert group.open_if_full() is None


class TestStandingStill:
    def test_version_2_is_waited_for_until_the_kernel_says_so(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        group, places = group_of(2, tmp_path)
        place = places[""]
        (place / "cgroup.freeze").write_text("0")
        (place / "cgroup.events").write_text("populated 1\nfrozen 0\n")
        looks: list[bool] = []

        def wait(_deadline: float, freezing: bool) -> None:
            looks.append(freezing)
            word = (place / "cgroup.freeze").read_text()
            (place / "cgroup.events").write_text(f"populated 1\nfrozen {word}\n")

        monkeypatch.setattr(group, "_wait", wait)
        assert group.can_freeze
        group.freeze()
        assert ("1", [True]) == ((place / "cgroup.freeze").read_text(), looks)
        group.thaw()
        assert ("0", [True, False]) == ((place / "cgroup.freeze").read_text(), looks)
        (place / "cgroup.events").unlink()
        group.freeze()  # it is gone, killed while it was about to stand still
        assert 2 == len(looks)

    def test_version_1_is_asked_again_while_something_is_busy(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        group, places = group_of(1, tmp_path)
        state = places["freezer"] / "freezer.state"
        state.write_text("THAWED")
        written: list[tuple[str, str]] = []
        said = ["FREEZING\n", "FREEZING\n", "FROZEN\n", "THAWED\n"]
        monkeypatch.setattr(
            launcher_cgroups, "write", lambda path, word: written.append((path, word))
        )
        monkeypatch.setattr(cgroups, "_read", lambda _path: said.pop(0))
        monkeypatch.setattr(group, "_wait", lambda *_: None)
        group.freeze()
        assert [(str(state), "FROZEN")] * 3 == written
        group.thaw()
        assert (str(state), "THAWED") == written[3]
        assert group.can_freeze
        assert not Group.known(1, {"memory": "/m"}, 0).can_freeze

    def test_what_does_not_stand_still_in_time_goes_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        group, _places = group_of(2, tmp_path)
        thawed: list[Any] = []
        monkeypatch.setattr(launcher_cgroups, "thaw", thawed.append)
        with pytest.raises(TimeoutError, match="thaw every process"):
            group._wait(0.0, False)
        assert [] == thawed
        with pytest.raises(TimeoutError, match="freeze every process"):
            group._wait(0.0, True)
        assert [group.directories] == thawed, "not half of it"


class TestFinding:
    """Version 2: directories with its files, in place of a hierarchy that this host may not have."""

    def base(self, top: Path, *, own: str = "", controllers: str = "cpu memory pids") -> Path:
        place = top / own
        place.mkdir(parents=True, exist_ok=True)
        for each in {top, place}:
            (each / "cgroup.controllers").write_text(controllers)
            (each / "cgroup.procs").touch()
            (each / "cgroup.subtree_control").touch()
        return place

    def found(self, monkeypatch: pytest.MonkeyPatch, top: Path, own: str, chosen: str = "") -> Any:
        monkeypatch.setattr(cgroups, "_mounts", lambda: {"": str(top)})
        monkeypatch.setattr(cgroups, "_memberships", lambda: {"": own})
        monkeypatch.setenv("RINGFENCE_CGROUP", chosen)
        return Layout()

    def test_it_is_below_the_own_cgroup_with_its_controllers_enabled(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        own = self.base(tmp_path, own="user/app")
        (tmp_path / "user/cgroup.procs").touch()
        found = self.found(monkeypatch, tmp_path, "/user/app")
        assert (2, {"": str(own)}, "") == (found.version, found.bases, found.why)
        assert "+memory +pids +cpu" == (own / "cgroup.subtree_control").read_text()
        again = self.found(monkeypatch, tmp_path, "/user/app/ringfence-host")
        assert {"": str(own)} == again.bases, "where we had been before we moved"

    def test_a_place_that_was_chosen_is_the_only_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        own = self.base(tmp_path, own="app")
        other = self.base(tmp_path, own="chosen")
        (other / "cgroup.subtree_control").write_text("memory")
        found = self.found(monkeypatch, tmp_path, "/app", "/chosen/")
        assert (2, {"": str(other)}) == (found.version, found.bases)
        assert "+pids +cpu" == (other / "cgroup.subtree_control").read_text(), "what is missing"
        missing = self.found(monkeypatch, tmp_path, "/app", "/none")
        assert (0, {}) == (missing.version, missing.bases)
        assert "none" in missing.why
        assert "" == (own / "cgroup.subtree_control").read_text()

    def test_without_memory_and_processes_it_is_no_place(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.base(tmp_path, own="app", controllers="cpu io memory")
        found = self.found(monkeypatch, tmp_path, "/app")
        assert (0, {}) == (found.version, found.bases)
        assert "no memory and pids controllers are delegated" in found.why

    @pytest.mark.parametrize(
        ("enabled", "inner", "alone", "written"),
        [
            ("memory pids", True, False, ""),
            ("memory pids", False, False, "+cpu"),
            ("memory pids", True, True, "+cpu"),
            ("memory", True, False, "+pids +cpu"),
            ("cpu memory pids", False, True, ""),
        ],
    )
    def test_what_a_manager_has_chosen_is_left_as_it_is(
        self, tmp_path: Path, enabled: str, inner: bool, alone: bool, written: str
    ) -> None:
        """It may take away again what is added to it; in one of our own nobody else decides."""
        base = self.base(tmp_path)
        control = base / "cgroup.subtree_control"
        control.write_text(enabled)
        made = Layout((0, {}, ""))
        ours = str(base / "app") if inner else str(base)
        assert made._prepare_v2(str(base), ours, alone=alone)
        assert control.read_text()[: len(written) or None] == (written or enabled)

    def test_candidates_are_the_narrowest_first_and_none_outside(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for uid, expected in ((0, ["/cg/a/b", "/cg"]), (1000, ["/cg/a/b", "/cg/a"])):
            monkeypatch.setattr(os, "geteuid", lambda uid=uid: uid)
            assert expected == cgroups._candidates("/cg", "", "/a/b")
            assert ["/cg/x"] == cgroups._candidates("/cg", "/x/", "/a/b")
            assert (["/cg"] if uid == 0 else []) == cgroups._candidates("/cg", "", "/../a")

    def test_a_busy_cgroup_is_left_for_a_leaf_only_where_all_of_it_is_ours(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "cgroup.procs").write_text(f"{os.getpid()}\n")
        moved: list[tuple[str, str]] = []
        monkeypatch.setattr(
            launcher_cgroups, "write", lambda path, word: moved.append((path, word))
        )
        monkeypatch.setattr(launcher_cgroups, "make", lambda dirs, _values: None)
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        cgroups._move_down(str(tmp_path))
        assert [(f"{tmp_path}/ringfence-host/cgroup.procs", str(os.getpid()))] == moved
        (tmp_path / "cgroup.procs").write_text(f"{os.getpid()}\n{os.getppid()}\n")
        with pytest.raises(OSError, match="not Ringfence's"):
            cgroups._move_down(str(tmp_path))
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        with pytest.raises(OSError, match="not delegated"):
            cgroups._move_down(str(tmp_path))
        assert 1 == len(moved)
        monkeypatch.setattr(cgroups, "_is_delegated", lambda _base: True)
        cgroups._move_down(str(tmp_path))
        assert 3 == len(moved)
