"""Pool configuration changed at run time; it survives a restart of the manager."""

from __future__ import annotations

import json

from ...errors import RingfenceError
from ..config import PoolConfig

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ...store.store import Store

_POOL = "pool"


def pool_of(store: Store, configured: PoolConfig) -> PoolConfig:
    """The pool that was last asked for, until the configuration itself says something new."""
    text = store.setting(_POOL)
    if text is None:
        return configured
    try:
        found = json.loads(text)
        if found["instead_of"] == _form(configured):
            return PoolConfig.from_json(found["config"])
    except (RingfenceError, ValueError, KeyError, TypeError):
        pass  # of a version that wrote it otherwise: what is configured holds
    return configured


def keep_pool(store: Store, config: PoolConfig, configured: PoolConfig) -> None:
    """Write it down.

    Raises:
        StorageFull: There is no room; nothing was written.
    """
    text = json.dumps({"config": _form(config), "instead_of": _form(configured)})
    store.set_setting(_POOL, text)


def _form(config: PoolConfig) -> object:
    """As it comes back: JSON has no tuples."""
    return json.loads(json.dumps(config.to_json()))
