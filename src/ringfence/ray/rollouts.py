"""`map_sandboxes`: a function over many items, each with a sandbox of its own, on all nodes."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from ..errors import InvalidRequest, RingfenceError, SandboxLost
from ..model.base import checks
from .sandbox import Sandbox

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .sandbox import CreateParts


_MOST_AT_ONCE, _MOST_RETRIES, _MOST_CPUS = 1_000_000, 1_000_000, 1e6


@dataclass(frozen=True)
class Progress:
    """How far a `map_sandboxes` is.

    Attributes:
        done: Items with a result.
        failed: Those of them whose result is an error.
        retried: Attempts that were repeated.
        total: All items.
    """

    done: int
    failed: int
    retried: int
    total: int


def map_sandboxes(
    fn: Callable[[Sandbox, Any], Any],
    items: Iterable[Any],
    *,
    concurrency: int | None = None,
    retries: int = 2,
    retry_on: type[Exception] | tuple[type[Exception], ...] = (),
    progress: Callable[[Progress], None] | None = None,
    results: str = "list",
    on_error: str = "raise",
    sandbox: CreateParts | None = None,
    num_cpus: float = 1.0,
) -> Any:
    """Call `fn(sandbox, item)` for each item, in Ray tasks, each with a new sandbox.

    Args:
        fn: Must be picklable; it runs where its sandbox is.
        items: What it is called with.
        concurrency: Items at once; None is one for each processor that the cluster has now.
        retries: How often an item is tried again whose node, process or sandbox was lost, or whose
            error says that it is retryable.
        retry_on: Errors of `fn` that are tried again, too: a class or several.
        progress: Called in this process after each item.
        results: `list`, in the order of `items`, or `dataset`: a `ray.data` dataset of
            `{"item": …, "result": …, "error": …}`.
        on_error: `raise` the first error and cancel the rest, or `return` errors in place of results.
        sandbox: Options of `Sandbox.create`.
        num_cpus: What Ray reserves for each item; one node must have it. If none has, a warning
            says so, and the items wait for one that an autoscaler adds.

    Raises:
        InvalidRequest: An option is not one of those above.
        Exception: With `on_error="raise"`, what `fn` raised.
    """
    for name, value, known in (
        ("results", results, ("list", "dataset")),
        ("on_error", on_error, ("raise", "return")),
    ):
        if value not in known:
            raise InvalidRequest(f"{value!r} is not one of {', '.join(known)}", field=name)
    # With less than one at once it would wait for ever.
    if concurrency is not None:
        checks.integer(concurrency, "concurrency", 1, _MOST_AT_ONCE)
    checks.integer(retries, "retries", 0, _MOST_RETRIES)
    checks.number(num_cpus, "num_cpus", 0.0, _MOST_CPUS)
    for each in _classes(retry_on):
        if not (isinstance(each, type) and issubclass(each, Exception)):
            raise InvalidRequest(f"{each!r} is no class of exceptions", field="retry_on")
    if progress is not None and not callable(progress):
        raise InvalidRequest("is not callable", field="progress")
    _warn_without_node(num_cpus)
    options = {**checks.instance({} if sandbox is None else sandbox, "sandbox", dict)}
    work = _Work(fn, [*items], options, num_cpus, retries, _classes(retry_on))
    work.run(
        _processors() if concurrency is None else concurrency,
        progress,
        is_strict=on_error == "raise",
    )
    if results == "list":
        return [work.outcomes[place] for place in range(len(work.items))]
    import ray.data

    return ray.data.from_items([work.row(place) for place in range(len(work.items))])


def _warn_without_node(num_cpus: float) -> None:
    sizes = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
    if num_cpus > (most := max(sizes, default=0.0)):
        warnings.warn(
            f"num_cpus: no node has {num_cpus:g} CPUs, the largest has {most:g}: "
            "the items wait until Ray adds one",
            stacklevel=3,
        )


def _classes(given: Any) -> tuple[Any, ...]:
    return (given,) if isinstance(given, type) else checks.items(given, "retry_on")


class _Work:
    """The items, and the tasks that run."""

    def __init__(
        self,
        fn: Any,
        items: list[Any],
        options: dict[str, Any],
        num_cpus: float,
        retries: int,
        retry_on: tuple[type[Exception], ...],
    ) -> None:
        self.items, self.outcomes = items, dict[int, Any]()
        self._retries, self._retry_on = retries, retry_on
        # Sent once, not with each task. Ray's own retries would not be counted: none.
        self._common = ray.put((fn, options))
        self._task = ray.remote(num_cpus=num_cpus, max_retries=0)(_one)
        self._tries = [0] * len(items)
        self._running: dict[Any, int] = {}

    def run(
        self, concurrency: int, progress: Callable[[Progress], None] | None, *, is_strict: bool
    ) -> None:
        waiting = [*range(len(self.items) - 1, -1, -1)]
        failed = retried = 0
        try:
            while waiting or self._running:
                while waiting and len(self._running) < concurrency:
                    place = waiting.pop()
                    self._running[self._task.remote(self._common, self.items[place])] = place
                for done in ray.wait([*self._running], num_returns=1)[0]:
                    place = self._running.pop(done)
                    outcome = _outcome_of(done)
                    if isinstance(outcome, _Failure):
                        if self._may_retry(outcome.error, place):
                            retried += 1
                            waiting.append(place)
                            continue
                        if is_strict:
                            raise outcome.error
                        failed += 1
                        outcome = outcome.error
                    self.outcomes[place] = outcome
                    if progress is not None:
                        progress(Progress(len(self.outcomes), failed, retried, len(self.items)))
        finally:
            for each in self._running:
                ray.cancel(each, force=True)

    def row(self, place: int) -> dict[str, Any]:
        """The row of an item in a dataset."""
        outcome = self.outcomes[place]
        is_error = isinstance(outcome, Exception)
        return {
            "item": self.items[place],
            "result": None if is_error else outcome,
            "error": f"{type(outcome).__name__}: {outcome}" if is_error else None,
        }

    def _may_retry(self, error: Exception, place: int) -> bool:
        self._tries[place] += 1
        if self._tries[place] > self._retries:
            return False
        if isinstance(error, RingfenceError):
            return error.retryable or isinstance(error, (SandboxLost, *self._retry_on))
        return isinstance(error, (RayError, *self._retry_on))


@dataclass(frozen=True)
class _Failure:
    error: Exception


def _one(common: tuple[Any, dict[str, Any]], item: Any) -> Any:
    """The task."""
    fn, options = common
    with Sandbox.create(**options) as sandbox:
        return fn(sandbox, item)


def _outcome_of(reference: Any) -> Any:
    try:
        return ray.get(reference)
    except RayTaskError as exc:
        cause = exc.cause
        return _Failure(cause if isinstance(cause, Exception) else exc)
    except RayError as exc:
        return _Failure(exc)


def _processors() -> int:
    return max(1, int(ray.cluster_resources().get("CPU", 1)))
