"""Contexts: live interpreters in a sandbox whose cells share variables.

A context is an exec that runs a kernel of ours. It needs nothing of a backend but `start`, and a
context on a server is the same exec there: it outlives the client, and the server's restart.
"""

from __future__ import annotations

from .aio import AsyncContext
from .context import LANGUAGES, PYTHON, Context
from .execution import CellError, Execution, Log, Result
from .opened import Contexts

__all__ = [
    "LANGUAGES",
    "PYTHON",
    "AsyncContext",
    "CellError",
    "Context",
    "Contexts",
    "Execution",
    "Log",
    "Result",
]
