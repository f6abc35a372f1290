"""Starting a program without a fork, and finding it: for whoever is PID 1 of a sandbox."""

from __future__ import annotations

import errno
import posix as os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_SIGRTMAX = 64
ALL_SIGNALS = [n for n in range(1, _SIGRTMAX + 1) if n not in (9, 19, 32, 33)]
_DEFAULT_PATH = "/bin:/usr/bin"


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
) -> int:
    """Start the first of `paths` that can be.

    Args:
        as_real_user: The program gets the caller's real ids for its effective ones.

    Raises:
        OSError: ELIBACC: it is there, and what it is begun with is not.
    """
    failure: OSError = FileNotFoundError(errno.ENOENT, "not found", argv[0])
    for path in paths:
        try:
            return _posix_spawn(path, argv, env, actions, as_real_user)
        except (FileNotFoundError, NotADirectoryError):
            if failure.errno == errno.ENOENT and lacks_another(path):
                failure = OSError(errno.ELIBACC, "lacks another file", path)
        except PermissionError as exc:
            failure = exc
    raise failure


def lacks_another(path: str) -> bool:
    """Whether what the kernel did not find to begin `path` is another file: execve(2) says ENOENT of both.

    A script's interpreter, or a binary's loader: in an image of another C library, the rule.
    """
    try:
        os.stat(path)
    except OSError:
        return False
    return True


def _posix_spawn(
    path: str, argv: list[str], env: dict[str, str], actions: list[Any], as_real_user: bool
) -> int:
    """vfork(2)-fast start of one program in a session of its own: its signals reach no other exec."""
    # Not there at all: found out here, a clone costs a hundred times as much.
    if (os.stat(path).st_mode & 0o170000) == 0o040000:
        raise PermissionError(13, "is a directory", path)
    settings: dict[str, Any] = {"setsid": True, "setsigmask": [], "setsigdef": ALL_SIGNALS}
    settings["resetids"] = as_real_user
    try:
        return os.posix_spawn(path, argv, env, file_actions=actions, **settings)
    except OSError as exc:
        if exc.errno != errno.ENOEXEC:  # a script without #!, which a shell would run itself
            raise
    return os.posix_spawn("/bin/sh", ["sh", path, *argv[1:]], env, file_actions=actions, **settings)


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
