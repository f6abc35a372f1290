"""Which file `ringfence run -- python3 step.py` brings in: the script named, and nothing else."""

from __future__ import annotations

import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

# Interpreters, and those of their options that take the next argument.
_INTERPRETERS = {
    "python": ("-W", "-X", "--check-hash-based-pycs"),
    "node": ("-r", "--require", "--import", "-C", "--conditions"),
    "bash": ("-o", "-O", "+o", "+O", "--rcfile", "--init-file"),
    "sh": ("-o", "+o"),
    "dash": ("-o", "+o"),
    "ruby": ("-I", "-r", "-C", "-E"),
    "perl": ("-I",),
    "php": ("-c", "-d"),
    "lua": ("-l",),
    "zsh": ("-o", "+o"),
    "Rscript": ("-e",),
    # A single source file; a class name is not a file and needs no mount.
    "java": ("-cp", "-classpath", "--class-path", "-p", "--module-path", "--add-modules"),
}
# Directories that the sandbox has of its own; a host path below them is not the caller's script.
_SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/etc",
    "/proc",
    "/sys",
    "/dev",
)


def scripts_of(argv: Sequence[str], workdir: str) -> list[tuple[str, str]]:
    """Find the scripts to mount read-only, as (host path, path inside); usually none or one.

    A script is argv[0] where that is a path, and the first non-option argument of a known
    interpreter where that is a relative path. Relative paths must lead below the current directory.
    """
    found = []
    command = argv[0]
    if "/" in command:
        found.append(_absolute(command) if command[0] == "/" else _relative(command, workdir))
    with_value = _INTERPRETERS.get(_family(command))
    if with_value is not None:
        operand = _first_operand(argv[1:], with_value)
        if operand and not operand.startswith("/"):
            found.append(_relative(operand, workdir))
    return [each for each in found if each is not None]


def missing_script(argv: Sequence[str]) -> str:
    """The script that an interpreter is given and that does not exist; empty where there is none."""
    with_value = _INTERPRETERS.get(_family(argv[0]))
    script = "" if with_value is None else _first_operand(argv[1:], with_value)
    is_inline = any(word in ("-c", "-e", "-m", "-") for word in argv[1:])
    return "" if is_inline or os.path.exists(script) else script


def _family(command: str) -> str:
    """`python3.12` is a python, `/opt/node20` a node."""
    name = command.rpartition("/")[2]
    return name.rstrip("0123456789.") or name


def _first_operand(arguments: Sequence[str], with_value: Sequence[str]) -> str:
    skip = False
    for position, word in enumerate(arguments):
        if skip:
            skip = False
        elif word == "--":
            return arguments[position + 1] if position + 1 < len(arguments) else ""
        elif word in with_value:
            skip = True
        elif not word.startswith(("-", "+")):
            return word
    return ""


def _absolute(path: str) -> tuple[str, str] | None:
    parts = path.split("/")
    if ".." in parts or any(path == tree or path.startswith(tree + "/") for tree in _SYSTEM):
        return None
    return (path, path) if _is_file(path) else None


def _relative(path: str, workdir: str) -> tuple[str, str] | None:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts or not parts or not _is_file(path):
        return None
    here = os.path.realpath(".")
    source = os.path.realpath(path)
    # A symlink must not turn "the script in this directory" into a file of somewhere else.
    if not source.startswith(here.rstrip("/") + "/"):
        return None
    return source, f"{workdir.rstrip('/')}/{'/'.join(parts)}"


def _is_file(path: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False
