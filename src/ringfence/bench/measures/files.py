"""files: one large file in and out, beside `cp`; a tree of small ones, beside `tar | tar`."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import tempfile
import time

from ...sandbox import Sandbox
from ..rows import HIGHER, VALUE, Row, Target
from ..turns import OURS, take_turns

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..settings import Settings
    from ..turns import Samples

_MUST = 400.0
_MB = 1_000_000
_CP = "cp"
_PIECE = 1 << 20
_TAR, _SMALL = "tar | tar", 650


def measure(settings: Settings) -> Iterator[Row]:
    """MB/s; what is aimed for is the speed of `cp` in the same minute."""
    size = settings.file_bytes
    with tempfile.TemporaryDirectory(prefix="ringfence-bench-", dir=place_for(size)) as directory:
        source, target = f"{directory}/source", f"{directory}/target"
        _fill(source, size)
        with Sandbox.create() as sandbox:
            yield _row("in", size, _in(sandbox, source, target, settings.file_rounds))
            yield _row("out", size, _out(sandbox, source, target, settings.file_rounds))
            yield from measure_tree(sandbox, "files", settings)


def measure_tree(sandbox: Sandbox, measure: str, settings: Settings) -> Iterator[Row]:
    """Seconds for a tree of small files, into a sandbox and out of it."""
    count, rounds = settings.tree_files, settings.slow_rounds
    with tempfile.TemporaryDirectory(prefix="ringfence-bench-") as directory:
        source, target = f"{directory}/source", f"{directory}/target"
        for number in range(count):
            os.makedirs(f"{source}/{number // 100}", exist_ok=True)
            with open(f"{source}/{number // 100}/{number}", "wb") as file:
                file.write(os.urandom(_SMALL))

        def upload() -> float:
            return timed(
                lambda: sandbox.files.upload(source, "tree"),
                lambda: sandbox.files.remove("tree", recursive=True),
            )

        def download() -> float:
            return timed(
                lambda: sandbox.files.download("kept", target), lambda: shutil.rmtree(target)
            )

        def tar() -> float:
            os.mkdir(target)
            script = f"tar -C {source} -c . | tar -C {target} -x"
            return timed(
                lambda: subprocess.run(["sh", "-c", script], check=True),
                lambda: shutil.rmtree(target),
            )

        sandbox.files.upload(source, "kept")
        for direction, ours in (("in", upload), ("out", download)):
            samples = take_turns({OURS: ours, _TAR: tar}, rounds, warm_up=1)
            yield Row(
                measure,
                f"{count:,} files of {_SMALL} bytes {direction}",
                "ms",
                samples.median_ms(OURS),
                _TAR,
                samples.median_ms(_TAR),
                Target(must=1.5, aim=1.0),
                rounds,
            )


def _in(sandbox: Sandbox, source: str, target: str, rounds: int) -> Samples:
    def upload() -> float:
        return timed(
            lambda: sandbox.files.upload(source, "copy"), lambda: sandbox.files.remove("copy")
        )

    samples = take_turns({OURS: upload, _CP: lambda: _cp(source, target)}, rounds, warm_up=1)
    sandbox.files.upload(source, "copy")
    return samples


def _out(sandbox: Sandbox, source: str, target: str, rounds: int) -> Samples:
    def download() -> float:
        return timed(lambda: sandbox.files.download("copy", target), lambda: os.unlink(target))

    return take_turns({OURS: download, _CP: lambda: _cp(source, target)}, rounds, warm_up=1)


def _cp(source: str, target: str) -> float:
    # A reflink copies nothing, and crossing into a sandbox it cannot be had.
    command = ["cp", "--reflink=never", source, target]
    return timed(lambda: subprocess.run(command, check=True), lambda: os.unlink(target))


def timed(work: Callable[[], object], undo: Callable[[], object]) -> float:
    """Seconds of `work`; every copy is a new file, and none stays."""
    started = time.perf_counter()
    work()
    elapsed = time.perf_counter() - started
    undo()
    return elapsed


def _row(direction: str, size: int, samples: Samples) -> Row:
    rates = {name: _rate(size, seconds) for name, seconds in samples.seconds.items()}
    what = f"one file of {size >> 20} MiB {direction}"
    target = Target(VALUE, HIGHER, must=_MUST, aim=rates[_CP])
    return Row(
        "files", what, "MB/s", rates[OURS], _CP, rates[_CP], target, len(samples.seconds[OURS])
    )


def _rate(size: int, seconds: list[float]) -> float | None:
    return size / statistics.median(seconds) / _MB if seconds else None


def _fill(path: str, size: int) -> None:
    """Bytes that no file system can compress or leave out."""
    piece = os.urandom(_PIECE)
    with open(path, "wb") as file:
        for _ in range(size // _PIECE):
            file.write(piece)


def place_for(size: int) -> str:
    """Where three copies fit: the temporary directory, or where temporary files may be large."""
    for place in (tempfile.gettempdir(), "/var/tmp"):
        if os.path.isdir(place) and shutil.disk_usage(place).free > 3 * size:
            return place
    raise OSError(28, f"no room for three files of {size >> 20} MiB", tempfile.gettempdir())
