"""What is with the fd store: changed by many threads at once, given on, and gone on with."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.native.outside import open_count
from tests.waiting import readable

from ringfence.backends.local import journal
from ringfence.backends.local.agents.execs import LocalExec
from ringfence.backends.local.fd_store import FdStore, Item
from ringfence.backends.local.host import owner
from ringfence.backends.native.fd_store import handover as module
from ringfence.backends.native.fd_store import handover_items
from ringfence.backends.native.fd_store.handover import Handover
from ringfence.errors import SandboxLost
from ringfence.launcher import wire
from ringfence.launcher.fd_store import MOST_FDS


class _Run:
    """An exec, as far as its handover looks at it."""

    def __init__(self, home_id: str, number: int) -> None:
        self.home_id, self.number = home_id, number


class _Sandbox:
    def __init__(self, name: str) -> None:
        self.id = name


class _FdStore:
    """Takes everything."""

    def change(self, *_: Any) -> bool:
        return True


@pytest.fixture
def _quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_quick_switches")
def test_a_sandbox_ends_while_execs_start_in_others() -> None:
    handover: Any = Handover(None, _FdStore())  # type: ignore[arg-type]
    many = [_Run("busy", number) for number in range(2000)]
    for each in many:
        handover._watch(_Sandbox("busy"), each)
    over = threading.Event()

    def start() -> None:
        numbers = count()
        while not over.is_set():
            made = _Run("other", next(numbers))
            handover._watch(_Sandbox("other"), made)

    thread = threading.Thread(target=start)
    thread.start()
    try:
        for _ in range(300):
            handover.end(_Sandbox("ended"))
        assert set(many) <= set(handover._all_runs())
        handover.end(_Sandbox("busy"))
    finally:
        over.set()
        thread.join()
    assert not set(many) & set(handover._all_runs())


class _Kept:
    """An fd store that notes what is changed, and has what an earlier process left."""

    def __init__(self, *left: Item) -> None:
        self.left = [*left]
        self.put: list[tuple[str, str, Any, int]] = []
        self.dropped: list[tuple[str, str]] = []
        self.refill: Any = None

    def open(self) -> list[Item]:
        return self.left

    def change(self, put: list[Item], drop: Any = ()) -> bool:
        self.put += [(each.whose, each.name, each.note, len(each.fds)) for each in put]
        self.dropped += drop
        return True


def _handover(backend: Any = None, kept: Any = None) -> Any:
    fd_store: Any = kept or _Kept()
    return Handover(backend, fd_store)


def _opened() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_copies_of_a_network_are_as_old_as_the_network_and_end_with_the_sandbox() -> None:
    kept, before = _Kept(), open_count()
    handover = _handover(None, kept)
    sandbox: Any = _Sandbox("one")
    handover.change_network(sandbox, [])
    assert ([], []) == (kept.put, kept.dropped), "there was none"
    for _ in range(2):
        handover.change_network(sandbox, [0, 1])
        assert before + 2 == _opened()
    assert [("one", "network", None, 2)] * 2 == kept.put
    handover.change_network(sandbox, [])
    assert [("one", "network")] == kept.dropped
    assert before == _opened()
    handover.change_network(sandbox, [0])
    handover.end(sandbox)
    assert [("one", "network"), ("one", "")] == kept.dropped
    assert (before, {}) == (_opened(), handover._sockets)


def test_another_fd_store_gets_all_there_is() -> None:
    handover = _handover(SimpleNamespace(living=list))
    assert [] == handover._everything()
    handover.layout = (0, {}, "none")
    handover._ids["/block"] = 1
    handover._zygote = SimpleNamespace(pid=5, started=6, control_fd=1)
    found = {each.name: (each.whose, each.note, each.fds) for each in handover._everything()}
    assert {
        "layout": ("", (0, {}, "none"), []),
        "ids /block": ("", "/block", [1]),
        "zygote": ("", (5, 6), [1]),
    } == found


def test_what_is_given_while_the_fd_store_is_killed_is_given_to_the_next_one(
    tmp_path: Path,
) -> None:
    """And so is all that it had, as `refill` says."""
    mine, later = FdStore(str(tmp_path)), FdStore(str(tmp_path))
    assert [] == mine.open()
    try:
        mine.refill = lambda: [Item("a", "kept", 1, [0])]
        first = mine.pid
        with mine._lock:  # before the thread that watches it
            watched = os.pidfd_open(first)
            os.kill(first, signal.SIGKILL)
            assert readable([watched], 20)
            os.close(watched)
            assert mine.change([Item("b", "new", 2, [0, 0])])
        assert first != mine.pid
        mine.leave()
        found = later.open()
        told = sorted((each.whose, each.name, each.note, len(each.fds)) for each in found)
        for each in found:
            each.close()
        assert [("a", "kept", 1, 1), ("b", "new", 2, 2)] == told
    finally:
        mine.end()
        later.end()


@pytest.mark.parametrize("started", [0, 1])
def test_a_later_process_of_the_zygotes_number_is_not_taken_for_it(started: int) -> None:
    before = open_count()
    item = Item("", "zygote", (os.getpid(), started), [os.dup(0)])
    assert module._zygote_from(item) is None
    assert before == _opened()
    assert module._zygote_from(None) is None
    ours, theirs = wire.socketpair()
    mine = Item("", "zygote", (os.getpid(), owner.start_time(os.getpid())), [ours.detach()])
    found = module._zygote_from(mine)
    assert found is not None, "the control"
    assert os.getpid() == found.pid
    theirs.close()
    found._socket.close()
    os.close(found._pidfd)
    found._watched.close()


class _Earlier:
    """A backend that goes on after an earlier process; its zygote says whether anybody has yet to die."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, said: bytes | Exception) -> None:
        self.done: list[Any] = []
        self.id = "one"
        self.runs: dict[int, Any] = {}
        self.network = SimpleNamespace(serve=lambda: self.done.append("served"))
        self.pid, self._said = 77, said
        monkeypatch.setattr(module, "_zygote_from", lambda item: item and self)
        monkeypatch.setattr(journal, "sweep", lambda *what: self.done.append(what))
        monkeypatch.setattr(owner, "label", lambda pid: f"of {pid}")
        monkeypatch.setattr(handover_items, "take_back", lambda *_what: self)

    def ask(self, verb: str, what: Any) -> Any:
        self.done.append((verb, what))
        if isinstance(self._said, Exception):
            raise self._said
        return self._said, []

    def use(self, zygote: Any) -> None:
        assert zygote is self

    def host_ids(self) -> Any:
        return SimpleNamespace(go_on_with=lambda *what: self.done.append(("ids", *what)))

    def count(self, sandbox: Any) -> None:
        assert sandbox is self


def _left_behind(fd: int) -> list[Item]:
    one = [
        Item("one", "sandbox", {"pid": 5, "first_host_id": 9}, []),
        Item("one", "count", 3, []),
    ]
    lost = [Item("lost", "sandbox", {"pid": 6, "first_host_id": 8}, [os.dup(fd)])]
    shared = [
        Item("", "zygote", (1, 1), []),
        Item("", "layout", (1, {}, ""), []),
        Item("", "ids /block", "/block", [fd]),
        Item("", "strange", None, [os.dup(fd)]),
    ]
    return [*one, *lost, *shared]


@pytest.mark.parametrize("said", [b"0", b"1"])
def test_ids_are_given_again_only_where_nobody_with_one_has_yet_to_die(
    monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    before = open_count()
    earlier, kept = _Earlier(monkeypatch, said), _Kept(*_left_behind(0))
    runs = {
        each: SimpleNamespace(
            home_id="one", number=each, done=-1, never_began=lambda each=each: each == 2,
            discard=lambda each=each: earlier.done.append(("discarded", each)),
        )
        for each in (1, 2)
    }  # fmt: skip
    earlier.runs = {number: _Weak(each) for number, each in runs.items()}
    handover = _handover(earlier, kept)
    handover.open()
    handover.open()  # once

    ids = [("ids", "/block", 0, {9})] if said == b"0" else []
    assert [
        ("keep_only", ([5], ["one"])), ("of 77", {"one": 5}), ("discarded", 2), "served", *ids,
    ] == earlier.done  # fmt: skip
    assert {"/block": 0} == handover._ids
    assert (1, {}, "") == handover.layout
    assert [("lost", ""), ("", "strange")] == kept.dropped, "what is gone on with stays"
    assert before == _opened()


class _Weak:
    """An exec of an earlier process, to which there may be weak references."""

    def __init__(self, run: Any) -> None:
        self.__dict__.update(vars(run))


def test_of_a_zygote_that_has_just_died_nothing_is_gone_on_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = open_count()
    fd = os.dup(0)
    earlier = _Earlier(monkeypatch, SandboxLost("gone"))
    kept = _Kept(*_left_behind(fd))
    handover = _handover(earlier, kept)
    handover.open()
    assert ("keep_only", ([5], ["one"])) == earlier.done[0]
    assert 1 == len(earlier.done)
    assert handover.layout is None
    assert {("one", ""), ("lost", ""), ("", "layout"), ("", "ids /block"), ("", "strange")} == {
        *kept.dropped
    }
    assert (before, {}) == (_opened(), handover._ids)


def test_all_locks_travel_in_messages_that_hold_them() -> None:
    parts = [SimpleNamespace(locks=[1, 2]), SimpleNamespace(locks=list(range(100)))]
    sandbox: Any = SimpleNamespace(id="one", protected=parts)
    found = handover_items.locks(sandbox)
    assert [MOST_FDS, 102 - MOST_FDS] == [len(each.fds) for each in found]
    assert [1, 2, *range(100)] == [fd for each in found for fd in each.fds]
    assert 2 == len({each.name for each in found})
    assert {"one"} == {each.whose for each in found}
    assert [] == handover_items.locks(cast("Any", SimpleNamespace(id="one", protected=[])))
    items = {each.name: each for each in found}
    again = handover_items._protected([[["/a", "x", 1, 2]], []], items)
    assert [[("/a", "x", 1, 2)], []] == [part.placeholders for part in again]
    assert [0, 102] == [len(part.locks) for part in again]


@pytest.mark.parametrize("uid", [None, 5])
@pytest.mark.parametrize("has_pipe", [True, False])
def test_an_exec_has_its_streams_its_pipe_and_its_agent_again(
    uid: int | None, has_pipe: bool
) -> None:
    before = open_count()
    ours, theirs = wire.socketpair()
    control, agent = wire.socketpair()
    sandbox: Any = SimpleNamespace(
        id="one", control=control, agents={5: agent}, forget=lambda _run: None,
        end_unwatched=lambda: None, unthrottle=lambda _on: None,
    )  # fmt: skip
    streams = os.pipe(), os.pipe()
    run = LocalExec(
        sandbox, 7, agent if uid else control, ours, (streams[0][1], streams[1][0], None), 3,
        "tool", "/work",
    )  # fmt: skip
    run.uid, run.label = uid, "its label"
    run.splice_pipe = os.pipe() if has_pipe else None
    item = handover_items.exec_item(run)
    assert ("one", "exec 7", 5 if has_pipe else 3) == (item.whose, item.name, len(item.fds))
    copies = Item(item.whose, item.name, item.note, [os.dup(fd) for fd in item.fds])
    again = handover_items._exec_from(sandbox, copies)

    def inode(fd: int | None) -> int:
        assert fd is not None
        return os.fstat(fd).st_ino

    assert inode(run.stdin) == inode(again.stdin)
    assert inode(run.stdout) == inode(again.stdout)
    assert again.stderr is None
    assert (run.facts, run.uid, "its label", 7) == (
        again.facts, again.uid, again.label, again.number,
    )  # fmt: skip
    assert again._control is (agent if uid else control)
    assert [inode(fd) for fd in run.splice_pipe or ()] == [
        inode(fd) for fd in again.splice_pipe or ()
    ]
    for each in (run, again):
        each.close()
    for fd in (streams[0][0], streams[1][1]):
        os.close(fd)
    for end in (theirs, control, agent):
        end.close()
    assert before == _opened()


def test_a_terminal_that_was_on_its_way_is_received() -> None:
    """It was sent to the process that died; what the agent sent is still in the socket."""
    ours, theirs = wire.socketpair()
    control, far = wire.socketpair()
    sandbox: Any = SimpleNamespace(
        id="one", control=control, agents={}, forget=lambda _run: None,
        end_unwatched=lambda: None, unthrottle=lambda _on: None,
    )  # fmt: skip
    terminal = os.open("/dev/null", os.O_RDWR)
    wire.send_raw(theirs, b"T", [terminal])
    note = (7, None, "", [-1, -1, -1], True, "sh", "/", 0, 1.0)
    item = Item("one", "exec 7", note, [ours.detach()])
    run = handover_items._exec_from(sandbox, item)
    assert run.stdin == run.stdout is not None
    assert os.fstat(terminal).st_rdev == os.fstat(run.stdout).st_rdev
    run.close()
    os.close(terminal)
    for end in (theirs, control, far):
        end.close()
