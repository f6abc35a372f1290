"""snapshots: restore and fork a large tree, beside an empty create; save it again after a small change."""

from __future__ import annotations

from ...sandbox import Sandbox
from ..rows import VALUE, Row, Target
from ..turns import OURS, take_turns
from .files import timed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..settings import Settings
    from ..turns import Samples

_SIZE = 28_000  # bytes of a file: 10,000 of them are 280 MB
_CHANGED = 1_000_000
_CREATE = "empty create"
_FILL = """
import os
for number in range({count}):
    os.makedirs(f"tree/{{number // 100}}", exist_ok=True)
    with open(f"tree/{{number // 100}}/{{number}}", "wb") as file:
        file.write(os.urandom({size}))
"""


def measure(settings: Settings) -> Iterator[Row]:
    """Milliseconds; what is made is ended outside of them."""
    count, rounds = settings.tree_files, settings.slow_rounds
    told = f"{count:,} files, {count * _SIZE // 1_000_000} MB"
    with Sandbox.create() as source:
        source.exec(["python3", "-c", _FILL.format(count=count, size=_SIZE)])
        saved = source.snapshot()
    try:

        def create() -> float:
            return _life(Sandbox.create)

        def restore() -> float:
            return _life(lambda: Sandbox.restore(saved.id))

        samples = take_turns({OURS: restore, _CREATE: create}, rounds)
        yield _beside_create(f"restore of {told}", samples, Target(must=1.5, aim=1.1))
        with Sandbox.restore(saved.id) as sandbox:
            script = f"head -c {_CHANGED} /dev/urandom > tree/changed"
            sandbox.shell(script)

            def save() -> float:
                made: list[str] = []
                return timed(
                    lambda: made.append(sandbox.snapshot().id),
                    lambda: Sandbox.delete_snapshot(made[0]),
                )

            def fork() -> float:
                return _life(lambda: sandbox.fork()[0])

            samples = take_turns({OURS: save}, rounds)
            target = Target(VALUE, must=50.0, aim=10.0)
            what = "snapshot of it after 1 MB has changed"
            ours = samples.median_ms(OURS)
            yield Row("snapshots", what, "ms", ours, target=target, samples=rounds)
            samples = take_turns({OURS: fork, _CREATE: create}, rounds)
            yield _beside_create("fork of its files then", samples, Target())
    finally:
        Sandbox.delete_snapshot(saved.id)


def _life(make: Callable[[], Sandbox]) -> float:
    made: list[Sandbox] = []

    def end() -> None:
        made[0].terminate()

    return timed(lambda: made.append(make()), end)


def _beside_create(what: str, samples: Samples, target: Target) -> Row:
    ours, theirs = (samples.median_ms(name) for name in (OURS, _CREATE))
    count = len(samples.seconds[OURS])
    return Row("snapshots", what, "ms", ours, _CREATE, theirs, target, count)
