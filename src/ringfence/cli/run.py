"""`ringfence run`: one command, one sandbox, streams and exit code passed through."""

from __future__ import annotations

import os
import stat
from _thread import start_new_thread

from .commands import RUN
from .options import parse
from .signals import Interrupted, interrupt

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from ..backends.protocol import Backend, BackendSandbox
    from ..model.exec import ExecRequest
    from ..model.spec import SandboxSpec

TIMED_OUT, OWN_FAILURE = 124, 125
_NULL = (1, 3)  # Documentation/admin-guide/devices.txt
# Options whose value may be weaker here than asked, and the protection that says so.
_LIMITS = {
    "memory": "memory_limit",
    "cpus": "cpu_limit",
    "pids": "pids_limit",
    "disk": "disk_quota",
    "inodes": "inode_quota",
    "open-files": "open_files_limit",
}


def main(argv: Sequence[str]) -> int:
    """Run it; the exit code is the command's, or 124 or 125. Never raises."""
    interrupt()
    given: dict[str, Any] = {"json": _asks_for_json(argv)}
    try:
        given, command = parse(RUN, argv)
        if "help" in given:
            from .help import help_of

            os.write(1, help_of(RUN).encode())
            return 0
        return _run(given, command)
    except Interrupted as exc:
        return 128 + exc.number
    except BaseException as exc:  # noqa: BLE001  whatever it is, a script gets 125 and one line
        _report_failure(exc, as_json=bool(given.get("json")))
        return OWN_FAILURE


def _asks_for_json(argv: Sequence[str]) -> bool:
    """Also where the options themselves cannot be read."""
    return "--json" in (argv[: argv.index("--")] if "--" in argv else argv)


def _report_failure(exc: BaseException, *, as_json: bool) -> None:
    from .terminal import complain

    complain(exc, RUN)
    if as_json:
        from .result import print_error

        print_error(exc)


def _run(given: dict[str, Any], command: list[str]) -> int:
    from ..backends.registry import backend_named
    from .request import make_request, make_spec

    streams: dict[str, Any] = {"stream_stdin": not _is_null(0)}
    if wants_terminal(given):
        from .tty import size_of

        streams["pty"] = size_of(1, 0, 2)
        if os.environ.get("TERM"):
            streams["env"] = {"TERM": os.environ["TERM"]}
    request = make_request(given, command, **streams)
    spec = make_spec(given, command)
    backend = backend_named(given.get("backend", "native"))
    # Read while the kernel builds the sandbox and this thread waits for it.
    start_new_thread(_read_ahead, ())
    try:
        sandbox = backend.provision(_tolerant(spec))
        try:
            return _supervise(given, spec, request, sandbox)
        finally:
            sandbox.terminate()
    finally:
        _close(backend)


def _tolerant(spec: SandboxSpec) -> SandboxSpec:
    """Naming a limit on the command line allows the weaker form of it, which is then warned of."""
    if not spec.limits.cpus:
        return spec
    from dataclasses import replace

    return replace(spec, allow_degraded=(*spec.allow_degraded, "cpu_limit"))


def _read_ahead() -> None:
    from . import supervise  # noqa: F401


def _close(backend: Backend) -> None:
    """Wait until nothing is left, unless the user does not want to."""
    try:
        backend.close()
    except Interrupted:
        pass


def _supervise(
    given: dict[str, Any], spec: SandboxSpec, request: ExecRequest, sandbox: BackendSandbox
) -> int:
    from .supervise import Supervisor

    asked = {name for option, name in _LIMITS.items() if option in given}
    if asked:
        _warn_of_weak_limits(asked, spec.allow_degraded, sandbox)
    supervisor = Supervisor(sandbox, request, spec.limits.output_bytes)
    if given.get("json"):
        from .result import run_for_json

        return run_for_json(supervisor, sandbox)
    return supervisor.run_through()


def _warn_of_weak_limits(
    asked: set[str], allowed: Sequence[str], sandbox: BackendSandbox
) -> None:
    from .terminal import say

    for each in sandbox.protections():
        if each.name in asked and each.status != "enforced" and not {each.name, "*"} & set(allowed):
            say(f"warning: {each.name} {each.status}: {each.why}" + (f" ({each.fix})" if each.fix else ""))


def wants_terminal(given: dict[str, Any]) -> bool:
    """Whether the command gets a terminal: asked for, or all three streams are ours and in front."""
    if given.get("json"):
        return False
    if given.get("tty"):
        return True
    if not all(os.isatty(fd) for fd in range(3)):
        return False
    from .relay import in_background

    return not in_background()


def _is_null(fd: int) -> bool:
    """Whether `fd` is /dev/null: then the sandbox's own does as well, and nothing is to be relayed."""
    found = os.fstat(fd)
    return stat.S_ISCHR(found.st_mode) and (os.major(found.st_rdev), os.minor(found.st_rdev)) == _NULL
