"""A server client's request to run a command."""

from __future__ import annotations

from ..base import checks, jsonform
from ..base.model import Model
from ..base.record import dataclass
from .exec import ExecRequest, terminal_size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Self

OWN = ("wait", "wait_s")  # beside the fields of the command
_SHORT = ("script", "tty", "rows", "cols")
ROWS, COLUMNS = 24, 80
_LONGEST_WAIT_S = 86_400.0


@dataclass(frozen=True, eq=False, repr=False)
class StartRequest(Model):
    """A command, and whether to wait for it. In JSON the request's fields are its own.

    Attributes:
        wait: Answer when it has ended, with its output, rather than when it has begun.
        wait_s: With `wait`, answer after so long in any case; the command goes on.
    """

    request: ExecRequest
    wait: bool = False
    wait_s: float | None = None

    def __post_init__(self) -> None:
        checks.instance(self.request, "request", ExecRequest)
        checks.flag(self.wait, "wait")
        if self.wait_s is not None:
            put = object.__setattr__
            put(self, "wait_s", checks.number(self.wait_s, "wait_s", 0.0, _LONGEST_WAIT_S))

    @property
    def is_secret(self) -> bool:
        """True if the request holds values never shown with the exec: environment or input."""
        return bool(self.request.env) or self.request.stdin is not None

    def to_json(self) -> dict[str, Any]:
        """The JSON object."""
        return {**self.request.to_json(), "wait": self.wait, "wait_s": self.wait_s}

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Read `to_json`'s form, or a shorter one.

        `script` is short for the `argv` of a POSIX shell; `tty` with `rows` and `cols` for `pty`.
        """
        given = jsonform.json_object(data, cls.__name__)
        own = {name: given.pop(name) for name in OWN if name in given}
        if "script" in given:
            if "argv" in given:
                checks.refuse("script", "cannot be given together with argv")
            given["argv"] = ["sh", "-c", checks.text(given.pop("script"), "script")]
        wants_tty = checks.flag(given.pop("tty", False), "tty")
        size = terminal_size([given.pop("rows", ROWS), given.pop("cols", COLUMNS)], "rows")
        if wants_tty and given.get("pty") is None:
            given["pty"] = size
        if "argv" not in given:
            try:
                ExecRequest.from_json({**given, "argv": ["true"]})
            except jsonform.UnknownKey as exc:
                hint = 'a command is argv, as ["ls", "-l"], or script, lines for a shell'
                checks.refuse(exc.field, f"unknown key in {cls.__name__}", hint)
        if not isinstance(given.get("argv"), list | tuple):
            said = (
                f"must be a list, not {type(given['argv']).__name__}"
                if "argv" in given
                else "missing"
            )
            checks.refuse("argv", said, 'as ["ls", "-l"]; or give `script`, lines for a shell')
        request = jsonform.widened(ExecRequest.from_json, given, cls.__name__, (*OWN, *_SHORT))
        return cls(request, **own)
