"""What sandboxes do and refuse where /proc is masked: run by `masked.py`, prints a JSON object."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from typing import Any

from ringfence import Sandbox
from ringfence.errors import IsolationError, Unsupported

PYTHON = "/usr/bin/python3"
ALLOWED: dict[str, Any] = {"allow_degraded": ["namespaces"]}

# What can be had of a process of the caller's, of the first one there, and of the sandbox's PID 1.
ATTEMPTS = """
import errno, json, os, sys
pid, found = sys.argv[1], {}
def tell(name, do):
    try: found[name] = repr(do())
    except OSError as exc: found[name] = errno.errorcode[exc.errno]
def read(path):
    return os.listdir(path) if os.path.isdir(path) else open(path, "rb", 0).read(16)
READ = "environ mem maps smaps smaps_rollup numa_maps auxv pagemap io stack syscall map_files fdinfo"
LINKS = "root cwd exe fd/0 ns/mnt ns/user ns/pid"
BELOW = "root/etc/passwd root/proc/self/environ cwd/. root/proc/sys/kernel/core_pattern"
WRITTEN = "oom_score_adj comm coredump_filter clear_refs uid_map setgroups attr/exec mem timerslack_ns"
status = open("/proc/self/status").read()
init = status.partition("PPid:")[2].split()[0]  # the sandbox's own PID 1, by its number there
for process in (pid, "1", init):
    place = f"/proc/{process}/"
    for name in READ.split(): tell(f"{process} {name}", lambda: read(place + name))
    for name in LINKS.split():
        tell(f"{process} {name}", lambda: os.readlink(place + name))
        tell(f"{process} {name} opened", lambda: os.open(place + name, os.O_PATH))
    for name in BELOW.split(): tell(f"{process} {name}", lambda: os.open(place + name, os.O_RDONLY))
    for name in WRITTEN.split(): tell(f"{process} {name} written", lambda: os.open(place + name, os.O_WRONLY))
SETTINGS = "kernel/core_pattern kernel/hostname vm/drop_caches user/max_user_namespaces net/ipv4/ip_forward"
for name in SETTINGS.split(): tell(name, lambda: os.open(f"/proc/sys/{name}", os.O_WRONLY))
for name in "sysrq-trigger irq/default_smp_affinity self/oom_score_adj self/mem".split():
    tell(f"{name} written", lambda: os.open(f"/proc/{name}", os.O_WRONLY))
tell("signal", lambda: os.kill(int(pid), 0))
tell("masked", lambda: open("/proc/keys").read())
print(json.dumps(found))
"""

# A program finds itself by "self", and the caller's processes by their numbers.
OWN = """
import os, subprocess
number = os.readlink("/proc/self")
assert number != str(os.getpid())
assert os.stat("/proc/self/exe").st_ino and open("/proc/self/maps").read()
assert os.listdir("/proc/self/fd")
assert b"OWN=1" in open("/proc/self/environ", "rb").read()
assert "x" == subprocess.run(["cat", "/dev/stdin"], input="x", capture_output=True, text=True).stdout
every = subprocess.run("cat /proc/[0-9]*/cmdline", shell=True, capture_output=True, text=True).stdout
assert "7391" in every
"""

LARGE = """
import mmap, time
held = mmap.mmap(-1, 400 << 20)
held.write(bytes(400 << 20))
time.sleep(60)
"""


NODE = "kept = 1; require('child_process').execSync('sleep 7395')"


def refusals(found: dict[str, Any]) -> Sandbox:
    """What is said where the lack was not allowed, and where it was; a sandbox with it."""
    try:
        Sandbox.create(backend="native", allow_degraded=["*"])
    except IsolationError as exc:
        found["refused"] = exc.hint
    words = ["run", "--anywhere", "--", "readlink", "/proc/self"]
    command = [sys.executable, "-m", "ringfence", *words]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    found["anywhere"] = ran.stdout.strip().isdigit(), ran.stderr
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        sandbox = Sandbox.create(**ALLOWED)
    found["warned"] = [str(each.message) for each in told]
    return sandbox


def programs(sandbox: Sandbox, caller: int, found: dict[str, Any]) -> None:
    ran = sandbox.exec([PYTHON, "-c", ATTEMPTS, str(caller)])
    found["attempts"] = json.loads(ran.text) if ran.ok else ran.stderr_text
    ran = sandbox.exec([PYTHON, "-c", OWN], env={"OWN": "1"})
    found["own"] = ran.exit_code, ran.stderr_text
    with sandbox.context("bash") as bash:
        found["bash"] = bash.run("cd /; echo $PWD").stdout.strip()
    if shutil.which("node"):
        with sandbox.context("node") as node:
            found["node"] = node.run(NODE, timeout_s=1).timed_out, node.run("kept").text


def endings(sandbox: Sandbox, caller: subprocess.Popen[bytes], found: dict[str, Any]) -> None:
    """Another sandbox's processes, and the caller's, have as many numbers as this one's."""
    with Sandbox.create(**ALLOWED) as beside:
        other = beside.start(["sleep", "7392"])
        ran = sandbox.exec(["sh", "-c", "(setsid sleep 7393; :) & sleep 7394"], timeout_s=1)
        found["timed out"] = ran.timed_out, sandbox.stats().pids
        found["beside"] = other.running, caller.poll(), beside.stats().pids
    spinning = sandbox.start(["sh", "-c", "while :; do :; done"])
    sandbox.suspend()
    state = sandbox.state.value
    sandbox.resume()
    found["suspended"] = state, spinning.running
    spinning.kill()
    spinning.wait()
    sandbox.start(["cat"], stream_stdin=True)
    try:
        sandbox.fork(processes="required")
    except Unsupported as exc:
        found["fork"] = str(exc)


def memory() -> list[bool]:
    """The watchdog ends what is too large, where no cgroup does, and nothing else."""
    with Sandbox.create(**ALLOWED, limits={"memory_bytes": 96 << 20}) as small:
        ran = small.exec([PYTHON, "-c", LARGE])
        return [not ran.ok and ran.duration_s < 50, small.exec(["true"]).ok]


def main() -> None:
    found: dict[str, Any] = {}
    caller = subprocess.Popen(["sleep", "7391"], env={"SECRET": "in-environ"})
    with refusals(found) as sandbox:
        programs(sandbox, caller.pid, found)
        endings(sandbox, caller, found)
        found["degraded"] = list(sandbox.stats().degraded)
        weak = [each for each in sandbox.protections() if each.status != "enforced"]
        found["report"] = {each.name: (each.status, each.why) for each in weak}
    found["memory"] = memory()
    caller.kill()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
