"""How the agent's modules come to be where there is no file of theirs: from memory."""

from __future__ import annotations

import sys
from _frozen_importlib import (
    ModuleSpec,  # importlib.machinery would read files, which cost most inside
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import CodeType, ModuleType
    from typing import Any


class Loader:
    """Finds and loads modules whose code came along.

    Args:
        modules: Name to whether it is a package, and its code.
    """

    def __init__(self, modules: Mapping[str, tuple[bool, CodeType]]) -> None:
        self._modules = modules

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See importlib.abc.MetaPathFinder."""
        del path, target
        if name not in self._modules:
            return None
        loader: Any = self
        return ModuleSpec(name, loader, is_package=self._modules[name][0])

    def create_module(self, spec: ModuleSpec) -> None:
        """As usual: see importlib.abc.Loader."""

    def exec_module(self, module: ModuleType) -> None:
        exec(self._modules[module.__name__][1], module.__dict__)


def install(modules: Mapping[str, tuple[bool, CodeType]]) -> None:
    """From now on `import` finds these first."""
    sys.meta_path.insert(0, Loader(modules))
