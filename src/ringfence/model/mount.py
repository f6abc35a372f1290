"""A host or session directory shown inside a sandbox."""

from __future__ import annotations

from .base import checks, jsonform
from .base.model import Model
from .base.record import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from collections.abc import Sequence
    from typing import NoReturn

    StrPath = str | os.PathLike[str]

READ_ONLY = "read_only"
READ_WRITE = "read_write"
ACCESS = (READ_ONLY, READ_WRITE)
_SHORT = {"ro": READ_ONLY, "rw": READ_WRITE}
_NOFOLLOW = "nofollow"

MEMORY_DIR = "/mnt/memory"
OUTPUTS_DIR = "/mnt/session/outputs"
ALWAYS_THERE = {"RINGFENCE_MEMORY_DIR": MEMORY_DIR, "RINGFENCE_OUTPUTS_DIR": OUTPUTS_DIR}
"""The always-there mounts by the environment variable that names each one inside."""

PRESETS = {
    "@git": (".git",),
    "@agents": (
        *(
            "AGENTS.md",
            "AGENTS.override.md",
            "CLAUDE.md",
            "CLAUDE.local.md",
            "GEMINI.md",
            "QWEN.md",
        ),
        *(".cursorrules", ".windsurfrules", ".clinerules", ".roorules", ".goosehints"),
        *(".github/copilot-instructions.md", ".github/instructions", ".github/prompts"),
    ),
    "@ci": (
        *(".github/workflows", ".github/actions", ".gitlab-ci.yml", ".circleci", ".buildkite"),
        *("azure-pipelines.yml", "bitbucket-pipelines.yml", "Jenkinsfile", ".travis.yml"),
    ),
}
"""Names of several paths for `protect`: none of them is protected by default, for work may be to write them."""

_KERNEL_TREES = ("proc", "sys", "dev")  # neither these nor anything below
_SYSTEM_DIRS = ("/usr", "/bin", "/sbin", "/etc")  # not these themselves
_WOULD_HIDE = ("/mnt", "/mnt/session")  # parents of the always-there mounts


@dataclass(frozen=True, eq=False, repr=False)
class Mount(Model):
    """A mount.

    Attributes:
        target: Absolute path inside; normalised, `..` refused.
        source: Empty: a directory owned by the session. Relative: under the session's
            root. Absolute: a host path, which must exist and is not `/`.
        access: `read_only` (enforced by the kernel) or `read_write`.
        protect: Paths below a writable mount that stay read-only even where they do not
            exist yet; None takes the spec's, and those default to the built-in set.
        nofollow: Refuse a host path that contains a symbolic link: an earlier sandbox with write access
            there could point it anywhere.
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
        if isinstance(self.target, str) and self.target and self.target[0] != "/":
            hint = f"write the path in the sandbox first: Mount('/work', {self.target!r})"
            checks.refuse("target", f"{self.target!r} is not an absolute path", hint)
        object.__setattr__(self, "target", check_target(self.target, "target"))
        object.__setattr__(self, "source", _check_source(self.source))
        object.__setattr__(self, "access", _SHORT.get(self.access, self.access))
        if self.access not in ACCESS:
            what = f"must be read_only (ro) or read_write (rw), not {self.access!r}"
            checks.refuse("access", what, "read_only is the default")
        checks.flag(self.nofollow, "nofollow")
        if self.nofollow and not self.is_host_path:
            checks.refuse("nofollow", "needs a host path as source")
        if self.protect is not None:
            inner = enumerate(with_presets(self.protect, "protect"))
            kept = tuple(_check_protected(path, f"protect[{i}]") for i, path in inner)
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
            start = given.rstrip(":") or "."
            hint = f"the target is missing: as {start}:/work or {start}:/work:rw"
            if given.startswith("type="):
                hint = "write SRC:DST, as .:/work:rw"
            elif colon and ":/" in source:
                hint = f"remove the colon at the end: {source}"
            checks.refuse("mount", f"{given!r} is not SRC:DST[:ro|rw][,nofollow]", hint)
        if not target.startswith("/"):
            if "\\" in target:
                hint = "paths in the sandbox are those of Linux: as .:/work"
                checks.refuse("mount.target", f"{target!r} is a path of Windows", hint)
            if ":" in source:
                _refuse_option(target if options else last, source)
            hint = "write the host path first, then an absolute path in the sandbox: as .:/work"
            checks.refuse("mount.target", f"{target!r} is not an absolute path", hint)
        body, comma, option = target.rpartition(",")
        if comma and (option in _SHORT or option == _NOFOLLOW):
            hint = f"put a colon before the options: {source}:{body}:{option}"
            checks.refuse("mount", f"{target!r} ends in a mount option", hint)
        accesses = [_SHORT[each] for each in options if each in _SHORT]
        if len(accesses) > 1:
            checks.refuse("mount.access", f"{last!r} repeats a mount option")
        if source and not source.startswith("/") and relative_to:
            source = f"{relative_to.rstrip('/')}/{source}"
        access = accesses[0] if accesses else READ_ONLY
        mount: Mount = jsonform.within(
            "mount", lambda dst: cls(dst, source, access, nofollow=_NOFOLLOW in options), target
        )
        return mount

    @property
    def is_writable(self) -> bool:
        """True if the sandbox may change the mounted files."""
        return self.access == READ_WRITE

    @property
    def is_host_path(self) -> bool:
        """True if the source is a host path rather than the session's own directory."""
        return self.source.startswith("/")


def _refuse_option(word: str, start: str) -> NoReturn:
    """Refuse what stands behind `SRC:DST:` and is no option, or is a second one."""
    if word.lower() in _SHORT:
        said = "is followed by another access" if word in _SHORT else "must be in lower case"
        checks.refuse("mount.access", f"{word!r} {said}", f"as {start}:{word.lower()}")
    said = "neither an access (ro or rw) nor an absolute path in the sandbox"
    checks.refuse("mount.target", f"{word!r} is {said}", f"as {start}:rw")


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
        hint = "mount below another directory, as /work"
        checks.refuse(
            field, f"{target} cannot be a mount target: every sandbox needs its content", hint
        )
    if target in _SYSTEM_DIRS or (first.startswith("lib") and target == f"/{first}"):
        checks.refuse(field, f"{target} holds the sandbox's programs", "choose a target below it")
    if target in _WOULD_HIDE:
        hint = "mount below another directory, as /work"
        checks.refuse(field, f"{target} would hide {MEMORY_DIR} or {OUTPUTS_DIR}", hint)
    return target


def _check_source(value: object) -> str:
    if value == "":
        return ""
    source = checks.path(value, "source")
    if source.startswith("/"):
        # `..` is for the kernel to resolve: symlinks may be on the way.
        plain = "/".join(part for part in source.split("/") if part not in ("", "."))
        if not plain:
            # Its owner's files are the sandbox's own by id mapping: /etc/shadow can be read.
            hint = "mount the directory that is needed; the sandbox has the host's /usr already"
            checks.refuse("source", "/ would show every file of this host, secrets too", hint)
        return f"/{plain}"
    relative = checks.normal_path(source, "source")
    if not relative:
        # Taken for no source at all, it would be another directory than the one that was named.
        hint = "give an absolute path on the host, or no source for a new directory"
        checks.refuse("source", f"{source!r} is the root of the session", hint)
    return relative


def with_presets(paths: object, field: str) -> tuple[object, ...]:
    """Replace names such as `@agents` by the paths that they stand for.

    Raises:
        InvalidRequest: There is no preset of that name.
    """
    given = checks.at_most(paths, field, checks.MOST_PATHS)
    if not any(isinstance(each, str) and each.startswith("@") for each in given):
        return given
    found: list[object] = []
    for i, each in enumerate(given):
        if not isinstance(each, str) or not each.startswith("@"):
            found.append(each)
        elif each in PRESETS:
            found += PRESETS[each]
        else:
            from .mistakes import meant

            hint = f"{meant(each, PRESETS)}; a path of that name is absolute, as /work/{each}"
            checks.refuse(f"{field}[{i}]", f"no preset {each!r}", hint)
    return tuple(dict.fromkeys(found))


def _check_protected(value: object, field: str) -> str:
    inner = checks.normal_path(value, field)
    if inner.startswith("/") or not inner:
        checks.refuse(
            field, f"{value!r} is not a path below the mount", "relative, as .git or src/x"
        )
    return inner
