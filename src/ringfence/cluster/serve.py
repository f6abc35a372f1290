"""`ringfence serve --cluster`: a gateway. It keeps nothing that another one could not take up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace

from ..api.access.audit import Audit
from ..api.app import make_app
from ..api.streaming.breaking import quiet_server
from ..daemon import logs
from ..daemon.serve import have_many_files, run, settings_of
from ..errors import InvalidRequest
from ..model.places import state_directory
from . import node, scaler
from .bindings import keep_pruning
from .directory import KeyRing, connect
from .gateway import Behind, Gateway, GatewayService
from .nodes import Nodes, keep_looking, keep_reading
from .proxy import Proxy
from .tls import client_context, identity
from .upstream import Pool

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from ..daemon.config import DaemonConfig
    from ..daemon.holding import Held
    from .directory import Directory

_FIRST_NODE_S = 60.0
_OF_A_GATEWAY = (
    *("state_dir", "listen", "allow_public", "tls_certificate", "tls_key", "allowed_hosts"),
    *("allowed_origins", "bounds", "membership"),
)
"""Settings that are the gateway's own; nodes get the others."""

logger = logging.getLogger("ringfence.cluster")


@dataclass
class _Store:
    """The store of keys, which is all that a gateway's `Service` asks of a manager."""

    store: KeyRing


def serve(
    config: DaemonConfig, held: Held, ready: Callable[[list[str]], None], *, cluster: str, name: str
) -> None:
    """Serve a cluster until SIGTERM or SIGINT; its sandboxes stay.

    Args:
        ready: Called with the addresses once they answer.
        cluster: Address of Ray's head, or `auto`.
        name: Of the Ringfence cluster.
    """
    logs.set_up(config.log_level)
    have_many_files()
    quiet_server()
    own = sys.stdout
    with contextlib.ExitStack() as stack:
        # Ray prints what it hears of nodes; whoever reads this program's output waits for addresses.
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        directory = connect(cluster, name)
        keys = KeyRing(directory)
        settle(directory, config)
        audit = Audit(config.state_dir)
        stack.callback(audit.close)
        store: Any = _Store(keys)
        service = GatewayService(store, settings_of(config), audit)
        stack.callback(service.thread_pools.close)
        if directory.config().get("scaling"):
            scaler.ensure(name)
        nodes = Nodes(directory, lambda ray_id: node.ensure(name, ray_id))
        pool = Pool(client_context(identity(directory)[0]))
        behind = Behind(service, directory, nodes, Proxy(pool, directory.secret()))
        app = make_app(service, lambda inner: Gateway(inner, behind))
        app.state.executions = SimpleNamespace(reload=lambda: None)
        _wait_for_a_node(nodes)

        def beside() -> list[Coroutine[Any, Any, None]]:
            loop = asyncio.get_running_loop()

            def changed() -> None:
                service.authenticator.read()
                loop.call_soon_threadsafe(service.open_requests.look)

            pruning = keep_pruning(directory, nodes, behind.scatter)
            return [keep_looking(nodes), keep_reading(keys, changed), pruning]

        def tell(addresses: list[str]) -> None:
            with contextlib.redirect_stdout(own):
                ready(addresses)

        run(config, app, _front(config, app, behind), held, tell, beside)
        nodes.leave()
        service.authenticator.flush()


def settle(directory: Directory, config: DaemonConfig) -> None:
    """Give the nodes the configuration of the first gateway, and say so where they have another."""
    form = config.to_json()
    mine = {name: form[name] for name in form if name not in _OF_A_GATEWAY}
    # Short: a unix socket's path has at most 107 bytes.
    mine["base"] = "" if config.state_dir == state_directory() else f"{config.state_dir}/nodes"
    text = json.dumps(mine, sort_keys=True).encode()
    if directory.put_first("config", text) != text:
        logger.warning("the nodes keep the configuration that the cluster was started with")


def _front(config: DaemonConfig, app: Any, behind: Behind) -> Any:
    """The application that connections reach first; of E2B's API, the cluster's settings hold.

    Raises:
        InvalidRequest: The nodes do not serve it.
    """
    if config.e2b is None:
        return app
    from ..e2b.settings import E2BSettings
    from .e2b import Front

    form = behind.directory.config().get("e2b")
    if form is None:
        hint = "end the cluster by `ringfence cluster down`, and start its first gateway with --e2b"
        raise InvalidRequest("the nodes of this cluster do not serve it", field="e2b", hint=hint)
    return Front(app, behind, E2BSettings.from_json(form))


def _wait_for_a_node(nodes: Nodes) -> None:
    until = time.monotonic() + _FIRST_NODE_S
    while time.monotonic() < until:
        nodes.look()
        if nodes.ready():
            return
        time.sleep(0.1)
    logger.warning("no node has answered yet %s", nodes.troubles())


__all__ = ["serve", "settle"]
