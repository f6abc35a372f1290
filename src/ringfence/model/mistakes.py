"""Names that other libraries use, and what they are called here: read when a name was wrong."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any, TypeVar

    T = TypeVar("T")


def spread(rows: Mapping[str, T]) -> dict[str, T]:
    """An entry for each word of a key: `{"a b": 1}` becomes `{"a": 1, "b": 1}`."""
    return {name: value for names, value in rows.items() for name in names.split()}


_MEMORY = 'use limits={"memory_bytes": "256m"}'
_CPUS = 'use limits={"cpus": 1.5}'
_NETWORK = 'use network="example.com,*.example.org", "none", "public" or "unrestricted"'
_HOST_FILES = 'use mounts=".:/work:rw"'
_RESULT = "the result has stdout, stderr and text"
_TIMEOUT = {"timeout timeout_ms time_limit": "use timeout_s=SECONDS"}
_LOGIN = "`ringfence image pull --user NAME:PASSWORD IMAGE` fetches it before"
_COPY = "files.upload(local, remote) and files.download(remote, local)"

_RUN = {
    **_TIMEOUT,
    "check": "no exit code raises; test result.ok",
    "input": "use stdin=",
    "shell": "use sandbox.shell(SCRIPT)",
    "capture_output stdout stderr text": _RESULT,
    "encoding universal_newlines": "result.stdout_text is UTF-8",
    "environment envs env_vars": 'use env={"NAME": "value"}',
    "workdir working_dir working_directory": "use cwd=",
    "tty pty stream": "use sandbox.start([...], pty=(24, 80))",
    "user_id": "use user=",
}

_INSTEAD: dict[str, dict[str, str]] = {
    "create()": {
        "memory mem mem_limit memory_bytes memory_mb": _MEMORY,
        "cpu cpus cpu_count nano_cpus": _CPUS,
        "timeout timeout_s timeout_ms time_limit": (
            "ttl_s=SECONDS ends the sandbox; timeout_s= of exec() ends one command"
        ),
        "volumes volume binds files mount": _HOST_FILES,
        "allow_internet_access internet net network_mode allowed_hosts": _NETWORK,
        "envs environment env_vars": 'use env={"NAME": "value"}',
        "cwd working_dir working_directory": 'use workdir="/work"',
        "pids pids_limit": 'use limits={"pids": 64}',
        "disk disk_bytes storage": 'use limits={"disk_bytes": "1g"}',
        "gpu gpus": "GPUs are not supported",
        "command cmd argv": "run a command with exec([...])",
        "runtime provider driver": 'use backend="gvisor"',
        "url base_url api_url host": 'use server="unix:PATH" or "http://..."',
        "api_key": 'use server=Client("https://...", key="...")',
        "read_only": 'a mount is read-only unless it ends in ":rw"',
        "name": "name= is a parameter of Client.create; here: labels=",
        "metadata": "metadata= is a parameter of Client.create; here: labels=",
        "python": 'use exec(["python3", "-c", CODE])',
        "ports": "use sandbox.expose(PORT)",
        "packages requirements libraries dependencies pip pip_install": (
            "build Template.from_host().pip_install(NAME), then template="
        ),
        "dockerfile": "build it with another tool, then `ringfence image load PATH NAME`, image=NAME",
        "tags meta": 'use labels={"NAME": "value"}',
        "lifetime max_lifetime auto_stop_interval": "use ttl_s=SECONDS",
        "snapshot snapshot_id from_snapshot": "use Sandbox.restore(ID)",
        "hostname": "a sandbox has a name of its own that nothing changes; remove it",
        "token key": 'use server=Client("https://...", key="...")',
        "privileged": 'profile="unrestricted" removes protections',
    },
    "exec()": {**_RUN, "background detach wait": "use sandbox.start([...])"},
    "start()": {**_RUN, "background detach wait": "it does not wait; remove the keyword"},
    "fork()": {
        "count copies num number branches": "use n=3",
        "timeout": "ttl_s= of create() ends a sandbox",
        "name": "use labels=",
    },
    "context()": {
        "timeout timeout_s": "use timeout_s= of context.run(code)",
        "lang name": 'use language="bash"',
        "envs environment": 'use env={"NAME": "value"}',
        "workdir working_dir": "use cwd=",
    },
    "read()": {
        "limit length size count n bytes": "use max_bytes=",
        "encoding text format": "use read_text(path), which is UTF-8",
    },
    "write()": {
        "content contents text": "use data=",
        "encoding": "a str is written as UTF-8; encode it for another",
        "mkdir make_dirs create_parents": "use parents=True",
        "permissions perm perms": "use mode=0o644",
    },
    "Client()": {
        "url base_url api_url host address socket endpoint": (
            'use server="unix:PATH" or "http://HOST:PORT"'
        ),
        "api_key token apikey": "use key=",
        **_TIMEOUT,
    },
    "SessionManager()": {
        "pool_size pool min_warm max_warm": (
            "use config=ManagerConfig(pool=PoolConfig(min_warm=2, max_warm=10))"
        ),
        "max_sandboxes limit size": "use config=ManagerConfig(max_sandboxes=64)",
        "backend": 'use backends=["native"]',
        "path": "use state_dir=",
    },
    "backend": {
        "kvm qemu firecracker libkrun vm": "use microvm",
        "podman container containerd": "use docker",
        "bwrap": "use bubblewrap",
        "runsc": "use gvisor",
        "namespaces local process default": "use native",
    },
    "from_image()": {"username password credentials registry auth pull": _LOGIN},
    "race()": {"n count": "give as many attempts"},
    "run_code()": {
        **_TIMEOUT,
        "lang kernel": 'use language="bash"',
        "context context_id": "use sandbox.context(id=...).run(code)",
        "envs env cwd": "use sandbox.context(cwd=..., env=...).run(code)",
    },
    "Sandbox": {
        "close kill stop destroy shutdown delete": "terminate()",
        "run execute run_command exec_run commands": (
            "exec([...]), shell(SCRIPT), or start([...]) in the background"
        ),
        "popen spawn Popen": "start([...])",
        "bash sh system": "shell(SCRIPT)",
        "read_file read open": "files.read(path)",
        "write_file write": "files.write(path, data)",
        "upload download copy put_archive get_archive": _COPY,
        "fs filesystem": "files",
        "ls list_files": "files.list(path)",
        "pause": "suspend()",
        "unpause": "resume()",
        "get_host forward ports": "expose(port)",
        "status is_running": "state",
        "sandbox_id name": "id",
        "set_timeout": "ttl_s= of create()",
        "clone branch": "fork(n)",
        "commit": "snapshot(), then Sandbox.restore(id)",
        "diff": "changes()",
        "contexts": "context(), or run_code(code)",
        "terminal pty shell_session": "start([...], pty=(24, 80))",
        "rollback reset undo": "mark(), then rewind(mark)",
        "metrics": "stats()",
        "set_network set_network_policy update_network network": "apply_network_policy(policy)",
        "unmount": "terminate(): a mount stays as long as its sandbox",
        "update set_labels": "labels= of create()",
        "list get connect_to": "Client(...).list() and get(id)",
        "logs": "the result of exec(), or a Process of start()",
    },
    "ExecResult": {
        "returncode return_code code status exitcode": "exit_code",
        "output out result logs results": "text, stdout or stderr",
        "err error": "stderr_text",
        "success succeeded": "ok",
        "check_returncode raise_for_status check raise_for_error": "ok, which says whether it succeeded",
        "json": "json.loads(result.stdout)",
        "strip split decode replace startswith endswith lower find read": (
            "text, a str, or stdout, which is bytes"
        ),
        "lines splitlines": "text.splitlines()",
        "duration elapsed": "duration_s",
    },
    "Execution": {
        "output out logs": "stdout, stderr or text",
        "result value data": "text, or results for every MIME type",
        "returncode exit_code status ok raise_for_error": "error, None for success",
        "png html artifacts charts": "results[0].png, .html and so on",
        "exception": "error",
    },
    "Context": {"exec execute eval run_code run_cell run_command": "run(code)"},
    "Template": {
        "apt apt_install apt_get": (
            "from_image(...).run('apt-get -o APT::Sandbox::User=root install -y NAME'): a template over"
            " the host's files has the host's programs as they are"
        ),
        "run_commands run_cmd run_command add_step": "run(command)",
        "pip add_python_packages uv_pip_install": "pip_install(NAME, ...)",
        "add_local_file add_local_dir copy_items add": "copy(source, target)",
        "set_envs set_env environment": 'env({"NAME": "value"})',
        "set_workdir cwd": "workdir(path)",
        "from_dockerfile from_python_image from_base_image from_template": (
            "from_image(NAME), then run(...)"
        ),
        "set_start_cmd cmd entrypoint": "command(*argv)",
        "create save": "build(name), then Sandbox.create(template=name)",
    },
    "Process": {
        "returncode exit_code status": "wait().exit_code",
        "poll is_running alive": "running",
        "communicate": "wait(), whose result has stdout and stderr",
        "pid": "id",
        "close": "terminate() or kill()",
    },
    "Files": {
        "ls listdir list_dir iterdir": "list(path)",
        "mkdir makedirs": "make_dir(path)",
        "rm delete unlink rmtree": "remove(path, recursive=True)",
        "cp copy put get push pull": _COPY,
        "rename mv": "move(src, dst)",
        "read_bytes cat": "read(path)",
        "write_text write_bytes": "write(path, data)",
        "open": "open_read(path) or open_write(path)",
        "chmod set_permissions": "sandbox.exec(['chmod', MODE, PATH])",
        "touch": "write(path, b'')",
        "grep": "search(...)",
        "find": "glob(...)",
    },
    "Limits": {
        "mem ram": 'use memory_bytes="256m"',
        "cpu_count nano_cpus cores": "use cpus=0.5",
        "timeout timeout_s time time_s ttl_s": "use wall_time_s=60",
        "processes nproc max_processes threads": "use pids=64",
        "storage size": 'use disk_bytes="1g"',
        "nofile files fds": "use open_files=256",
    },
    "Mount": {
        "read_only readonly mode rw writable": 'use access="rw"; the default is "ro"',
        "src host host_path path": "use source=",
        "dst dest destination container_path": "use target=",
    },
    "NetworkPolicy": {
        "allow allowed hosts allow_hosts allowlist domains allow_out": (
            'use allowed_hosts=["example.com"]'
        ),
        "deny denied_hosts deny_hosts blocked_hosts block denied": (
            'write "!HOST" in allowed_hosts, or NetworkRule(HOST, action="deny") in rules'
        ),
    },
    "Client": {
        "sandboxes ps": "list()",
        "exec run": "create().exec([...]), or execute(...) in one call",
    },
}
INSTEAD = {place: spread(rows) for place, rows in _INSTEAD.items()}

NOT_CLASSES = spread(
    {
        "Image": "use Template.from_image(NAME), or image= of Sandbox.create()",
        "Volume": 'use mounts=".:/work:rw" of Sandbox.create()',
        "Snapshots Sandboxes App Daytona CodeInterpreter": "use Sandbox.create()",
        "Server Api Http": "use Client(ADDRESS); `ringfence serve` starts one",
    }
)
NOT_FUNCTIONS = spread(
    {
        "run exec execute shell run_code": "use Sandbox.create(), then exec([...])",
        "create sandbox start": "use Sandbox.create()",
        "connect login init": 'use Client("http://HOST:PORT", key="...")',
    }
)
"""Functions that other libraries have at the top."""


def no_attribute(owner: object, name: str) -> AttributeError:
    """The error for an attribute that `owner` does not have, with the one that is meant."""
    cls = type(owner)
    message = f"{cls.__name__!r} object has no attribute {name!r}"
    if not name.startswith("_"):
        kind = cls.__name__.removeprefix("Async").removeprefix("Remote")
        public = [each for each in dir(cls) if not each.startswith("_")]
        hint = INSTEAD.get(kind, {}).get(name)
        hint = f"use {hint}" if hint else closest(name, public)
        message += f" ({hint})" if hint else ""
    return AttributeError(message, name=name, obj=None)


def refuse_unknown(function: Callable[..., Any], options: Iterable[str]) -> None:
    """Refuse the options that a function does not have, with what is meant by the first.

    Raises:
        InvalidRequest: There is one.
    """
    import inspect

    parameters = inspect.signature(function).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return
    known = [
        each.name
        for each in parameters
        if each.kind is not each.VAR_POSITIONAL and each.name not in ("self", "cls")
    ]
    name = function.__name__
    if name == "__init__":
        name = function.__qualname__.split(".")[-2]
    refuse_names(name, [each for each in options if each not in known], known)


def refuse_names(function: str, unknown: Iterable[str], known: Iterable[str]) -> None:
    """Refuse keywords that `function` does not have, with what is meant by the first.

    Raises:
        InvalidRequest: There is one.
    """
    from ..errors import InvalidRequest

    for name in unknown:
        of = INSTEAD.get(f"{function.removeprefix('Async')}()", {})
        hint = of.get(name) or meant(name, known) if [*known] else "it takes none"
        what = f"{function}() has no parameter {name!r}"
        raise InvalidRequest(what, field=name, hint=hint) from None


def meant(given: str, known: Iterable[str], *, head: str = "one of", of: str = "") -> str:
    """Name the valid value that `given` is closest to, else all of them: the remedy of an error.

    Args:
        of: The class that has the names, for words of other libraries.
    """
    if other := INSTEAD.get(of, {}).get(given):
        return other
    names = [*known]
    return closest(given, names) or f"{head} {', '.join(names)}"


def closest(given: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Name the one of `known` that `given` is a misspelling of; empty where none is near."""
    import difflib

    names = {name.lower().lstrip("-"): name for name in known}
    close = difflib.get_close_matches(given.lower().lstrip("-"), names, n=1, cutoff=cutoff)
    return f"did you mean {names[close[0]]}?" if close else ""


def as_number(value: object, field: str) -> str:
    """Show the number that was meant: of `"256m"` for a size, of `"5m"` for a time, of `"3"`, of 3.0."""
    from ..errors import InvalidRequest
    from .base.checks import parse_duration, parse_size

    if isinstance(value, float) and value.is_integer():
        return f"as {int(value)}"
    if hasattr(value, "total_seconds"):
        return f"as {value.total_seconds():.12g}"
    if hasattr(value, "as_tuple"):  # decimal.Decimal
        return f"as {float(value):.12g}"  # type: ignore[arg-type]
    if isinstance(value, bytes) and field.endswith("bytes"):
        return 'as "256m"'
    if not isinstance(value, str):
        return ""
    try:
        number = parse_size(value) if field.endswith("bytes") else parse_duration(value)
    except InvalidRequest:
        return ""
    is_plain = value.replace(".", "", 1).isdigit() or field.endswith(("bytes", "_s"))
    return f"as {number:.12g}" if is_plain else ""


def as_list(value: object) -> str:
    """Show a list that holds what was given alone."""
    import json

    return f"as {json.dumps([value])}" if isinstance(value, str) and len(value) < 80 else "as [...]"


def as_text(value: object) -> str:
    """Show a number or a path as the string that it should have been."""
    if value is None:
        return "leave it out, or give a string"
    if hasattr(value, "pip_install"):
        return "build(NAME) the template, and give NAME here"
    if hasattr(value, "reference"):
        return "give the NAME of build(NAME) here, or the `id` of what it returned"
    return f'as "{value}"' if isinstance(value, int | float) else 'as "..."'
