"""Probes that need the host's view, and their register."""

from __future__ import annotations

from ...errors import RingfenceError
from ..probes.kit import Outcome, inconclusive
from ..result import ProbeResult

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..lab import Lab

    Run = Callable[[Lab], Outcome]

# Where a probe from outside must fire: see `Lab.protected`.
PLAIN_PROCESS = "the same program as a plain process of the host"
SAME_SANDBOX = "looked for in the sandbox that made it"
ROOMY = "a limit that is far away"
NETWORK = "the host's network, asked for by name"
NOT_PROTECTED = "the same directory, nothing protected"
WRITABLE = "the same directory mounted writable"
NAIVE = "the same, done by a program that follows names"
UNTOUCHED = "the same without the damage"


class OutsideProbe:
    """A probe that runs on the host: see `kit.Probe`.

    Attributes:
        waits: It does little but wait, so several can run at once.
    """

    def __init__(
        self, id: str, severity: str, description: str, control: str, run: Run, waits: bool
    ) -> None:
        self.id, self.severity, self.description = id, severity, description
        self.control, self.run, self.waits = control, run, waits

    @property
    def area(self) -> str:
        return self.id.partition(".")[0]

    def attack(self, lab: Lab) -> ProbeResult:
        """Run it and say what was found."""
        try:
            outcome = self.run(lab)
        except (RingfenceError, OSError, RuntimeError, ValueError) as exc:
            outcome = inconclusive(f"{type(exc).__name__}: {exc}")
        return ProbeResult(
            id=self.id,
            area=self.area,
            severity=self.severity,
            description=self.description,
            status=outcome.status,
            evidence=outcome.evidence,
            control=self.control,
            where="its own",
        )


PROBES: dict[str, OutsideProbe] = {}


def probe(
    id: str, severity: str, control: str, *, about: str = "", waits: bool = False
) -> Callable[[Run], Run]:
    """Register a probe; its docstring says what must not happen."""

    def register(run: Run) -> Run:
        if id in PROBES:
            raise ValueError(f"two probes are called {id}")
        description = about or " ".join((run.__doc__ or "").split())
        PROBES[id] = OutsideProbe(id, severity, description, control, run, waits)
        return run

    return register
