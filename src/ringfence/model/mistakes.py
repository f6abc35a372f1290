"""Names that other libraries use, and what they are called here: read when a name was wrong."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

_MEMORY = 'use limits={"memory_bytes": "256m"}'
_CPUS = 'use limits={"cpus": 1.5}'
_NETWORK = 'use network="example.com,*.example.org", "none" or "unrestricted"'
_HOST_FILES = 'use mounts=".:/work:rw"'
_RESULT = "the result has stdout, stderr and text"
_TIMEOUT = dict.fromkeys(("timeout", "timeout_ms", "time_limit"), "use timeout_s=SECONDS")
_LOGIN = "`ringfence image pull --user NAME:PASSWORD IMAGE` fetches it before"
_COPY = "files.upload(local, remote) and files.download(remote, local)"

_RUN = {
    **_TIMEOUT,
    "check": "no exit code raises; test result.ok",
    "input": "use stdin=",
    "shell": "use sandbox.shell(SCRIPT)",
    **dict.fromkeys(("capture_output", "stdout", "stderr", "text"), _RESULT),
    **dict.fromkeys(("encoding", "universal_newlines"), "result.stdout_text is UTF-8"),
    **dict.fromkeys(("environment", "envs", "env_vars"), 'use env={"NAME": "value"}'),
    **dict.fromkeys(("workdir", "working_dir", "working_directory"), "use cwd="),
    **dict.fromkeys(("tty", "pty", "stream"), "use sandbox.start([...], pty=(24, 80))"),
    "user_id": "use user=",
}

INSTEAD: dict[str, dict[str, str]] = {
    "create()": {
        **dict.fromkeys(("memory", "mem", "mem_limit", "memory_bytes", "memory_mb"), _MEMORY),
        **dict.fromkeys(("cpu", "cpus", "cpu_count", "nano_cpus"), _CPUS),
        **dict.fromkeys(
            ("timeout", "timeout_s", "timeout_ms", "time_limit"),
            "ttl_s=SECONDS ends the sandbox; timeout_s= of exec() ends one command",
        ),
        **dict.fromkeys(("volumes", "volume", "binds", "files", "mount"), _HOST_FILES),
        **dict.fromkeys(
            ("allow_internet_access", "internet", "net", "network_mode", "allowed_hosts"), _NETWORK
        ),
        **dict.fromkeys(("envs", "environment", "env_vars"), 'use env={"NAME": "value"}'),
        **dict.fromkeys(("cwd", "working_dir", "working_directory"), 'use workdir="/work"'),
        **dict.fromkeys(("pids", "pids_limit"), 'use limits={"pids": 64}'),
        **dict.fromkeys(("disk", "disk_bytes", "storage"), 'use limits={"disk_bytes": "1g"}'),
        **dict.fromkeys(("gpu", "gpus"), "GPUs are not supported"),
        **dict.fromkeys(("command", "cmd", "argv"), "run a command with exec([...])"),
        **dict.fromkeys(("runtime", "provider", "driver"), 'use backend="gvisor"'),
        **dict.fromkeys(
            ("url", "base_url", "api_url", "host"), 'use server="unix:PATH" or "http://..."'
        ),
        "api_key": 'use server=Client("https://...", key="...")',
        "read_only": 'a mount is read-only unless it ends in ":rw"',
        "name": "name= is a parameter of Client.create; here: labels=",
        "metadata": "metadata= is a parameter of Client.create; here: labels=",
        "python": 'use exec(["python3", "-c", CODE])',
        "ports": "use sandbox.expose(PORT)",
        "privileged": 'profile="unrestricted" removes protections',
    },
    "exec()": {
        **_RUN,
        **dict.fromkeys(("background", "detach", "wait"), "use sandbox.start([...])"),
    },
    "start()": {
        **_RUN,
        **dict.fromkeys(("background", "detach", "wait"), "it does not wait; remove the keyword"),
    },
    "fork()": {
        **dict.fromkeys(("count", "copies", "num", "number", "branches"), "use n=3"),
        "timeout": "ttl_s= of create() ends a sandbox",
        "name": "use labels=",
    },
    "context()": {
        **dict.fromkeys(("timeout", "timeout_s"), "use timeout_s= of context.run(code)"),
        **dict.fromkeys(("lang", "name"), 'use language="bash"'),
        **dict.fromkeys(("envs", "environment"), 'use env={"NAME": "value"}'),
        **dict.fromkeys(("workdir", "working_dir"), "use cwd="),
    },
    "read()": {
        **dict.fromkeys(("limit", "length", "size", "count", "n", "bytes"), "use max_bytes="),
        **dict.fromkeys(("encoding", "text", "format"), "use read_text(path), which is UTF-8"),
    },
    "write()": {
        **dict.fromkeys(("content", "contents", "text"), "use data="),
        "encoding": "a str is written as UTF-8; encode it for another",
        **dict.fromkeys(("mkdir", "make_dirs", "create_parents"), "use parents=True"),
        **dict.fromkeys(("permissions", "perm", "perms"), "use mode=0o644"),
    },
    "Client()": {
        **dict.fromkeys(
            ("url", "base_url", "api_url", "host", "address", "socket", "endpoint"),
            'use server="unix:PATH" or "http://HOST:PORT"',
        ),
        **dict.fromkeys(("api_key", "token", "apikey"), "use key="),
        **_TIMEOUT,
    },
    "SessionManager()": {
        **dict.fromkeys(
            ("pool_size", "pool", "min_warm", "max_warm"),
            "use config=ManagerConfig(pool=PoolConfig(min_warm=2, max_warm=10))",
        ),
        **dict.fromkeys(
            ("max_sandboxes", "limit", "size"), "use config=ManagerConfig(max_sandboxes=64)"
        ),
        "backend": 'use backends=["native"]',
        "path": "use state_dir=",
    },
    "backend": {
        **dict.fromkeys(("kvm", "qemu", "firecracker", "libkrun", "vm"), "use microvm"),
        **dict.fromkeys(("podman", "container", "containerd"), "use docker"),
        **dict.fromkeys(("bwrap",), "use bubblewrap"),
        **dict.fromkeys(("runsc",), "use gvisor"),
        **dict.fromkeys(("namespaces", "local", "process", "default"), "use native"),
    },
    "from_image()": dict.fromkeys(
        ("username", "password", "credentials", "registry", "auth", "pull"), _LOGIN
    ),
    "race()": dict.fromkeys(("n", "count"), "give as many attempts"),
    "run_code()": {
        **_TIMEOUT,
        **dict.fromkeys(("lang", "kernel"), 'use language="bash"'),
        **dict.fromkeys(("context", "context_id"), "use sandbox.context(id=...).run(code)"),
        **dict.fromkeys(("envs", "env", "cwd"), "use sandbox.context(cwd=..., env=...).run(code)"),
    },
    "Sandbox": {
        **dict.fromkeys(("close", "kill", "stop", "destroy", "shutdown", "delete"), "terminate()"),
        **dict.fromkeys(
            ("run", "execute", "run_command", "exec_run", "commands"),
            "exec([...]), shell(SCRIPT), or start([...]) in the background",
        ),
        **dict.fromkeys(("popen", "spawn", "Popen"), "start([...])"),
        **dict.fromkeys(("bash", "sh", "system"), "shell(SCRIPT)"),
        **dict.fromkeys(("read_file", "read", "open"), "files.read(path)"),
        **dict.fromkeys(("write_file", "write"), "files.write(path, data)"),
        **dict.fromkeys(("upload", "download", "copy", "put_archive", "get_archive"), _COPY),
        **dict.fromkeys(("fs", "filesystem"), "files"),
        **dict.fromkeys(("ls", "list_files"), "files.list(path)"),
        "pause": "suspend()",
        "unpause": "resume()",
        **dict.fromkeys(("get_host", "forward", "ports"), "expose(port)"),
        **dict.fromkeys(("status", "is_running"), "state"),
        **dict.fromkeys(("sandbox_id", "name"), "id"),
        "set_timeout": "ttl_s= of create()",
        **dict.fromkeys(("clone", "branch"), "fork(n)"),
        "commit": "snapshot(), then Sandbox.restore(id)",
        "diff": "changes()",
        "contexts": "context(), or run_code(code)",
        **dict.fromkeys(("terminal", "pty", "shell_session"), "start([...], pty=(24, 80))"),
        **dict.fromkeys(("rollback", "reset", "undo"), "mark(), then rewind(mark)"),
        "metrics": "stats()",
        **dict.fromkeys(
            ("set_network", "set_network_policy", "update_network", "network"),
            "apply_network_policy(policy)",
        ),
        "unmount": "terminate(): a mount stays as long as its sandbox",
        **dict.fromkeys(("update", "set_labels"), "labels= of create()"),
        **dict.fromkeys(("list", "get", "connect_to"), "Client(...).list() and get(id)"),
        "logs": "the result of exec(), or a Process of start()",
    },
    "ExecResult": {
        **dict.fromkeys(("returncode", "return_code", "code", "status", "exitcode"), "exit_code"),
        **dict.fromkeys(("output", "out", "result", "logs", "results"), "text, stdout or stderr"),
        **dict.fromkeys(("err", "error"), "stderr_text"),
        **dict.fromkeys(("success", "succeeded"), "ok"),
        **dict.fromkeys(
            ("check_returncode", "raise_for_status", "check", "raise_for_error"),
            "ok, which says whether it succeeded",
        ),
        "json": "json.loads(result.stdout)",
        **dict.fromkeys(("lines", "splitlines"), "text.splitlines()"),
        **dict.fromkeys(("duration", "elapsed"), "duration_s"),
    },
    "Execution": {
        **dict.fromkeys(("output", "out", "logs"), "stdout, stderr or text"),
        **dict.fromkeys(("result", "value", "data"), "text, or results for every MIME type"),
        **dict.fromkeys(
            ("returncode", "exit_code", "status", "ok", "raise_for_error"),
            "error, None for success",
        ),
        **dict.fromkeys(("png", "html", "artifacts", "charts"), "results[0].png, .html and so on"),
        "exception": "error",
    },
    "Context": dict.fromkeys(
        ("exec", "execute", "eval", "run_code", "run_cell", "run_command"), "run(code)"
    ),
    "Template": {
        **dict.fromkeys(
            ("apt", "apt_install", "apt_get"),
            "from_image(...).run('apt-get install -y NAME'): a template over the host's files has"
            " the host's programs as they are",
        ),
        **dict.fromkeys(("run_commands", "run_cmd", "run_command", "add_step"), "run(command)"),
        **dict.fromkeys(("pip", "add_python_packages", "uv_pip_install"), "pip_install(NAME, ...)"),
        **dict.fromkeys(
            ("add_local_file", "add_local_dir", "copy_items", "add"), "copy(source, target)"
        ),
        **dict.fromkeys(("set_envs", "set_env", "environment"), 'env({"NAME": "value"})'),
        **dict.fromkeys(("set_workdir", "cwd"), "workdir(path)"),
        **dict.fromkeys(
            ("from_dockerfile", "from_python_image", "from_base_image", "from_template"),
            "from_image(NAME), then run(...)",
        ),
        **dict.fromkeys(("set_start_cmd", "cmd", "entrypoint"), "command(*argv)"),
        **dict.fromkeys(("create", "save"), "build(name), then Sandbox.create(template=name)"),
    },
    "Process": {
        **dict.fromkeys(("returncode", "exit_code", "status"), "wait().exit_code"),
        **dict.fromkeys(("poll", "is_running", "alive"), "running"),
        "communicate": "wait(), whose result has stdout and stderr",
        **dict.fromkeys(("pid",), "id"),
        "close": "terminate() or kill()",
    },
    "Files": {
        **dict.fromkeys(("ls", "listdir", "list_dir", "iterdir"), "list(path)"),
        **dict.fromkeys(("mkdir", "makedirs"), "make_dir(path)"),
        **dict.fromkeys(("rm", "delete", "unlink", "rmtree"), "remove(path, recursive=True)"),
        **dict.fromkeys(("cp", "copy", "put", "get", "push", "pull"), _COPY),
        **dict.fromkeys(("rename", "mv"), "move(src, dst)"),
        **dict.fromkeys(("read_bytes", "cat"), "read(path)"),
        **dict.fromkeys(("write_text", "write_bytes"), "write(path, data)"),
        "open": "open_read(path) or open_write(path)",
        **dict.fromkeys(("chmod", "set_permissions"), "sandbox.exec(['chmod', MODE, PATH])"),
        "touch": "write(path, b'')",
        "grep": "search(...)",
        "find": "glob(...)",
    },
    "Mount": {
        **dict.fromkeys(
            ("read_only", "readonly", "mode", "rw", "writable"),
            'use access="rw"; the default is "ro"',
        ),
        **dict.fromkeys(("src", "host", "host_path", "path"), "use source="),
        **dict.fromkeys(("dst", "dest", "destination", "container_path"), "use target="),
    },
    "NetworkPolicy": dict.fromkeys(
        ("allow", "allowed", "hosts", "allow_hosts", "allowlist", "domains", "allow_out"),
        'use allowed_hosts=["example.com"]',
    )
    | dict.fromkeys(
        ("deny", "denied_hosts", "deny_hosts", "blocked_hosts", "block", "denied"),
        'write "!HOST" in allowed_hosts, or NetworkRule(HOST, action="deny") in rules',
    ),
    "Client": {
        **dict.fromkeys(("sandboxes", "ps"), "list()"),
        **dict.fromkeys(("exec", "run"), "create().exec([...]), or execute(...) in one call"),
    },
}


NOT_CLASSES = {
    "Image": "use Template.from_image(NAME), or image= of Sandbox.create()",
    "Volume": 'use mounts=".:/work:rw" of Sandbox.create()',
    **dict.fromkeys(
        ("Snapshots", "Sandboxes", "App", "Daytona", "CodeInterpreter"), "use Sandbox.create()"
    ),
    **dict.fromkeys(("Server", "Api", "Http"), "use Client(ADDRESS); `ringfence serve` starts one"),
}
NOT_FUNCTIONS = {
    **dict.fromkeys(
        ("run", "exec", "execute", "shell", "run_code"), "use Sandbox.create(), then exec([...])"
    ),
    **dict.fromkeys(("create", "sandbox", "start"), "use Sandbox.create()"),
    **dict.fromkeys(("connect", "login", "init"), 'use Client("http://HOST:PORT", key="...")'),
}
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
