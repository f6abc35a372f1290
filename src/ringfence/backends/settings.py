"""Backends of the user's own, and settings of ours: the file `backends.toml`.

One bad table stops nothing else: the backend that it describes says what is wrong when it is asked for.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field

from ..errors import InvalidRequest, RingfenceError
from ..model.base import checks, jsonform
from ..model.base.checks import FrozenMap
from ..model.base.model import Model
from ..model.places import backends_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_WORDS = dict.fromkeys(("root", "etc", "agent", "uid", "own", "host_id"), "")
_OF_SHOWN = dict.fromkeys(("source", "target"), "")
_LONGEST_S = 600.0
WHOLE = "backends.toml"  # what is said under this name is wrong with the whole file


@dataclass(frozen=True, eq=False, repr=False)
class LauncherSettings(Model):
    """A table `[launchers.NAME]`; see `backends.command.launchers.Launcher`."""

    argv: tuple[str, ...]
    show: tuple[str, ...] = ()
    within: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=FrozenMap)
    programs: tuple[str, ...] = ()
    shows: tuple[str, ...] = ()
    filtered: bool = True

    def __post_init__(self) -> None:
        for name in ("argv", "show", "within", "programs", "shows"):
            object.__setattr__(self, name, checks.texts(getattr(self, name), name))
        object.__setattr__(self, "env", checks.string_map(self.env, "env"))
        checks.flag(self.filtered, "filtered")
        if not self.argv:
            checks.refuse("argv", "is empty")
        own = [word for word in (*self.argv, *self.within) if word not in ("{shown}", "{masked}")]
        _check_words("argv", (*own, *self.env.values()), _WORDS)
        _check_words("show", self.show, _OF_SHOWN)


@dataclass(frozen=True, eq=False, repr=False)
class CodexSettings(Model):
    """The table `[codex]`: which Codex CLI, and how long it may take to say its version."""

    binary: str = ""
    subcommand: str = "sandbox"
    probe_timeout_s: float = 20.0

    def __post_init__(self) -> None:
        checks.text(self.binary, "binary")
        checks.text(self.subcommand, "subcommand", empty=False)
        checks.number(self.probe_timeout_s, "probe_timeout_s", 0.1, _LONGEST_S)


@dataclass(frozen=True, eq=False, repr=False)
class LxcSettings(Model):
    """The table `[lxc]`: which program starts containers."""

    executable: str = "lxc-start"

    def __post_init__(self) -> None:
        checks.text(self.executable, "executable", empty=False)


@dataclass(frozen=True, eq=False, repr=False)
class StreamSettings(Model):
    """A table `[streams.NAME]`: a command whose input and output lead elsewhere, as `docker exec -i BOX`.

    Attributes:
        quoted: Whether a shell there reads what follows the command as one line.
        python: The Python there.
        launcher: What confines there; empty for bubblewrap.
    """

    argv: tuple[str, ...]
    quoted: bool = False
    python: str = "python3"
    launcher: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("argv", "launcher"):
            object.__setattr__(self, name, checks.texts(getattr(self, name), name))
        if not self.argv:
            checks.refuse("argv", "is empty")
        checks.flag(self.quoted, "quoted")
        checks.text(self.python, "python", empty=False)


@dataclass(frozen=True, eq=False, repr=False)
class SshSettings(Model):
    """A table `[ssh.NAME]`; `options` are as for `ssh -o`, `identity` is a file with a private key."""

    host: str
    user: str = ""
    port: int = 0
    identity: str = ""
    options: tuple[str, ...] = ()
    program: str = "ssh"
    python: str = "python3"
    launcher: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("options", "launcher"):
            object.__setattr__(self, name, checks.texts(getattr(self, name), name))
        for name in ("user", "identity"):
            checks.text(getattr(self, name), name)
        for name in ("host", "program", "python"):
            checks.text(getattr(self, name), name, empty=False)
        checks.integer(self.port, "port", 0, 65535)


_OURS = {"codex": CodexSettings, "lxc": LxcSettings}
_KINDS = {"launchers": LauncherSettings, "streams": StreamSettings, "ssh": SshSettings}


class Settings:
    """Content of the file.

    Attributes:
        path: Of the file; it may not exist.
        found: Backend name to its settings, or to the error in them.
    """

    def __init__(self, path: str = "", *, required: bool = False) -> None:
        self.path = path or backends_file()
        self.found: dict[str, Model | RingfenceError] = {}
        try:
            tables = _tables(self.path, required=required or bool(path))
        except RingfenceError as exc:
            self.found[WHOLE] = exc
            return
        for name, content in tables.items():
            if name in _OURS:
                self.found[name] = _read(f"{self.path}: {name}", _OURS[name], content)
            elif name in _KINDS and hasattr(content, "items"):
                for each, options in content.items():
                    where = f"{self.path}: {name}.{each}"
                    self.found[each] = _read(where, _KINDS[name], options, name=each)
            else:
                known = ", ".join((*_OURS, *(f"{kind}.NAME" for kind in _KINDS)))
                said = f"{self.path}: unknown table {name!r}"
                self.found[WHOLE] = InvalidRequest(said, hint=f"known: {known}")

    def of(self, name: str) -> Any:
        """The settings of one of our backends; the defaults where nothing is said.

        Raises:
            InvalidRequest: They are wrong.
        """
        found = self.found.get(name) or self.found.get(WHOLE) or _OURS[name]()
        if isinstance(found, RingfenceError):
            raise found
        return found


def _tables(path: str, *, required: bool) -> Mapping[str, Any]:
    import tomllib

    try:
        with open(path, "rb") as file:
            info = os.fstat(file.fileno())
            # It names programs that run as us.
            if info.st_uid not in (0, os.geteuid()) or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise InvalidRequest(
                    f"{path}: other users can write to this file, which names programs to run",
                    hint=f"chown it to this user, and chmod go-w {path}",
                )
            return tomllib.load(file)
    except FileNotFoundError:
        if required:
            raise InvalidRequest(f"{path}: no such file", field="backends_file") from None
        return {}
    except OSError as exc:
        raise InvalidRequest(f"{path}: {exc.strerror}", field="backends_file") from exc
    except (ValueError, RecursionError) as exc:
        raise InvalidRequest(f"{path}: not TOML: {exc}", field="backends_file") from exc


def _read(where: str, cls: type[Model], content: object, name: str = "") -> Model | RingfenceError:
    try:
        if name:
            checks.name(name, "the name")
        return cls.from_json(content)
    except InvalidRequest as exc:
        said = f"{jsonform.join(where, exc.field)}: {exc.message}"
        return InvalidRequest(said, field="backends_file", hint=exc.hint)


def _check_words(field: str, words: tuple[str, ...], known: Mapping[str, str]) -> None:
    for word in words:
        try:
            word.format(**known)
        except (KeyError, IndexError, ValueError):
            names = ", ".join(f"{{{name}}}" for name in known)
            checks.refuse(
                field, f"{word!r} has an unknown placeholder", f"known: {names}; {{{{ is {{"
            )
