"""Parts of the attack: outcomes, who runs a probe, what is planted, and what is made of the answers."""

from __future__ import annotations

import ctypes
import errno
import io
import json
import os
import signal
import socket
import subprocess
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.attack import again, inside, outside, runner, scope
from ringfence.attack import lab as labs
from ringfence.attack.canaries import RO, RO_FILE, RW, Canaries, digest
from ringfence.attack.lab import Lab
from ringfence.attack.outside import register
from ringfence.attack.probes import kit, main
from ringfence.attack.probes.kit import Outcome, Probe, escaped, held, inconclusive
from ringfence.attack.result import ProbeResult, count_by_area, worst
from ringfence.attack.service import Service
from ringfence.errors import NetworkPolicyError, SandboxLost, Unsupported
from ringfence.policy.seccomp import MACHINES

pytestmark = pytest.mark.anyone

Context = dict[str, Any]


def result(status: str, severity: str = "high", id: str = "files.x") -> ProbeResult:
    return ProbeResult(id, id.partition(".")[0], severity, "It must not.", status, "seen", "a host")


# -- results ---------------------------------------------------------------------------------------


def test_a_hole_is_an_escape_that_is_no_known_leak() -> None:
    for status, severity, breaks in (
        ("escaped", "critical", True), ("escaped", "medium", True), ("escaped", "low", False),
        ("held", "critical", False), ("inconclusive", "critical", False), ("not_applicable", "high", False),
    ):  # fmt: skip
        assert breaks == result(status, severity).breaks


def test_of_several_runs_the_worst_counts() -> None:
    order = ["not_applicable", "held", "inconclusive", "escaped"]
    for number, status in enumerate(order):
        runs = [result(each) for each in order[: number + 1]]
        assert status == worst(runs).status == worst(runs[::-1]).status


def test_areas_are_counted_apart_and_those_without_a_probe_left_out() -> None:
    runs = [result("held"), result("held"), result("escaped"), result("held", id="ipc.y")]
    none = {"not_applicable": 0, "held": 0, "inconclusive": 0, "escaped": 0}
    assert {"files": {**none, "held": 2, "escaped": 1}, "ipc": {**none, "held": 1}} == count_by_area(runs)
    form = result("held").to_json()
    assert ("files.x", "files", "seen", "a host", "") == tuple(
        form[name] for name in ("id", "area", "evidence", "control", "where")
    )


# -- outcomes --------------------------------------------------------------------------------------


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    found = dict(MACHINES[os.uname().machine].numbers)
    monkeypatch.setattr(kit, "NUMBERS", found)
    return found


@pytest.mark.usefixtures("numbers")
def test_a_call_is_refused_only_before_its_arguments_are_looked_at() -> None:
    path = ctypes.create_string_buffer(b"/none/such")
    assert "escaped" == kit.refused("getpid").status
    there = kit.refused("unlink", path) if "unlink" in kit.NUMBERS else kit.refused("unlinkat", -100, path, 0)
    assert ("escaped", True) == (there.status, there.evidence.endswith("reached the kernel: ENOENT"))
    but = kit.refused("unlinkat", -100, path, 0, but=(errno.ENOENT,))
    assert ("held", "unlinkat: ENOENT") == (but.status, but.evidence)
    assert "inconclusive" == kit.refused("no_such_call").status
    assert -errno.ENOSYS == kit.raw(9999)
    assert "held" == kit.refused("kill", 1 << 30, 0, but=(errno.ESRCH,)).status
    assert os.getpid() == kit.call("getpid")
    assert ("ENOENT", "returned 7", "-9999") == (kit.said(-errno.ENOENT), kit.said(7), kit.said(-9999))
    assert (-1, 5) == (kit._word((1 << 64) - 1), kit._word(5))


def test_what_works_has_escaped_and_what_the_kernel_refuses_has_not(tmp_path: Path) -> None:
    worked = kit.attempt(lambda a, b: a + b, "adding", 1, 2)
    assert ("escaped", "adding: worked (3)") == (worked.status, worked.evidence)
    there = tmp_path / "there"
    there.write_text("x")
    before = len(os.listdir("/proc/self/fd"))
    for flags, how in ((os.O_RDONLY, "read"), (os.O_WRONLY, "write"), (os.O_RDWR, "read and write")):
        opened = kit.cannot_open(str(there), flags)
        assert "escaped" == opened.status
        assert opened.evidence.startswith(f"open {there} to {how}: worked")
        assert "held" == kit.cannot_open(f"{there}/x", flags).status
    none = kit.cannot_open(str(tmp_path / "none"))
    assert ("held", True) == (none.status, none.evidence.endswith(": ENOENT"))
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert "escaped" == kit.cannot_open(str(fifo)).status, "nobody is waited for"
    assert before == len(os.listdir("/proc/self/fd"))
    with pytest.raises(RuntimeError):
        kit.attempt(lambda: (_ for _ in ()).throw(RuntimeError("a bug")).__next__(), "x")


def test_of_several_attempts_the_first_that_escaped_counts() -> None:
    tries = [held("a"), inconclusive("b"), escaped("c"), escaped("d")]
    assert ("escaped", "c") == (kit.first_escape(tries).status, kit.first_escape(tries).evidence)
    few, many = (kit.first_escape([held(str(n)) for n in range(count)]) for count in (3, 4))
    assert ("held", "0; 1; 2") == (few.status, few.evidence)
    assert ("held", "4 attempts, among them: 0; 1; 2") == (many.status, many.evidence)


def test_what_is_read_is_whole_up_to_a_size_and_a_token_is_known_by_its_digest(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 100_000)
    assert [1 << 16, 10, 100_000] == [
        len(found) for found in (kit.read(str(file)), kit.read(str(file), 10), kit.read(str(file), 1 << 20))
    ]  # fmt: skip
    assert b"" == kit.read(str(tmp_path / "none")) == kit.read(str(tmp_path))
    assert kit.holds(b"A=1\0TOKEN more\n", digest("TOKEN"))
    assert not kit.holds(b"TOKENS", digest("TOKEN"))
    assert str(os.getpid()) == kit.status_of("self")["Pid"]
    assert {} == kit.status_of(1 << 30)
    assert os.getpid() in kit.pids()


def test_what_a_child_ended_with_is_told_and_one_that_hangs_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def killed() -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    assert (7, -signal.SIGTERM) == (kit.in_child(lambda: 7), kit.in_child(killed))
    with open(os.devnull, "wb") as quiet:
        kept = os.dup(2)
        os.dup2(quiet.fileno(), 2)
        try:
            assert 125 == kit.in_child(lambda: 1 // 0)
        finally:
            os.dup2(kept, 2)
            os.close(kept)
    monkeypatch.setattr(kit, "PATIENCE_S", 0.02)
    with pytest.raises(TimeoutError):
        kit.in_child(lambda: time.sleep(60) or 0)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


# -- the registers ---------------------------------------------------------------------------------


def test_no_two_probes_have_one_name_and_each_says_what_must_not_happen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kit, "PROBES", {})
    monkeypatch.setattr(register, "PROBES", {})

    def run(_given: Any) -> Outcome:
        """It must
        not be."""
        return held("x")

    assert run is kit.probe("files.a", "low", kit.HOST, where=kit.BOTH)(run)
    kit.probe("ipc.a", "high", kit.BARE, about="Another.")(run)
    made = kit.PROBES["files.a"]
    assert ("files", "It must not be.", "both", kit.HOST) == (
        made.area, made.description, made.where, made.control,
    )  # fmt: skip
    assert ("plain", "Another.") == (kit.PROBES["ipc.a"].where, kit.PROBES["ipc.a"].description)
    with pytest.raises(ValueError, match=r"files\.a"):
        kit.probe("files.a", "low", kit.HOST)(run)
    register.probe("files.a", "low", register.NAIVE, waits=True)(run)
    there = register.PROBES["files.a"]
    assert (True, "It must not be.", "files") == (there.waits, there.description, there.area)
    with pytest.raises(ValueError, match=r"files\.a"):
        register.probe("files.a", "low", register.NAIVE)(run)


def test_every_probe_is_of_an_area_and_of_a_severity_and_has_a_control() -> None:
    every: dict[str, Any] = {**inside.registered(), **outside.registered()}
    assert len(every) == len(inside.registered()) + len(outside.registered()) > 400
    for id, probe in every.items():
        assert result("held", id=id).area in runner_areas()
        assert probe.severity in ("critical", "high", "medium", "low"), id
        assert probe.description.endswith("."), id
        assert probe.control, id


def runner_areas() -> Sequence[str]:
    from ringfence.attack.result import AREAS

    return AREAS


def test_a_probe_from_outside_that_breaks_has_found_nothing() -> None:
    def probe(error: Exception | None) -> register.OutsideProbe:
        def run(_lab: Any) -> Outcome:
            if error is not None:
                raise error
            return escaped("it was there")

        return register.OutsideProbe("files.a", "high", "It must not.", register.NAIVE, run, False)

    lab: Any = None
    for error in (SandboxLost("gone"), OSError("no"), RuntimeError("x"), ValueError("x")):
        found = probe(error).attack(lab)
        assert "inconclusive" == found.status
        assert found.evidence.startswith(f"{type(error).__name__}: ")
    found = probe(None).attack(lab)
    assert ("escaped", "it was there", "its own", "high", register.NAIVE) == (
        found.status, found.evidence, found.where, found.severity, found.control,
    )  # fmt: skip


# -- inside ----------------------------------------------------------------------------------------


def probing(run: Any) -> Probe:
    return Probe("files.a", "high", "It must not.", kit.HOST, kit.PLAIN, run)


def test_each_probe_runs_apart_and_what_kills_it_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = len(os.listdir("/proc/self/fd"))

    def left(context: Context) -> Outcome:
        child = subprocess.Popen(["sleep", "600"])
        Path(context["file"]).write_text(str(child.pid))
        return held("x" * 1000)

    def die(number: int) -> Any:
        def run(_context: Context) -> Outcome:
            os.kill(os.getpid(), number)
            return escaped("it lives")

        return run

    status, evidence = main.run_apart(probing(left), {"file": str(tmp_path / "pid")})
    assert ("held", "x" * 600) == (status, evidence)
    pid = int((tmp_path / "pid").read_text())
    until = time.monotonic() + 10
    while time.monotonic() < until and _runs(pid):
        time.sleep(0.001)
    assert not _runs(pid), "it ends with whatever it started"
    assert "held" == main.run_apart(probing(die(signal.SIGSYS)), {})[0], "as a filter does it"
    status, evidence = main.run_apart(probing(die(signal.SIGKILL)), {})
    assert ("inconclusive", "ended without a word, wait status 0x9") == (status, evidence)
    monkeypatch.setattr(main, "_PATIENCE_MS", 20)
    status, evidence = main.run_apart(probing(lambda _: time.sleep(600)), {})
    assert "inconclusive" == status
    assert before == len(os.listdir("/proc/self/fd"))
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def _runs(pid: int) -> bool:
    return kit.status_of(pid).get("State", "Z")[:1] not in "ZX"


def test_a_probe_that_breaks_has_found_nothing_unless_no_such_socket_can_be() -> None:
    def fail(error: Exception) -> Probe:
        def run(_context: Context) -> Outcome:
            raise error

        return probing(run)

    for number in (errno.EAFNOSUPPORT, errno.ESOCKTNOSUPPORT):
        assert "held" == main.run(fail(OSError(number, "no")), {}).status
    for error in (OSError(errno.EIO, "no"), KeyError("x"), ZeroDivisionError("x")):
        found = main.run(fail(error), {})
        assert ("inconclusive", True) == (
            found.status, found.evidence.startswith(f"{type(error).__name__}: "),
        )  # fmt: skip


def test_answers_are_those_of_the_probes_that_were_asked_for() -> None:
    said = "\n".join(
        (
            "noise", json.dumps(["files.a", "held", "a"]), json.dumps(["files.b", "escaped", "b"]),
            json.dumps(["files.of-nobody", "held", "x"]), "[1]", '["files.a"',
        )
    )  # fmt: skip
    found = inside.read_answers(["files.a", "files.b", "files.c"], said, "it died")
    assert {
        "files.a": ("held", "a"), "files.b": ("escaped", "b"),
        "files.c": ("inconclusive", "no answer: it died"),
    } == found  # fmt: skip


def test_probes_travel_with_the_numbers_of_this_machine_and_without_ringfence() -> None:
    with zipfile.ZipFile(io.BytesIO(inside.archive())) as file:
        names = file.namelist()
        text = b"".join(file.read(name) for name in names)
    assert {f"probes/{path.name}" for path in Path(main.__file__).parent.glob("*.py")} == {*names}
    assert b"from ringfence" not in text
    assert b"import ringfence" not in text
    asked = json.loads(inside.request(["a", "b"], {"x": 1}))
    assert (["a", "b"], {"x": 1}) == (asked["probes"], asked["context"])
    assert dict(MACHINES[os.uname().machine].numbers) == asked["numbers"]


def test_a_function_of_the_probes_runs_as_a_program_and_tells_what_it_inherited(tmp_path: Path) -> None:
    """Where a sandbox has no mounts, the archive is below TMPDIR."""
    (tmp_path / "own").mkdir()
    name = f"probes-{os.getpid()}.zip"
    (tmp_path / "own" / name).write_bytes(inside.archive())
    directory = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    there = os.fstat(directory)
    asked = ["leaks.planted-descriptor", "leaks.stream-kinds", "identity.no-new-privs"]
    planted = {"secret_directory_id": [there.st_dev, there.st_ino]}
    try:
        done = subprocess.run(
            inside.command("main", "main", path=f"/tmp/{name}"),
            input=inside.request(asked, planted).encode(),
            env={"TMPDIR": str(tmp_path / "own")},
            pass_fds=(directory,),
            capture_output=True,
            check=True,
        )
    finally:
        os.close(directory)
    found = inside.read_answers(asked, done.stdout.decode(), "")
    assert ("escaped", f"descriptor {directory} is the planted directory") == found[asked[0]]
    assert ("escaped", True) == (found[asked[1]][0], f"descriptor {directory} is d" in found[asked[1]][1])
    assert found[asked[2]][0] in ("held", "escaped")


# -- which probes say something ------------------------------------------------------------------


def test_a_backend_with_the_hosts_kernel_answers_every_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scope, "masks_of_proc", lambda: [])
    for backend in ("native", "docker", "mine"):
        assert "" == scope.why_not("syscalls.bpf", backend) == scope.why_not("files.lease", backend)
    assert "" == scope.why_not("devices_proc.host-processes", "native")
    monkeypatch.setattr(scope, "masks_of_proc", lambda: ["x"])
    assert "degraded" in scope.why_not("devices_proc.host-processes", "native")
    assert "" == scope.why_not("devices_proc.host-processes", "docker"), "it has its own"


def test_a_guests_own_kernel_is_asked_only_what_concerns_the_host() -> None:
    for backend in ("gvisor", "microvm"):
        for probe in ("syscalls.bpf", "identity.no-new-privs", "resources.core-dump", "network.socket-raw"):
            assert scope.why_not(probe, backend), (probe, backend)
        for probe in ("files.secret-by-path", "network.loopback-v4", "network.sockets", "leaks.environment"):
            assert "" == scope.why_not(probe, backend), (probe, backend)
    assert ("", True) == (
        scope.why_not("resources.processor-hog", "gvisor"), bool(scope.why_not("files.lease", "microvm")),
    )  # fmt: skip


def test_without_namespaces_what_is_reported_as_missing_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left_out = {
        0: ("files.set-id-file-written", "ipc.socket-of-own", "files.upload-swapped"),
        1000: ("identity.securebits", "resources.fork-bomb"),
    }
    for uid, own in left_out.items():
        monkeypatch.setattr(os, "geteuid", lambda uid=uid: uid)
        for probe in (*own, "identity.namespace-pid", "files.protected-chmod", "syscalls.tiocsti"):
            assert scope.why_not(probe, "landlock"), (uid, probe)
        (other,) = left_out.keys() - {uid}
        for probe in (*left_out[other], "files.secret-by-path", "files.read-only-chmod", "syscalls.bpf"):
            assert "" == scope.why_not(probe, "landlock"), (uid, probe)


# -- what is planted -----------------------------------------------------------------------------


def names_of_ours() -> set[str]:
    places = ("/tmp", "/dev/shm")
    found = {f"{at}/{name}" for at in places for name in os.listdir(at) if "ringfence-attack-" in name}
    unix = Path("/proc/net/unix").read_text(errors="replace").splitlines()
    return found | {line.split()[-1] for line in unix if "ringfence-attack-" in line}


def test_what_is_planted_can_be_found_and_is_gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    before, descriptors = names_of_ours(), len(os.listdir("/proc/self/fd"))
    with Canaries() as planted:
        told, token = planted.context, planted.token
        assert token not in json.dumps(told)
        assert token[::-1] not in json.dumps(told)
        assert (digest(token), token) == (told["secret_digest"], Path(told["secret"]).read_text())
        assert digest(os.environ["RINGFENCE_ATTACK_CANARY"]) == told["environment_digest"]
        assert digest(Path(told["shm_file"]).read_text()) == told["secret_digest"]
        for path, mode in ((told["secret"], 0o644), (told["open_file"], 0o666), (told["directory"], 0o755)):
            assert mode == os.stat(path).st_mode & 0o777, path
        marker = Path(f"/proc/{told['marker_pid']}/cmdline").read_bytes()
        assert told["marker"].encode() in marker
        assert b"" == Path(f"/proc/{told['marker_pid']}/environ").read_bytes()
        assert any(
            os.get_inheritable(int(fd)) and told["directory"] == os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.lexists(f"/proc/self/fd/{fd}")
        )
        for address in (told["socket"], f"\0{told['abstract']['stream']}", f"{planted.ro}/stream.socket"):
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
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", service.port)):
        pass


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
    monkeypatch.setattr(labs.Sandbox, "create", lambda **how: asked.append(how))
    backend: Any = SimpleNamespace(name="native")
    monkeypatch.setattr(labs, "masks_of_proc", lambda: [])
    labs.make(backend)
    assert "allow_degraded" not in asked[-1]
    monkeypatch.setattr(labs, "masks_of_proc", lambda: ["x"])
    labs.make(backend, allow_degraded=("pids_limit",))
    assert ["pids_limit", "namespaces"] == asked[-1]["allow_degraded"]
    labs.make(SimpleNamespace(name="docker"))  # type: ignore[arg-type]
    assert "allow_degraded" not in asked[-1]


def test_processes_are_found_by_the_numbers_of_the_host() -> None:
    marker = f"marker-{os.getpid()}-{time.monotonic_ns()}"
    program = ["sh", "-c", f"sleep 600 & : {marker}; echo $!; wait"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            child = int(process.stdout.readline())
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
        "syscalls.bpf": kit.PLAIN,
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
    plain = {"files.plain", "files.both", "network.plain", "syscalls.bpf"}
    assert {
        kit.PLAIN: plain, kit.COPIED: plain,
        kit.MOUNTED: {"files.mounted", "files.both", "network.mounted"},
        kit.LIMITED: {"network.limited", "network.plain"},
    } == where  # fmt: skip


def test_of_all_sandboxes_the_worst_finding_counts_and_what_says_nothing_is_named(
    few: dict[str, Probe], canaries: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(_lab: Lab, kind: str, chosen: list[str]) -> inside.Found:
        bad = {("files.both", kit.MOUNTED): "escaped", ("network.plain", kit.LIMITED): "inconclusive"}
        return {id: (bad.get((id, kind), "held"), f"in {kind}") for id in chosen}

    monkeypatch.setattr(runner, "_run", run)
    found = {each.id: each for each in runner.attack_from_inside(a_lab(canaries, "gvisor"))}
    assert {*few} == {*found}
    assert ("escaped", "mounted", "in mounted") == (
        found["files.both"].status, found["files.both"].where, found["files.both"].evidence,
    )  # fmt: skip
    assert ("inconclusive", "limited") == (found["network.plain"].status, found["network.plain"].where)
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
    monkeypatch.setattr(runner, "run_inside", lambda _s, chosen, _c: dict.fromkeys(chosen, ("held", "x")))
    chosen = [runner._SOCKET]
    for name, expected in (("gvisor", "held"), ("native", "held")):
        assert expected == runner._run(a_lab(canaries, name), kit.MOUNTED, chosen)[runner._SOCKET][0]
    (tmp_path / runner.SOCKET_OF_OWN).touch()
    for name, expected in (("gvisor", "escaped"), ("native", "held")):
        assert expected == runner._run(a_lab(canaries, name), kit.MOUNTED, chosen)[runner._SOCKET][0]


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

    ids = {"files.a": False, "lifecycle.b": True, "files.c": False, "lifecycle.d": True, "files.lease": False}
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
    cried = {
        id: ("escaped", "inside") for id in ("identity.not-host-root", "resources.open-files", "files.x")
    }
    found = again.seen_from_the_host(sandbox, {**cried, "syscalls.namespaces-left": ("held", "inside")})
    root_is_mapped = any(line.split()[1] == "0" for line in Path("/proc/self/uid_map").read_text().splitlines())
    assert ("escaped" if root_is_mapped else "held") == found["identity.not-host-root"][0]
    assert found["identity.not-host-root"][1].startswith("on the host: uid_map")
    assert ("escaped", "inside") == found["resources.open-files"] == found["files.x"]
    assert ("held", "inside") == found["syscalls.namespaces-left"], "nobody cried out"
    weaker[1].status = "degraded"
    status, evidence = again.seen_from_the_host(sandbox, cried)["resources.open-files"]
    assert ("inconclusive", "inside; declared: pids_limit degraded: all") == (status, evidence)
    nobody: Any = Stand(0)
    assert cried == again.seen_from_the_host(nobody, cried)
