"""The contexts that were opened through one sandbox object."""

from __future__ import annotations

import threading

from ..errors import ExecNotFound
from .context import PYTHON
from .frames import JUPYTER

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from .context import Context


class Contexts:
    """Contexts by id, and the default one of each language. Thread-safe.

    Args:
        begin: Begins a context: language, `cwd`, `env`.
        find: Finds a context that somebody else may have begun, by id; None: there is none.
    """

    def __init__(
        self, begin: Callable[..., Context], find: Callable[[str], Context] | None = None
    ) -> None:
        self._begin, self._find = begin, find
        self._lock = threading.Lock()
        self._open: list[Context] = []
        self._defaults: dict[str, Context] = {}

    def open(
        self,
        language: str = PYTHON,
        *,
        kernel: str | None = None,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        id: str | None = None,
    ) -> Context:
        """Begin a context, or find one by id. `kernel` names a kernelspec, in place of a language.

        Raises:
            ExecNotFound: There is none with that id.
            ExecError: Its interpreter did not start.
        """
        if id is not None:
            return self._known(id)
        if kernel is not None:
            language = f"{JUPYTER}{kernel}"
        context = self._begin(language, cwd=cwd, env=env)
        with self._lock:
            self._open = [*(each for each in self._open if each.running), context]
        return context

    def _known(self, id: str) -> Context:
        with self._lock:
            for each in self._open:
                if each.id == id:
                    return each
        if self._find is None:
            raise ExecNotFound(f"no context {id!r} was opened through this sandbox object")
        context = self._find(id)
        with self._lock:
            self._open.append(context)
        return context

    def running(self) -> list[tuple[Context, bool]]:
        """Return those that run, and of each whether it is the default one of its language."""
        with self._lock:
            defaults = list(self._defaults.values())
            each = [*defaults, *(one for one in self._open if one not in defaults)]
        return [(one, one in defaults) for one in each if one.running]

    def add(self, context: Context, *, is_default: bool) -> None:
        """Take a context that somebody else has begun."""
        with self._lock:
            self._open.append(context)
            if is_default:
                self._defaults[context.language] = context

    def default(self, language: str = PYTHON) -> Context:
        """The context of `run_code`, begun when first asked for and again after its end."""
        with self._lock:
            context = self._defaults.get(language)
            if context is None or not context.running:
                context = self._begin(language)
                self._defaults[language] = context
            return context
