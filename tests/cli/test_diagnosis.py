"""What `ringfence doctor` and its attack make of reports and results: exit codes, and lines to read."""

from __future__ import annotations

import json
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.attack import runner
from ringfence.attack.result import ProbeResult
from ringfence.backends import registry
from ringfence.cli.diagnosis import attack, bench, doctor
from ringfence.cli.terminal import Colours
from ringfence.errors import InvalidRequest
from ringfence.model.capabilities import NAMESPACES, BackendReport, Capability, Protection

pytestmark = pytest.mark.anyone


def report(
    name: str, *protections: Protection, available: bool = True, **more: Any
) -> BackendReport:
    return BackendReport(backend=name, available=available, protections=protections, **more)


def protection(name: str, status: str = "enforced", why: str = "why", fix: str = "") -> Protection:
    return Protection(name, status, why, fix)


@pytest.mark.parametrize(
    ("reports", "code"),
    [
        ([report("native", protection(NAMESPACES))], 0),
        ([report("native", protection(NAMESPACES, "degraded"))], 1),
        ([report("native", protection(NAMESPACES), available=False)], 1),
        ([report("landlock")], 1),
        ([report("gvisor")], 0),
        ([report("gvisor", available=False), report("docker")], 0),
        ([report("gvisor", available=False), report("landlock")], 1),
    ],
)
@pytest.mark.parametrize("form", [[], ["--json"], ["--verbose"]])
def test_it_fails_where_nothing_can_be_used_unasked(
    reports: list[BackendReport],
    code: int,
    form: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(doctor, "_reports", lambda: reports)
    assert code == doctor.main(form)
    shown = capfd.readouterr().out
    if form == ["--json"]:
        told = json.loads(shown)
        assert [each.backend for each in reports] == [each["backend"] for each in told["backends"]]
        assert {"ringfence", "kernel", "uid"} <= {*told["host"]}
    else:
        assert all(each.backend in shown for each in reports)


def test_what_is_weak_has_its_reason_and_its_fix_and_the_rest_is_counted(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    weak = (
        protection("seccomp"),
        protection("memory_limit", "degraded", "w" * 200, "turn it on"),
        protection("core_dumps", "missing", "no switch"),
    )
    reports = [report("native", protection(NAMESPACES), *weak), report("landlock", *weak)]
    reports.append(report("docker", available=False, reason="no engine"))
    monkeypatch.setattr(doctor, "_reports", lambda: reports)
    monkeypatch.setattr(doctor, "_left_behind", lambda: ["left behind: 2"])
    doctor.main([])
    lines = capfd.readouterr().out.splitlines()
    assert "tier light: native" in lines
    assert "backend native: 2 enforced, 1 degraded, 1 missing" in lines
    (memory,) = (each for each in lines if each.startswith("  memory_limit"))
    assert memory.split()[1] == "degraded"
    assert memory.endswith(f" {'w' * 109}…")
    assert lines[lines.index(memory) + 1].strip() == "fix: turn it on"
    assert any(each.split() == ["core_dumps", "missing", "no", "switch"] for each in lines)
    assert not any(each.startswith("  seccomp") for each in lines)
    named = lines[lines.index("backend landlock: 1 enforced, 1 degraded, 1 missing") + 1 :][:2]
    assert ["  degraded: memory_limit", "  missing: core_dumps"] == named
    assert "backend docker: not usable here: no engine" in lines
    assert "left behind: 2" in lines
    doctor.main(["--verbose"])
    whole = capfd.readouterr().out
    assert "w" * 200 in whole
    assert "native: 2 enforced, 1 degraded, 1 missing" in whole


def test_a_tier_is_of_the_first_that_is_taken_unasked() -> None:
    strong = registry.candidates("strong")
    weak = report(strong[0], protection("virtual_machine", "missing"), reason="emulated")
    assert f"tier strong: unavailable ({strong[0]}: emulated)" == doctor._tier("strong", [weak])
    by_name = report(strong[0], protection("virtual_machine", "missing"))
    assert "by name only" in doctor._tier("strong", [by_name])
    good = report(strong[-1], protection("virtual_machine"))
    assert f"tier strong: {strong[-1]}" == doctor._tier("strong", [good])


def test_what_is_not_available_is_named_where_the_backend_is() -> None:
    capabilities = (
        Capability("fork", False, "none"),
        Capability("secrets", False, "needs a package"),
    )
    for available in (True, False):
        told = report("gvisor", available=available, capabilities=capabilities, reason="slow")
        lines = doctor.backend_lines(told, Colours(-1))
        assert available == ("  not available: fork, secrets" in lines)
        assert available == ("  secrets: needs a package" in lines)
        assert "  fork: none" not in lines
        assert "  slow" in lines
        assert ("usable" if available else "not usable here") == lines[0].rpartition(": ")[2]


def result(status: str, severity: str = "high", evidence: str = "seen") -> ProbeResult:
    return ProbeResult("a.b", "a", severity, "It does.", status, evidence, "none: x")


@pytest.mark.parametrize(
    ("severity", "is_hole"),
    [("critical", True), ("high", True), ("medium", True), ("low", False)],
)
def test_an_escape_is_a_hole_unless_it_is_low(severity: str, *, is_hole: bool) -> None:
    assert is_hole == result("escaped", severity).breaks
    assert not result("held", severity).breaks


@pytest.mark.parametrize(
    ("results", "code", "escaped"),
    [
        ([result("held"), result("not_applicable"), result("inconclusive")], 0, 0),
        ([result("held"), result("escaped")], 1, 1),
        ([result("escaped", "low")], 0, 0),
        ([], 0, 0),
    ],
)
@pytest.mark.parametrize("as_json", [True, False])
def test_an_attack_fails_where_something_escaped(
    results: list[ProbeResult],
    code: int,
    escaped: int,
    as_json: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    attacked: list[Any] = []

    def run(show: Any, backend: Any) -> list[ProbeResult]:
        attacked.append(backend)
        for each in results if show else ():
            show(each)
        return results

    monkeypatch.setattr(runner, "run_attack", run)
    monkeypatch.setattr(registry, "backend_named", lambda name: f"backend {name}")
    assert code == attack.main(as_json=as_json)
    shown = capfd.readouterr().out
    if as_json:
        told = json.loads(shown)
        assert escaped == len(told["escaped"])
        assert len(results) == len(told["probes"]) == sum(told["counts"].values())
    else:
        counts = {"held": 0, "not_applicable": 0, "inconclusive": 0, "escaped": 0}
        for each in results:
            counts[each.status] += 1
        assert ", ".join(f"{count} {name}" for name, count in counts.items()) in shown
    assert code == attack.main(as_json=True, backend="gvisor")
    assert [None, "backend gvisor"] == attacked


def test_evidence_is_shown_where_it_did_not_hold_and_steers_no_terminal(
    capfd: pytest.CaptureFixture[str],
) -> None:
    screen = attack._Screen()
    for status in ("held", "not_applicable", "escaped", "inconclusive"):
        screen.show(result(status, evidence=f"\x1b[2J{status}\nnext"))
    shown = capfd.readouterr().out
    assert "\x1b[2J" not in shown
    assert 6 == len(shown.splitlines())
    assert [" [2Jescaped next", " [2Jinconclusive next"] == [
        each[24:] for each in shown.splitlines() if "[2J" in each
    ]


@pytest.mark.parametrize(
    ("argv", "field"), [(["nothing"], "MEASURE"), (["create", "--json"], "OPTION")]
)
def test_a_measure_is_one_and_stands_behind_the_options(argv: list[str], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        bench.main(argv)
    assert field == refused.value.field


def test_a_benchmark_measures_what_is_asked_for_and_ends_by_a_signal_as_by_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from ringfence.bench import main as measures

    asked: list[Any] = []

    def measure(names: Any, settings: Any, screen: Any) -> Any:
        asked.append((names, settings, screen))
        handler: Any = signal.getsignal(signal.SIGTERM)
        with pytest.raises(SystemExit) as end:
            handler(signal.SIGTERM, None)
        assert 128 + signal.SIGTERM == end.value.code
        return [], []

    monkeypatch.setattr(measures, "measure", measure)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert 0 == bench.main(["--json", "--quick", "run", "create"])
        assert [] == json.loads(capfd.readouterr().out)["rows"]
        assert 0 == bench.main(["--json", "--server"])
        assert 0 == bench.main(["--json"])
    finally:
        signal.signal(signal.SIGTERM, before)
    (few, settings, screen), (server, _, _), (usual, _, _) = asked
    assert (["create", "run"], True, None) == (few, settings.quick, screen)
    assert ["server"] == server
    assert not {*measures.ONLY_IF_ASKED} & {*usual}
    assert {*measures.MEASURES} == {*usual, *measures.ONLY_IF_ASKED}


def test_a_backend_whose_report_fails_is_not_usable_and_hides_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def named(name: str) -> Any:
        if name == "broken":
            raise ZeroDivisionError("of somebody else's code")
        return SimpleNamespace(report=lambda: report(name))

    monkeypatch.setattr(doctor, "names", lambda: ("broken", "native"))
    monkeypatch.setattr(doctor, "backend_named", named)
    broken, native = doctor._reports()
    assert (False, True) == (broken.available, native.available)
    assert "somebody else's code" in broken.reason
