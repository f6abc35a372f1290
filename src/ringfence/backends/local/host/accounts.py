"""Users by the names that a sandbox itself has for them: its own /etc/passwd, of which nothing is believed."""

from __future__ import annotations

from ....errors import FileError, InvalidRequest, Unsupported
from ....model.base.record import dataclass
from ....model.spec import OWN_ROOT
from . import identity
from .facts import host

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ....model.spec import SandboxSpec
    from ...protocol import BackendFiles

_PASSWD = "/etc/passwd"
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, eq=False, repr=False)
class Account:
    """User of an exec.

    Attributes:
        uid: Inside; the group has the same number.
        env: Variables that a login would set; empty for users that every sandbox has.
    """

    uid: int
    env: dict[str, str]


def find(files: BackendFiles, user: str) -> Account:
    """The account of a name or number, looked up inside only where it is none of ours.

    Raises:
        InvalidRequest: Nobody there has that name.
    """
    try:
        return Account(identity.uid_of(user), {})
    except InvalidRequest as unknown:
        found = _named(_read(files), user)
        if found is None:
            raise InvalidRequest(
                f"unknown user {user!r}",
                field="user",
                hint=f"{unknown.hint}, or a name in the sandbox's own {_PASSWD}",
            ) from None
        return found


def check_profile(profile: str, backend: str) -> None:
    """Refuse a root with rights of its own where there is nobody inside that it could rule.

    Raises:
        Unsupported: An ordinary user may map one id, and that is the sandbox's user.
    """
    if profile == OWN_ROOT and not host().trusted_root:
        raise Unsupported(
            "a sandbox made by an ordinary user has one user inside",
            backend=backend,
            operation=f"profile {OWN_ROOT}",
            field="profile",
            hint="run Ringfence as root",
        )


def own_root_refused(spec: SandboxSpec) -> str:
    """Why no root with rights of its own can be had; empty where it can, or is not asked for."""
    try:
        check_profile(spec.profile, "")
    except Unsupported as exc:
        return f"no profile {spec.profile}: {exc.message}"
    return ""


def _read(files: BackendFiles) -> str:
    try:
        with files.open_read(_PASSWD) as file:
            return file.read(_MOST_BYTES).decode("utf-8", "replace")
    except (FileError, OSError):
        return ""  # an image need not have one


def _named(text: str, user: str) -> Account | None:
    """The first complete line of that name, as getpwnam(3) reads it."""
    for line in text.split("\n"):
        words = line.split(":")
        if len(words) != 7 or words[0] != user:
            continue
        uid, home = words[2], words[5]
        if uid.isascii() and uid.isdigit() and len(uid) < 6 and int(uid) <= identity.NOBODY:
            homes = {"HOME": home} if home.startswith("/") and "\0" not in home else {}
            return Account(int(uid), {"USER": user, "LOGNAME": user, **homes})
    return None
