"""Marks of running sandboxes: rewinds to them, forks at them, and their bounds."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from ringfence import Sandbox
from ringfence.backends.native.live_copies import NativeTemplate
from ringfence.errors import (
    InvalidRequest,
    LifecycleError,
    ResourceExhausted,
    Unsupported,
)
from ringfence.linux import libc
from ringfence.sandbox import marks as marks_of
from tests.fork.test_live import native

pytestmark = [
    pytest.mark.anyone,
    pytest.mark.skipif(libc.MACHINE != "x86_64", reason="processes are copied on x86-64 only"),
]


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with Sandbox.create() as made:
        yield made


def test_it_goes_back_in_place(sandbox: Sandbox) -> None:
    before = sandbox.id
    sandbox.run_code("x = 1")
    sandbox.files.write("file", "old")
    with sandbox.mark(processes="required") as mark:
        for _ in range(2):
            sandbox.run_code("x += 1; y = 2")
            late = sandbox.context()
            sandbox.files.write("file", "new")
            sandbox.files.write("more", "")
            sandbox.rewind(mark)
            assert before == sandbox.id
            assert "1" == sandbox.run_code("x").text
            assert not late.running
            assert "old" == sandbox.files.read_text("file")
            assert not sandbox.files.exists("more")
        assert sandbox.parent is None
    with pytest.raises(LifecycleError, match="closed"):
        sandbox.rewind(mark)
    assert "1" == sandbox.run_code("x").text
    assert [] == [each for each in Sandbox.snapshots() if each.session_id == before]


def test_later_rewinds_take_a_prebuilt_sandbox_under_the_same_id(sandbox: Sandbox) -> None:
    before, plans = sandbox.id, []
    sandbox.run_code("x = 1")
    with sandbox.mark(processes="required") as mark:
        for _ in range(3):
            sandbox.rewind(mark)
            plans.append(native(sandbox).lockdown["id"])
            assert before == sandbox.id == sandbox.session.id
            assert "1" == sandbox.run_code("x").text
        with pytest.raises(InvalidRequest, match="already exists"):
            mark.restore(sandbox._as_it_is())
        (fork,) = sandbox.fork(at=mark)
        with fork:
            assert before != fork.id
            assert "1" == fork.run_code("x").text
    assert before == plans[0]
    assert 3 == len(set(plans))


def test_only_the_description_of_a_mark_waits_for_the_disk(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the sandbox stands still; by the description the next process finds what a kill left."""
    synced, fsync = list[str](), os.fsync

    def record(fd: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", record)
    sandbox.mark().close()
    assert ["snapshot.json"] == synced
    saved = sandbox.snapshot()
    Sandbox.delete_snapshot(saved.id)
    partial = f".partial-{saved.id}"
    assert ["content.tar", "snapshot.json", partial, "snapshots"] == synced[1:]


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_mark_copies_memory_while_the_sandbox_goes_on(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, *, is_lost: bool
) -> None:
    """And if that fails, a rewind ends nothing."""
    load, templates = NativeTemplate.load, list[NativeTemplate]()

    def load_later(self: NativeTemplate) -> None:
        signal.pidfd_send_signal(self._pidfd, signal.SIGSTOP)
        templates.append(self)
        load(self)

    sandbox.run_code("x = 1")
    with monkeypatch.context() as patch:
        patch.setattr(NativeTemplate, "load", load_later)
        mark = sandbox.mark(processes="required")
    with mark:
        sandbox.run_code("x = 2")
        how = signal.SIGKILL if is_lost else signal.SIGCONT
        signal.pidfd_send_signal(templates[0]._pidfd, how)
        if is_lost:
            with pytest.raises(Unsupported, match="what copies it has ended"):
                sandbox.rewind(mark)
            with pytest.raises(Unsupported, match="what copies it has ended"):
                sandbox.fork(at=mark)
        else:
            sandbox.rewind(mark)
        assert ("2" if is_lost else "1") == sandbox.run_code("x").text


@pytest.mark.full
def test_a_tree_of_marks_is_searched(sandbox: Sandbox) -> None:
    """Each node is a fork of its parent's mark; the parent has gone by then."""
    sandbox.run_code("path = []")
    marks = [sandbox.mark(processes="required")]
    owners = {marks[0].id: sandbox}
    try:
        for _depth in range(3):
            following = []
            for mark in marks:
                for choice in range(2):
                    (node,) = owners[mark.id].fork(at=mark)
                    node.run_code(f"path.append({choice})")
                    following.append((node, node.mark(processes="required")))
                mark.close()
            owners = {mark.id: node for node, mark in following}
            marks = [mark for _, mark in following]
            for node, _ in following:
                node.terminate()
        found = []
        for mark in marks:
            (leaf,) = owners[mark.id].fork(at=mark)
            with leaf:
                found.append(leaf.run_code("path").text)
        paths = [f"[{a}, {b}, {c}]" for a in (0, 1) for b in (0, 1) for c in (0, 1)]
        assert paths == found
    finally:
        for mark in marks:
            mark.close()


def test_another_sandboxs_mark_is_refused(sandbox: Sandbox) -> None:
    with Sandbox.create() as other, other.mark() as mark:
        with pytest.raises(InvalidRequest, match="another sandbox"):
            sandbox.rewind(mark)
        with pytest.raises(InvalidRequest, match="another sandbox"):
            sandbox.fork(at=mark)


def test_marks_of_a_process_are_few(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks_of, "MOST_MARKS", 2)
    with sandbox.mark(), sandbox.mark():
        with pytest.raises(ResourceExhausted, match="marks already"):
            sandbox.mark()
        with pytest.raises(ResourceExhausted, match="marks already"):
            sandbox.fork()
    sandbox.mark().close()
