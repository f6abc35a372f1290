"""server: what the daemon adds, how much it takes, how soon it is back; over its unix socket.

What the daemon takes is measured with `http.client`, and what the SDK adds to that beside it.
"""

from __future__ import annotations

import threading
import time
from typing import cast

from ...errors import RingfenceError
from ...model.client_session import SessionTimeouts
from ...sandbox import Sandbox
from ..daemon import Daemon
from ..plain import Plain
from ..rows import HIGHER, VALUE, Missing, Row, Target
from ..turns import OURS, take_turns
from .exec import cell_in
from .files import measure_tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ...client import Client, RemoteSandbox
    from ..settings import Settings

_MEASURE, _SDK, _LIBRARY = "server", "sdk", "library"
_TRUE = ["/bin/true"]
_MIB = 1 << 20
_REFILL_S = 0.05  # between two claims: the pool is to be full again
_CLIENTS = 16
_STREAMED = 256 * _MIB
_POOL = {"enabled": True, "min_warm": 8, "max_warm": 32}


def measure(settings: Settings) -> Iterator[Row | Missing]:
    """Every row of the server's table."""
    try:
        from ...client import Client
    except RingfenceError as exc:
        yield Missing("ringfence serve", str(exc))
        return
    with Daemon(max_sandboxes=200, pool=_POOL) as daemon:
        with Client(daemon.address) as client, Plain(daemon.address) as plain:
            yield _cycle(daemon, plain, client, settings, use_pool=True)
        yield _rate(daemon, settings)
    with (
        Daemon(max_sandboxes=200, pool={"enabled": False}) as daemon,
        Client(daemon.address) as client,
        Plain(daemon.address) as plain,
    ):
        yield _cycle(daemon, plain, client, settings, use_pool=False)
        yield _exec(plain, client, settings)
        yield _cell(client, settings)
        yield _stream(client, settings)
        with client.create() as sandbox:
            yield from measure_tree(cast("Sandbox", sandbox), _MEASURE, settings)
    yield from _many(settings)


def _cycle(
    daemon: Daemon, plain: Plain, client: Client, settings: Settings, *, use_pool: bool
) -> Row:
    def by_sdk() -> None:
        with client.create(use_pool=use_pool) as sandbox:
            _check(sandbox)

    def by_library() -> None:
        with Sandbox.create() as sandbox:
            _check(sandbox)

    contenders = {OURS: lambda: plain.cycle(use_pool=use_pool), _SDK: by_sdk, _LIBRARY: by_library}
    pause_s = _REFILL_S if use_pool else 0.0
    rounds, began = settings.rounds * 3, daemon.cpu_s
    samples = take_turns(contenders, rounds, warm_up=10, pause_s=pause_s)
    computed_ms = (daemon.cpu_s - began) / (2 * (rounds + 10)) * 1000
    note = (
        f"{samples.median_ms(_SDK) or 0:.2f} ms by the SDK, {samples.median_ms(_LIBRARY) or 0:.2f} ms "
        f"by the library without a pool, in turns; the daemon computes {computed_ms:.1f} ms for each"
    )
    if use_pool:
        note += f"; {client.stats().pool_hit_rate or 0:.0%} of all were pool hits"
    return Row(
        _MEASURE,
        f"create, exec, delete over HTTP, {'pool hit' if use_pool else 'no pool'}",
        "ms",
        samples.median_ms(OURS),
        target=Target(VALUE, must=8.0, aim=4.0) if use_pool else Target(VALUE, must=15.0, aim=8.0),
        samples=len(samples.seconds[OURS]),
        note=note,
    )


def _check(sandbox: RemoteSandbox | Sandbox) -> None:
    result = sandbox.exec(_TRUE)
    if not result.ok:
        raise AssertionError(f"`true` failed in the sandbox: {result}")


def _exec(plain: Plain, client: Client, settings: Settings) -> Row:
    with client.create() as remote, Sandbox.create() as local:
        at = f"/v1/sandboxes/{remote.id}"
        contenders = {
            OURS: lambda: plain.true_in(at),
            _SDK: lambda: _check(remote),
            _LIBRARY: lambda: _check(local),
        }
        samples = take_turns(contenders, settings.rounds * 4, warm_up=10)
    ours, library = samples.median_ms(OURS), samples.median_ms(_LIBRARY)
    added = ours - library if ours is not None and library is not None else None
    return Row(
        _MEASURE,
        "exec over HTTP, added to the library's",
        "ms",
        added,
        target=Target(VALUE, must=3.0, aim=1.0),
        samples=len(samples.seconds[OURS]),
        note=f"{ours:.2f} ms over HTTP, {samples.median_ms(_SDK) or 0:.2f} ms by the SDK, "
        f"{library:.2f} ms by the library, in turns",
    )


def _cell(client: Client, settings: Settings) -> Row:
    with client.create() as sandbox, sandbox.context() as context:
        samples = take_turns({OURS: cell_in(context)}, settings.rounds * 4, warm_up=10)
    return Row(
        _MEASURE,
        "a cell x + 1 over HTTP",
        "ms",
        samples.median_ms(OURS),
        target=Target(VALUE, must=4.0, aim=2.0),
        samples=len(samples.seconds[OURS]),
        note="by the SDK, over the unix socket",
    )


def _stream(client: Client, settings: Settings) -> Row:
    """Live, as it is written: `head` writes, the daemon spools and sends, the SDK reads."""
    rates = []
    with client.create() as sandbox:
        for _ in range(settings.slow_rounds):
            script = f"head -c {_STREAMED} /dev/zero"
            process = sandbox.start(["sh", "-c", script], max_output_bytes=2 * _STREAMED)
            began, count = time.perf_counter(), 0
            for chunk in process.stdout:
                count += len(chunk)
            rates.append(count / (time.perf_counter() - began) / 1e6)
            if count != _STREAMED:
                raise AssertionError(f"{count} of {_STREAMED} bytes came")
    return Row(
        _MEASURE,
        "output streamed over HTTP while it is written",
        "MB/s",
        sorted(rates)[len(rates) // 2],
        target=Target(VALUE, HIGHER, must=200.0, aim=1000.0),
        samples=len(rates),
        note=f"{_STREAMED // _MIB} MiB each, every byte counted",
    )


def _rate(daemon: Daemon, settings: Settings) -> Row:
    per_s, count = rate(daemon.address, settings.throughput_s * 2)
    return Row(
        _MEASURE,
        f"create, exec, delete, {_CLIENTS} clients in one process",
        "/s",
        per_s,
        target=Target(VALUE, HIGHER, must=80.0, aim=200.0),
        samples=count,
        note="the clients share the processors with the daemon",
    )


def rate(address: str, for_s: float) -> tuple[float, int]:
    """Cycles in a second that a server does for many clients in one process, and how many it did."""
    done = [0] * _CLIENTS
    until = [0.0]
    problems: list[BaseException] = []
    ready = threading.Barrier(_CLIENTS + 1)

    def work(number: int) -> None:
        try:
            with Plain(address) as plain:
                plain.cycle(use_pool=True)
                ready.wait()
                while time.perf_counter() < until[0]:
                    plain.cycle(use_pool=True)
                    done[number] += 1
        except BaseException as exc:  # noqa: BLE001  told below
            problems.append(exc)
            ready.abort()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(_CLIENTS)]
    until[0] = float("inf")
    for thread in threads:
        thread.start()
    ready.wait()
    began = time.perf_counter()
    until[0] = began + for_s
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
    return sum(done) / (time.perf_counter() - began), sum(done)


def _many(settings: Settings) -> Iterator[Row]:
    """Hold many, weigh the daemon, kill it, and see it come back."""
    from ...client import Client

    wanted = settings.live
    with Daemon(max_sandboxes=wanted + 100, pool={"enabled": False}) as daemon:
        with Client(daemon.address, timeout_s=300) as client:
            began = time.perf_counter()
            stopped = _fill(daemon, wanted)
            took = time.perf_counter() - began
            found = client.list()
            answered = all(
                client.get(each.id).exec(_TRUE).ok for each in found[:: len(found) // 10]
            )
            yield _held(len(found) if answered else 0, wanted, settings, stopped, took)
            yield _memory(daemon, len(found))
        daemon.kill()
        back_s = daemon.start()
        with Client(daemon.address, timeout_s=300) as client:
            again = client.list()
            answered = all(
                client.get(each.id).exec(_TRUE).ok for each in again[:: len(again) // 10]
            )
        lost = len(found) - len(again)
        judged = len(found) >= 1000
        yield Row(
            _MEASURE,
            f"kill -9 and restart with {len(found)} live sandboxes",
            "ms",
            1000 * back_s if answered and not lost else None,
            target=Target(VALUE, must=5000.0, aim=1000.0) if judged else Target(VALUE),
            note=f"{len(again)} are there again" + ("" if answered else ", not all of them answer"),
        )


def _fill(daemon: Daemon, wanted: int) -> str:
    """Make so many, eight at a time; why it stopped before, if it did."""
    from ...client import Client

    problems: list[str] = []
    left = iter(range(wanted))
    lock = threading.Lock()

    def work() -> None:
        with Client(daemon.address, timeout_s=300) as client:
            while not problems:
                with lock:
                    if next(left, None) is None:
                        return
                try:
                    client.create(timeouts=SessionTimeouts(idle_s=None))
                except RingfenceError as exc:
                    problems.append(str(exc))

    _at_once(work, 8)
    return problems[0] if problems else ""


def _at_once(work: Callable[[], None], count: int) -> None:
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _held(count: int, wanted: int, settings: Settings, stopped: str, took: float) -> Row:
    target = Target(VALUE, HIGHER, must=1000, aim=5000 if settings.full else None)
    if wanted < 1000:
        target = Target(VALUE, HIGHER)
    note = f"made in {took:.0f} s, eight at a time" + (f"; stopped: {stopped}" if stopped else "")
    return Row(
        _MEASURE,
        "live sandboxes held by one daemon",
        "sandboxes",
        float(count),
        target=target,
        note=note,
    )


def _memory(daemon: Daemon, count: int) -> Row:
    what = f"daemon's memory with {count} idle sandboxes"
    target = Target(VALUE, must=250.0, aim=120.0) if count >= 1000 else Target(VALUE)
    try:
        used = daemon.memory_bytes / _MIB
    except PermissionError as exc:
        return Row(_MEASURE, what, "MiB", None, target=target, note=str(exc))
    return Row(_MEASURE, what, "MiB", used, target=target, note="PSS, without the sandboxes")
