"""A newcomer's mistakes with the library.

Each row is a mistake, the name or value at fault, and a part of the remedy. Both stand in the answer,
which is a few lines without a traceback.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import io
import pickle
from collections.abc import Callable, Iterator
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

import ringfence
from ringfence.contexts.aio import AsyncContext
from ringfence.contexts.context import Context
from ringfence.model.base.helpful import helpful
from ringfence.model.base.model import Model
from ringfence.sandbox.aio_process import AsyncProcess
from ringfence.sandbox.expose import Exposure
from ringfence.sandbox.files import Files
from ringfence.sandbox.process import Process
from tests.features import require
from tests.first_use.answers import answers, refusal

pytestmark = pytest.mark.anyone

R: Any = ringfence  # a checker refuses most of what is tried here
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
    ({"mounts": "/:/host"}, "every file of this host", "the directory that is needed"),
    ({"mounts": ".:/work:ro:rw"}, "'ro' is followed", ".:/work:ro"),
    ({"limits": 256}, "256", '{"memory_bytes": "256m"'),
    ({"limits": {"memory_bytes": "12MBs"}}, "'12MBs'", "256m"),
    ({"limits": {"memory_bytes": 10**3000}}, "limits.memory_bytes", "between 1048576 and"),
    ({"network": ["10.0.0.5/8"]}, "'10.0.0.5/8'", "for the network write 10.0.0.0/8"),
    ({"network": {"a.org"}}, "{'a.org'}", "'unrestricted'"),
    ({"image": "x" * 900}, "image", "x"),
    ({"env": {"A": "a" * 300_000}}, "300001 bytes", "into a file"),
    ({"env": {"A\0": "a"}}, "NUL", "env"),
    ({"ttl_s": float("inf")}, "inf", "between 0.001 and"),
    ({"server": "ws://h:1"}, "'ws://h:1'", "http://HOST:PORT"),
    ({"server": "http://h:1?x=1"}, "query", "remove it: http://h:1"),
    ({"server": "unix:/" + "a" * 300}, "107 bytes", "ringfence serve"),
    ({"backend": "firecracker"}, "'firecracker'", "use microvm"),
    ({"spec": "python:3.12"}, "'python:3.12'", 'image="python:3.12"'),
    ({"limits": {"memory_bytes": "512Mi"}}, "'512Mi'", "256m"),
    ({"limits": {"memory_bytes": b"1g"}}, "b'1g'", 'as "256m"'),
    ({"limits": {"memory_mb": 512}}, "limits.memory_mb", "did you mean memory_bytes?"),
    ({"limits": {"mem": 512}}, "limits.mem", 'use memory_bytes="256m"'),
    ({"limits": {"timeout": 5}}, "limits.timeout", "use wall_time_s=60"),
    ({"limits": {"wall_time_s": timedelta(minutes=5)}}, "timedelta", "as 300"),
    ({"limits": {"cpus": Decimal("1.5")}}, "Decimal", "as 1.5"),
    ({"ttl_s": timedelta(hours=1)}, "timedelta", "as 3600"),
    ({"env": {"A=B": ""}}, "'A=B' is not a variable name", 'as {"A": "B"}'),
    ({"env": {"MY VAR": "a"}}, "'MY VAR'", "as MY_VAR"),
    ({"env": "A=b"}, "str", '{"NAME": "value"}'),
    ({"mounts": r"C:\Users\me:/work"}, r"C:\Users\me", "/mnt/c/Users"),
    ({"mounts": "~/nope:/work"}, "~/nope", "only a shell expands ~"),
    ({"mounts": [None]}, "NoneType", '".:/work:rw"'),
    ({"network": "0.0.0.0"}, "where servers listen", "127.0.0.1:PORT"),
    ({"network": "example.com:70000"}, "'70000' is not a port", "1 to 65535"),
    ({"network": 443}, "443", "'example.com,*.example.org'"),
    ({"network": "git@github.com"}, "'git@github.com'", "without the user: github.com"),
    ({"image": "alpine.tar"}, "the name of a file", "image load PATH NAME"),
    ({"user": "1000:1000"}, "'1000:1000'", "1000"),
    ({"labels": ["a"]}, "list", '{"NAME": "value"}'),
    ({"id": "../x"}, "'../x'", "use a-z"),
    ({"deny": ["x"]}, "'x'", "as /x"),
    ({"packages": ["pandas"]}, "packages", "pip_install(NAME)"),
    ({"snapshot": "x"}, "snapshot", "Sandbox.restore(ID)"),
    ({"hostname": "x"}, "hostname", "remove it"),
    ({"tags": {}}, "tags", "labels="),
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
    ("Image", lambda: R.Image, "'Image'", "Template.from_image"),
    ("Volume", lambda: R.Volume, "'Volume'", "mounts="),
    ("Mount read_only", lambda: R.Mount("/w", read_only=False), "'read_only'", 'access="rw"'),
    ("policy allow", lambda: R.NetworkPolicy(allow=["a.org"]), "'allow'", "allowed_hosts="),
    ("policy both", lambda: R.NetworkPolicy("unrestricted", ["a.org"]), "unrestr", "limited"),
    ("altered", lambda: R.SandboxSpec().altered(imgae="x"), "imgae", "did you mean image?"),
    ("client user", lambda: R.Client("http://u:p@h:1"), "a user in the URL", "key="),
    ("client seconds", lambda: R.Client("http://h", timeout_s="5"), "'5'", "as 5"),
    ("client retries", lambda: R.Client("http://h", retries=-1), "-1", "between 0 and"),
    ("manager config", lambda: R.SessionManager({"pool": 3}), "config.pool", "enabled, min_warm"),
    ("manager twice", lambda: R.SessionManager(backends=["native"] * 2), "'native'", "once"),
    ("template run", lambda: R.Template.from_host().run(""), "command", "give a value"),
    (
        "template file of names",
        lambda: R.Template.from_host().pip_install("requirements.txt"),
        "the name of a file",
        "each package",
    ),
    (
        "template two in one",
        lambda: R.Template.from_host().pip_install("pandas numpy"),
        "several packages",
        "pandas, then numpy",
    ),
    ("client with", lambda: enter(R.AsyncClient("http://h")), "AsyncClient", "`async with`"),
    ("client async with", lambda: enter_async(R.Client("http://h")), "Client is not", "`with`"),
    ("client await", lambda: wait_for(R.Client("http://h")), "Client is not", "AsyncClient"),
    ("template path", lambda: R.Template.from_host().pip_install("./x"), "'./x'", "find_links="),
    ("template git", lambda: R.Template.from_host().pip_install("git+https://x"), "git+", "find_l"),
    ("template default", lambda: R.Template.from_host().build("default"), "'default'", "another"),
    (
        "template copy",
        lambda: R.Template.from_host().copy("nope", "/x").build("t"),
        "/nope",
        "on this host",
    ),
    ("client url", lambda: R.Client(url="http://h"), "'url'", 'server="unix:PATH"'),
    ("client token", lambda: R.Client("http://h", token="x"), "'token'", "use key="),
    ("manager size", lambda: R.SessionManager(pool_size=3), "'pool_size'", "PoolConfig(min_warm="),
    ("image login", lambda: R.Template.from_image("x", username="u"), "'username'", "--user NAME"),
    ("race n", lambda: R.race(None, [], n=3), "'n'", "as many attempts"),
    ("on the class", lambda: R.Sandbox.exec(["ls"]), "Sandbox.exec()", "Sandbox.create()"),
    ("by id", lambda: R.Sandbox.connect("sbx-1"), "Sandbox.connect()", "Client(ADDRESS).get(ID)"),
    ("client class", lambda: R.Client.get("x"), "Client.get()", "Client(ADDRESS)"),
    ("size", lambda: R.parse_size("1m", unit="k"), "'unit'", "one of text, field"),
]


def enter(thing: Any) -> None:
    with thing:
        pass


def enter_async(thing: Any) -> None:
    async def entered() -> None:
        async with thing:
            pass

    asyncio.run(entered())


def wait_for(thing: Any) -> None:
    async def waited() -> None:
        await thing

    asyncio.run(waited())


def mount_twice(box: Any) -> object:
    box.mount(R.Mount("/mnt/twice"))
    return box.mount(R.Mount("/mnt/twice"))


def remove_full(box: Any) -> object:
    box.files.make_dir("/tmp/full/x")
    return box.files.remove("/tmp/full")


def suspended_cell(box: Any) -> object:
    context = box.context()
    box.suspend()
    try:
        return context.run("1")
    finally:
        box.resume()


def sleeping(box: Any) -> Any:
    process = box.start(["cat"], stream_stdin=True)
    process.kill()
    return process


INSIDE: list[tuple[str, Callable[[Any], object], str, str]] = [
    ("exec text", lambda box: box.exec("echo hi"), "str", "shell(SCRIPT)"),
    ("exec words", lambda box: box.exec("ls", "-l"), "several arguments", '["ls", "-l"]'),
    ("start words", lambda box: box.start("ls", "-l"), "several arguments", '["ls", "-l"]'),
    ("exec timeout", lambda box: box.exec(["ls"], timeout=3), "timeout", "timeout_s=SECONDS"),
    ("exec check", lambda box: box.exec(["ls"], check=True), "check", "result.ok"),
    ("exec seconds", lambda box: box.exec(["ls"], timeout_s="5"), "'5'", "as 5"),
    ("exec number", lambda box: box.exec(["ls", 1]), "argv[1]", 'as "1"'),
    ("exec nothing", lambda box: box.exec([]), "argv", '["ls", "-l"]'),
    ("exec mapping", lambda box: box.exec({"ls": 1}), "dict", '["ls", "-l"]'),
    ("exec set", lambda box: box.exec({"ls"}), "set", '["ls", "-l"]'),
    ("exec bytes", lambda box: box.exec([b"ls"]), "argv[0]", 'as "..."'),
    ("exec NUL", lambda box: box.exec(["ls", "a\0b"]), "NUL", "argv[1]"),
    ("exec long", lambda box: box.exec(["echo", "a" * 200_000]), "too long", "stdin or a file"),
    ("exec negative", lambda box: box.exec(["ls"], timeout_s=-1), "-1", "between 0.001 and"),
    ("exec uid", lambda box: box.exec(["id"], user="nobody2"), "'nobody2'", "uid"),
    ("exec cwd file", lambda box: box.exec(["ls"], cwd="/etc/passwd"), "/etc/passwd", "directory"),
    ("stdin file", lambda box: box.exec(["cat"], stdin=io.StringIO()), "StringIO", ".read()"),
    ("pickle", pickle.dumps, "Sandbox", "from a Client"),
    ("copy", copy.deepcopy, "Sandbox", "from a Client"),
    ("read ~", lambda box: box.files.read("~/nope"), "/~/nope", "only a shell expands ~"),
    ("write ~", lambda box: box.files.write("~/x", "x"), "/~/x", "only a shell expands ~"),
    ("read device", lambda box: box.files.read("/dev/zero"), "/dev/zero", "exec([...])"),
    ("write outside", lambda box: box.files.write("/usr/x", "x"), "/usr/x", "/tmp or a mount"),
    ("write file", lambda box: box.files.write("/tmp/x", io.StringIO()), "StringIO", ".read()"),
    ("write nowhere", lambda box: box.files.write("", "x"), "path", "give a value"),
    ("upload", lambda box: box.files.upload("nope", "/tmp/x"), "nope", "on this host"),
    ("mount file", lambda box: box.mount(R.Mount("/tmp", __file__)), "/tmp", "file cannot be"),
    ("mount on file", lambda box: box.mount(R.Mount("/etc/passwd", "/mnt")), "passwd", "parent"),
    ("expose 0", lambda box: box.expose(0), "0", "between 1 and 65535"),
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
    ("raise", lambda box: box.exec(["ls"]).raise_for_status(), "'raise_for_status'", "use ok"),
    ("json", lambda box: box.exec(["ls"]).json(), "'json'", "json.loads(result.stdout)"),
    ("write to dir", lambda box: box.files.write("/tmp", "x"), "/tmp", "name of a file"),
    ("read dir", lambda box: box.files.read("/tmp"), "/tmp", "files.list"),
    ("list file", lambda box: box.files.list("/etc/passwd"), "/etc/passwd", "files.read"),
    ("remove dir", remove_full, "/tmp/full", "recursive=True"),
    ("mode", lambda box: box.files.write("/tmp/x", "a", mode="755"), "'755'", "0o755"),
    ("mode 755", lambda box: box.files.write("/tmp/x", "a", mode=755), "0o1363", "0o755"),
    ("glob root", lambda box: box.files.glob("/etc/*"), "'/etc/*'", "path="),
    ("search", lambda box: box.files.search("(", regex=True), "regular", "without regex="),
    ("replace", lambda box: box.files.replace("a.txt", "a", "b"), "paths", '["a.txt"]'),
    ("expose host", lambda box: box.expose(80, host="nohost.invalid"), "nohost", "127.0.0.1"),
    ("restore spec", lambda box: R.Sandbox.restore("x", "y"), "spec", "SandboxSpec(...)"),
    ("run_code js", lambda box: box.run_code("1", language="js"), "'js'", "use node"),
    ("cell callback", lambda box: box.run_code("1", on_stdout="x"), "on_stdout", "a function"),
    ("race number", lambda box: R.race(box, [1]), "attempts[0]", '"make test"'),
    ("pty", lambda box: box.start(["sh"], pty=True), "pty", "(24, 80)"),
    ("wait", lambda box: box.start(["true"]).wait("3"), "'3'", "as 3"),
    ("signal", lambda box: box.start(["cat"]).send_signal("TERM"), "'TERM'", "signal.SIGTERM"),
    ("stdin", lambda box: sleeping(box).stdin.write("x"), "data", 'b"..."'),
    ("returncode of", lambda box: sleeping(box).returncode, "'returncode'", "wait().exit_code"),
    ("poll", lambda box: sleeping(box).poll(), "'poll'", "use running"),
    ("suspended", suspended_cell, "suspended", "resume it first"),
    ("fork count", lambda box: box.fork(count=3), "'count'", "use n=3"),
    ("context timeout", lambda box: box.context(timeout=3), "'timeout'", "context.run(code)"),
    ("read limit", lambda box: box.files.read("x", limit=3), "'limit'", "use max_bytes="),
    (
        "async read limit",
        lambda box: asyncio.run(R.AsyncSandbox(box).files.read("x", limit=3)),
        "'limit'",
        "use max_bytes=",
    ),
    ("suspend now", lambda box: box.suspend(now=True), "'now'", "it takes none"),
    ("start wait", lambda box: box.start(["ls"], wait=False), "'wait'", "does not wait"),
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
    ("await", wait_for, "Sandbox is not asynchronous", "remove `await`, or use AsyncSandbox"),
    ("async with", enter_async, "Sandbox is not asynchronous", "write `with`, or use AsyncS"),
    ("with", lambda box: enter(R.AsyncSandbox(box)), "is asynchronous", "write `async with`"),
    ("await a result", lambda box: wait_for(box.exec(["true"])), "ExecResult", "await"),
    ("result as text", lambda box: box.exec(["true"]).strip(), "'strip'", "use text"),
    ("result as bytes", lambda box: box.exec(["true"]).decode(), "'decode'", "stdout, which is"),
    ("context await", lambda box: wait_for(box.context()), "Context is not", "AsyncContext"),
]
CLOSED: list[tuple[str, Callable[[Any], object]]] = [
    ("exec", lambda box: box.exec(["true"])),
    ("shell", lambda box: box.shell("true")),
    ("read", lambda box: box.files.read("x")),
    ("snapshot", lambda box: box.snapshot()),
    ("mount", lambda box: box.mount(".:/work")),
    ("fork", lambda box: box.fork()),
    ("mark", lambda box: box.mark()),
    ("expose", lambda box: box.expose(80)),
    ("context", lambda box: box.context()),
]


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


def _public() -> Iterator[tuple[str, Callable[..., object]]]:
    """Every function of a class that is there to be called; models have fields instead."""
    have = [getattr(ringfence, name) for name in R.__all__]
    classes = {each for each in have if isinstance(each, type)}
    classes |= {Files, Process, AsyncProcess, Context, AsyncContext, Exposure}
    for cls in classes:
        if issubclass(cls, Model | Exception | str) or getattr(cls, "_is_protocol", False):
            continue
        for name in dir(cls):
            value = inspect.getattr_static(cls, name)
            function = getattr(value, "__func__", value)
            if (name[0] != "_" or "__init__" == name) and inspect.isfunction(function):
                yield f"{cls.__name__}.{name}", function


def test_every_function_names_a_keyword_that_it_does_not_have() -> None:
    seen = []
    for name, function in _public():
        kinds = [each.kind for each in inspect.signature(function).parameters.values()]
        if inspect.Parameter.VAR_KEYWORD in kinds:
            continue  # it passes them on

        def act(function: Callable[..., Any] = function) -> None:
            made = function(None, zzq=1)
            if inspect.iscoroutine(made):
                made.send(None)

        seen.append(name)
        answers(refusal(act), "has no parameter 'zzq'", "(")
    assert {"Sandbox.exec", "AsyncRemoteSandbox.fork", "Client.__init__"} <= {*seen}


@pytest.mark.parametrize("act", [row[1] for row in CLOSED], ids=[row[0] for row in CLOSED])
def test_a_sandbox_that_has_ended(act: Callable[[Any], object]) -> None:
    require("user namespaces")
    sandbox = ringfence.Sandbox.create()
    sandbox.terminate()

    answers(refusal(lambda: act(sandbox)), "terminated", "create a new one")


def test_a_subclass_with_a_way_of_its_own_is_pickled() -> None:
    """As handles in Ray programs are."""

    @helpful
    class Plain:
        pass

    class Handle(Plain):
        def __reduce__(self) -> tuple[type[int], tuple[int]]:
            return int, (7,)

    assert 7 == pickle.loads(pickle.dumps(Handle()))
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(Plain())


def test_each_object_that_a_user_holds_says_what_it_is() -> None:
    with R.Sandbox.create() as sandbox:
        process, context = sandbox.start(["cat"], stream_stdin=True), sandbox.context()
        with R.race(sandbox, ["true", "exit 3"], pick="best") as found, sandbox.mark() as mark:
            held = [sandbox, process, context, mark, found, *found.outcomes, found.winner]
            assert [] == [repr(each) for each in held if " object at 0x" in repr(each)]
        assert f"<Process {process.id} running>" == repr(process)
        process.kill()
        process.wait(10)
        assert f"<Process {process.id} ended>" == repr(process)
