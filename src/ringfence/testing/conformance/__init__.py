"""The conformance suite: a backend is done when it passes.

    from ringfence.testing.conformance import BackendConformance

    class TestMine(BackendConformance):
        def make_backend(self):
            return MyBackend()

Every rule of the backend protocol has a test here. A member that is missing fails one test, and
the others are skipped for it. What a backend reports it cannot do is
tested too: it must be refused with `Unsupported`, and each refusal is counted and listed at
the end of the run. Tests use only the protocol, so a backend needs nothing else to pass;
sandboxes need a POSIX `sh` and the `PROGRAMS`. Waits are bounded by `patience_s`, and nothing
is judged by its speed. A backend that needs a special spec overrides `make_spec`; one whose
sandboxes hold a program that connects overrides `connect_argv`.
"""

from __future__ import annotations

from .base import PROGRAMS, ConformanceBase, needs
from .checkpoints import Checkpoints
from .endings import Endings
from .environment import Environment
from .execs import Execs
from .files import Files
from .helper_tasks import HelperTasks
from .lifecycle import Lifecycle
from .limits import LimitsThatBite
from .live_forks import LiveForks
from .mounts import Mounts
from .network import Network
from .optional import Attendance, Comparison, Durability, Forks, Profiles, Tenancy
from .reports import Reports
from .requests import Requests
from .suspension import Suspension
from .trees import Trees
from .warmth import Warmth

__all__ = ["PROGRAMS", "BackendConformance", "BasicConformance", "ConformanceBase", "needs"]


class BasicConformance(
    Lifecycle, Execs, Comparison, Durability, Tenancy, Profiles, Attendance, Forks
):
    """The first half of the way: lifecycle, execs, and the optional parts that are declared."""


class BackendConformance(
    Lifecycle,
    Execs,
    Endings,
    Environment,
    Requests,
    Files,
    Trees,
    HelperTasks,
    Mounts,
    Network,
    Checkpoints,
    Suspension,
    LimitsThatBite,
    LiveForks,
    Warmth,
    Reports,
    Comparison,
    Durability,
    Tenancy,
    Profiles,
    Attendance,
    Forks,
):
    """The whole suite; subclass it as `Test...` and override `make_backend`."""
