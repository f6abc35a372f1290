"""Many threads that use a new backend at the same moment."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ringfence.backends.native.backend import NativeBackend
from ringfence.errors import InvalidRequest
from ringfence.model.spec import SandboxSpec

_THREADS = 8


def test_one_id_is_one_sandbox(tmp_path: Path) -> None:
    backend = NativeBackend(state_dir=str(tmp_path))
    together = threading.Barrier(_THREADS)

    def make() -> str:
        together.wait()
        try:
            backend.provision(SandboxSpec(id="mine"))
        except InvalidRequest as exc:
            return f"refused: {exc.field}"
        return "made"

    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            results = sorted(each.result() for each in [pool.submit(make) for _ in range(_THREADS)])
        assert ["made", *["refused: id"] * (_THREADS - 1)] == results
    finally:
        backend.close()


def test_every_sandbox_has_ids_of_its_own(tmp_path: Path) -> None:
    backend = NativeBackend(state_dir=str(tmp_path))
    together = threading.Barrier(_THREADS)

    def make() -> int:
        together.wait()
        return backend.provision(SandboxSpec()).first_host_id

    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            first_ids = [each.result() for each in [pool.submit(make) for _ in range(_THREADS)]]
        # An ordinary user has one uid to give: then it is 0 for all of them.
        assert {0} == set(first_ids) or _THREADS == len(set(first_ids))
        assert _THREADS == len(backend._live)
    finally:
        backend.close()
