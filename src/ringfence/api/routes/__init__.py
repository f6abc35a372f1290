"""The routes, a file for each model. What is added here is served."""

from __future__ import annotations

from . import (
    attach,
    contexts,
    events,
    execs,
    execution,
    files,
    forks,
    health,
    keys,
    mounts,
    network,
    output,
    pools,
    ports,
    sandboxes,
    sessions,
    snapshots,
    templates,
    trees,
)

ROUTERS = (
    health.router,
    sandboxes.router,
    execs.router,
    output.router,
    contexts.router,
    attach.router,
    ports.router,
    execution.router,
    files.router,
    trees.router,
    network.router,
    mounts.router,
    snapshots.router,
    templates.router,
    templates.uploads,
    forks.router,
    sessions.router,
    pools.router,
    events.router,
    keys.router,
)
