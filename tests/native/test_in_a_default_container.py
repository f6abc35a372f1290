"""A container of a real engine with its default filter, capabilities and masked paths: no namespaces there."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ringfence
from tests.attack.test_attack import KNOWN
from tests.engine import running_engine
from tests.features import require
from tests.native.service_there import EVERYTHING

pytestmark = [pytest.mark.full, pytest.mark.root]  # an engine of one's own takes root
SOURCE = Path(ringfence.__file__).parents[1]

WORK = """
import json, os, socket, subprocess, sys, threading, warnings
from ringfence import Sandbox
from ringfence.errors import RingfenceError
found = {}
def run(*options, cwd=None):
    command = [sys.executable, '-m', 'ringfence', 'run', *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    return done.returncode, done.stdout.strip(), done.stderr
found['refused'] = run('--', 'echo', 'hi')
script = 'echo hi; touch f && chmod 700 f && ls -l f | cut -c1-10'
found['anywhere'] = run('--anywhere', '--', 'sh', '-c', script)
os.mkdir('/home/project')
with open('/home/project/step.py', 'w') as file: file.write("print('from the script')")
found['script'] = run('--anywhere', '--', 'python3', 'step.py', cwd='/home/project')
found['here'] = run('--anywhere', '--here', '--', 'python3', 'step.py', cwd='/home/project')
found['named'] = run('--allow-degraded', 'namespaces', '--', 'echo', 'hi')
found['star'] = run('--allow-degraded', '*', '--', 'echo', 'hi')[0]

def serve(address):
    server = socket.create_server(address)
    def answer():
        while True:
            with server.accept()[0] as sock:
                sock.sendall(b'reached')
    threading.Thread(target=answer, daemon=True).start()
    return server.getsockname()[1]
allowed, other = serve(('127.0.0.1', 0)), serve(('0.0.0.0', 0))
INSIDE = '''
import socket, sys
def tell(port):
    try: return socket.create_connection(("127.0.0.1", port), 10).recv(20).decode()
    except OSError as exc: return exc.errno
a = socket.create_server(("127.0.0.1", 8000)); c = socket.create_connection(("127.0.0.1", 8000))
p = a.accept()[0]; c.sendall(b"x")
u = socket.socket(socket.AF_UNIX); u.bind("x.sock"); u.listen()
v = socket.socket(socket.AF_UNIX); v.connect("x.sock"); v.sendall(b"y")
print(tell(int(sys.argv[1])), tell(int(sys.argv[2])), p.recv(3).decode(), u.accept()[0].recv(3).decode())
'''
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter('always')
    with Sandbox.create(allow_degraded=['namespaces'], network=[f'127.0.0.1:{allowed}']) as sandbox:
        ran = sandbox.exec([sys.executable, '-c', INSIDE, str(allowed), str(other)])
        found['library'] = sandbox.session.backend, ran.text, ran.stderr_text, sandbox.stats().degraded
found['warned'] = [str(each.message) for each in told]

from ringfence import SessionManager
with SessionManager(backends=('native', 'landlock'), state_dir=os.environ['HOME'] + '/state') as manager:
    with manager.acquire(client_id='one') as lease:
        ran = lease.sandbox.exec(['echo', 'hi'])
        found['manager'] = lease.session.backend, ran.text.strip()
print(json.dumps(found))
"""


def image() -> bytes:
    """A root whose programs are mounted."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, mode in (("usr", 0o755), ("etc", 0o755), ("src", 0o755), ("tmp", 0o1777), ("var/tmp", 0o1777),
                           ("home", 0o1777)):  # fmt: skip
            info = tarfile.TarInfo(name)
            info.type, info.mode = tarfile.DIRTYPE, mode
            tar.addfile(info)
        for name in ("bin", "sbin", "lib", "lib64"):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, f"usr/{name}"
            tar.addfile(info)
        for name, text in (("passwd", "root:x:0:0::/home:/bin/sh\n"), ("group", "root:x:0:\n")):
            info = tarfile.TarInfo(f"etc/{name}")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    return made.getvalue()


@pytest.fixture(scope="module")
def engine() -> Iterator[list[str]]:
    require("landlock")
    require("dockerd")
    with running_engine() as address:
        docker = ["docker", "-H", address]
        subprocess.run(
            [*docker, "import", "-", "root"], input=image(), check=True, capture_output=True
        )
        yield docker


def run(
    engine: list[str],
    user: int,
    *argv: str,
    volumes: dict[str, str] | None = None,
    settings: tuple[str, ...] = (),
) -> Any:
    """Run Python in a new container; what it printed, which is JSON."""
    options = ["--rm", "--network=none", f"--user={user}", "--tmpfs=/home:mode=1777,exec"]
    options += settings
    path = ":".join(["/src", *(volumes or {}).values()])
    options += ["-eHOME=/home", f"-ePYTHONPATH={path}", "-ePYTHONDONTWRITEBYTECODE=1"]
    for source, target in {"/usr": "/usr", str(SOURCE): "/src", **(volumes or {})}.items():
        options += [f"-v{source}:{target}:ro"]
    command = [*engine, "run", *options, "root", "/usr/bin/python3", *argv]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert 0 == ran.returncode, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.parametrize("user", [0, 1000])
def test_every_part_of_the_service_works(engine: list[str], user: int) -> None:
    there = {sysconfig.get_path("purelib"): "/site", str(Path(__file__).parent): "/tests"}
    if f"{sys.version_info[0]}.{sys.version_info[1]}" not in os.path.realpath("/usr/bin/python3"):
        pytest.skip("the packages of this Python are not those of the container's")
    found = run(engine, user, "/tests/service_there.py", "/home", volumes=there)

    assert found == EVERYTHING


@pytest.mark.parametrize("user", [0, 1000])
def test_without_namespaces_all_of_it_works(engine: list[str], user: int) -> None:
    found = run(engine, user, "-c", WORK)

    assert 125 == found["refused"][0]
    assert "--anywhere" in found["refused"][2]
    assert [0, "hi\n-rwx------"] == found["anywhere"][:2]
    assert [[0, "from the script"]] * 2 == [found["script"][:2], found["here"][:2]]
    assert [0, "hi"] == found["named"][:2]
    assert 125 == found["star"]
    assert ["landlock", "reached 111 x y\n", "", ["namespaces"]] == found["library"]
    assert "without namespaces" in found["warned"][0]
    assert ["landlock", "hi"] == found["manager"]


EACH = """
import json, subprocess, sys
def run(*options):
    command = [sys.executable, '-m', 'ringfence', 'run', *options, '--', 'echo', 'hi']
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else done.stderr
def anywhere():
    command = [sys.executable, '-m', 'ringfence', 'run', '--anywhere', '--', 'true']
    return subprocess.run(command, capture_output=True, text=True).stderr
allowed = run('--backend', 'native', '--allow-degraded', 'namespaces')
print(json.dumps([run('--backend', 'native'), allowed, run('--backend', 'landlock'), anywhere()]))
"""
SECCOMP, SYSTEM_PATHS = "--security-opt=seccomp=unconfined", "--security-opt=systempaths=unconfined"
MASKED = "--security-opt systempaths=unconfined (Kubernetes: procMount: Unmasked)"
FILTERED = "--security-opt seccomp=unconfined, or run Ringfence outside it"


@pytest.mark.parametrize("user", [0, 1000])
@pytest.mark.parametrize(
    ("settings", "refused", "is_borrowed"),
    [
        ((), FILTERED, False),
        ((SYSTEM_PATHS,), FILTERED, False),
        ((SECCOMP,), MASKED, True),
        ((SECCOMP, SYSTEM_PATHS), "", False),
        (("--cap-add=SYS_ADMIN",), MASKED, False),
        (("--cap-add=SYS_ADMIN", SYSTEM_PATHS), FILTERED, False),
        (("--cap-add=SYS_ADMIN", SECCOMP), MASKED, True),
        (("--cap-add=SYS_ADMIN", SECCOMP, SYSTEM_PATHS), "", False),
    ],
)
def test_each_setting_of_the_engine(
    engine: list[str], settings: tuple[str, ...], refused: str, is_borrowed: bool, user: int
) -> None:
    """The table in docs/how-to/without-namespaces.md: what is refused names the next switch."""
    native, allowed, landlock, anywhere = run(engine, user, "-c", EACH, settings=settings)

    assert "hi\n" == landlock
    assert refused in native
    assert ("hi\n" == native) == (not refused)
    assert ("hi\n" == allowed) == (not refused or is_borrowed)
    told = (
        "with the /proc of this container"
        if is_borrowed
        else "without namespaces"
        if refused
        else ""
    )
    assert told in anywhere if told else not anywhere


LIMITED = """
import json
from ringfence import Sandbox
UNTIL = '''
import os, signal
made = 0
try:
    while made < 1000:
        if not os.fork(): signal.pause()
        made += 1
except OSError as exc: print(made, exc.errno, flush=True)
os.killpg(0, 9)
\'\'\'
with Sandbox.create(backend='landlock', limits={'pids': 64}) as sandbox:
    said = {each.name: each.status for each in sandbox.protections()}
    print(json.dumps([said['pids_limit'], sandbox.exec(['python3', '-c', UNTIL]).text.split()]))
"""


@pytest.mark.parametrize(
    ("user", "settings", "status"),
    [(0, (), "enforced"), (1000, (), "degraded"), (0, ("--cap-drop=ALL",), "degraded")],
)
def test_processes_are_bounded_without_a_cgroup(
    engine: list[str], user: int, settings: tuple[str, ...], status: str
) -> None:
    said, (made, number) = run(engine, user, "-c", LIMITED, settings=settings)

    assert status == said
    assert errno.EAGAIN == int(number)
    assert 60 <= int(made) <= 68


BESIDE_MASKS = """
import json, os
from ringfence import SandboxSpec, SessionManager
from ringfence.errors import BackendUnavailable
found = {}
def taken(backends, **options):
    with SessionManager(backends=backends, state_dir=os.environ['HOME'] + '/state') as manager:
        try:
            with manager.acquire(SandboxSpec(**options), client_id='one') as lease:
                weak = {p.name: p.why for p in lease.sandbox.protections() if p.status != 'enforced'}
                return lease.session.backend, lease.sandbox.exec(['echo', 'hi']).text, weak
        except BackendUnavailable as exc:
            return str(exc), '', {}
both = ('native', 'landlock')
found['plain'] = taken(both)
found['alone'] = taken(('native',))
found['allowed'] = taken(both, allow_degraded=('namespaces',))
print(json.dumps(found))
"""


@pytest.mark.parametrize("user", [0, 1000])
def test_a_server_shows_the_containers_proc_to_who_allows_it(engine: list[str], user: int) -> None:
    found = run(engine, user, "-c", BESIDE_MASKS, settings=(SECCOMP,))

    assert ["landlock", "hi\n"] == found["plain"][:2]
    assert "no new /proc beside masked paths" in found["alone"][0]
    assert ["native", "hi\n"] == found["allowed"][:2]
    assert "command lines" in found["allowed"][2]["namespaces"]
    # The container's root has root's uid inside, too, for which no limit of processes counts.
    assert (user == 0) == ("pids_limit" in found["allowed"][2])
    assert (user == 0) == ("host_identity" in found["allowed"][2])


PROBES = """
import json, os, subprocess, sys
argv = [sys.executable, '-m', 'ringfence', 'doctor', '--attack', '--backend', 'native', '--json']
there = {**os.environ, 'HOME': '/home/me'}  # a probe looks for this name: /home is in each sandbox
ran = subprocess.run(argv, capture_output=True, text=True, env=there)
print(ran.stdout or json.dumps(ran.stderr))
"""


@pytest.mark.timeout(400)
def test_the_probes_find_beside_masks_what_is_declared(engine: list[str]) -> None:
    """As an ordinary user with a group of its own, where the container's /proc is shown."""
    settings = (SECCOMP, "--user=1000:1000")
    found = run(engine, 1000, "-c", PROBES, settings=settings)

    assert isinstance(found, dict), found  # else what it printed on standard error
    results = found["probes"]
    escaped = {each["id"] for each in results if each["status"] == "escaped"}
    assert escaped <= KNOWN
    reasons = {each["evidence"] for each in results if each["status"] == "not_applicable"}
    assert all("the native backend reports it as degraded" in each for each in reasons)
    assert len([each for each in results if each["status"] == "held"]) > 400
