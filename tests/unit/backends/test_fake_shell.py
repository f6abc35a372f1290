"""The fake's small `sh` beside the host's: same script, same output, same ending."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence.backends.fake import FakeBackend
from ringfence.model.spec import SandboxSpec
from ringfence.testing.lab import Lab

SCRIPTS = [
    "true",
    "exit 7",
    "false; echo $?",
    "echo a  b 'c  d' \"e $HOME_\" \\$x",
    "x='1  2'; echo $x; echo \"$x\"; echo '$x'",
    "x=1 y=2; echo $x$y ${x}y",
    "unset_variable_is_empty=; echo [$nothing] [$unset_variable_is_empty]",
    "echo one; echo two >&2; echo three",
    "echo first > f; echo second >> f; cat f; cat < f",
    "echo 2 > f; cat f; echo x 2> g; cat g",
    "cat missing 2> err || echo failed",
    "{ echo a; echo b; } > f; cat f",
    "(exit 3); echo $?; (cd /tmp; pwd); x=1; (x=2); echo $x",
    "echo a | cat | cat",
    "false | true; echo $?; true | false; echo $?",
    "true && echo yes || echo no; false && echo yes || echo no",
    "! true; echo $?; ! false; echo $?",
    "if true; then echo t; else echo f; fi; if false; then echo t; else echo f; fi; echo $?",
    "i=; while [ \"$i\" != xxx ]; do i=${i}x; echo $i; done",
    "i=; until [ \"$i\" = xx ]; do i=${i}x; done; echo $i",
    "while false; do :; done; echo $?",
    "[ -e f ] || echo none; echo > f; [ -f f ] && echo file; [ -d . ] && [ -n x ] && echo ok",
    "[ -z '' ] && [ a != b ] && [ a = a ] && echo ok",
    "sleep 0.05 & wait; echo waited",
    "(exit 5) & wait $!; echo $?",
    "trap 'echo caught' TERM; kill -TERM $$; echo after",
    "trap '' TERM; kill -TERM $$; echo ignored; trap - TERM; kill -TERM $$; echo no",
    "kill -9 $$",
    "sh -c 'kill -15 $$'; echo $?",
    "export V=inherited; sh -c 'echo $V'; W=once sh -c 'echo $W'; echo [$W]",
    "sh -c 'echo $0 $1' name argument",
    "exec sh -c 'echo replaced; exit 4'; echo never",
    "printf '%s-%s\\n' a b c; printf '\\101\\t|%%|%d\\n' 7",
    "no-such-command 2>/dev/null; echo $?",
    "# a comment\necho a # another\n\necho b;\n",
    "ln -s f link; echo content > f; cat link",
    "cat <missing; echo $?",
]  # fmt: skip


@pytest.fixture
def lab() -> Iterator[Lab]:
    backend = FakeBackend()
    lab = Lab(backend.provision(SandboxSpec()), patience_s=30)
    yield lab
    lab.close()


@pytest.mark.parametrize("script", SCRIPTS)
def test_like_the_real_shell(lab: Lab, script: str, tmp_path: Path) -> None:
    real = subprocess.run(["/bin/sh", "-c", script], capture_output=True, cwd=tmp_path, check=False)

    fake = lab.sh(script)

    assert real.stdout == fake.stdout
    assert not fake.stderr or real.stderr  # dash also announces what signals ended
    assert real.returncode == (fake.exit_code if fake.signal is None else -fake.signal)


@pytest.mark.parametrize(
    "script", ["echo 'open", 'echo "open', "(true", "if true", "$(true)", "| cat", "fi"]
)
def test_what_is_not_in_the_grammar_is_refused(lab: Lab, script: str) -> None:
    """Never run half of a script that was not understood."""
    result = lab.sh(f"echo ran\n{script}")

    assert (2, b"") == (result.exit_code, result.stdout)
    assert result.stderr
