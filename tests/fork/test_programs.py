"""Real programs in forks, in the library and on a server: which go on, and which are refused by name."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from ringfence.errors import Unsupported
from ringfence.linux import libc

pytestmark = [
    pytest.mark.full,
    pytest.mark.anyone,
    pytest.mark.skipif(libc.MACHINE != "x86_64", reason="processes are copied on x86-64 only"),
]
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


@pytest.mark.full
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


@pytest.mark.full
def test_bash_goes_on_with_jobs_and_files(sandbox: Any) -> None:
    context = sandbox.context("bash")
    begin = "sleep 1000 & sleep 1001 & coproc cat; pushd /tmp; printf 'a\\nb\\n' >two; exec 7<two"
    _said(context, f"{begin}; read -r line <&7")
    before = _said(context, "echo $$; jobs; jobs -p; dirs")
    assert "sleep 1001" in before
    ask = (
        "read -r line <&7; echo $line; echo hi >&${COPROC[1]}; read -r line <&${COPROC[0]};"
        " echo $line; kill %2; wait %2; echo $?; jobs"
    )
    forks = sandbox.fork(2, processes="required")
    (third,) = forks[0].fork(processes="required")
    with forks[0], forks[1], third:
        for each in (context, *(_copies(fork)[0] for fork in (*forks, third))):
            assert before == _said(each, "echo $$; jobs; jobs -p; dirs")
            said = _said(each, ask)
            assert said.startswith("b\nhi\n143\n")
            assert "sleep 1000" in said
            assert "sleep 1001" not in said.replace("Terminated", "")


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


_HAS_READ = (
    'import fcntl, os, sys; fd = os.open(f"/proc/{sys.argv[1]}/fd/0", os.O_RDONLY);'
    " sys.exit(any(fcntl.ioctl(fd, 0x541B, bytes(4))))"  # FIONREAD
)


@pytest.mark.skipif(not shutil.which("gcc"), reason="gcc is not installed")
def test_a_compiler_in_flight_finishes_in_each_copy(sandbox: Any) -> None:
    """It reads its source from a pipe that stays open, so it is in flight for as long as needed."""
    argv = ["gcc", "-x", "c", "-o", "program", "-"]
    compiler = sandbox.start(argv, stream_stdin=True)
    compiler.stdin.write(b"int main(void) { return 7; }\n")
    sandbox.shell(f"until python3 -c '{_HAS_READ}' $(pgrep cc1); do sleep 0.01; done", timeout_s=60)
    forks = sandbox.fork(2, processes="required")
    with forks[0], forks[1]:
        for each in (sandbox, *forks):
            id = compiler.id if each is sandbox else each.fork_report.processes[0]
            assert not each.files.exists("program")
            copy = compiler if each is sandbox else each.process(id)
            copy.stdin.close()
            assert 0 == copy.wait(60).exit_code
            assert 7 == each.exec(["./program"]).exit_code


def test_input_that_waits_is_no_copys(sandbox: Any) -> None:
    """It would be lost: what a copy reads comes from a pipe of its own."""
    reader = sandbox.start(["sleep", "1000"], stream_stdin=True)
    with sandbox.fork(processes="required")[0] as control:
        assert control.fork_report.has_processes
    reader.stdin.write(b"unread")

    with pytest.raises(Unsupported, match="6 bytes that it has not read"):
        sandbox.fork(processes="required")
    reader.kill()
