"""Real programs under the default filter do what they do without it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.policy import run_under

from ringfence.policy import filters
from ringfence.policy.filters import load_filter

ROOT = Path(__file__).parent.parent.parent.parent

pytestmark = [
    pytest.mark.skipif(
        os.uname().machine not in filters.MACHINES, reason="no filter for this machine"
    ),
    pytest.mark.anyone,
]

PYTHON = """
import asyncio, concurrent.futures, fcntl, multiprocessing, os, pty, select, shutil, signal
import socket, sqlite3, subprocess, sys, tempfile, threading, time, uuid
from multiprocessing import shared_memory

multiprocessing.set_start_method("fork")
with multiprocessing.Pool(2) as pool:
    assert [1, 4, 9] == pool.map(pow2 := (2).__rpow__, [1, 2, 3])
here, there = multiprocessing.Pipe()
here.send("x"); assert "x" == there.recv()
memory = shared_memory.SharedMemory(create=True, size=4096); memory.close(); memory.unlink()
with multiprocessing.Lock():
    pass

with concurrent.futures.ThreadPoolExecutor(8) as threads:
    assert 45 == sum(threads.map(int, range(10)))

async def main():
    async def answer(reader, writer):
        writer.write(await reader.readline()); await writer.drain(); writer.close()
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"hello\\n")
    assert b"hello\\n" == await reader.readline()
    server.close()
    child = await asyncio.create_subprocess_exec("cat", stdin=-1, stdout=-1)
    assert b"y" == (await child.communicate(b"y"))[0]
asyncio.run(main())

database = sqlite3.connect("file.db")
database.execute("pragma journal_mode=wal")
database.execute("create table t (a)"); database.execute("insert into t values (1)")
database.commit()
assert (1,) == sqlite3.connect("file.db").execute("select a from t").fetchone()

os.makedirs("tree/deep"); open("tree/deep/file", "w").write("z" * 100000)
shutil.copytree("tree", "copy"); os.chmod("copy", 0o1755); os.rename("copy/deep/file", "copy/file")
shutil.make_archive("archive", "gztar", "copy"); shutil.rmtree("tree")
os.mkfifo("fifo"); os.symlink("fifo", "link"); os.truncate("archive.tar.gz", 10); os.sync()
os.setxattr("archive.tar.gz", "user.a", b"b") if hasattr(os, "setxattr") else None
fcntl.flock(open("file.db"), fcntl.LOCK_SH)

pid, leader = pty.fork()
if pid == 0:
    os.execvp("stty", ["stty", "size"])
os.waitpid(pid, 0)
assert b"0 0" in os.read(leader, 100)
signal.setitimer(signal.ITIMER_REAL, 10); signal.setitimer(signal.ITIMER_REAL, 0)
for family in socket.AF_INET, socket.AF_INET6:
    for kind in socket.SOCK_STREAM, socket.SOCK_DGRAM:
        socket.socket(family, kind).close()
assert socket.if_nameindex()
subprocess.run(["true"], check=True, start_new_session=True, preexec_fn=os.getpid)
print("fine")
"""

C = """
cat > main.c <<'END'
#include <pthread.h>
#include <stdio.h>
static void *say(void *text) { puts(text); return 0; }
int main(void) { pthread_t t; pthread_create(&t, 0, say, "fine"); return pthread_join(t, 0); }
END
printf 'main: main.c\\n\\tgcc -O1 -pthread -o main main.c\\n' > Makefile
make -s -j2 && ./main
"""

GIT = """
git init -q repo && cd repo && git config user.email a@b && git config user.name a
seq 2000 > file && git add file && git commit -qm one && seq 3000 > file && git commit -qam two
git gc -q && git clone -q . ../clone && cd ../clone && git log --oneline | wc -l && git status -s
git mv file other && git stash -q && git stash pop -q && git diff --cached --stat | tail -1
test "$(git rev-list --count HEAD)" = 2 && echo fine
"""

COREUTILS = """
set -e
seq 1000 | sort -rn | head -n 5 | tac | paste -sd+ | sed 's/+/ + /g' | tr -d ' ' | wc -c
mkdir -p a/b && cp -a /etc/hostname a/b/ && ln a/b/hostname a/hard && ln -s hard a/soft
mv a/b/hostname a/moved && touch -d yesterday a/moved && chmod -R u+rwX,go-w a
find a -type f | sort
tar czf a.tgz a && tar xzf a.tgz -C "$(mktemp -d -p .)" && gzip -dc a.tgz | tar t | wc -l
dd if=/dev/zero of=big bs=1M count=4 status=none && split -b 1M big part. && cat part.* | cmp - big
truncate -s 0 big && df . > df && du -sh . > du && stat -c %s big && date +%Y > d && id -u > i
install -m 0644 a/moved installed && shred -u installed && rm -r a part.* && sync && timeout 5 true
nice -n 5 true && nohup true 2> n && env -i true && tee copy < df | md5sum > sum && mkfifo p && rm p
(trap 'echo trapped' TERM; sleep 0.4 & wait) & sleep 0.1; kill $!; wait $! || true
for i in 1 2 3; do (exit 0) & done; wait; cat <(echo) > /dev/null; ulimit -n 100; echo fine
"""

NODE = """
const {execFileSync, fork} = require('child_process'), fs = require('fs'), http = require('http');
const {Worker} = require('worker_threads');
fs.writeFileSync('file', 'x'); fs.watch('.').close(); fs.copyFileSync('file', 'copy');
execFileSync('true');
const server = http.createServer((_, answer) => answer.end('hello')).listen(0, '127.0.0.1', () =>
  http.get({port: server.address().port, host: '127.0.0.1'}, answer => answer.on('data', data => {
    server.close();
    new Worker('require("worker_threads").parentPort.postMessage(1)', {eval: true})
      .on('message', () => console.log('fine'));
  })));
"""

JAVA = """
cat > Main.java <<'END'
import java.nio.file.*; import java.util.stream.*;
public class Main {
  public static void main(String[] a) throws Exception {
    try (var s = new java.net.ServerSocket(0)) {
      new java.net.Socket("127.0.0.1", s.getLocalPort()).close();
    }
    java.net.NetworkInterface.networkInterfaces().forEach(i -> {});
    new ProcessBuilder("true").start().waitFor();
    Files.writeString(Path.of("f"), "" + IntStream.range(0, 1000).parallel().sum());
    System.out.println("fine");
  }
}
END
java -Xmx64m -XX:TieredStopAtLevel=1 Main.java
"""

CURL = """
python3 -u -m http.server --bind 127.0.0.1 0 > log 2>&1 & server=$!
for _ in $(seq 100); do
  port=$(sed -n 's/.*port \\([0-9]*\\).*/\\1/p' log); [ "$port" ] && break; sleep 0.1
done
echo fine > page && curl -sS --retry 5 "http://127.0.0.1:$port/page"; kill $server
"""

PROGRAMS = {
    "python3": ["/usr/bin/python3", "-c", PYTHON],
    "this python": [sys.executable, "-c", PYTHON],
    "venv": [sys.executable, "-c", "import venv; venv.create('v', symlinks=True); print('fine')"],
    "bash": ["bash", "-c", COREUTILS],
    "gcc": ["bash", "-c", C],
    "git": ["bash", "-c", GIT],
    "node": ["node", "-e", NODE],
    "java": ["bash", "-c", JAVA],
    "curl": ["bash", "-c", CURL],
    "sqlite3": ["sqlite3", "f.db", "pragma journal_mode=wal; create table t(a); select 'fine'"],
    "perl": ["perl", "-e", "print qx(echo f) =~ s/f\\n/fine/r; fork || exit; wait"],
}


LOCKING = {"python3", "this python", "git", "sqlite3"}  # they lock files, which strict refuses


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "strict"),
    [(name, False) for name in PROGRAMS]
    + [(name, True) for name in sorted(PROGRAMS.keys() - LOCKING)],
)
def test_a_program_works(name: str, strict: bool, tmp_path: Path) -> None:
    argv = PROGRAMS[name]
    needed = name if "bash" == argv[0] else argv[0]
    if not shutil.which(needed):
        pytest.skip(f"{needed} is not installed")

    done = under(load_filter(strict=strict), argv, tmp_path)

    assert "fine" in done.stdout, done.stdout + done.stderr
    assert 0 == done.returncode, done.stderr


@pytest.mark.skipif(not shutil.which("strace"), reason="strace is not installed")
def test_debug_lets_a_tracer_trace(tmp_path: Path) -> None:
    argv = ["strace", "-f", "-e", "trace=execve", "-e", "inject=getppid:retval=7", "true"]

    assert "execve" in under(load_filter(debug=True), argv, tmp_path).stderr
    assert 0 != under(load_filter(), argv, tmp_path).returncode


def under(program: bytes, argv: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    source = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    return subprocess.run(
        [sys.executable, run_under.__file__, program.hex(), *argv],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": source, "HOME": str(directory)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
