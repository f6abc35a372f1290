"""Tests that are only in a project's source distribution, pinned by its hash and never kept here."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType


def root_of(project: str) -> Path:
    """Where its source distribution was unpacked by `tools/suites.sh`."""
    (root,) = Path(os.environ["RINGFENCE_SUITE_SOURCES"]).glob(f"{project.replace('-', '_')}-*/")
    return root


def module_of(project: str, path: str, **missing: ModuleType) -> ModuleType:
    """A module of its tests, imported as part of the package that holds it.

    Args:
        missing: Modules beside it that the distribution lacks, dots written as two underscores.
    """
    root = root_of(project)
    # Under a name of its own: there is a package `tests` here already.
    package = f"{root.name.split('-')[0]}_sources"
    if package not in sys.modules:
        made = ModuleType(package)
        made.__path__ = [str(root)]
        sys.modules[package] = made
    for name, module in missing.items():
        sys.modules[f"{package}.{name.replace('__', '.')}"] = module
    return importlib.import_module(f"{package}.{path.removesuffix('.py').replace('/', '.')}")


def beside(project: str, module: str) -> ModuleType:
    """A module of its tests that imports others of them as `tests.`, which here are found behind ours."""
    import tests

    theirs = str(root_of(project) / "tests")
    if theirs not in tests.__path__:
        tests.__path__.append(theirs)
    return importlib.import_module(f"tests.{module}")
