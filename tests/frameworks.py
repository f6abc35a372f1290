"""Stand-ins for agent frameworks: an adapter that is imported over them runs without its framework."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_ADAPTERS = "ringfence.integrations."


class _Framework(ModuleType):
    """A module that has a class of any name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {})
        setattr(self, name, made)
        return made


@contextmanager
def adapter(name: str, frameworks: Mapping[str, Mapping[str, Any]]) -> Iterator[Any]:
    """The adapter of that name, over modules that have what is given here, or an empty class.

    Nothing of it is left among the modules that are known afterwards.
    """
    before = dict(sys.modules)
    for each in [each for each in before if each.startswith(_ADAPTERS)]:
        del sys.modules[each]  # those that others have imported stay theirs
    for module, content in frameworks.items():
        made = _Framework(module)
        made.__path__ = []
        for key, value in content.items():
            setattr(made, key, value)
        sys.modules[module] = made
    try:
        yield importlib.import_module(f"{_ADAPTERS}{name}")
    finally:
        new = [each for each in sys.modules if each not in before]
        for each in new:
            if each in frameworks or each.startswith(_ADAPTERS):
                del sys.modules[each]
        sys.modules.update(before)
