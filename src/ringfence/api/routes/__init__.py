"""The routes, a file for each noun. What is added here is served."""

from __future__ import annotations

from . import execs, execution, health, sandboxes

ROUTERS = (health.router, sandboxes.router, execs.router, execution.router)
