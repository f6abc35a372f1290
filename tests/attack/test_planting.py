"""Where the attack happens: what is planted, which probes say something, and who judges."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.attack import again, inside, outside, runner, scope, service
from ringfence.attack import lab as labs
from ringfence.attack.canaries import RO, RO_FILE, RW, Canaries, digest
from ringfence.attack.lab import Lab
from ringfence.attack.outside import register
from ringfence.attack.probes import identity, kit
from ringfence.attack.probes.ipc import SOCKET_OF_OWN
from ringfence.attack.probes.kit import Outcome, Probe, held
from ringfence.attack.result import ProbeResult
from ringfence.attack.service import Service
from ringfence.errors import NetworkPolicyError, Unsupported
from ringfence.sandbox.sync import Sandbox
from tests.features import require

pytestmark = pytest.mark.anyone


def result(status: str, severity: str = "high", id: str = "files.x") -> ProbeResult:
    return ProbeResult(id, id.partition(".")[0], severity, "It must not.", status, "seen", "a host")


# -- what is planted -----------------------------------------------------------------------------


def names_of_ours() -> set[str]:
    places = ("/tmp", "/dev/shm")
    found = {
        f"{at}/{name}" for at in places for name in os.listdir(at) if "ringfence-attack-" in name
    }
    unix = Path("/proc/net/unix").read_text(errors="replace").splitlines()
    return found | {line.split()[-1] for line in unix if "ringfence-attack-" in line}


def test_what_is_planted_can_be_found_and_is_gone_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, descriptors = names_of_ours(), len(os.listdir("/proc/self/fd"))
    with Canaries() as planted:
        told, token = planted.context, planted.token
        assert token not in json.dumps(told)
        assert token[::-1] not in json.dumps(told)
        assert (digest(token), token) == (told["secret_digest"], Path(told["secret"]).read_text())
        assert digest(os.environ["RINGFENCE_ATTACK_CANARY"]) == told["environment_digest"]
        assert digest(Path(told["shm_file"]).read_text()) == told["secret_digest"]
        for path, mode in (
            (told["secret"], 0o644),
            (told["open_file"], 0o666),
            (told["directory"], 0o755),
        ):
            assert mode == os.stat(path).st_mode & 0o777, path
        marker = Path(f"/proc/{told['marker_pid']}/cmdline").read_bytes()
        assert told["marker"].encode() in marker
        assert b"" == Path(f"/proc/{told['marker_pid']}/environ").read_bytes()
        assert any(
            os.get_inheritable(int(fd)) and told["directory"] == os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.lexists(f"/proc/self/fd/{fd}")
        )
        for address in (
            told["socket"],
            f"\0{told['abstract']['stream']}",
            f"{planted.ro}/stream.socket",
        ):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(address)
        with socket.create_connection(("127.9.9.9", told["tcp"]["v4"]), 10):
            pass
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.settimeout(10)
            sock.sendto(b"ping", ("127.0.0.1", told["udp"]))
            assert b"pong" == sock.recv(9)
        assert told["service"] != told["other_service"]
        libc = ctypes.CDLL(None)
        sysv = told["sysv"]
        assert sysv["shm_id"] == libc.shmget(sysv["shm_key"], 0, 0)
        assert sysv["sem_id"] == libc.semget(sysv["sem_key"], 0, 0)
        assert sysv["msg_id"] == libc.msgget(sysv["msg_key"], 0)
        if told["queue"]:
            opened = libc.mq_open(f"/{told['queue']}".encode(), os.O_RDONLY)
            assert opened >= 0
            os.close(opened)
        written = Path(planted.ro) / "file"
        written.write_text("changed")
        (Path(planted.ro) / "doomed").unlink()
        (Path(planted.rw) / "file").unlink()
        planted.plant_read_only()
        planted.plant_writable()
        assert "as it was\n" == written.read_text() == (Path(planted.rw) / "file").read_text()
        assert (Path(planted.ro) / "doomed").exists()
        assert os.access(f"{planted.rw}/.git/hooks/existing", os.X_OK)
    assert [-1] * 3 == [
        libc.shmget(sysv["shm_key"], 0, 0), libc.semget(sysv["sem_key"], 0, 0), libc.msgget(sysv["msg_key"], 0),
    ]  # fmt: skip
    assert -1 == libc.mq_open(f"/{told['queue'] or 'none'}".encode(), os.O_RDONLY)
    assert (before, descriptors) == (names_of_ours(), len(os.listdir("/proc/self/fd")))
    assert "RINGFENCE_ATTACK_CANARY" not in os.environ
    assert not os.path.exists(f"/proc/{told['marker_pid']}")


def test_what_cannot_be_planted_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_planted: Canaries) -> None:
        raise OSError("on purpose")

    before, descriptors = names_of_ours(), len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(Canaries, "_facts", fail)
    with pytest.raises(OSError, match="on purpose"), Canaries():
        pass
    assert (before, descriptors) == (names_of_ours(), len(os.listdir("/proc/self/fd")))
    assert "RINGFENCE_ATTACK_CANARY" not in os.environ


def test_the_web_server_takes_what_a_lenient_one_takes_and_tells_what_it_was_asked_for() -> None:
    requests = (
        b"GET /one HTTP/1.1\nHost: x\n\n"
        b"POST /two HTTP/1.1\r\nContent-Length: 4\r\nTransfer-Encoding: x,\r\n chunked\r\n\r\n"
        b"5;x=y\r\nhello\r\n0\r\nTrailer: x\r\n\r\n"
        b"POST /three HTTP/1.1\r\nContent-Length: 9\r\nContent-Length: 4\r\n\r\nbody"
        b"GET /seen HTTP/1.1\r\nConnection: close\r\n\r\n"
    )
    with Service() as service, socket.create_connection(("127.0.0.1", service.port)) as sock:
        sock.settimeout(10)
        sock.sendall(requests)
        said = b"".join(iter(lambda: sock.recv(1 << 16), b""))
    assert 4 == said.count(b"HTTP/1.1 200 OK")
    assert said.endswith(b"\r\n\r\n/one\n/two\n/three\n/seen")
    with (
        pytest.raises(ConnectionRefusedError),
        socket.create_connection(("127.0.0.1", service.port)),
    ):
        pass


def test_the_web_server_forgets_what_it_was_asked_for_long_ago(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "_MOST_KEPT", 2)
    paths = ("/one", "/two", "/three", "/seen")
    asked = b"".join(b"GET %b HTTP/1.1\r\n\r\n" % path.encode() for path in paths)
    with Service() as there, socket.create_connection(("127.0.0.1", there.port)) as sock:
        sock.settimeout(10)
        sock.sendall(asked)
        sock.shutdown(socket.SHUT_WR)
        said = b"".join(iter(lambda: sock.recv(1 << 16), b""))
    assert said.endswith(b"\r\n\r\n/two\n/three\n/seen")


# -- where it happens ------------------------------------------------------------------------------


class Stand:
    """What a sandbox is to the lab."""

    def __init__(self, pid: int = 0, said: bytes = b"") -> None:
        self._inner = SimpleNamespace(pid=pid)
        self.said = said

    def __enter__(self) -> Stand:
        return self

    def __exit__(self, *_exc: object) -> None:
        pass

    def exec(self, _argv: Any) -> Any:
        return SimpleNamespace(stdout_text=self.said.decode())


@pytest.fixture
def canaries() -> Any:
    return SimpleNamespace(
        context={
            "rootless": False, "service": 1, "other_service": 2, "tcp": {"v4": 3}, "x": "y",
        },
        ro="/host/ro", rw="/host/rw", ro_file="/host/file", token="t",
    )  # fmt: skip


def a_lab(canaries: Any, name: str = "native", **how: Any) -> Lab:
    backend: Any = SimpleNamespace(name=name)
    return Lab(backend, canaries, **how)


def test_a_policy_of_the_attack_allows_one_service_and_only_the_wider_one_more(
    canaries: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(labs, "make", lambda _backend, **how: asked.append(how))
    lab = a_lab(canaries)
    lab.limited()
    lab.limited(wider=True)
    narrow, wider = (each["network"] for each in asked)
    assert ["localhost:1", "127.0.0.1:1"] == narrow
    assert {"localhost:1", "*.example.com", "127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"} == {*wider}


def test_planted_directories_are_mounted_as_the_probes_are_told(
    canaries: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(labs, "make", lambda _backend, **how: asked.append(how))
    lab = a_lab(canaries)
    lab.mounted()
    assert ("vault/keys",) == asked[0]["protect"]
    assert [(RO, "/host/ro", False), (RO_FILE, "/host/file", False), (RW, "/host/rw", True)] == [
        (each.target, each.source, each.is_writable) for each in asked[0]["mounts"]
    ]
    assert all(each.is_writable for each in lab.mounts(access="read_write"))
    inner: Any = Stand(said=b"/home/x\n")
    assert (RO, RW, [RO, RW, RO_FILE]) == tuple(
        lab.places(inner)[name] for name in ("ro", "rw", "targets")
    )
    own = a_lab(canaries, "landlock")
    own.mounted()
    assert "protect" not in asked[1]
    assert [("/host/ro", ()), ("/host/file", ())] == [
        (each.target, each.protect) for each in asked[1]["mounts"]
    ]
    found = own.places(inner)
    assert ("/home/x", "/host/ro", "/host/rw") == (found["rw"], found["ro"], found["targets"][1])
    canaries.context["rootless"] = True
    assert 3 == len(own.mounts())
    assert "/host/rw" == own.places(inner)["rw"]


def test_what_a_place_lacks_is_allowed_beside_what_the_probe_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(Sandbox, "create", lambda **how: asked.append(how))
    backend: Any = SimpleNamespace(name="native")
    monkeypatch.setattr(labs, "masks_of_proc", list)
    labs.make(backend)
    assert "allow_degraded" not in asked[-1]
    monkeypatch.setattr(labs, "masks_of_proc", lambda: ["x"])
    labs.make(backend, allow_degraded=("pids_limit",))
    assert ["pids_limit", "namespaces"] == asked[-1]["allow_degraded"]
    other: Any = SimpleNamespace(name="docker")
    labs.make(other)
    assert "allow_degraded" not in asked[-1]


def test_processes_are_found_by_the_numbers_of_the_host() -> None:
    marker = f"marker-{os.getpid()}-{time.monotonic_ns()}"
    program = ["sh", "-c", f"sleep 600 & : {marker}; echo $!; wait"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            child = int(process.stdout.readline())
            assert labs.eventually(
                lambda: Path(f"/proc/{child}/cmdline").read_bytes().startswith(b"sleep")
            )
            assert [process.pid, child] == labs.host_tree(process.pid)
            assert [] == labs.host_tree(0)
            assert [process.pid] == labs.host_processes(marker)
            sandbox: Any = Stand(process.pid)
            for number in (process.pid, child):
                inside_of_it = int(kit.status_of(number)["NSpid"].split()[-1])
                assert number == labs.host_pid(sandbox, inside_of_it)
            assert 0 == labs.host_pid(sandbox, os.getpid())
        finally:
            os.kill(child, signal.SIGKILL)
            process.kill()


def test_what_comes_in_time_has_come_and_what_does_not_has_not() -> None:
    turns = iter((False, False, True))
    assert labs.eventually(lambda: next(turns))
    assert not labs.eventually(lambda: False, patience_s=0.01)

    class Said:
        pieces = [b"fir", b"", b"st\nsecond", b"never"]  # noqa: RUF012
        running = True
        stdout = SimpleNamespace(read=lambda: Said.pieces.pop(0))

    process: Any = Said
    assert "first" == labs.first_line(process)
    assert [b"never"] == Said.pieces
    Said.pieces, Said.running = [b"no line"], False
    assert "no line" == labs.first_line(process)


# -- the whole -------------------------------------------------------------------------------------


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> dict[str, Probe]:
    places = {
        "files.plain": kit.PLAIN, "files.mounted": kit.MOUNTED, "files.both": kit.BOTH,
        "network.plain": kit.PLAIN, "network.mounted": kit.MOUNTED, "network.limited": kit.LIMITED,
        "syscalls.bpf": kit.PLAIN, "network.both": kit.BOTH,
    }  # fmt: skip
    found = {
        id: Probe(id, "high", "It must not.", kit.HOST, where, lambda _: held("x"))
        for id, where in places.items()
    }
    monkeypatch.setattr(runner, "registered", lambda: found)
    return found


def test_each_probe_runs_where_it_belongs(few: dict[str, Probe]) -> None:
    where = {
        kind: {id for id, probe in few.items() if runner._belongs(probe, kind)}
        for kind in (kit.PLAIN, kit.MOUNTED, kit.LIMITED, kit.COPIED)
    }
    plain = {"files.plain", "files.both", "network.plain", "network.both", "syscalls.bpf"}
    assert {
        kit.PLAIN: plain, kit.COPIED: plain,
        kit.MOUNTED: {"files.mounted", "files.both", "network.mounted", "network.both"},
        kit.LIMITED: {"network.limited", "network.plain", "network.both"},
    } == where  # fmt: skip


def test_of_all_sandboxes_the_worst_finding_counts_and_what_says_nothing_is_named(
    few: dict[str, Probe], canaries: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(_lab: Lab, kind: str, chosen: list[str]) -> inside.Found:
        bad = {
            ("files.both", kit.MOUNTED): "escaped",
            ("network.plain", kit.LIMITED): "inconclusive",
        }
        return {id: (bad.get((id, kind), "held"), f"in {kind}") for id in chosen}

    monkeypatch.setattr(runner, "_run", run)
    found = {each.id: each for each in runner.attack_from_inside(a_lab(canaries, "gvisor"))}
    assert {*few} == {*found}
    assert ("escaped", "mounted", "in mounted") == (
        found["files.both"].status, found["files.both"].where, found["files.both"].evidence,
    )  # fmt: skip
    assert ("inconclusive", "limited") == (
        found["network.plain"].status,
        found["network.plain"].where,
    )
    assert "held" == found["files.plain"].status
    bpf = found["syscalls.bpf"]
    assert ("not_applicable", scope.why_not("syscalls.bpf", "gvisor")) == (bpf.status, bpf.evidence)


def test_what_a_backend_cannot_do_leaves_only_its_own_probes_without_a_finding(
    few: dict[str, Probe], canaries: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal: list[Exception] = []

    def refuse(*_given: Any, **_how: Any) -> Any:
        raise refusal[0]

    lab = a_lab(canaries)
    monkeypatch.setattr(Lab, "limited", refuse)
    monkeypatch.setattr(Lab, "mounted", refuse)
    for error in (NetworkPolicyError("no tables"), Unsupported("no tables")):
        refusal[:] = [error]
        found = runner._run(lab, kit.LIMITED, ["network.limited", "network.plain"])
        assert {"network.limited": ("inconclusive", "no network policy here: no tables")} == found
    found = runner._run(lab, kit.MOUNTED, ["files.mounted", "files.both"])
    assert {"files.mounted": ("inconclusive", "no mounts here: no tables")} == found
    monkeypatch.setattr(Lab, "sandbox", lambda _lab: Stand())
    monkeypatch.setattr(runner, "run_in_copy", refuse)
    assert {} == runner._run(lab, kit.COPIED, ["files.plain"])


def test_from_the_host_a_guests_own_socket_is_looked_for_on_the_host(
    few: dict[str, Probe], canaries: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    canaries.rw = str(tmp_path)
    monkeypatch.setattr(Lab, "mounted", lambda _lab: Stand())
    monkeypatch.setattr(Lab, "places", lambda *_: {})
    monkeypatch.setattr(
        runner, "run_inside", lambda _s, chosen, _c: dict.fromkeys(chosen, ("held", "x"))
    )
    chosen = [runner._SOCKET]
    for name, expected in (("gvisor", "held"), ("native", "held")):
        assert (
            expected == runner._run(a_lab(canaries, name), kit.MOUNTED, chosen)[runner._SOCKET][0]
        )
    (tmp_path / SOCKET_OF_OWN).touch()
    for name, expected in (("gvisor", "escaped"), ("native", "held")):
        assert (
            expected == runner._run(a_lab(canaries, name), kit.MOUNTED, chosen)[runner._SOCKET][0]
        )


def test_from_outside_only_those_run_together_that_wait(
    canaries: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: list[str] = []
    most: dict[bool, int] = {True: 0, False: 0}

    def made(id: str, *, waits: bool) -> register.OutsideProbe:
        def run(_lab: Any) -> Outcome:
            running.append(id)
            if waits:
                labs.eventually(lambda: len(running) == 2 or most[True] == 2)
            most[waits] = max(most[waits], len(running))
            running.remove(id)
            return held("x")

        return register.OutsideProbe(id, "high", "It must not.", register.NAIVE, run, waits)

    ids = {
        "files.a": False,
        "lifecycle.b": True,
        "files.c": False,
        "lifecycle.d": True,
        "files.lease": False,
    }
    probes = {id: made(id, waits=waits) for id, waits in ids.items()}
    monkeypatch.setattr(outside, "registered", lambda: probes)
    found = list(runner.attack_from_outside(a_lab(canaries, "microvm")))
    assert ["files.lease", "files.a", "files.c", "lifecycle.b", "lifecycle.d"] == [
        each.id for each in found
    ]
    assert ["not_applicable", *["held"] * 4] == [each.status for each in found]
    assert {True: 2, False: 1} == most


def test_results_are_told_as_they_come_and_only_an_own_backend_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[str] = []

    class Backend:
        name = "native"

        def close(self) -> None:
            closed.append("closed")

    def attack(lab: Lab) -> list[ProbeResult]:
        assert os.path.exists(lab.canaries.secret), "what is looked for lies there"
        seen.append(lab.backend)
        return [result("held"), result("escaped")]

    def fail(_lab: Lab) -> list[ProbeResult]:
        raise RuntimeError("on purpose")

    seen: list[Any] = []
    monkeypatch.setattr(runner, "new_backend", lambda _name: Backend())
    monkeypatch.setattr(runner, "attack_from_inside", attack)
    monkeypatch.setattr(runner, "attack_from_outside", attack)
    told: list[ProbeResult] = []
    given: Any = Backend()
    assert 4 == len(runner.run_attack(told.append, given)) == len(told)
    assert ([given, given], []) == (seen, closed)
    monkeypatch.setattr(runner, "attack_from_outside", fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        runner.run_attack()
    assert ["closed"] == closed


def test_probes_are_told_the_number_of_the_first_process_and_their_places(
    few: dict[str, Probe], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []

    def note(_sandbox: Any, chosen: list[str], context: dict[str, Any]) -> inside.Found:
        told.append(context)
        return dict.fromkeys(chosen, ("held", "x"))

    monkeypatch.setattr(runner, "run_inside", note)
    monkeypatch.setattr(runner, "seen_from_the_host", lambda _sandbox, found: found)
    place = nullcontext(SimpleNamespace())
    lab: Any = SimpleNamespace(
        canaries=SimpleNamespace(context={"init": 1, "rw": "usual"}), init_of=lambda _: {"init": 7},
        sandbox=lambda: place, mounted=lambda: place, places=lambda _: {"rw": "its own"},
        backend=SimpleNamespace(name="native"),
    )  # fmt: skip
    for kind in (kit.PLAIN, kit.MOUNTED):
        assert {"files.both": ("held", "x")} == runner._run(lab, kind, ["files.both"])
    assert [{"init": 7, "rw": "usual"}, {"init": 7, "rw": "its own"}] == told
    assert {"init": 1, "rw": "usual"} == lab.canaries.context, "it is each sandbox's"


# -- the host's word -------------------------------------------------------------------------------


@pytest.fixture
def process() -> Iterator[int]:
    with subprocess.Popen(["sleep", "600"]) as made:
        yield made.pid
        made.kill()


def test_what_cried_out_inside_is_looked_at_again_from_the_host(
    process: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox: Any = Stand(process)
    weaker = [
        SimpleNamespace(name="memory_limit", status="degraded", why="memory"),
        SimpleNamespace(name="pids_limit", status="enforced", why="all"),
    ]
    sandbox.protections = lambda: weaker
    cried = dict.fromkeys(
        ("identity.not-host-root", "resources.open-files", "files.x"), ("escaped", "inside")
    )
    found = again.seen_from_the_host(
        sandbox, {**cried, "syscalls.namespaces-left": ("held", "inside")}
    )
    root_is_mapped = any(
        line.split()[1] == "0" for line in Path("/proc/self/uid_map").read_text().splitlines()
    )
    assert ("escaped" if root_is_mapped else "held") == found["identity.not-host-root"][0]
    assert found["identity.not-host-root"][1].startswith("on the host: uid_map")
    assert ("escaped", "inside") == found["resources.open-files"] == found["files.x"]
    assert ("held", "inside") == found["syscalls.namespaces-left"], "nobody cried out"
    weaker[1].status = "degraded"
    status, evidence = again.seen_from_the_host(sandbox, cried)["resources.open-files"]
    assert ("inconclusive", "inside; declared: pids_limit degraded: all") == (status, evidence)
    nobody: Any = Stand(0)
    assert cried == again.seen_from_the_host(nobody, cried)


def test_a_dozen_of_killed_runs_leave_room_for_a_queue() -> None:
    """A user's queues share one limit, RLIMIT_MSGQUEUE, with those that nobody removed."""
    with Canaries() as planted, pytest.MonkeyPatch.context() as patch:
        names = {planted.context["queue"]}
        for _ in range(11):
            patch.setattr(planted, "token", os.urandom(8).hex())
            names.add(planted._queue(ctypes.CDLL(None)))
    assert 12 == len(names - {""})


_APART = """
import ctypes, os, sys
if ctypes.CDLL(None).unshare(0x10000000):
    sys.exit(1)
print(flush=True)
sys.stdin.read()
"""


def seen_of(user: int, group: int) -> tuple[str, str]:
    """What the host says of a user namespace whose root is this user and this group outside."""
    with subprocess.Popen(
        [sys.executable, "-ISc", _APART], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert b"\n" == child.stdout.readline()
        Path(f"/proc/{child.pid}/setgroups").write_text("deny")
        for name, outside in (("uid_map", user), ("gid_map", group)):
            Path(f"/proc/{child.pid}/{name}").write_text(f"0 {outside} 1")
        found = again._ids(child.pid)
        child.kill()
    return found.status, found.evidence


def test_only_root_of_the_host_is_root_there() -> None:
    require("user namespaces")
    user, group = os.getuid() or 70_000, os.getgid() or 70_000
    assert ("held", f"on the host: uid_map 0 {user} 1") == seen_of(user, group)
    if os.getuid() == 0:  # who may map what is the host's root's
        assert ("escaped", "on the host: uid_map 0 0 1") == seen_of(0, group)
        assert ("escaped", "on the host: gid_map 0 0 1") == seen_of(user, 0)


_THREADS = """
import sys, threading
threading.Thread(target=sys.stdin.read).start()
print(threading.enumerate()[-1].native_id, flush=True)
"""


def test_each_thread_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    locked = {"Seccomp": "2", "NoNewPrivs": "1", "Name": "x"}
    locked |= {field: "0" * 16 for _, field, _, _ in identity._SETS}
    with subprocess.Popen(
        [sys.executable, "-ISc", _THREADS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        second = f"{child.pid}/task/{int(child.stdout.readline())}"
        monkeypatch.setattr(identity, "pids", lambda: [child.pid])
        monkeypatch.setattr(identity, "status_of", lambda _: locked)
        assert "held" == identity.every_process({}).status
        monkeypatch.setattr(
            identity, "status_of", lambda task: {**locked, "Seccomp": "02"[task != second]}
        )
        assert "escaped" == identity.every_process({}).status
        child.kill()
