"""Cells of Python, bash and Node: state, output, errors, interrupts. Those of Node alone are at the end."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from ringfence import Sandbox
from ringfence.contexts import LANGUAGES, Context
from ringfence.contexts.execution import MOST_OUTPUT_BYTES
from ringfence.errors import ExecError, LifecycleError, Unsupported

pytestmark = pytest.mark.anyone

IGNORES = "process.on('SIGINT', () => {}); "
RUN = "require('child_process').execSync"
CODE = {
    "python": SimpleNamespace(
        keep="import os; x = 41; os.chdir('/tmp')\ndef f(a): print('f', a, os.environ['GIVEN'])",
        show="print(x + 1); print(os.getcwd()); f('a')",
        fails="raise ValueError('wrong')",
        error=("ValueError", "wrong"),
        broken="if",
        order="import subprocess, sys; print('one'); print('two', file=sys.stderr)\n"
        "subprocess.run(['echo', 'three']); print('four')",
        five="print('x' * 5_000_000)",
        huge="!head -c 100000000 /dev/zero",
        close="import os; os.close(1); os.close(2)",
        left="!sleep 1000 & echo on",
        end="import os; os.kill(os.getpid(), 9)",
        endless=["while True: pass", "!sleep 1000", "while True: print('x')"],
    ),
    "bash": SimpleNamespace(
        keep='x=41; cd /tmp; f() { echo "f $1 $GIVEN"; }',
        show="echo $((x + 1))\npwd; f a",
        fails="echo 'it''s' >&2; (exit 3)",
        error=("ExitStatus", "3"),
        broken="if",
        order="echo one; echo two >&2; sleep 0.02; echo three; echo four",
        five="head -c 5000000 /dev/zero | tr '\\0' x; echo",
        huge="head -c 100000000 /dev/zero",
        close="exec >&- 2>&-; sleep 0.01",
        left="sleep 1000 & echo on",
        end="kill -9 $PPID",
        endless=[
            "sleep 1000; echo no",
            "while :; do :; done",
            "g() { while :; do sleep 1; done; }; g",
        ],
    ),
    "node": SimpleNamespace(
        keep="const x = 41; process.chdir('/tmp')\n"
        "function f(a) { console.log('f', a, process.env.GIVEN) }",
        show="console.log(x + 1); console.log(process.cwd()); f('a')",
        fails="throw new RangeError('wrong')",
        error=("RangeError", "wrong"),
        broken="if",
        order=f"console.log('one'); console.error('two'); {RUN}('echo three', {{stdio: 'inherit'}})\n"
        "console.log('four')",
        five="console.log('x'.repeat(5_000_000))",
        huge=f"{RUN}('head -c 100000000 /dev/zero', {{stdio: 'inherit'}})",
        close="const fs = require('fs'); fs.closeSync(1); fs.closeSync(2); process.stdout.end()",
        left="require('child_process').spawn('sleep', ['1000'], {stdio: 'inherit'}); console.log('on')",
        end="process.kill(process.pid, 'SIGKILL')",
        endless=[
            f"{IGNORES}for (;;);",
            f"{RUN}('sleep 1000', {{stdio: 'inherit'}})",
            "for (;;) console.log('x')",
            "await new Promise(() => {})",
            "for (;;) await null",
            "setTimeout(() => { for (;;); }); await new Promise(() => {})",
            "Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0)",
        ],
    ),
}


@pytest.fixture(params=[each for each in LANGUAGES if each in CODE])
def language(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    if found == "node" and not shutil.which("node"):
        pytest.skip("node is not installed")
    return found


@pytest.fixture
def context(sandbox: Sandbox, language: str) -> Iterator[Context]:
    with sandbox.context(language, env={"GIVEN": "g"}) as made:
        yield made


@pytest.fixture
def node(sandbox: Sandbox) -> Iterator[Context]:
    if not shutil.which("node"):
        pytest.skip("node is not installed")
    with sandbox.context("node") as made:
        yield made


def test_state_is_kept(context: Context, language: str) -> None:
    kept = context.run(CODE[language].keep)
    shown = context.run(CODE[language].show)

    assert ([], None, 1) == (kept.logs, kept.error, kept.execution_count)
    assert ("42\n/tmp\nf a g\n", "", None) == (shown.stdout, shown.stderr, shown.error)


def test_a_failure_is_a_result(context: Context, language: str) -> None:
    error = context.run(CODE[language].fails).error

    assert error is not None
    assert CODE[language].error == (error.name, error.value)
    broken = context.run(CODE[language].broken)
    assert "yntax" in f"{broken.error} {broken.stderr}"
    assert context.run(CODE[language].order).error is None


@pytest.mark.full
def test_output_keeps_its_order_and_is_capped(context: Context, language: str) -> None:
    found = context.run(CODE[language].order)
    five, huge = context.run(CODE[language].five), context.run(CODE[language].huge)

    assert [("stdout", "one\n"), ("stderr", "two\n"), ("stdout", "three\nfour\n")] == [
        (each.stream, each.text) for each in found.logs
    ]
    assert (5_000_001, 0) == (len(five.stdout), five.dropped_bytes)
    assert 100_000_000 == len(huge.stdout) + huge.dropped_bytes
    assert len(huge.stdout) <= MOST_OUTPUT_BYTES


def test_output_is_told_while_the_cell_runs(context: Context, language: str) -> None:
    seen: list[str] = []
    say = {"python": "print('begun')\n", "bash": "echo begun; ", "node": "console.log('begun'); "}

    def tell(text: str) -> None:
        seen.append(text)
        context.interrupt()

    code = say[language] + CODE[language].endless[0]
    found = context.run(code, timeout_s=60, on_stdout=tell)

    assert ["begun\n"] == seen
    assert "KeyboardInterrupt" == getattr(found.error, "name", "")


@pytest.mark.full
def test_every_endless_cell_is_interrupted_and_keeps_its_state(
    context: Context, language: str
) -> None:
    context.run(CODE[language].keep)
    for endless in CODE[language].endless:
        assert "variables are kept" in str(context.run(endless, timeout_s=0.3).error), endless
        assert context.run(CODE[language].show).stdout.startswith("42\n"), endless


@pytest.mark.full
def test_cells_are_interrupted_however_early(context: Context, language: str) -> None:
    """While the interpreter reads them, prepares to run them, and begins to write."""
    context.run(CODE[language].keep)
    for patience_s in (0.001, 0.0015, 0.002, 0.003, 0.005, 0.01) * 3:
        for endless in (CODE[language].endless[0], CODE[language].endless[-1]):
            error = str(context.run(endless, timeout_s=patience_s).error)
            assert "variables are kept" in error, (endless, patience_s)
    assert context.run(CODE[language].show).stdout.startswith("42\n")


def test_streams_that_a_cell_closed_are_back(context: Context, language: str) -> None:
    context.run(CODE[language].close)

    assert "one\nthree\nfour\n" == context.run(CODE[language].order).stdout


def test_a_process_left_behind_does_not_hold_the_cell(context: Context, language: str) -> None:
    found = context.run(CODE[language].left, timeout_s=60)

    assert ("on\n", None) == (found.stdout, found.error)


@pytest.mark.full
def test_the_end_of_the_kernel_is_told(context: Context, language: str) -> None:
    found = context.run(CODE[language].end, timeout_s=60)

    assert "lost" in str(found.error)
    with pytest.raises(LifecycleError, match="has ended"):
        context.run("1")
    context.restart()
    assert context.run(CODE[language].order).error is None


def test_bash_lists_no_variables_and_begins_again(sandbox: Sandbox) -> None:
    with sandbox.context("bash") as context:
        assert "bash has ended" in str(context.run("sleep 1000 & exit 3", timeout_s=60).error)
        assert "fresh\n" == context.run("echo fresh$x").stdout
        with pytest.raises(Unsupported):
            context.variables()


def test_bash_says_no_more_than_a_script_of_what_signals_end(sandbox: Sandbox) -> None:
    with sandbox.context("bash") as context:
        for code, status in (
            ("sh -c 'kill -SEGV $$'", 139),
            ("sleep 1000 & kill %1; wait %1", 143),
            ("sh -c 'kill -PIPE $$' | cat; (exit ${PIPESTATUS[0]})", 141),
        ):
            assert f"{status}\n" == context.run(f"{code}; echo $?").stdout, code
            assert "" == context.run(code).stderr, code
        assert "3" == getattr(context.run("return 3").error, "value", "")
        assert "on\n" == context.run("exec no-such-program; echo on").stdout
        assert "2 b\n" == context.run("set -- a b; echo $# $2; cat").stdout
        assert "2 b\n" == context.run("echo $# $2").stdout
        length = 200_000  # more than a pipe holds
        assert f"{length}\n" == context.run(f"x='{'y' * length}'; echo ${{#x}}").stdout


def test_values_of_node(node: Context) -> None:
    shown = {"[1, 'a']": "[ 1, 'a' ]", "'plain'": "plain", "2n ** 70n": "1180591620717411303424n",
             "const x = 1; let y = -0; y": "-0", "const x = 2; x": "2", "await Promise.resolve(x)": "2",
             "null": "null", "undefined": None, "{a: 1}": "{ a: 1 }",
             "\n{ f() { return 1 } }": "{ f: [Function: f] }", "{ let z = 3; z }": "3", "{a: 1};": "1",
             "{a: await 1}": "{ a: 1 }"}  # fmt: skip

    assert shown == {code: node.run(code).text for code in shown}
    mime = "{'text/html': '<b>', 'image/png': 'iVBORw==', 'application/json': {a: [1]}}"
    first, second = node.run(
        f"display({mime}); ({{[Symbol.for('Jupyter.display')]: () => ({mime})}})"
    ).results
    assert (False, True) == (first.is_main, second.is_main)
    for each in (first, second):
        assert ("<b>", b"\x89PNG", {"a": [1]}) == (each.html, each.png, each.json)
    assert {("x", "number", "2"), ("y", "number", "0")} <= {
        (each["name"], each["type"], each["value"].lstrip("-")) for each in node.variables()
    }


def test_imports_of_node(sandbox: Sandbox, node: Context) -> None:
    sandbox.files.write("own.mjs", "export default 5; export const six = 6")
    found = node.run(
        "import five, { six as one_more } from './own.mjs'\nimport * as os from 'npm:os'\n"
        "const { sep } = await import('path');\n[five, one_more, typeof os.cpus, sep, 'import(x)']"
    )

    assert "[ 5, 6, 'function', '/', 'import(x)' ]" == found.text
    assert "Cannot find" in str(node.run("import x from 'no-such-package'").error)


def test_errors_and_input_of_node(node: Context) -> None:
    node.run("function f(a) {\n  return a.b.c\n}")
    error = node.run("f({})").error
    late = node.run("Promise.reject(new Error('late')); setTimeout(() => { throw 1 }); 3")

    assert error is not None
    assert "TypeError" == error.name
    assert ["return a.b.c", "f({})"] == [
        line.strip() for line in error.traceback.split("\n") if line.startswith("        ")
    ]
    assert "3" == late.text
    assert "Uncaught Error: late" in late.stderr
    assert "SystemExit" == getattr(node.run("process.exit(3)").error, "name", "")
    assert "[ 'a', 'b', null ]" == node.run("[prompt(), prompt('?'), prompt()]", stdin="a\nb").text
    assert "no input" in str(node.run("prompt()").error)


def test_a_hostile_program_of_node_ends_its_context_alone(node: Context, sandbox: Sandbox) -> None:
    forged = "const fs = require('fs'); fs.writeSync(6, '\\x1eout 0 999999999 -\\n'); for (;;);"

    assert "damaged" in str(node.run(forged, timeout_s=60).error)
    assert "2" == sandbox.run_code("1 + 1", language="node").text


def test_node_that_is_not_there_is_named(sandbox: Sandbox) -> None:
    sandbox.exec(["sh", "-c", "mkdir -p /tmp/only; ln -sf /bin/sh /tmp/only/sh"])

    with pytest.raises(ExecError, match="node is not installed"):
        sandbox.context("node", env={"PATH": "/tmp/only"})
