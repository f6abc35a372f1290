"""The Codex CLI as a launcher: where it is, and how it is told what may be written."""

from __future__ import annotations

import functools
import glob
import os
import shutil
import subprocess

from ...errors import BackendUnavailable
from .launchers import SEALS, VIEW, Launcher

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..settings import CodexSettings

_PROBE_S = 20.0
_INSTALL = "npm install -g @openai/codex, or set `binary` in the table [codex] of backends.toml"


class CodexLauncher(Launcher):
    """See `Launcher`. `programs` ends with the binary that is started."""

    def check(self) -> None:
        """See `Launcher`; the binary must also say its version in time."""
        path = self.programs[-1]
        if shutil.which(path) is None:
            places = "on PATH or among npm's global packages"
            why = f"codex: {path!r} is not installed: not found {places}"
            raise BackendUnavailable(why, hint=_INSTALL)
        super().check()
        _version(path, self.probe_timeout_s)

    def describe(self) -> str:
        path = shutil.which(self.programs[-1]) or self.programs[-1]
        return f"{_version(self.programs[-1], self.probe_timeout_s)} at {os.path.realpath(path)}"


def codex(
    path: str = "", *, subcommand: str = "sandbox", probe_timeout_s: float = _PROBE_S
) -> Launcher:
    """The Codex CLI's own sandbox: its filter and read-only files, in a view made by `bwrap`, under our filter.

    Codex shows the host's files as they are; `bwrap` puts the session's at the paths that every
    backend has. What may be written is Codex's decision.

    Args:
        path: The binary, or npm's entry point; empty looks on PATH, then among npm's global packages.
        subcommand: Of the binary, what confines a command.
        probe_timeout_s: How long the binary may take to say its version.
    """
    entry = path or find()
    found = _native(os.path.realpath(shutil.which(entry) or entry))
    places = '["/home", "/mnt", "/var", "/run", "/tmp"]'
    return CodexLauncher(
        name="codex",
        argv=(
            *VIEW,
            *("--chdir", "/home", "--dir", "/run/codex", "--setenv", "HOME", "/run/codex"),
            *("--setenv", "CODEX_HOME", "/run/codex", "--setenv", "PATH", "/usr/bin:/bin"),
            *("--", found, subcommand, "-c", 'sandbox_mode="workspace-write"'),
            *("-c", f"sandbox_workspace_write.writable_roots={places}", "--"),
        ),
        show=("--ro-bind", "{source}", "{target}"),
        programs=("bwrap", entry),
        seals={**SEALS, "seccomp": "Codex filters system calls that reach the network"},
        lacks={"connect": "Codex lets no program connect, and so not the agent either"},
        shows=(_package_of(found),),
        filtered=True,
        anew=("/run",),
        probe_timeout_s=probe_timeout_s,
    )


def of(settings: CodexSettings) -> Launcher:
    """The one that `backends.toml` describes."""
    return codex(
        os.path.expanduser(settings.binary),
        subcommand=settings.subcommand,
        probe_timeout_s=settings.probe_timeout_s,
    )


def find() -> str:
    """The entry point on PATH, else where npm keeps global packages; else its bare name."""
    node = os.path.dirname(os.path.realpath(shutil.which("node") or "/usr/bin/node"))
    prefix = os.environ.get("NPM_CONFIG_PREFIX", "~/.npm-global")
    places = (os.path.expanduser(f"{prefix}/bin"), os.path.expanduser("~/.local/bin"), node)
    found = shutil.which("codex") or shutil.which("codex", path=os.pathsep.join(places))
    return found or "codex"


@functools.cache
def _version(path: str, timeout_s: float) -> str:
    """Ask the binary for its version, once in a process."""
    try:
        said = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise BackendUnavailable(
            f"codex: {path} --version did not answer within {timeout_s:g} s",
            hint="name another binary, or raise codex.probe_timeout_s in backends.toml",
        ) from None
    except OSError as exc:
        raise BackendUnavailable(f"codex: {path}: {exc.strerror}", hint=_INSTALL) from exc
    if said.returncode:
        lines = (said.stderr or said.stdout).strip().splitlines()
        why = lines[-1] if lines else f"exit code {said.returncode}"
        raise BackendUnavailable(f"codex: {path} --version failed: {why}", hint=_INSTALL)
    return said.stdout.strip()


def _native(program: str) -> str:
    """The binary behind npm's entry point, which is a script for a Node that may be out of sight."""
    if not program.endswith(".js"):
        return program
    package = os.path.dirname(os.path.dirname(program))
    places = (f"{package}/node_modules/@openai", os.path.dirname(package))
    found = [
        name for place in places for name in glob.glob(f"{place}/codex-linux-*/vendor/*/bin/codex")
    ]
    return found[0] if found else program


def _package_of(program: str) -> str:
    """The directory that a program needs to be seen: that of its package, where it has one."""
    directory = os.path.dirname(program)
    return os.path.dirname(directory) if os.path.basename(directory) == "bin" else directory
