"""Real programs in forks, in the library and on a server: which go on, and which are refused by name."""

from __future__ import annotations

import shutil
import time
from typing import Any

import pytest

from ringfence.errors import Unsupported
from ringfence.linux import libc

pytestmark = pytest.mark.skipif(
    libc.MACHINE != "x86_64", reason="processes are copied on x86-64 only"
)
_BEGIN = r"""
cd /tmp; x=5; declare -a list=(1 "two  three" $'new\nline'); declare -A map=([k]='v"$(id)'); readonly r=1
declare -x E=exported; f() { echo "f:$1:$x"; }; alias ll='echo aliased'; shopt -s extglob; set -u
trap 'echo trapped' USR1; umask 077; set -- a "b c"; RANDOM=5; unset HOME
"""
_SHOW = r"""
f 1; echo "$PWD ${#list[@]} ${list[1]} ${list[2]@Q} ${map[k]} $r $# $2 ${HOME-unset} $(umask)"
ll; [[ aab == +(a)b ]] && echo glob; kill -USR1 $$; printenv E; echo $-
"""


def _said(context: Any, code: str) -> str:
    found = context.run(code)
    assert found.error is None, found.error
    return "".join(each.text for each in found.logs)


def _copies(fork: Any) -> list[Any]:
    """Its contexts, in the order of those that they are copies of."""
    if hasattr(fork, "_its_contexts"):
        return [context for context, _ in fork._its_contexts.running()]
    return [fork.context(id=id) for id in fork.fork_report.contexts]


def test_bash_goes_on_with_variables_functions_and_directory(sandbox: Any) -> None:
    context = sandbox.context("bash")
    _said(context, _BEGIN)
    before = _said(context, _SHOW)
    assert "trapped\nexported" in before
    forks = sandbox.fork(2, processes="required")
    with forks[0], forks[1]:
        shells = [context, *(_copies(each)[0] for each in forks)]
        assert [before] * 3 == [_said(each, _SHOW) for each in shells]
        assert 3 == len({_said(each, "echo $RANDOM$RANDOM") for each in shells})
        assert [f"{n}\n" for n in range(3)] == [
            _said(each, f"x={n}; echo $x") for n, each in enumerate(shells)
        ]
        assert ["0\n", "1\n", "2\n"] == [_said(each, "echo $x") for each in shells]
        (again,) = forks[0].fork(processes="required")
        with again:
            assert "1\n" == _said(_copies(again)[0], "echo $x")


@pytest.mark.parametrize("what", ["sleep 100 &", "exec 7</dev/null", "coproc cat"])
def test_bash_with_jobs_or_files_is_refused_and_goes_on(sandbox: Any, what: str) -> None:
    context = sandbox.context("bash")
    _said(context, f"x=1; {what}")
    pid = _said(context, "echo $$")
    with pytest.raises(Unsupported, match="child processes: bash"):
        sandbox.fork(processes="required")
    (fork,) = sandbox.fork()
    with fork:
        assert "child processes: bash" in fork.fork_report.reason
        assert not fork.fork_report.has_processes
    assert f"1 {pid}" == _said(context, "echo $x $$")


def test_what_runs_in_the_background_is_named(sandbox: Any) -> None:
    """A daemon belongs to no exec any more: no fork has it, and that is not hidden."""
    context = sandbox.context()
    context.run("x = 1")
    sandbox.shell("sleep 1000 >/dev/null 2>&1 </dev/null & until pgrep sleep; do :; done")
    with pytest.raises(Unsupported, match=r"s\w+ \(pid \d+\) runs in the background"):
        sandbox.fork(processes="required")
    (fork,) = sandbox.fork()
    with fork:
        report = fork.fork_report
        assert [] != [each for each in report.left_out if each.startswith("sleep (pid ")]
        assert "runs in the background" in report.reason
        assert "1" == _copies(fork)[0].run("x").text


@pytest.mark.skipif(not shutil.which("node"), reason="node is not installed")
def test_node_contexts_go_on(sandbox: Any) -> None:
    context = sandbox.context("node")
    context.run("let kept = [1]; const count = (() => { let n = 0; return () => ++n; })(); count()")
    forks = sandbox.fork(2, processes="required")
    with forks[0], forks[1]:
        for number, each in enumerate((context, *(_copies(fork)[0] for fork in forks))):
            found = each.run(f"kept.push({number}); kept.join() + '/' + count()")
            assert found.text is not None
            assert f"1,{number}/2" in found.text


@pytest.mark.skipif(not shutil.which("gcc"), reason="gcc is not installed")
def test_a_compiler_in_flight_is_named_and_finishes(sandbox: Any) -> None:
    """It reads its source from a pipe that stays open, so it is in flight for as long as needed."""
    argv = ["gcc", "-x", "c", "-o", "program", "-"]
    compiler = sandbox.start(argv, stream_stdin=True)
    compiler.stdin.write(b"int main(void) { return 7; }\n")
    reason = _refusal(sandbox, "cc1")
    assert compiler.id in reason
    (fork,) = sandbox.fork()
    with fork:
        assert "cc1" in fork.fork_report.reason
        assert not fork.files.exists("program")
    compiler.stdin.close()
    assert compiler.wait(60).exit_code == 0
    assert 7 == sandbox.exec(["./program"]).exit_code


def _refusal(sandbox: Any, name: str) -> str:
    """Why it is refused, once a child with that name runs."""
    ends, reason = time.monotonic() + 60, "it was not"
    while f"child processes: {name}" not in reason and time.monotonic() < ends:
        try:
            sandbox.fork(processes="required")[0].terminate()
        except Unsupported as exc:
            reason = exc.message
    return reason
