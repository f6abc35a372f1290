"""The entry point: sends each command to its module, and turns failures into exit code 125."""

from __future__ import annotations

import _signal as signal
import os
import sys

OWN_FAILURE = 125
# Commands that speak to a server, and the function of each.
_REMOTE = {
    "create": "server.sandboxes.create",
    "list": "server.sandboxes.list_",
    "update": "server.sandboxes.update",
    "rm": "server.sandboxes.remove",
    "top": "server.sandboxes.top",
    "exec": "server.inside.exec_",
    "shell": "server.inside.shell",
    "code": "server.code.code",
    "logs": "server.inside.logs",
    "cp": "server.inside.copy",
    "changes": "server.inside.changes",
    "fork": "server.forks.fork",
    "merge": "server.forks.merge",
    "tree": "server.forks.tree",
    "snapshot": "server.serving.snapshot",
    "session": "server.sessions.session",
    "keys": "server.serving.keys",
    "pool": "server.serving.pool",
}
_OTHERS = {
    "backup": "backup.save",
    "restore": "backup.restore",
    "cluster": "cluster.cluster",
    "nodes": "cluster.nodes",
}

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

    from .options import Command


def main() -> int:
    """The `ringfence` command; returns its exit code."""
    argv = sys.argv[1:]
    _open_standard_descriptors()
    try:
        if argv[:1] == ["run"]:
            _run(argv)
        code = _dispatch(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os._exit(141)  # the reader of our output is gone: as a shell reports SIGPIPE
    except KeyboardInterrupt:
        return 130
    except Exception as exc:  # noqa: BLE001  whatever it is, the user gets one line
        from .terminal import complain

        complain(exc, _command_of(argv))
        _drop_what_cannot_be_written()
        return OWN_FAILURE


def _drop_what_cannot_be_written() -> None:
    """Discard buffered output on a full disk: the interpreter's flush at exit would change the exit code."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _command_of(argv: Sequence[str]) -> Command | None:
    """The command whose options an error names as they are written."""
    from .commands import COMMANDS

    return next((command for command in COMMANDS if [command.name] == argv[:1]), None)


def _run(argv: Sequence[str]) -> NoReturn:
    import gc

    gc.disable()  # a short life, and nothing cyclic in it
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        # Until ours listens: a KeyboardInterrupt in the middle of an import may get lost there.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if _starts_native(argv):
        # It boots on another core while this one still reads its own modules.
        from ..launcher.spawn import spawn

        try:
            started = spawn()
        except OSError:
            pass  # the backend tries it again, and says what is the matter
        else:
            from ..backends.registry import hand_over

            hand_over(started)
    from .signals import Bell

    bell = Bell()
    bell.hear_signals()
    from .run import main as run

    # Nothing is left to flush or close, and an interpreter takes milliseconds to die.
    os._exit(run(argv[1:], bell))


def _open_standard_descriptors() -> None:
    """A closed 0, 1 or 2 would become a descriptor of ours, and be mistaken for a stream."""
    while True:
        fd = os.open(os.devnull, os.O_RDWR)
        if fd > 2:
            os.close(fd)
            break
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # it was closed when the interpreter came up
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def _starts_native(argv: Sequence[str]) -> bool:
    """Guess from the arguments of `run` whether they lead to the native backend."""
    for word in argv:
        if word == "--":
            return True
        if word in ("-h", "--help") or word.startswith("--backend"):
            return False
    return len(argv) > 1


def _dispatch(argv: Sequence[str]) -> int:
    if len(argv) > 1 and argv[0] == "help":
        from .commands import COMMANDS
        from .help import help_of

        asked = next((command for command in COMMANDS if command.name == argv[1]), None)
        if asked is None:
            raise _no_such_command(argv[1])
        sys.stdout.write(help_of(asked))
        return 0
    if not argv or argv[0] in ("-h", "--help", "help"):
        from .help import overview

        sys.stdout.write(overview())
        return 0 if argv else OWN_FAILURE
    if argv[0] in ("-V", "--version", "version"):
        from .. import __version__

        print(f"ringfence {__version__}")
        return 0
    return _command(argv[0], argv[1:])


def _command(name: str, argv: Sequence[str]) -> int:
    if name == "doctor":
        from .diagnosis.doctor import main as doctor

        return doctor(argv)
    if name == "bench":
        from .diagnosis.bench import main as bench

        return bench(argv)
    if name == "serve":
        from .serve import main as serve

        return serve(argv)
    if name == "template":
        from .template import main as template

        return template(argv)
    if name == "image":
        from .image import main as image

        return image(argv)
    if name == "mcp":
        from .mcp import main as mcp

        return mcp(argv)
    if name == "completion":
        from .completion import main as completion

        return completion(argv)
    if where := _REMOTE.get(name) or _OTHERS.get(name):
        from importlib import import_module

        room, _, function = where.rpartition(".")
        code: int = getattr(import_module(f".{room}", __package__), function)(argv)
        return code
    raise _no_such_command(name)


def _no_such_command(name: str) -> Exception:
    from ..errors import InvalidRequest
    from ..model.mistakes import meant
    from .commands import COMMANDS
    from .hints import COMMANDS_OF_OTHERS

    hint = COMMANDS_OF_OTHERS.get(name) or meant(name, [command.name for command in COMMANDS])
    if name.startswith("-"):
        hint = "options follow the command: ringfence COMMAND [OPTIONS]"
    return InvalidRequest(f"unknown command {name!r}", field="COMMAND", hint=hint)
