"""What speaks with R, Java and Jupyter inside a sandbox, with programs of the test in their places."""

from __future__ import annotations

import os
import queue
import signal
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.contexts import driven, jupyter

pytestmark = pytest.mark.anyone

# Runs each cell as Python, which says what a driver would.
_DRIVER = r"""
import os, signal, sys, time
asks, tells = int(sys.argv[1]), int(sys.argv[2])
def read(size):
    data = b""
    while len(data) < size:
        piece = os.read(asks, size - len(data))
        if not piece:
            sys.exit()
        data += piece
    return data
def raw(data):
    while data:
        data = data[os.write(tells, data):]
def say(kind, name="-", data=b""):
    raw(b"%s %s %d\n" % (kind.encode(), name.encode(), len(data)) + data)
def interrupted(*_):
    heard.append(1)
heard = []
signal.signal(signal.SIGINT, interrupted)
while True:
    exec(read(int.from_bytes(read(4), "big")).decode())
    say("done")
"""
Shown = list[tuple[str, dict[str, bytes]]]


def never() -> bool:
    return False


class TestDrivers:
    @pytest.fixture
    def driver(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[driven.Driver]:
        monkeypatch.setattr(driven, "SOURCE", _DRIVER)
        program = os.path.basename(sys.executable)
        monkeypatch.setenv("PATH", f"{os.path.dirname(sys.executable)}:/usr/bin:/bin")
        monkeypatch.setattr(driven, "_NEEDS", {"r": (program, "R")})
        monkeypatch.setattr(driven, "_COMMANDS", {"r": [sys.executable, "-IS"]})
        monkeypatch.setattr(os, "getpgrp", lambda: -1)  # of another group than the driver's
        before = len(os.listdir("/proc/self/fd"))
        made = driven.Driver("r", {1: 1, 2: 2}, 2)
        handler = signal.getsignal(signal.SIGINT)
        made.start()
        assert handler == signal.getsignal(signal.SIGINT)
        yield made
        if made._process is not None:
            made._end()
        assert before == len(os.listdir("/proc/self/fd"))

    def run(self, driver: driven.Driver, code: str) -> Shown:
        shown: Shown = []
        assert driver.run(code, lambda *each: shown.append(each), never)
        return shown

    def test_values_have_the_parts_since_the_one_before(self, driver: driven.Driver) -> None:
        code = (
            "say('part', 'text/plain', b'1'); say('part', 'text/html', b'<1>'); say('main')\n"
            "say('part', 'image/png', b'a\\nb'); say('display'); say('display')"
        )
        for _ in range(2):
            assert [
                ("main", {"text/plain": b"1", "text/html": b"<1>"}),
                ("display", {"image/png": b"a\nb"}),
                ("display", {}),
            ] == self.run(driver, code)
        assert [] == self.run(driver, "say('part', 'a/b', b'left over')")
        assert [("main", {})] == self.run(driver, "say('main')"), "parts of a cell are its own"

    def test_an_error_ends_its_cell_alone(self, driver: driven.Driver) -> None:
        code = "say('part', 'name', b'Oh'); say('part', 'value', b'\\xff'); say('error')"
        for _ in range(2):
            with pytest.raises(driven.CellFailed) as failed:
                self.run(driver, code)
            assert {"name": "Oh", "value": "\ufffd"} == failed.value.parts
        assert [("main", {})] == self.run(driver, "say('main')")

    def test_code_that_is_no_text_is_given_all_the_same(self, driver: driven.Driver) -> None:
        code = "say('part', 'a', '\ud800ä'.encode()); say('main')"
        assert [("main", {"a": "?ä".encode()})] == self.run(driver, code)
        assert [] == self.run(driver, "#" * (1 << 20)), "longer than a pipe"

    def test_what_it_says_may_come_in_any_pieces(self, driver: driven.Driver) -> None:
        data = "b'part a 3\\nxyzmain - 0\\n'"
        code = f"for each in {data}: raw(bytes([each])); time.sleep(0.001)"
        assert [("main", {"a": b"xyz"})] == self.run(driver, code)

    @pytest.mark.parametrize(
        "end",
        [
            "os._exit(3)",
            "raw(b'forged\\n'); time.sleep(600)",
            "say('part', 'a', b'x' * 9); time.sleep(600)",
        ],
    )
    def test_one_that_ends_or_says_what_none_says_is_another_for_the_next_cell(
        self, driver: driven.Driver, end: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(driven, "_MOST_BYTES", 8)
        assert [("main", {"a": b"x" * 8})] == self.run(
            driver, "say('part', 'a', b'x' * 8); say('main')"
        )
        for _ in range(2):
            before = driver._process
            assert not driver.run(end, lambda *_: None, never)
            assert before is None or before.returncode is not None
            assert None is driver._process
            assert [("main", {})] == self.run(driver, "say('main')")

    def test_an_interrupt_is_given_again_until_the_cell_ends(self, driver: driven.Driver) -> None:
        asked = iter([True])
        code = "while len(heard) < 3: time.sleep(0.001)\nsay('main')"
        shown: Shown = []
        assert driver.run(code, lambda *each: shown.append(each), lambda: next(asked, False))
        assert [("main", {})] == shown

    def test_one_that_came_before_the_cell_began_is_given_once_it_has(
        self, driver: driven.Driver
    ) -> None:
        asked = iter([True])
        code = (
            "while not heard: pass\nheard.clear(); say('begun')\nwhile not heard: pass\nsay('main')"
        )
        shown: Shown = []
        assert driver.run(code, lambda *each: shown.append(each), lambda: next(asked, False))
        assert [("main", {})] == shown
        code = "heard.clear(); say('begun'); time.sleep(0.1); say('part', 'n', b'%d' % len(heard)); say('main')"
        assert [("main", {"n": b"0"})] == self.run(driver, code), "and none to the next"

    def test_a_copy_is_told_of_other_random_numbers(
        self, driver: driven.Driver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ran: list[str] = []
        monkeypatch.setattr(driver, "run", lambda code, *_: ran.append(code))
        driver.reseed()
        assert ["set.seed" in each for each in ran] == [True]
        driver._end()
        driver.reseed()
        assert 1 == len(ran), "one that has ended has none"


class Client:
    """Of a kernel whose messages a test gives."""

    def __init__(self, events: list[dict[str, Any]], *questions: str) -> None:
        self.events, self.questions = events, list(questions)
        self.asked: list[tuple[str, bool]] = []
        self.given: list[str] = []
        self.replies = 2

    def execute(self, code: str, *, allow_stdin: bool) -> str:
        self.asked.append((code, allow_stdin))
        return "mine"

    def get_iopub_msg(self, timeout: float) -> Any:
        del timeout
        if not self.events:
            raise queue.Empty
        return self.events.pop(0)

    def get_stdin_msg(self, timeout: float) -> Any:
        assert not timeout
        if not self.questions:
            raise queue.Empty
        return {"content": {"prompt": self.questions.pop(0)}}

    def get_shell_msg(self, timeout: float) -> Any:
        assert not timeout
        self.replies -= 1
        if self.replies < 0:
            raise queue.Empty
        return {}

    def input(self, text: str) -> None:
        self.given.append(text)


def event(kind: str, parent: str = "mine", **content: Any) -> dict[str, Any]:
    return {"msg_type": kind, "content": content, "parent_header": {"msg_id": parent}}


IDLE = event("status", execution_state="idle")


class TestJupyter:
    def run(
        self,
        client: Client,
        answer: Callable[[str], str | None] | None = None,
        takes: Callable[[], bool] = never,
        *,
        is_alive: bool = True,
    ) -> tuple[list[tuple[str, bytes]], list[tuple[str, Any]]]:
        made: Any = object.__new__(jupyter.Jupyter)
        self.interrupts: list[int] = []
        made._client = client
        made._manager = SimpleNamespace(
            interrupt_kernel=lambda: self.interrupts.append(1), is_alive=lambda: is_alive
        )

        def end(reason: str) -> None:
            raise EOFError(reason)

        made._end = end
        emitted: list[tuple[str, bytes]] = []
        shown: list[tuple[str, Any]] = []
        try:
            made.run(
                "code",
                lambda *each: emitted.append(each),
                lambda *each: shown.append(each),
                answer,
                takes,
            )
        finally:
            assert [("code", answer is not None)] == client.asked
        assert -1 == client.replies, "no reply is left for the next cell"
        return emitted, shown

    def test_results_are_those_of_the_cell_and_output_is_everybodys(self) -> None:
        client = Client(
            [
                event("status", "other", execution_state="idle"),
                event("execute_result", "other", data={"text/plain": "no"}),
                event("status", execution_state="busy"),
                event("stream", name="stdout", text="o"),
                event("stream", "other", name="stderr", text="ä"),
                event("display_data", data={"a/b": "1"}),
                event("execute_result", data={"text/plain": "2"}),
                event("error", "other", ename="No"),
                event("something", more=1),
                IDLE,
                event("stream", name="stdout", text="of the next"),
            ]
        )
        emitted, shown = self.run(client)

        assert [("out", b"o"), ("err", "ä".encode())] == emitted
        assert [("display", {"a/b": "1"}), ("main", {"text/plain": "2"})] == shown
        assert 1 == len(client.events)

    def test_an_error_has_its_words_without_colours(self) -> None:
        failed = event("error", ename="E", evalue=None, traceback=["\x1b[31mred\x1b[0m", "line"])
        with pytest.raises(jupyter.CellFailed) as caught:
            self.run(Client([failed, IDLE]))
        assert {"name": "E", "value": "", "traceback": "red\nline"} == caught.value.parts

    @pytest.mark.parametrize("fails", [False, True])
    def test_an_interrupt_reaches_the_kernel_once_the_cell_has_begun(self, fails: bool) -> None:
        asked = iter([True])
        events = [event("execute_input", code="code"), event("status", execution_state="busy")]
        events += [event("error", ename="E")] if fails else []
        with pytest.raises(jupyter.CellFailed if fails else KeyboardInterrupt):
            self.run(Client([*events, IDLE]), takes=lambda: next(asked, False))
        assert [1] == self.interrupts

    def test_questions_are_answered_where_they_may_be_asked(self) -> None:
        answers = iter(["yes", None])
        prompts: list[str] = []

        def answer(prompt: str) -> str | None:
            prompts.append(prompt)
            return next(answers)

        client = Client([event("status", execution_state="busy"), IDLE], "one? ", "two? ")
        self.run(client, answer)
        assert (["one? ", "two? "], ["yes", "\x04"]) == (prompts, client.given)
        client = Client([IDLE], "three? ")
        self.run(client)
        assert [] == client.given

    def test_a_kernel_that_has_ended_ends_the_context(self) -> None:
        with pytest.raises(EOFError, match="has ended"):
            self.run(Client([]), is_alive=False)
