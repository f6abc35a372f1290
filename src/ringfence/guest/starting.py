"""Start of an exec's first process, with its user."""

from __future__ import annotations

import os

from ..launcher import wire
from ..launcher.machine_code import vforked
from ..launcher.pid1 import forked, init, programs, terminals
from . import flows, users

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .execs import Exec
    from .groups import Groups
    from .tags import Tags


def start(
    run: Exec,
    groups: Groups | Tags,
    streams: list[int],
    argv: list[str],
    env: dict[str, str],
    cwd: str,
    terminal: tuple[int, int] | None,
    *,
    leads: bool,
) -> None:
    """Start it, in a group of its own. `streams` are closed; `run.stage` tells how far this came.

    Args:
        streams: The program's first three descriptors, or the last two; with a terminal, the socket
            that its bytes are to go through.
        terminal: Its rows and columns.
        leads: It leads a session of its own: see `forked.start`.

    Raises:
        OSError: Nothing was started.
    """
    opened = list(streams)
    try:
        become = users.confine
        if terminal is None:
            actions = _on_streams(streams)
        elif users.new_terminal is not None:
            master, slave = users.new_terminal(*terminal)
            run.terminal = flows.Pair(master, opened.pop(), ends_at_once=True)
            opened.append(slave)
            actions = [(os.POSIX_SPAWN_DUP2, slave, i) for i in range(3)]
            become = lambda: _confine_on(slave)  # noqa: E731  functools takes 2 ms to import
        else:
            actions = _on_terminal(_open_terminal(run, opened, *terminal))
        run.stage = wire.STAGE_COMMAND
        groups.enter(run.number)
        try:
            # A running process of that user could stop our child before it has begun.
            if users.is_root and vforked.is_here() and not init.has_children():
                _vfork(run, argv, env, cwd, actions, leads)
            else:
                _spawn(run, argv, env, cwd, actions, become, leads)
        finally:
            groups.leave()
    finally:
        for fd in opened:
            os.close(fd)


def _on_streams(streams: list[int]) -> list[Any]:
    # Two streams: standard input is the guest's own /dev/null.
    first = 3 - len(streams)
    actions: list[Any] = [(os.POSIX_SPAWN_DUP2, fd, i) for i, fd in enumerate(streams, first)]
    if first:
        actions.append((os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0))
    return actions


def _on_terminal(name: str) -> list[Any]:
    # Opened by the leader of a new session, it becomes its controlling terminal.
    actions: list[Any] = [(os.POSIX_SPAWN_OPEN, 0, name, os.O_RDWR, 0)]
    return actions + [(os.POSIX_SPAWN_DUP2, 0, i) for i in (1, 2)]


def _open_terminal(run: Exec, opened: list[int], rows: int, columns: int) -> str:
    """A new pseudo-terminal, its master tied to the socket that came along; the slave's name.

    A slave of ours is noted in `opened`, to be closed once the process has its own: a master
    without any slave reads as hung up.
    """
    with users.As(run.uid):
        master, name = terminals.new_terminal("/dev/ptmx", rows, columns)
        run.terminal = flows.Pair(master, opened.pop(), ends_at_once=True)
        opened.append(os.open(name, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    return name


def _vfork(
    run: Exec, argv: list[str], env: dict[str, str], cwd: str, actions: list[Any], leads: bool
) -> None:
    run.stage = wire.STAGE_COMMAND
    paths, ignored = programs.candidates(argv[0], env), programs.ignored_signals()
    group = 0 if leads else forked.begin_group()
    begin = vforked.Start(run.uid, cwd, env, actions, ignored, group).begin
    try:
        run.pid = programs.first_of(paths, argv, begin, cwd)
    except vforked.NoDirectory:
        run.stage = wire.STAGE_CWD
        raise
    finally:
        forked.end_group(group)


def _confine_on(slave: int) -> None:
    """Called in the child, which may not open its terminal by name."""
    if users.confine is not None:
        users.confine()
    terminals.take(slave)


def _spawn(
    run: Exec,
    argv: list[str],
    env: dict[str, str],
    cwd: str,
    actions: list[Any],
    become: Callable[[], None] | None,
    leads: bool,
) -> None:
    paths = programs.candidates(argv[0], env)
    run.stage = wire.STAGE_CWD
    with users.As(run.uid):
        programs.enter(cwd)
    run.stage = wire.STAGE_COMMAND
    try:
        if users.is_root and not init.has_children():
            _spawn_first(run, paths, argv, env, actions, leads)
        else:
            if users.is_root:  # else there is one user, and nobody to become
                become = users.become_for_good(run.uid)
            started = forked.start(paths, argv, env, actions, become, leads=leads, fork=users.fork)
            run.pid, run.failure_fd = started
    finally:
        os.chdir("/")


def _spawn_first(
    run: Exec,
    paths: list[str],
    argv: list[str],
    env: dict[str, str],
    actions: list[Any],
    leads: bool,
) -> None:
    group = 0 if leads else forked.begin_group()
    os.setresgid(run.uid, 0, -1)
    os.setresuid(run.uid, 0, -1)
    try:
        run.pid = programs.spawn_first(paths, argv, env, actions, as_real_user=True, group=group)
    finally:
        users.become_root()
        forked.end_group(group)
