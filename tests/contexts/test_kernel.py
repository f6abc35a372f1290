"""The kernel as a process: what it imports, and what other releases of Python are sent."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ringfence import Sandbox
from ringfence.contexts import frames


def _first_cell(code: str) -> str:
    """Run a cell in a kernel without a sandbox; return its output."""
    argv = [sys.executable, "-IS", *frames.argv_of("python")[1:]]
    run = frames.request("run", cell="ab", code=code, input=False)
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(frames.kernel_of("python") + run)
        process.stdin.flush()
        reader, found = frames.Reader(), b""
        while data := os.read(process.stdout.fileno(), 1 << 16):
            for kind, _, _, payload in reader.feed(data):
                if kind in ("out", "err"):
                    found += payload
                if kind == "done":
                    process.stdin.close()
    return found.decode()


def test_it_imports_no_module_that_costs_as_much_as_the_interpreter() -> None:
    loaded = set(_first_cell("import sys; print(*sys.modules)").split())

    assert "_ast" in loaded, "the control"
    assert not loaded & {"ast", "enum", "re", "json", "typing", "threading", "linecache"}


def test_another_release_of_python_compiles_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    where = "import __main__, sys; print(sys._getframe(1).f_code.co_filename)"
    assert "<ringfence kernel>\n" == _first_cell(where), "it names no file of the host"
    _mark, code, source = frames._compiled()
    other = (b"00000000", b"\0" * len(code), source)
    monkeypatch.setattr(frames, "_compiled", lambda: other)

    assert "<ringfence kernel>\n" == _first_cell(where)


@pytest.mark.parametrize("module", ["traceback", "linecache"])
def test_a_cell_that_imports_what_shows_lines_has_its_own(sandbox: Sandbox, module: str) -> None:
    code = "import traceback\ntry: 1 / 0\nexcept ZeroDivisionError: traceback.print_exc()"
    with sandbox.context() as context:
        context.run("def earlier():\n    raise KeyError('k')")
        assert "try: 1 / 0" in context.run(f"import {module}\n{code}").stderr
        error = context.run("earlier()").error
    assert error is not None
    assert "raise KeyError('k')" in error.traceback
