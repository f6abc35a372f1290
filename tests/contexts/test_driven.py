"""Cells of R and Java, where they are installed: values, errors, interrupts, and the end of the interpreter."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from ringfence import Sandbox
from ringfence.contexts import Context
from ringfence.errors import ExecError, Unsupported

pytestmark = pytest.mark.anyone

CODE = {
    "r": SimpleNamespace(
        program="Rscript",
        keep="x <- 41\nf <- function(a) paste(a, Sys.getenv('GIVEN'))",
        values={"x + 1": "[1] 42", "f('é')": '[1] "é g"', "invisible(1)": None, "y <- 3": None},
        both="print('out')\n7",
        printed='[1] "out"\n',
        fails=("stop('wrong')", "Error", "wrong"),
        broken="if (",
        endless=["Sys.sleep(1000)", "repeat {}", "system('sleep 1000')"],
        huge="invisible(system('head -c 100000000 /dev/zero'))",
        end="quit('no')",
        forged="cat('oh no 9\\n', file = paste0('/proc/self/fd/', commandArgs(TRUE)[2]), append = TRUE)",
    ),
    "java": SimpleNamespace(
        program="jshell",
        keep='int x = 41;\nString f(String a) { return a + " " + System.getenv("GIVEN"); }',
        values={"x + 1": "42", 'f("é")': '"é g"', "int y = 3;": None, "List.of(1, 2)": "[1, 2]"},
        both='System.out.println("out");\nx - 34',
        printed="out\n",
        fails=(
            'throw new IllegalStateException("wrong");',
            "java.lang.IllegalStateException",
            "wrong",
        ),
        broken="int z = ;",
        endless=["Thread.sleep(1_000_000);", "while (true) {}"],
        huge='for (int i = 0; i < 1000; i++) System.out.println("x".repeat(99_999));',
        end="System.exit(3);",
        forged="var ends = ProcessHandle.current().info().arguments().get();\n"
        'var file = new FileOutputStream("/proc/self/fd/" + ends[ends.length - 1]);\n'
        'file.write("oh no 9\\n".getBytes()); Thread.sleep(1_000_000);',
    ),
}


@pytest.fixture(scope="module", params=CODE)
def language(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    if not shutil.which(CODE[found].program):
        pytest.skip(f"{CODE[found].program} is not installed")
    return found


@pytest.fixture(scope="module")
def context(sandbox: Sandbox, language: str) -> Iterator[Context]:
    with sandbox.context(language, env={"GIVEN": "g"}) as made:
        made.run(CODE[language].keep)
        yield made


@pytest.mark.full
def test_values_and_output(context: Context, language: str) -> None:
    code = CODE[language]

    assert code.values == {each: context.run(each).text for each in code.values}
    both = context.run(code.both)
    assert (code.printed, "") == (both.stdout, both.stderr)
    assert "7" in str(both.text)
    huge = context.run(code.huge, timeout_s=120)
    assert 100_000_000 == len(huge.stdout) + huge.dropped_bytes


def test_errors(context: Context, language: str) -> None:
    code, name, value = CODE[language].fails
    error = context.run(code).error

    assert error is not None
    assert (name, value) == (error.name, error.value)
    assert value in error.traceback
    assert context.run(CODE[language].broken).error
    with pytest.raises(Unsupported):
        context.variables()


def test_interrupted_cells_keep_the_state(context: Context, language: str) -> None:
    for endless in CODE[language].endless:
        assert "variables are kept" in str(context.run(endless, timeout_s=0.5).error), endless
        assert "42" in str(context.run("x + 1").text), endless


def test_cells_are_interrupted_however_early(context: Context, language: str) -> None:
    """Before the interpreter has read them, and while it compiles them."""
    for patience_s in (0.001, 0.002, 0.004, 0.01, 0.03, 0.1):
        error = str(context.run(CODE[language].endless[-1], timeout_s=patience_s).error)
        assert "variables are kept" in error, patience_s
    assert "42" in str(context.run("x + 1").text)


@pytest.mark.full
def test_an_interpreter_that_ends_begins_again(context: Context, language: str) -> None:
    first = next(iter(CODE[language].values))

    assert "has ended" in str(context.run(CODE[language].end, timeout_s=60).error)
    assert context.run(first).error
    context.run(CODE[language].keep)
    assert CODE[language].values[first] == context.run(first).text


@pytest.mark.full
def test_a_forged_answer_ends_the_interpreter_alone(context: Context, language: str) -> None:
    assert "has ended" in str(context.run(CODE[language].forged, timeout_s=60).error)
    context.run(CODE[language].keep)
    assert "42" in str(context.run("x + 1").text)


def test_plots_of_r(sandbox: Sandbox) -> None:
    if not shutil.which("Rscript"):
        pytest.skip("Rscript is not installed")
    with sandbox.context("r") as context:
        assert [b"\x89PNG"] * 2 == [
            each.png[:4] for each in context.run("plot(1:3); plot(2)").results if each.png
        ]
        assert ["[1] 1", "[1] 2"] == [each.text for each in context.run("1; 2").results]


@pytest.mark.parametrize(("language", "name"), [("r", "R"), ("java", "jshell")])
def test_one_that_is_not_there_is_named(sandbox: Sandbox, language: str, name: str) -> None:
    sandbox.exec(["sh", "-c", "mkdir -p /tmp/python; ln -sf $(command -v python3) /tmp/python/"])

    with pytest.raises(ExecError, match=f"{name} is not installed"):
        sandbox.context(language, env={"PATH": "/tmp/python"})
