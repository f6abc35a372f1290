"""Parts of the attack: results and outcomes, the registers, and who runs a probe inside."""

from __future__ import annotations

import ctypes
import errno
import io
import json
import os
import signal
import subprocess
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ringfence.attack import inside, outside
from ringfence.attack.canaries import digest
from ringfence.attack.outside import register
from ringfence.attack.probes import kit, main
from ringfence.attack.probes.kit import Outcome, Probe, escaped, held, inconclusive
from ringfence.attack.result import ProbeResult, count_by_area, worst
from ringfence.errors import SandboxLost
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
    assert {
        "files": {**none, "held": 2, "escaped": 1},
        "ipc": {**none, "held": 1},
    } == count_by_area(runs)
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
    there = (
        kit.refused("unlink", path)
        if "unlink" in kit.NUMBERS
        else kit.refused("unlinkat", -100, path, 0)
    )
    assert ("escaped", True) == (
        there.status,
        there.evidence.endswith("reached the kernel: ENOENT"),
    )
    but = kit.refused("unlinkat", -100, path, 0, but=(errno.ENOENT,))
    assert ("held", "unlinkat: ENOENT") == (but.status, but.evidence)
    assert "inconclusive" == kit.refused("no_such_call").status
    assert -errno.ENOSYS == kit.raw(9999)
    assert "held" == kit.refused("kill", 1 << 30, 0, but=(errno.ESRCH,)).status
    assert os.getpid() == kit.call("getpid")
    assert ("ENOENT", "returned 7", "-9999") == (
        kit.said(-errno.ENOENT),
        kit.said(7),
        kit.said(-9999),
    )
    assert (-1, 5) == (kit._word((1 << 64) - 1), kit._word(5))


def test_what_works_has_escaped_and_what_the_kernel_refuses_has_not(tmp_path: Path) -> None:
    worked = kit.attempt(lambda a, b: a + b, "adding", 1, 2)
    assert ("escaped", "adding: worked (3)") == (worked.status, worked.evidence)
    there = tmp_path / "there"
    there.write_text("x")
    before = len(os.listdir("/proc/self/fd"))
    for flags, how in (
        (os.O_RDONLY, "read"),
        (os.O_WRONLY, "write"),
        (os.O_RDWR, "read and write"),
    ):
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


def test_what_is_read_is_whole_up_to_a_size_and_a_token_is_known_by_its_digest(
    tmp_path: Path,
) -> None:
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


def _wait_for_ever() -> int:
    signal.pause()
    return 0


def test_what_a_child_ended_with_is_told_and_one_that_hangs_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    children = _children()

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
        kit.in_child(_wait_for_ever)
    assert _children() <= children


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
    children = _children()
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
    status, evidence = main.run_apart(probing(lambda _: signal.pause()), {})
    assert "inconclusive" == status
    assert before == len(os.listdir("/proc/self/fd"))
    assert _children() <= children


def _children() -> set[str]:
    """Of this thread: fixtures of other modules have daemons, which are not ours to wait for."""
    return set(Path("/proc/thread-self/children").read_text().split())


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
            json.dumps(["files.of-nobody", "held", "x"]), "[1]", '["files.a"', "5", "null",
            *(json.dumps(each) for each in (
                ["files.c", "\x1b[2J", "c"], ["files.c", "held", 1], [["files.c"], "held", "c"],
                ["files.c", [], "c"],
            )),
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


def test_a_function_of_the_probes_runs_as_a_program_and_tells_what_it_inherited(
    tmp_path: Path,
) -> None:
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
    assert ("escaped", True) == (
        found[asked[1]][0],
        f"descriptor {directory} is d" in found[asked[1]][1],
    )
    assert found[asked[2]][0] in ("held", "escaped")


def test_one_that_is_too_late_to_lead_a_group_is_ended_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "setpgid", lambda *_: None)  # as where it did not come to that yet
    monkeypatch.setattr(main, "_PATIENCE_MS", 1)
    status, evidence = main.run_apart(probing(lambda _: signal.pause()), {})
    assert ("inconclusive", "ended without a word, wait status 0x9") == (status, evidence)
