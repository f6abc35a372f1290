"""Cells: values, output, errors, input, time limits."""

from __future__ import annotations

import json
import threading

import pytest

from ringfence import AsyncSandbox, Sandbox
from ringfence.contexts import CellError, Context, Result
from ringfence.contexts.context import Turn
from ringfence.errors import ExecNotFound, InvalidRequest, LifecycleError

PNG = b"\x89PNG\r\n\x1a\n"
SHOWN = """
class Table:
    def __repr__(self): return "table"
    def _repr_html_(self): return "<b>ä</b>"
    def _repr_png_(self): return b"\\x89PNG\\r\\n\\x1a\\n"
    def _repr_json_(self): return {"rows": [1, None]}
    def _repr_latex_(self): raise ValueError("no latex")
class Bundle:
    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"text/markdown": "*m*", "image/svg+xml": "<svg/>"}
"""


def test_variables_stay(context: Context) -> None:
    assert context.run("x = 41").results == []
    found = context.run("x + 1")

    assert ("42", 2, None) == (found.text, found.execution_count, found.error)
    assert 0 < found.duration_s
    assert context.run("x;").results == []


def test_a_value_comes_in_all_its_types(context: Context) -> None:
    context.run(SHOWN)
    (table,) = context.run("Table()").results
    (bundle,) = context.run("Bundle()").results

    assert ("table", "<b>ä</b>", PNG) == (table.text, table.html, table.png)
    assert {"rows": [1, None]} == table.json
    assert table.latex is None, "a repr that fails is left out"
    assert ("*m*", "<svg/>") == (bundle.markdown, bundle.svg)
    assert "iVBOR" == table.to_json()["data"]["image/png"][:5]


def test_displayed_values_come_before_the_cells_own(context: Context) -> None:
    found = context.run("display(1, 2)\n3")

    assert [("1", False), ("2", False), ("3", True)] == [
        (each.text, each.is_main) for each in found.results
    ]


def test_an_exception_is_a_result_with_the_lines_of_its_cells(context: Context) -> None:
    context.run("def f(a):\n    return a / 0")
    found = context.run("f(1)").error

    assert found is not None
    assert ("ZeroDivisionError", "division by zero") == (found.name, found.value)
    assert "return a / 0" in found.traceback
    assert "f(1)" in found.traceback
    assert "ringfence" not in found.traceback
    broken = context.run("if x\n  3").error
    assert broken is not None
    assert "SyntaxError" == broken.name
    ended = context.run("raise SystemExit(3)").error
    assert ended is not None
    assert "SystemExit" == ended.name
    assert "1" == context.run("1").text


def test_an_exception_that_cannot_be_shown_is_told(context: Context) -> None:
    found = context.run("class E(Exception):\n    def __str__(self): raise self\nraise E()").error

    assert found is not None
    assert "E" == found.name


def test_output_keeps_its_order(context: Context) -> None:
    found = context.run(
        "import subprocess, sys\n"
        "print('one')\n"
        "print('two', file=sys.stderr)\n"
        "subprocess.run(['sh', '-c', 'echo three'])\n"
        "print('four')\n"
        "sys.stdout.buffer.write(b'f\\xc3\\xbcnf\\n');"
    )

    assert [("stdout", "one\n"), ("stderr", "two\n"), ("stdout", "three\nfour\nfünf\n")] == [
        (each.stream, each.text) for each in found.logs
    ]


def test_callbacks_hear_of_it_while_it_runs(sandbox: Sandbox, context: Context) -> None:
    """The cell waits for a file that only its first output makes."""
    seen: list[str] = []
    shown: list[Result] = []
    failed: list[CellError] = []

    def answer(text: str) -> None:
        seen.append(text)
        sandbox.files.write("go-on", "")

    found = context.run(
        "import os, sys, time\ndisplay(7)\nprint('ready')\n"
        "while not os.path.exists('go-on'): time.sleep(0.01)\nprint('e', file=sys.stderr)\n1/0",
        timeout_s=60,
        on_stdout=answer,
        on_stderr=seen.append,
        on_result=shown.append,
        on_error=failed.append,
    )
    sandbox.files.remove("go-on")

    assert ["ready\n", "e\n"] == seen
    assert (["7"], [found.error]) == ([each.text for each in shown], failed)


def test_threads_write_to_the_cell(context: Context) -> None:
    found = context.run(
        "import os, threading\n"
        "def write():\n    for i in range(100): print(i)\n"
        "threads = [threading.Thread(target=write) for _ in range(4)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "os.write(1, b'raw\\n');"
    )

    assert 401 == found.stdout.count("\n")


def test_top_level_await(context: Context) -> None:
    context.run("import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    return 5")

    assert "6" == context.run("await f() + 1").text
    assert "KeyboardInterrupt" in str(
        context.run("await asyncio.sleep(1000)", timeout_s=0.3).error
    ) + str(context.run("raise KeyboardInterrupt").error)
    assert "5" == context.run("await f()").text, "the loop goes on after an interrupt"


@pytest.mark.full
def test_lines_of_a_shell_and_of_pip(context: Context) -> None:
    found = context.run(
        "for _ in range(2):\n    !echo $((6 * 7))\n%cd /tmp\nimport os\nos.getcwd()"
    )

    assert ("42\n42\n", "'/tmp'") == (found.stdout, found.text)
    assert "pip" in context.run("%pip --version").stdout + context.run("%pip --version").stderr
    assert "'!x\\n%y'" == context.run("'''!x\n%y'''").text, "text stays text"
    assert "%nope" in str(context.run("%nope").error)


def test_commands_that_cells_for_ipython_begin_with(context: Context) -> None:
    plot = context.run("%matplotlib inline\n20 + 1")
    script = context.run("\n%%bash\nname=ann\necho hello $name\n")
    failed = context.run("%%sh\nexit 3")

    assert (None, "21") == (plot.error, plot.text)
    assert (None, "hello ann\n") == (script.error, script.stdout)
    assert "exit status 3" in str(failed.error)
    assert "%%nope" in str(context.run("%%nope\n1").error)
    assert "1" == context.run("7 %\\\n2").text, "an operator stays one"


def test_input_is_answered_or_refused_in_the_cell(context: Context) -> None:
    prompts: list[str] = []

    def answer(prompt: str) -> str | None:
        prompts.append(prompt)
        return "ann" if "name? " == prompt else None

    assert "['a', 'b']" == context.run("[input(), input()]", stdin="a\nb\nc").text
    assert "'ann'" == context.run("input('name? ')", on_input=answer).text
    assert "EOFError" == getattr(context.run("input('more? ')", on_input=answer).error, "name", "")
    assert "StdinNotAvailable" == getattr(context.run("input()").error, "name", "")
    assert ["name? ", "more? "] == prompts


@pytest.mark.parametrize(
    "endless",
    [
        "while True: pass",
        "import time; time.sleep(1000)",
        "!sleep 1000",
        "import subprocess; subprocess.run(['sleep', '1000'])",
        "import threading; threading.Event().wait()",
        "while True: print('x')",
    ],
)
def test_a_time_limit_interrupts_and_keeps_variables(context: Context, endless: str) -> None:
    context.run("kept = 1")
    found = context.run(endless, timeout_s=0.3)

    assert found.timed_out
    assert "variables are kept" in str(found.error)
    assert "1" == context.run("kept").text


@pytest.mark.full
def test_a_cell_that_ignores_the_interrupt_is_killed_and_said_so(context: Context) -> None:
    stubborn = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
    found = context.run(stubborn, timeout_s=0.2)

    assert "variables are lost" in str(found.error)
    with pytest.raises(LifecycleError, match="has ended"):
        context.run("1")
    context.restart()
    assert "1" == context.run("1").text


def test_interrupt_from_another_thread(context: Context) -> None:
    """Also of a cell that an earlier one wanted to make deaf; none is interrupted later."""
    context.run("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN);")

    found = context.run(
        "import time\nprint('begun')\ntime.sleep(1000)", on_stdout=lambda _: context.interrupt()
    )
    context.interrupt()

    assert "KeyboardInterrupt" == getattr(found.error, "name", "")
    assert context.run("time.sleep(0.1)").error is None


def test_a_callback_that_fails_ends_the_cell(context: Context) -> None:
    with pytest.raises(ZeroDivisionError):
        context.run("print(1)\nimport time; time.sleep(1000)", on_stdout=lambda _: 1 // 0)

    assert "2" == context.run("1 + 1").text


def test_variables_are_listed(context: Context) -> None:
    context.run("import os\nx = 41\nname = 'y' * 1000\ndef f(): pass")
    found = {each["name"]: each for each in context.variables()}

    assert ("int", "41") == (found["x"]["type"], found["x"]["value"])
    assert len(found["name"]["value"]) < 300
    assert {"x", "name", "f"} == set(found)
    assert 2 == context.run("1").execution_count, "listing is no cell"


def test_large_output_is_capped_with_a_count(context: Context) -> None:
    five = context.run("print('x' * 5_000_000)")
    huge = context.run("import sys\nfor _ in range(1000): sys.stdout.write('y' * 1_000_000)")

    assert (5_000_001, 0) == (len(five.stdout), five.dropped_bytes)
    assert 1_000_000_000 == len(huge.stdout) + huge.dropped_bytes
    assert len(huge.stdout) <= 16 << 20
    assert "left out" in (context.run("'z' * 5_000_000").text or "")


def test_where_and_with_what_it_begins(sandbox: Sandbox) -> None:
    with sandbox.context("python", cwd="/tmp", env={"GIVEN": "g"}) as context:
        found = context.run("import os; [os.getcwd(), os.environ['GIVEN'], __name__]")

    assert "['/tmp', 'g', '__main__']" == found.text
    with pytest.raises(InvalidRequest):
        sandbox.context("cobol")
    with pytest.raises(InvalidRequest):
        sandbox.run_code("1", timeout_s=-1)


def test_the_default_context_begins_again_after_its_end(sandbox: Sandbox) -> None:
    sandbox.run_code("x = 1")

    assert "1" == sandbox.run_code("x").text
    assert "exited with code 3" in str(sandbox.run_code("import os; os._exit(3)").error)
    assert "NameError" == getattr(sandbox.run_code("x").error, "name", "")


def test_contexts_are_found_by_id_and_apart(sandbox: Sandbox) -> None:
    with sandbox.context() as one, sandbox.context() as other:
        one.run("x = 1")
        assert "1" == sandbox.context(id=one.id).run("x").text
        assert other.run("x").error is not None
    with pytest.raises(ExecNotFound):
        sandbox.context(id="exec-none")
    with pytest.raises(LifecycleError):
        one.run("1")


def test_cells_of_many_callers_run_one_after_the_other(context: Context) -> None:
    context.run("n = 0")
    add = "before = n\nimport time; time.sleep(0.001)\nn = before + 1"
    threads = [threading.Thread(target=context.run, args=(add,)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert "20" == context.run("n").text


def test_its_form_is_json(context: Context) -> None:
    form = json.loads(json.dumps(context.run("print('o')\n1").to_json()))

    assert [{"stream": "stdout", "text": "o\n"}] == form["logs"]
    assert {"data": {"text/plain": "1"}, "is_main": True} == form["results"][0]


async def test_without_blocking(sandbox: Sandbox) -> None:
    import anyio

    held = AsyncSandbox(sandbox)
    async with await held.context() as context:
        await context.run("x = 1")
        with anyio.move_on_after(0.3):
            await context.run("while True: pass")
        assert "1" == (await context.run("x", timeout_s=60)).text, "cancelled is interrupted"
        assert ["x"] == [each["name"] for each in await context.variables()]
    assert "2" == (await held.run_code("1 + 1")).text


DIES_WHEN_INTERRUPTED = """
import os, signal
signal.signal(signal.SIGINT, lambda *_: os._exit(3))
while True: signal.pause()
"""


def test_a_cell_that_ends_its_interpreter_when_it_is_interrupted_keeps_no_variables(
    context: Context,
) -> None:
    context.run("x = 1")
    found = context.run(DIES_WHEN_INTERRUPTED, timeout_s=0.3)

    assert found.timed_out
    assert found.error is not None
    assert "variables are lost" in found.error.value
    with pytest.raises(LifecycleError):
        context.run("x")


def test_a_cell_whose_caller_went_before_its_turn_does_not_run(context: Context) -> None:
    turn = Turn()
    context.abandon(turn)
    found = context.follow(turn, "x = 1")

    assert (None, [], None) == (found.execution_count, found.results, found.error)
    assert "False" == context.run("'x' in globals()").text
    context.follow(Turn(), "x = 1")
    assert "True" == context.run("'x' in globals()").text
