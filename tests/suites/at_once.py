"""Whether many sandboxes run at once: each waits inside for all the others.

One that came only after another had ended would wait for ever.
"""

from __future__ import annotations

from pathlib import Path

CROWD = 50
_MEET = "touch /meet/{number}; until [ $(ls /meet | wc -l) -ge {crowd} ]; do sleep 0.05; done"


def mount(place: Path) -> str:
    """The directory where they meet, as a mount."""
    place.chmod(0o777)
    return f"{place}:/meet:rw"


def script(number: int) -> str:
    """What the sandbox of that number runs."""
    return _MEET.format(number=number, crowd=CROWD)
