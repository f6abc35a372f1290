"""Files of a guest as the host has them: lists in pages, streams, and what a hostile agent may say."""

from __future__ import annotations

import errno
import io
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.native.outside import same_descriptors

from ringfence.backends.local.agents import guest_files
from ringfence.backends.local.agents.guest_files import GuestFiles, _entries
from ringfence.backends.local.agents.guest_trees import Helper
from ringfence.errors import (
    FileError,
    FileNotFound,
    IoError,
    IsolationError,
    LifecycleError,
    SandboxLost,
)
from ringfence.launcher import wire
from ringfence.model.state import State

pytestmark = pytest.mark.anyone
PATIENCE_S = 30.0
Answer = bytes | Exception | None
Handler = Callable[[list[int]], Answer]


class Guest:
    """A sandbox whose agent answers as the test has it.

    Attributes:
        asked: Each request without its descriptors.
        handlers: For each verb: gets the descriptors; its answer, None for an end without one.
    """

    root = "/home/user"

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.handlers: dict[str, Handler] = {}
        self.state = State.RUNNING
        self.lost = SandboxLost("it was ended, and why")
        self.later: list[tuple[wire.Socket, list[int]]] = []

    def require_awake(self) -> None:
        if self.state is not State.RUNNING:
            raise LifecycleError("not awake")

    def lost_error(self) -> SandboxLost:
        return self.lost

    def request(self, verb: str, args: tuple[Any, ...], fds: tuple[int, ...] = ()) -> wire.Socket:
        self.asked.append((verb, *args))
        if verb not in self.handlers:
            raise IsolationError("the agent takes no request")
        ours, theirs = wire.socketpair()
        held = [os.dup(fd) for fd in fds]
        answer = self.handlers[verb](held)
        if isinstance(answer, bytes):
            wire.answer(theirs, answer)
        if answer == b"O" and verb in ("read", "write", "tree"):
            self.later.append((theirs, held))  # its last word comes later
            return ours
        for fd in held:
            os.close(fd)
        theirs.close()
        return ours

    def end(self, word: bytes | None) -> None:
        """Say the last word of a stream and close all of it."""
        theirs, held = self.later.pop(0)
        for fd in held:
            os.close(fd)
        if word is not None:
            wire.answer(theirs, word)
        theirs.close()


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    with same_descriptors():
        yield


def both() -> tuple[Guest, GuestFiles]:
    guest: Any = Guest()
    return guest, GuestFiles(guest)


def line(name: str, words: str = "33188 5 2000000000 ") -> bytes:
    return name.encode() + b"\0" + words.encode() + b"\0"


def lists(*names: str) -> Handler:
    def handler(fds: list[int]) -> bytes:
        os.write(fds[0], b"".join(map(line, names)))
        return b"O"

    return handler


class TestLists:
    NAMES = ("b", "a", "d", "c", "ab", "e")

    @pytest.mark.parametrize("most", [1, 2, 3, 5, 6, 7])
    def test_pages_have_each_entry_once_and_in_order(self, most: int) -> None:
        guest, files = both()
        guest.handlers["list"] = lists(*self.NAMES)
        found: list[str] = []
        after = ""
        while page := files.list("/srv", after, most):
            assert len(page) <= most
            found += [each.name for each in page]
            after = page[-1].name
        assert sorted(self.NAMES) == found
        assert {("list", "/srv")} == {*guest.asked}

    @pytest.mark.parametrize(
        ("after", "expected"),
        [("", ["a", "ab", "b"]), ("a", ["ab", "b"]), ("aa", ["ab", "b"]), ("b", []), ("z", [])],
    )
    def test_all_after_a_name(self, after: str, expected: list[str]) -> None:
        guest, files = both()
        guest.handlers["list"] = lists("b", "ab", "a")
        assert expected == [each.name for each in files.list(".", after)]
        assert [] == files.list(".", after, 0)
        assert {("list", "/home/user")} == {*guest.asked}

    @pytest.mark.parametrize(
        ("path", "beginning"), [("/", "/"), ("/srv/", "/srv/"), ("/srv", "/srv/"), ("x", "/home/user/x/")]
    )  # fmt: skip
    def test_each_is_described_as_the_agent_says(self, path: str, beginning: str) -> None:
        guest, files = both()

        def handler(fds: list[int]) -> bytes:
            os.write(fds[0], line("link", f"{0o120777} 9 1500000000 /to a\nplace"))
            os.write(fds[0], line("dir", f"{0o040711} 0 0 "))
            os.write(fds[0], line("other"))
            return b"O"

        guest.handlers["list"] = handler
        directory, link, _other = files.list(path)
        assert (f"{beginning}dir", "directory", 0o711) == (
            directory.path, directory.kind, directory.mode,
        )  # fmt: skip
        assert (f"{beginning}link", "symlink", "/to a\nplace", 9, 1.5) == (
            link.path, link.kind, link.link_target, link.size_bytes, link.mtime_s,
        )  # fmt: skip

    @pytest.mark.parametrize("piece", [1, 3, 7, 64])
    def test_an_entry_at_the_border_of_a_piece_is_one(
        self, piece: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(guest_files, "_BUFFER", piece)
        body = io.BytesIO(b"".join(line(f"{i}") for i in range(9)))
        found = [*_entries(body, "/")]
        assert [(f"{i}", b"33188 5 2000000000 ") for i in range(9)] == found

    @pytest.mark.parametrize(("length", "is_taken"), [(1 << 16, True), ((1 << 16) + 1, False)])
    def test_a_name_that_does_not_end_is_not_held(self, length: int, is_taken: bool) -> None:
        body = io.BytesIO(b"x" * length)
        if is_taken:
            assert [] == [*_entries(body, "/")]
        else:
            with pytest.raises(FileError, match="invalid directory listing"):
                [*_entries(body, "/")]

    @pytest.mark.parametrize("more", [0, 1])
    def test_a_listing_is_bounded(self, more: int, monkeypatch: pytest.MonkeyPatch) -> None:
        data = line("a")
        monkeypatch.setattr(guest_files, "_MOST_LISTED", len(data) - more)
        guest, files = both()
        guest.handlers["list"] = lists("a")
        if more:
            with pytest.raises(FileError, match="invalid directory listing"):
                files.list("/srv")
        else:
            assert ["a"] == [each.name for each in files.list("/srv")]

    @pytest.mark.parametrize("words", ["", "1 2 3", "x 2 3 ", "1 x 3 ", "1 2 x "])
    def test_words_that_are_none_are_an_error_of_the_agents(self, words: str) -> None:
        guest, files = both()

        def handler(fds: list[int]) -> bytes:
            os.write(fds[0], line("a", words))
            return b"O"

        guest.handlers["list"] = handler
        with pytest.raises(FileError, match="/srv: the agent inside sent an invalid"):
            files.list("/srv")

    def test_what_is_refused_lost_or_not_awake_leaves_nothing_open(self) -> None:
        guest, files = both()
        guest.handlers["list"] = lambda _fds: b"E2 gone"
        with pytest.raises(FileNotFound):
            files.list("/srv")
        guest.handlers["list"] = lambda _fds: None
        with pytest.raises(SandboxLost, match="and why"):
            files.list("/srv")
        guest.handlers.clear()
        with pytest.raises(IsolationError):
            files.list("/srv")
        guest.state = State.SUSPENDED
        before = len(guest.asked)
        with pytest.raises(LifecycleError):
            files.list("/srv")
        assert before == len(guest.asked)


class TestRequests:
    def test_each_asks_for_absolute_paths(self) -> None:
        guest, files = both()
        for verb in ("stat", "mkdir", "remove", "move"):
            guest.handlers[verb] = lambda _fds: b"O33188 5 0 "
        assert ("/home/user/a", "a", 5) == (
            files.stat("a").path, files.stat("./a").name, files.stat("/x/a").size_bytes,
        )  # fmt: skip
        files.make_dir("d", parents=False)
        files.make_dir("/d")
        files.remove("f")
        files.remove("/f", recursive=True)
        files.move("from", "./to")
        assert [
            ("stat", "/home/user/a"), ("stat", "/home/user/a"), ("stat", "/x/a"),
            ("mkdir", "/home/user/d", False), ("mkdir", "/d", True), ("remove", "/home/user/f"),
            ("stat", "/f"), ("remove", "/f"), ("move", "/home/user/from", "/home/user/to"),
        ] == guest.asked  # fmt: skip

    @pytest.mark.parametrize("path", ["/", "//", "/."])
    def test_the_root_is_never_removed(self, path: str) -> None:
        guest, files = both()
        guest.handlers |= {"stat": lambda _fds: b"O16877 5 0 ", "remove": lambda _fds: b"E16 busy"}
        guest.handlers["tree"] = lambda _fds: b"E16 busy"
        with pytest.raises(FileError):
            files.remove(path, recursive=True)
        if path == "/":
            assert [] == guest.asked

    def test_a_directory_is_removed_by_a_helper(self) -> None:
        guest, files = both()
        guest.handlers |= {"stat": lambda _fds: b"O16877 5 0 ", "tree": lambda _fds: b"O "}
        files.remove("d", recursive=True)
        assert ("tree", "remove", ["/home/user/d"]) == guest.asked[-1]

    @pytest.mark.parametrize(
        ("number", "verbs"),
        [
            (errno.EXDEV, ["move", "tree"]),
            (errno.ENOENT, ["move"]),
            (errno.EEXIST, ["move"]),
            (errno.EACCES, ["move"]),
        ],
    )
    def test_a_move_between_file_systems_alone_is_a_copy(
        self, number: int, verbs: list[str]
    ) -> None:
        guest, files = both()
        guest.handlers |= {"move": lambda _fds: b"E%d x" % number, "tree": lambda _fds: b"O "}
        if number == errno.EXDEV:
            files.move("a", "/b")
            assert ("tree", "move", ["/home/user/a", "/b"]) == guest.asked[-1]
        else:
            with pytest.raises(FileError):
                files.move("a", "/b")
        assert verbs == [each[0] for each in guest.asked]


class TestStreams:
    @pytest.mark.parametrize(
        ("append", "flags"),
        [(True, os.O_APPEND | os.O_CREAT | os.O_WRONLY), (False, os.O_TRUNC | os.O_CREAT | os.O_WRONLY)],
    )  # fmt: skip
    def test_what_is_written_is_whole_when_it_is_closed(self, append: bool, flags: int) -> None:
        guest, files = both()
        guest.handlers["write"] = lambda _fds: b"O"
        file = files.open_write("f", append=append, mode=0o600)
        file.write(b"some")
        file.flush()
        assert b"some" == os.read(guest.later[0][1][0], 99)
        guest.end(b"O")
        file.close()
        file.close()
        assert [("write", "/home/user/f", flags, 0o600)] == guest.asked

    def test_the_agent_sees_the_end_before_its_word_is_awaited(self) -> None:
        guest, files = both()
        guest.handlers["write"] = lambda _fds: b"O"
        file = files.open_write("f")
        seen: list[bytes] = []

        def agent() -> None:
            seen.append(os.read(guest.later[0][1][0], 99))
            seen.append(os.read(guest.later[0][1][0], 99))
            guest.end(b"O")

        thread = threading.Thread(target=agent)
        thread.start()
        file.write(b"x")
        file.close()
        thread.join(PATIENCE_S)
        assert [b"x", b""] == seen

    @pytest.mark.parametrize(
        ("word", "number"),
        [(b"E28 full", errno.ENOSPC), (b"E0 odd", errno.EIO), (None, errno.EIO), (b"nonsense", errno.EIO)],
    )  # fmt: skip
    def test_what_was_not_whole_is_told_once(self, word: bytes | None, number: int) -> None:
        guest, files = both()
        guest.handlers |= {"write": lambda _fds: b"O", "read": lambda _fds: b"O"}
        written = files.open_write("f")
        written.write(b"x")
        guest.end(word)
        with pytest.raises(OSError) as refusal:
            written.flush()
        assert number == refusal.value.errno
        with pytest.raises(OSError):
            written.close()
        assert written.closed
        closed = files.open_write("f")
        guest.end(word)
        with pytest.raises(OSError) as refusal:
            closed.close()
        assert number == refusal.value.errno
        read = files.open_read("f")
        os.write(guest.later[0][1][0], b"part")
        assert b"part" == read.read(4)
        guest.end(word)
        with pytest.raises(OSError) as refusal:
            read.read()
        assert (number, "/home/user/f") == (refusal.value.errno, refusal.value.filename)
        read.close()

    def test_a_file_that_was_whole_has_an_end_however_often_it_is_read(self) -> None:
        guest, files = both()
        guest.handlers["read"] = lambda _fds: b"O"
        file = files.open_read("/f")
        os.write(guest.later[0][1][0], b"all of it")
        guest.end(b"O")
        assert [b"all of it", b"", b""] == [file.read(), file.read(), file.read()]
        file.close()
        assert [("read", "/f")] == guest.asked

    def test_one_that_is_closed_before_its_end_waits_for_no_word(self) -> None:
        guest, files = both()
        guest.handlers["read"] = lambda _fds: b"O"
        file = files.open_read("/f")
        file.close()
        with pytest.raises(BrokenPipeError):
            os.write(guest.later[0][1][0], b"x")
        guest.end(None)

    def test_what_cannot_be_opened_leaves_nothing_open(self) -> None:
        guest, files = both()
        for verb, opens in (("read", files.open_read), ("write", files.open_write)):
            with pytest.raises(IsolationError):
                opens("f")
            guest.handlers[verb] = lambda _fds: b"E2 no such file"
            with pytest.raises(FileNotFound):
                opens("f")
            guest.handlers[verb] = lambda _fds: None
            with pytest.raises(SandboxLost):
                opens("f")
            guest.state = State.SUSPENDED
            count = len(guest.asked)
            with pytest.raises(LifecycleError):
                opens("f")
            assert count == len(guest.asked)
            guest.state = State.RUNNING


class TestHelpers:
    def helper(self, guest: Guest, what: str = "out", options: str = "") -> Helper:
        sandbox: Any = guest
        return Helper(sandbox, what, "/d", options)

    @pytest.mark.parametrize(
        ("what", "is_written"), [("in", True), ("out", False), ("find", False)]
    )
    def test_the_host_writes_what_goes_in_alone(self, what: str, is_written: bool) -> None:
        guest = Guest()
        guest.handlers["tree"] = lambda _fds: b"O"
        helper = self.helper(guest, what, "{}" if what == "find" else "")
        theirs = guest.later[0][1][0]
        ends = (helper.stream, theirs) if is_written else (theirs, helper.stream)
        os.write(ends[0], b"x")
        assert b"x" == os.read(ends[1], 9)
        guest.end(None)
        helper.abandon()
        assert [("tree", what, ["/d", "{}"] if what == "find" else ["/d"])] == guest.asked

    @pytest.mark.parametrize(
        ("answer", "state", "error"),
        [
            (b"E2 gone", State.RUNNING, FileNotFound),
            (None, State.RUNNING, IoError),
            (None, State.TERMINATED, SandboxLost),
        ],
    )
    def test_each_end_is_told_and_leaves_nothing_open(
        self, answer: bytes | None, state: State, error: type[Exception]
    ) -> None:
        guest = Guest()
        guest.handlers["tree"] = lambda _fds: answer
        helper = self.helper(guest)
        guest.state = state
        with pytest.raises(error):
            helper.finish("/d")
        guest.handlers["tree"] = lambda _fds: b"O"
        helper = self.helper(guest)
        guest.later[0][0].close()
        os.close(guest.later.pop()[1][0])
        helper.finish("/d")

    def test_one_that_does_not_start_leaves_nothing_open(self) -> None:
        for what in ("in", "out"):
            with pytest.raises(IsolationError):
                self.helper(Guest(), what)
        guest, files = both()
        guest.state = State.SUSPENDED
        with pytest.raises(LifecycleError):
            files.start_helper("out", "/d")
        assert [] == guest.asked
