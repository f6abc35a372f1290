"""A newcomer's mistakes: each is refused before anything starts, and the answer says what to do.

Each row is a mistake, the name or value at fault, and a part of the remedy. Both stand in the answer,
which is a few lines without a traceback.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import ringfence
from ringfence.cli.main import main
from tests.cli.command import PATIENCE_S, RINGFENCE, environment
from tests.features import require

pytestmark = pytest.mark.anyone

R: Any = ringfence  # a checker refuses most of what is tried here
LONGEST = 600
OWN_FAILURE = 125

# -- the command line ---------------------------------------------------------------------------

COMMANDS: list[tuple[str, str, str]] = [
    ("rnu -- true", "'rnu'", "did you mean run?"),
    ("ps", "'ps'", "did you mean list?"),
    ("build .", "'build'", "image load"),
    ("--verbose run", "'--verbose'", "COMMAND [OPTIONS]"),
    ("image rm x", "'rm'", "did you mean remove?"),
    ("image pul x", "'pul'", "did you mean pull?"),
    ("keys add me", "'add'", "did you mean create?"),
    ("session", "VERB", "acquire"),
    ("completion tcsh", "'tcsh'", "bash, zsh, fish"),
    ("cp a b", "'a' and 'b'", "SANDBOX:/tmp"),
    ("rm", "SANDBOX", "ringfence list"),
    ("doctor --backend gvisor", "--backend", "--attack"),
    ("doctor extra", "'extra'", "doctor --help"),
    ("bench nope", "'nope'", "one of create"),
    ("restore nope", "nope", "ringfence backup"),
    ("list --server localhost:7878", "'localhost:7878'", "http://localhost:7878"),
    ("list --server /run/x.sock", "'/run/x.sock'", "unix:/run/x.sock"),
    ("list --server ftp://x", "'ftp://x'", "unix:PATH"),
    ("tree --server unix:/nope.sock", "/nope.sock", "ringfence serve"),
    ("list --key-file nope", "'nope'", "file with an API key"),
    ("exec --memroy 1g box ls", "--memroy", "ringfence exec --help"),
    ("mcp --http 8765", "'8765'", "127.0.0.1:8765"),
    ("mcp --http 0.0.0.0:8765", "0.0.0.0", "127.0.0.1:8765"),
    ("serve --port 8080", "--port", "--listen"),
    ("serve -d", "-d", "--detach"),
    ("serve --listen localhost", "'localhost'", "127.0.0.1:7878"),
    ("serve --listen 0.0.0.0:7878", "0.0.0.0", "--tls-certificate"),
    ("serve --listen http://127.0.0.1:7878", "'http://127.0.0.1:7878'", "127.0.0.1:7878)"),
    ("serve --listen 127.0.0.1:{taken}", "127.0.0.1:{taken}", "another port"),
    ("serve --max-sandboxes many", "'many'", "as 64"),
    ("serve --max-sandboxes 0", "--max-sandboxes", "between 1 and"),
    ("serve --outlive forever", "'forever'", "5s"),
    ("serve --log-level verbose", "'verbose'", "debug, info, warning or error"),
    ("serve --backend dokcer", "'dokcer'", "did you mean docker?"),
    ("serve --allow-origin example.com", "'example.com'", "https://app.example.com"),
    ("serve --allow-origin *", "'*'", "https://app.example.com"),
    ("serve --tls-key nope.pem", "--tls-certificate", "both the certificate"),
    (
        "serve --listen 127.0.0.1:0 --tls-certificate nope.pem --tls-key nope.pem",
        "nope.pem",
        "PEM",
    ),
    (
        "serve --listen 127.0.0.1:0 --tls-certificate plain.txt --tls-key plain.txt",
        "plain.txt",
        "private key",
    ),
    ("serve --config nope.json", "nope.json", "JSON configuration file"),
    ("serve --config broken.json", "broken.json", "double quotes"),
    ("serve --config misspelt.json", "listne", "did you mean listen?"),
    ("serve --config types.json", "manager.max_sandboxes", "as 10"),
    ("serve --config twice.json", "'listen'", "there twice"),
    ("serve --config binary.json", "binary.json", "double quotes"),
    ("serve --stop --take-over", "--stop", "remove"),
    ("serve --cluster-name x", "--cluster-name", "add --cluster"),
    ("serve --allow-public", "--allow-public", "add --listen"),
    ("serve --e2b --domain -x.com", "'-x.com'", "sandboxes.example.com"),
    ("serve --allow-host a@b", "'a@b'", "api.example.com"),
    ("list --server http://", "'http://'", "http://HOST:PORT"),
    ("list --server http://127.0.0.1:abc", ":abc'", "http://HOST:PORT"),
    ("list --server http://127.0.0.1:99999", ":99999'", "http://HOST:PORT"),
    ("list --key-file misspelt.json", "API key", "keys create"),
    ("image load src x:1", "src is empty", "debootstrap"),
    ("image load nope x:1", "nope", "docker save"),
    ("completion bash zsh", "one shell", "bash, zsh, fish"),
    ("pool get", "'get'", "`ringfence pool`"),
    ("serve --state-dir plain.txt/x", "plain.txt/x", "this user may write"),
]
RUN: list[tuple[str, str, str]] = [
    ("--memroy 256m", "--memroy", "did you mean --memory?"),
    ("--memory 256", "256", "did you mean 256m?"),
    ("--memory -1m", "'-1m'", "256m"),
    ("--memory 1e9", "'1e9'", "256m"),
    ("--memory nan", "'nan'", "256m"),
    ("--cpus 50%", "'50%'", "0.5"),
    ("--cpus inf", "inf", "between 0.001 and"),
    ("--pids unlimited", "'unlimited'", "as 64"),
    ("--pids 0", "0", "between 1 and"),
    ("--timeout 5min", "'5min'", "1m"),
    ("--timeout -5", "'-5'", "5s"),
    ("--mount ./nope:/work", "/nope", "must exist"),
    ("--mount .", "'.'", ".:/work:rw"),
    ("--mount .:/work:wr", "'wr'", ":rw"),
    ("--mount .:work", "'work'", ".:/work"),
    ("--mount /work:.", "'.'", "absolute path in the sandbox"),
    ("--mount .:/", "/", "/work"),
    ("--mount .:/usr", "/usr", "below it"),
    ("--mount .:/work --mount src:/work/", "/work", "its own target"),
    ("--mount type=bind,source=.,target=/work", "type=bind", ".:/work:rw"),
    ("--mount ./src:", "'./src:'", "./src:/work:rw"),
    ("--mount ./src:/work,rw", "'/work,rw'", "./src:/work:rw"),
    ("--mount :/work", "no source", "shell empty"),
    ("--mount ~/x:/work", "~", "$HOME/x:/work"),
    ("--net a.com --net b.com", "--net", "a.com,b.com"),
    ("--memory 1g --memory 2g", "twice", "once"),
    ("--net none,a.com", "none", "or the hosts"),
    ("--unprotect @git", "'@git'", "--protect"),
    ("--unprotect gti", "'gti'", "lists the names"),
    ("--image ./Dockerfile", "'./Dockerfile'", "ringfence image load"),
    ("--image https://hub.docker.com/_/alpine", "//hub", "without the URL"),
    ("--ttl 5m", "--ttl", "--timeout"),
    ("--server unix:/x", "--server", "ringfence create"),
    ("--pip -r", "--pip", "pandas>=2"),
    ("--here=write", "'write'", "--here=rw"),
    ("--net *", "'*'", "unrestricted"),
    ("--net all", "'all'", "unrestricted"),
    ("--net https://github.com/x", "'https://github.com/x'", "without the URL: github.com"),
    ("--net github", "'github'", "github.com"),
    ("--net localhost:8000", "localhost:8000", "127.0.0.1:PORT"),
    ("--net github.com:https", "'https'", "1 to 65535"),
    ("--net a.com;b.org", "'a.com;b.org'", "*.example.com"),
    ("--net-policy nope.json", "'nope.json'", "JSON policy file"),
    ("--net-policy misspelt.json", "listne", "allowed_hosts"),
    ("--secret github.com=NO_SUCH_VARIABLE", "NO_SUCH_VARIABLE", "export"),
    ("--env NAME", "'NAME'", "NAME=value"),
    ("--workdir work", "'work'", "/work"),
    ("--user rooot", "'rooot'", "sandbox"),
    ("--profile off", "'off'", "os_hardened"),
    ("--backend dokcer", "'dokcer'", "did you mean docker?"),
    ("--tier high", "'high'", "light or strong"),
    ("--allow-degraded memory", "'memory'", "memory_limit"),
    ("--protect .git", "'.git'", ":rw"),
    ("--mount .:/w:rw --unprotect .gti/hooks", "'.gti/hooks'", "did you mean .git/hooks?"),
    ("--deny etc/passwd", "'etc/passwd'", "/etc/passwd"),
    ("--memory-dir nope", "/nope", "on the host"),
    ("--pull sometimes --image x", "'sometimes'", "missing"),
    ("--template nope", "'nope'", "ringfence template list"),
    ("--template ds --image x", "--template", "--image"),
    ("--pip six --image x", "--pip", "--image"),
    ("-v .:/work", "-v", "--mount SRC:DST"),
    ("-it", "-it", "-t"),
    ("--gpus all", "--gpus", "not supported"),
    ("--rm", "--rm", "ends with its command"),
    ("--cap-drop ALL", "--cap-drop", "remove the option"),
    ("--read-only", "--read-only", "remove the option"),
    ("--ro-bind / /", "--ro-bind", "--mount SRC:DST"),
    ("--unshare-all", "--unshare-all", "remove the option"),
    ("--die-with-parent", "--die-with-parent", "remove the option"),
    ("--tmpfs /x", "--tmpfs", "--disk"),
    ("--private", "--private", "remove the option"),
    ("--whitelist=/x", "--whitelist", "--mount SRC:DST"),
    ("--privileged", "--privileged", "--profile unrestricted"),
]
"""Options of `run`; the command behind them would say that it has started."""
ENDED: list[tuple[str, int, str, str]] = [
    ("-- pyhton3 -c 1", 127, "pyhton3", "did you mean python3?"),
    ("-- hello.py", 127, "hello.py", "python3 hello.py"),
    ("-- 'python3 hello.py'", 127, "python3 hello.py", "do not quote"),
    ("-- cd src", 127, "cd", "sh -c"),
    ("-- ./nope.sh", 127, "./nope.sh", "does not exist on this host"),
    ("-- python3 nope.py", 2, "nope.py", "does not exist on this host"),
    ("-- zzqx", 127, "zzqx", "--image"),
    ("alpine sh", 127, "alpine", "--image alpine -- CMD"),
    ("-- python:3.12 python", 127, "python:3.12", "--image python:3.12"),
    ("-- FOO=1 env", 127, "FOO=1", "--env FOO=1"),
    ("-- 'ls | wc'", 127, "ls | wc", "sh -c 'ls | wc'"),
    ("-- export A=1", 127, "export", "sh -c"),
    ("-- bash nope.sh", 127, "nope.sh", "does not exist on this host"),
    ("-- ./plain.txt", 126, "./plain.txt", "chmod +x"),
    ("-- apt-get install -qqq zzqx", 100, "host's programs", "--image"),
    ("--here . true", 126, ".", "is a directory"),
]
"""Commands that cannot be told to be mistakes before they run."""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a script, a sub-directory and configurations with mistakes."""
    require("user namespaces")
    (tmp_path / "src").mkdir()
    for name, text in (
        ("hello.py", "print(1)\n"),
        ("plain.txt", "x\n"),
        ("broken.json", "{listen:"),
        ("misspelt.json", '{"listne": "127.0.0.1:0"}'),
        ("twice.json", '{"listen": "127.0.0.1:0", "listen": "127.0.0.1:1"}'),
        ("types.json", '{"manager": {"max_sandboxes": "10"}}'),
    ):
        (tmp_path / name).write_text(text)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\0{")
    return tmp_path


@pytest.fixture(scope="module")
def taken() -> Iterator[int]:
    """A port that another program listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def command(words: list[str], place: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*RINGFENCE, *words],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        cwd=place,
        env=environment(),
        timeout=PATIENCE_S,
        check=False,
    )


def answers(text: str, fault: str, remedy: str) -> None:
    assert fault in text
    assert remedy in text
    assert "Traceback" not in text
    assert "internal error" not in text
    assert len(text.strip()) <= LONGEST


@pytest.mark.parametrize(("line", "fault", "remedy"), COMMANDS, ids=lambda value: value[:50])
def test_commands(line: str, fault: str, remedy: str, place: Path, taken: int) -> None:
    words = line.format(taken=taken).split()
    state = place / "serving"
    if "serve" == words[0] and "--state-dir" not in words:
        words += ["--state-dir", str(state)]
    result = command(words, place)

    assert (OWN_FAILURE, "") == (result.returncode, result.stdout)
    answers(result.stderr, fault.format(taken=taken), remedy)
    assert not (state / "ringfence.sock").exists()


@pytest.mark.parametrize(("line", "fault", "remedy"), RUN, ids=lambda value: value[:50])
def test_run(line: str, fault: str, remedy: str, place: Path) -> None:
    result = command(["run", *line.split(), "--", "echo", "started"], place)

    assert (OWN_FAILURE, "") == (result.returncode, result.stdout)
    assert 1 == result.stderr.count("\n")
    answers(result.stderr, fault, remedy)


@pytest.mark.parametrize(("line", "code", "fault", "remedy"), ENDED, ids=str)
def test_commands_that_end(line: str, code: int, fault: str, remedy: str, place: Path) -> None:
    result = command(["run", *shlex.split(line)], place)

    assert code == result.returncode
    assert 6 >= result.stderr.count("\n")
    answers(result.stderr, fault, remedy)


def test_the_control_runs(place: Path) -> None:
    result = command(["run", "--timeout", "60s", "--here", "--", "cat", "plain.txt"], place)

    assert (0, "x\n", "") == (result.returncode, result.stdout, result.stderr)


# -- the library ----------------------------------------------------------------------------------

CREATE: list[tuple[dict[str, Any], str, str]] = [
    ({"imgae": "x"}, "imgae", "did you mean image?"),
    ({"memory": "256m"}, "memory", 'limits={"memory_bytes": "256m"}'),
    ({"timeout": 30}, "timeout", "ttl_s=SECONDS"),
    ({"volumes": {}}, "volumes", 'mounts=".:/work:rw"'),
    ({"limits": {"memory": "256m"}}, "limits.memory", "memory_bytes"),
    ({"limits": {"memory_bytes": 256}}, "256", "256m"),
    ({"limits": {"memory_bytes": 256e6}}, "256000000.0", "as 256000000"),
    ({"limits": {"cpus": float("nan")}}, "nan", "between 0.001 and"),
    ({"limits": {"cpus": "2"}}, "'2'", "as 2"),
    ({"limits": {"pids": True}}, "True", "as 100"),
    ({"limits": {"pids": -1}}, "-1", "between 1 and"),
    ({"limits": "256m"}, "'256m'", '{"memory_bytes": "256m"'),
    ({"network": True}, "True", "'unrestricted'"),
    ({"network": "*"}, "'*'", "unrestricted"),
    ({"network": "full"}, "'full'", "unrestricted"),
    ({"network": ["https://pypi.org/"]}, "'https://pypi.org/'", "pypi.org)"),
    ({"network": {"allow": ["pypi.org"]}}, "network.allow", "allowed_hosts"),
    ({"network": {"allowed_hosts": ["pypi.org"]}}, "network.mode", '"mode": "limited"'),
    ({"network": ""}, "''", "example.com"),
    ({"mounts": "."}, "'.'", ".:/work"),
    ({"mounts": ["./nope:/work"]}, "/nope", "must exist"),
    ({"mounts": [(".", "/work")]}, "tuple", ".:/work:rw"),
    ({"mounts": {".": "/work"}}, "dict", ".:/work:rw"),
    ({"mounts": [".:/work", "/tmp:/work"]}, "/work", "its own target"),
    ({"env": ["A=b"]}, "list", '{"NAME": "value"}'),
    ({"env": {"A": 1}}, "env.A", 'as "1"'),
    ({"workdir": "work"}, "'work'", "/work"),
    ({"backend": "dokcer"}, "'dokcer'", "docker"),
    ({"backend": 3}, "int", "native"),
    ({"tier": "Strong"}, "'Strong'", "did you mean strong?"),
    ({"profile": "off"}, "'off'", "os_hardened"),
    ({"user": "rooot"}, "'rooot'", "sandbox"),
    ({"ttl_s": -5}, "-5", "between 0.001 and"),
    ({"ttl_s": "1h"}, "'1h'", "as 3600"),
    ({"image": ""}, "image", "omit the field"),
    ({"protect": ".git"}, "protect", '[".git"]'),
    ({"allow_degraded": ["memory"]}, "'memory'", "memory_limit"),
    ({"memory_dir": "nope"}, "'nope'", "as /"),
    ({"python_env": "yes"}, "'yes'", "true or false"),
    ({"server": "localhost:7878"}, "'localhost:7878'", "http://localhost:7878"),
    ({"server": "unix:x.sock"}, "'unix:x.sock'", "as unix:/"),
    ({"server": ""}, "''", "unix:PATH"),
    ({"server": 8080}, "8080", "http://HOST:PORT"),
    ({"server": "http://127.0.0.1:1"}, "127.0.0.1:1", "ringfence serve"),
    ({"mounts": ".:/work,rw"}, "'/work,rw'", ".:/work:rw"),
    ({"network": {"mode": "limited", "denied_hosts": ["a.com"]}}, "denied_hosts", '"!HOST"'),
    ({"workdir": "~/x"}, "'~/x'", "/home/sandbox"),
    ({"server": "http://h:99999"}, ":99999'", "http://HOST:PORT"),
    ({"template": "nope"}, "'nope'", "ringfence template list"),
    ({"template": R.Template.from_host()}, "Template", "build(NAME)"),
    ({"template": "nope", "image": "x"}, "image", "Template.from_image"),
    ({"spec": "python:3.12"}, "'python:3.12'", 'image="python:3.12"'),
]
NAMES: list[tuple[str, Callable[[], object], str, str]] = [
    ("Sandbox()", R.Sandbox, "Sandbox()", "Sandbox.create"),
    ("AsyncSandbox()", R.AsyncSandbox, "AsyncSandbox()", "await"),
    ("Sandbx", lambda: R.Sandbx, "Sandbx", "did you mean Sandbox?"),
    ("Limits(memory)", lambda: R.Limits(memory="1g"), "'memory'", "memory_bytes"),
    ("Mount(dest)", lambda: R.Mount(source=".", dest="/w"), "'dest'", "target"),
    ("Mount swapped", lambda: R.Mount(".", "/work"), "'.'", "in the sandbox first"),
    ("Mount access", lambda: R.Mount("/w", "/x", "write"), "'write'", "read_write (rw)"),
    ("policy mode", lambda: R.NetworkPolicy(mode="open"), "'open'", "limited or unrestricted"),
    ("policy text", lambda: R.NetworkPolicy(allowed_hosts="a.org"), "str", '["a.org"]'),
    ("policy all", lambda: R.NetworkPolicy(allowed_hosts=["all"]), "'all'", "unrestricted"),
    ("manager", lambda: R.SessionManager(backends="native"), "backends", '["native"]'),
    ("template name", lambda: R.Template.from_host().build("A b"), "'A b'", "a-z 0-9"),
    (
        "template apt",
        lambda: R.Template.from_host().apt_install("x"),
        "'apt_install'",
        "from_image",
    ),
    ("template list", lambda: R.Template.from_host().pip_install(["x"]), "list", '"..."'),
    (
        "template url",
        lambda: R.Template.from_host().pip_install("x", index_url="a"),
        "'a'",
        "https:",
    ),
    ("template file", lambda: R.Template.from_host().copy("a", "b"), "'b'", "as /b"),
    ("no await", lambda: asyncio.run(R.AsyncSandbox.create(imgae="x")), "imgae", "image"),
    ("template", R.Template, "Template()", "from_host()"),
    ("run", lambda: R.run(["ls"]), "'run'", "Sandbox.create()"),
    ("key", lambda: R.Client("http://h", key=3), "key", "ringfence keys create"),
    ("key of two lines", lambda: R.Client("http://h", key="a\nb"), "key", "without spaces"),
    ("pool", lambda: R.PoolConfig(min_warm=5, max_warm=1), "max_warm", "at most 1"),
    ("bash image", lambda: R.BashConfig(imgae="x"), "'imgae'", "did you mean image?"),
    ("snapshot", lambda: R.Sandbox.restore("nope"), "'nope'", "Sandbox.snapshots()"),
]


def mount_twice(box: Any) -> object:
    box.mount(R.Mount("/mnt/twice"))
    return box.mount(R.Mount("/mnt/twice"))


INSIDE: list[tuple[str, Callable[[Any], object], str, str]] = [
    ("exec text", lambda box: box.exec("echo hi"), "str", "shell(SCRIPT)"),
    ("exec words", lambda box: box.exec("ls", "-l"), "several arguments", '["ls", "-l"]'),
    ("start words", lambda box: box.start("ls", "-l"), "several arguments", '["ls", "-l"]'),
    ("exec timeout", lambda box: box.exec(["ls"], timeout=3), "timeout", "timeout_s=SECONDS"),
    ("exec check", lambda box: box.exec(["ls"], check=True), "check", "result.ok"),
    ("exec seconds", lambda box: box.exec(["ls"], timeout_s="5"), "'5'", "as 5"),
    ("exec number", lambda box: box.exec(["ls", 1]), "argv[1]", 'as "1"'),
    ("exec nothing", lambda box: box.exec([]), "argv", '["ls", "-l"]'),
    ("exec None", lambda box: box.exec(None), "NoneType", '["ls", "-l"]'),
    ("exec cwd", lambda box: box.exec(["ls"], cwd="/nope"), "/nope", "files.make_dir"),
    ("exec env", lambda box: box.exec(["ls"], env={"A": None}), "env.A", "leave it out"),
    ("exec stdin", lambda box: box.exec(["ls"], stdin=3), "int", 'b"..."'),
    ("exec callback", lambda box: box.exec(["ls"], on_stdout="x"), "on_stdout", "a function"),
    ("shell list", lambda box: box.shell(["ls"]), "list", "exec([...])"),
    ("run", lambda box: box.run("ls"), "'run'", "shell(SCRIPT)"),
    ("close", lambda box: box.close(), "'close'", "terminate()"),
    ("misspelt", lambda box: box.snapshto(), "'snapshto'", "did you mean snapshot?"),
    ("fork n", lambda box: box.fork("3"), "'3'", "as 3"),
    ("fork processes", lambda box: box.fork(processes=True), "True", "auto, none or required"),
    ("fork at", lambda box: box.fork(at="x"), "str", "sandbox.mark()"),
    ("rewind", lambda box: box.rewind("x"), "str", "sandbox.mark()"),
    ("rewind nothing", lambda box: box.rewind(None), "NoneType", "sandbox.mark()"),
    ("set network", lambda box: setattr(box, "network", "none"), "network", "apply_network_policy"),
    ("set env", lambda box: setattr(box, "env", {}), "env", "create()"),
    ("set_network", lambda box: box.set_network("none"), "'set_network'", "apply_network_policy"),
    ("unmount", lambda box: box.unmount("/x"), "'unmount'", "stays as long"),
    ("chmod", lambda box: box.files.chmod("/x", "755"), "'chmod'", "sandbox.exec"),
    ("glob", lambda box: box.files.glob(3), "pattern", 'as "3"'),
    ("search", lambda box: box.files.search("x", limit="3"), "limit", "as 3"),
    ("merge itself", lambda box: box.merge(box, base="x"), "itself", "name the sandbox"),
    ("merge prefer", lambda box: box.merge(box, base="x", prefer="mine"), "'mine'", "ours"),
    ("merge path", lambda box: box.merge("/tmp", base="x", path=3), "path", 'as "3"'),
    ("race text", lambda box: R.race(box, "make"), "attempts", '["make test"'),
    ("race judge", lambda box: R.race(box, ["true"], judge="x"), "judge", "lambda"),
    ("race swapped", lambda box: R.race([["true"]], box), "attempts", '["make test"'),
    ("run_code timeout", lambda box: box.run_code("1", timeout=3), "timeout", "timeout_s="),
    ("run_code list", lambda box: box.run_code(["1"]), "list", '"..."'),
    ("context cwd", lambda box: box.context(cwd="/nope"), "/nope", "files.make_dir"),
    ("context run", lambda box: box.context().execute("1"), "'execute'", "run(code)"),
    ("cell output", lambda box: box.run_code("1").output, "'output'", "stdout"),
    ("cell ok", lambda box: box.run_code("1").ok, "'ok'", "error"),
    ("diff", lambda box: box.diff(), "'diff'", "changes()"),
    ("restore", R.Sandbox.restore, "Sandbox", ".id"),
    ("returncode", lambda box: box.exec(["true"]).returncode, "'returncode'", "exit_code"),
    ("read", lambda box: box.files.read("nope.txt"), "nope.txt", "files.list"),
    ("write", lambda box: box.files.write("a.txt", 3), "int", 'b"..."'),
    ("write no dir", lambda box: box.files.write("/tmp/n/a", "x"), "/tmp/n/a", "make_dir"),
    ("write root", lambda box: box.files.write("/usr/a", "x"), "/usr/a", "home directory"),
    ("open", lambda box: box.files.open("x"), "'open'", "open_read"),
    ("upload", lambda box: box.files.upload("nope", "/tmp/x"), "nope", "host"),
    ("expose", lambda box: box.expose("8000"), "'8000'", "as 8000"),
    ("mount", lambda box: box.mount("./nope:/w"), "/nope", "must exist"),
    ("mount twice", mount_twice, "read-only mount", "choose a target"),
]
CLOSED: list[tuple[str, Callable[[Any], object]]] = [
    ("exec", lambda box: box.exec(["true"])),
    ("shell", lambda box: box.shell("true")),
    ("read", lambda box: box.files.read("x")),
    ("snapshot", lambda box: box.snapshot()),
    ("mount", lambda box: box.mount(".:/work")),
]
REFUSALS = (ringfence.RingfenceError, TypeError, AttributeError)


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(REFUSALS) as caught:
        act()
    return str(caught.value)


def test_a_secret_that_no_rule_sends_is_told_by_name() -> None:
    """Programs see a placeholder and not the value, whatever was hoped for."""
    for network in ("none", ["example.com"]):
        with (
            pytest.warns(UserWarning, match="'TOKEN'") as told,
            pytest.raises(ringfence.InvalidRequest),
        ):
            R.Sandbox.create(secrets={"TOKEN": "x"}, network=network, workdir="work")
        answers(str(told[0].message), "TOKEN", "credential=Credential('TOKEN')")
        assert __file__ == told[0].filename
    rule = ringfence.NetworkRule("example.com", credential=ringfence.Credential("TOKEN"))
    policy = ringfence.NetworkPolicy(mode="limited", rules=(rule,))
    with pytest.raises(
        ringfence.InvalidRequest
    ):  # the control: no warning, which would be an error
        R.Sandbox.create(secrets={"TOKEN": "x"}, network=policy, workdir="work")


@pytest.fixture(scope="module")
def box() -> Iterator[Any]:
    require("user namespaces")
    with ringfence.Sandbox.create() as sandbox:
        yield sandbox


@pytest.mark.parametrize(("given", "fault", "remedy"), CREATE, ids=lambda value: str(value)[:50])
def test_create(given: dict[str, Any], fault: str, remedy: str) -> None:
    require("user namespaces")
    answers(refusal(lambda: R.Sandbox.create(**given)), fault, remedy)


@pytest.mark.parametrize(
    ("act", "fault", "remedy"), [row[1:] for row in NAMES], ids=[row[0] for row in NAMES]
)
def test_names(act: Callable[[], object], fault: str, remedy: str) -> None:
    answers(refusal(act), fault, remedy)


@pytest.mark.parametrize(
    ("act", "fault", "remedy"), [row[1:] for row in INSIDE], ids=[row[0] for row in INSIDE]
)
def test_inside(act: Callable[[Any], object], fault: str, remedy: str, box: Any) -> None:
    answers(refusal(lambda: act(box)), fault, remedy)


@pytest.mark.parametrize("act", [row[1] for row in CLOSED], ids=[row[0] for row in CLOSED])
def test_a_sandbox_that_has_ended(act: Callable[[Any], object]) -> None:
    require("user namespaces")
    sandbox = ringfence.Sandbox.create()
    sandbox.terminate()

    answers(refusal(lambda: act(sandbox)), "terminated", "create a new one")


# -- a server ---------------------------------------------------------------------------------------

_EXEC, _SANDBOXES = "/v1/sandboxes/{id}/execs", "/v1/sandboxes"
_POLICY = '"allowed_hosts": ["example.com"]'
BODIES: list[tuple[str, object, str, str]] = [
    (_SANDBOXES, {"imgae": "x"}, "imgae", "did you mean image?"),
    (_SANDBOXES, {"network": "all"}, "network", _POLICY),
    (_SANDBOXES, {"network": ["pypi.org"]}, "network", _POLICY),
    (_SANDBOXES, {"network": {"mode": "limited", "allowed_hosts": "all"}}, "str", '["all"]'),
    (_SANDBOXES, {"network": {"mode": "limited", "allowed_hosts": ["all"]}}, "'all'", "unrestr"),
    (_SANDBOXES, {"network": {"mode": "open"}}, "'open'", "limited or unrestricted"),
    (_SANDBOXES, {"mounts": ".:/work"}, "mounts", "[{"),
    (_SANDBOXES, {"mounts": ["src:/work"]}, "mounts[0]", "target, source"),
    (_SANDBOXES, {"mounts": [{"src": "/tmp", "target": "/w"}]}, "mounts[0].src", "source"),
    (_SANDBOXES, {"limits": {"memory": "256m"}}, "limits.memory", "memory_bytes"),
    (_SANDBOXES, {"limits": {"memory_bytes": "256m"}}, "'256m'", "268435456"),
    (_SANDBOXES, {"limits": {"cpus": -1}}, "-1", "between 0.001 and"),
    (_SANDBOXES, {"env": ["A=b"]}, "env", '{"NAME": "value"}'),
    (_SANDBOXES, {"protect": "all"}, "protect", '["all"]'),
    (_SANDBOXES, {"unprotect": "all"}, "unprotect", '["all"]'),
    (_SANDBOXES, {"allow_degraded": "all"}, "allow_degraded", '["all"]'),
    (_SANDBOXES, {"allow_degraded": ["all"]}, "'all'", "memory_limit"),
    (_SANDBOXES, {"backend": "dokcer"}, "'dokcer'", "native"),
    (_SANDBOXES, {"tier": "hard"}, "'hard'", "light or strong"),
    (_SANDBOXES, {"ttl_s": "1h"}, "'1h'", "as 3600"),
    (_SANDBOXES, [], "list", '{"name"'),
    ("/v1/sandbox", {}, "/v1/sandbox", "openapi.json"),
    (_EXEC, {"argv": "ls"}, "argv", '["ls", "-l"]'),
    (_EXEC, {"command": "ls"}, "command", "argv"),
    (_EXEC, {"argv": ["ls"], "timeout": 3}, "timeout", "timeout_s"),
    (_EXEC, {"argv": []}, "argv", '["ls", "-l"]'),
    ("/v1/sandboxes/nope/execs", {"argv": ["ls"]}, "'nope'", "ringfence list"),
]


ON_SERVER: list[tuple[str, str, str]] = [
    ("code", "SANDBOX", "ringfence code"),
    ("code nope x", "'nope'", "ringfence list"),
    ("code {id} --language ruby x", "'ruby'", "python, bash, node"),
    ("code {id} --context nope x", "no context 'nope'", "--list"),
    ("code {id} --interrupt", "--context", "--list"),
    ("code {id} --close", "--context", "--list"),
    ("code {id} --timeout 5min x", "--timeout", "5s"),
    ("code {id} --timeout 0 x", "--timeout", "between 0.001 and"),
    ("code {id} --list x=1", "CODE", "--list"),
    ("code {id} --new --context c x", "--new", "--context"),
    ("code {id} --language bash --context c x", "--language", "--context"),
    ("code {id} x = 41", "'='", "quote"),
    ("fork", "SANDBOX", "ringfence fork"),
    ("fork nope", "'nope'", "ringfence list"),
    ("fork {snapshot}", "{snapshot}", "create --snapshot"),
    ("fork {id} --n 0", "--n", "between 1 and 1000"),
    ("fork {id} --n two", "'two'", "--n 3"),
    ("fork {id} -n 2", "-n", "did you mean --n?"),
    ("fork {id} --processes maybe", "'maybe'", "auto, none or required"),
    ("fork {id} --label team", "'team'", "NAME=value"),
    ("merge {fork}", "--base", "ringfence snapshot list"),
    ("merge {fork} --base {snapshot}", "--into", "--to DIR"),
    ("merge {fork} --base {snapshot} --to src --into {id}", "--into", "--to DIR"),
    ("merge {fork} --base nope --into {id}", "'nope'", "ringfence snapshot list"),
    ("merge {fork} --base {snapshot} --into nope", "'nope'", "ringfence list"),
    ("merge {fork} --base {snapshot} --into {fork}", "itself", "name the sandbox"),
    ("merge {fork} --base {snapshot} --to nope", "/nope", "on this host"),
    ("merge {fork} --base {snapshot} --to src --prefer mine", "'mine'", "ours or theirs"),
    ("merge {fork} --base {snapshot} --to src --path nope", "nope", "no such directory"),
    ("merge {fork} --base {snapshot} --into {id} --path nope", "nope", "no such directory"),
    ("merge {fork} --base {snapshot} --to src --dryrun", "--dryrun", "--dry-run"),
    ("tree nope", "'nope'", "remove the argument"),
    ("template", "VERB", "build, list, remove, prune"),
    ("template build", "NAME", "template build NAME"),
    ("template build ds", "no step", "--pip PACKAGE"),
    ("template build ds pandas", "'pandas'", "--pip pandas"),
    ("template build Tools --pip six", "'Tools'", "a-z 0-9"),
    ("template build ds --pip -r", "'-r'", "pandas>=2"),
    ("template build ds --pip six --find-links nope", "/nope", "on this host"),
    ("template build ds --pip six --index-url pypi.org", "'pypi.org'", "https://"),
    ("template remove nope", "'nope'", "ringfence template list"),
    ("template rm nope", "'rm'", "did you mean remove?"),
    ("template list ds", "'ds'", "remove"),
    ("snapshot", "VERB", "create, list, rm"),
    ("snapshot create", "SANDBOX", "snapshot create"),
    ("snapshot create nope", "'nope'", "ringfence list"),
    ("snapshot create {id} --meta step", "'step'", "NAME=value"),
    ("snapshot delete {snapshot}", "'delete'", "did you mean rm?"),
    ("snapshot restore {snapshot}", "'restore'", "create --snapshot"),
    ("create --snapshot {id}", "{id}", "ringfence snapshot list"),
    ("serve --domain box.example.com", "--domain", "--e2b"),
    ("serve --e2b --domain https://box.example.com", "--domain", "sandboxes.example.com"),
    ("serve --e2b=yes", "'yes'", "--e2b"),
    ("keys create", "OWNER", "keys create OWNER"),
    ("keys create me --scope root", "'root'", "read_only"),
    ("keys create me --expires 30", "'30'", "30d"),
    ("keys create me --expires tomorrow", "'tomorrow'", "5s"),
    ("keys create me --max-sandboxes -1", "-1", "at least 0"),
    ("keys rotate nope", "'nope'", "ringfence keys list"),
    ("keys rm me", "'me'", "ringfence keys list"),
    ("doctor --repair", "--repair", "doctor --help"),
    ("doctor --attack --backend nope", "'nope'", "native"),
]
"""Commands that a server is asked for, and those that stand beside them in the help."""


class Server:
    """A daemon on a unix socket and a TCP port, started and stopped by the command line."""

    def __init__(self, state: Path) -> None:
        self.options = ["--state-dir", str(state)]
        line = ["serve", "--detach", "--json", "--listen", "127.0.0.1:0", *self.options]
        started = command(line, state.parent)
        assert 0 == started.returncode, started.stderr
        self.tcp = json.loads(started.stdout)["listening"][1]
        self.unix = f"unix:{state / 'ringfence.sock'}"
        transport = httpx.HTTPTransport(uds=str(state / "ringfence.sock"))
        self.http = httpx.Client(transport=transport, base_url="http://localhost", timeout=60)

    def stop(self) -> None:
        self.http.close()
        assert "stopped\n" == command(["serve", "--stop", *self.options], Path("/")).stdout


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    require("user namespaces")
    directory = tmp_path_factory.mktemp("mistakes")
    os.chmod(directory, 0o700)
    made = Server(directory / "s")
    yield made
    made.stop()


@pytest.fixture(scope="module")
def ids(server: Server, sandbox_id: str) -> dict[str, str]:
    """A sandbox, a fork of it, and a snapshot from before the fork."""
    at = f"{_SANDBOXES}/{sandbox_id}"
    snapshot = server.http.post(f"{at}/snapshots", json={}).json()["id"]
    fork = server.http.post(f"{at}/fork", json={}).json()["items"][0]["id"]
    return {"id": sandbox_id, "fork": fork, "snapshot": snapshot}


@pytest.mark.parametrize(("line", "fault", "remedy"), ON_SERVER, ids=lambda value: value[:50])
def test_commands_of_a_server(
    line: str,
    fault: str,
    remedy: str,
    place: Path,
    server: Server,
    ids: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = line.format(**ids).split()
    state = place / "serving"
    if "serve" == words[0]:
        words += ["--state-dir", str(state)]
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_DATA_HOME", str(place))  # templates
    monkeypatch.setenv("RINGFENCE_SERVER", server.unix)
    monkeypatch.setattr(sys, "argv", ["ringfence", *words])
    monkeypatch.setattr(sys, "stdin", io.StringIO())

    code = main()

    output = capfd.readouterr()
    assert (OWN_FAILURE, "") == (code, output.out)
    told = output.err.strip().splitlines()[-1]  # behind what pip prints
    answers(told, fault.format(**ids), remedy)
    assert not (state / "ringfence.sock").exists()


def test_a_path_in_place_of_code_is_taken_for_the_file(
    place: Path, server: Server, ids: dict[str, str]
) -> None:
    line = ["code", "--server", server.unix, ids["id"], "hello.py"]

    result = command(line, place)

    assert 1 == result.returncode
    assert f"ringfence code {ids['id']} < hello.py" in result.stderr


@pytest.fixture(scope="module")
def sandbox_id(server: Server) -> str:
    found: str = server.http.post("/v1/sandboxes", json={}).json()["id"]
    return found


@pytest.mark.parametrize(
    ("path", "body", "fault", "remedy"), BODIES, ids=lambda value: str(value)[:50]
)
def test_bodies(
    path: str, body: object, fault: str, remedy: str, server: Server, sandbox_id: str
) -> None:
    answer = server.http.post(path.format(id=sandbox_id), json=body)
    told = answer.json()

    assert answer.status_code in (404, 422)
    answers(f"{told['field']}: {told['message']} ({told['hint']})", fault, remedy)


def test_a_body_that_is_no_json(server: Server) -> None:
    form = server.http.post(_SANDBOXES, data={"image": "x"}).json()
    broken = server.http.post(
        _SANDBOXES, content="{image: x}", headers={"Content-Type": "application/json"}
    ).json()

    assert "Content-Type: application/json" in form["hint"]
    assert "double quotes" in broken["hint"]


def test_keys_of_a_server(server: Server) -> None:
    """No key, and a wrong one: over TCP a caller is known by its key alone."""
    for key in ("", "wrong"):
        with R.Client(server.tcp, key=key) as client:
            answers(refusal(client.list), "key", "ringfence keys create")
