"""Ids, sessions, states, and the end of a sandbox."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from ...errors import InvalidRequest, LifecycleError, NetworkPolicyError, Unsupported
from ...model import capabilities as can
from ...model.base.ids import check_id
from ...model.mount import MEMORY_DIR, OUTPUTS_DIR, Mount
from ...model.net.network import NetworkPolicy
from ...model.session import Session
from ...model.state import State
from ..running import read_to_end, wait_done
from .base import ConformanceBase, needs

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...backends.protocol import Backend
    from ..lab import Lab
    from .base import MakeSandbox


class Lifecycle(ConformanceBase):
    def test_generated_ids_name_the_backend_and_are_ordered(
        self, backend: Backend, make_sandbox: MakeSandbox
    ) -> None:
        ids = [make_sandbox().sandbox.session.id for _ in range(3)]

        assert sorted(ids) == ids
        assert all(each.startswith(f"{backend.name}-") and each == check_id(each) for each in ids)

    def test_a_given_id_is_used(self, make_sandbox: MakeSandbox) -> None:
        lab = make_sandbox(id=" my-own-id ")

        assert "my-own-id" == lab.sandbox.session.id

    def test_an_id_in_use_is_refused(self, make_sandbox: MakeSandbox) -> None:
        make_sandbox(id="only-one")

        with pytest.raises(InvalidRequest) as refusal:
            make_sandbox(id="only-one")

        assert "id" == refusal.value.field

    def test_a_new_session_tells_what_it_is(
        self, backend: Backend, make_sandbox: MakeSandbox
    ) -> None:
        session = make_sandbox(labels={"team": "red"}).sandbox.session

        assert backend.name == session.backend
        assert State.PROVISIONED == session.state
        assert "red" == session.metadata["team"]
        assert "os_hardened" == session.metadata["profile"]
        assert {MEMORY_DIR, OUTPUTS_DIR} <= {mount.target for mount in session.mounts}

    def test_a_session_has_one_json_form(self, sandbox: Lab) -> None:
        session = sandbox.sandbox.session

        assert session == Session.from_json(session.to_json(admin=True))

    def test_the_first_exec_makes_it_running(self, sandbox: Lab) -> None:
        sandbox.run("true")

        assert State.RUNNING == sandbox.state

    def test_the_unrestricted_profile_is_reported(self, make_sandbox: MakeSandbox) -> None:
        """It must be asked for by name, and whoever looks at the session sees it."""
        lab = make_sandbox(profile="unrestricted")

        assert "unrestricted" == lab.sandbox.session.metadata["profile"]

    def test_terminate_before_anything_ran(self, sandbox: Lab) -> None:
        sandbox.sandbox.terminate()

        assert State.TERMINATED == sandbox.state

    def test_terminate_after_execs_and_again(self, sandbox: Lab) -> None:
        sandbox.run("true")

        for _ in range(3):
            sandbox.sandbox.terminate()

        assert State.TERMINATED == sandbox.state

    @needs(can.SUSPEND)
    def test_terminate_while_suspended(self, sandbox: Lab) -> None:
        process = sandbox.start("sleep", "600")
        sandbox.sandbox.suspend()

        sandbox.sandbox.terminate()

        assert State.TERMINATED == sandbox.state
        assert b"" == read_to_end(process.stdout, self.patience_s)

    def test_terminate_ends_every_process(self, sandbox: Lab) -> None:
        script = "setsid sleep 600 & (sleep 600 &) ; echo ready; sleep 600"
        process = sandbox.start("sh", "-c", script)
        other = sandbox.start("sleep", "600")

        sandbox.sandbox.terminate()

        for each in (process, other):
            wait_done(each, self.patience_s)
            assert (9, "terminate") == (each.status().signal, each.status().killed_by)
            read_to_end(each.stdout, self.patience_s)

    def test_terminate_from_many_threads(self, sandbox: Lab) -> None:
        sandbox.start("sleep", "600")

        failures = _in_threads(4, sandbox.sandbox.terminate)

        assert [] == failures
        assert State.TERMINATED == sandbox.state

    @pytest.mark.parametrize("operation", ["exec", "read", "list", "upload", "attach", "network"])
    def test_a_terminated_sandbox_does_nothing(
        self, sandbox: Lab, operation: str, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        source = str(tmp_path_factory.mktemp("source"))
        box = sandbox.sandbox
        sandbox.put("file", b"x")
        box.terminate()
        verbs: dict[str, Callable[[], object]] = {
            "exec": lambda: sandbox.start("true"),
            "read": lambda: sandbox.get("file"),
            "list": lambda: sandbox.files.list("."),
            "upload": lambda: sandbox.files.upload_tree(source, "copy"),
            "attach": lambda: box.attach(Mount("/late", source)),
            "network": lambda: box.apply_network_policy(NetworkPolicy.none()),
        }

        with pytest.raises((LifecycleError, Unsupported, NetworkPolicyError)):
            verbs[operation]()

    @pytest.mark.parametrize("operation", ["suspend", "resume", "snapshot"])
    def test_a_terminated_sandbox_cannot_come_back(self, sandbox: Lab, operation: str) -> None:
        box = sandbox.sandbox
        box.terminate()
        verbs: dict[str, Callable[[], object]] = {
            "suspend": box.suspend,
            "resume": box.resume,
            "snapshot": lambda: box.snapshot({}),
        }

        with pytest.raises((LifecycleError, Unsupported)):
            verbs[operation]()

        assert State.TERMINATED == sandbox.state

    def test_a_terminated_sandbox_still_tells_what_it_was(self, sandbox: Lab) -> None:
        sandbox.run("true")
        sandbox.sandbox.terminate()

        assert State.TERMINATED == sandbox.sandbox.stats().state
        assert 1 == sandbox.sandbox.stats().execs
        sandbox.sandbox.protections()

    def test_sandboxes_do_not_see_each_other(self, make_sandbox: MakeSandbox) -> None:
        one, two = make_sandbox(), make_sandbox()

        one.put("/tmp/mine", b"1")
        two.put("/tmp/mine", b"2")

        assert b"1" == one.sh("cat /tmp/mine").stdout
        assert b"2" == two.sh("cat /tmp/mine").stdout

    def test_one_sandbox_ends_and_others_go_on(self, make_sandbox: MakeSandbox) -> None:
        one, two = make_sandbox(), make_sandbox()
        process = two.start("cat", stream_stdin=True)

        one.sandbox.terminate()

        assert b"still here" == two.finish(process, stdin=b"still here").stdout

    def test_sandboxes_are_made_from_many_threads(self, make_sandbox: MakeSandbox) -> None:
        results = []

        failures = _in_threads(4, lambda: results.append(make_sandbox().sh("echo hi").text))

        assert [] == failures
        assert ["hi\n"] * 4 == results

    def test_closing_the_backend_terminates_all(self) -> None:
        backend = self.make_backend()
        boxes = [backend.provision(self.make_spec()) for _ in range(2)]

        backend.close()
        backend.close()

        assert [State.TERMINATED] * 2 == [box.session.state for box in boxes]


def _in_threads(count: int, action: Callable[[], object]) -> list[BaseException]:
    """Run `action` in threads at once; what they raised."""
    failures: list[BaseException] = []

    def attempt() -> None:
        try:
            action()
        except Exception as exc:  # noqa: BLE001 (reported by the caller's assert)
            failures.append(exc)

    threads = [threading.Thread(target=attempt) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures
