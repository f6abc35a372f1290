"""What is read back of a sandbox with an agent, each from texts as the kernel has them."""

from __future__ import annotations

import io
import os
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.backends.local.agents import posture
from ringfence.backends.local.agents.guest_granted import granted
from ringfence.backends.local.agents.inside import NAMESPACES
from ringfence.backends.local.agents.posture import AgentReader, ContainedReader
from ringfence.backends.local.host import cgroups
from ringfence.backends.local.mounts import template
from ringfence.backends.local.mounts.protect import Protected
from ringfence.backends.local.netns import NetworkTables, of_network
from ringfence.backends.local.protections import BoundsReader, Reader, protections_of
from ringfence.backends.local.routes import ways_of
from ringfence.errors import NetworkPolicyError
from ringfence.model.limits import Limits
from ringfence.model.net.network import NetworkPolicy, NetworkRule
from ringfence.model.session import ResolvedMount
from ringfence.model.spec import UNRESTRICTED, SandboxSpec
from ringfence.model.state import State
from ringfence.policy.redirects import LISTEN_PORT, RESOLVER

pytestmark = pytest.mark.anyone
OWN = dict.fromkeys(NAMESPACES, 1)
RULES = NetworkPolicy(rules=(NetworkRule("a.example", "443"),))
LO = "Inter-|   Receive\n face |bytes\n    lo: 0 0\n"
MASKS = ["/proc/kcore", "/proc/keys"]


def line(target: str, options: str = "ro,nosuid", kind: str = "ext4", device: str = "8:1") -> str:
    return f"30 20 {device} / {target} {options} - {kind} /dev/sda1 rw\n"


class Contained:
    """A sandbox whose agent shows the files that the test has for it."""

    def __init__(self, mounts: str = "", **spec: Any) -> None:
        self.files = self
        self.texts = {"/proc/self/mountinfo": mounts, posture._MOST_NAMESPACES: "0\n"}
        self.pid, self.spec = os.getpid(), SandboxSpec(**spec)
        self.namespace_fds: list[int] = []
        self.may_reach_sockets, self.mounting = False, None
        self.mounts: list[ResolvedMount] = []

    def open_read(self, path: str) -> io.BytesIO:
        return io.BytesIO(self.texts[path].encode())


class Agent(AgentReader):
    """Reads a status that the test has written."""

    words: dict[str, str]
    net = LO

    def status(self) -> dict[str, str]:
        return self.words

    def tables(self) -> NetworkTables:
        return NetworkTables(lambda _name: self.net)


def agent(words: dict[str, str] | None = None, inodes: dict[str, int] | None = None) -> Any:
    made = Agent(Contained(), OWN if inodes is None else inodes)  # type: ignore[arg-type]
    made.words = words or {}
    return made


def contained(mounts: str = "", **spec: Any) -> Any:
    return ContainedReader(Contained(mounts, **spec))  # type: ignore[arg-type]


class TestProcess:
    def test_namespaces_are_its_own_or_named(self) -> None:
        assert "enforced" == agent().namespaces()[0]
        ours = {**OWN, "net": os.stat("/proc/self/ns/net").st_ino}
        assert ("degraded", "shared with the host: net") == agent(inodes=ours).namespaces()[:2]
        looked = AgentReader(Contained())  # type: ignore[arg-type]
        assert list(NAMESPACES) == looked.shared(), "of this very process"

    def test_its_user_is_nobodys_elsewhere(self) -> None:
        ids = "1000\t{0}\t1000\t1000"
        assert "enforced" == agent({"Uid": ids.format(70000)}).host_identity()[0]
        assert "missing" == agent({"Uid": ids.format(0)}).host_identity()[0]
        shared = {**OWN, "user": os.stat("/proc/self/ns/user").st_ino}
        assert "degraded" == agent({"Uid": ids.format(70000)}, shared).host_identity()[0]

    @pytest.mark.parametrize("held", [None, "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"])
    def test_each_set_of_capabilities_counts(self, held: str | None) -> None:
        words = dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), "0" * 16)
        if held is None:
            assert "enforced" == agent(words).capabilities()[0]
        else:
            words[held] = "0000000000000400"
            assert ("degraded", f"not empty: {held}") == agent(words).capabilities()[:2]

    def test_what_is_kept_on_purpose_is_so_in_its_set_alone(self) -> None:
        words = dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), "0")
        words |= {"CapEff": "400", "CapBnd": "400"}
        made = agent(words)
        made.kept_on_purpose = lambda: {"CapEff": 0x400}
        assert "not empty: CapBnd" == made.capabilities()[1]
        made.kept_on_purpose = lambda: {"CapEff": 0x400, "CapBnd": 0x400}
        assert "enforced" == made.capabilities()[0]

    @pytest.mark.parametrize(
        ("check", "word", "good", "bad"),
        [("seccomp", "Seccomp", "2", "1"), ("no_new_privs", "NoNewPrivs", "1", "0")],
    )
    def test_a_flag_of_its_status(self, check: str, word: str, good: str, bad: str) -> None:
        assert "enforced" == getattr(agent({word: good}), check)()[0]
        assert "degraded" == getattr(agent({word: bad}), check)()[0]

    def test_no_interface_but_lo_leads_out(self) -> None:
        assert "enforced" == agent().network()[0]
        made = agent()
        made.net = LO + "  eth0: 0 0\n"
        assert ("missing", "interfaces: eth0") == made.network()[:2]
        ours = {**OWN, "net": os.stat("/proc/self/ns/net").st_ino}
        assert ("missing", "interfaces: the host") == agent(inodes=ours).network()[:2]


class TestMounts:
    def test_no_mount_honours_set_user_id(self) -> None:
        assert "enforced" == contained(line("/")).root_file_system()[0]
        loose = contained(line("/") + line("/data", "rw"))
        assert ("degraded", "set-user-id programs work in /data") == loose.root_file_system()[:2]
        loose.contained.namespace_fds = [3]
        assert "missing" == loose.root_file_system()[0], "the agent makes it itself"
        covered = contained(line("/data", "rw") + line("/data"))
        assert "enforced" == covered.root_file_system()[0], "what is covered is out of sight"

    def test_only_what_was_asked_for_is_writable(self) -> None:
        own = line("/", "rw") + line("/tmp", "rw", "tmpfs") + line("/dev/null", "rw")
        made = contained(own + line("/usr") + line("/data", "rw") + line("/data/below", "rw"))
        made.sandbox.mounts = [ResolvedMount("/data", "read_write", "/h")]
        assert (
            "enforced",
            "1 trees of the host, read-only by the kernel",
        ) == made.read_only_mounts()
        made.sandbox.mounts = [ResolvedMount("/data", "read_only", "/h")]
        assert ("missing", "writable: /data, /data/below") == made.read_only_mounts()[:2]
        made.sandbox.mounts = [ResolvedMount("/data/below", "read_write", "/h")]
        assert ("missing", "writable: /data") == made.read_only_mounts()[:2]

    def test_proc_is_masked_and_read_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(template, "masked", lambda: MASKS)
        proc, masks = line("/proc", "ro", "proc"), "".join(map(line, MASKS))
        assert "enforced" == contained(proc + masks).kernel_interfaces()[0]
        for mounts, why in (
            (line("/proc", "rw", "proc") + masks, "/proc can be written to"),
            (proc + line(MASKS[0]), f"shown: {MASKS[1]}"),
            (proc + masks + line("/sys", "ro", "sysfs"), "shown: /sys"),
        ):
            assert ("degraded", why) == contained(mounts).kernel_interfaces()[:2]
        assert (
            "enforced"
            == contained(proc + masks + line("/sys", "ro", "tmpfs")).kernel_interfaces()[0]
        )

    def test_protected_paths_are_read_only_on_top(self) -> None:
        made = contained(line("/d/.git") + line("/d/x", "rw"))
        assert made.protected_paths() is None
        first, second = Protected(), Protected()
        first.steps = [("protect", "/d/.git"), ("pin", "/d/loose")]
        made.contained.mounting = SimpleNamespace(protected=[first, second])
        assert ("enforced", "1 paths in writable mounts") == made.protected_paths()
        second.steps = [("protect", "/d/x"), ("protect", "/d/absent")]
        assert ("missing", "writable: /d/x, /d/absent") == made.protected_paths()[:2]

    def test_what_a_count_or_a_filter_would_hold(self) -> None:
        made = contained()
        assert "enforced" == made.nested_user_namespaces()[0]
        made.contained.texts[posture._MOST_NAMESPACES] = "15000\n"
        assert "degraded" == made.nested_user_namespaces()[0]
        assert made.unix_sockets() is None
        made.contained.may_reach_sockets = True
        assert "degraded" == made.unix_sockets()[0]
        assert made.process_trees() is None
        assert "degraded" == contained(profile=UNRESTRICTED).process_trees()[0]


class TestNetwork:
    """A namespace is judged by its interfaces, routes and sockets, and by who serves these."""

    def tables(self, policy: NetworkPolicy = RULES, **others: str) -> NetworkTables:
        ways = sorted(each for each in ways_of(policy) if ":" not in each)
        head = "  sl  local_address rem_address   st\n"
        port = int.from_bytes(bytes(map(int, RESOLVER[0].split("."))), "little")
        texts = {
            "dev": LO,
            "fib_trie": "".join(
                f"  |-- {way.partition('/')[0]}\n    /{way.partition('/')[2]} host LOCAL\n"
                for way in ["127.0.0.0/8", *ways]
            ),
            "tcp": f"{head}0: 0100007F:{LISTEN_PORT:04X} 0:0 0A 0:0 0:0 0 0 0 11 1\n",
            "udp": f"{head}0: {port:08X}:{RESOLVER[1]:04X} 0:0 07 0:0 0:0 0 0 0 12 1\n",
            **others,
        }

        def read(name: str) -> str:
            if name not in texts:
                raise FileNotFoundError(2, "No such file or directory", name)
            return texts[name]

        return NetworkTables(read)

    def verdict(self, tables: NetworkTables, policy: NetworkPolicy = RULES, **how: Any) -> Any:
        network: Any = SimpleNamespace(inodes=[11, 12], check_served=lambda: how.get("kept", []))
        return of_network(tables, network, policy)

    def test_what_rules_allow_and_no_more(self) -> None:
        assert ("enforced", "nothing but lo, and through it what 1 rule allows") == self.verdict(
            self.tables()
        )
        public = NetworkPolicy.parse("public,!b.example")
        assert self.verdict(self.tables(public), public)[1].endswith(
            "2 rules allow, among it every public host"
        )
        denied = NetworkPolicy(rules=(*RULES.rules, NetworkRule("public", action="deny")))
        assert "public host" not in self.verdict(self.tables(denied), denied)[1]

    def test_each_way_that_no_rule_has_is_told(self) -> None:
        beyond = "  |-- 192.0.2.0\n    /24 host LOCAL\n"
        table = beyond + self.tables()._read("fib_trie")
        seen = self.tables(fib_trie=table)
        assert ("missing", "leads where no rule does: 192.0.2.0/24") == self.verdict(seen)[:2]
        six = "20010db8" + "0" * 24 + " 20 " + "0" * 32 + " 00 " + "0" * 32 + " 0 0 0 {} lo\n"
        for flags, status in (("80200001", "missing"), ("00200001", "enforced")):
            assert status == self.verdict(self.tables(ipv6_route=six.format(flags)))[0]
        seen = self.tables(dev=LO + "  eth0: 0\n")
        assert ("missing", "interfaces: lo, eth0") == self.verdict(seen)[:2]
        none = NetworkPolicy()
        nothing = self.tables(fib_trie="  |-- 127.0.0.0\n    /8 host LOCAL\n")
        assert "enforced" == self.verdict(nothing, none)[0]
        assert ("missing", "leads somewhere: 192.0.2.0/24") == self.verdict(
            seen_only(beyond), none
        )[:2]

    @pytest.mark.parametrize(
        ("table", "change"),
        [
            ("tcp", (" 11 ", " 99 ")),
            ("udp", (" 12 ", " 99 ")),
            ("tcp", (" 0A ", " 01 ")),
            ("tcp", (f":{LISTEN_PORT:04X} ", f":{LISTEN_PORT + 1:04X} ")),
        ],
    )
    def test_listeners_are_ours_alone(self, table: str, change: tuple[str, str]) -> None:
        seen = self.tables(RULES, **{table: self.tables()._read(table).replace(*change)})
        assert ("missing", "the listeners in the sandbox are not Ringfence's") == self.verdict(
            seen
        )[:2]
        every = f"1: {'0' * 32}:{LISTEN_PORT:04X} 0:0 0A 0:0 0:0 0 0 0 99 1\n"
        assert "missing" == self.verdict(self.tables(tcp6=every))[0], "one at every address"

    def test_who_serves_them_counts_too(self) -> None:
        kept = self.verdict(self.tables(), kept=["landlock"])
        assert ("degraded", "the process that holds the rules could not get: landlock") == kept[:2]
        learning = NetworkPolicy(rules=RULES.rules, learn=True)
        assert "degraded" == self.verdict(self.tables(learning), learning)[0]

        def unknown() -> Any:
            raise NetworkPolicyError("it serves nothing")

        network: Any = SimpleNamespace(inodes=[11, 12], check_served=unknown)
        with pytest.raises(NetworkPolicyError):
            of_network(self.tables(), network, RULES)


def seen_only(trie: str) -> NetworkTables:
    return NetworkTables(lambda name: {"dev": LO, "fib_trie": trie}.get(name, ""))


class Bounds(BoundsReader):
    def most(self) -> Any:
        return self.asked

    asked: Any = None


def test_bounds_are_those_that_were_asked_for() -> None:
    reader = Bounds(SimpleNamespace())
    reader.bounds = 64, 128, 1 << 20, 500
    checks = (reader.pids_limit, reader.open_files_limit, reader.disk_quota, reader.inode_quota)
    assert ["enforced"] * 4 == [check()[0] for check in checks if check() is not None]  # type: ignore[index]
    reader.asked = reader.bounds
    assert ["enforced"] * 4 == [check()[0] for check in checks]  # type: ignore[index]
    reader.asked = 63, 127, (1 << 20) - 4096, 499
    assert ["missing", "missing", "enforced", "missing"] == [check()[0] for check in checks]  # type: ignore[index]
    reader.asked = 64, 128, (1 << 20) - 4097, 500
    assert "missing" == reader.disk_quota()[0]  # type: ignore[index]
    reader.asked, reader.bounds = None, (0, 0, 0, 0)
    assert ["enforced", "enforced", "missing", "missing"] == [check()[0] for check in checks]  # type: ignore[index]


def test_a_processor_limit_is_judged_where_it_was_asked_for() -> None:
    sandbox: Any = SimpleNamespace(spec=SandboxSpec())
    group = cgroups.Group.known(0, {}, 0)
    assert Reader(sandbox).of_cpus(group, "none") is None
    sandbox.spec = SandboxSpec(limits=Limits(cpus=1))
    assert ("missing", "none") == Reader(sandbox).of_cpus(group, "none")[:2]  # type: ignore[index]


@pytest.mark.parametrize("state", [State.SUSPENDED, State.TERMINATED])
def test_of_one_that_does_not_answer_the_last_reading_holds(state: State) -> None:
    sandbox: Any = SimpleNamespace(state=state, last_protections=())

    def never() -> Any:
        raise AssertionError("nobody can be asked")

    [found] = protections_of(sandbox, never)
    assert ("all", "degraded") == (found.name, found.status)
    assert () == sandbox.last_protections
    sandbox.last_protections = (found, found)
    assert (found, found) == protections_of(sandbox, never)


def test_what_is_granted_is_what_the_kernel_inside_says() -> None:
    mounts = [
        ResolvedMount("/kept", "read_write", "/h"),
        ResolvedMount("/shown", "read_only", "/s"),
    ]
    writable = {"/tmp", "/kept", "/home/sandbox"}
    asked: list[str] = []

    def ask(verb: str, paths: list[str] | None = None) -> tuple[bytes, list[int]]:
        if paths is None:
            return b"64 128 4096 9", []
        asked.extend(paths)
        return b"".join(b"1%d" % (path[len("/seen") :] in writable) for path in paths), []

    def send(message: Any, fds: list[int]) -> None:
        for _ in message[1]:
            os.write(fds[0], b"0")

    sandbox: Any = SimpleNamespace(
        id="g-1", backend=SimpleNamespace(name="gvisor"), mounts=mounts, ask=ask, send=send,
        spec=SandboxSpec(limits=Limits(open_files=9999, wall_time_s=5), network=RULES),
        seen_at=lambda path: f"/seen{path}", require_awake=lambda: None,
        files=SimpleNamespace(open_read=lambda _: io.BytesIO(b"Name:\tx\nSeccomp:\t2\n")),
    )  # fmt: skip
    found = granted(sandbox)
    assert (True, True, True) == (
        found.can_write_filesystem, found.has_network, found.syscall_filter_active
    )  # fmt: skip
    assert ("/home/sandbox", "/kept", "/tmp") == found.writable_paths
    assert {"/", "/usr", "/shown"} <= set(found.readable_paths)
    assert (128, 5) == (found.limits.open_files, found.limits.wall_time_s)
    assert found.is_persistent
    assert len(asked) == len(set(asked))
    writable.remove("/kept")
    assert not granted(sandbox).is_persistent, "it cannot write to what is kept"
