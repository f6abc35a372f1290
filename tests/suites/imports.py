"""Whether an adapter is cheap to import, told by what it imports: times are for `ringfence bench adapters`."""

from __future__ import annotations

import sys

from ringfence.bench.measures import adapters

_MOST = 120


def assert_cheap(name: str) -> None:
    """Beyond the framework only ours and the standard library's come, and few of them."""
    _ms, modules = adapters.cost(name)
    others = {module.partition(".")[0] for module in modules} - sys.stdlib_module_names

    assert f"ringfence.integrations.{name}" in modules
    assert {"ringfence"} == others, modules
    assert len(modules) <= _MOST, modules
