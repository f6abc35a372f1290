"""What is prebuilt for the next create: whose it may be, what it is told, and what is given back of it."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ringfence import Limits, Mount, SandboxSpec
from ringfence.backends.local.host import cgroups
from ringfence.backends.local.host.facts import host
from ringfence.backends.local.mounts import images
from ringfence.backends.native import planner
from ringfence.backends.native.prebuilt import prebuilder, prewarming
from ringfence.backends.native.prebuilt.prebuilder import Complete, Prebuilder
from ringfence.backends.native.prebuilt.prewarming import NativeWarm, Prewarming
from ringfence.backends.native.profiles import BUILT_IN, Profile
from ringfence.backends.native.request import Request
from ringfence.errors import InvalidRequest, LifecycleError, SandboxLost
from ringfence.launcher import wire
from ringfence.linux import namespaces
from ringfence.model.capabilities import NAMESPACES
from ringfence.model.net.network import NetworkPolicy, NetworkRule
from ringfence.model.spec import LINEAGE

pytestmark = pytest.mark.root  # sandboxes have host ids of their own
KEEP_S = 60.0
SHAPE: Any = {"template": b"packed"}
HARDENED = BUILT_IN["os_hardened"]


class Zygote:
    """The zygote's side: what it is told, and the ends that it gets."""

    alarm_fd = 1 << 20

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.told: list[Any] = []
        self.ends: list[wire.Socket] = []
        self.watched: set[int] = set()
        self.alarms: list[float] = []
        self.is_gone = False

    def note(self, verb: str, argument: Any, fds: list[int]) -> None:
        if self.is_gone:
            raise SandboxLost("the zygote process is gone")
        self.told.append((verb, argument))
        self.ends += [wire.adopt(os.dup(fd)) for fd in fds]

    def tell_from(self, reply: wire.Socket, verb: str, argument: Any, fds: list[int]) -> None:
        self.note(verb, argument, [reply.fileno(), *fds])

    def drop(self, sandbox_id: str, directories: list[str]) -> None:
        self.note("drop", (sandbox_id, directories), [])

    def clear_up(self, sandbox_id: str, directories: list[str], fds: list[int]) -> None:
        self.told.append(("clear up", (sandbox_id, directories, fds)))

    def watch(self, fd: int) -> None:
        self.watched.add(fd)

    def unwatch(self, fd: int) -> None:
        self.watched.discard(fd)

    def set_alarm(self, after_s: float) -> None:
        self.alarms.append(after_s)

    def verbs(self) -> list[str]:
        return [verb for verb, _ in self.told]


class Ids:
    """Host ids, of which each is one sandbox's until it is given back."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self._next = 1 << 20

    def take(self) -> int:
        self._next += 1 << 16
        self.taken.append(self._next)
        return self._next

    def give_back(self, first: int) -> None:
        self.taken.remove(first)


class Base:
    """Unpacked snapshots below a root."""

    image = None
    trees = ({"source": "/its tree"},)

    def __init__(self, *ids: str) -> None:
        self.ids, self.holds, self.owners = ids, list[Base](), list[Any]()
        self.is_open = True

    def held_again(self) -> Base:
        self.holds.append(Base(*self.ids))
        return self.holds[-1]

    def appear_to(self, *owner: int, is_trusted_root: bool) -> None:
        self.owners.append((*owner, is_trusted_root))

    def close(self) -> None:
        assert self.is_open, "twice"
        self.is_open = False


class Made:
    """A prebuilder beside a zygote of its own."""

    def __init__(self, keep_s: float | None = KEEP_S) -> None:
        self.zygote: Any = Zygote()
        self.ids = Ids()
        backend: Any = SimpleNamespace(
            name="native", others_wait=False, outlives=False, host_ids=lambda: self.ids,
            layout=lambda: cgroups.Layout((0, {}, "none")), label=lambda: "",
        )  # fmt: skip
        self.backend = backend
        self.prebuilder = Prebuilder(backend, keep_s)

    def follow(self, draft: Any, plan: Any) -> Complete | None:
        self.prebuilder.follow(draft, plan, SHAPE, self.zygote)
        return self.prebuilder._prebuilt

    def built(self, base: Any = None, **wishes: Any) -> Complete:
        found = self.follow(*planned(base=base, **wishes))
        assert found is not None
        return found

    def close(self) -> None:
        self.zygote.is_gone = False
        self.prebuilder.drop()
        for each in self.zygote.ends:
            each.close()


def asked(base: Any = None, profile: Profile = HARDENED, **wishes: Any) -> Request:
    uid = 65534 if wishes.get("user") else 1000
    return Request(SandboxSpec(**wishes), profile, uid, base)


def planned(base: Any = None, **wishes: Any) -> tuple[Any, Any]:
    """A draft and its plan, as of a create of root's."""
    request = asked(**wishes)
    draft = planner.Draft(request, "native-first", 1 << 16)
    plan = planner.make_plan(draft, host())
    plan["trusted_root"], plan["id_helpers"] = True, []
    request.base = draft.base = base
    return draft, plan


@pytest.fixture
def made() -> Iterator[Made]:
    before = len(os.listdir("/proc/self/fd"))
    one = Made()
    yield one
    one.close()
    assert before == len(os.listdir("/proc/self/fd"))


class TestBuilding:
    def test_it_has_the_plan_of_the_create_and_all_that_is_drawn_for_each(self, made: Made) -> None:
        draft, plan = planned()
        found = made.follow(draft, plan)

        assert found is not None
        theirs: Any = found.plan
        own = {name for name in plan if plan[name] != theirs[name]}
        assert {"id", "tag_key", "seccomp", "uid_map", "gid_map"} == own
        same: Any = {name: plan[name] for name in ("id", "uid_map", "gid_map")}
        assert prebuilder.are_equal(plan, {**found.plan, **same})
        assert [found.first_host_id] == made.ids.taken
        assert str(found.first_host_id) in found.plan["uid_map"]
        assert found.plan["uid_map"] == found.plan["gid_map"]
        [(verb, (shape, delay_s))] = made.zygote.told
        assert ("prebuild", prebuilder.CALM_S) == (verb, delay_s)
        assert (found.id, b"packed") == (shape["id"], shape["template"])
        assert wire.receive(made.zygote.ends[0])[0]["tag_key"] == found.plan["tag_key"]
        assert {found.control.fileno()} == made.zygote.watched
        assert [KEEP_S] == made.zygote.alarms

    def test_its_cgroups_are_its_own_with_the_limits_of_the_create(self, made: Made) -> None:
        bases = {name: f"/cg/{name}" for name in ("memory", "pids", "cpu")}
        made.backend.layout = lambda: cgroups.Layout((1, bases, ""))
        found = made.built(limits=Limits(cpus=0.5, memory_bytes=64 << 20, pids=37))

        name = cgroups.group_name(found.id)
        assert [f"/cg/{each}/{name}" for each in bases] == found.directories
        assert found.directories == found.plan["cgroup_dirs"]
        assert [f"/cg/{each}/{name}" for each in ("memory", "cpu")] == found.plan[
            "programs_cgroups"
        ]
        assert {
            f"/cg/memory/{name}/memory.limit_in_bytes": str(64 << 20),
            f"/cg/pids/{name}/pids.max": "38",
            f"/cg/cpu/{name}/cpu.cfs_period_us": "100000",
            f"/cg/cpu/{name}/cpu.cfs_quota_us": "50000",
        } == dict(found.values)
        made.prebuilder.drop()
        assert ("drop", (found.id, found.directories)) == made.zygote.told[-1]

    def test_where_creates_follow_at_once_so_does_it(self, made: Made) -> None:
        assert made.prebuilder.take(asked(), made.zygote) is None
        made.built()
        assert made.prebuilder.take(asked(user="nobody"), made.zygote) is None
        made.backend.others_wait = True
        assert made.prebuilder.take(asked(user="nobody"), made.zygote) is None
        made.built(user="nobody")
        made.backend.others_wait = False
        made.prebuilder.ended("native-1")
        assert made.prebuilder.take(asked(), made.zygote) is None
        made.built()
        delays = [said[1] for verb, said in made.zygote.told if verb == "prebuild"]
        assert [prebuilder.CALM_S, 0.0] == delays[:2]
        assert delays[2] in (0.0, prebuilder.CALM_S), "a machine may be slow between the two"

    def test_one_of_a_create_at_the_same_time_stays_and_one_of_another_kind_goes(
        self, made: Made
    ) -> None:
        first = made.built()
        assert made.built() is first
        second = made.built(user="nobody")
        assert second is not first
        assert ["prebuild", "drop", "prebuild"] == made.zygote.verbs()
        assert [second.first_host_id] == made.ids.taken
        assert -1 == first.control.fileno()
        assert {second.control.fileno()} == made.zygote.watched

    def test_where_it_cannot_be_built_nothing_is_left_and_the_create_stands(
        self, made: Made
    ) -> None:
        base = Base("snap-1")
        made.zygote.is_gone = True
        draft, plan = planned()
        draft.base = draft.request.base = base
        assert made.follow(draft, plan) is None
        assert [] == made.ids.taken
        assert [False] == [each.is_open for each in base.holds]
        assert base.is_open, "it is the sandbox's"
        plan["seccomp"] = b"another filter"
        made.zygote.is_gone = False
        assert made.follow(draft, plan) is None, "its filter cannot be given another key"
        assert [] == made.ids.taken

    @pytest.mark.parametrize("switch", ["off", "no", "0", "FALSE"])
    def test_it_can_be_switched_off(self, switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RINGFENCE_PREBUILT", switch)
        for keep_s in (None, 0.0):
            assert Made(keep_s).follow(*planned()) is None
        monkeypatch.delenv("RINGFENCE_PREBUILT")
        on = Made(None)
        assert on.follow(*planned()) is not None, "the control"
        on.close()

    @pytest.mark.parametrize(
        "change",
        [
            {"trees": [{}]},
            {"placeholders": [()]},
            {"id_helpers": ["newuidmap"]},
            {"network": {}},
            {"disk": {}},
            {"namespaces": namespaces.CLONE_NEWUSER},
            {"releases_idle_pages": False},
        ],
        ids=lambda change: next(iter(change)),
    )
    def test_what_is_the_callers_own_is_not_repeated(
        self, made: Made, change: dict[str, Any]
    ) -> None:
        draft, plan = planned()
        assert prebuilder.is_repeatable(draft, plan), "the control"
        assert made.follow(draft, {**plan, **change}) is None
        draft.protected = ["a path"]
        assert made.follow(draft, plan) is None
        draft.protected, draft.base = [], SimpleNamespace(ids=("snap-1",), image="an image")
        assert made.follow(draft, plan) is None
        draft.base = SimpleNamespace(ids=(), image=None)
        assert made.follow(draft, plan) is None
        assert [] == made.zygote.told

    def test_a_fork_has_a_name_of_its_own(self, made: Made) -> None:
        found = made.built(labels={LINEAGE: "x"})
        assert found.plan["hostname"].endswith(found.id[-8:])
        assert made.prebuilder.take(asked(), made.zygote) is None


class TestTaking:
    def test_it_is_taken_once_and_told_to_wake(self, made: Made) -> None:
        found = made.built()
        assert wire.receive(made.zygote.ends[0])[0]["id"] == found.id

        assert made.prebuilder.take(asked(), made.zygote) is found
        assert ("wake",) == wire.receive(made.zygote.ends[0])[0]
        assert set() == made.zygote.watched
        assert made.prebuilder.take(asked(), made.zygote) is None
        assert made.built() is not found
        made.prebuilder.discard(found)

    @pytest.mark.parametrize(
        "other",
        [
            {"user": "nobody"},
            {"limits": Limits(pids=37)},
            {"python_env": True},
            {"id": "of-our-own"},
            {"mounts": (Mount("/srv/own"),)},
            {"labels": {LINEAGE: "x"}},
            {"profile": Profile("own", drop_capabilities=False)},
            {"base": Base("snap-1")},
        ],
        ids=lambda other: next(iter(other)),
    )
    def test_another_request_leaves_it_where_it_is(self, made: Made, other: dict[str, Any]) -> None:
        found = made.built()
        assert made.prebuilder.take(asked(**other), made.zygote) is None
        assert made.prebuilder.take(asked(env={"OWN": "1"}), made.zygote) is found, "the control"
        made.prebuilder.discard(found)

    def test_one_of_a_zygote_that_is_no_more_is_nobodys(self, made: Made) -> None:
        found = made.built()
        other: Any = Zygote()

        assert made.prebuilder.take(asked(), other) is None
        assert -1 == found.control.fileno()
        assert [found.first_host_id] == made.ids.taken, "its end cannot be seen"
        assert made.prebuilder._prebuilt is None

    def test_a_rewind_gets_one_in_place_of_the_one_that_has_just_ended(self, made: Made) -> None:
        found = made.built()
        again = asked(id="native-before")
        assert made.prebuilder.take(again, made.zygote) is None
        made.prebuilder.ended("native-before")
        made.backend.outlives = True
        assert made.prebuilder.take(again, made.zygote) is None, "no later process would know it"
        made.backend.outlives = False
        assert made.prebuilder.take(again, made.zygote) is found
        made.prebuilder.discard(found)
        assert made.follow(*planned(id="another")) is None
        assert made.follow(*planned(id="native-before")) is not None


class TestBinding:
    def plan(self, found: Complete, **wishes: Any) -> Any:
        """What a create with it plans."""
        _draft, plan = planned(**wishes)
        theirs: Any = found.plan
        return {**plan, **{name: theirs[name] for name in ("id", "uid_map", "gid_map")}}

    def test_the_plan_is_given_the_key_that_it_was_locked_down_with(self, made: Made) -> None:
        found = made.built()
        plan = self.plan(found)
        assert plan["tag_key"] != found.plan["tag_key"]

        assert found.bind(plan, SHAPE, []) is found.control
        assert (found.plan["tag_key"], found.plan["seccomp"]) == (plan["tag_key"], plan["seccomp"])
        assert ("claimed", found.id) == made.zygote.told[-1]

    @pytest.mark.parametrize(
        "change", [{"rlimits": []}, {"landlock": None}, {"uid": 7}, {"steps": [("hide", "/x")]}]
    )
    def test_another_plan_is_refused(self, made: Made, change: dict[str, Any]) -> None:
        found = made.built()
        plan = self.plan(found)
        other: Any = {**plan, **change}
        without: Any = {**plan, "seccomp": b""}
        with pytest.raises(SandboxLost, match="does not match"):
            found.bind(other, SHAPE, [])
        with pytest.raises(SandboxLost, match="does not match"):
            found.bind(self.plan(found, profile=Profile("own", tracing=True)), SHAPE, [])
        with pytest.raises(SandboxLost, match="does not match"):
            found.bind(without, SHAPE, [])
        assert "claimed" not in made.zygote.verbs()

    def test_one_that_has_ended_is_refused(self, made: Made) -> None:
        found = made.built()
        made.zygote.ends[0].shutdown(socket.SHUT_RDWR)
        assert made.prebuilder.take(asked(), made.zygote) is found
        with pytest.raises(SandboxLost, match="has ended"):
            found.bind(self.plan(found), SHAPE, [])
        found.discard()
        assert [] == made.ids.taken


class TestDiscarding:
    def test_its_alarm_is_set_again_until_its_time_is_up(self, made: Made) -> None:
        found = made.built()
        made.prebuilder.hear(made.zygote, made.zygote.alarm_fd)
        assert made.prebuilder._prebuilt is found
        assert 2 == len(made.zygote.alarms)
        assert 0 < made.zygote.alarms[1] <= KEEP_S
        made.prebuilder._until_s = 0.0
        other: Any = Zygote()
        made.prebuilder.hear(other, other.alarm_fd)
        assert made.prebuilder._prebuilt is found, "another's alarm"
        made.prebuilder.hear(made.zygote, made.zygote.alarm_fd)
        assert made.prebuilder._prebuilt is None
        assert ["prebuild", "drop"] == made.zygote.verbs()
        assert ([], set()) == (made.ids.taken, made.zygote.watched)
        made.built()
        assert 3 == len(made.zygote.alarms), "one that has come is set again"

    def test_one_that_ends_by_itself_is_discarded_at_once(self, made: Made) -> None:
        found = made.built()
        made.prebuilder.hear(made.zygote, found.control.fileno())
        assert made.prebuilder._prebuilt is None
        assert [] == made.ids.taken

    def test_one_over_a_snapshot_holds_it_and_goes_with_it(self, made: Made) -> None:
        base: Any = Base("snap-2", "snap-1")
        found = made.built(base=base)
        [held] = base.holds
        assert [found.base] == base.holds
        assert [(found.first_host_id, 1000, True)] == held.owners
        assert held.trees == found.plan["layers"]
        assert found.fits(asked(base=base))
        assert not found.fits(asked(base=Base("snap-2")))
        assert not found.fits(asked())
        made.prebuilder.drop_over("snap-3")
        assert made.prebuilder._prebuilt is found
        made.prebuilder.drop_over("snap-1")
        assert made.prebuilder._prebuilt is None
        assert [False, True] == [held.is_open, base.is_open]
        assert [] == made.ids.taken

    def test_of_a_zygote_that_died_the_ids_are_not_given_again(self, made: Made) -> None:
        found = made.built()
        other: Any = Zygote()
        made.prebuilder.lost(other)
        assert made.prebuilder._prebuilt is found
        made.prebuilder.lost(made.zygote)
        assert made.prebuilder._prebuilt is None
        assert [found.first_host_id] == made.ids.taken
        second = made.built()
        assert 2 == len(made.zygote.alarms), "a new zygote's is not set yet"
        made.zygote.is_gone = True
        made.prebuilder.drop()
        assert [found.first_host_id, second.first_host_id] == made.ids.taken

    def test_a_child_leaves_its_parents_alone(self, made: Made) -> None:
        found = made.built()
        made.zygote.owner = os.getppid()
        watched = set(made.zygote.watched)
        made.prebuilder.drop()
        assert ["prebuild"] == made.zygote.verbs()
        assert watched == made.zygote.watched
        assert [found.first_host_id] == made.ids.taken


class Pool:
    """A backend, as far as its pool's sandboxes look at it."""

    profiles = BUILT_IN

    def __init__(self) -> None:
        self.zygote: Any = Zygote()
        self.ids = Ids()
        self.under_way: list[str] = []
        self.prewarming = Prewarming(cast("Any", self))
        self.processes: list[subprocess.Popen[bytes]] = []

    def host_ids(self) -> Ids:
        return self.ids

    def making(self, sandbox_id: str) -> None:
        self.under_way.append(sandbox_id)

    def made(self, sandbox_id: str) -> None:
        self.under_way.remove(sandbox_id)

    def warm(self, name: str = "native-w", zygote: Any = None, base: Any = None) -> NativeWarm:
        spec = SandboxSpec(image="an image") if base else SandboxSpec()
        draft = planner.Draft(Request(spec, HARDENED, 1000), name, self.ids.take())
        draft.base, draft.group = base, cgroups.Group.known(0, {"": "/none/such"}, 0)
        self.processes.append(subprocess.Popen(["sleep", "1000"]))
        pid = self.processes[-1].pid
        ours, theirs = wire.socketpair()
        zygote = zygote or self.zygote
        zygote.ends.append(theirs)
        made = NativeWarm(
            self.prewarming,
            draft,
            [("/none/such/limit", "1")],
            pid,
            os.pidfd_open(pid),
            zygote,
            ours,
        )
        self.prewarming._warm[name] = made
        return made

    def close(self) -> None:
        self.prewarming.discard_all()
        for each in self.processes:
            assert -9 == each.wait(20)
        for end in self.zygote.ends:
            end.close()


@pytest.fixture
def pool() -> Iterator[Pool]:
    before = len(os.listdir("/proc/self/fd"))
    one = Pool()
    yield one
    one.close()
    assert ([], {}, []) == (one.ids.taken, one.prewarming._warm, one.under_way)
    assert before == len(os.listdir("/proc/self/fd"))


class TestWaiting:
    def test_one_that_is_discarded_gives_all_back_once(self, pool: Pool) -> None:
        closed: list[str] = []
        base: Any = SimpleNamespace(close=lambda: closed.append("base"))
        warm = pool.warm(base=base)
        warm.disk = cast("Any", SimpleNamespace(remove=lambda: closed.append("disk")))
        assert warm.alive
        for _ in range(2):
            warm.discard()
        assert (["base", "disk"], False) == (closed, warm.alive)
        assert [("clear up", ("native-w", ["/none/such"], []))] == pool.zygote.told
        assert ([], ()) == (pool.ids.taken, pool.prewarming.ids())
        assert -1 == warm.control.fileno()

    def test_one_that_ended_by_itself_is_not_alive_and_can_be_discarded(self, pool: Pool) -> None:
        warm = pool.warm()
        pool.processes[0].kill()
        assert -9 == pool.processes[0].wait(20)
        assert not warm.alive
        warm.discard()

    def test_the_end_of_a_zygote_is_that_of_its_own(self, pool: Pool) -> None:
        other: Any = Zygote()
        theirs, ours = pool.warm("native-t", other), pool.warm("native-o")
        pool.prewarming.discard_all(other)
        assert (False, True) == (theirs.alive, ours.alive)
        assert ("native-o",) == pool.prewarming.ids()
        for end in other.ends:
            end.close()

    def test_it_is_one_claims_and_nobodys_who_asks_for_more(self, pool: Pool) -> None:
        for spec in (SandboxSpec(id="another"), SandboxSpec(user="nobody")):
            warm = pool.warm()
            with pytest.raises(InvalidRequest, match="does not match"):
                warm.claim(spec)
            assert (False, ()) == (warm.alive, pool.prewarming.ids())
            with pytest.raises(LifecycleError, match="already claimed"):
                warm.claim(SandboxSpec())
        warm = pool.warm()
        little = SandboxSpec(limits=Limits(inodes=100))
        with pytest.raises(InvalidRequest, match="at least 128"):
            warm.claim(little)
        assert not warm.alive

    def test_it_fits_what_can_still_be_bound(
        self, pool: Pool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        warm, of_image = (
            pool.warm(),
            pool.warm("native-i", base=SimpleNamespace(close=lambda: None)),
        )
        assert warm.fits(SandboxSpec(limits=Limits(pids=9), env={"A": "b"}))
        many = tuple(Mount(f"/m/{number}", "/usr") for number in range(prewarming.MOST_MOUNTS + 1))
        assert warm.fits(SandboxSpec(mounts=many[1:]))
        assert not warm.fits(SandboxSpec(mounts=many))
        asked = SandboxSpec(image="an image")
        assert not warm.fits(asked)
        assert not of_image.fits(SandboxSpec())
        monkeypatch.setattr(images, "resolved", lambda spec: spec)
        assert of_image.fits(asked)
        other = SandboxSpec(image="another")
        monkeypatch.setattr(images, "resolved", lambda _spec: other)
        assert not of_image.fits(asked), "the name means another image by now"
        monkeypatch.setattr(images, "resolved", lambda _spec: None)
        assert not of_image.fits(asked)

    @pytest.mark.parametrize(
        ("change", "by_zygote"),
        [
            ({}, False),
            ({"cgroup_values": [("/none/such/limit", "2")]}, True),
            ({"cgroup_dirs": ["/other"]}, True),
            ({"trees": [{}]}, True),
            ({"placeholders": [("/", "a", 1, 2)]}, True),
        ],
    )
    def test_the_zygote_is_asked_where_more_than_the_plan_is_to_be_done(
        self, pool: Pool, change: dict[str, Any], by_zygote: bool
    ) -> None:
        warm = pool.warm()
        plan: Any = {
            "cgroup_dirs": warm.directories, "cgroup_values": warm.values, "trees": [],
            "placeholders": [], **change,
        }  # fmt: skip
        control = warm.bind(plan, SHAPE, [])
        if by_zygote:
            assert [("claim", SHAPE)] == pool.zygote.told
            assert control is not warm.control
            assert plan == wire.receive(pool.zygote.ends[-1])[0]
            control.close()
        else:
            assert [("claimed", "native-w")] == pool.zygote.told
            assert control is warm.control
            assert plan == wire.receive(pool.zygote.ends[0])[0]

    def test_what_is_built_ahead_asks_for_nothing_that_can_be_bound_later(self) -> None:
        asked = SandboxSpec(
            network=NetworkPolicy(rules=(NetworkRule("a.example", "443"),)),
            env={"A": "b"}, secrets={"S": "x"}, deny=("/usr/x",),
            mounts=(Mount("/m"),), limits=Limits(memory_bytes=64 << 20), user="nobody",
            allow_degraded=("landlock", NAMESPACES),
        )  # fmt: skip
        found = prewarming.plain(asked)
        assert ("nobody", True) == (found.user, found.network.is_none)
        assert ((), {}, {}, (), Limits()) == (
            found.mounts, dict(found.env), dict(found.secrets), found.deny, found.limits,
        )  # fmt: skip
        assert {"*", NAMESPACES} == {*found.allow_degraded}
        assert {"*"} == {*prewarming.plain(SandboxSpec()).allow_degraded}
        shared = prewarming.plain(SandboxSpec(network=NetworkPolicy.unrestricted()))
        assert shared.network.is_unrestricted
