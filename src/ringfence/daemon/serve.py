"""From a configuration to a daemon that serves, and back to nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import sys
import time
from functools import partial

from ..backends.registry import DEFAULT
from ..errors import BackendUnavailable, InvalidRequest, RingfenceError
from ..linux.malloc import M_ARENA_MAX, mallopt
from .membership import hold_lease, read_secret, write_addresses
from .succession import LEAVE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence
    from typing import Any

    import uvicorn
    from fastapi import FastAPI
    from starlette.types import ASGIApp

    from ..api.service import Service, Settings
    from ..sessions.manager import SessionManager
    from ..snapshots.shared import SharedSnapshots
    from .config import DaemonConfig
    from .holding import Held

logger = logging.getLogger("ringfence.daemon")

_MOST_FILES = 1 << 20
_ARENAS = 2  # of malloc
_ACCEPT_S = 1.0  # for connections that wait to be accepted then
_SWITCH_S = 0.001
_GRACE_S = 5  # for requests under way, once the daemon is told to stop


def serve(
    config: DaemonConfig,
    held: Held,
    ready: Callable[[list[str]], None],
    must_work: Sequence[str] = (),
) -> None:
    """Serve until SIGTERM or SIGINT; with them, all sandboxes end.

    SIGUSR1 and failures end this process alone: its sandboxes are left to the next daemon.

    Args:
        ready: Called with the addresses once they answer.
        must_work: Backends that were asked for by name: one of them has to work.

    Raises:
        BackendUnavailable: None can make a sandbox here; nothing is answered.
    """
    from ..api.access.audit import Audit
    from ..api.app import make_app
    from ..api.service import Service
    from ..api.streaming.breaking import quiet_server
    from ..execs.execs import Execs
    from ..execution.service import ExecutionService
    from ..model.base.ids import set_node
    from ..sessions import liveness
    from ..sessions.manager import SessionManager
    from . import logs

    logs.set_up(config.log_level)
    have_many_files()
    # Each arena keeps what it was freed. There is one for every few threads, which take turns anyway.
    mallopt(M_ARENA_MAX, _ARENAS)
    # Between the loop and a thread that computes: with more, the loop waits for longer than it works.
    sys.setswitchinterval(_SWITCH_S)
    quiet_server()
    if config.membership:
        set_node(config.membership.node)
    with contextlib.ExitStack() as stack:
        manager = stack.enter_context(
            SessionManager(
                config.manager,
                state_dir=held.directory,
                backends=config.backends,
                outlive_s=config.outlive_s or None,
                shared=_shared(config),
            )
        )
        try:
            logs.follow(manager.events)
            _check_working(manager, config.backends, must_work)
            audit = Audit(config.state_dir)
            stack.callback(audit.close)
            service = Service(manager, settings_of(config), audit)
            stack.callback(service.thread_pools.close)
            stack.callback(_flush, service)
            execs = stack.enter_context(contextlib.closing(Execs(manager)))
            executions = stack.enter_context(
                contextlib.closing(ExecutionService(manager, execs=execs))
            )
            app = make_app(service)
            app.state.execs, app.state.executions = execs, executions
            leave = run(config, app, _front(config, app), held, ready)
        except Exception:
            # Not for a Ctrl-C: what the daemon before left is ended only by who asks for it.
            if config.outlive_s and manager.index.all():
                stack.pop_all()
            raise
        if leave and config.outlive_s:
            # As if killed, but with every request answered: there is one way to go on from.
            _flush(service)
            liveness.tidy(manager)
            liveness.save(manager)
            logging.shutdown()
            os._exit(0)


def _check_working(manager: SessionManager, wanted: Sequence[str], must: Sequence[str]) -> None:
    """Refuse to serve where no backend works, and log the reason of each one that does not.

    The default backend alone is not tried unless `must` has it: that takes time, and `/v1/health` tells of it.
    """
    if not must and (*wanted,) == (DEFAULT,):
        return
    reports = {name: manager.maker.report(name) for name in wanted}
    lacking = [
        f"backend {name} cannot make a sandbox: {each.reason}"
        for name, each in reports.items()
        if not each.available
    ]
    if len(lacking) == len(reports):
        hint = "`ringfence doctor` lists the backends that work here"
        raise BackendUnavailable("; ".join(lacking), hint=hint)
    for each in lacking:
        logger.warning("%s", each)


def _shared(config: DaemonConfig) -> SharedSnapshots | None:
    """The store in which snapshots outlive this node.

    Raises:
        InvalidRequest: This server is no node of a cluster, whose secret the store needs.
    """
    if not config.snapshot_store:
        return None
    if config.membership is None:
        hint = "remove it, or start a gateway with it: `ringfence serve --cluster`"
        raise InvalidRequest("is for nodes of a cluster", field="snapshot_store", hint=hint)
    from ..snapshots.shared import SharedSnapshots

    return SharedSnapshots(config.snapshot_store, read_secret(config.state_dir))


def _flush(service: Service) -> None:
    """Write down when each key was used last."""
    with contextlib.suppress(RingfenceError):
        service.authenticator.flush()


def have_many_files() -> None:
    """As many as this user may: each sandbox takes some, and so does each connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, _MOST_FILES) if hard != resource.RLIM_INFINITY else _MOST_FILES
    if soft < wanted:
        # Nothing here uses select(2), which is why there is a lower one at all.
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def settings_of(config: DaemonConfig) -> Settings:
    from ..api.access.origin_policy import OriginPolicy
    from ..api.access.permissions import Permissions
    from ..api.service import Settings
    from ..policy.host_networks import HostNetworks
    from .sockets import read_address

    names = {name.lower() for name in config.allowed_hosts}
    if config.listen:
        names.add(read_address(config.listen)[0].lower())
    origins = frozenset(origin.lower().rstrip("/") for origin in config.allowed_origins)
    origin_policy = OriginPolicy(frozenset(names), origins)
    networks = HostNetworks(config.host_networks)
    idle_s = config.manager.timeouts.idle_s
    permissions = Permissions(config.host_roots, networks, config.most, idle_s)
    secret = read_secret(config.state_dir) if config.membership else b""
    return Settings(origin_policy, config.bounds, permissions, secret)


def _front(config: DaemonConfig, app: FastAPI) -> ASGIApp:
    """The application that connections reach first."""
    if config.e2b is None:
        return app
    from ..e2b.door import Door

    return Door(app, app.state.service, app.state.execs, config.e2b)


def run(
    config: DaemonConfig,
    app: FastAPI,
    front: ASGIApp,
    held: Held,
    ready: Callable[[list[str]], None],
    beside: Callable[[], list[Coroutine[Any, Any, None]]] = list,
) -> bool:
    """Serve until told to end; whether to leave the sandboxes to the next daemon.

    Args:
        beside: Makes what runs on the loop meanwhile.
    """
    import uvicorn

    told: list[int] = []
    share = app.state.service.share

    from .memory import give_back
    from .protocol import MOST_MESSAGE, http_protocol, is_readable, websocket_protocol

    bounded = http_protocol(config.bounds, share)

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # signals are for all servers together

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            """Answer who has connected before it; what waits in a closed listener would be reset."""
            bounded.is_leaving = True
            held.hide()
            until = time.monotonic() + _ACCEPT_S
            while any(map(is_readable, sockets or ())) and time.monotonic() < until:
                await asyncio.sleep(0)
            await super().shutdown(sockets)

    def server(tls: bool) -> uvicorn.Server:
        return Server(
            uvicorn.Config(
                front,
                http=bounded,
                ws=websocket_protocol(share),
                loop="uvloop",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=_GRACE_S,
                ws_max_size=MOST_MESSAGE,
                # A slow reader answers pings late, and must not be disconnected for it.
                ws_ping_timeout=None,
                ws_per_message_deflate=False,  # a megabyte must not become a gigabyte
                ssl_certfile=config.tls_certificate if tls else None,
                ssl_keyfile=config.tls_key if tls else None,
            )
        )

    async def main() -> None:
        servers = [server(tls) for _, tls in held.listeners]
        addresses = [address(sock, tls) for sock, tls in held.listeners]
        if config.membership:
            write_addresses(config.state_dir, addresses)
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT, LEAVE):
            loop.add_signal_handler(signum, _stop, servers, told, signum)
        loop.add_signal_handler(signal.SIGHUP, _reload, app)
        tasks = [
            asyncio.ensure_future(each.serve(sockets=[sock]))
            for each, (sock, _) in zip(servers, held.listeners, strict=True)
        ]
        while not all(each.started for each in servers) and not any(t.done() for t in tasks):
            await asyncio.sleep(0.005)
        ready(addresses)
        others = [give_back(), *beside()]
        if config.membership:
            drain = partial(_drain, app.state.service.manager)
            others.append(hold_lease(config.membership, config.state_dir, drain))
        running = [asyncio.ensure_future(each) for each in others]
        await asyncio.gather(*tasks)
        for each in running:
            each.cancel()

    import uvloop

    uvloop.run(main())
    return told == [LEAVE]


def _drain(manager: SessionManager, draining: bool) -> bool:
    from ..sessions import liveness

    return liveness.drain(manager, draining=draining)


def _reload(app: FastAPI) -> None:
    """SIGHUP: read again what an administrator may have edited; a mistake in it changes nothing.

    And begin new files of the audit log, for who has just renamed them.
    """
    app.state.service.audit.reopen()

    def read() -> None:
        try:
            app.state.executions.reload()
        except RingfenceError as exc:
            logger.error("the configuration of executions was not changed: %s", exc)

    asyncio.get_running_loop().run_in_executor(None, read)


def _stop(servers: list[uvicorn.Server], told: list[int], signum: int) -> None:
    told.append(signum)
    for each in servers:
        each.force_exit = each.should_exit  # told twice
        each.should_exit = True


def address(listener: socket.socket, tls: bool) -> str:
    """A listening socket as clients write it."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
