"""The conformance suite in two: what may come out otherwise for another user of the host, and what may not.

Both are run by root and by an ordinary user, but for the second where it is marked `anyone`.
"""

from __future__ import annotations

from ringfence.testing.conformance.checkpoints import Checkpoints
from ringfence.testing.conformance.endings import Endings
from ringfence.testing.conformance.environment import Environment
from ringfence.testing.conformance.execs import Execs
from ringfence.testing.conformance.files import Files
from ringfence.testing.conformance.helper_tasks import HelperTasks
from ringfence.testing.conformance.lifecycle import Lifecycle
from ringfence.testing.conformance.limits import LimitsThatBite
from ringfence.testing.conformance.live_forks import LiveForks
from ringfence.testing.conformance.mounts import Mounts
from ringfence.testing.conformance.network import Network
from ringfence.testing.conformance.optional import (
    Attendance,
    Comparison,
    Durability,
    Forks,
    Profiles,
    Tenancy,
)
from ringfence.testing.conformance.reports import Reports
from ringfence.testing.conformance.requests import Requests
from ringfence.testing.conformance.suspension import Suspension
from ringfence.testing.conformance.trees import Trees
from ringfence.testing.conformance.warmth import Warmth


class ForEachUser(
    Files,
    Mounts,
    Network,
    Checkpoints,
    Suspension,
    LimitsThatBite,
    Reports,
    Comparison,
    Durability,
    Tenancy,
    Profiles,
    Attendance,
    Forks,
    LiveForks,
):
    """Files of the host and owners, limits and what holds: done with what the user may do."""


class ForAnybody(Lifecycle, Execs, Endings, Environment, Requests, Trees, HelperTasks, Warmth):
    """What is asked for, and what happens inside."""
