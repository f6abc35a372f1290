"""Displays that E2B's Python has beyond ours. Runs inside the sandbox, as a hidden cell of each context.

Modules are changed when the program imports them: to import them here would cost each context a second.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import sys
from collections.abc import Callable
from typing import Any

RAW = "e2b/raw"  # a value that has no text of its own


class _Raw:
    """A bundle of MIME types that is shown as it is."""

    def __init__(self, bundle: Any) -> None:
        self._bundle = {RAW: "", **bundle}

    def _repr_mimebundle_(self, **_options: Any) -> Any:
        return self._bundle


def _display() -> Any:
    import builtins

    return vars(builtins)["display"]  # the kernel's


def _of_ipython(module: Any) -> None:
    show = _display()

    def shown(*values: Any, raw: bool = False, **_options: Any) -> None:
        show(*(_Raw(each) if raw and isinstance(each, dict) else each for each in values))

    module.display = shown


def _of_pandas(module: Any) -> None:
    def bundle(self: Any, **_options: Any) -> Any:
        data = json.loads(self.to_json(orient="split", date_format="iso", default_handler=str))
        rows = data["data"]
        columns = {str(name): [row[at] for row in rows] for at, name in enumerate(data["columns"])}
        return {"e2b/data": json.dumps(columns)}

    module.DataFrame._repr_mimebundle_ = bundle


def _of_pillow(module: Any) -> None:
    show, image = _display(), module.Image
    save = image.save

    def saved(self: Any, target: Any, *args: Any, **options: Any) -> None:
        save(self, target, *args, **options)
        if isinstance(target, (str, os.PathLike)):
            show(self)

    image.save, image.show = saved, lambda self, *_args, **_options: show(self)


_CHANGES: dict[str, Callable[[Any], None]] = {
    "IPython.core.display_functions": _of_ipython,
    "pandas": _of_pandas,
    "PIL.Image": _of_pillow,
}


class _Finder:
    """Changes the modules of `_CHANGES` after they have been loaded."""

    @staticmethod
    def find_spec(name: str, path: Any = None, _target: Any = None) -> Any:
        change = _CHANGES.pop(name, None)
        if change is None:
            return None
        spec: Any = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            try:
                change(module)
            except Exception:  # noqa: BLE001  another version: it shows what ours shows
                pass

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
