"""Starting a program without a fork, and finding it: for whoever is PID 1 of a sandbox."""

from __future__ import annotations

import _signal as signal
import errno
import posix as os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_SIGRTMAX = 64
ALL_SIGNALS = [n for n in range(1, _SIGRTMAX + 1) if n not in (9, 19, 32, 33)]
_DEFAULT_PATH = "/bin:/usr/bin"


def ignored_signals() -> list[int]:
    """List the ignored signals: execve(2) resets handled signals, and keeps ignored ones ignored.

    Python knows them from its start, and no other code has changed any since.
    """
    return [number for number in ALL_SIGNALS if signal.getsignal(number) == signal.SIG_IGN]


def candidates(name: str, env: dict[str, str]) -> list[str]:
    """Where `name` may be, as execvp(3) looks for it."""
    if "/" in name:
        return [name]
    places = env.get("PATH", _DEFAULT_PATH).split(":")
    return [f"{directory or '.'}/{name}" for directory in places]


def spawn_first(
    paths: list[str],
    argv: list[str],
    env: dict[str, str],
    actions: list[Any],
    *,
    as_real_user: bool = False,
    group: int = 0,
) -> int:
    """Start the first of `paths` that can be; its own session or group keeps its signals from other execs.

    Args:
        as_real_user: The program gets the caller's real ids for its effective ones.
        group: Of `forked.begin_group`; 0: it leads a session.

    Raises:
        OSError: ELIBACC: it is there, and what it is begun with is not.
    """
    settings: dict[str, Any] = {"setpgroup": group} if group else {"setsid": True}
    settings |= {"setsigmask": [], "setsigdef": ALL_SIGNALS}
    settings["resetids"] = as_real_user

    def begin(path: str, argv: list[str]) -> int:
        return os.posix_spawn(path, argv, env, file_actions=actions, **settings)

    return first_of(paths, argv, begin)


def first_of(
    paths: list[str], argv: list[str], begin: Callable[[str, list[str]], int], place: str = ""
) -> int:
    """Begin the first of `paths` that can be, as a shell would; what `begin` answers.

    Args:
        place: Where it begins, which relative paths are seen from; empty: where we are.

    Raises:
        OSError: ELIBACC: it is there, and what it is begun with is not.
    """
    failure: OSError = FileNotFoundError(errno.ENOENT, "not found", argv[0])
    for path in paths:
        seen = f"{place}/{path}" if place and not path.startswith("/") else path
        try:
            if len(paths) == 1 or _is_there(seen):
                return _begin(path, argv, begin)
        except (FileNotFoundError, NotADirectoryError):
            if failure.errno == errno.ENOENT and lacks_another(seen):
                failure = OSError(errno.ELIBACC, "lacks another file", path)
        except PermissionError as exc:
            failure = exc
    raise failure


def lacks_another(path: str) -> bool:
    """Return whether execve(2) reported ENOENT for another file than `path`.

    It does so for a script's interpreter, or a binary's loader: the rule in an image with another C
    library.
    """
    try:
        os.stat(path)
    except OSError:
        return False
    return True


def _is_there(path: str) -> bool:
    """Return whether `path` exists: a clone costs a hundred times as much as this check."""
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    if (mode & 0o170000) == 0o040000:
        raise PermissionError(13, "is a directory", path)
    return True


def _begin(path: str, argv: list[str], begin: Callable[[str, list[str]], int]) -> int:
    try:
        return begin(path, argv)
    except OSError as exc:
        if exc.errno != errno.ENOEXEC:  # a script without #!, which a shell would run itself
            raise
    return begin("/bin/sh", ["sh", path, *argv[1:]])


def enter(path: str) -> None:
    """Go where a program is to start, in the sandbox: a link of the guest's may name a descriptor of ours.

    Raises:
        OSError: ENOENT if it leads to a place that the root does not lead to (CVE-2024-21626).
    """
    os.chdir(path)
    try:
        os.getcwd()
    except OSError:
        os.chdir("/")
        raise


def make_dirs(path: str) -> None:
    """A directory and those above it, where they are not there yet."""
    done = "/" if path.startswith("/") else ""
    names = [name for name in path.split("/") if name]
    for i, name in enumerate(names, 1):
        done += name
        try:
            os.mkdir(done)
        except FileExistsError:
            if not _is_directory(done):
                if i < len(names):
                    raise NotADirectoryError(errno.ENOTDIR, "Not a directory", done) from None
                raise
        except OSError:
            if not _is_directory(done):
                raise
        done += "/"


def _is_directory(path: str) -> bool:
    try:
        return (os.stat(path).st_mode & 0o170000) == 0o040000
    except OSError:
        return False
