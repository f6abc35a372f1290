"""Interface of a peer, and the reason where one is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Protocol

from ..processes import end_tree

_PATIENCE_S = 60.0


class PeerMissingError(Exception):
    """This peer cannot be measured here; the text says why."""


class Peer(Protocol):
    """Something beside which we are measured."""

    name: str

    def run_true(self) -> float | None:
        """Run `true` once: seconds by its own watch, or None."""
        ...

    def close(self) -> None: ...


def program(name: str) -> str:
    """The full path of a program.

    Raises:
        PeerMissingError: It is not installed.
    """
    # The places of system programs too, which an ordinary user's PATH often lacks.
    path = os.environ.get("PATH", os.defpath) + ":/usr/local/sbin:/usr/sbin:/sbin"
    found = shutil.which(name, path=path)
    if found is None:
        raise PeerMissingError("not installed")
    return found


def call(*argv: str, stdin: bytes | None = None, patience_s: float = _PATIENCE_S) -> bytes:
    """Run a peer's command to its end; its standard output.

    Raises:
        PeerMissingError: It failed, with the last line that it printed about it, or hung.
    """
    pipe = subprocess.PIPE
    try:
        # A session of its own, by which everything that the peer started is found if it hangs.
        process = subprocess.Popen(
            argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
    except OSError as exc:
        raise PeerMissingError(f"{argv[0]}: {exc.strerror}") from exc
    with process:
        try:
            output, errors = process.communicate(stdin, patience_s)
        except BaseException as exc:
            end_tree(process.pid)
            if not isinstance(exc, subprocess.TimeoutExpired):
                raise
            raise PeerMissingError(f"did not end within {patience_s:g} s") from exc
    if process.returncode:
        raise PeerMissingError(_reason(process.returncode, errors or output))
    return output


def _reason(status: int, output: bytes) -> str:
    lines = output.decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:200] if lines else f"exit status {status}"


class CommandPeer:
    """A peer that runs a command as one process; it counts as usable once it succeeded."""

    def __init__(self, name: str, *argv: str) -> None:
        self.name, self.argv = name, argv
        call(*argv)

    def run_true(self) -> float | None:
        # No pipes: what the peer prints goes nowhere, and only its process is timed. No timeout
        # either: with one, `subprocess` looks only now and then whether the process has ended.
        subprocess.run(
            self.argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )
        return None

    def close(self) -> None:
        """Nothing is left to remove."""
