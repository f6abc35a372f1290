"""A note on disk of what would outlive both this process and its zygote: placeholders on the host.

Everything else of a sandbox belongs to the kernel and ends with its processes. The note is written
before the sandbox starts and removed after its placeholders; a later start acts on the notes of
processes that no longer exist.
"""

from __future__ import annotations

import marshal
import os

from ...errors import IsolationError, SandboxLost
from .host import owner
from .host.own_places import own_directory, place_in, remove_tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator

    from ...launcher.placeholders import Placeholder
    from .launched import Launched
    from .mounts.protect import Protected

DISKS = "RINGFENCE_DISK_DIR"
_DISK = "disk"
_HEADER = b"ringfence placeholders 1\n"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


def runtime_directory() -> str | None:
    """This user's directory for such notes, ours alone; None where there is no safe place."""
    if os.geteuid() == 0:
        return "/run/ringfence" if own_directory("/run/ringfence") else None
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    if os.path.isdir(runtime) and own_directory(base := os.path.join(runtime, "ringfence")):
        return base
    try:
        return place_in("/tmp", f"ringfence-{os.geteuid()}")
    except IsolationError:
        return None


def disk_directory() -> str:
    """This user's directory for writable layers on disk: who may not list it can pass through.

    Raises:
        IsolationError: None can be made.
    """
    return place_in(os.environ.get(DISKS) or "/var/tmp", f".ringfence-{os.geteuid()}", 0o711)


def disk_of(sandbox_id: str, label: str = "") -> str:
    """Where the writable layer of a sandbox is, if it is a directory; label as for `path_of`."""
    return os.path.join(disk_directory(), f"{_DISK}.{label or owner.label()}.{sandbox_id}")


def note(sandbox_id: str, made: list[Placeholder], label: str = "") -> str | None:
    """Write down what was made for a sandbox; returns the note's path."""
    if not made:
        return None
    while (path := path_of(sandbox_id, label)) is not None:
        try:
            fd = os.open(path, _NEW, 0o600)
        except FileNotFoundError:
            continue  # whoever erased the last other note took the directory along
        with open(fd, "wb") as file:
            file.write(_HEADER + marshal.dumps(made))
        return path
    return None


def path_of(sandbox_id: str, label: str = "") -> str | None:
    """Where a sandbox's note is, if there is one; label as for `cgroups.group_name`."""
    base = runtime_directory()
    if base is None:
        return None
    return os.path.join(base, f"placeholders.{label or owner.label()}.{sandbox_id}")


def erase(path: str | None) -> None:
    if path is not None:
        from ...launcher import placeholders

        placeholders.erase_note(path)


def give_up(
    protected: list[Protected], note: str | None, sandbox_id: str, launched: Launched
) -> None:
    """Remove what stands in for absent protected paths, and every record of it."""
    are_any = any(each.placeholders for each in protected)
    for each in protected:
        each.remove_placeholders()
    erase(note)
    if are_any:
        try:
            launched.tell("released", sandbox_id, [])
        except SandboxLost:
            pass  # it is gone, and has nothing to remember


def sweep(label: str = "", living: Container[str] = ()) -> None:
    """Act on the notes of dead processes.

    Args:
        label: Of a process that lives on, but has nothing more to do with those sandboxes of its
            that are not in `living`.
    """
    for path in _left("placeholders", runtime_directory, label, living):
        try:
            with open(path, "rb") as file:
                data = file.read()
            if data.startswith(_HEADER):
                from ...launcher import placeholders

                placeholders.remove(marshal.loads(data[len(_HEADER) :]))
        except (OSError, ValueError, EOFError, TypeError):
            pass
        erase(path)
    if (base := runtime_directory()) is not None:
        try:
            os.rmdir(base)
        except OSError:
            pass  # in use
    for path in _left(_DISK, disk_directory, label, living):
        remove_tree(path)


def _left(
    kind: str, place: Callable[[], str | None], label: str, living: Container[str]
) -> Iterator[str]:
    """Yield what dead processes, or the one of `label`, have left of a kind."""
    try:
        names = os.listdir(base := place() or "")
    except (OSError, IsolationError):
        return  # another process has just swept it, or there is no safe place
    for name in names:
        first, *words = name.split(".")
        whose = owner.read(words[:3]) if first == kind else None
        if whose is None:
            continue
        is_forgotten = ".".join(words[:3]) == label and ".".join(words[3:]) not in living
        if is_forgotten or owner.is_gone(whose):
            yield os.path.join(base, name)
