"""Requests to a kernel that runs as a plain process: turns, answers, interrupts and what each cell keeps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.contexts import driven, frames, jupyter, kernel_values, kernel_wire
from ringfence.contexts.context import (
    Context,
    Turn,
    _Inbox,
    answers,
    check_callables,
    check_cell,
    variables_of,
)
from ringfence.contexts.execution import (
    MOST_LOGS,
    MOST_OUTPUT_BYTES,
    MOST_PART_BYTES,
    MOST_PARTS,
    MOST_PROMPTS,
    MOST_RESULTS,
    Cell,
    CellError,
)
from ringfence.errors import InvalidRequest

pytestmark = pytest.mark.anyone


class Kernel:
    """A kernel of Python without a sandbox, and the frames that it has sent."""

    def __init__(self, language: str = "python") -> None:
        argv = [sys.executable, "-IS", *frames.argv_of(language)[1:]]
        self.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        assert self.process.stdin
        assert self.process.stdout
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        self._reader = frames.Reader()
        self._frames: list[tuple[str, str, str, bytes]] = []
        self.say(frames.kernel_of(language))
        self.until("hello")

    def say(self, data: bytes) -> None:
        self._stdin.write(data)

    def ask(self, do: str, **fields: object) -> None:
        self.say(frames.request(do, **fields))

    def run(self, cell: str, code: str, *, input: bool = False) -> None:
        self.ask("run", cell=cell, code=code, input=input)

    def until(self, kind: str, cell: str = "") -> bytes:
        """The payload of the next frame of a kind; those before it stay."""
        at = 0
        while True:
            for number in range(at, len(self._frames)):
                found = self._frames[number]
                if found[0] == kind and cell in ("", found[1]):
                    del self._frames[number]
                    return found[3]
            at = len(self._frames)
            data = os.read(self._stdout.fileno(), 1 << 16)
            assert data, self._frames
            self._frames += self._reader.feed(data)

    def output(self, cell: str, kind: str = "out") -> str:
        """All output of a cell, to its end."""
        self.last = self.until("done", cell)
        mine = [each for each in self._frames if each[1] == cell]
        self._frames = [each for each in self._frames if each[1] != cell]
        self.parts = {name: data for what, _, name, data in mine if what == "part"}
        return b"".join(data for what, *_, data in mine if what == kind).decode()

    def result(self, code: str) -> str:
        """The value of a cell."""
        self.run("ee", code)
        self.output("ee")
        return self.parts.get("text/plain", self.parts.get("value", b"")).decode()

    def close(self) -> int:
        self._stdin.close()
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()
            self.process.wait()
            self._stdout.close()


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    made = Kernel()
    yield made
    assert 0 == made.close(), "it ends with its requests"


def test_an_answer_that_came_too_late_is_no_other_cells(kernel: Kernel) -> None:
    kernel.run("aa", "print(input('first? '))", input=True)
    assert b"first? " == kernel.until("input")
    kernel.ask("answer", text="right")
    kernel.ask("answer", text="late")
    kernel.run("bb", "print(input('second? '))", input=True)
    assert "right\n" == kernel.output("aa")
    assert b"second? " == kernel.until("input", "bb")
    kernel.ask("answer", text="other")
    assert "other\n" == kernel.output("bb")


def test_only_a_cell_with_input_may_ask(kernel: Kernel) -> None:
    kernel.run("aa", "input()")
    kernel.output("aa")
    assert b"StdinNotAvailable" == kernel.parts["name"]
    kernel.run("bb", "input()", input=True)
    kernel.until("input")
    kernel.ask("answer", text=None)
    kernel.output("bb")
    assert b"EOFError" == kernel.parts["name"]
    kernel.run("cc", "import sys; print([*sys.stdin])", input=True)
    for text in ("one", None):
        kernel.until("input", "cc")
        kernel.ask("answer", text=text)
    assert "['one\\n']\n" == kernel.output("cc")


def test_a_cell_that_is_interrupted_before_its_turn_never_runs(kernel: Kernel) -> None:
    kernel.run("aa", "input()", input=True)
    kernel.until("input")
    kernel.run("bb", "x = 1")
    kernel.ask("interrupt", cell="bb")
    kernel.output("bb")
    assert b"KeyboardInterrupt" == kernel.parts["name"]
    assert b"1 0" == kernel.last, "it has no number of its own"
    kernel.ask("answer", text="on")
    kernel.output("aa")
    assert b"'on'" == kernel.parts["text/plain"], "and the one before is not interrupted"
    assert "name 'x' is not defined" == kernel.result("x")


def test_an_interrupt_is_for_the_cell_that_it_names(kernel: Kernel) -> None:
    kernel.run("aa", "input()", input=True)
    kernel.until("input")
    kernel.ask("interrupt", cell="ff")
    kernel.ask("answer", text="on")
    kernel.output("aa")
    assert b"'on'" == kernel.parts["text/plain"]
    for cell in ("bb", None):
        kernel.run("bb", "print('runs')\nwhile True: pass")
        kernel.until("out", "bb")
        kernel.ask("interrupt", cell=cell)
        kernel.output("bb")
        assert b"KeyboardInterrupt" == kernel.parts["name"]
    kernel.ask("interrupt", cell=None)  # none runs
    assert "2" == kernel.result("1 + 1")


def test_a_cell_that_ignores_interrupts_does_so_for_itself_alone(kernel: Kernel) -> None:
    kernel.run("aa", "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)")
    kernel.output("aa")
    kernel.run("bb", "print('runs')\nwhile True: pass")
    kernel.until("out", "bb")
    kernel.ask("interrupt", cell="bb")
    kernel.output("bb")
    assert b"KeyboardInterrupt" == kernel.parts["name"]


def test_a_request_that_was_cut_off_is_passed_over(kernel: Kernel) -> None:
    """As of a server that was killed while it wrote: the context goes on with the next one's."""
    for data in (b'{"do": "run", "cell": "aa", "code": "x = 1"', b"\n{\n\n", b'{"do": "ru'):
        kernel.say(data)
        assert "7" == kernel.result("7")


def test_numbers_are_of_cells_that_a_user_ran(kernel: Kernel) -> None:
    for do, number in (("run", b"1 0"), ("hidden", b"1 0"), ("run", b"2 0"), ("variables", b"2 0")):
        kernel.ask(do, cell="aa", code="1", input=False)
        kernel.output("aa")
        assert number == kernel.last, do


def test_a_ping_is_answered_in_turn(kernel: Kernel) -> None:
    kernel.run("aa", "input()", input=True)
    kernel.until("input")
    kernel.ask("ping")
    kernel.ask("answer", text="")
    kernel.until("hello")
    assert ("done", "aa") in {(each[0], each[1]) for each in kernel._frames}


def test_a_copy_draws_other_random_numbers(kernel: Kernel) -> None:
    seed = (
        "import random, tempfile, uuid\nrandom.seed(1)\nuuid.uuid1()\n"
        "names = tempfile._get_candidate_names()"
    )
    kernel.result(seed)
    plain = kernel.result("random.random()")
    kernel.result(seed)
    kernel.ask("ping")
    kernel.until("hello")
    assert plain == kernel.result("random.random()"), "the control"
    kernel.result(f"{seed}\nuuid._last_timestamp = 1 << 60")
    kernel.ask("copied")
    kernel.until("hello")
    assert plain != kernel.result("random.random()")
    assert "True" == kernel.result("tempfile._get_candidate_names() is not names")
    assert "True" == kernel.result("uuid._last_timestamp is None")


def test_variables_are_those_of_cells_and_bounded(kernel: Kernel) -> None:
    kernel.result("import os\n_own = 1\nlong = 'x' * 500\nnumber = 7")
    kernel.ask("variables", cell="aa")
    kernel.output("aa")
    listed = variables_of(json.loads(kernel.parts["application/json"]))
    assert ["long", "number"] == [each["name"] for each in listed]
    assert ("int", "7") == (listed[1]["type"], listed[1]["value"])
    assert len(listed[0]["value"]) < 260
    kernel.result("for n in range(1500): globals()[f'v{n}'] = n")
    kernel.ask("variables", cell="aa")
    kernel.output("aa")
    assert 1000 == len(json.loads(kernel.parts["application/json"]))


def test_output_of_a_cell_is_bounded_and_counted_anew(kernel: Kernel) -> None:
    most = kernel_wire.OUTPUT_BYTES
    for more in (0, 5):
        kernel.run("aa", f"import sys\n_ = sys.stdout.write('x' * {most + more})")
        assert most == len(kernel.output("aa"))
        assert b" %d" % more == kernel.last[kernel.last.index(b" ") :]


def test_streams_keep_their_order_and_their_kind(kernel: Kernel) -> None:
    code = (
        "import os, sys\nprint('a')\nprint('b', file=sys.stderr)\nos.write(1, b'c\\n')\nprint('d')"
    )
    kernel.run("aa", code)
    kernel.until("done", "aa")
    for kind, text in (("out", b"a\nc\nd\n"), ("err", b"b\n")):
        assert text == b"".join(data for each, *_, data in kernel._frames if each == kind)


def test_a_value_is_shown_unless_its_line_says_not(kernel: Kernel) -> None:
    shown = {code: kernel.result(code) for code in ("1", "2;", "x = 3", "None", "4 # ;", "_")}
    assert {"1": "1", "2;": "", "x = 3": "", "None": "", "4 # ;": "", "_": "1"} == shown


def test_figures_are_shown_by_the_cell_that_left_them_also_where_it_fails(kernel: Kernel) -> None:
    """By a stand-in for the library that draws them."""
    kernel.result(
        "import sys, types\nplots = types.ModuleType('plots')\nopened = []\n"
        "plots.get_fignums = lambda: [*opened]\nplots.figure = lambda number: f'figure {number}'\n"
        "plots.close = lambda figure: opened.remove(int(figure[-1]))\n"
        "sys.modules['matplotlib.pyplot'] = plots"
    )
    for code in ("opened += [1, 2]", "opened += [1, 2]; 1 / 0", "opened += [1, 2]; sys.exit()"):
        kernel.run("aa", code)
        kernel.until("done", "aa")
        shown = [data for kind, _, name, data in kernel._frames if name == "text/plain"]
        kinds = [kind for kind, *_ in kernel._frames if kind in ("display", "main", "error")]
        assert [b"'figure 1'", b"'figure 2'"] == shown
        assert ["display", "display", "error"][: 2 + ("1 /" in code or "exit" in code)] == kinds
        kernel._frames.clear()
    assert "[]" == kernel.result("opened")
    kernel.run("aa", "opened += [3]\n'figure 3'")
    kernel.output("aa")
    assert "[]" == kernel.result("opened")


def test_an_interrupt_of_what_awaits_ends_it(kernel: Kernel) -> None:
    code = (
        "import asyncio\nended = []\n"
        "try:\n    print('begun')\n    await asyncio.sleep(600)\nfinally:\n    ended.append(1)"
    )
    for number in (1, 2):
        kernel.run("aa", code.replace("ended = []", "ended = []" if number == 1 else ""))
        kernel.until("out", "aa")
        kernel.ask("interrupt", cell="aa")
        kernel.output("aa")
        assert b"KeyboardInterrupt" == kernel.parts["name"]
        assert str([1] * number) == kernel.result("ended")
    assert "7" == kernel.result("await asyncio.sleep(0, 7)")


def test_output_before_a_line_of_a_shell_comes_before_its_own(kernel: Kernel) -> None:
    kernel.run("aa", "print('a', end='')\n!echo b\nprint('c')")
    assert "ab\nc\n" == kernel.output("aa")
    kernel.run("aa", "%%sh\necho x")
    assert "x\n" == kernel.output("aa")


def test_a_child_of_a_cell_shows_nothing_and_asks_for_nothing(kernel: Kernel) -> None:
    code = (
        "import os\nif not (child := os.fork()):\n    display(1)\n    try:\n        input()\n"
        "    except RuntimeError as exc:\n        os._exit(7)\n    os._exit(1)\n"
        "os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])"
    )
    kernel.run("aa", code, input=True)
    kernel.output("aa")
    assert b"7" == kernel.parts["text/plain"]
    kernel.run("aa", "if not (child := os.fork()): raise KeyError\nos.waitpid(child, 0)[1]")
    assert "KeyError" in kernel.output("aa", "err")
    assert b"256" == kernel.parts["text/plain"], "it ends with 1"
    assert "3" == kernel.result("1 + 2")


@pytest.fixture
def bash() -> Iterator[Kernel]:
    made = Kernel("bash")
    yield made
    assert 0 == made.close()


def test_a_signal_between_cells_of_bash_interrupts_none(bash: Kernel) -> None:
    for _ in range(3):
        os.kill(bash.process.pid, signal.SIGINT)
        bash.ask("ping")
        bash.until("hello")
        bash.run("aa", "sleep 0.06; echo on")
        assert "on\n" == bash.output("aa")
        assert {} == bash.parts


def test_bash_that_ends_begins_again(bash: Kernel) -> None:
    bash.run("aa", "x=1")
    bash.output("aa")
    for _ in range(2):
        bash.run("bb", "exit 3")
        bash.output("bb")
        assert (b"ExitStatus", True) == (bash.parts["name"], b"fresh" in bash.parts["value"])
        bash.run("cc", "echo [$x]; x=2; false")
        assert "[]\n" == bash.output("cc")
        assert b"1" == bash.parts["value"]
        bash.run("dd", "echo [$x]")
        assert "[2]\n" == bash.output("dd")


# -- values ----------------------------------------------------------------------------------------


def test_texts_are_clipped_in_their_middle() -> None:
    most = 10
    assert "x" * most == kernel_values.clipped("x" * most, most)
    assert "aaaaa\n[1 characters are left out here]\nbbbbb" == kernel_values.clipped(
        "aaaaaXbbbbb", most
    )


def test_a_value_is_shown_in_every_type_that_works() -> None:
    class Odd:
        def _repr_html_(self) -> str:
            raise ValueError("fails")

        def _repr_markdown_(self) -> tuple[str, dict[str, str]]:
            return "**m**", {}

        def _repr_png_(self) -> bytes:
            return b"png"

        def _repr_jpeg_(self) -> str:
            return "anBn"

        def _repr_json_(self) -> Any:
            return {"a": object}

        def _repr_svg_(self) -> None:
            return None

        def _repr_latex_(self) -> str:
            return "x" * (kernel_values.PART_BYTES + 1)

        def __repr__(self) -> str:
            return "odd"

    found = kernel_values.bundle_of(Odd())
    assert (b"**m**", b"png", b"jpg") == (
        found["text/markdown"],
        found["image/png"],
        found["image/jpeg"],
    )
    assert not {"text/html", "image/svg+xml", "text/latex"} & found.keys()
    assert found["text/plain"].startswith(b"odd\n[%d bytes of" % (kernel_values.PART_BYTES + 1))

    class Many:
        def _repr_mimebundle_(self) -> Any:
            return {f"text/{n}": "x" for n in range(40)} | {"text/none": None}, {}

    assert 32 == len(kernel_values.bundle_of(Many()))


def test_an_error_that_cannot_be_shown_is_one() -> None:
    class UnprintableError(Exception):
        def __str__(self) -> str:
            raise KeyError

    found = kernel_values.error_of(UnprintableError())
    assert (b"UnprintableError", b"unprintable UnprintableError: KeyError") == (
        found["name"],
        found["value"],
    )


def test_names_of_frames_are_plain() -> None:
    assert b"-" == kernel_wire._name("")
    assert b"a?b?" == kernel_wire._name("a b\n")
    assert b"\x1eout - 1 -\nx" == kernel_wire._frame("out", "", b"x")
    for name in ("text/plain", "a b", "é", "x" * 100):
        (found,) = frames.Reader().feed(kernel_wire._frame("part", "ab", b"x", name))
        assert ("part", "ab", b"x") == (found[0], found[1], found[3])


def test_an_interrupt_waits_until_a_frame_is_out() -> None:
    lock = kernel_wire.Uninterrupted()
    with lock:
        lock.interrupt()
    assert not lock.is_pending, "nothing runs"
    lock.is_running = True

    def held() -> None:
        with lock:
            with lock:
                lock.interrupt()
            reached.append(1)
            lock.interrupt()
            reached.append(2)

    reached: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        held()
    assert [1, 2] == reached
    with pytest.raises(KeyboardInterrupt):
        lock.interrupt()


# -- on the host -----------------------------------------------------------------------------------


def test_a_request_is_as_long_as_it_may_be_and_no_longer() -> None:
    spare = frames.MOST_CODE_BYTES - len(frames.request("run", code=""))
    assert frames.MOST_CODE_BYTES == len(frames.request("run", code="x" * spare))
    with pytest.raises(InvalidRequest) as refused:
        frames.request("run", code="x" * (spare + 1))
    assert "code" == refused.value.field


def test_a_frame_is_as_long_as_it_may_be_and_no_longer() -> None:
    most = frames.MOST_FRAME_BYTES
    reader = frames.Reader()
    assert [] == [*reader.feed(b"\x1eout ab %d -\n" % most)]
    (found,) = reader.feed(bytes(most))
    assert (most, len(b"\x1eout ab %d -\n" % most) + most) == (len(found[3]), reader.consumed)
    with pytest.raises(frames.BrokenFrameError):
        [*frames.Reader().feed(b"\x1eout ab %d -\n" % (most + 1))]


def test_a_header_is_waited_for_as_long_as_it_can_be_one() -> None:
    header = b"\x1eout " + b"0" * 32 + b" 0 " + b"n" * 100 + b"\n"
    reader = frames.Reader()
    for at in range(len(header) - 1):
        assert [] == [*reader.feed(header[at : at + 1])]
    assert 1 == len([*reader.feed(header[-1:])])
    with pytest.raises(frames.BrokenFrameError):
        [*frames.Reader().feed(b"\x1e" * 160)]
    assert [] == [*frames.Reader().feed(b"\x1e" * 159)]


def test_a_language_is_told_by_its_mark() -> None:
    for language in ("python", "node", "bash", "jupyter:ir"):
        assert language == frames.language_of(frames.argv_of(language))
    for argv in ([], ["python3"], [frames.MARK, "python"], ["sh", "python"], ["a", "b", "python"]):
        assert "" == frames.language_of(argv)


def test_each_bound_of_a_cell_is_one() -> None:
    cell = Cell("ab")
    cell.take("out", "-", bytes(MOST_OUTPUT_BYTES - 1))
    cell.take("out", "-", b"xy")
    cell.take("err", "-", b"z")
    assert (MOST_OUTPUT_BYTES, 2) == (
        len(cell.execution.stdout),
        cell.execution.dropped_bytes,
    )
    cell = Cell("ab")
    for _ in range(MOST_RESULTS + 1):
        cell.take("main", "-", b"")
    assert (MOST_RESULTS, 1) == (len(cell.execution.results), cell.execution.dropped_results)
    cell = Cell("ab")
    for number in range(MOST_PARTS + 1):
        cell.take("part", f"x/{number}", b"")
    cell.take("main", "-", b"")
    assert MOST_PARTS == len(cell.execution.results[0].data)
    large = bytes(MOST_PART_BYTES)
    for size in (0, 1):
        cell = Cell("ab")
        cell.take("part", "a/b", large)
        cell.take("part", "a/c", bytes(size))
        cell.take("display", "-", b"")
        assert 2 - size == len(cell.execution.results[0].data)
        cell.take("part", "a/b", large)
        cell.take("display", "-", b"")
        assert size == cell.execution.dropped_results, "of all results together"
    cell = Cell("ab")
    for number in range(MOST_LOGS + 1):
        cell.take("out" if number % 2 else "err", "-", b"x")
    assert (MOST_LOGS, 1) == (len(cell.execution.logs), cell.execution.dropped_bytes)


def test_pieces_that_the_follower_has_stay_as_they_are_and_none_is_long() -> None:
    cell = Cell("ab")
    for text in (b"a", b"b"):
        cell.take("out", "-", text)
    news = cell.wait(0, wants_pieces=True)[0]
    assert ["ab"] == [each.text for each in news]
    cell.take("out", "-", b"c")
    cell.take("err", "-", b"d")
    cell.take("err", "-", "ä".encode()[:1])
    cell.take("err", "-", "ä".encode()[1:])
    assert ["c", "dä"] == [each.text for each in cell.wait(0, wants_pieces=True)[0]]
    assert ["ab"] == [each.text for each in news]
    assert ([], [], []) == cell.wait(0, wants_pieces=True)
    cell.take("out", "-", b"x" * (1 << 16))
    cell.take("out", "-", b"y")
    assert [1 << 16, 1] == [len(each.text) for each in cell.execution.logs[-2:]]
    cell.wait(0, wants_pieces=False)
    cell.take("out", "-", b"z")
    assert "yz" == cell.execution.logs[-1].text, "who wants no pieces has none"
    for _ in range(MOST_PROMPTS + 1):
        cell.take("input", "-", b"p" * (1 << 17))
    prompts = cell.wait(0, wants_pieces=False)[2]
    assert (MOST_PROMPTS, {1 << 16}) == (len(prompts), {len(each) for each in prompts})
    forgetful = Cell("ab", forgets=True)
    for letter in ("a", "b"):
        forgetful.take("out", "-", letter.encode())
        forgetful.take("main", "-", b"")
        logs, results, _ = forgetful.wait(0, wants_pieces=True)
        assert ([letter], 1) == ([each.text for each in logs], len(results))
        assert ([], []) == (forgetful.execution.logs, forgetful.execution.results)


def test_a_cell_that_is_over_stays_as_it_is() -> None:
    cell = Cell("ab")
    cell.take("done", "-", b"3 4")
    cell.take("out", "-", b"late")
    cell.fail(CellError("X", "late"))
    execution = cell.execution
    assert (3, 4, [], None) == (
        execution.execution_count,
        execution.dropped_bytes,
        execution.logs,
        execution.error,
    )
    for payload in (b"", b"x y", b"-1 0", b"1", b"1 -1", b"1" * 50 + b" 1"):
        odd = Cell("ab")
        odd.take("done", "-", payload)
        assert (True, None) == (odd.is_done, odd.execution.execution_count)


def test_frames_reach_the_cell_that_they_name() -> None:
    inbox = _Inbox()
    inbox.cell = Cell("ab")
    inbox.feed(kernel_wire._frame("out", "cd", b"x") + kernel_wire._frame("out", "ab", b"y"))
    assert "y" == inbox.cell.execution.stdout
    assert not inbox.ready.is_set()
    inbox.feed(kernel_wire._frame("hello", ""))
    assert inbox.ready.is_set()
    inbox.feed(bytes(200))
    assert "damaged" in inbox.reason
    assert inbox.cell.execution.error is not None
    first = inbox.reason
    inbox.end("another reason")
    inbox.feed(kernel_wire._frame("hello", ""))
    assert first == inbox.reason


@pytest.mark.parametrize(
    "language", ["", "ruby", "js", 1, "jupyter:", "jupyter:a/b", "jupyter:" + "x" * 101]
)
def test_a_language_that_is_not_known_is_refused_before_anything_starts(language: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Context(SimpleNamespace(), language)
    assert "language" == refused.value.field
    if language == "js":
        assert "use node" in refused.value.hint


def test_what_a_cell_is_given_is_looked_at() -> None:
    for timeout_s in (None, 0.001, 1, 366 * 86_400):
        check_cell("x", timeout_s)
    for wrong in (0, 0.0009, -1, 366 * 86_400 + 1, float("nan"), "1", True):
        with pytest.raises(InvalidRequest):
            check_cell("x", wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest):
        check_cell(b"x", None)  # type: ignore[arg-type]
    check_callables({"on_stdout": None, "on_error": print, "timeout_s": 1})
    with pytest.raises(InvalidRequest) as refused:
        check_callables({"on_result": "x"})
    assert "on_result" == refused.value.field


def test_lines_of_input_are_given_one_by_one() -> None:
    for lines in ("a\nb\n", ["a", "b"]):
        answer = answers(lines)
        assert answer is not None
        assert ["a", "b", None, None] == [answer("") for _ in range(4)]
    assert None is answers(None)
    wrong = answers([b"x"])  # type: ignore[list-item]
    assert wrong is not None
    with pytest.raises(InvalidRequest):
        wrong("")
    assert not Turn().is_abandoned


# -- other interpreters ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "size"),
    [
        (b"part text/plain 5", 5),
        (b"done - 0", 0),
        (b"begun - 0", 0),
        (b"main - 0", 0),
        (b"display - 0", 0),
        (b"error - 0", 0),
        (b"oh no 9", -1),
        (b"part x -1", -1),
        (b"part x", -1),
        (b"part", -1),
        (b"", -1),
        (b"part x 5x", -1),
    ],
)
def test_a_line_of_a_driver_is_read_strictly(header: bytes, size: int) -> None:
    driver = object.__new__(driven.Driver)
    assert size == driver._parsed(header)[2]


def test_an_interrupt_of_jupyter_waits_for_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(jupyter, "time", SimpleNamespace(monotonic=lambda: now[0]))
    early, late = jupyter._Interrupt(), jupyter._Interrupt()
    assert not early.is_due()
    early.want()
    assert not early.is_due()
    early.begin()
    assert early.is_due()
    assert not early.is_due(), "once"
    late.want()
    now[0] += jupyter._BEGINS_S
    assert late.is_due(), "of a kernel that does not tell"
    assert not late.is_due()
    now[0] += jupyter._BEGINS_S
    assert late.is_due(), "again, as long as it does not"
    late.begin()
    assert late.is_due()
    assert late.is_wanted
    assert not jupyter._Interrupt().is_wanted
