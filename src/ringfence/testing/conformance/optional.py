"""The optional parts of `backends.optional`: each is tested where it is declared, and else skipped by name."""

from __future__ import annotations

import os
import secrets
import select
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from ...backends import optional
from ...errors import RingfenceError, SnapshotNotFound, Unsupported
from ...model.execs.exec import ExecRequest
from ...model.files import FILE
from ...model.spec import LINEAGE
from ...policy.seccomp import SeccompPolicy
from ..lab import Lab
from ..running import wait_done
from .base import ConformanceBase

if TYPE_CHECKING:
    from pathlib import Path

    from ...backends.protocol import Backend, BackendExec
    from ...fork.trees import Compared
    from ...model.changes import Changes
    from .base import MakeSandbox

Part = TypeVar("Part")
_FORK = {LINEAGE: "another"}
NO_MKDIR = {"extends": "os_hardened", "rules": [{"names": ["mkdir", "mkdirat"], "action": "EPERM"}]}


def declared(made: object, part: type[Part]) -> Part:
    """Return the object as that part; skip the test where its class does not inherit it."""
    if not isinstance(made, part):
        pytest.skip(f"{type(made).__name__} does not declare {part.__name__}")
    return made


class Comparison(ConformanceBase):
    def test_it_lists_what_is_new(self, sandbox: Lab) -> None:
        compared = declared(sandbox.sandbox, optional.Comparable)
        sandbox.sh("mkdir made; printf one > made/file; ln -s file made/link")

        changes = self._compare(compared, None)

        kinds = {each.path.rpartition("/")[2]: (each.change, each.kind) for each in changes.items}
        assert {
            "made": ("added", "directory"),
            "file": ("added", "file"),
            "link": ("added", "symlink"),
        } == kinds
        assert [3] == [each.size_bytes for each in changes.items if each.kind == "file"]
        assert changes.is_complete

    def test_it_tells_the_difference_to_a_snapshot(self, backend: Backend, sandbox: Lab) -> None:
        compared = declared(sandbox.sandbox, optional.Comparable)
        sandbox.sh("echo one > text; echo x > gone; echo same > same; printf 'a\\0' > binary")
        try:
            since = sandbox.sandbox.snapshot({}).id
        except Unsupported as exc:
            pytest.skip(exc.message)
        try:
            sandbox.sh("echo two >> text; rm gone; touch same; printf 'b\\0' > binary")

            changes = self._compare(compared, since)
            nothing = self._compare(compared, since)
        finally:
            backend.delete_snapshot(since)

        told = [(each.path.rpartition("/")[2], each.change) for each in changes.items]
        assert [("binary", "changed"), ("gone", "removed"), ("text", "changed")] == told
        assert "@@ -1 +1,2 @@\n one\n+two\n" in changes.diff()
        assert "@@ -1 +0,0 @@\n-x\n" in changes.diff()
        assert "Binary files" in changes.diff()
        assert changes == nothing

    def test_layers_tell_what_a_merge_needs(self, backend: Backend, sandbox: Lab) -> None:
        layered = declared(sandbox.sandbox, optional.Layered)
        sandbox.sh(
            "mkdir -p dir/below; echo same > dir/same; echo one > dir/text; echo x > dir/gone"
        )
        since = sandbox.sandbox.snapshot({}).id
        try:
            sandbox.sh("echo two > dir/text; rm dir/gone; echo new > dir/below/new")
            with ExitStack() as stack:
                sides = layered.sides(since, "dir", stack)
                assert sides is not None
                told = [_contents(each) for each in sides]
        finally:
            backend.delete_snapshot(since)

        before, after = ({path: each.get(path) for path in told[0] | told[1]} for each in told)
        differing = {path for path in before if before[path] != after[path]}
        assert {"/text", "/gone", "/below/new"} == differing
        assert (b"one\n", b"two\n") == (before["/text"], after["/text"])

    def test_an_unknown_snapshot_is_refused(self, sandbox: Lab) -> None:
        compared = declared(sandbox.sandbox, optional.Comparable)

        with pytest.raises((SnapshotNotFound, Unsupported)):
            compared.compare("no-such-snapshot")

    def _compare(self, sandbox: optional.Comparable, since: str | None) -> Changes:
        try:
            return sandbox.compare(since)
        except Unsupported as exc:
            pytest.skip(exc.message)


def _contents(side: Compared) -> dict[str, bytes]:
    files = [path for path, entry in side.entries.items() if entry[0] == FILE]
    return {path: b"".join(side.pieces(path)) for path in files}


class Durability(ConformanceBase):
    def make_durable(self, directory: str) -> Any:
        """Make a backend whose sandboxes outlive it, with `directory` as `restart_dir`: override it."""
        del directory
        return None

    def test_a_sandbox_is_adopted_by_its_id(
        self, backend: Backend, make_sandbox: MakeSandbox
    ) -> None:
        durable = declared(backend, optional.Durable)
        sandbox = make_sandbox().sandbox
        sandbox_id = sandbox.session.id

        adopted = durable.adopt(sandbox_id)

        assert adopted
        assert sandbox_id == adopted.session.id
        assert sandbox_id in [each.session.id for each in durable.living()]
        assert durable.adopt("no-such-sandbox") is None
        sandbox.terminate()
        assert sandbox_id not in [each.session.id for each in durable.living()]

    def test_its_anchor_is_a_process_or_none(self, backend: Backend, sandbox: Lab) -> None:
        del sandbox
        anchor = declared(backend, optional.Durable).anchor()

        assert anchor is None or os.path.exists(f"/proc/{anchor[0]}")

    def test_the_next_backend_takes_over_what_is_left(
        self, backend: Backend, tmp_path: Path
    ) -> None:
        declared(backend, optional.Durable)
        first = self.make_durable(str(tmp_path))
        assert first, "a backend that declares Durable overrides make_durable"
        lab = Lab(first.provision(self.make_spec()), self.patience_s)
        lab.put("note", b"kept")
        sandbox_id = lab.sandbox.session.id
        assert first.outlives
        first.save()
        first.leave()
        second = self.make_durable(str(tmp_path))
        assert second
        try:
            found = second.adopt(sandbox_id)
            assert found
            if isinstance(found, optional.DurableSandbox):
                found.align(False)
            assert b"kept" == Lab(found, self.patience_s).run("cat", "note").stdout
            found.terminate()
            assert [] == list(second.living())
        finally:
            second.close()


class Tenancy(ConformanceBase):
    def test_a_tenant_is_named_before_the_sandbox(
        self, backend: Backend, make_sandbox: MakeSandbox
    ) -> None:
        tenanted = declared(backend, optional.Tenanted)
        for sandbox_id, tenant in (("of-ann", "ann"), ("of-ann-too", "ann"), ("of-bob", "bob")):
            tenanted.belongs_to(sandbox_id, tenant)
            assert make_sandbox(id=sandbox_id).run("true").ok


class Profiles(ConformanceBase):
    def test_a_profile_is_defined_holds_and_is_removed(
        self, backend: Backend, make_sandbox: MakeSandbox
    ) -> None:
        store = declared(backend, optional.ProfileStore)
        store.define_profile("no-mkdir", SeccompPolicy.from_json(NO_MKDIR))
        refused = make_sandbox(profile="no-mkdir").sh("cd /tmp; mkdir made")
        store.define_profile("no-mkdir", None)

        assert not refused.ok
        assert make_sandbox().sh("cd /tmp; mkdir made").ok
        with pytest.raises(RingfenceError):
            make_sandbox(profile="no-mkdir")

    def test_only_its_profiles_are_served(
        self, backend: Backend, make_sandbox: MakeSandbox
    ) -> None:
        selective = declared(backend, optional.Selective)

        assert "no-such-profile" not in selective.profile_names
        assert self.make_spec().profile in selective.profile_names
        assert not [name for name in selective.never if backend.report().can(name)]
        with pytest.raises(RingfenceError):
            make_sandbox(profile="no-such-profile")


class Attendance(ConformanceBase):
    one_sandbox = True

    def test_an_attended_exec_ends_as_any_other(self, sandbox: Lab) -> None:
        attended = declared(sandbox.sandbox, optional.AttendedExec)
        begun = attended.start_attended(ExecRequest(("sh", "-c", "echo out; exit 3")), "mine")

        if isinstance(attended, optional.DurableSandbox):
            assert "mine" in attended.adopted_execs()
        wait_done(begun, self.patience_s)
        assert b"out\n" == os.read(begun.stdout or 0, 100)
        assert 3 == begun.status().exit_code
        begun.close()

    def test_a_command_that_is_not_there_is_noted(self, sandbox: Lab) -> None:
        process = sandbox.start("no-such-command")
        driven = declared(process, optional.DrivenExec)
        wait_done(process, self.patience_s)

        assert 127 == process.status().exit_code
        assert b"no-such-command" in driven.note

    def test_the_boot_id_is_its_own_and_can_be_renewed(
        self, sandbox: Lab, make_sandbox: MakeSandbox
    ) -> None:
        booted = declared(sandbox.sandbox, optional.BootIdentity)
        show = "cat /proc/sys/kernel/random/boot_id"
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            seen = {file.read(), make_sandbox().sh(show).stdout, sandbox.sh(show).stdout}
        booted.renew_boot_id()

        assert 4 == len(seen | {sandbox.sh(show).stdout})

    def test_all_its_processes_can_be_ended(self, sandbox: Lab) -> None:
        clearable = declared(sandbox.sandbox, optional.Clearable)
        # Without namespaces the list has the host's processes too.
        seconds = str(10**8 + secrets.randbelow(10**8))
        watched = sandbox.start("sleep", seconds)
        sandbox.sh(f"sleep {seconds} >/dev/null 2>&1 &")
        clearable.end_processes()

        wait_done(watched, self.patience_s)
        assert 9 == watched.status().signal
        listed = "for each in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $each; done 2>/dev/null; :"
        assert f"sleep {seconds}".encode() not in sandbox.sh(listed).stdout

    def test_processor_time_only_grows(self, sandbox: Lab) -> None:
        clock = declared(sandbox.sandbox, optional.CpuClock)
        before = clock.cpu_ns()
        sandbox.sh("i=0; while [ $i -lt 1000 ]; do i=$((i+1)); done")

        assert before is None or before <= (clock.cpu_ns() or 0)


_COUNTS = "n=5; while read -r line; do n=$((n+1)); echo $n; done"


class Forks(ConformanceBase):
    """A shell that counts the lines that it reads goes on in another sandbox from the number it has."""

    def test_a_running_program_goes_on_in_another_sandbox(
        self, sandbox: Lab, make_sandbox: MakeSandbox
    ) -> None:
        forkable = declared(sandbox.sandbox, optional.Forkable)
        wanted = ExecRequest(("sh", "-c", _COUNTS), stream_stdin=True)
        run = forkable.start(wanted)
        assert b"6\n" == self._ask(run)
        assert "sh" == forkable.running()[run.id]
        template = forkable.template(run)
        try:
            template.release()
            template.load()
            assert b"7\n" == self._ask(run)
            others = [make_sandbox(labels=_FORK).sandbox for _ in range(2)]
            copies = [template.copy(each, wanted, template.ids) for each in others]
        finally:
            template.close()
        for each in copies:
            each.go_on()
            each.close()
            assert b"7\n" == self._ask(each.run)
        assert b"8\n" == self._ask(run)
        copy = copies[0].run
        copy.close_stdin()
        wait_done(copy, self.patience_s)
        assert 0 == copy.status().exit_code
        copies[1].run.kill()
        wait_done(copies[1].run, self.patience_s)
        assert "caller" == copies[1].run.status().killed_by

    def test_what_cannot_be_copied_goes_on(self, sandbox: Lab) -> None:
        forkable = declared(sandbox.sandbox, optional.Forkable)
        script = f"mkfifo fifo; exec 9<>fifo; {_COUNTS}"
        run = forkable.start(ExecRequest(("sh", "-c", script), stream_stdin=True))
        assert b"6\n" == self._ask(run)
        with pytest.raises(Unsupported, match="fifo"):
            forkable.template(run)
        assert b"7\n" == self._ask(run)

    def _ask(self, run: BackendExec) -> bytes:
        """Give a line, and read one."""
        assert run.stdin is not None
        assert run.stdout is not None
        os.write(run.stdin, b"\n")
        poll = select.poll()
        poll.register(run.stdout, select.POLLIN)
        assert poll.poll(self.patience_s * 1000)
        return os.read(run.stdout, 100)
