"""backends: what the other backends cost, each beside the command line of what it is made of."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from functools import partial

from ...backends.registry import backend_named, new_backend
from ...errors import RingfenceError
from ...model.spec import STRONG, SandboxSpec
from ...sandbox import Sandbox
from ..peers import gather, oci
from ..peers.peer import CommandPeer, program
from ..rows import Missing, Row, Target
from ..turns import OURS, take_turns
from .create import rows
from .exec import true_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from ...backends.protocol import Backend
    from ..peers.gather import Gathered
    from ..settings import Settings

_FIRST = "create, first exec; nothing prebuilt"
_BURST = "create, first exec, terminate in a loop, the next one prebuilt"
# So that it is there before the peer's turn, which it would slow down: decision 65.
_BURST_PAUSE_S = 1.0
# Each leaves a dozen processes and their namespaces to the kernel, which is not done when it has ended.
_PAUSE_S = 0.05
_WARM_LIFE = "the same from a warm pool"
_EXEC = "exec of true in a live sandbox"
_LIFE_TARGET = Target(must=1.0, aim=0.5)
_MICROVM, _BOOT = "microvm", "cold boot"
_BOOTS = 5  # each takes seconds under software emulation
_EXEC_TARGETS = {"runsc": Target(must=0.4, aim=0.1), "docker": Target(must=0.5, aim=0.1)}


def measure(settings: Settings) -> Iterator[Row | Missing]:
    """gVisor beside `runsc do` and `runsc exec`; Docker beside `docker exec`; microVM beside a boot."""
    for backend, peer in (("gvisor", "runsc"), ("docker", "docker")):
        try:
            sandbox = Sandbox.create(backend=backend)
        except RingfenceError as exc:
            yield Missing(f"backend {backend}", exc.message)
            continue
        with sandbox:
            if backend == "gvisor":
                yield from _lives(backend, settings)
            yield from _execs(backend, peer, sandbox, settings)
        backend_named(backend).close()
    yield from _machines()


def _machines() -> Iterator[Row | Missing]:
    """A sandbox continued from a booted machine, beside the boot of that machine."""
    backend: Any = backend_named(_MICROVM)
    spec = SandboxSpec(tier=STRONG)
    try:
        backend.provision(spec).terminate()
    except RingfenceError as exc:
        yield Missing(f"backend {_MICROVM}", exc.message)
        return
    with backend.bootable() as boot:
        contenders = {OURS: lambda: backend.provision(spec).terminate(), _BOOT: boot}
        samples = take_turns(contenders, _BOOTS, warm_up=0)
    what = f"{_MICROVM}: create and terminate"
    yield from rows(what, "backends", samples, [_BOOT], {_BOOT: Target(must=0.3, aim=0.05)})
    backend.close()


def _lives(backend: str, settings: Settings) -> Iterator[Row | Missing]:
    with gather.Gathered({"runsc do": _runsc_do}) as gathered:
        yield from gathered.missing
        contenders = {name: peer.run_true for name, peer in gathered.peers.items()}
        alone, shared = new_backend(backend), backend_named(backend)
        whole: list[float] = []
        for what, life, pause_s, more in (
            (_FIRST, partial(_to_first_exec, alone, whole), _PAUSE_S, 4),
            (_BURST, partial(_one_life, shared), _BURST_PAUSE_S, 2),
            (_WARM_LIFE, partial(_one_warm_life, alone), _PAUSE_S, 2),
        ):
            rounds = settings.slow_rounds * more
            samples = take_turns({OURS: life, **contenders}, rounds, pause_s=pause_s)
            targets = {"runsc do": _LIFE_TARGET}
            peers = list(contenders) or [""]
            for row in rows(f"{backend}: {what}", "backends", samples, peers, targets):
                yield replace(row, note=row.note or _with_end(whole)) if what == _FIRST else row
        alone.close()


def _with_end(whole: list[float]) -> str:
    return f"{statistics.median(whole) * 1e3:.0f} ms with its end, which the peer's time has in it"


def _execs(
    backend: str, peer: str, sandbox: Sandbox, settings: Settings
) -> Iterator[Row | Missing]:
    with gather.Gathered({peer: gather.LIVE[peer]}) as gathered:
        yield from gathered.missing
        contenders = {name: each.run_true for name, each in gathered.peers.items()}
        samples = take_turns({OURS: true_in(sandbox), **contenders}, settings.slow_rounds * 2)
        yield from rows(
            f"{backend}: {_EXEC}", "backends", samples, list(contenders) or [""], _EXEC_TARGETS
        )


def _runsc_do(_all: Gathered) -> CommandPeer:
    options = oci.OPTIONS["runsc"]
    return CommandPeer("runsc do", program("runsc"), *options, "do", "true")


def _to_first_exec(backend: Backend, whole: list[float]) -> float:
    """Seconds from the call to the result; those to its end, too, go into `whole`."""
    started = time.perf_counter()
    with Sandbox.create(backend=backend) as sandbox:
        if not sandbox.exec(["true"]).ok:
            raise AssertionError("`true` failed in the sandbox")
        first = time.perf_counter() - started
    whole.append(time.perf_counter() - started)
    return first


def _one_life(backend: Backend) -> None:
    with Sandbox.create(backend=backend) as sandbox:
        if not sandbox.exec(["true"]).ok:
            raise AssertionError("`true` failed in the sandbox")


def _one_warm_life(backend: Backend) -> float:
    """As what a pool does: seconds from the claim on."""
    spec = SandboxSpec(tier=STRONG)
    warm = backend.prewarm(spec)
    started = time.perf_counter()
    with Sandbox(warm.claim(spec), spec) as sandbox:
        if not sandbox.exec(["true"]).ok:
            raise AssertionError("`true` failed in the sandbox")
    return time.perf_counter() - started
