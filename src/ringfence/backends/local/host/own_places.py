"""Private directories of this user inside directories writable by every user, and their removal.

Another user may have made the name first. Then a directory of another name is taken: one of ours
that is there already, so that all processes of this user find the same, or a new one.
"""

from __future__ import annotations

import itertools
import os

from ....errors import IsolationError
from ....linux import files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator


def place_in(shared: str, name: str, mode: int = 0o700) -> str:
    """The directory `name` in `shared`, or one in its stead; made if need be.

    Raises:
        IsolationError: None can be made.
    """
    base = os.path.join(shared, name)
    if own_directory(base, mode):
        return base
    try:
        if not (there := _in_its_stead(shared, name, mode)):
            made = f"{base}.{os.urandom(8).hex()}"
            os.mkdir(made, mode)
            there = _in_its_stead(shared, name, mode)  # another process may have made one as well
            if there and made != there[0]:
                os.rmdir(made)
        return there[0]
    except (OSError, IndexError) as exc:
        is_there = os.path.lexists(base)
        why = "belongs to another user" if is_there else "cannot be made"
        raise IsolationError(
            f"{base} {why}, and no directory can be made beside it: {exc}",
            hint=f"{f'remove {base}, or ' if is_there else ''}make {shared} writable for this user",
        ) from exc


def own_directory(base: str, mode: int = 0o700) -> bool:
    """Make `base` if needed; return whether it is this user's and writable by nobody else."""
    try:
        os.makedirs(base, mode=mode, exist_ok=True)
        info = os.lstat(base)
        # In a shared /tmp another user may have made it first.
        if info.st_uid != os.geteuid() or info.st_mode & 0o170022 != 0o040000:
            return False
        if info.st_mode & mode != mode:
            os.chmod(base, mode)  # made under a strange umask: we could not enter it ourselves
    except OSError:
        return False
    return True


def _in_its_stead(shared: str, name: str, mode: int) -> list[str]:
    """List our own directories, in an order that is the same for all processes."""
    names = sorted(each for each in os.listdir(shared) if each.startswith(f"{name}."))
    return [path for each in names if own_directory(path := os.path.join(shared, each), mode)]


def remove_tree(path: str, last: str = "") -> None:
    """Remove a directory in which a guest made what it liked; what cannot be removed stays.

    Args:
        last: A file in it that is removed when all else is gone, and stays if anything else does.

    Each directory in it is moved up to its top before it is emptied: shutil.rmtree calls itself for every
    level, and below a thousand of them it ends with RecursionError, of this start and of every later one.
    """
    try:
        top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    numbers = itertools.count()
    try:
        while names := [name for name in os.listdir(top) if name != last]:
            if not sum(_remove_level(top, name, numbers) for name in names):
                break
        if last and not names:
            os.unlink(last, dir_fd=top)
    except OSError:
        pass  # as much as could be
    finally:
        os.close(top)
    try:
        os.rmdir(path)
    except OSError:
        pass


def _remove_level(top: int, name: str, numbers: Iterator[int]) -> bool:
    """Remove a file, or a directory whose own directories are then in `top`; whether anything is gone."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        os.unlink(name, dir_fd=top)
        return True
    except IsADirectoryError:
        pass
    except OSError:
        return False
    try:
        files.chmod_nofollow(top, name, 0o700)
        inside = os.open(name, flags, dir_fd=top)
    except OSError:
        return False
    moved = False
    try:
        for each in os.listdir(inside):
            moved |= _take_out(inside, each, top, numbers)
        os.rmdir(name, dir_fd=top)
    except OSError:
        return moved
    finally:
        os.close(inside)
    return True


def _take_out(inside: int, name: str, top: int, numbers: Iterator[int]) -> bool:
    """Unlink a file, or move a directory up to `top`; whether it is there no more."""
    try:
        os.unlink(name, dir_fd=inside)
        return True
    except IsADirectoryError:
        pass
    except OSError:
        return False
    try:
        files.chmod_nofollow(inside, name, 0o700)  # a directory's ".." is its own to change
        os.rename(name, f".{next(numbers)}", src_dir_fd=inside, dst_dir_fd=top)
    except OSError:
        pass
    else:
        return True
    try:
        # Another user's, as a launcher makes them that maps ids: an empty one may be removed all the same.
        os.rmdir(name, dir_fd=inside)
    except OSError:
        return False
    return True
