"""`ringfence doctor`: isolation that this host supports, and fixes for the rest."""

from __future__ import annotations

import os
import sys

from ...backends.registry import backend_named, candidates, is_taken_unasked, names
from ...errors import InvalidRequest
from ...model.capabilities import SECRETS, SEVERAL_USERS
from ...model.spec import TIERS
from ..commands import DOCTOR
from ..options import no_arguments, parse
from ..terminal import Colours

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from ...model.capabilities import BackendReport, Protection

_SAID_WHY = (SECRETS, SEVERAL_USERS)  # abilities that whoever reads this can come by
_COLOUR_OF = {"enforced": "green", "degraded": "yellow", "missing": "red"}
_LONGEST_NAME = 26
_LONGEST_WHY = 110


def main(argv: Sequence[str]) -> int:
    """Report; 0 when at least one backend is usable (with --attack: when nothing escaped)."""
    given, rest = parse(DOCTOR, argv)
    if "help" in given:
        from ..help import help_of

        sys.stdout.write(help_of(DOCTOR))
        return 0
    no_arguments(DOCTOR, rest)
    if "attack" in given:
        from .attack import main as attack

        return attack(as_json="json" in given, backend=given.get("backend"))
    if "fix" in given or "undo" in given:
        if others := sorted(
            {*given} - {"fix", "yes"} if "fix" in given else {*given} - {"undo", "yes"}
        ):
            option = "fix" if "fix" in given else "undo"
            raise InvalidRequest(
                f"--{option} and --{others[0]} do not go together",
                field=option,
                hint="give one of them",
            )
        from .fix import main as fix

        return fix(undo="undo" in given, yes="yes" in given)
    if "yes" in given:
        raise InvalidRequest("--yes needs --fix or --undo", field="yes", hint="add one of them")
    if "backend" in given:
        raise InvalidRequest("--backend needs --attack", field="backend", hint="add --attack")
    reports = _reports()
    if "json" in given:
        _print_json(reports)
    elif "verbose" in given:
        _print(reports)
    else:
        _print_short(reports)
    return 0 if any(map(_is_usable, reports)) else 1


def _is_usable(report: BackendReport) -> bool:
    """Return whether sandboxes start there without a word such as `--anywhere`."""
    if report.backend == "native":
        return is_taken_unasked(report)
    return report.available and report.backend != "landlock"


def _reports() -> list[BackendReport]:
    """Of every backend, all at once: most of each is waiting for what it starts."""
    from concurrent.futures import ThreadPoolExecutor

    asked = names()
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(_report, asked))


def _report(name: str) -> BackendReport:
    """Report a backend; one whose probe raises is unavailable and does not affect the others."""
    try:
        return backend_named(name).report()
    except Exception as exc:  # noqa: BLE001  may be third-party code
        from ...backends.local.reports import unavailable

        return unavailable(name, exc, ())


def _print_json(reports: Sequence[BackendReport]) -> None:
    import json

    form = {"host": host_facts(), "backends": [report.to_json() for report in reports]}
    print(json.dumps(form, indent=2))


def host_facts() -> dict[str, Any]:
    """Collect the facts about this machine that a bug report needs."""
    from ... import __version__

    kernel = os.uname()
    return {
        "ringfence": __version__,
        "python": sys.version.split()[0],
        "kernel": kernel.release,
        "machine": kernel.machine,
        "uid": os.geteuid(),
        "cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    }


def _print(reports: Sequence[BackendReport]) -> None:
    colours = Colours(sys.stdout.fileno())
    facts = host_facts()
    who = "root" if facts["uid"] == 0 else f"uid {facts['uid']}"
    versions = (f"{name} {facts[name]}" for name in ("ringfence", "kernel"))
    print(f"{', '.join(versions)}, Python {facts['python']}, as {who}\n")
    for report in reports:
        print("\n".join(backend_lines(report, colours)))
    print("\n".join([*_summary(reports), *_left_behind()]))


def _print_short(reports: Sequence[BackendReport]) -> None:
    """A screen: what runs here, what is weaker than it could be and how to mend that."""
    colours = Colours(sys.stdout.fileno())
    print("\n".join([*(_tier(tier, reports) for tier in TIERS), ""]))
    of_a_tier = {name for tier in TIERS for name in candidates(tier)}
    for report in (each for each in reports if each.available):
        print(f"backend {colours.paint('bold', report.backend)}: {_counts(report)}")
        weak = [each for each in report.protections if each.status != "enforced"]
        lines = _with_fixes if report.backend in of_a_tier else _named
        print("".join(f"  {line}\n" for line in lines(weak, colours)), end="")
    missing = [report for report in reports if not report.available]
    for report in missing:
        print(f"backend {report.backend}: not usable here: {_shortened(report.reason)}")
    left = _left_behind()
    print("\n".join(["", *left, "Every protection with its reason: ringfence doctor --verbose"]))


def _with_fixes(weak: Sequence[Protection], colours: Colours) -> Iterator[str]:
    """Give a line for each protection, and another for what mends it."""
    width = max([len(each.name) for each in weak] + [0])
    for each in weak:
        status = colours.paint(_COLOUR_OF[each.status], f"{each.status:<8}")
        yield f"{each.name:<{width}}  {status}  {_shortened(each.why)}".rstrip()
        if each.fix:
            fix = colours.paint("bold", "fix")
            yield f"{'':<{width}}  {'':<8}  {fix}: {_shortened(each.fix)}"


def _named(weak: Sequence[Protection], colours: Colours) -> Iterator[str]:
    """Give a line for each status, of a backend that is taken only by its name."""
    for status, colour in _COLOUR_OF.items():
        if found := [each.name for each in weak if each.status == status]:
            yield f"{colours.paint(colour, status)}: {', '.join(found)}"


def _shortened(text: str) -> str:
    """As much as a line of a screen holds."""
    return text if len(text) <= _LONGEST_WHY else f"{text[: _LONGEST_WHY - 1].rstrip()}…"


def backend_lines(report: BackendReport, colours: Colours) -> list[str]:
    """Format one backend's table: protection, status and reason, with the fix below."""
    tiers = f" (tier {', '.join(report.tiers)})" if report.tiers else ""
    usable = (
        colours.paint("green", "usable")
        if report.available
        else colours.paint("red", "not usable here")
    )
    lines = [f"backend {colours.paint('bold', report.backend)}{tiers}: {usable}"]
    if report.reason:
        lines.append(f"  {report.reason}")
    width = max([len(each.name) for each in report.protections] + [0])
    for each in report.protections:
        lines += _protection_lines(each, min(width, _LONGEST_NAME), colours)
    lacking = [each.name for each in report.capabilities if not each.available]
    if report.available and lacking:
        lines += ["", f"  not available: {', '.join(lacking)}"]
    lines += [
        f"  {each.name}: {each.reason}"
        for each in report.capabilities
        if report.available and each.name in _SAID_WHY and not each.available and each.reason
    ]
    return [*lines, ""]


def _protection_lines(each: Protection, width: int, colours: Colours) -> list[str]:
    status = colours.paint(_COLOUR_OF[each.status], f"{each.status:<8}")
    lines = [f"  {each.name:<{width}}  {status}  {each.why}".rstrip()]
    if each.fix:
        lines.append(f"  {'':<{width}}  {'':<8}  {colours.paint('bold', 'fix')}: {each.fix}")
    return lines


def _counts(report: BackendReport) -> str:
    counts = dict.fromkeys(_COLOUR_OF, 0)
    for each in report.protections:
        counts[each.status] += 1
    return ", ".join(f"{count} {status}" for status, count in counts.items() if count)


def _summary(reports: Sequence[BackendReport]) -> list[str]:
    lines = [f"{report.backend}: {_counts(report)}" for report in reports]
    return [*lines, *(_tier(tier, reports) for tier in TIERS)]


def _left_behind() -> list[str]:
    """The control groups of processes that are gone, which a start could not remove."""
    from ...backends.local.host import cgroups

    left, _strangers = cgroups.left_behind(cgroups.Layout())
    if not left:
        return []
    why = "not empty, or not this user's to remove; end the processes in them, then rmdir them"
    return [f"left behind: {len(left)} control groups of earlier runs ({why}): {left[0]} …"]


def _tier(tier: str, reports: Sequence[BackendReport]) -> str:
    """Format the backend that serves a tier by default, or the reason why none does."""
    asked = [report for report in reports if report.backend in candidates(tier)]
    chosen = next((each.backend for each in asked if is_taken_unasked(each)), None)
    if chosen is not None:
        return f"tier {tier}: {chosen}"
    reasons = "; ".join(f"{each.backend}: {each.reason or 'by name only'}" for each in asked)
    return f"tier {tier}: unavailable ({reasons})"
