"""The unconfined backend passes the parts of the suite that are not about isolation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ringfence import Sandbox
from ringfence.backends import registry
from ringfence.errors import InvalidRequest, RingfenceError
from ringfence.model.capabilities import MISSING
from ringfence.model.net.network import NetworkPolicy
from ringfence.model.spec import UNRESTRICTED, SandboxSpec
from ringfence.testing.conformance.checkpoints import Checkpoints
from ringfence.testing.conformance.endings import Endings
from ringfence.testing.conformance.environment import Environment
from ringfence.testing.conformance.execs import Execs
from ringfence.testing.conformance.files import Files
from ringfence.testing.conformance.helper_tasks import HelperTasks
from ringfence.testing.conformance.lifecycle import Lifecycle
from ringfence.testing.conformance.reports import Reports
from ringfence.testing.conformance.requests import Requests
from ringfence.testing.conformance.suspension import Suspension
from ringfence.testing.conformance.trees import Trees
from ringfence.testing.conformance.warmth import Warmth
from ringfence.testing.lab import Lab
from ringfence.testing.unconfined import UnconfinedBackend

if TYPE_CHECKING:
    from ringfence.testing.conformance.base import MakeSandbox

pytestmark = [pytest.mark.anyone, pytest.mark.full]


class TestUnconfined(
    Lifecycle,
    Execs,
    Endings,
    Environment,
    Requests,
    Files,
    Trees,
    HelperTasks,
    Checkpoints,
    Suspension,
    Warmth,
    Reports,
):
    # What they test is isolation, or a path inside that is not the host's.
    test_commands_are_not_root = None  # type: ignore[assignment]
    test_what_the_user_may_not_do = None  # type: ignore[assignment]
    test_links_do_not_lead_outside = None  # type: ignore[assignment]
    test_uploads_do_not_follow_links = None  # type: ignore[assignment]
    test_sandboxes_do_not_see_each_other = None  # type: ignore[assignment]
    test_nothing_is_missing_that_was_not_allowed = None  # type: ignore[assignment]
    test_a_new_session_tells_what_it_is = None  # type: ignore[assignment]
    test_the_always_there_directories = None  # type: ignore[assignment]
    test_workdir_moves_the_session_root = None  # type: ignore[assignment]
    test_move_to_another_file_system = None  # type: ignore[assignment]
    test_what_a_command_wrote_is_read = None  # type: ignore[assignment]
    test_reading_follows_links_inside = None  # type: ignore[assignment]
    test_it_becomes_what_is_asked_for = None  # type: ignore[assignment]
    test_a_claim_that_fails_leaves_nothing = None  # type: ignore[assignment]

    def make_backend(self) -> UnconfinedBackend:
        return UnconfinedBackend()

    def make_spec(self, **changes: Any) -> SandboxSpec:
        """Ask for nothing that it does not have."""
        asked = {"profile": UNRESTRICTED, "network": NetworkPolicy.unrestricted()}
        return SandboxSpec(**{**asked, **changes})

    @pytest.fixture
    def sandbox(self, make_sandbox: MakeSandbox) -> Lab:
        """Never a shared one: what tidies that removes the files of a /tmp, which is the host's here."""
        return make_sandbox()


def test_no_name_leads_to_it() -> None:
    """It is had by whoever makes one, and from no command line, config file or request."""
    assert UnconfinedBackend.name not in registry.names()
    with pytest.raises(InvalidRequest, match="unknown backend"):
        Sandbox.create(backend=UnconfinedBackend.name)


def test_it_claims_no_protection() -> None:
    backend = UnconfinedBackend()

    assert {MISSING} == {each.status for each in backend.report().protections}
    for change in ({}, {"network": NetworkPolicy.unrestricted()}, {"profile": UNRESTRICTED}):
        with pytest.raises(RingfenceError):
            backend.provision(SandboxSpec(**change))
