"""A host or session directory shown inside a sandbox."""

from __future__ import annotations

from . import checks, jsonform
from .noun import Noun

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from collections.abc import Sequence
    from dataclasses import dataclass

    StrPath = str | os.PathLike[str]
else:
    from .record import dataclass

READ_ONLY = "read_only"
READ_WRITE = "read_write"
ACCESS = (READ_ONLY, READ_WRITE)
_SHORT = {"ro": READ_ONLY, "rw": READ_WRITE}
_NOFOLLOW = "nofollow"

MEMORY_DIR = "/mnt/memory"
OUTPUTS_DIR = "/mnt/session/outputs"
ALWAYS_THERE = {"RINGFENCE_MEMORY_DIR": MEMORY_DIR, "RINGFENCE_OUTPUTS_DIR": OUTPUTS_DIR}
"""The always-there mounts by the environment variable that names each one inside."""

_KERNEL_TREES = ("proc", "sys", "dev")  # neither these nor anything below
_SYSTEM_DIRS = ("/usr", "/bin", "/sbin", "/etc")  # not these themselves
_WOULD_HIDE = ("/mnt", "/mnt/session")  # parents of the always-there mounts


@dataclass(frozen=True, eq=False, repr=False)
class Mount(Noun):
    """One mount.

    Attributes:
        target: Absolute path inside; normalised, `..` refused.
        source: Empty: a directory owned by the session. Relative: under the session's
            root. Absolute: a host path, which must exist.
        access: `read_only` (enforced by the kernel) or `read_write`.
        protect: Paths below a writable mount that stay read-only even where they do not
            exist yet; None takes the spec's, and those default to the built-in set.
        nofollow: Refuse a host path with a symbolic link in it: code that may write there, in a
            sandbox before this one, could have it lead anywhere.
    """

    target: str
    source: str = ""
    access: str = READ_ONLY
    protect: tuple[str, ...] | None = None
    nofollow: bool = False

    if TYPE_CHECKING:

        def __init__(
            self,
            target: StrPath,
            source: StrPath = "",
            access: str = READ_ONLY,
            protect: Sequence[str] | None = None,
            nofollow: bool = False,
        ) -> None:
            """As below: what is given may be a path object; what is kept never is."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", check_target(self.target, "target"))
        object.__setattr__(self, "source", _check_source(self.source))
        object.__setattr__(self, "access", _SHORT.get(self.access, self.access))
        checks.choice(self.access, "access", ACCESS, "read_only (ro) or read_write (rw)")
        checks.flag(self.nofollow, "nofollow")
        if self.nofollow and not self.is_host_path:
            checks.refuse("nofollow", "there is no host path whose links could be followed")
        if self.protect is not None:
            inner = checks.at_most(self.protect, "protect", checks.MOST_PATHS)
            kept = tuple(_check_protected(path, f"protect[{i}]") for i, path in enumerate(inner))
            object.__setattr__(self, "protect", kept)

    @classmethod
    def parse(cls, text: str, *, relative_to: str = "") -> Mount:
        """Read `SRC:DST[:OPTIONS]` as the command line has it: `ro` (else that) or `rw`, and `nofollow`.

        A relative SRC starts from the absolute host directory `relative_to`, or when that is
        empty lies under the session's root.
        """
        given = checks.text(text, "mount")
        head, _, last = given.rpartition(":")
        options = last.split(",") if head else []
        if not all(each in _SHORT or each == _NOFOLLOW for each in options):
            head, options = given, []
        source, colon, target = (head if options else given).rpartition(":")
        if not colon or not target:
            hint = "the target is missing: as .:/work or .:/work:rw"
            checks.refuse("mount", f"{given!r} is not SRC:DST[:ro|rw][,nofollow]", hint)
        if ":" in source and not target.startswith("/"):
            said = "neither an access, ro or rw, nor an absolute path inside"
            checks.refuse("mount.target", f"{target!r} is {said}")
        accesses = [_SHORT[each] for each in options if each in _SHORT]
        if len(accesses) > 1:
            checks.refuse("mount.access", f"{last!r} says it twice")
        if source and not source.startswith("/") and relative_to:
            source = f"{relative_to.rstrip('/')}/{source}"
        access = accesses[0] if accesses else READ_ONLY
        mount: Mount = jsonform.within(
            "mount", lambda dst: cls(dst, source, access, nofollow=_NOFOLLOW in options), target
        )
        return mount

    @property
    def is_writable(self) -> bool:
        """Whether the sandbox may change what is there."""
        return self.access == READ_WRITE

    @property
    def is_host_path(self) -> bool:
        """Whether the source is a path of the host rather than the session's own."""
        return self.source.startswith("/")


def outermost_first(mounts: list[Mount]) -> list[Mount]:
    """The order to make them in: what holds another's target before it, else by age.

    The other way round it would hide that one, and with it perhaps what was to be read-only.
    """
    return sorted(mounts, key=lambda mount: mount.target.count("/"))


def check_target(value: object, field: str) -> str:
    """A normalised mount target that hides nothing the sandbox needs."""
    target = checks.absolute_path(value, field)
    first = target.split("/")[1]
    if target == "/" or first in _KERNEL_TREES:
        checks.refuse(field, f"{target} cannot be covered: no sandbox works without what is there")
    if target in _SYSTEM_DIRS or (first.startswith("lib") and target == f"/{first}"):
        checks.refuse(field, f"{target} holds the sandbox's programs", "mount below it instead")
    if target in _WOULD_HIDE:
        checks.refuse(field, f"{target} would hide {MEMORY_DIR} or {OUTPUTS_DIR}")
    return target


def _check_source(value: object) -> str:
    if value == "":
        return ""
    source = checks.path(value, "source")
    if source.startswith("/"):
        # `..` is for the kernel to resolve: symlinks may be on the way.
        return "/" + "/".join(part for part in source.split("/") if part not in ("", "."))
    relative = checks.normal_path(source, "source")
    if not relative:
        # Taken for no source at all, it would be another directory than the one that was named.
        hint = "give an absolute path for a directory of the host, or no source for a new one"
        checks.refuse("source", f"{source!r} is the session's root itself", hint)
    return relative


def _check_protected(value: object, field: str) -> str:
    inner = checks.normal_path(value, field)
    if inner.startswith("/") or not inner:
        checks.refuse(field, f"{value!r} is not a path below the mount")
    return inner
