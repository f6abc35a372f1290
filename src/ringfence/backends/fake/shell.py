"""The fake's `sh`: runs the commands that `syntax` read."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from . import lookup
from .nodes import Directory, File
from .process import Exited
from .streams import FileStream, pipe
from .syntax import (
    AndOr,
    Group,
    If,
    Loop,
    Parser,
    Pipeline,
    ScriptError,
    Sequence,
    Simple,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .filesystem import FileSystem
    from .process import Main, Process
    from .streams import Stream
    from .syntax import Command, Redirect, Word

    Builtin = Callable[["Shell", list[str]], int]

_IN_PROCESS = {"[", "echo", "false", "printf", "pwd", "test", "true"}
_MISUSE = 2
_STREAMS = ("/dev/stdin", "/dev/stdout", "/dev/stderr")


def main(process: Process) -> int:
    """`sh -c script [name argument...]`, or `sh` with the script on stdin."""
    arguments = process.argv[1:]
    positional: tuple[str, ...] = ()
    if arguments[:1] == ("-c",):
        script, positional = arguments[1], arguments[2:]
    elif not arguments:
        script = os.fsdecode(_read_all(process))
    else:
        with process.machine.files.open_read(arguments[0], process.cwd) as file:
            script = os.fsdecode(file.read())
    try:
        command = Parser(script).parse()
    except ScriptError as exc:
        process.write(os.fsencode(f"sh: {exc}\n"), 2)
        return _MISUSE
    shell = Shell(process)
    shell.variables.update({str(i): value for i, value in enumerate(positional)})
    return shell.run(command)


class Shell:
    """A shell process.

    Attributes:
        shown_pid: Value of `$$`; a subshell has its parent's.
    """

    def __init__(self, process: Process, parent: Shell | None = None) -> None:
        self.process = process
        self.variables: dict[str, str] = dict(parent.variables if parent else process.env)
        self.exported: set[str] = set(parent.exported if parent else process.env)
        self.shown_pid: int = parent.shown_pid if parent else process.pid
        self.status: int = parent.status if parent else 0
        self.background: list[Process] = []

    def run(self, command: Command) -> int:
        """Run a command of any shape and keep its status in `$?`."""
        self.process.check()
        self.status = self._run(command)
        return self.status

    def _run(self, command: Command) -> int:
        match command:
            case Simple():
                return self._simple(command)
            case Sequence(parts):
                for part, in_background in parts:
                    self._background(part) if in_background else self.run(part)
                return self.status if parts else 0
            case AndOr(left, operator, right):
                failed = self.run(left) != 0
                return self.status if failed == (operator == "&&") else self.run(right)
            case Pipeline(parts, is_negated):
                status = self._pipeline(parts)
                return int(status == 0) if is_negated else status
            case Group(body, is_subshell, redirects):
                return self._redirected(
                    redirects,
                    lambda: self._wait(self._fork(body)) if is_subshell else self.run(body),
                )
            case If(test, body, otherwise):
                if self.run(test) == 0:
                    return self.run(body)
                return self.run(otherwise) if otherwise else 0
            case Loop(test, body, wanted):
                status = 0
                while (self.run(test) == 0) == wanted:
                    status = self.run(body)
                return status

    def _simple(self, command: Simple) -> int:
        words = [text for word in command.words for text in self._expand(word)]
        assigned = {name: "".join(self._expand(value)) for name, value in command.assigned}
        if not words:
            self.variables.update(assigned)
            return self._redirected(command.redirects, lambda: 0)
        return self._redirected(command.redirects, lambda: self._invoke(words, assigned))

    def _invoke(self, words: list[str], assigned: dict[str, str]) -> int:
        builtin = _BUILTINS.get(words[0])
        if builtin is not None:
            return builtin(self, words[1:])
        if words[0] in _IN_PROCESS:
            return self._within(self.process.machine.programs[words[0]], words)
        return self._wait(self._spawn(words, assigned))

    def _within(self, program: Main, words: list[str]) -> int:
        own, self.process.argv = self.process.argv, tuple(words)
        try:
            return program(self.process)
        finally:
            self.process.argv = own

    def _spawn(self, words: list[str], assigned: dict[str, str]) -> Process:
        child = self.process.fork(tuple(words))
        child.env = {name: self.variables[name] for name in self.exported} | assigned
        child.start(lookup.run)
        return child

    def _fork(self, body: Command, streams: Mapping[int, Stream] | None = None) -> Process:
        child = self.process.fork(streams=streams)
        shell = Shell(child, self)
        child.start(lambda _: shell.run(body))
        return child

    def _background(self, part: Command) -> None:
        try:
            null = FileStream(self.process.machine.files.open_read("/dev/null"))
            self.background.append(self._fork(part, {0: null}))
            self.variables["!"] = str(self.background[-1].pid)
            self.status = 0
        except BlockingIOError as exc:
            self._fail("fork", exc)

    def _wait(self, child: Process) -> int:
        return self.process.wait(child)

    def _pipeline(self, parts: list[Command]) -> int:
        if len(parts) == 1:
            return self.run(parts[0])
        children = []
        reader: Stream | None = None
        for part in parts[:-1]:
            following, writer = pipe()
            given = {1: writer} if reader is None else {0: reader, 1: writer}
            children.append(self._fork(part, given))
            reader = following
        children.append(self._fork(parts[-1], {0: reader} if reader else None))
        return [self._wait(child) for child in children][-1]

    def _redirected(self, redirects: list[Redirect], action: Callable[[], int]) -> int:
        """Run `action` with the streams changed, and put them back whatever happens."""
        streams = self.process.streams
        saved: list[tuple[int, Stream]] = []
        try:
            for redirect in redirects:
                saved.append((redirect.fd, streams[redirect.fd]))
                streams[redirect.fd] = self._open(redirect)
            return action()
        except BlockingIOError as exc:
            return self._fail("fork", exc)
        except OSError as exc:
            if isinstance(exc, BrokenPipeError):
                raise
            return self._fail("sh", exc)
        finally:
            for fd, stream in reversed(saved):
                if streams[fd] is not stream:
                    streams[fd].close()
                    streams[fd] = stream

    def _open(self, redirect: Redirect) -> Stream:
        name = "".join(self._expand(redirect.word))
        if redirect.operator.endswith("&"):
            return self.process.streams[int(name)].dup()
        files, cwd = self.process.machine.files, self.process.cwd
        if name in _STREAMS:
            return self.process.streams[_STREAMS.index(name)].dup()
        if redirect.operator == "<":
            return FileStream(files.open_read(name, cwd))
        return FileStream(files.open_write(name, cwd, append=redirect.operator == ">>"))

    def _fail(self, what: str, exc: OSError) -> int:
        self.process.write(os.fsencode(f"{what}: {exc.strerror}\n"), 2)
        return _MISUSE

    def _expand(self, word: Word) -> list[str]:
        """The texts a word becomes: unquoted variables are split at blanks."""
        texts: list[str] = []
        current: str | None = None
        for piece in word:
            value = self._value(piece.text) if piece.is_variable else piece.text
            if piece.is_variable and not piece.is_quoted:
                parts = value.split()
                if not parts:
                    continue
                texts += [(current or "") + parts[0], *parts[1:]][:-1]
                current = parts[-1] if len(parts) > 1 else (current or "") + parts[0]
            else:
                current = (current or "") + value
        return texts if current is None else [*texts, current]

    def _value(self, name: str) -> str:
        if name == "?":
            return str(self.status)
        if name == "$":
            return str(self.shown_pid)
        return self.variables.get(name, "")


def judge(words: list[str], files: FileSystem, cwd: str) -> bool:
    """Evaluate the arguments of `test`."""
    match words:
        case ["!", *rest]:
            return not judge(rest, files, cwd)
        case [left, "=", right]:
            return left == right
        case [left, "!=", right]:
            return left != right
        case ["-n", text] | [text]:
            return bool(text)
        case ["-z", text]:
            return not text
        case ["-e" | "-f" | "-d" as option, path]:
            try:
                node = files.find(path, cwd)
            except OSError:
                return False
            return isinstance(node, {"-f": File, "-d": Directory}.get(option, object))
    return False


def _read_all(process: Process) -> bytes:
    pieces = []
    while data := process.read():
        pieces.append(data)
    return b"".join(pieces)


def _colon(_: Shell, __: list[str]) -> int:
    return 0


def _cd(shell: Shell, words: list[str]) -> int:
    target = words[0] if words else shell.variables.get("HOME", "/")
    files = shell.process.machine.files
    if not isinstance(files.find(target, shell.process.cwd), Directory):
        shell.process.write(os.fsencode(f"cd: {target}: Not a directory\n"), 2)
        return 1
    shell.process.cwd = files.canonical(target, shell.process.cwd)
    return 0


def _exit(shell: Shell, words: list[str]) -> int:
    raise Exited(int(words[0]) if words else shell.status)


def _exec(shell: Shell, words: list[str]) -> int:
    if not words:
        return 0
    process = shell.process
    process.argv = tuple(words)
    process.env = {name: shell.variables[name] for name in shell.exported}
    process.traps = {signum: act for signum, act in process.traps.items() if act is None}
    raise Exited(lookup.run(process))


def _export(shell: Shell, words: list[str]) -> int:
    for word in words:
        name, assigns, value = word.partition("=")
        if assigns:
            shell.variables[name] = value
        shell.exported.add(name)
        shell.variables.setdefault(name, "")
    return 0


def _kill(shell: Shell, words: list[str]) -> int:
    signum = int(signal.SIGTERM)
    if words[0] == "-s":
        signum, words = _signal_number(words[1]), words[2:]
    elif words[0].startswith("-"):
        signum, words = _signal_number(words[0][1:]), words[1:]
    status = 0
    for word in words:
        target = shell.process.machine.processes.get(int(word))
        if target is None:
            shell.process.write(f"kill: {word}: No such process\n".encode(), 2)
            status = 1
        elif signum:
            target.deliver(signum)
    shell.process.check()
    return status


def _wait_for(shell: Shell, words: list[str]) -> int:
    chosen = [child for child in shell.background if not words or str(child.pid) in words]
    statuses = [shell.process.wait(child) for child in chosen]
    return statuses[-1] if words and statuses else 0


def _trap(shell: Shell, words: list[str]) -> int:
    script, *names = words
    for name in names:
        signum = _signal_number(name)
        if script == "-":
            shell.process.traps.pop(signum, None)
        else:
            shell.process.traps[signum] = _action(shell, script) if script else None
    return 0


def _action(shell: Shell, script: str) -> Callable[[], None]:
    command = Parser(script).parse()

    def act() -> None:
        status = shell.status
        shell.run(command)
        shell.status = status

    return act


def _signal_number(name: str) -> int:
    return int(name) if name.isdigit() else int(signal.Signals["SIG" + name.removeprefix("SIG")])


_BUILTINS: dict[str, Builtin] = {
    ":": _colon,
    "cd": _cd,
    "exec": _exec,
    "exit": _exit,
    "export": _export,
    "kill": _kill,
    "trap": _trap,
    "wait": _wait_for,
}
