"""Isolation between two sandboxes: neither sees anything of the other."""

from __future__ import annotations

import time

from ..lab import first_host_pid, first_line, host_pid, run, start
from ..probes import planted
from ..probes.kit import Outcome, escaped, held, inconclusive
from ..scope import OWN_KERNEL
from .register import SAME_SANDBOX, probe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..lab import Lab


def _look(lab: Lab) -> tuple[list[str], str]:
    """Search one sandbox for traces of another, once for all probes of an attack; return traces and problem."""
    if lab.looked is None:
        with lab.sandbox() as one, lab.sandbox() as other:
            said = first_line(start(one, "planted", "plant", "20"))
            result = run(other if lab.protected else one, "planted", "look", *said.split()[1:])
        words = result.stdout_text.split()
        problem = (
            "" if said and words[-1:] == ["looked"] else result.stderr_text[-200:] or "no answer"
        )
        lab.looked = words, problem
    return lab.looked


def _neighbour(name: str) -> Callable[[Lab], Outcome]:
    def attack(lab: Lab) -> Outcome:
        found, problem = _look(lab)
        if problem:
            return inconclusive(problem)
        return escaped("it was found") if name in found else held("it was not found")

    return attack


_NO_QUEUES = "none: Landlock knows no rule for queues, so no sandbox has any"

for _name, (_id, _severity, _what, _how) in planted.LOOKS.items():
    probe(
        _id,
        _severity,
        _NO_QUEUES if _name == "posix" else SAME_SANDBOX,
        about=f"One sandbox must not see another's {_what}.",
    )(_neighbour(_name))


@probe("identity.neighbour-host-id", "high", SAME_SANDBOX)
def host_id(lab: Lab) -> Outcome:
    """Two sandboxes must not have an id of the host in common."""
    with lab.sandbox() as one, lab.sandbox() as other:
        who = (one, other if lab.protected else one)
        ids = [_outside_ids(first_host_pid(each)) for each in who]
    common = ids[0] & ids[1]
    if not common:
        return held(f"{min(ids[0])} and {min(ids[1])}")
    if lab.protected and lab.rootless:
        return inconclusive("an ordinary user has only one id to give: namespaces separate")
    return escaped(f"{len(common)} ids in common")


def _outside_ids(pid: int) -> set[int]:
    """As the host has them: inside, those of a namespace between are shown."""
    found: set[int] = set()
    with open(f"/proc/{pid}/uid_map", encoding="ascii") as file:
        for line in file:
            _inside, outside, count = map(int, line.split())
            found.update(range(outside, outside + min(count, 4096)))
    return found


@probe("ipc.neighbour-signal", "critical", SAME_SANDBOX)
def signal_neighbour(lab: Lab) -> Outcome:
    """A sandbox must not reach another's processes by a signal."""
    with lab.sandbox() as one, lab.sandbox() as other:
        victim = start(one, "planted", "say_pid")
        inside = int(first_line(victim) or 0)
        # The host does not see processes under a guest's own kernel: only the inside pid is known.
        alone = lab.backend.name in OWN_KERNEL
        target = host_pid(one, inside) if lab.protected and not alone else inside
        if not target:
            return inconclusive("its processes cannot be seen from the host")
        who = other if lab.protected else one
        said = run(who, "planted", "signal_to", str(target)).stdout_text.strip()
        time.sleep(0.05)
        alive = victim.running
    said = f"kill {target}: {said}"
    reached = said.endswith("reached") and not alone  # one of the other's own has that number
    return held(said) if alive and not reached else escaped(said)
