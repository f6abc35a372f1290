"""Contexts of a sandbox of a server: each is driven by the client that does not await, in a thread."""

from __future__ import annotations

from functools import partial

from ...contexts import AsyncContext
from .pauses import in_own_thread

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .._sync.sandbox import RemoteSandbox
    from .sandbox import AsyncRemoteSandbox


async def open_context(sandbox: AsyncRemoteSandbox, language: str, **options: Any) -> AsyncContext:
    """Begin or find a context of a sandbox."""
    begin = partial(_twin_of(sandbox).context, language, **options)
    return AsyncContext(await in_own_thread(begin), in_own_thread)


async def default_context(sandbox: AsyncRemoteSandbox, language: str) -> AsyncContext:
    """The context of `run_code`."""
    from .._sync.contexts import default_context

    begin = partial(default_context, _twin_of(sandbox), language)
    return AsyncContext(await in_own_thread(begin), in_own_thread)


def _twin_of(sandbox: AsyncRemoteSandbox) -> RemoteSandbox:
    """The same sandbox for a thread, with the same contexts."""
    from .._sync.contexts import contexts_of
    from .._sync.sandbox import RemoteSandbox

    its_twin = RemoteSandbox(sandbox._transport.blocking, sandbox._view, sandbox.spec)
    its_twin._carried = sandbox._carried
    if sandbox._contexts is None:
        sandbox._contexts = contexts_of(its_twin)
    its_twin._contexts = sandbox._contexts
    return its_twin
