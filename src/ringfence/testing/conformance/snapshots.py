"""Saved state: real content, restorable after the session is gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ...errors import FileNotFound, InvalidRequest, SnapshotNotFound
from ...model import capabilities as can
from ...model.mount import Mount
from ...model.session import Snapshot
from ...model.state import State
from ..lab import Lab
from .base import ConformanceBase, needs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ...backends.protocol import Backend
    from ...model.spec import SandboxSpec
    from .base import MakeSandbox

    Restore = Callable[..., Lab]
    Save = Callable[..., Snapshot]


class Snapshots(ConformanceBase):
    @pytest.fixture
    def save(self, backend: Backend) -> Iterator[Save]:
        """`save(lab)`: a snapshot that is deleted after the test."""
        saved: list[str] = []

        def save(lab: Lab, **metadata: str) -> Snapshot:
            snapshot = lab.sandbox.snapshot(metadata)
            saved.append(snapshot.id)
            return snapshot

        yield save
        left = {snapshot.id for snapshot in backend.snapshots()} if saved else set()
        for snapshot_id in left.intersection(saved):
            backend.delete_snapshot(snapshot_id)

    @pytest.fixture
    def restore(self, backend: Backend) -> Iterator[Restore]:
        """`restore(snapshot, spec)`: a sandbox that is gone after the test."""
        made: list[Lab] = []

        def restore(snapshot: Snapshot, spec: SandboxSpec | None = None) -> Lab:
            made.append(Lab(backend.restore(snapshot.id, spec), self.patience_s))
            return made[-1]

        yield restore
        for lab in reversed(made):
            lab.close()

    @needs(can.SNAPSHOT, can.RESTORE)
    def test_restored_after_the_session_is_gone(
        self, sandbox: Lab, save: Save, restore: Restore
    ) -> None:
        sandbox.sh("echo kept > file; ln -s file link; echo tmp > /tmp/kept")
        sandbox.files.make_dir("empty/directory")
        sandbox.put("script", b"#!/bin/sh\necho ran\n", mode=0o755)
        snapshot = save(sandbox)
        sandbox.sandbox.terminate()

        again = restore(snapshot)

        assert b"kept\n" == again.get("file")
        assert "file" == again.files.stat("link").link_target
        assert "directory" == again.files.stat("empty/directory").kind
        assert "ran\n" == again.run("./script").text
        assert b"tmp\n" == again.get("/tmp/kept")

    @needs(can.SNAPSHOT, can.RESTORE)
    def test_a_snapshot_is_a_moment(self, sandbox: Lab, save: Save, restore: Restore) -> None:
        sandbox.put("file", b"before")
        sandbox.put("deleted", b"x")
        sandbox.files.remove("deleted")
        snapshot = save(sandbox)
        sandbox.put("file", b"after")
        sandbox.put("late", b"x")

        again = restore(snapshot)

        assert b"before" == again.get("file")
        for name in ("late", "deleted"):
            with pytest.raises(FileNotFound):
                again.files.stat(name)

    @needs(can.SNAPSHOT, can.RESTORE)
    def test_restored_sandboxes_are_independent(
        self, sandbox: Lab, save: Save, restore: Restore
    ) -> None:
        sandbox.put("file", b"same")
        snapshot = save(sandbox)

        one, two = restore(snapshot), restore(snapshot)
        one.put("file", b"one")

        assert b"same" == two.get("file") == sandbox.get("file")
        ids = {lab.sandbox.session.id for lab in (sandbox, one, two)}
        assert 3 == len(ids)
        assert State.PROVISIONED == two.state

    @needs(can.SNAPSHOT, can.RESTORE)
    def test_files_of_any_size_are_kept(self, sandbox: Lab, save: Save, restore: Restore) -> None:
        content = bytes(range(251)) * (self.big_bytes // 251)
        sandbox.put("big", content)
        snapshot = save(sandbox)

        assert content == restore(snapshot).get("big")
        assert snapshot.size_bytes > 0

    @needs(can.SNAPSHOT, can.RESTORE)
    def test_the_spec_is_kept_or_replaced(
        self, make_sandbox: MakeSandbox, save: Save, restore: Restore
    ) -> None:
        lab = make_sandbox(env={"COLOUR": "green"}, id="first-of-two")
        snapshot = save(lab)

        same = restore(snapshot)
        other = restore(snapshot, self.make_spec(env={"COLOUR": "red"}, id="second-of-two"))

        assert "green" == same.sh('printf %s "$COLOUR"').text
        assert "red" == other.sh('printf %s "$COLOUR"').text
        assert "first-of-two" != same.sandbox.session.id
        assert "second-of-two" == other.sandbox.session.id
        assert {"COLOUR": "green"} == same.sandbox.spec.env
        assert "second-of-two" == other.sandbox.spec.id

    @needs(can.SNAPSHOT, can.RESTORE, can.MOUNT)
    def test_host_directories_are_not_copied(
        self, make_sandbox: MakeSandbox, save: Save, restore: Restore, tmp_path: Path
    ) -> None:
        (tmp_path / "file").write_text("host only")
        lab = make_sandbox(mounts=(Mount("/data", str(tmp_path)),))
        snapshot = save(lab)

        again = restore(snapshot, self.make_spec())

        assert not again.run("cat", "/data/file").ok

    @needs(can.SNAPSHOT)
    def test_the_sandbox_goes_on(self, sandbox: Lab, save: Save) -> None:
        process = sandbox.start("cat", stream_stdin=True)

        save(sandbox)

        assert State.RUNNING == sandbox.state
        assert b"x" == sandbox.finish(process, stdin=b"x").stdout

    @needs(can.SNAPSHOT)
    def test_the_catalogue(self, backend: Backend, sandbox: Lab, save: Save) -> None:
        one = save(sandbox, purpose="test")
        two = save(sandbox)

        listed = [each for each in backend.snapshots() if each.id in (one.id, two.id)]

        assert [one, two] == listed
        assert {"purpose": "test"} == one.metadata
        assert (backend.name, sandbox.sandbox.session.id) == (one.backend, one.session_id)
        assert one.created_at > 0
        assert one == Snapshot.from_json(one.to_json())

    @needs(can.SNAPSHOT)
    def test_deleted_is_gone(self, backend: Backend, sandbox: Lab, save: Save) -> None:
        snapshot = save(sandbox)

        backend.delete_snapshot(snapshot.id)

        assert snapshot.id not in {each.id for each in backend.snapshots()}
        with pytest.raises(SnapshotNotFound):
            backend.delete_snapshot(snapshot.id)

    @needs(can.SNAPSHOT, can.RESTORE)
    @pytest.mark.parametrize("unknown", ["no-such-snapshot", "../../etc", ""])
    def test_an_unknown_snapshot(self, backend: Backend, unknown: str) -> None:
        with pytest.raises((SnapshotNotFound, InvalidRequest)):
            backend.restore(unknown)
