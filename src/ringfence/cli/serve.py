"""`ringfence serve`."""

from __future__ import annotations

import gc
import json
import os
import sys

from ..errors import BackendUnavailable, BadJson, InvalidRequest, IoError
from ..model.base.checks import parse_duration
from .options import no_arguments, parse
from .request import whole_number
from .server.hosting import SERVE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from ..daemon.config import DaemonConfig

_ALLOCATOR = "PYTHONMALLOC"


_NEEDS = {"cluster-name": "cluster", "allow-public": "listen"}


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""
    given, rest = parse(SERVE, argv)
    if "help" in given:
        from .help import help_of

        sys.stdout.write(help_of(SERVE))
        return 0
    no_arguments(SERVE, rest)
    from ..daemon import succession

    _check_together(given)
    config = _config(given)
    if config.shards and "cluster" not in given and config.membership is None:
        hint = "add --cluster ADDRESS, or remove shards"
        raise InvalidRequest("has no effect without --cluster", field="shards", hint=hint)
    if "stop" in given:
        found = succession.stop(config.state_dir)
        print("stopped" if found else f"nothing serves {config.state_dir}")
        return 0
    _check_extra()
    if "detach" in given:
        # As many lines as `_ready` prints: a pipe that closes before the last one would end the server.
        lines = 1 if "json" in given or not config.listen else 2
        return _detach([word for word in argv if word != "--detach"], config.state_dir, lines)
    from ..daemon import priority

    priority.own_session()
    _use_malloc()
    # Until it serves, nothing is made that could be thrown away: looking for it takes a tenth of the time.
    gc.disable()
    if "take-over" in given:
        _load()  # while the other one serves
        succession.take_over(config.state_dir)
    from ..daemon.holding import held

    with held(config) as first:  # who connects from here on waits, and is answered
        _load()

        def ready(addresses: list[str]) -> None:
            _ready(addresses, as_json="json" in given)

        if "cluster" in given:
            from ..cluster.serve import serve as serve_cluster

            name = given.get("cluster-name", "default")
            serve_cluster(config, first, ready, cluster=given["cluster"], name=name)
            return 0
        from ..daemon.serve import serve

        serve(config, first, ready, must_work=given.get("backend", ()))
    return 0


def _use_malloc() -> None:
    """Start this program again, once, with malloc for small objects.

    Python's own allocator gives back a MiB when none of its objects is left. After a burst of requests
    nearly every MiB has one that stays; malloc_trim gives back each free page. It takes 20 ms.
    """
    if os.environ.pop(_ALLOCATOR, None) or sys.flags.ignore_environment:
        return
    if sys.argv[1:] == sys.orig_argv[1 - len(sys.argv) :]:  # not in a program of somebody else's
        again = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, again, {**os.environ, _ALLOCATOR: "malloc"})


def _detach(argv: Sequence[str], state_dir: str, lines: int) -> int:
    """Start a server that outlives this command, and wait until it listens or has failed."""
    import subprocess

    from ..store.directory import make_private

    path = os.path.join(state_dir, "serve.log")
    place = make_private(state_dir)  # before anything is written there
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        log = os.open("serve.log", flags, 0o600, dir_fd=place)
    except OSError as exc:
        raise IoError(f"{path}: {exc.strerror}", field="state_dir") from exc
    finally:
        os.close(place)
    begin = os.fstat(log).st_size
    # -P: a module of the current directory is not taken for one of ours.
    command = [sys.executable, "-P", "-m", "ringfence", "serve", *argv]
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log,
        start_new_session=True,
    )
    assert server.stdout is not None
    told = [server.stdout.readline() for _ in range(lines)]
    if all(told):
        sys.stdout.buffer.write(b"".join(told))
        return 0
    code = server.wait()
    with open(path, "rb") as file:
        file.seek(begin)
        sys.stderr.buffer.write(file.read())
    return code or 1


def _check_extra() -> None:
    """Refuse to start without the extra, before a state directory is made."""
    from importlib.util import find_spec

    if find_spec("fastapi") is None:
        raise _not_installed("No module named 'fastapi'")


def _not_installed(why: object) -> BackendUnavailable:
    hint = 'pip install "ringfence[server]"'
    return BackendUnavailable(f"the server is not installed: {why}", hint=hint)


def _load() -> None:
    """Read what the extra brings, which takes half a second of a processor."""
    from ..daemon.priority import raised

    try:
        with raised():
            from ..api import app as _app  # noqa: F401
    except ImportError as exc:
        raise _not_installed(exc) from exc


def _ready(addresses: list[str], *, as_json: bool) -> None:
    gc.freeze()  # what was read so far stays for good, and is never looked at again
    gc.enable()
    if as_json:
        print(json.dumps({"listening": addresses}), flush=True)
        return
    for each in addresses:
        print(f"listening on {each}", flush=True)


def _config(given: dict[str, Any]) -> DaemonConfig:
    from ..daemon.config import DaemonConfig

    form: dict[str, Any] = {}
    if "config" in given:
        form = _read(given["config"])
    for option, name in (
        ("state-dir", "state_dir"),
        ("backend", "backends"),
        ("listen", "listen"),
        ("tls-certificate", "tls_certificate"),
        ("tls-key", "tls_key"),
        ("allow-host", "allowed_hosts"),
        ("allow-origin", "allowed_origins"),
        ("allow-public", "allow_public"),
        ("log-level", "log_level"),
    ):
        if option in given:
            form[name] = given[option]
    if "max-sandboxes" in given:
        limit = whole_number(given["max-sandboxes"], "--max-sandboxes")
        form["manager"] = {**form.get("manager", {}), "max_sandboxes": limit}
    of_e2b = [name for name in ("domain", "internet") if name in given]
    if of_e2b and "e2b" not in given and form.get("e2b") is None:
        hint = f"add --e2b, or remove --{of_e2b[0]}"
        raise InvalidRequest("has no effect without --e2b", field=of_e2b[0], hint=hint)
    if "e2b" in given or of_e2b:
        form["e2b"] = {**(form.get("e2b") or {}), **_e2b(given)}
    if "outlive" in given:
        form["outlive_s"] = parse_duration(given["outlive"], "outlive_s")
    try:
        return DaemonConfig.from_json(form)
    except InvalidRequest as exc:
        if "config" not in given or SERVE.flag_of(exc.field).removeprefix("--") in given:
            raise
        what = f"{given['config']}: {exc.field}: {exc.message}"
        raise InvalidRequest(what, field="--config", hint=exc.hint) from exc


def _check_together(given: dict[str, Any]) -> None:
    """Refuse options that have no effect with, or without, each other."""
    if "" in (given.get("state-dir"), given.get("domain")):
        name = "state-dir" if given.get("state-dir") == "" else "domain"
        hint = "remove the option, or give its value: is a variable of the shell empty?"
        raise InvalidRequest("must not be empty", field=f"--{name}", hint=hint)
    for name in ("detach", "take-over"):
        if "stop" in given and name in given:
            what, hint = "ends the server: it starts none", f"remove --stop or --{name}"
            raise InvalidRequest(what, field="--stop", hint=hint)
    for name, other in _NEEDS.items():
        if name in given and other not in given and "config" not in given:
            hint = f"add --{other}, or remove --{name}"
            raise InvalidRequest(f"has no effect without --{other}", field=f"--{name}", hint=hint)


def _e2b(given: dict[str, Any]) -> dict[str, Any]:
    from ..model.net.network import NetworkPolicy

    found = {"domain": given["domain"]} if "domain" in given else {}
    if "internet" in given:
        try:
            policy = NetworkPolicy.parse(given["internet"]).check_no_localhost()
        except InvalidRequest as exc:
            raise InvalidRequest(exc.message, field="--internet", hint=exc.hint) from exc
        found["internet"] = policy.to_json()
    return found


def _read(path: str) -> dict[str, Any]:
    from ..model.base import jsonform

    try:
        with open(path, "rb") as file:
            found = jsonform.loads(file.read(), unique=True)
        return jsonform.json_object(found, "the configuration")
    except OSError as exc:
        hint = "give the path of a JSON configuration file; docs/how-to/server.md has an example"
        raise InvalidRequest(f"{path}: {exc.strerror}", field="--config", hint=hint) from exc
    except (BadJson, InvalidRequest) as exc:
        raise InvalidRequest(f"{path}: {exc.message}", field="--config", hint=exc.hint) from exc
