"""Facts by which programs inside learn of their sandbox: variables of commands, and files.

Kept separate: the control plane, commands and the interpreter all tell them.
"""

from __future__ import annotations

from contextlib import suppress

from ..errors import RingfenceError
from .notes import notes_of
from .settings import IDENTITY

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..sessions.live import Live

TEAM = "ringfence"
"""E2B's name for the owner; it is also the first part of a named snapshot's id."""


def variables(live: Live) -> dict[str, str]:
    """Return the variables that each command gets."""
    return {
        "E2B_SANDBOX": "true",
        "E2B_SANDBOX_ID": live.sandbox_id,
        "E2B_TEAM_ID": TEAM,
        "E2B_TEMPLATE_ID": notes_of(live.metadata).template,
    }


def write_files(live: Live) -> None:
    """Write the same as files, for programs whose environment comes from elsewhere, and for copies.

    A copied process has the variables of the sandbox that it was copied from.
    """
    with suppress(RingfenceError):  # in an image, another file can be in the way
        for name, value in variables(live).items():
            live.sandbox.files.write(f"{IDENTITY}/.{name}", value, parents=True)
