"""The kernel as a process: what it imports, and what other releases of Python are sent."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence import Sandbox
from ringfence.contexts import frames, kernel, kernel_wire

pytestmark = pytest.mark.anyone


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


class _Seeded:
    """A generator of numpy's, as far as it is looked at."""

    def __init__(self, entropy: object) -> None:
        self.state = "as before"
        self.seed_seq = SimpleNamespace(entropy=entropy)


class _Bits(_Seeded):
    def __init__(self, entropy: object = 1 << 127) -> None:
        super().__init__(entropy)
        self.state = "drawn anew" if entropy == 1 << 127 else "as before"


class _Generator:
    def __init__(self, bits: _Bits) -> None:
        self.bit_generator = bits


def test_generators_without_a_seed_are_seeded_anew_in_a_copy_and_others_are_kept() -> None:
    """128 bits of the system are no seed of a program's; stand-ins for the library's classes."""
    seeded: list[int] = []
    random = SimpleNamespace(seed=lambda: seeded.append(1), Generator=_Generator, Bits=_Bits, pi=3)
    names: dict[str, Any] = {
        "unseeded": _Generator(_Bits(1 << 100)),
        "bits": _Bits(1 << 64),
        "seeded": _Generator(_Bits(7)),
        "large": _Bits((1 << 64) - 1),
        "several": _Bits([1 << 100, 2]),
        "none": _Bits(None),
        "of another kind": _Seeded(1 << 100),
        "number": 1 << 100,
    }
    kernel._reseed_numpy(random, names)

    assert [1] == seeded
    states = {
        name: getattr(value, "bit_generator", value).state
        for name, value in names.items()
        if name != "number"
    }
    assert {"unseeded", "bits"} == {name for name, each in states.items() if each == "drawn anew"}


def test_an_interrupt_of_an_earlier_cell_is_not_kept_for_the_next() -> None:
    wire: Any = object.__new__(kernel_wire.Wire)
    wire.whole, wire.cell, wire._pending = kernel_wire.Uninterrupted(), "", []
    with wire.whole:
        wire.whole.is_running = True
        wire.whole.interrupt()
        assert wire.whole.is_pending
        wire.whole.is_running = False
        wire.begin("ab")
    assert ("ab", False) == (wire.cell, wire.whole.is_pending)
