"""egress: a policy's price, and what goes through it; beside the host's own network, in turns."""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack

from ...sandbox import Sandbox
from .. import traffic
from ..peers import networks
from ..peers.peer import PeerMissingError
from ..rows import HIGHER, RATIO, VALUE, Missing, Row, Target
from ..turns import OURS, take_turns

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..settings import Settings

    Way = Callable[..., list[float]]
    """From a client's verb and its counts to the seconds that it took, sorted."""

DIRECT = "direct"
_MB = 1_000_000
_FAST = 1000.0
_HOSTS = ("a.test", "*.b.test:443", "c.test:80,443")


def measure(settings: Settings) -> Iterator[Row | Missing]:
    """Every way to the same server on the host's loopback, by the same client."""
    yield _set_up(settings)
    with ExitStack() as stack:
        port = stack.enter_context(traffic.Server()).port
        ways: dict[str, Way] = {
            OURS: _inside(stack, port, f"127.0.0.1:{port}"),
            DIRECT: _inside(stack, port, "unrestricted"),
        }
        for name, opener in networks.OPENERS.items() if settings.peers else ():
            try:
                peer = opener(port)
            except PeerMissingError as exc:
                yield Missing(name, str(exc))
                continue
            stack.callback(peer.close)
            ways[name] = lambda verb, *counts, peer=peer: peer.run(verb, port, *counts)
        for rows in (_connections, _throughput, _many):
            yield from rows(ways, settings)


def _inside(stack: ExitStack, port: int, network: str) -> Way:
    sandbox = stack.enter_context(Sandbox.create(network=network))

    def run(verb: str, *counts: int) -> list[float]:
        result = sandbox.exec(traffic.client(verb, "127.0.0.1", port, *counts), timeout_s=300)
        if not result.ok:
            raise PeerMissingError(result.stderr_text.strip()[-200:])
        return traffic.seconds(result.stdout)

    return run


def _set_up(settings: Settings) -> Row:
    """`Sandbox.create` alone; what ends it is not timed."""

    def create(network: object) -> float:
        started = time.perf_counter()
        sandbox = Sandbox.create(network=network)  # type: ignore[arg-type]
        elapsed = time.perf_counter() - started
        sandbox.terminate()
        return elapsed

    contenders = {OURS: lambda: create(_HOSTS), "none": lambda: create("none")}
    samples = take_turns(contenders, settings.rounds * 2)
    ours, none = samples.median_ms(OURS), samples.median_ms("none")
    added = ours - none if ours is not None and none is not None else None
    return Row(
        "egress",
        "policy of three names, added to create",
        "ms",
        added,
        target=Target(VALUE, must=2.0, aim=0.5),
        samples=len(samples.seconds[OURS]),
        note=f"create takes {ours:.2f} ms with it, {none:.2f} ms without",
    )


def _connections(ways: dict[str, Way], settings: Settings) -> Iterator[Row | Missing]:
    """Connect, one byte there and back, close; the median of each run, what direct takes left out."""
    count = 200 if settings.quick else 1000
    medians = {
        name: (lambda way=way: statistics.median(way("connections", count)))
        for name, way in ways.items()
    }
    samples = take_turns(medians, settings.slow_rounds, warm_up=1)
    direct = samples.median_ms(DIRECT)
    if direct is None:
        raise AssertionError(samples.failed[DIRECT])
    added = {
        name: taken - direct
        for name in ways
        if (taken := samples.median_ms(name)) is not None and name != DIRECT
    }
    for name in [""] if len(ways) == 2 else [name for name in ways if name not in (OURS, DIRECT)]:
        yield Row(
            "egress",
            "new connection, added to the host's own",
            "ms",
            added.get(OURS),
            name,
            added.get(name),
            Target(VALUE, must=1.5, aim=0.3),
            count * settings.slow_rounds,
            samples.failed.get(name, f"direct {direct:.2f} ms"),
        )


def _throughput(ways: dict[str, Way], settings: Settings) -> Iterator[Row | Missing]:
    size = (256 << 20) if settings.quick else (2 << 30)
    for verb, what in (("down", "one stream in"), ("up", "one stream out")):
        yield from _one_stream(ways, settings, verb, size, f"{what}, {size >> 20} MiB")


def _one_stream(
    ways: dict[str, Way], settings: Settings, verb: str, size: int, what: str
) -> Iterator[Row]:
    contenders = {name: (lambda way=way: way(verb, size)[0]) for name, way in ways.items()}
    samples = take_turns(contenders, settings.slow_rounds, warm_up=1)
    rates = {
        name: size / statistics.median(taken) / _MB
        for name, taken in samples.seconds.items()
        if taken and name not in samples.failed
    }
    for name in ways:
        if name == OURS:
            continue
        target = Target()
        if name == DIRECT:
            # Fast by itself, or fast beside the host's own.
            fast = rates[OURS] >= _FAST
            by_value = Target(VALUE, HIGHER, must=_FAST, aim=0.8 * rates[DIRECT])
            target = by_value if fast else Target(RATIO, HIGHER, must=0.5, aim=0.8)
        note = samples.failed.get(name, "")
        rounds = settings.slow_rounds
        theirs = rates.get(name)
        yield Row("egress", what, "MB/s", rates[OURS], name, theirs, target, rounds, note)


def _many(ways: dict[str, Way], settings: Settings) -> Iterator[Row | Missing]:
    """Of 200 streams started together, the one that is nearly last beside the one in the middle."""
    size = (1 << 20) if settings.quick else (8 << 20)
    spread: dict[str, list[float]] = {name: [] for name in ways}

    def run(name: str) -> float:
        taken = ways[name]("many", 200, size)
        spread[name].append(traffic.quantile(taken, 0.99) / statistics.median(taken))
        return taken[-1]

    contenders = {name: (lambda name=name: run(name)) for name in ways}
    samples = take_turns(contenders, settings.slow_rounds, warm_up=0)
    for name in ways:
        if name != OURS:
            yield Row(
                "egress",
                "200 streams at once, p99 / p50 of their ends",
                "x",
                statistics.median(spread[OURS]),
                name,
                statistics.median(spread[name]) if spread[name] else None,
                Target(VALUE, must=5.0, aim=2.0) if name == DIRECT else Target(),
                settings.slow_rounds,
                samples.failed.get(name, ""),
            )
