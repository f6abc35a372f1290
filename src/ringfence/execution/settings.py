"""The config of the execution service, kept in a file that an administrator may edit."""

from __future__ import annotations

import errno
import json
import os

from ..errors import BadJson, InvalidRequest, IoError, StorageFull
from ..model.base.jsonform import loads
from ..model.execution.config import ExecutionConfig

FILE = "execution.json"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class Settings:
    """The config now, and how it gets to be another one.

    Args:
        path: Where it is kept; None keeps it in memory only. A missing file means the defaults.

    Raises:
        InvalidRequest: The file does not hold a valid config; `field` names what is wrong.
    """

    def __init__(self, path: str | None, default: ExecutionConfig | None = None) -> None:
        self._path, self._default = path, default or ExecutionConfig()
        self.now = self.read()

    def read(self) -> ExecutionConfig:
        """Read the configuration file; without one, return the default."""
        if self._path is None:
            return self._default
        try:
            with open(self._path, "rb") as file:
                text = file.read()
        except FileNotFoundError:
            return self._default
        except OSError as exc:
            raise IoError(f"{self._path}: {exc.strerror}", field="config") from exc
        try:
            return ExecutionConfig.from_json(loads(text))
        except (InvalidRequest, BadJson) as exc:
            message = f"{self._path}: {exc.message}"
            raise type(exc)(message, field=exc.field, hint=exc.hint) from exc

    def write(self, config: ExecutionConfig) -> None:
        """Keep `config`; whoever reads the file meanwhile sees the old one or the new one, whole.

        Raises:
            StorageFull: The disk is full; the old one holds.
        """
        if self._path is None:
            self._default = config
            return
        beside = f"{self._path}.new"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            with open(os.open(beside, flags, 0o600), "w", encoding="utf-8") as file:
                json.dump(config.to_json(), file, indent=2)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            os.rename(beside, self._path)
        except OSError as exc:
            kind = StorageFull if exc.errno in _NO_ROOM else IoError
            raise kind(f"{self._path}: {exc.strerror}; the configuration was not changed") from exc
