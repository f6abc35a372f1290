"""Ten cells, and cells that end what they run in, in every backend and through servers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from ringfence import Sandbox
from ringfence.backends.native.backend import NativeBackend
from ringfence.backends.protocol import Backend
from ringfence.client import Client
from ringfence.contexts.execution import MOST_OUTPUT_BYTES
from ringfence.errors import LifecycleError, RingfenceError
from tests.api.conftest import StartDaemon, start_daemon
from tests.conformance.test_smoke import MAKERS
from tests.contexts import test_driven
from tests.contexts.ten import check_ten_cells
from tests.contexts.test_languages import CODE
from tests.features import require

__all__ = ["start_daemon"]
pytestmark = pytest.mark.timeout(400)

OPTIONS: dict[str, Any] = {
    "limits": {"memory_bytes": 512 << 20},
    "allow_degraded": ["memory_limit"],  # of an ordinary user it is sampled
}
ENDS = {
    "kills itself": "import os; os.kill(os.getpid(), 9)",
    "kills all it can": "!kill -9 -1",
    "exits": "import os; os._exit(3)",
    # The bound is for where an ordinary user's sandboxes have none, as their report says.
    "runs out of memory": "from resource import RLIMIT_DATA, getrlimit, setrlimit\n"
    "hard = getrlimit(RLIMIT_DATA)[1]\n"
    "setrlimit(RLIMIT_DATA, (1 << 30 if hard < 0 else min(hard, 1 << 30), hard))\n"
    "kept = []\nwhile True: kept.append(bytearray(8 << 20))",
    "closes its wire": "import os; os.closerange(3, 5000)",
    "ignores interrupts": "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass",
}


def _native(_stack: ExitStack) -> Backend:
    require("user namespaces")
    return NativeBackend()


LOCAL: dict[str, Callable[[ExitStack], Backend]] = {"native": _native, **MAKERS}
SERVED = {"server": "native", "server of gVisor": "gvisor"}
_FIRST = ("native", "server")
# The engine of Docker's tests is root's. Elsewhere a context is the same for every user: once is enough.
_MARKS = {"docker": [pytest.mark.full, pytest.mark.root]}
_ONCE = [pytest.mark.full, pytest.mark.anyone]
EACH = [
    each if each in _FIRST else pytest.param(each, marks=_MARKS.get(each, _ONCE))
    for each in (*LOCAL, *SERVED)
]


@pytest.fixture(scope="module", params=EACH)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Any]:
    with ExitStack() as stack:
        if served := SERVED.get(request.param):
            require("user namespaces")
            if "gvisor" == served:
                require("runsc")
            start: StartDaemon = request.getfixturevalue("start_daemon")
            client = stack.enter_context(Client(f"unix:{start('--backend', served).socket}"))
            tier = "strong" if "gvisor" == served else "light"
            yield stack.enter_context(client.create(backend=served, tier=tier, **OPTIONS))
            return
        backend = LOCAL[request.param](stack)
        stack.callback(backend.close)
        with Sandbox.create(backend=backend, **OPTIONS) as made:
            yield made


@pytest.mark.full
def test_ten_cells(sandbox: Any) -> None:
    with sandbox.context() as context:
        check_ten_cells(context)
        assert context.run("while True: pass", timeout_s=0.5).timed_out
        if sandbox.exec(["sh", "-c", "command -v node"]).exit_code == 0:
            with sandbox.context("node") as node:
                node.run("const x = 41")
                assert "42" == node.run("await x + 1").text
                order = CODE["node"].order
                assert ["stdout", "stderr", "stdout"] == [
                    each.stream for each in node.run(order).logs
                ]
                for endless in CODE["node"].endless:
                    assert "variables are kept" in str(node.run(endless, timeout_s=1).error), (
                        endless
                    )


# An emulated processor takes minutes to start R and a JVM.
@pytest.mark.full
@pytest.mark.parametrize(
    "sandbox", [each for each in EACH if "microvm" not in str(each)], indirect=True
)
@pytest.mark.parametrize("language", test_driven.CODE)
def test_cells_of_r_and_java(sandbox: Any, language: str) -> None:
    code = test_driven.CODE[language]
    if sandbox.exec(["sh", "-c", f"command -v {code.program}"]).exit_code:
        pytest.skip(f"{code.program} is not in the sandbox")
    with sandbox.context(language, env={"GIVEN": "g"}) as context:
        assert None is context.run(code.keep, timeout_s=120).error
        assert code.values == {each: context.run(each).text for each in code.values}
        name, value = code.fails[1:]
        error = context.run(code.fails[0]).error
        assert (name, value) == (error.name, error.value)
        late = context.run(code.endless[0], timeout_s=1)
        assert "variables are kept" in str(late.error)
        first = next(iter(code.values))
        assert code.values[first] == context.run(first).text


@pytest.mark.full
@pytest.mark.parametrize("how", ENDS)
def test_a_cell_that_ends_its_kernel(sandbox: Any, how: str) -> None:
    """Its caller hears of it, other contexts and the sandbox go on, and a restart brings it back."""
    with sandbox.context() as context, sandbox.context() as other:
        other.run("kept = 7")
        found = context.run(ENDS[how], timeout_s=3 if "interrupts" in how else 60)
        assert found.error is not None
        is_memory = "MemoryError" == found.error.name  # a sampled limit may fail malloc(3) first
        if not is_memory:
            assert "lost" in found.error.value
            assert not context.running
            with pytest.raises(LifecycleError, match="has ended"):
                context.run("1")
            context.restart()
        assert "2" == context.run("1 + 1", timeout_s=60).text
        if "all" in how:
            other.restart()
            assert "1" == other.run("1").text
        elif "memory" not in how:
            assert "7" == other.run("kept").text
    assert b"on\n" == sandbox.exec(["echo", "on"]).stdout


@pytest.mark.full
def test_a_cell_that_forks_closes_its_streams_and_floods(sandbox: Any) -> None:
    with sandbox.context() as context:
        fork = context.run(
            "import os\npid = os.fork()\nprint('child' if not pid else 'parent', flush=True)\n"
            "_ = os.waitpid(pid, 0) if pid else None"
        )
        assert ["child", "parent"] == sorted(fork.stdout.split())
        assert "z\n" == context.run("import os\nos.close(1); os.close(2)\nprint('z')").stdout
        flood = "import sys\nfor _ in range(1000): sys.stdout.write('y' * 1_000_000);"
        huge = context.run(flood, timeout_s=200)
        assert huge.error is None
        assert 1_000_000_000 == len(huge.stdout) + huge.dropped_bytes
        assert len(huge.stdout) <= MOST_OUTPUT_BYTES
        assert "2" == context.run("1 + 1").text


@pytest.mark.parametrize("kind", ["native", pytest.param("gvisor", marks=pytest.mark.full)])
def test_the_end_of_the_sandbox_ends_the_cell(kind: str) -> None:
    """Its first process is killed from outside: nothing waits, and each call says what happened."""
    with ExitStack() as stack:
        backend = LOCAL[kind](stack)
        stack.callback(backend.close)
        sandbox = stack.enter_context(Sandbox.create(backend=backend))
        context, begun, found = sandbox.context(), threading.Event(), []
        waits = "import time\nprint(1)\ntime.sleep(1000)"
        thread = threading.Thread(
            target=lambda: found.append(context.run(waits, on_stdout=lambda _: begun.set()))
        )
        thread.start()
        assert begun.wait(60)
        os.kill(sandbox._inner.pid, 9)  # type: ignore[attr-defined]
        thread.join(60)

        assert not thread.is_alive()
        assert "ContextEnded" in repr(found[0].error)
        for call in (lambda: context.run("1"), context.restart, lambda: sandbox.run_code("1")):
            with pytest.raises(RingfenceError, match="ended"):
                call()
