"""The routes, a file for each noun. What is added here is served."""

from __future__ import annotations

from . import (
    events,
    execs,
    execution,
    health,
    keys,
    mounts,
    network,
    output,
    pools,
    sandboxes,
    sessions,
    snapshots,
)

ROUTERS = (
    health.router,
    sandboxes.router,
    execs.router,
    output.router,
    execution.router,
    network.router,
    mounts.router,
    snapshots.router,
    sessions.router,
    pools.router,
    events.router,
    keys.router,
)
