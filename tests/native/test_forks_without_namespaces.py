"""The limit of processes of sandboxes without namespaces, where no cgroup holds it."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

import pytest

from tests.features import require
from tests.native.callers import Caller

pytestmark = pytest.mark.full

MOST = 64
# Root without rights, as `docker run --cap-drop ALL` has it: for it RLIMIT_NPROC does not count.
WITHOUT_RIGHTS = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")
LISTEN = (
    "import os, sys\n"
    "from ringfence.linux import privileges, seccomp\n"
    "from ringfence.launcher.pid1 import notifications\n"
    "privileges.set_no_new_privs()\n"
    "os.set_inheritable(seccomp.install_listener(notifications.program([])), True)\n"
    "os.execv(sys.argv[1], sys.argv[1:])"
)
LISTENED = (sys.executable, "-c", LISTEN)
ASK = """
import time
from ringfence.backends.landlock import filters
from ringfence.errors import Unsupported
from ringfence.guest.without_namespaces.landlocked import count
MOST, is_asked = int(sys.argv[1]), sys.argv[2] == "asked"
if not is_asked:
    filters.fork_calls = lambda: []
UNTIL = '''
import os, signal, sys, threading, time
def child(work):
    if not os.fork(): work(); os._exit(0)
kinds = {
    "processes": lambda: child(signal.pause),
    "zombies": lambda: child(lambda: None),
    "threads": lambda: threading.Thread(target=time.sleep, args=(60,), daemon=True).start(),
}
made, how = 0, "never refused"
try:
    while made < 1000: kinds[sys.argv[1]](); made += 1
except OSError as exc: how = exc.errno
except RuntimeError: how = 11  # Python's word for a thread that is refused
print(made, how, flush=True)
os.killpg(0, signal.SIGKILL)
'''
BOMB = '''
import os, time
while True:
    try: os.fork()
    except OSError: pass
'''
found = {}
try:
    sandbox = Sandbox.create(backend="landlock", limits={"pids": MOST})
except Unsupported as exc:
    found["refused"] = str(exc)
    sandbox = Sandbox.create(backend="landlock")
with sandbox:
    said = {each.name: [each.status, each.why] for each in sandbox.protections()}
    found["said"] = said["pids_limit"]
    if "refused" not in found:
        for kind in sys.argv[3:]:
            ran = sandbox.exec(["/usr/bin/python3", "-c", UNTIL, kind], timeout_s=60)
            found[kind] = ran.stdout_text.split()
            sandbox.exec(["true"])  # what was left behind has ended
        if is_asked:
            bomb, most = sandbox.start(["/usr/bin/python3", "-c", BOMB]), 0
            base, end = sandbox._inner._tag_base, time.monotonic() + 2
            while time.monotonic() < end:
                most = max(most, count(base, zombies=True))
            found["most"] = most
            bomb.kill()
            bomb.wait()
            found["next"] = sandbox.exec(["echo", "alive"]).text
say(found)
"""


def ask(*kinds: str, is_asked: bool = True, under: tuple[str, ...] = ()) -> Any:
    how = "asked" if is_asked else "sampled"
    env = {"RINGFENCE_CGROUP": "/no/such/cgroup"}
    with Caller(ASK, MOST, how, *kinds, under=under, env=env) as caller:
        return caller.hear(120)


def ours() -> tuple[str, ...]:
    """Have an ordinary user, or root whom no RLIMIT_NPROC binds."""
    require("landlock")
    return WITHOUT_RIGHTS if 0 == os.geteuid() else ()


def test_the_fork_beyond_the_limit_is_refused() -> None:
    found = ask("processes", "zombies", "threads", under=ours())

    for kind in ("processes", "zombies", "threads"):
        made, how = map(int, found[kind])
        assert errno.EAGAIN == how
        assert MOST - 4 <= made <= MOST, found
    assert "degraded" == found["said"][0]
    assert f"{MOST}: each fork waits for the agent" in found["said"][1]


def test_a_fork_bomb_does_not_outrun_it() -> None:
    found = ask(under=ours())

    assert MOST - 4 <= found["most"] <= 2 * MOST
    assert "alive\n" == found["next"]


def test_nothing_else_refuses_it() -> None:
    """The control: sampled alone, children that have ended and are not waited for are not seen."""
    found = ask("zombies", is_asked=False, under=ours())

    assert ["1000", "never", "refused"] == found["zombies"]


def test_the_user_of_a_sandbox_of_roots_has_a_limit_of_the_kernels() -> None:
    if 0 != os.geteuid():
        pytest.skip("only root has users of sandboxes")
    require("landlock")
    found = ask("processes", "zombies", "threads")

    assert "enforced" == found["said"][0]
    assert "RLIMIT_NPROC" in found["said"][1]
    for kind in ("processes", "zombies", "threads"):
        made, how = map(int, found[kind])
        assert (errno.EAGAIN, True) == (how, MOST - 4 <= made <= MOST + 4)


def test_where_nobody_can_be_asked_a_limit_is_refused() -> None:
    found = ask(under=(*ours(), *LISTENED))

    assert "no fork waits for the agent" in found["refused"]
    assert "a fork bomb outruns" in found["said"][1]
