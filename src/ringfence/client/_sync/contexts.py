"""Contexts of a sandbox of a server: the counterpart of `_async.contexts`.

Kept separate: written by hand, while the files beside it are made.
"""

from __future__ import annotations

from ...contexts import Contexts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ...contexts import Context
    from .sandbox import RemoteSandbox

_CONTEXT_BYTES = 64 << 20  # of a context's output, on the server's disk


def contexts_of(sandbox: RemoteSandbox) -> Contexts:
    """The contexts that were opened through this object."""
    if sandbox._contexts is None:
        sandbox._contexts = Contexts(sandbox, find=sandbox.process, kept_bytes=_CONTEXT_BYTES)
    return sandbox._contexts


def open_context(sandbox: RemoteSandbox, language: str, **options: Any) -> Context:
    """Begin or find a context of a sandbox."""
    return contexts_of(sandbox).open(language, **options)


def default_context(sandbox: RemoteSandbox, language: str) -> Context:
    """The context of `run_code`."""
    return contexts_of(sandbox).default(language)
