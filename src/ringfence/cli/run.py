"""`ringfence run`: runs one command in one sandbox; streams and exit code pass through."""

from __future__ import annotations

import os
import stat
from _thread import start_new_thread

from ..errors import InvalidRequest
from .commands import LIMITS, RUN
from .options import parse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from ..backends.protocol import BackendSandbox
    from ..model.execs.exec import ExecRequest
    from ..model.spec import SandboxSpec
    from .network import Record
    from .signals import Bell
    from .supervise import Supervisor

_NULL = (1, 3)  # Documentation/admin-guide/devices.txt


def main(argv: Sequence[str], bell: Bell) -> int:
    """Run it; the exit code is the command's, or 124 or 125. Never raises."""
    given: dict[str, Any] = {"json": _asks_for_json(argv)}
    try:
        given, command = parse(RUN, argv)
        if "help" in given:
            from .help import help_of

            os.write(1, help_of(RUN).encode())
            return 0
        return _run(given, command, bell)
    except BrokenPipeError as exc:
        if exc.filename is None:
            return 141  # the reader of our help is gone: as a shell reports SIGPIPE
        _report_failure(exc, as_json=bool(given.get("json")))
        return 125
    except BaseException as exc:  # noqa: BLE001  whatever it is, a script gets 125 and one line
        _report_failure(exc, as_json=bool(given.get("json")))
        return 125


def _asks_for_json(argv: Sequence[str]) -> bool:
    """Also where the options themselves cannot be read."""
    return "--json" in (argv[: argv.index("--")] if "--" in argv else argv)


def _report_failure(exc: BaseException, *, as_json: bool) -> None:
    from .terminal import complain

    complain(exc, RUN)
    if as_json:
        from .result import print_error

        print_error(exc)


def _run(given: dict[str, Any], command: list[str], bell: Bell) -> int:
    from ..backends.registry import close_all
    from .request import check_protected, make_request, make_spec

    streams: dict[str, Any] = {"stream_stdin": not _is_null(0)}
    if wants_terminal(given):
        from .tty import size_of

        streams["pty"] = size_of(1, 0, 2)
        if os.environ.get("TERM"):
            streams["env"] = {"TERM": os.environ["TERM"]}
    if "image" in given or "pull" in given:
        for other in ("pip", "template"):
            if other in given:
                what = "adds packages to the host's programs, not to an image"
                hint = "build an image with Template.from_image(...), or remove --image"
                raise InvalidRequest(what, field=f"--{other}", hint=hint)
        from .image import command_of

        command = command_of(given, command)
    request = make_request(given, command, **streams)
    spec = make_spec(given, command)
    check_protected(spec)
    spec, files = _with_template(spec, given)
    record = _record(given)
    # Read while the kernel builds the sandbox and this thread waits for it.
    try:
        start_new_thread(_read_ahead, ())
    except RuntimeError:
        pass  # no more threads: what needs one says so
    try:
        sandbox = _provision(spec, given)
        try:
            if "mount" in given or "here" in given:
                _say_where_mounts_are(sandbox)
            supervisor = _supervisor(given, request, sandbox, bell)
            if given.get("json"):
                from .result import run_for_json

                return run_for_json(supervisor, sandbox, spec.limits.output_bytes)
            code = supervisor.run_through()
            if code and not supervisor.timed_out and supervisor.ended_itself:
                _hint(command, code, spec, given)
            return code
        finally:
            sandbox.terminate()
            if record is not None:
                record.close(sandbox)
    finally:
        close_all()
        if files >= 0:
            os.close(files)


def _with_template(spec: SandboxSpec, given: dict[str, Any]) -> tuple[SandboxSpec, int]:
    """Add the packages of `--template` or `--pip`; the descriptor keeps them, -1 without any."""
    if "pip" not in given and spec.template == "default":
        return spec, -1
    from ..environments.apply import apply

    if "pip" in given:
        from .template import with_packages

        spec = with_packages(spec, given["pip"], shows_output=not given.get("json"))
    return apply(spec)


def _provision(spec: SandboxSpec, given: dict[str, Any]) -> BackendSandbox:
    """Make the sandbox; with `--anywhere` with the caller's /proc or without namespaces, where they are
    refused.
    """
    from ..backends.registry import provision

    if "anywhere" not in given or "backend" in given:
        return provision(spec, given.get("backend"))
    from ..errors import BackendUnavailable, IsolationError

    try:
        return provision(spec)
    except (BackendUnavailable, IsolationError) as exc:
        from ..backends.local.host.mountinfo import masks_of_proc
        from ..model.capabilities import NAMESPACES
        from .terminal import say

        if masks_of_proc():
            allowed = spec.altered(allow_degraded=(*spec.allow_degraded, NAMESPACES))
            try:
                sandbox = provision(allowed, "native")
            except IsolationError:
                pass  # more than a /proc is refused
            else:
                say(f"--anywhere: with the /proc of this container ({exc.message})")
                return sandbox
        sandbox = provision(spec, "landlock")
        say(f"--anywhere: without namespaces, by the backend landlock ({exc.message})")
        return sandbox


def _say_where_mounts_are(sandbox: BackendSandbox) -> None:
    from ..backends.registry import mapped_mounts

    if mapped := mapped_mounts(sandbox):
        from .terminal import say

        how = "programs find it by an argument or the working directory, not by that name"
        say(f"--mount: {'; '.join(mapped)} here: {how}")


def _hint(argv: Sequence[str], code: int, spec: SandboxSpec, given: dict[str, Any]) -> None:
    from .hints import hints
    from .terminal import say

    for each in hints(argv, code, spec, given):
        say(f"hint: {each}")


def _record(given: dict[str, Any]) -> Record | None:
    if "net-log" not in given and "net-learn" not in given:
        return None
    from .network import Record

    return Record(given)


def _read_ahead() -> None:
    from . import supervise  # noqa: F401


def _supervisor(
    given: dict[str, Any], request: ExecRequest, sandbox: BackendSandbox, bell: Bell
) -> Supervisor:
    from .supervise import Supervisor

    _warn_of_weak_limits(given, sandbox)
    return Supervisor(sandbox, request, bell)


def _warn_of_weak_limits(given: dict[str, Any], sandbox: BackendSandbox) -> None:
    """Print one line about limits that are weaker than requested, unless `--allow-degraded` names them."""
    allowed = given.get("allow-degraded", ())
    options = {name: option for option, name in LIMITS.items() if option in given}
    if not options or "*" in allowed:
        return
    from .terminal import say

    weak = [
        each
        for each in sandbox.protections()
        if each.name in options and each.status != "enforced" and each.name not in allowed
    ]
    if weak:
        flags = " and ".join(f"--{options[each.name]}" for each in weak)
        how = ", ".join(dict.fromkeys(each.status for each in weak))
        say(
            f"warning: {flags}: {how} on this host; `ringfence doctor --verbose` says why and the fix"
        )


def wants_terminal(given: dict[str, Any]) -> bool:
    """Return whether the command gets a terminal: on `--tty`, or if all three of our streams are one.

    Raises:
        InvalidRequest: `--json` besides, which keeps the streams apart.
    """
    if given.get("json") and given.get("tty"):
        hint = "remove one: on a terminal, standard output and error are one stream"
        raise InvalidRequest("cannot be combined with --json", field="tty", hint=hint)
    if given.get("json"):
        return False
    if given.get("tty"):
        return True
    if not all(os.isatty(fd) for fd in range(3)):
        return False
    from .relay import in_background

    return not in_background()


def _is_null(fd: int) -> bool:
    """Return whether `fd` is /dev/null: then the sandbox's own /dev/null replaces it."""
    found = os.fstat(fd)
    return (
        stat.S_ISCHR(found.st_mode) and (os.major(found.st_rdev), os.minor(found.st_rdev)) == _NULL
    )
