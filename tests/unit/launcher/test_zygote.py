"""The zygote's own records: what it ends, closes, removes and gives back, for whom, and when."""

from __future__ import annotations

import errno
import marshal
import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ringfence.backends.local.host.cgroups import Layout
from ringfence.launcher import cgroups, idmap, newborn, newroot, wire
from ringfence.launcher import zygote as module
from ringfence.launcher.newborn import Newborn
from ringfence.launcher.zygote import Expected, Owned, Zygote
from ringfence.linux import files, mounts, namespaces, privileges

PATIENCE_MS = 30_000


class OfProcesses(Zygote):
    """A zygote whose sandboxes are processes that wait, without namespaces.

    Attributes:
        host_end: The host's end of its socket.
        spawned: The id and what else each sandbox was to be made with.
        ends: The other ends of the sockets on which each sandbox would be told whose it is.
        problem: Raised in place of the next start.
    """

    def __init__(self) -> None:
        self.host_end, inner = wire.socketpair()
        super().__init__(inner)
        self.spawned: list[tuple[str, dict[str, Any]]] = []
        self.ends: dict[str, wire.Socket] = {}
        self.problem: Exception | None = None

    def spawn(self, shape: Any, control: wire.Socket, **how: Any) -> Newborn:
        del control
        if self.problem is not None:
            raise self.problem
        self.spawned.append((shape["id"], how))
        return self.add(shape["id"], shape["cgroup_dirs"])

    def add(self, sandbox_id: str, directories: list[str], *, read: bool = True) -> Newborn:
        closed, close = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            privileges.die_with_parent(signal.SIGKILL)
            signal.alarm(2 * PATIENCE_MS // 1000)
            files.close_from(0)  # or it would hold what others are to see closed
            while True:
                signal.pause()
        os.close(close)
        assert b"" == os.read(closed, 1)
        os.close(closed)
        ours, self.ends[sandbox_id] = wire.socketpair()
        self.sandboxes[pid] = Owned(sandbox_id, directories, read=read)
        return Newborn(pid, os.pidfd_open(pid), ours, [])

    def forget(self, pid: int) -> None:
        assert not os.path.exists(f"/proc/{pid}"), "its cgroups are removed while it is there"
        super().forget(pid)

    def pid_of(self, sandbox_id: str) -> int:
        return next((pid for pid, each in self.sandboxes.items() if each.id == sandbox_id), 0)

    def end(self, sandbox_id: str) -> None:
        """Have its PID 1 die, and notice that."""
        pid = self.pid_of(sandbox_id)
        os.kill(pid, signal.SIGKILL)
        wait_for_end(pid)
        self.reap()

    def ask(
        self, verb: str, argument: Any, fds: list[int] | None = None
    ) -> tuple[bytes, list[int]]:
        """Serve one request; its answer."""
        ours, theirs = wire.socketpair()
        wire.send(self.host_end, (verb, argument), [theirs.fileno(), *(fds or [])])
        theirs.close()
        assert self.serve_one()
        data, received = wire.receive_raw(ours)
        ours.close()
        return data, received

    def order(self, verb: str, argument: Any, fds: list[int] | None = None) -> None:
        """Serve one request that the sandbox itself would answer, in whose socket the reply lies."""
        ours, theirs = wire.socketpair()
        wire.send(self.host_end, (verb, argument), [theirs.fileno(), *(fds or [])])
        theirs.close()
        assert self.serve_one()
        assert not is_closed(ours) or "claim" != verb
        ours.close()

    def note(self, verb: str, argument: Any, fds: list[int] | None = None) -> None:
        wire.send(self.host_end, (verb, argument), fds or [])
        assert self.serve_one()


def wait_for_end(pid: int) -> None:
    pidfd = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(PATIENCE_MS)
    os.close(pidfd)


def is_alive(pid: int) -> bool:
    return bool(pid) and os.waitpid(pid, os.WNOHANG) == (0, 0)


def is_closed(end: wire.Socket) -> bool:
    """Tell whether nobody has the other end any more."""
    poll = select.poll()
    poll.register(end, 0)
    return bool(poll.poll(0))


def how_many() -> int:
    return len(os.listdir("/proc/self/fd"))


def shape_of(sandbox_id: str, *directories: str, **more: Any) -> Any:
    return {
        "id": sandbox_id, "cgroup_dirs": [*directories], "cgroup_values": [], "cgroup_version": 0,
        "trusted_root": False, "trees": [], "layers": [], "placeholders": [], "note": "", "disk": None, **more,
    }  # fmt: skip


def made(path: Path) -> tuple[str, str, int, int]:
    """Make a placeholder."""
    path.mkdir()
    info = path.stat()
    return str(path.parent), path.name, info.st_dev, info.st_ino


Inside = Callable[[Callable[[OfProcesses], None]], None]


@pytest.fixture
def alone() -> Inside:
    """Runs a function with a zygote in a process of its own, which reaps all; what it asserts fails here."""

    def run(function: Callable[[OfProcesses], None]) -> None:
        said, say = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            try:
                signal.alarm(PATIENCE_MS // 1000 - 10)
                os.close(said)
                zygote = OfProcesses()
                try:
                    function(zygote)
                finally:
                    for each in zygote.sandboxes:
                        os.kill(each, signal.SIGKILL)
            except BaseException:  # noqa: BLE001  the test hears of it
                os.write(say, traceback.format_exc().encode()[-60000:])
            finally:
                os._exit(0)
        os.close(say)
        with open(said, "rb") as file:
            problem = file.read().decode()
        _pid, status = os.waitpid(pid, 0)
        assert (0, "") == (status, problem), problem

    return run


@pytest.mark.anyone
class TestPlaceholders:
    """Those of the creation and of each later mount, until somebody has removed them."""

    def fill(self, zygote: OfProcesses, place: Path) -> None:
        """Two sandboxes: one with two later mounts, one with a later mount alone."""
        place.mkdir()
        (place / "notes").mkdir()
        for sandbox_id in ("one", "two"):
            (place / "notes" / sandbox_id).write_text("")
        note = f"{place}/notes/one"
        zygote.remember(shape_of("one", placeholders=[made(place / "created")], note=note))
        zygote.remember(shape_of("none", note="unused"))
        for sandbox_id, name in (("one", "second"), ("one", "third"), ("two", "other")):
            request = {
                "op": "absent", "plan": {"id": sandbox_id}, "placeholders": [made(place / name)],
                "note": f"{place}/notes/{sandbox_id}",
            }  # fmt: skip
            data, _fds = zygote.ask("enter", request)
            assert data.startswith(b"E"), "there is no such operation"
        zygote.ask("enter", {"op": "absent", "plan": {"id": "one"}})
        zygote.ask(
            "enter", {"op": "absent", "plan": {"id": "none"}, "placeholders": [], "note": ""}
        )
        assert {"one": 3, "two": 1} == {key: len(each) for key, each in zygote.placeholders.items()}

    def test_they_go_with_their_notes_when_the_host_has_gone(
        self, alone: Inside, tmp_path: Path
    ) -> None:
        def inside(zygote: OfProcesses) -> None:
            self.fill(zygote, tmp_path / "place")
            zygote.clean_up()

            assert [] == os.listdir(tmp_path / "place")

        alone(inside)

    def test_a_new_host_keeps_those_of_the_sandboxes_that_it_goes_on_with(
        self, alone: Inside, tmp_path: Path
    ) -> None:
        def inside(zygote: OfProcesses) -> None:
            place = tmp_path / "place"
            self.fill(zygote, place)
            assert b"O0" == zygote.ask("keep_only", ([], ["one"]))[0]
            assert {"created", "second", "third", "notes"} == set(os.listdir(place))
            assert ["one"] == os.listdir(place / "notes")
            assert ["one"] == [*zygote.placeholders] == [*zygote.notes]
            zygote.clean_up()
            assert [] == os.listdir(place)

        alone(inside)

    def test_those_that_the_host_has_removed_are_forgotten(
        self, alone: Inside, tmp_path: Path
    ) -> None:
        def inside(zygote: OfProcesses) -> None:
            place = tmp_path / "place"
            self.fill(zygote, place)
            zygote.ask("released", "one")
            zygote.ask("released", "absent")
            assert ["two"] == [*zygote.placeholders] == [*zygote.notes]
            zygote.clean_up()

            assert {"created", "second", "third", "notes"} == set(os.listdir(place))
            assert ["one"] == os.listdir(place / "notes")

        alone(inside)


@pytest.mark.anyone
class TestEnds:
    @pytest.mark.parametrize("read", [True, False])
    def test_cgroups_stay_until_the_host_has_read_them(
        self, alone: Inside, tmp_path: Path, read: bool
    ) -> None:
        def inside(zygote: OfProcesses) -> None:
            for name in ("mine", "other"):
                (tmp_path / name).mkdir()
                zygote.add(name, [f"{tmp_path}/{name}"], read=read)
            zygote.end("mine")
            assert (tmp_path / "mine").exists() == read
            zygote.note("release", "mine")
            assert not (tmp_path / "mine").exists()
            assert ["other"] == os.listdir(tmp_path)
            assert {} == zygote.ended
            assert is_alive(zygote.pid_of("other"))

        alone(inside)

    def test_one_that_the_host_gave_up_goes_with_its_cgroups_when_it_dies(
        self, alone: Inside, tmp_path: Path
    ) -> None:
        """It is not killed for that, and of another one the cgroups stay."""

        def inside(zygote: OfProcesses) -> None:
            for name in ("mine", "other"):
                (tmp_path / name).mkdir()
                zygote.add(name, [f"{tmp_path}/{name}"])
            zygote.note("release", "mine")
            assert is_alive(zygote.pid_of("mine"))
            assert (tmp_path / "mine").exists()
            zygote.end("mine")
            zygote.end("other")
            assert ["other"] == os.listdir(tmp_path) == [*zygote.ended]

        alone(inside)

    def test_a_release_closes_what_comes_with_it_and_reaps_first(
        self, alone: Inside, tmp_path: Path
    ) -> None:
        def inside(zygote: OfProcesses) -> None:
            (tmp_path / "mine").mkdir()
            zygote.add("mine", [f"{tmp_path}/mine"])
            pid = zygote.pid_of("mine")
            os.kill(pid, signal.SIGKILL)
            wait_for_end(pid)
            reads, write = os.pipe()
            before = how_many()
            zygote.note("release", "mine", [write, write])
            assert before == how_many()
            os.close(write)
            assert b"" == os.read(reads, 1)
            assert [] == os.listdir(tmp_path)
            assert ([], []) == ([*zygote.sandboxes], [*zygote.ended])

        alone(inside)

    def test_what_waits_for_a_claim_is_forgotten_and_closed_with_its_process(
        self, alone: Inside
    ) -> None:
        def inside(zygote: OfProcesses) -> None:
            before = how_many()
            for name in ("warm", "other", "complete"):
                child = zygote.add(name, [])
                if name == "complete":
                    child.close()
                    zygote.complete[name] = child.pid
                else:
                    zygote.warm[name] = child
            for name in ("warm", "complete"):
                zygote.end(name)
            assert ["other"] == [*zygote.warm]
            assert {} == zygote.complete
            assert [True, False] == [is_closed(zygote.ends[name]) for name in ("warm", "other")]
            assert before + 2 + 3 == how_many(), "of `other` two, and the three ends of the test"

        alone(inside)

    def test_one_that_is_discarded_has_ended_with_the_answer(
        self, alone: Inside, tmp_path: Path
    ) -> None:
        def inside(zygote: OfProcesses) -> None:
            for name in ("mine", "other"):
                (tmp_path / name).mkdir()
                child = zygote.add(name, [f"{tmp_path}/{name}"])
                child.close()
                zygote.complete[name] = child.pid
            pid = zygote.pid_of("mine")
            zygote.note("drop", "mine")
            assert not os.path.exists(f"/proc/{pid}")
            assert ["other"] == os.listdir(tmp_path) == [*zygote.complete]
            assert is_alive(zygote.pid_of("other"))
            zygote.note("drop", "absent")
            assert is_alive(zygote.pid_of("other"))

        alone(inside)

    def test_a_new_host_has_all_ended_that_it_does_not_name(
        self, alone: Inside, tmp_path: Path
    ) -> None:
        """The frozen too, and what has ended goes unless it is to be read."""

        def inside(zygote: OfProcesses) -> None:
            for name in ("kept", "other"):
                (tmp_path / name).mkdir()
                (tmp_path / name / "cgroup.freeze").write_text("1")
                zygote.add(name, [f"{tmp_path}/{name}"])
            for name in ("to-read", "old"):
                (tmp_path / name).mkdir()
                zygote.ended[name] = [f"{tmp_path}/{name}"]
            control, end = wire.socketpair()
            zygote.expected = Expected(shape_of("next"), 60.0, control)
            kept, other = zygote.pid_of("kept"), zygote.pid_of("other")

            assert b"O0" == zygote.ask("keep_only", ([kept], ["to-read", "kept"]))[0]
            assert is_alive(kept)
            assert not os.path.exists(f"/proc/{other}")
            assert [kept] == [*zygote.sandboxes]
            assert "1" == (tmp_path / "kept/cgroup.freeze").read_text()
            assert "0" == (tmp_path / "other/cgroup.freeze").read_text()
            assert {"to-read", "kept", "other"} == set(os.listdir(tmp_path))
            assert ["to-read"] == [each for each in zygote.ended if each != "other"]
            assert zygote.expected is None
            assert is_closed(end)

        alone(inside)

    def test_those_that_do_not_die_in_time_are_counted(
        self, alone: Inside, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No process of the test is one that cannot be killed: there is no time at all for them."""
        monkeypatch.setattr(module, "_DYING_S", -1.0)

        def inside(zygote: OfProcesses) -> None:
            for name in ("kept", "one", "two"):
                zygote.add(name, [])
            kept = zygote.pid_of("kept")
            assert b"O2" == zygote.ask("keep_only", ([kept], []))[0]
            for pid in {*zygote.sandboxes} - {kept}:
                wait_for_end(pid)
            zygote.reap()
            assert b"O0" == zygote.ask("keep_only", ([kept], []))[0]

        alone(inside)

    def test_with_the_host_everything_goes(self, alone: Inside, tmp_path: Path) -> None:
        def inside(zygote: OfProcesses) -> None:
            pids = []
            (tmp_path / "frozen").mkdir()
            for name in ("read", "warm", "ended", "unread"):
                (tmp_path / name).mkdir()
            for name in ("read", "warm", "unread", "frozen"):
                child = zygote.add(name, [f"{tmp_path}/{name}"], read=name != "unread")
                pids.append(child.pid)
                if name == "warm":
                    zygote.warm[name] = child
            (tmp_path / "frozen/cgroup.freeze").write_text("1")
            zygote.ended["ended"] = [f"{tmp_path}/ended"]
            zygote.clean_up()

            assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
            assert ["frozen"] == os.listdir(tmp_path), "which is no cgroup, and holds a file"
            assert "0" == (tmp_path / "frozen/cgroup.freeze").read_text()
            assert ([], []) == ([*zygote.sandboxes], [*zygote.warm])

        alone(inside)


@pytest.mark.anyone
class TestPrebuilt:
    def expect(self, zygote: OfProcesses, sandbox_id: str, delay_s: float = 60.0) -> wire.Socket:
        """Ask for one; the host's end of its control."""
        ours, theirs = wire.socketpair()
        zygote.note("prebuild", (shape_of(sandbox_id), delay_s), [theirs.fileno()])
        theirs.close()
        return ours

    def test_a_second_one_has_the_first_built(self, alone: Inside) -> None:
        """One is expected at a time, and each keeps its own control."""

        def inside(zygote: OfProcesses) -> None:
            before = how_many()
            first = self.expect(zygote, "first")
            assert [] == zygote.spawned
            second = self.expect(zygote, "second")
            assert [("first", {"rehearses": True})] == zygote.spawned
            assert {"first": zygote.pid_of("first")} == zygote.complete
            assert [True, False] == [is_closed(first), is_closed(second)], "nothing holds it here"
            message, fds = wire.receive(zygote.ends["first"])
            assert ((False, 0), []) == (message, fds)
            assert before + 2 + 1 + 1 == how_many()

        alone(inside)

    @pytest.mark.parametrize(("delay_s", "rehearses"), [(0.0, False), (60.0, True)])
    def test_it_is_built_when_it_is_due(
        self, alone: Inside, delay_s: float, rehearses: bool
    ) -> None:
        def inside(zygote: OfProcesses) -> None:
            self.expect(zygote, "next", delay_s)
            wait_ms = zygote.drop_late()
            if rehearses:
                assert wait_ms is not None
                assert 50_000 < wait_ms <= 60_000
                assert zygote.expected is not None
                zygote.expected.due_s = time.monotonic()
                assert zygote.tend_expected() is None
            assert [("next", {"rehearses": rehearses})] == zygote.spawned
            assert zygote.expected is None

        alone(inside)

    @pytest.mark.parametrize("cause", ["spawn", "give"])
    def test_one_that_cannot_be_built_leaves_nothing(self, alone: Inside, cause: str) -> None:
        def inside(zygote: OfProcesses) -> None:
            before = how_many()
            end = self.expect(zygote, "next")
            if cause == "spawn":
                zygote.problem = newroot.BuildError("step", OSError(errno.ENOSPC, "full"))
                zygote.build_expected()
                assert ([], []) == ([*zygote.complete], [*zygote.sandboxes])
            else:
                given = zygote.add

                def dead(*args: Any) -> Newborn:
                    child = given(*args)
                    zygote.ends.pop("next").close()
                    return child

                zygote.add = dead  # type: ignore[method-assign, assignment]
                zygote.build_expected()
                [pid] = zygote.sandboxes
                wait_for_end(pid)
                zygote.reap()
                assert ([], []) == ([*zygote.complete], [*zygote.sandboxes])
            assert is_closed(end), "by which the host knows"
            end.close()
            assert before == how_many()
            assert zygote.expected is None

        alone(inside)

    @pytest.mark.parametrize("verb", ["claimed", "drop", "release"])
    def test_what_comes_for_one_that_is_expected(self, alone: Inside, verb: str) -> None:
        """Claimed: it is built at once, without a rehearsal. Dropped: never. Another one is built."""

        def inside(zygote: OfProcesses) -> None:
            end = self.expect(zygote, "mine")
            zygote.note(verb, "mine")
            expected = {
                "claimed": [("mine", {"rehearses": False})],
                "drop": [],
                "release": [("mine", {"rehearses": True})],
            }
            assert expected[verb] == zygote.spawned
            assert zygote.expected is None
            assert is_closed(end)
            assert (verb == "release") == ("mine" in zygote.complete)
            other = self.expect(zygote, "other")
            zygote.note(verb, "mine")
            assert ("other", {"rehearses": True}) == zygote.spawned[-1]
            assert is_closed(other)
            assert ["mine", "other"][verb != "release" :] == [*zygote.complete]

        alone(inside)

    def test_one_that_is_claimed_is_closed_here_and_others_wait(self, alone: Inside) -> None:
        def inside(zygote: OfProcesses) -> None:
            for name in ("mine", "other"):
                zygote.warm[name] = zygote.add(name, [])
            before = how_many()
            zygote.note("claimed", "mine")
            assert ["other"] == [*zygote.warm]
            assert [True, False] == [is_closed(zygote.ends[name]) for name in ("mine", "other")]
            assert before - 2 == how_many()
            assert is_alive(zygote.pid_of("mine"))

        alone(inside)

    def test_a_helper_is_not_started_before_what_is_expected_is_built(self, alone: Inside) -> None:
        """It would hold the control of that one open."""

        def inside(zygote: OfProcesses) -> None:
            end = self.expect(zygote, "next")
            zygote.ask("enter", {"op": "absent", "plan": {"id": "one"}})
            assert ["next"] == [each for each, _ in zygote.spawned]
            assert is_closed(end)

        alone(inside)

    def test_one_of_a_pool_waits_for_its_claim(self, alone: Inside) -> None:
        def inside(zygote: OfProcesses) -> None:
            zygote.ask("prewarm", shape_of("warm"))
            assert [("warm", {"waits": True, "rehearses": True, "disk": -1})] == zygote.spawned
            assert ["warm"] == [*zygote.warm]
            disk = {"fd": 0}
            reply, fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(2)]
            shape = shape_of("disk", disk=disk)
            assert 7 == module.disk_of(shape, [7])
            assert -1 == module.disk_of(shape_of("x", disk={"fd": -1}), [7])
            for fd in (reply, fds):
                os.close(fd)

        alone(inside)

    def test_what_waits_for_a_claim_is_not_idle(
        self, alone: Inside, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[set[int]] = []

        def inside(zygote: OfProcesses) -> None:
            zygote.warm["warm"] = zygote.add("warm", [])
            zygote.add("mine", []).close()

            def tend(since_s: dict[int, float], _now: float) -> float | None:
                asked.append({*since_s})
                return 7.0

            monkeypatch.setattr(zygote.hibernation_image, "is_made", False)
            monkeypatch.setattr(zygote.hibernation_image, "tend", tend)
            assert 7.0 == zygote.drop_late()
            self.expect(zygote, "next")
            assert 7.0 == zygote.drop_late(), "the nearer of the two"
            assert [{zygote.pid_of("mine")}] * 2 == asked
            monkeypatch.setattr(zygote.hibernation_image, "is_made", True)
            assert 7.0 < (zygote.drop_late() or 0.0)
            assert 2 == len(asked)

        alone(inside)


@pytest.mark.anyone
class TestClaims:
    def test_a_claimed_one_has_the_plan_the_cgroups_and_the_files_of_its_claim(
        self, alone: Inside, tmp_path: Path
    ) -> None:
        def inside(zygote: OfProcesses) -> None:
            old, new = f"{tmp_path}/old", f"{tmp_path}/new"
            os.mkdir(old)
            zygote.warm["mine"] = zygote.add("mine", [old])
            zygote.warm["other"] = zygote.add("other", [])
            owned = zygote.sandboxes[zygote.pid_of("mine")]
            owned.since_s -= 100.0
            before, began = how_many(), time.monotonic()
            shape = shape_of("mine", old, new, placeholders=[("/", "x", 1, 1)], note="note")
            zygote.order("claim", shape)
            message, fds = wire.receive(zygote.ends["mine"])

            assert ((True, 0), 1) == (message, len(fds)), "the reply, on which it answers"
            os.close(fds[0])
            assert os.path.isdir(new)
            assert [old, new] == owned.directories
            assert owned.since_s >= began
            assert {"mine": [("/", "x", 1, 1)]} == zygote.placeholders
            assert {"mine": "note"} == zygote.notes
            assert ["other"] == [*zygote.warm]
            assert is_closed(zygote.ends["mine"])
            assert before - 2 == how_many()

        alone(inside)

    def test_version_1_gets_the_tasks_of_the_new_cgroups_alone(
        self, alone: Inside, tmp_path: Path
    ) -> None:
        def inside(zygote: OfProcesses) -> None:
            old, new = f"{tmp_path}/old", f"{tmp_path}/new"
            for path in (old, new):
                os.mkdir(path)
                Path(path, "tasks").touch()
            zygote.warm["mine"] = zygote.add("mine", [old])
            before = how_many()
            zygote.order("claim", shape_of("mine", old, new, cgroup_version=1))
            message, fds = wire.receive(zygote.ends["mine"])
            assert ((True, 1), 2) == (message, len(fds))
            assert f"{new}/tasks" == os.readlink(f"/proc/self/fd/{fds[1]}")
            for fd in fds:
                os.close(fd)
            assert before - 2 == how_many()

        alone(inside)

    @pytest.mark.parametrize(("of_claim", "is_set"), [("7", False), ("9", True)])
    def test_limits_of_the_claim_are_set_where_they_are_others(
        self, alone: Inside, tmp_path: Path, of_claim: str, is_set: bool
    ) -> None:
        def inside(zygote: OfProcesses) -> None:
            limit = tmp_path / "pids.max"
            limit.write_text("before")
            warm = zygote.add("mine", [str(tmp_path)])
            warm.values = [(str(limit), "7")]
            zygote.warm["mine"] = warm
            shape = shape_of("mine", str(tmp_path), cgroup_values=[(str(limit), of_claim)])
            zygote.order("claim", shape)
            assert is_set == limit.read_text().startswith(of_claim)

        alone(inside)

    @pytest.mark.parametrize("cause", ["absent", "cgroup", "tasks", "twice"])
    def test_a_claim_that_fails_ends_the_sandbox_and_leaves_nothing_open(
        self, alone: Inside, tmp_path: Path, cause: str
    ) -> None:
        def inside(zygote: OfProcesses) -> None:
            zygote.warm["mine"] = zygote.add("mine", [])
            zygote.warm["other"] = zygote.add("other", [])
            before = how_many()
            directories = {
                "absent": [], "twice": [], "cgroup": [f"{tmp_path}/absent/new"], "tasks": [f"{tmp_path}/new"],
            }  # fmt: skip
            version = 1 if cause == "tasks" else 0
            wanted = "absent" if cause == "absent" else "mine"
            shape = shape_of(wanted, *directories[cause], cgroup_version=version)
            if cause == "twice":
                zygote.order("claim", shape)
                os.close(wire.receive(zygote.ends["mine"])[1][0])
            data, _fds = zygote.ask("claim", shape)
            number = errno.ESRCH if cause in ("absent", "twice") else errno.ENOENT
            assert data.startswith(b"E%d claim: " % number)
            assert (cause != "absent") == is_closed(zygote.ends["mine"])
            assert before - (2 if cause != "absent" else 0) == how_many()
            assert not is_closed(zygote.ends["other"])

        alone(inside)


@pytest.mark.anyone
class TestRequests:
    @pytest.mark.parametrize(
        ("problem", "data"),
        [
            (newroot.BuildError("bind /x", OSError(errno.ENOENT, "gone")), b"E2 bind /x: [Errno 2] gone"),
            (OSError(errno.EAGAIN, "full"), b"E11 create: [Errno 11] full"),
            (ValueError("odd"), b"E71 create: [Errno 71] ValueError('odd')"),
        ],
    )  # fmt: skip
    def test_each_failure_is_told_and_ends_nobody(
        self, alone: Inside, problem: Exception, data: bytes
    ) -> None:
        def inside(zygote: OfProcesses) -> None:
            zygote.add("other", [])
            zygote.problem = problem
            null = os.open("/dev/null", os.O_RDONLY)
            before = how_many()
            for _ in range(2):
                assert data == zygote.ask("create", shape_of("mine"), [null, null])[0]
                assert before == how_many()
            assert b"E71 absent: " == zygote.ask("absent", None)[0][:12]
            assert is_alive(zygote.pid_of("other"))
            zygote.host_end.close()
            assert not zygote.serve_one()

        alone(inside)

    def test_one_that_is_created_has_its_own_and_what_it_needs_at_its_end(
        self, alone: Inside
    ) -> None:
        def inside(zygote: OfProcesses) -> None:
            before = how_many()
            null = os.open("/dev/null", os.O_RDONLY)
            shape = shape_of("mine", disk={"fd": 1}, placeholders=[("/", "x", 1, 1)], note="note")
            data, _fds = zygote.ask("create", shape, [null, null])
            assert b"" == data, "the sandbox itself would answer"
            [(_, how)] = zygote.spawned
            assert ["disk"] == [*how]
            assert ((False, 0), []) == wire.receive(zygote.ends["mine"])
            assert ({"mine": [("/", "x", 1, 1)]}, {"mine": "note"}) == (
                zygote.placeholders,
                zygote.notes,
            )
            os.close(null)
            assert before + 1 == how_many()

        alone(inside)

    def test_one_that_has_died_before_it_is_told_to_go_on_is_nobodys(self, alone: Inside) -> None:
        def inside(zygote: OfProcesses) -> None:
            before = how_many()
            given = zygote.add

            def dead(*args: Any) -> Newborn:
                child = given(*args)
                zygote.ends.pop("mine").close()
                return child

            zygote.add = dead  # type: ignore[method-assign, assignment]
            shape = shape_of("mine", placeholders=[("/", "x", 1, 1)], note="note")
            assert b"E32 create: " == zygote.ask("create", shape)[0][:12]
            assert before == how_many()
            assert ([], []) == ([*zygote.placeholders], [*zygote.notes])
            wait_for_end(zygote.pid_of("mine"))

        alone(inside)

    def test_what_has_ended_goes_before_another_is_made(
        self, alone: Inside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One of the same id may have the same cgroups; and a start that fails closes its layers."""

        def inside(zygote: OfProcesses) -> None:
            zygote.add("mine", [f"{tmp_path}/mine"])
            (tmp_path / "mine").mkdir()
            os.kill(zygote.pid_of("mine"), signal.SIGKILL)
            wait_for_end(zygote.pid_of("mine"))
            layer = os.open("/dev/null", os.O_RDONLY)
            monkeypatch.setattr(zygote, "open_trees", lambda _wanted, _pinned: [layer])

            def clone(*_args: Any, **_how: Any) -> Newborn:
                assert {} == zygote.sandboxes
                assert ["mine"] == [*zygote.ended]
                os.fstat(layer)
                raise OSError(errno.EAGAIN, "no more processes")

            monkeypatch.setattr(newborn, "clone", clone)
            shape = shape_of("mine", trusted_root=True, template=marshal.dumps(([], [])))
            with pytest.raises(OSError, match="no more processes"):
                Zygote.spawn(zygote, shape, zygote.host_end)
            with pytest.raises(OSError, match="Bad file"):
                os.fstat(layer)

        alone(inside)

    def test_one_that_cannot_be_let_go_is_ended_and_its_own(
        self, alone: Inside, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def inside(zygote: OfProcesses) -> None:
            child = zygote.add("mine", [])
            before = how_many()
            zygote.sandboxes.clear()

            def fail(_shape: Any) -> None:
                raise OSError(errno.EPERM, "no map")

            monkeypatch.setattr(child, "let_go", fail)
            monkeypatch.setattr(newborn, "clone", lambda *_args, **_how: child)
            shape = shape_of("mine", template=marshal.dumps(([], [])))
            with pytest.raises(OSError, match="no map"):
                Zygote.spawn(zygote, shape, zygote.host_end)
            wait_for_end(child.pid)
            assert before - 2 == how_many()
            assert {child.pid: "mine"} == {pid: each.id for pid, each in zygote.sandboxes.items()}

        alone(inside)

    def test_a_lock_that_is_to_be_held_stays(self, alone: Inside) -> None:
        def inside(zygote: OfProcesses) -> None:
            reads, write = os.pipe()
            zygote.ask("hold", None, [write])
            os.close(write)
            os.set_blocking(reads, False)
            with pytest.raises(BlockingIOError):
                os.read(reads, 1)

        alone(inside)

    def test_few_templates_are_kept_and_each_is_read_once(self, alone: Inside) -> None:
        def inside(zygote: OfProcesses) -> None:
            packed = [marshal.dumps(([], [("dir", f"/{i}")])) for i in range(17)]
            kept = [zygote.template(each) for each in packed[:16]]
            assert [id(each) for each in kept] == [
                id(zygote.template(each)) for each in packed[:16]
            ]
            assert 16 == len(zygote.templates)
            assert ([], [("dir", "/16")]) == zygote.template(packed[16])
            assert [packed[16]] == [*zygote.templates]

        alone(inside)


class TestTrees:
    """What a mount of the host is copied to, with the descriptors that come along."""

    def tree(self, place: Path, **more: Any) -> Any:
        info = place.stat()
        return {
            "source": str(place), "device": info.st_dev, "inode": info.st_ino, "attributes": 0,
            "idmap": "", "idmap_gid": "", "fd": -1, **more,
        }  # fmt: skip

    @pytest.mark.root
    def test_each_is_what_its_plan_says_and_maps_are_made_once(
        self, alone: Inside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def inside(zygote: OfProcesses) -> None:
            for name in ("path", "sent", "other"):
                (tmp_path / name).mkdir()
                (tmp_path / name / "file").write_text(name)
            namespaces.unshare(namespaces.CLONE_NEWNS)
            mounts.mount("none", "/", "none", mounts.MS_REC | mounts.MS_PRIVATE)
            (tmp_path / "sent/below").mkdir()
            mounts.mount("below", str(tmp_path / "sent/below"), "tmpfs")
            (tmp_path / "sent/below/mounted").touch()
            sent = [os.open(tmp_path / name, os.O_PATH) for name in ("other", "sent")]
            opened: list[tuple[str, str]] = []
            make = idmap.user_namespace

            def counted(uid_map: str, gid_map: str) -> int:
                opened.append((uid_map, gid_map))
                return make(uid_map, gid_map)

            monkeypatch.setattr(idmap, "user_namespace", counted)
            read_only = mounts.MOUNT_ATTR_RDONLY
            first, second = ("0 5000 9", "0 6000 9"), ("0 5000 9", "0 7000 9")
            wanted = [
                self.tree(tmp_path / "path", attributes=read_only),
                self.tree(tmp_path / "sent", fd=1),
                self.tree(tmp_path / "sent", fd=1, idmap=first[0], idmap_gid=first[1]),
                self.tree(tmp_path / "path", idmap=first[0], idmap_gid=first[1]),
                self.tree(tmp_path / "path", idmap=second[0], idmap_gid=second[1]),
            ]
            before = how_many()
            try:
                trees = zygote.open_trees(wanted, sent)
            except newroot.BuildError as exc:
                if exc.cause.errno != errno.EINVAL:
                    raise
                return  # this file system takes no id maps
            assert [first, second] == opened
            assert before + 5 == how_many(), "the maps are closed"
            names = [Path(f"/proc/self/fd/{fd}/file").read_text() for fd in trees]
            assert ["path", "sent", "sent", "path", "path"] == names
            read_onlys = [bool(os.fstatvfs(fd).f_flag & os.ST_RDONLY) for fd in trees]
            assert [True, False, False, False, False] == read_onlys
            owners = [os.stat("file", dir_fd=fd) for fd in trees]
            mapped = [(each.st_uid, each.st_gid) for each in owners]
            assert [(0, 0), (0, 0), (5000, 6000), (5000, 6000), (5000, 7000)] == mapped
            below = [os.listdir(f"/proc/self/fd/{fd}/below") for fd in trees[1:3]]
            assert [["mounted"], []] == below, "ids are those of one mount"

        alone(inside)

    @pytest.mark.root
    @pytest.mark.parametrize("cause", ["replaced", "sent", "map"])
    def test_one_that_fails_closes_all_before_it(
        self, alone: Inside, tmp_path: Path, cause: str
    ) -> None:
        def inside(zygote: OfProcesses) -> None:
            (tmp_path / "dir").mkdir()
            sent = [os.open(tmp_path / "dir", os.O_PATH)]
            good = [self.tree(tmp_path / "dir"), self.tree(tmp_path / "dir", fd=0)]
            bad = {
                "replaced": self.tree(tmp_path / "dir", inode=1),
                "sent": self.tree(tmp_path / "dir", fd=0, attributes=1 << 40),
                "map": self.tree(tmp_path / "dir", fd=0, idmap="nonsense", idmap_gid="0 0 1"),
            }[cause]
            before = how_many()
            with pytest.raises((OSError, newroot.BuildError)) as refusal:
                zygote.open_trees([*good, bad], sent)
            if cause != "map":
                verb = "open" if cause == "replaced" else "restrict"
                assert isinstance(refusal.value, newroot.BuildError)
                assert f"{verb} {tmp_path}/dir" == refusal.value.step
            assert before == how_many()
            for fd in zygote.open_trees(good, sent):
                os.close(fd)
            assert before == how_many()

        alone(inside)

    @pytest.mark.root
    def test_a_create_whose_mounts_fail_ends_and_leaves_nothing(
        self, alone: Inside, tmp_path: Path
    ) -> None:
        def inside(zygote: OfProcesses) -> None:
            (tmp_path / "dir").mkdir()
            before = how_many()
            trees = [self.tree(tmp_path / "dir"), self.tree(tmp_path / "dir", inode=1)]
            shape = shape_of(
                "mine", trusted_root=True, trees=trees, placeholders=[("/", "x", 1, 1)], note="n"
            )
            data, _fds = zygote.ask("create", shape)
            assert data.startswith(b"E%d open %s: " % (errno.ESTALE, bytes(tmp_path / "dir")))
            assert before + 1 == how_many()
            assert {} == zygote.placeholders
            wait_for_end(zygote.pid_of("mine"))
            zygote.reap()
            zygote.ask("create", shape_of("good", trusted_root=True, trees=trees[:1]))
            message, fds = wire.receive(zygote.ends["good"])
            assert ((False, 0), 1) == (message, len(fds))
            zygote.warm["warm"] = zygote.add("warm", [])
            zygote.order("claim", shape_of("warm", trusted_root=True, trees=trees[:1]))
            message, fds = wire.receive(zygote.ends["warm"])
            assert ((True, 0), 2) == (message, len(fds))

        alone(inside)


@pytest.mark.root
def test_cgroups_below_those_of_a_sandbox_go_with_them(
    require: Callable[[str], None],
) -> None:
    """The kernel removes none that has others in it."""
    require("cgroup")
    base = next(iter(Layout().bases.values()))
    place = f"{base}/ringfence-test-{os.getpid()}"
    for name in ("", "/one", "/one/below", "/one/beside", "/two"):
        os.mkdir(place + name)
    assert [] == cgroups.remove([place])
    assert not os.path.exists(place)
