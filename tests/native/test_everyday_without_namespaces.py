"""The landlock backend runs everyday programs, and changes no metadata outside for them."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import struct
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence import Mount, Sandbox
from ringfence.backends.landlock.backend import LandlockBackend
from ringfence.backends.landlock.filters import judged_calls
from ringfence.backends.landlock.sandbox import LandlockSandbox
from ringfence.guest.without_namespaces.landlocked import members
from ringfence.model.execs.exec import ExecResult
from tests.features import require
from tests.native.test_without_namespaces import run_refused
from tests.strangers import let_others_in

PYTHON = "/usr/bin/python3"
SECONDS = float(os.environ.get("RINGFENCE_RACE_S", "2"))
CHMOD = [
    str(number) for number, name in judged_calls(owns_files_outside=True).items() if "chmod" in name
]


@pytest.fixture(scope="module", autouse=True)
def _landlock() -> None:
    require("landlock")


@pytest.fixture(scope="module")
def backend() -> Iterator[LandlockBackend]:
    made = LandlockBackend()
    yield made
    made.close()


@pytest.fixture
def sandbox(backend: LandlockBackend) -> Iterator[Sandbox]:
    with Sandbox.create(backend=backend) as made:
        yield made


PROGRAMS = {
    "git": "git init -q r && cd r && git config user.email a@b.c && git config user.name n && echo ok > f"
    " && git add f && git commit -qm one && git clone -q . ../c && cat ../c/f",
    "gcc": 'echo "int puts(char *); int main() { puts(\\"ok\\"); }" > m.c && gcc -w -o m m.c && ./m',
    "make": 'printf "ok:\\n\\t@echo ok > made; chmod 600 made; cat made\\n" > Makefile && make -s',
    "tar": "mkdir d && echo ok > d/f && chmod 640 d/f && touch -d 2001-01-01 d/f && tar czf t.tgz d"
    " && mkdir x && tar xpzf t.tgz -C x && stat -c %a:%Y d/f x/d/f | uniq -c | grep -q ' 2 ' && cat x/d/f",
    "cp": "echo ok > f && chmod 711 f && cp -a f g && mv g h && install -m 755 h i && cat i",
    "sqlite3": "sqlite3 a.db \"create table a (b); insert into a values ('ok'); select b from a\"",
    "node": "node -e \"require('fs').writeFileSync('f', 'ok', {mode: 0o600}); "
    "require('fs').chmodSync('f', 0o644); console.log(require('fs').readFileSync('f', 'utf8'))\"",
    "python3": "python3 -m venv --without-pip v && v/bin/python -c 'print(\"ok\")'",
    "pip3": "python3 -m venv --system-site-packages --without-pip v"
    " && v/bin/python -m pip install -q --no-index ./one-1.0-py3-none-any.whl && v/bin/python -m one",
    "perl": 'perl -e \'open F, ">f"; close F; chmod 0755, "f" or die; utime 1, 1, "f" or die; print "ok\\n"\'',
    "node server": "node -e \"const s = require('http').createServer((q, r) => r.end('ok')).listen(3000, () =>"
    " fetch('http://localhost:3000').then(r => r.text()).then(t => { console.log(t); s.close() }))\"",
    "python3 multiprocessing": 'python3 -c "from multiprocessing import Pool, shared_memory as s; '
    "a = s.SharedMemory(create=True, size=9); b = s.SharedMemory(a.name); b.buf[:2] = b'ok'; "
    'p = Pool(2); assert p.map(abs, [-1]) == [1]; print(bytes(a.buf[:2]).decode()); b.close(); a.unlink()"',
    "redis-server": "redis-server --port 7777 --save '' --protected-mode no > log &"
    " until redis-cli -p 7777 set a ok | grep -q OK; do sleep 0.1; done; redis-cli -p 7777 get a;"
    " redis-cli -p 7777 shutdown nosave",
    "java": "printf 'class A { public static void main(String[] a) throws Exception {"
    ' var s = new java.net.ServerSocket(0); new java.net.Socket("127.0.0.1", s.getLocalPort()); s.accept();'
    ' System.out.println("ok"); } }\\n\' > A.java && java A.java',
    "chromium": "chromium --headless --no-sandbox --disable-gpu --dump-dom 'data:text/html,ok' 2>/dev/null"
    " | grep -o ok",
    "postgres": "printf 'me:x:%s:%s::%s:/bin/sh\\n' $(id -u) $(id -g) $HOME > passwd; "
    "printf 'me:x:%s:\\n' $(id -g) > group; "
    "export LD_PRELOAD=libnss_wrapper.so NSS_WRAPPER_PASSWD=$PWD/passwd NSS_WRAPPER_GROUP=$PWD/group; "
    "b=$(ls -d /usr/lib/postgresql/*/bin | tail -n 1); $b/initdb -D d -A trust --no-sync > log; "
    "echo 'host all all 127.64.0.0/10 trust' >> d/pg_hba.conf; "
    '$b/pg_ctl -D d -o "-k $PWD -c fsync=off" -w -l log start > log2; '
    "psql -h $PWD -d postgres -qAtc \"create table t as select 'ok' a\"; "
    "psql -h 127.0.0.1 -d postgres -Atc 'select a from t'; $b/pg_ctl -D d -m fast stop > log2",
    "bash": "printf '#!/bin/bash\\necho ok\\n' > s && chmod +x s && ./s",
}


def wheel(directory: Path) -> Path:
    path = directory / "one-1.0-py3-none-any.whl"
    info = "one-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("one.py", "print('ok')\n")
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: one\nVersion: 1.0\n")
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(
            f"{info}/RECORD", f"one.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n"
        )
    return path


@pytest.mark.full
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_runs(sandbox: Sandbox, program: str, tmp_path: Path) -> None:
    if program == "postgres" and not any(Path("/usr/lib").glob("*/libnss_wrapper.so")):
        pytest.skip("libnss_wrapper, which names the sandbox's user, is not installed")
    if not shutil.which(program.split()[0], path="/usr/local/bin:/usr/bin:/bin"):
        pytest.skip(f"{program} is not installed")
    if program == "pip3":
        made = wheel(tmp_path)
        sandbox.files.write(made.name, made.read_bytes())
    ran = sandbox.exec(["sh", "-ec", PROGRAMS[program]], timeout_s=120)

    assert (0, "ok") == (ran.exit_code, ran.text.strip()), ran


def test_a_program_runs_where_namespaces_are_refused() -> None:
    ran = run_refused("--anywhere", "--", "sh", "-ec", PROGRAMS["cp"])

    assert (0, "ok") == (ran.returncode, ran.stdout.strip()), ran.stderr


# -- what is outside --------------------------------------------------------------------------------

ATTEMPTS = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
secret, shown = os.environ["SECRET"], sys.argv[1]
me = os.getuid(), os.getgid()
open('own', 'w').close()
def tried(do):
    try: do(); return 1
    except OSError: return 0
os.symlink(secret, 'link'); os.symlink(os.path.dirname(secret), 'up')
fd = os.open(shown, os.O_RDONLY)
place = os.open(os.path.dirname(secret), os.O_PATH)
path = os.open(secret, os.O_PATH)
name = os.path.basename(secret)
before = os.getcwd()
def there():
    os.chdir(os.path.dirname(secret))
    try: os.chmod(name, 0o777)
    finally: os.chdir(before)
print(*map(tried, [
    lambda: os.chmod('own', 0o711), lambda: os.utime('own', (1, 1)), lambda: os.chown('own', *me),
    lambda: os.chmod(secret, 0o777), lambda: os.chmod('link', 0o777), lambda: os.chmod(f'up/{name}', 0o777),
    lambda: os.utime(secret, (1, 1)), lambda: os.utime('link', (1, 1)), lambda: os.chown(secret, *me),
    lambda: os.fchmod(fd, 0o777), lambda: os.utime(fd, (1, 1)), lambda: os.fchown(fd, *me),
    lambda: os.chmod(f'/proc/self/fd/{fd}', 0o777), lambda: os.chmod(f'/dev/fd/{path}', 0o777),
    lambda: os.chmod(f'/proc/{os.getpid()}/fd/{path}', 0o777),
    lambda: os.chmod(f'/proc/{os.getppid()}/cwd', 0o777),
    lambda: os.chmod(name, 0o777, dir_fd=place), there,
    lambda: os.chmod('own/../' + secret, 0o777), lambda: os.chmod('../' * 40 + secret, 0o777),
]), os.stat('own').st_mode & 0o777 == 0o711)
def number(do): return ctypes.get_errno() if do() < 0 else 0
print(*map(number, [
    lambda: libc.chmod(None, 0o777), lambda: libc.chmod(b'', 0o777), lambda: libc.chmod(b'none', 0o777),
    lambda: libc.chmod(b'own/none', 0o777), lambda: libc.chmod(b'a' * 5000, 0o777),
    lambda: libc.fchmod(999, 0o777), lambda: libc.fchmodat(999, b'own', 0o777, 0),
]))
"""


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A file of the host that the sandbox's user may change, in a directory that it can enter."""
    let_others_in(tmp_path)
    secret = tmp_path / "secret"
    secret.write_text("canary")
    os.utime(secret, (1000, 1000))
    os.chmod(secret, 0o644)
    return secret


def state(path: Path) -> tuple[int, int, int]:
    found = os.stat(path)
    return stat.S_IMODE(found.st_mode), found.st_mtime_ns, found.st_uid


def attempts(sandbox: Sandbox, outside: Path, shown: Path) -> ExecResult:
    # As an argument, a path in /tmp would be that of the sandbox's own.
    env = {"SECRET": str(outside)}
    return sandbox.exec([PYTHON, "-c", ATTEMPTS, str(shown)], env=env, timeout_s=60)


def test_metadata_outside_stays(backend: LandlockBackend, outside: Path) -> None:
    shown = outside.parent / "shown"
    shown.mkdir(mode=0o755)
    (shown / "file").write_text("read me")
    before = state(outside), state(shown / "file")
    with Sandbox.create(backend=backend, mounts=[Mount(str(shown), str(shown))]) as sandbox:
        tried = attempts(sandbox, outside, shown / "file")

    assert before == (state(outside), state(shown / "file"))
    assert "1 1 1" + " 0" * 17 + " True\n14 2 2 20 36 9 9\n" == tried.text, tried


NOW = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
path, here = os.environ['SECRET'].encode(), -100
fd = os.open(path, os.O_PATH)
now = (ctypes.c_long * 4)(0, 0x3fffffff, 0, 0x3fffffff)  # UTIME_NOW
def number(*call): return ctypes.get_errno() if libc.syscall(*call) < 0 else 0
open('own', 'w').close(); os.utime('own', (1, 1)); os.utime('own')
calls = [(280, here, path, None, 0), (280, here, path, now, 0), (280, fd, b'', None, 0x1000),
         (280, here, b'/proc/self/fd/%d' % fd, None, 0), (132, path, None), (235, path, None),
         (261, here, path, None)]
if os.uname().machine != 'x86_64':
    calls = [(88, *call[1:]) for call in calls if call[0] == 280]
print({number(*call) for call in calls}, os.stat('own').st_mtime > 1)
"""


def test_times_of_a_file_that_everybody_may_write_stay(sandbox: Sandbox, outside: Path) -> None:
    """Its owner is not asked where the time is now, and Landlock judges none of these calls."""
    os.chmod(outside, 0o666)
    before = state(outside)
    ran = sandbox.exec([PYTHON, "-c", NOW], env={"SECRET": str(outside)}, timeout_s=60)

    assert before == state(outside)
    assert f"{{{errno.EPERM}}} True\n" == ran.text, ran


TO_NOBODY = """
import os
secret = os.environ['SECRET']
fd = os.open(secret, os.O_PATH)
def refused(do):
    try: do(secret, -1, -1)
    except PermissionError: return 1
    return 0
open('own', 'w').close(); os.chown('own', -1, -1)
print(refused(os.chown), refused(os.lchown), refused(lambda path, *ids: os.chown(f'/proc/self/fd/{fd}', *ids)))
"""
CAPABILITY = "security.capability"


def test_a_chown_to_nobody_else_changes_nothing_outside(sandbox: Sandbox, outside: Path) -> None:
    """The kernel asks nobody's leave for it, and takes a file's capabilities."""
    value = struct.pack("<5I", 0x02000001, 1 << 13, 0, 0, 0)  # VFS_CAP_REVISION_2, CAP_NET_RAW
    if os.geteuid() == 0:
        os.setxattr(outside, CAPABILITY, value)
    before = os.stat(outside).st_ctime_ns
    ran = sandbox.exec([PYTHON, "-c", TO_NOBODY], env={"SECRET": str(outside)}, timeout_s=60)

    assert before == os.stat(outside).st_ctime_ns
    assert os.geteuid() or value == os.getxattr(outside, CAPABILITY)
    assert "1 1 1\n" == ran.text, ran


RACES = """
import ctypes, mmap, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
secret, seconds = os.environ["SECRET"].encode(), float(sys.argv[1])
place, name = os.path.split(secret)
os.makedirs(b'in'); own = os.path.join(os.getcwdb(), b'in', name)
with open(own, 'w'): pass
shared = mmap.mmap(-1, 4096)
until = time.monotonic() + seconds
fd, out = os.open(own, os.O_RDONLY), os.open(secret, os.O_PATH)
where = [os.open(b'in', os.O_PATH), os.open(place, os.O_PATH)]
os.symlink(own, 'link')

def swap_pointer():
    shared[:len(own) + 1] = own + b'\\0'; shared[:len(secret) + 1] = secret + b'\\0'
def swap_link():
    for target in (secret, own):
        os.symlink(target, 'next'); os.rename('next', 'link')
def swap_directory():
    os.rename('in', 'was'); os.symlink(place, 'in'); os.unlink('in'); os.rename('was', 'in')
swaps = [swap_pointer, swap_link, swap_directory]
children = []
for swap in swaps:
    child = os.fork()
    if child == 0:
        while time.monotonic() < until:
            try: swap()
            except OSError: pass
        os._exit(0)
    children.append(child)
# Threads share the descriptors and the working directory.
import threading
home, number = os.getcwd(), os.dup(fd)
def swap_descriptor():
    while time.monotonic() < until:
        os.dup2(out, number); os.dup2(fd, number)
def swap_cwd():
    while time.monotonic() < until:
        os.fchdir(where[1]); os.fchdir(where[0])
for each in (swap_descriptor, swap_cwd):
    threading.Thread(target=each, daemon=True).start()
buffer = ctypes.addressof(ctypes.c_char.from_buffer(shared))
link, through = os.path.join(home, 'link').encode(), os.path.join(home, 'in').encode() + b'/' + name
times = (ctypes.c_long * 4)(7, 0, 7, 0)
done = refused = 0
while time.monotonic() < until:
    for result in (
        libc.chmod(ctypes.c_void_p(buffer), 0o777), libc.chmod(link, 0o777), libc.chmod(through, 0o777),
        libc.chmod(name, 0o777), libc.fchmod(number, 0o777), libc.futimens(number, times),
        libc.utimensat(-100, name, times, 0), libc.utimensat(-100, link, times, 0),
        libc.chmod(b'/proc/self/fd/%d' % number, 0o777), libc.chmod(b'/proc/self/cwd/' + name, 0o777),
    ):
        done += result == 0; refused += result != 0
print(done, refused, flush=True)
os._exit(0)
"""


@pytest.mark.full
@pytest.mark.timeout(150 + SECONDS)
def test_swapped_paths_links_descriptors_and_directories_reach_nothing_outside(
    sandbox: Sandbox, outside: Path
) -> None:
    before = state(outside)
    command, env = [PYTHON, "-c", RACES, str(SECONDS)], {"SECRET": str(outside)}
    ran = sandbox.exec(command, env=env, timeout_s=120 + SECONDS)
    assert ran.ok, ran
    done, refused = map(int, ran.text.split())

    assert before == state(outside)
    assert min(done, refused) > 20, ran


def test_without_the_agent_nothing_changes(sandbox: Sandbox) -> None:
    """A stopped agent lets calls wait, and the end of it ends everybody."""
    inner = sandbox._inner
    assert isinstance(inner, LandlockSandbox)
    if inner.host_ids:
        pytest.skip("with a user of its own the kernel judges the call")
    sandbox.files.write("own", b"")
    own = Path(inner.root) / "own"
    before = state(own)
    code = "import os; input('up'); os.chmod('own', 0o700); os.utime('own', (1, 1))"
    process = sandbox.start([PYTHON, "-uc", code], stream_stdin=True)
    assert process.stdin is not None
    assert b"up" == process.stdout.read()
    (caller,) = [pid for pid in members(inner._tag_base) if pid != inner.pid]
    os.kill(inner.pid, signal.SIGSTOP)
    process.stdin.write(b"\n")
    waiting = Path(f"/proc/{caller}/syscall")
    deadline = time.monotonic() + 20
    while waiting.read_text().split()[0] not in CHMOD and time.monotonic() < deadline:
        time.sleep(0.01)
    waited = waiting.read_text().split()[0]
    during = state(own)
    os.kill(inner.pid, signal.SIGKILL)
    while Path(f"/proc/{caller}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)

    assert waited in CHMOD
    assert not Path(f"/proc/{caller}").exists()
    assert before == during


_BINDS = """
import os, socket
os.umask(0o077)
socket.socket(socket.AF_UNIX).bind("socket")
shared = os.open("/dev/shm/own", os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o666)
print(*(oct(os.stat(each).st_mode & 0o777) for each in ("socket", shared)))
"""


def test_the_umask_of_a_program_is_its_own(sandbox: Sandbox) -> None:
    """The agent takes it to make sockets and shared memory for that program, and makes files for others."""
    before = sandbox.shell("umask").stdout_text
    bound = sandbox.exec([PYTHON, "-c", _BINDS])
    sandbox.files.write("file", b"")

    assert "0o700 0o600\n" == bound.stdout_text, bound.stderr_text
    assert before == sandbox.shell("umask").stdout_text
    assert "644\n" == sandbox.exec(["stat", "-c", "%a", "file"]).stdout_text


_BESIDE = """
import os, sys
open('own', 'w').close()
def number(call, *arguments):
    try: call(*arguments)
    except OSError as exc: return exc.errno
    return 0
print([(number(os.utime, path, (1, 1)), number(os.chown, path, -1, -1))
    for path in ('own', os.environ['BESIDE'], os.environ['BESIDE'] + '/file')])
"""


def test_a_directory_whose_name_begins_like_its_own_is_another(sandbox: Sandbox) -> None:
    inner = sandbox._inner
    assert isinstance(inner, LandlockSandbox)
    beside = Path(f"{inner.place.mapped('/home/sandbox')}-of-another")
    beside.mkdir()
    (beside / "file").touch()
    for each in (beside, beside / "file"):
        os.chown(each, inner.uid, inner.uid)
        os.utime(each, (1000, 1000))
    before = state(beside), state(beside / "file")
    tried = sandbox.exec([PYTHON, "-c", _BESIDE], env={"BESIDE": str(beside)})

    assert "[(0, 0), (1, 1), (1, 1)]\n" == tried.stdout_text, tried.stderr_text
    assert before == (state(beside), state(beside / "file"))
