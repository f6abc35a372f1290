"""What every backend with an agent inside refuses, reserves, restores and gives back."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.native.outside import same_descriptors

from ringfence.backends.local.agents import agents
from ringfence.backends.local.agents.agents import AgentBackend, NoIsolationError
from ringfence.backends.local.answers import Refused
from ringfence.errors import (
    BackendUnavailable,
    InvalidRequest,
    NetworkPolicyError,
    RingfenceError,
    Unsupported,
)
from ringfence.guest.isolation import STEP
from ringfence.model.limits import Limits
from ringfence.model.mount import Mount
from ringfence.model.net.network import Credential, NetworkPolicy, NetworkRule
from ringfence.model.spec import DEBUG, OS_HARDENED, UNRESTRICTED, SandboxSpec
from ringfence.policy.seccomp import SeccompPolicy

pytestmark = pytest.mark.anyone
RULES = NetworkPolicy(rules=(NetworkRule("a.example", "443"),))
WRITES = NetworkPolicy(
    rules=(NetworkRule("a.example", "443", credential=Credential("key", "X-Key")),)
)


class Backend(AgentBackend):
    name = "mine"
    held = ("memory_bytes", "open_files")
    not_strong, not_root, no_rules = "it is light", "no root here", "no rules here"
    no_limits, no_images = "nobody counts that", "no images here"


class WithHelpers(Backend):
    lets_in = saves = True
    no_images = ""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.made: list[Any] = []

    def provision_with(self, spec: SandboxSpec, taken_under: SandboxSpec, content: int) -> Any:
        self.made.append((spec, taken_under, os.read(content, 10)))
        if spec.labels:
            raise BackendUnavailable("full")
        return "restored"


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    with same_descriptors():
        yield


@pytest.mark.parametrize(
    ("options", "kind", "field", "why"),
    [
        ({"tier": "strong"}, Unsupported, "tier", "it is light"),
        ({"template": "other"}, InvalidRequest, "template", "unknown template"),
        ({"image": "debian"}, Unsupported, "image", "no images here"),
        ({"profile": "own_root"}, InvalidRequest, "profile", "unknown profile"),
        ({"user": "root"}, Unsupported, "user", "no root here"),
        ({"user": "0"}, Unsupported, "user", "no root here"),
        (
            {"network": NetworkPolicy.parse("unrestricted")},
            Unsupported,
            "network",
            "host's network",
        ),
        ({"network": RULES}, NetworkPolicyError, "network", "no rules here"),
        ({"secrets": {"key": "value"}}, Unsupported, "secrets", "secrets"),
        ({"mounts": (Mount("/data", "/usr"),)}, Unsupported, "mounts", "mounts"),
        ({"memory_dir": "/usr"}, Unsupported, "memory_dir", "memory_dir"),
        ({"deny": ("/usr/x",)}, Unsupported, "deny", "deny"),
        ({"python_env": True}, Unsupported, "python_env", "python_env"),
        ({"limits": Limits(cpus=1)}, Unsupported, "limits.cpus", "nobody counts that"),
        ({"limits": Limits(pids=9)}, Unsupported, "limits.pids", "nobody counts that"),
        ({"limits": Limits(open_files=63)}, InvalidRequest, "limits.open_files", "at least 64"),
        (
            {"limits": Limits(idle_timeout_s=9)},
            Unsupported,
            "limits.idle_timeout_s",
            "session manager",
        ),
        ({"unprotect": ("nothing of ours",)}, InvalidRequest, "unprotect", "nothing of ours"),
    ],
)
def test_what_it_does_not_do_is_refused_by_its_field(
    options: dict[str, Any], kind: type[RingfenceError], field: str, why: str
) -> None:
    with pytest.raises(kind, match=why) as refused:
        Backend(None).check(SandboxSpec(**options))
    assert field == refused.value.field
    Backend(None).check(SandboxSpec(limits=Limits(open_files=64, memory_bytes=1 << 28)))


@pytest.mark.parametrize(
    ("options", "kind", "field"),
    [
        ({"python_env": True}, Unsupported, "python_env"),
        ({"network": WRITES}, InvalidRequest, "secrets"),
        ({"secrets": {"A": "x"}, "env": {"A": "y"}}, InvalidRequest, "secrets"),
        ({"mounts": (Mount("/data", "/none/such"),)}, InvalidRequest, "mounts.source"),
        ({"memory_dir": "/etc/passwd"}, InvalidRequest, "memory_dir"),
        ({"memory_dir": "/none/such"}, InvalidRequest, "memory_dir"),
    ],
)
def test_where_helpers_go_in_the_rest_is_checked(
    options: dict[str, Any], kind: type[RingfenceError], field: str
) -> None:
    backend = WithHelpers(None)
    with pytest.raises(kind) as refused:
        backend.check(SandboxSpec(**options))
    assert field == refused.value.field
    backend.check(
        SandboxSpec(
            image="debian", network=WRITES, secrets={"key": "value"}, deny=("/usr/x",),
            mounts=(Mount("/data", "/usr"),), memory_dir="/usr", disk_root=True,
        )
    )  # fmt: skip
    backend.no_disk = lambda spec: "in memory only"  # type: ignore[method-assign]
    with pytest.raises(Unsupported, match="in memory only"):
        backend.check(SandboxSpec(disk_root=True))


@pytest.mark.parametrize(
    ("options", "operation"),
    [
        ({"mounts": (Mount("/data", "/usr"),)}, "mounts"),
        ({"mounts": (Mount("/data"),)}, "mounts"),
        ({"memory_dir": "/usr"}, "mounts"),
        ({"deny": ("/usr/x",)}, "deny"),
        ({"network": RULES}, "network"),
        ({"secrets": {"A": "x"}}, "secrets"),
    ],
)
def test_without_namespaces_of_its_own_what_takes_them_is_refused(
    options: dict[str, Any], operation: str
) -> None:
    backend = WithHelpers(None)
    with pytest.raises(Unsupported) as refused:
        backend.check_without_isolation(SandboxSpec(**options))
    assert operation == refused.value.field
    own = SandboxSpec(mounts=(Mount("/data", access="read_write"),))
    backend.check_without_isolation(own)
    with pytest.raises(Unsupported) as refused:
        backend.check_without_isolation(own, restores=True)
    assert "restore" == refused.value.field


def test_limits_that_nobody_holds_may_be_missing_by_name() -> None:
    backend = Backend(None)
    asked = Limits(cpus=1, pids=9, memory_bytes=1 << 28)
    for allowed in (("cpu_limit", "pids_limit"), ("*",)):
        spec = SandboxSpec(limits=asked, allow_degraded=allowed)
        backend.check(spec)
        assert {"cpu_limit", "pids_limit"} == {*backend.degraded(spec)}
        assert "memory_limit" in backend.degraded(spec, ("memory_bytes",))
    with pytest.raises(Unsupported, match="nobody counts") as refused:
        backend.check(SandboxSpec(limits=asked, allow_degraded=("cpu_limit",)))
    assert "limits.pids" == refused.value.field
    assert () == backend.degraded(SandboxSpec(limits=Limits(open_files=64)), ("pids",))


def test_a_root_without_rights_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Backend(None)
    for user in ("root", "0"):
        assert "no user root: no root here" == backend.refuses(SandboxSpec(user=user))
    assert "" == backend.refuses(SandboxSpec(user="1000"))
    monkeypatch.setattr(Backend, "root_is_nobody", lambda _self: True)
    assert "" == backend.refuses(SandboxSpec(user="root"))
    backend.check(SandboxSpec(user="root"))

    def broken(_self: Any) -> bool:
        raise BackendUnavailable("no daemon")

    monkeypatch.setattr(Backend, "root_is_nobody", broken)
    assert "" == backend.refuses(SandboxSpec(user="root")), "its report says so"


def test_profiles_come_and_go() -> None:
    backend, policy = Backend(None), SeccompPolicy.default()
    backend.define_profile("other", policy)
    backend.check(SandboxSpec(profile="other"))
    assert policy is backend.policies["other"]
    backend.define_profile("other", None)
    backend.define_profile("other", None)
    with pytest.raises(InvalidRequest, match="unknown profile") as refused:
        backend.check(SandboxSpec(profile="other"))
    assert f"one of {OS_HARDENED}, {DEBUG}, {UNRESTRICTED}" == refused.value.hint


def test_a_name_is_one_sandboxs_also_while_it_is_made() -> None:
    backend = Backend(None)
    assert "mine" == backend._new_id(SandboxSpec(id="mine"))
    with pytest.raises(InvalidRequest, match="already exists"):
        backend._new_id(SandboxSpec(id="mine"))
    backend._making.clear()
    backend._live["mine"] = SimpleNamespace()  # type: ignore[assignment]
    with pytest.raises(InvalidRequest, match="already exists") as refused:
        backend._new_id(SandboxSpec(id="mine"))
    assert "id" == refused.value.field
    assert backend._new_id(SandboxSpec()).startswith("mine-")


class Catalogue:
    def __init__(self, directory: Path) -> None:
        self.directory, self.done = directory, [""][:0]
        self.under = SandboxSpec(id="before", env={"A": "1"}, secrets={"key": "old"})

    def open(self, snapshot_id: str) -> Any:
        return snapshot_id, self.under, os.open(self.directory / "content", os.O_RDONLY)

    def list(self) -> list[str]:
        return ["kept"]

    def delete(self, snapshot_id: str) -> None:
        self.done.append(snapshot_id)


def test_one_is_restored_under_its_own_spec_or_another(tmp_path: Path) -> None:
    (tmp_path / "content").write_bytes(b"files")
    backend: Any = WithHelpers(None)
    catalogue = Catalogue(tmp_path)
    backend.catalogue = lambda: catalogue
    assert "restored" == backend.restore("snap-1")
    assert "restored" == backend.restore("snap-1", secrets={"key": "new"})
    other = SandboxSpec(id="other")
    assert "restored" == backend.restore("snap-1", other)
    with pytest.raises(BackendUnavailable):
        backend.restore("snap-1", SandboxSpec(labels={"a": "b"}))
    first, second, third, _ = backend.made
    assert (None, {}, {"A": "1"}) == (first[0].id, dict(first[0].secrets), dict(first[0].env))
    assert {"key": "new"} == dict(second[0].secrets)
    assert (other, catalogue.under, b"files") == third
    assert ["kept"] == backend.snapshots()
    backend.delete_snapshot("snap-1")
    assert ["snap-1"] == catalogue.done


def test_where_nothing_is_saved_nothing_is_there() -> None:
    backend = Backend(None)
    assert [] == backend.snapshots()
    for call in (
        lambda: backend.restore("snap-1"),
        lambda: backend.delete_snapshot("snap-1"),
        lambda: backend.beside("/none/such"),
        lambda: backend.prewarm(SandboxSpec()),
    ):
        with pytest.raises(Unsupported):
            call()
    with pytest.raises(InvalidRequest):
        backend.prewarm(SandboxSpec(template="other"))


def test_its_end_is_that_of_all_it_has() -> None:
    backend, done = Backend(None), [""][:0]
    for name in ("a", "b"):
        backend._live[name] = SimpleNamespace(terminate=lambda each=name: done.append(each))  # type: ignore[assignment]
    backend._jailer = SimpleNamespace(close=lambda: done.append("jailer"))  # type: ignore[assignment]
    backend._host_ids = SimpleNamespace(close=lambda: done.append("ids"))  # type: ignore[assignment]
    backend.close()
    backend.close()
    assert ["a", "b", "jailer", "ids", "a", "b"] == done


def test_a_jailer_is_this_processs_and_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    def launched(*_: Any) -> Any:
        started.append(SimpleNamespace(owner=os.getpid(), alive=True))
        return started[-1]

    monkeypatch.setattr(agents, "Launched", launched)
    backend: Any = Backend(None)
    first = backend.jailer()
    assert first is backend.jailer()
    first.alive = False
    second = backend.jailer()
    second.owner = os.getppid()
    assert [first, second, backend.jailer()] == started


class TestSettings:
    def of(self, *, filtered: bool = True, **options: Any) -> Any:
        spec = SandboxSpec(**options.pop("spec", {}))
        return agents.settings(spec, 1000, filtered=filtered, **options)

    def test_limits_are_of_each_process_both_ways(self) -> None:
        found = {which: (soft, hard) for which, soft, hard in self.of()["rlimits"]}
        assert (4096, 4096) == found[resource.RLIMIT_NOFILE]
        assert (1, 1) == found[resource.RLIMIT_CORE]
        assert resource.RLIMIT_NPROC not in found
        own = self.of(processes=77, spec={"limits": Limits(open_files=99)})["rlimits"]
        more = {which: (soft, hard) for which, soft, hard in own}
        assert ((77, 77), (99, 99)) == (more[resource.RLIMIT_NPROC], more[resource.RLIMIT_NOFILE])
        assert more[resource.RLIMIT_MEMLOCK] > found[resource.RLIMIT_MEMLOCK]

    def test_a_filter_is_there_unless_the_profile_or_the_launcher_does_without(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plain = self.of()
        assert plain["seccomp"]
        assert 0 != plain["tag_key"] != self.of()["tag_key"], "each has its own"
        for made in (self.of(filtered=False), self.of(spec={"profile": UNRESTRICTED})):
            assert (b"", 0) == (made["seccomp"], made["tag_key"])
        monkeypatch.setattr(os, "urandom", lambda count: b"k" * count)
        plain = self.of()
        for options in ({"unix_sockets": False}, {"by_init": True}, {"spec": {"profile": DEBUG}}):
            assert plain["seccomp"] != self.of(**options)["seccomp"], options
        own = SeccompPolicy("allow", "allow", (), ())
        assert len(plain["seccomp"]) > len(self.of(policy=own)["seccomp"])

    def test_shared_memory_is_bounded_where_it_is_covered(self) -> None:
        limits = {"limits": Limits(memory_bytes=1 << 30)}
        assert 1 << 29 == self.of(covered=("/dev/shm",), spec=limits)["shm_bytes"]
        assert 0 == self.of(spec=limits)["shm_bytes"]
        room: Any = {"size_bytes": 1}
        assert 0 == self.of(covered=("/dev/shm",), room=room, spec=limits)["shm_bytes"]
        assert (5, 6) == tuple(self.of(samples=(5, 6))[each] for each in ("pids", "memory_bytes"))


def test_a_refusal_of_isolation_alone_is_taken_for_one() -> None:
    with pytest.raises(NoIsolationError, match="unshare"):
        agents.isolation_refused(Refused(1, f"{STEP}: unshare"))
    agents.isolation_refused(Refused(1, "exec: not permitted"))


@pytest.mark.parametrize("root", ["/work", "/usr/work"])
def test_a_working_directory_is_made_unless_it_is_the_systems(root: str) -> None:
    done: list[str] = []

    def refuse(path: str) -> None:
        done.append(path)
        raise BackendUnavailable("no room")

    sandbox: Any = SimpleNamespace(
        spec=SandboxSpec(workdir=root), files=SimpleNamespace(make_dir=refuse)
    )
    if "/work" == root:
        with pytest.raises(BackendUnavailable):
            agents.make_workdir(sandbox)
        assert ["/work"] == done
    else:
        agents.make_workdir(sandbox)
        assert [] == done, "the system's stays as it is"
