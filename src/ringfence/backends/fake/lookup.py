"""From a command's name to the built-in program, as execvp would look it up."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from .nodes import EXECUTE, File, Node, oserror

if TYPE_CHECKING:
    from .filesystem import FileSystem
    from .process import Main, Process

NOT_FOUND, NOT_EXECUTABLE = 127, 126
BIN = ("/usr/bin", "/bin")


def run(process: Process) -> int:
    """Become the program `argv[0]`; 127 when there is none, 126 when it cannot be run."""
    name = process.argv[0]
    try:
        path = find(process.machine.files, name, process.cwd)
        main = _load(process, path)
    except FileNotFoundError:
        process.write(os.fsencode(f"{name}: not found\n"), 2)
        return NOT_FOUND
    except OSError as exc:
        process.write(os.fsencode(f"{name}: {exc.strerror}\n"), 2)
        return NOT_EXECUTABLE
    return main(process)


def find(files: FileSystem, name: str, cwd: str) -> str:
    """The canonical path of the program `name`."""
    if "/" in name:
        return files.canonical(name, cwd)
    for directory in BIN:
        try:
            return files.canonical(f"{directory}/{name}")
        except FileNotFoundError:
            continue
    raise oserror(errno.ENOENT)


def _load(process: Process, path: str) -> Main:
    files = process.machine.files
    node: Node = files.find(path)
    if not isinstance(node, File) or not node.allows(EXECUTE):
        raise oserror(errno.EACCES)
    directory, _, name = path.rpartition("/")
    if directory in BIN and name in process.machine.programs:
        return process.machine.programs[name]
    with files.open_read(path) as file:
        script = file.read()
    if not script.startswith(b"#!/bin/sh"):
        raise oserror(errno.ENOEXEC)
    process.argv = ("sh", "-c", os.fsdecode(script), *process.argv)
    return process.machine.programs["sh"]
