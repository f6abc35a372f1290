"""The execution service: one command, one sandbox, one result that is kept."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .service import ExecutionService as ExecutionService

__all__ = ["ExecutionService"]


def __getattr__(name: str) -> object:
    """Import the class on first use (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .service import ExecutionService

    return ExecutionService
