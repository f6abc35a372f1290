"""Programs that people run work inside: in the sandbox's own files, and in a writable mount.

A writable mount is the harder place: the filter then refuses unix sockets by path and the bits of
set-user-id, and the files belong to somebody else on the host.
"""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from textwrap import dedent

import pytest

from ringfence import Sandbox
from ringfence.model.execs.exec import ExecResult
from tests.features import require
from tests.native.callers import Caller
from tests.native.conftest import MakeSandbox

pytestmark = pytest.mark.anyone

BIG_BYTES = 200 << 20


@pytest.fixture(params=["own files", "writable mount"])
def place(request: pytest.FixtureRequest, make: MakeSandbox, private_dir: Path) -> Sandbox:
    """A sandbox whose working directory is of this kind."""
    if "own files" == request.param:
        return make()
    return make(mounts=[f"{private_dir}:/work:rw"], workdir="/work")


def python(sandbox: Sandbox, code: str, *args: str) -> ExecResult:
    """Run a script from a file, as multiprocessing's spawn wants it."""
    sandbox.files.write("script.py", dedent(code))
    return succeeds(sandbox.exec(["python3", "script.py", *args], timeout_s=60))


def succeeds(result: ExecResult) -> ExecResult:
    assert result.ok, f"{result!r}\n{result.stderr_text}"
    return result


def sh(sandbox: Sandbox, script: str) -> str:
    return succeeds(sandbox.shell(f"set -e\n{dedent(script)}", timeout_s=60)).stdout_text


class TestPython:
    def test_threads(self, place: Sandbox) -> None:
        code = """
            import hashlib, queue, threading
            found = queue.Queue()
            def work(n):
                found.put((n, hashlib.sha256(bytes([n]) * 3_000_000).hexdigest()))
            threads = [threading.Thread(target=work, args=(n,)) for n in range(32)]
            [t.start() for t in threads]; [t.join() for t in threads]
            print(found.qsize(), threading.active_count())
        """
        assert "32 1\n" == python(place, code).text

    def test_asyncio_with_processes_and_sockets(self, place: Sandbox) -> None:
        code = """
            import asyncio
            async def serve(reader, writer):
                writer.write((await reader.readline()).upper()); writer.close()
                await writer.wait_closed()
            async def ask(port, n):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"hello %d\\n" % n)
                answer = await reader.read(); writer.close()
                return answer.decode().strip()
            async def main():
                server = await asyncio.start_server(serve, "127.0.0.1", 0)
                port = server.sockets[0].getsockname()[1]
                answers = await asyncio.gather(*(ask(port, n) for n in range(20)))
                pipe = asyncio.subprocess.PIPE
                child = await asyncio.create_subprocess_exec(
                    "tr", "a-z", "A-Z", stdin=pipe, stdout=pipe)
                out, _ = await child.communicate(b"piped")
                print(len(set(answers)), answers[7], out.decode())
            asyncio.run(main())
        """
        assert "20 HELLO 7 PIPED\n" == python(place, code).text

    @pytest.mark.parametrize("method", ["fork", "spawn"])
    def test_multiprocessing(self, place: Sandbox, method: str) -> None:
        code = """
            import multiprocessing, sys
            from multiprocessing import shared_memory
            def square(n): return n * n
            def fill(name, lock, counter):
                block = shared_memory.SharedMemory(name)
                with lock:
                    block.buf[counter.value] = 7
                    counter.value += 1
                block.close()
            if __name__ == "__main__":
                context = multiprocessing.get_context(sys.argv[1])
                with context.Pool(3) as pool:
                    squares = pool.map(square, range(100))
                block = shared_memory.SharedMemory(create=True, size=16)
                lock, counter = context.Lock(), context.Value("i", 0)
                workers = [context.Process(target=fill, args=(block.name, lock, counter))
                           for _ in range(3)]
                [w.start() for w in workers]; [w.join() for w in workers]
                print(sum(squares), counter.value, bytes(block.buf[:4]).hex())
                block.close(); block.unlink()
        """
        assert "328350 3 07070700\n" == python(place, code, method).text

    def test_sqlite_with_a_write_ahead_log(self, place: Sandbox) -> None:
        """WAL shares memory through a mapped file, and locks it: two processes at once."""
        code = """
            import sqlite3, subprocess, sys
            db = sqlite3.connect("data.db", timeout=30)
            if len(sys.argv) > 1:
                for n in range(200):
                    with db: db.execute("insert into t values (?, ?)", (sys.argv[1], n))
                sys.exit()
            mode, = db.execute("pragma journal_mode=wal").fetchone()
            db.execute("create table t (who text, n int)"); db.commit()
            writers = [subprocess.Popen([sys.executable, __file__, who]) for who in "ab"]
            assert [w.wait() for w in writers] == [0, 0]
            sums = "select count(*), sum(n), count(distinct who) from t"
            print(mode, *db.execute(sums).fetchone())
        """
        assert "wal 400 39800 2\n" == python(place, code).text


def make_wheel(directory: Path) -> Path:
    """The smallest package with a module, a command and metadata."""
    files = {
        "greeting/__init__.py": "def main():\n    print('hello from a wheel')\n",
        "greeting-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n",
        "greeting-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: a test\n"
        "Root-Is-Purelib: true\nTag: py3-none-any\n",
        "greeting-1.0.dist-info/entry_points.txt": "[console_scripts]\ngreet = greeting:main\n",
    }
    record = "".join(f"{name},{_digest(text)},{len(text)}\n" for name, text in files.items())
    files["greeting-1.0.dist-info/RECORD"] = record + "greeting-1.0.dist-info/RECORD,,\n"
    path = directory / "greeting-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return path


def _digest(text: str) -> str:
    raw = hashlib.sha256(text.encode()).digest()
    return "sha256=" + base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


@pytest.mark.full
def test_venv_and_pip_install(place: Sandbox, tmp_path: Path) -> None:
    if not place.exec(["python3", "-c", "import ensurepip, venv"]).ok:
        pytest.skip("this machine's Python has no venv module")
    wheel = make_wheel(tmp_path)
    place.files.upload(str(wheel), wheel.name)

    sh(place, "python3 -m venv env")
    sh(place, f"env/bin/pip install --no-index --disable-pip-version-check ./{wheel.name}")

    assert "hello from a wheel\n" == sh(place, "env/bin/greet")
    assert "greeting" in sh(place, "env/bin/pip list --disable-pip-version-check")


@pytest.fixture
def venv_outside_usr(tmp_path: Path) -> str:
    """The interpreter of an environment where no template shows it."""
    environment = tmp_path / "environment"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(environment)],
        check=True,
        capture_output=True,
    )
    (package,) = environment.glob("lib/python3*/site-packages")
    (package / "only_here.py").write_text("word = 'found'\n")
    return str(environment / "bin" / "python")


_SHOW_PYTHON = """
with Sandbox.create(python_env=json.loads(sys.argv[1])) as sandbox:
    run = sandbox.exec(["python", "-c", "import sys, only_here; print(sys.prefix, only_here.word)"])
    write = sandbox.shell(f"echo bad >> {sys.prefix}/pyvenv.cfg")
    say([run.exit_code, run.stdout_text.split(), write.exit_code, sys.prefix])
"""


def test_python_env_shows_the_callers_interpreter(venv_outside_usr: str) -> None:
    """With its packages, at the same path, read-only; and only when asked for."""
    with Caller(_SHOW_PYTHON, "true", python=venv_outside_usr) as caller:
        code, said, write_code, prefix = caller.hear()
    assert (0, [prefix, "found"]) == (code, said)
    assert 0 != write_code

    with Caller(_SHOW_PYTHON, "false", python=venv_outside_usr) as caller:
        code, *_ = caller.hear()
    assert 0 != code


def test_git(place: Sandbox) -> None:
    require("git")
    script = """
        git init -q -b main source
        cd source
        git config user.name tester
        git config user.email tester@invalid
        for n in 1 2 3; do echo $n > file$n; git add .; git commit -q -m "change $n"; done
        git branch other && git merge -q other && git gc -q
        cd ..
        git clone -q source copy
        git -C copy log --format=%s
        git -C copy status --porcelain
    """
    assert "change 3\nchange 2\nchange 1\n" == sh(place, script)


def test_gcc_compiles_threads_and_runs(place: Sandbox) -> None:
    require("gcc")
    source = """
        #include <pthread.h>
        #include <stdatomic.h>
        #include <stdio.h>
        static atomic_int sum;
        static void *add(void *n) { for (int i = 0; i < 10000; i++) sum += (int)(long)n; return 0; }
        int main(void) {
            pthread_t threads[8];
            for (long n = 0; n < 8; n++) pthread_create(&threads[n], 0, add, (void *)n);
            for (int n = 0; n < 8; n++) pthread_join(threads[n], 0);
            printf("%d\\n", sum);
        }
    """
    place.files.write("sum.c", dedent(source))

    assert "280000\n" == sh(place, "gcc -O2 -pthread -o sum sum.c && ./sum")


def test_node(place: Sandbox) -> None:
    require("node")
    code = """
        const {Worker, isMainThread, parentPort} = require('worker_threads');
        const {execFileSync} = require('child_process');
        if (isMainThread) {
          new Worker(__filename).on('message', m =>
            console.log(m, execFileSync('echo', ['from a child']).toString().trim()));
        } else parentPort.postMessage('from a worker');
    """
    place.files.write("script.js", dedent(code))

    assert "from a worker from a child\n" == sh(place, "node script.js")


def test_bash_pipelines(place: Sandbox) -> None:
    require("bash")
    script = r"""
        set -euo pipefail
        mkfifo queue
        (seq 1 1000 > queue) &
        total=$(sort -rn < queue | head -n 500 | awk '{ sum += $1 } END { print sum }' || true)
        wait
        diff <(printf 'a\nb\n') <(printf 'a\nc\n') > difference || true
        words=(one two three)
        trap 'echo leaving' EXIT
        printf '%s %s %s\n' "$total" "$(grep -c '^[<>]' difference)" "${words[-1]}"
        tar -cf - difference | gzip | gzip -d | tar -tf - | xargs -n1 -P4 echo
    """
    result = succeeds(place.exec(["bash", "-c", dedent(script)], timeout_s=60))

    assert "375250 2 three\ndifference\nleaving\n" == result.text


def test_perl(place: Sandbox) -> None:
    require("perl")
    script = "pipe(R, W); if (!fork) { print W 6 * 7; exit } close W; print <R>; wait; print $?"

    assert "420" == succeeds(place.exec(["perl", "-e", script])).text


def test_a_large_file_written_and_read_back(place: Sandbox) -> None:
    """Written by a program inside, read back inside and from the host."""
    script = f"""
        import hashlib, sys
        block = bytes(range(256)) * 4096
        digest = hashlib.sha256()
        with open("large", "wb") as file:
            for n in range({BIG_BYTES >> 20}):
                piece = n.to_bytes(8, "big") + block[8:]
                file.write(piece); digest.update(piece)
        with open("large", "rb") as file:
            assert hashlib.file_digest(file, "sha256").digest() == digest.digest()
        print(digest.hexdigest())
    """
    written = python(place, script).text.strip()
    found = hashlib.sha256()
    with place.files.open_read("large") as file:
        size = 0
        while piece := file.read(1 << 20):
            size += len(piece)
            found.update(piece)

    assert (BIG_BYTES, written) == (size, found.hexdigest())


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "localhost"])
def test_a_local_server_and_its_client(place: Sandbox, address: str) -> None:
    """Two execs of one sandbox meet on its loopback interface; the host's is another one."""
    server_code = """
        import socket, sys
        server = socket.create_server((sys.argv[1], 0), family=int(sys.argv[2]))
        print(server.getsockname()[1], flush=True)
        peer, _ = server.accept()
        data = b""
        while piece := peer.recv(65536): data += piece
        peer.sendall(str(len(data)).encode())
    """
    client_code = """
        import socket, sys
        with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as peer:
            peer.sendall(bytes(5_000_000)); peer.shutdown(socket.SHUT_WR)
            print(peer.recv(100).decode())
    """
    family = "10" if ":" in address else "2"
    place.files.write("server.py", dedent(server_code))
    server = place.start(["python3", "server.py", address, family])
    port = server.stdout.read(20).decode().strip()

    assert "5000000\n" == python(place, client_code, address, port).text
    assert server.wait(20).ok
