"""cluster: what a gateway adds to a request, and two nodes' throughput beside one daemon's, on this machine."""

from __future__ import annotations

import statistics

from ...errors import RingfenceError
from ..daemon import Daemon
from ..plain import Plain
from ..rows import HIGHER, VALUE, Missing, Row, Target
from ..turns import OURS, take_turns
from .server import rate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..settings import Settings
    from ..turns import Contender

_MEASURE, _NODE = "cluster", "node"
_NAME = "bench"
_NODES = 2
_TURNS = 3
_POOL = {"enabled": True, "min_warm": 8, "max_warm": 32}


def measure(settings: Settings) -> Iterator[Row | Missing]:
    """Every row of the cluster's table; Ray's nodes are processes of this machine."""
    try:
        from ...cluster import trial

        trial.check()
    except RingfenceError as exc:
        yield Missing("ringfence serve --cluster", str(exc))
        return
    with trial.nodes(_NODES, _NAME) as address:
        options = ("--cluster", address, "--cluster-name", _NAME)
        with Daemon(options, max_sandboxes=200, pool=_POOL) as gateway:
            try:
                yield _added(gateway, address, settings)
                with Daemon(max_sandboxes=200, pool=_POOL) as daemon:
                    yield _throughput(gateway, daemon, settings)
            finally:
                trial.end(address, _NAME)


def _added(gateway: Daemon, address: str, settings: Settings) -> Row:
    from ...cluster import trial

    with Plain(gateway.address) as through:
        at = "/v1/sandboxes/" + through.ask("POST", "/v1/sandboxes", {})["id"]
        with Plain(trial.socket_of(address, _NAME, at)) as node:

            def asked(plain: Plain) -> Contender:
                def ask() -> None:
                    plain.ask("GET", at)

                return ask

            contenders = {OURS: asked(through), _NODE: asked(node)}
            samples = take_turns(contenders, settings.rounds * 10, warm_up=20)
        through.ask("DELETE", at)
    ours, theirs = samples.median_ms(OURS), samples.median_ms(_NODE)
    return Row(
        _MEASURE,
        "GET of a sandbox through a gateway, added to its node's",
        "ms",
        None if ours is None or theirs is None else ours - theirs,
        target=Target(VALUE, must=1.5, aim=0.5),
        samples=len(samples.seconds[OURS]),
        note=f"{ours or 0:.2f} ms through the gateway, {theirs or 0:.2f} ms from the node, in turns",
    )


def _throughput(gateway: Daemon, daemon: Daemon, settings: Settings) -> Row:
    ours, theirs = [], []
    for _ in range(_TURNS):
        ours.append(rate(gateway.address, settings.throughput_s)[0])
        theirs.append(rate(daemon.address, settings.throughput_s)[0])
    return Row(
        _MEASURE,
        f"create, exec, delete through a gateway over {_NODES} nodes",
        "/s",
        statistics.median(ours),
        "one daemon",
        statistics.median(theirs),
        target=Target(better=HIGHER, must=1.3, aim=1.8),
        samples=_TURNS,
        note="clients, gateway and nodes share the processors; a node is a daemon",
    )
