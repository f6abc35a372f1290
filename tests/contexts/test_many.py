"""Two hundred sandboxes with a context each, a hundred contexts in one; `-s` shows what each takes."""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from ringfence import Sandbox
from ringfence.backends.native.backend import NativeBackend
from tests.features import require

pytestmark = [pytest.mark.full, pytest.mark.anyone, pytest.mark.timeout(400)]
_COUNT = 200


def test_two_hundred_sandboxes_with_a_context_each() -> None:
    """Each keeps its own variable; together they take less than 16 MiB each."""
    require("user namespaces")
    with ExitStack() as stack:
        backend = NativeBackend()
        stack.callback(backend.close)
        before = _taken()
        contexts = []
        for number in range(_COUNT):
            sandbox = stack.enter_context(Sandbox.create(backend=backend))
            contexts.append(sandbox.context())
            contexts[-1].run(f"n = {number}")
        taken = (_taken() - before) / _COUNT
        print(f"{taken / 2**20:.1f} MiB each")

        assert [str(n) for n in range(_COUNT)] == [each.run("n").text for each in contexts]
        assert taken < 16 << 20


def test_a_hundred_contexts_in_one_sandbox() -> None:
    """Each keeps its own variable; together they take less than 16 MiB each."""
    require("user namespaces")
    with ExitStack() as stack:
        backend = NativeBackend()
        stack.callback(backend.close)
        sandbox = stack.enter_context(Sandbox.create(backend=backend))
        before = _taken()
        contexts = [stack.enter_context(sandbox.context()) for _ in range(100)]
        for number, context in enumerate(contexts):
            context.run(f"n = {number}")
        taken = (_taken() - before) / 100
        print(f"{taken / 2**20:.1f} MiB each")

        assert [str(n) for n in range(100)] == [each.run("n").text for each in contexts]
        assert taken < 16 << 20


def _taken() -> int:
    """Bytes of memory of all processes below this one, shared pages by shares (PSS)."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(path.parent.name))
    total, pending = 0, parents.get(os.getpid(), [])
    while pending:
        pid = pending.pop()
        pending += parents.get(pid, [])
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return total
