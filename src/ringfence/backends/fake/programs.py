"""The built-in programs."""

from __future__ import annotations

import os
import string
from typing import TYPE_CHECKING

from . import lookup, shell
from .nodes import SANDBOX_UID

if TYPE_CHECKING:
    from .process import Main, Process

USER = "sandbox"


def true(process: Process) -> int:  # noqa: ARG001
    """`true`."""
    return 0


def false(process: Process) -> int:  # noqa: ARG001
    """`false`."""
    return 1


def echo(process: Process) -> int:
    """`echo [-n] word...`."""
    words = process.argv[1:]
    end = "\n"
    if words[:1] == ("-n",):
        words, end = words[1:], ""
    process.write(os.fsencode(" ".join(words) + end))
    return 0


def printf(process: Process) -> int:
    """`printf format argument...` with `%s`, `%d`, `%%` and the usual escapes."""
    form, arguments = process.argv[1], list(process.argv[2:])
    while True:
        written, used = _format(form, arguments)
        process.write(written)
        if not arguments or not used:
            return 0


def cat(process: Process) -> int:
    """`cat [file...]`; `-` or nothing is stdin."""
    status = 0
    for name in process.argv[1:] or ("-",):
        try:
            if name == "-":
                while data := process.read():
                    process.write(data)
            else:
                _copy_out(process, name)
        except OSError as exc:
            process.write(os.fsencode(f"cat: {name}: {exc.strerror}\n"), 2)
            status = 1
    return status


def sleep(process: Process) -> int:
    """`sleep seconds`."""
    process.sleep(float(process.argv[1]))
    return 0


def env(process: Process) -> int:
    """`env`: the environment, one variable a line."""
    for name, value in process.env.items():
        process.write(os.fsencode(f"{name}={value}\n"))
    return 0


def pwd(process: Process) -> int:
    """`pwd`."""
    process.write(os.fsencode(process.cwd + "\n"))
    return 0


def identity(process: Process) -> int:
    """`id [-u|-un]`."""
    uid = SANDBOX_UID
    full = f"uid={uid}({USER}) gid={uid}({USER}) groups={uid}({USER})"
    flags = "".join(process.argv[1:]).replace("-", "")
    said = {"": full, "u": str(uid), "g": str(uid), "un": USER, "nu": USER}[flags]
    process.write(said.encode() + b"\n")
    return 0


def link(process: Process) -> int:
    """`ln -s target name`."""
    option, target, name = process.argv[1:]
    if option != "-s":
        process.write(b"ln: only -s is built in\n", 2)
        return 1
    try:
        process.machine.files.make_symlink(name, target, process.cwd)
    except OSError as exc:
        process.write(os.fsencode(f"ln: {name}: {exc.strerror}\n"), 2)
        return 1
    return 0


def setsid(process: Process) -> int:
    """`setsid command...`: the session is new, the exec's tag stays."""
    process.argv = process.argv[1:]
    return lookup.run(process)


def test(process: Process) -> int:
    """`test` and `[` with -e -f -d -n -z, = and !=."""
    words = list(process.argv[1:])
    if process.argv[0] == "[":
        words = words[:-1]
    return 0 if shell.judge(words, process.machine.files, process.cwd) else 1


PROGRAMS: dict[str, Main] = {
    "[": test,
    "cat": cat,
    "echo": echo,
    "env": env,
    "false": false,
    "id": identity,
    "ln": link,
    "printf": printf,
    "pwd": pwd,
    "setsid": setsid,
    "sh": shell.main,
    "sleep": sleep,
    "test": test,
    "true": true,
}


def _copy_out(process: Process, name: str) -> None:
    with process.machine.files.open_read(name, process.cwd) as file:
        while data := file.read(65_536):
            process.write(data)


def _format(form: str, arguments: list[str]) -> tuple[bytes, bool]:
    """Apply printf's format once, taking arguments off the list; return the text and whether it
    took any.
    """
    out = bytearray()
    used = False
    at = 0
    while at < len(form):
        char = form[at]
        following = form[at + 1 : at + 2]
        if char == "\\":
            piece, width = _escape(form[at + 1 :])
            out += piece
            at += 1 + width
        elif char == "%" and following in ("s", "d"):
            value = arguments.pop(0) if arguments else ""
            out += os.fsencode(value if following == "s" else str(int(value or 0)))
            used = True
            at += 2
        else:
            out += os.fsencode(char)
            at += 2 if char == "%" and following == "%" else 1
    return bytes(out), used


_ESCAPES = {"n": b"\n", "t": b"\t", "r": b"\r", "\\": b"\\"}


def _escape(rest: str) -> tuple[bytes, int]:
    """The bytes of a backslash escape, and how many characters it took."""
    digits = ""
    for char in rest[:3]:
        if char not in string.octdigits:
            break
        digits += char
    if digits:
        return bytes([int(digits, 8) & 0xFF]), len(digits)
    if rest[:1] in _ESCAPES:
        return _ESCAPES[rest[0]], 1
    return os.fsencode("\\" + rest[:1]), len(rest[:1])
