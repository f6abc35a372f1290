"""Notes of E2B's API: what it remembers of a sandbox, in its session's metadata beside the client's own.

From them, and from its id, programs inside learn of their sandbox: by variables of commands, and by files.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, replace

from ..errors import InvalidRequest, RingfenceError
from .settings import IDENTITY

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..sessions.live import Live

TEAM = "ringfence"
"""E2B's name for the owner; it is also the first part of a named snapshot's id."""
_NAME = "e2b"

logger = logging.getLogger("ringfence.e2b")


@dataclass(frozen=True)
class Notes:
    """Notes on one sandbox.

    Attributes:
        template: As the client named it.
        key: Id of the API key that created it; empty on the unix socket.
        auto_resume: Whether a request to a paused sandbox resumes it.
        keeps_memory: Whether its end of life pauses it with its memory.
        is_public: Whether its ports are open without a token.
        host_mask: What requests to its ports say as `Host`, with `${PORT}`; empty: as they came.
        https_ports: Ports whose servers speak HTTPS.
        internet: What the client said about internet access; None: nothing.
        boots: How often it was started anew from its files, where it has no boot id of its own.
    """

    template: str = "base"
    key: str = ""
    auto_resume: bool = False
    keeps_memory: bool = True
    is_public: bool = True
    host_mask: str = ""
    https_ports: Sequence[int] = ()
    internet: bool | None = None
    boots: int = 0

    def written(self, metadata: Mapping[str, str]) -> dict[str, str]:
        """The session's metadata: the client's, and these notes.

        Raises:
            InvalidRequest: The client uses the name that the notes have.
        """
        if _NAME in metadata:
            raise InvalidRequest(f"the name {_NAME!r} is reserved", field="metadata")
        return {**metadata, _NAME: json.dumps(asdict(self), separators=(",", ":"))}


def notes_of(metadata: Mapping[str, str]) -> Notes:
    """Read the notes; a sandbox of `/v1` has none, and its ports are not public."""
    try:
        form = json.loads(metadata[_NAME])
        if not isinstance(form, dict):  # a client of `/v1` writes what it likes
            return Notes(is_public=False)
        found = Notes(**{key: form[key] for key in form if key in Notes.__annotations__})
        return replace(found, key=str(found.key), template=str(found.template))
    except (KeyError, ValueError, TypeError, RecursionError):
        return Notes(is_public=False)  # nothing is opened for it


def client_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in metadata.items() if key != _NAME}


def own_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in metadata.items() if key not in (_NAME, "name")}


def variables(live: Live) -> dict[str, str]:
    """Return the variables that tell each command which sandbox it is in."""
    return {
        "E2B_SANDBOX": "true",
        "E2B_SANDBOX_ID": live.sandbox_id,
        "E2B_TEAM_ID": TEAM,
        "E2B_TEMPLATE_ID": notes_of(live.metadata).template,
    }


def write_files(live: Live) -> None:
    """Write the same as files, for programs whose environment comes from elsewhere, and for copies.

    A copied process has the variables of the sandbox that it was copied from. In an image, another file
    can be in the way: the log has the reason then.
    """
    try:
        for name, value in variables(live).items():
            live.sandbox.files.write(f"{IDENTITY}/.{name}", value, parents=True)
    except RingfenceError as exc:
        logger.warning("files in %s of %s were not written: %s", IDENTITY, live.sandbox_id, exc)
