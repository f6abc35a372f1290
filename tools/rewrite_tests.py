"""Compile tests as pytest loads them: `python rewrite_tests.py DIRECTORY...`.

Pytest rewrites each assertion, and keeps the result beside the source. Passes that begin at once
would each rewrite every file that they collect, a quarter of a minute of a processor each.
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from _pytest.assertion.rewrite import (
    PYC_TAIL,
    _read_pyc,
    _rewrite_test,
    _write_pyc,
    get_cache_dir,
)


def paths_below(directory: Path) -> list[Path]:
    """Find the files that pytest rewrites in a tree of tests, or all of a tree without any."""
    tests = [*directory.rglob("test_*.py"), *directory.rglob("conftest.py")]
    return tests or [*directory.rglob("*.py")]


def rewrite(path: Path) -> None:
    pyc = get_cache_dir(path) / (path.stem + PYC_TAIL)
    if _read_pyc(path, pyc) is None:
        pyc.parent.mkdir(parents=True, exist_ok=True)
        source_hash, code = _rewrite_test(path, None)  # type: ignore[arg-type]
        _write_pyc(None, code, source_hash, pyc)  # type: ignore[arg-type]


def main(directories: list[str]) -> None:
    paths = [path for name in directories for path in paths_below(Path(name).resolve())]
    with ProcessPoolExecutor() as pool:
        list(pool.map(rewrite, paths, chunksize=16))


if __name__ == "__main__":
    main(sys.argv[1:])
