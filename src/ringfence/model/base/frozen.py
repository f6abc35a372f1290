"""A mapping of strings that cannot change, so that what was validated is what is used."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn


class FrozenMap(dict[str, str]):
    """A hashable, picklable, read-only dict; compares and serialises like a plain one."""

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise TypeError("this mapping is part of a frozen request; make a new one instead")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[type[FrozenMap], tuple[dict[str, str]]]:
        # The default way fills an empty instance item by item, which we refuse.
        return FrozenMap, (dict(self),)

    def __copy__(self) -> FrozenMap:
        return self

    def __deepcopy__(self, memo: object) -> FrozenMap:
        return self
