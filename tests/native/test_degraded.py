"""On a host that lacks something: a refusal, or a degradation that is told. Never silence.

The host is made poorer for one calling process: by a filter under which a call is not there, by a
user namespace that allows no other, by a mount namespace with parts of /proc covered, by a cgroup
that does not exist. The control is `test_nothing_is_lacking`: the same questions on the host as it is.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from ringfence import Sandbox
from tests.features import require
from tests.native import refusing
from tests.native.callers import SOURCE, Caller
from tests.native.conftest import MakeSandbox, has_cgroups

pytestmark = pytest.mark.full

_ASK = """
from ringfence.backends.registry import backend_named
from ringfence.errors import RingfenceError

def protections(found):
    return {each.name: [each.status, each.why, each.fix] for each in found}

def attempt(**options):
    try:
        with Sandbox.create(**options) as sandbox:
            run = sandbox.exec(["sh", "-c", "echo hello"])
            return {"output": run.stdout_text, "degraded": sandbox.stats().degraded,
                    "protections": protections(sandbox.protections())}
    except RingfenceError as exc:
        return {"error": type(exc).__name__, **exc.to_json()}

report = backend_named("native").report()
say({"available": report.available, "reason": report.reason,
     "protections": protections(report.protections),
     "capabilities": {each.name: [each.available, each.reason] for each in report.capabilities},
     "plain": attempt(),
     "limited": attempt(limits={"cpus": 0.5, "memory_bytes": 64 << 20}),
     "allowed": attempt(allow_degraded=json.loads(sys.argv[1]),
                        limits={"cpus": 0.5, "memory_bytes": 64 << 20})})
"""
Answers = dict[str, Any]


def ask(*allow: str, under: tuple[str, ...] = (), **env: str) -> Answers:
    with Caller(_ASK, json.dumps(allow), under=under, env=env) as caller:
        answers: Answers = caller.hear(60)
        return answers


def without(*calls: int, number: int = errno.ENOSYS) -> tuple[str, ...]:
    """A command that runs the rest of its line where these calls are not there."""
    numbers = ",".join(map(str, calls))
    return (sys.executable, str(Path(refusing.__file__)), str(number), numbers)


def statuses(answers: Answers) -> dict[str, str]:
    return {name: each[0] for name, each in answers["protections"].items()}


def refuses_clearly(answers: Answers) -> bool:
    """Nothing runs, every attempt says why, and the report names each thing with a reason."""
    assert not answers["available"]
    assert answers["reason"]
    assert answers["protections"]
    assert all(each[1] for each in answers["protections"].values())
    assert not any(available for available, _reason in answers["capabilities"].values())
    for name in ("plain", "allowed"):
        assert "IsolationError" == answers[name]["error"], answers[name]
        assert answers[name]["hint"]
    # Without a cgroup the processor limit is refused before anything is tried.
    assert answers["limited"]["error"] in ("IsolationError", "Unsupported")
    return True


def test_nothing_is_lacking() -> None:
    require("landlock")
    answers = ask("*")

    assert answers["available"]
    assert "hello\n" == answers["plain"]["output"]
    assert "enforced" == answers["plain"]["protections"]["landlock"][0]
    expected = "enforced" if has_cgroups() else "degraded"
    assert expected == answers["plain"]["protections"]["memory_limit"][0]
    assert has_cgroups() is ("output" in answers["limited"])


# -- user namespaces ------------------------------------------------------------------------------


def test_a_kernel_without_clone3() -> None:
    answers = ask("*", under=without(refusing.CLONE3))

    assert refuses_clearly(answers)
    assert "kernel" in answers["reason"]


def test_a_filter_that_allows_no_process_at_all() -> None:
    """The C library starts processes with the same call that makes namespaces."""
    answers = ask("*", under=without(refusing.CLONE3, number=errno.EPERM))

    assert refuses_clearly(answers)
    assert "filter" in answers["plain"]["hint"]


@pytest.mark.root
def test_a_chroot() -> None:
    """Where the kernel answers EPERM to a new user namespace."""
    require("unshare")
    script = """
        set -e
        mount -t tmpfs none /mnt
        for each in /*; do
            [ -L $each ] && cp -P $each /mnt$each && continue
            [ $each = /mnt ] || [ ! -d $each ] || { mkdir /mnt$each; mount --rbind $each /mnt$each; }
        done
        exec chroot /mnt "$@"
    """

    answers = ask("*", under=("unshare", "--mount", "sh", "-c", script, "sh"))

    assert refuses_clearly(answers)
    assert "user namespaces" in answers["plain"]["hint"]


def test_no_more_user_namespaces() -> None:
    """user.max_user_namespaces is 0, in a namespace of our own."""
    require("unshare")
    script = 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"'
    under = ("unshare", "--user", "--map-root-user", "sh", "-c", script, "sh")

    answers = ask("*", under=under)

    assert refuses_clearly(answers)
    status, why, fix = answers["protections"]["user_namespaces"]
    assert ("missing", "user.max_user_namespaces is 0") == (status, why)
    assert "sysctl -w user.max_user_namespaces" in fix


def test_inside_a_sandbox(make: MakeSandbox) -> None:
    """The library itself, as untrusted code: it is told where it is, and makes nothing."""
    sandbox = make(mounts=[f"{SOURCE}:/src:ro"])
    code = f"import sys; sys.argv += ['[\"*\"]']\n{_PRINTING}{_ASK}"

    run = sandbox.exec(["python3", "-c", code], env={"PYTHONPATH": "/src"}, timeout_s=60)

    assert run.ok, run.stderr_text
    answers = json.loads(run.stdout_text)
    assert refuses_clearly(answers)
    assert "runs in a Ringfence sandbox" in answers["reason"]


_PRINTING = """
import json
from ringfence import Sandbox
def say(value): print(json.dumps(value))
"""


# -- mounts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [refusing.OPEN_TREE, refusing.MOUNT_SETATTR])
def test_a_kernel_without_the_new_mount_calls(call: int) -> None:
    answers = ask("*", under=without(call))

    assert refuses_clearly(answers)
    assert "not implemented" in answers["plain"]["message"].lower()


def test_a_masked_proc() -> None:
    """As containers have it: the kernel mounts no new one then. By name the caller's is taken."""
    require("unshare")
    script = 'mount --bind /dev/null /proc/version; exec "$@"'
    own = ("--mount",) if 0 == os.geteuid() else ("--mount", "--user", "--map-root-user")

    answers = ask("*", under=("unshare", *own, "sh", "-c", script, "sh"))

    assert answers["available"]
    assert "the caller's /proc" in answers["reason"]
    for name in ("plain", "allowed"):
        assert "IsolationError" == answers[name]["error"]
        assert "/proc/version" in answers[name]["hint"]
    assert "degraded" == statuses(answers)["namespaces"] == statuses(answers)["kernel_interfaces"]


# -- Landlock -------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_kernel_without_landlock(number: int) -> None:
    """Refused, unless it is allowed by name; then it is told everywhere."""
    answers = ask(
        "landlock",
        "cpu_limit",
        under=without(refusing.LANDLOCK_CREATE_RULESET, number=number),
    )

    assert answers["available"]
    assert "degraded" == statuses(answers)["landlock"]
    refusal = answers["plain"]
    assert ("Unsupported", "profile") == (refusal["error"], refusal["field"])
    assert "landlock" in refusal["message"]
    assert "allow_degraded" in refusal["hint"]
    allowed = answers["allowed"]
    assert "hello\n" == allowed["output"]
    assert "landlock" in allowed["degraded"]
    status, why, fix = allowed["protections"]["landlock"]
    assert ("degraded", True, True) == (status, bool(why), bool(fix))


# -- cgroups --------------------------------------------------------------------------------------


def test_no_cgroup_is_delegated() -> None:
    """Memory is sampled and told so; a limit that nothing can hold is refused unless allowed."""
    answers = ask("cpu_limit", RINGFENCE_CGROUP="/no/such/cgroup")

    assert answers["available"]
    assert "degraded" == statuses(answers)["memory_limit"]
    assert "missing" == statuses(answers)["cpu_limit"]
    assert [False, True] == [
        answers["capabilities"]["cpu_limit"][0],
        bool(answers["capabilities"]["cpu_limit"][1]),
    ]
    plain = answers["plain"]
    assert {"memory_limit", "suspend"} == set(plain["degraded"])
    _status, why, fix = plain["protections"]["memory_limit"]
    assert "sampled" in why
    assert "Delegate" in fix
    refusal = answers["limited"]
    assert ("Unsupported", "limits.cpus") == (refusal["error"], refusal["field"])
    assert "allow_degraded" in refusal["hint"]
    allowed = answers["allowed"]
    assert "hello\n" == allowed["output"]
    assert "cpu_limit" in allowed["degraded"]
    assert "missing" == allowed["protections"]["cpu_limit"][0]


_HELD_WITHOUT = """
with Sandbox.create(limits={"pids": 20, "memory_bytes": 64 << 20}) as sandbox:
    code = "import os, signal\\nn = 0\\ntry:\\n  while True:\\n    if not os.fork(): signal.pause()\\n"
    code += "    n += 1\\nexcept OSError as e: print(n, e.errno, flush=True); os.killpg(0, 9)"
    count = sandbox.exec(["python3", "-c", code], timeout_s=20).stdout_text
    code = "import mmap\\nm = mmap.mmap(-1, 1 << 29)\\nfor n in range(0, 1 << 29, 4096): m[n] = 1"
    bomb = sandbox.exec(["python3", "-c", code], timeout_s=20)
    sleeper = sandbox.start(["sh", "-c", "while :; do echo tick; sleep 0.01; done"])
    sleeper.stdout.read(20)
    sandbox.suspend()
    stopped = False
    try:
        for _ in range(20):
            sleeper.stdout.read(0.2)
    except TimeoutError:
        stopped = True
    sandbox.resume()
    goes_on = b"tick" in sleeper.stdout.read(20)
    say([count, bomb.killed_by, stopped, goes_on])
"""


def test_what_still_holds_without_cgroups() -> None:
    """Processes by their resource limit, memory by sampling, suspension by stopping everybody."""
    with Caller(_HELD_WITHOUT, env={"RINGFENCE_CGROUP": "/no/such/cgroup"}) as caller:
        count, killed_by, stopped, goes_on = caller.hear(60)

    assert f"19 {errno.EAGAIN}\n" == count
    assert "oom" == killed_by
    assert (True, True) == (stopped, goes_on)


_ENDS_SUSPENDED = """
from tests.native.outside import descendants_of, init_pid, until

def state(pid):
    return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]

with Sandbox.create() as sandbox:
    counts = "while :; do n=$((n+1)); echo $n > /tmp/n; done"
    assert sandbox.exec(["sh", "-c", f"setsid sh -c '{counts}' >/dev/null 2>&1 &"]).ok
    (left,) = descendants_of(init_pid(sandbox))
    late = sandbox.start(["sleep", "1000"], timeout_s=0.5)
    sandbox.suspend()
    said = [until(lambda: state(left) == "T")]
    until(lambda: descendants_of(init_pid(sandbox)) == [left])
    said += [state(left) == "T", late.wait().timed_out]
    sandbox.resume()
    said.append(until(lambda: state(left) == "R"))
    os.kill(left, signal.SIGSTOP)
    until(lambda: state(left) == "T")
    say([*said, state(left) == "T"])
"""


@pytest.mark.full
def test_a_program_that_ends_while_all_are_suspended_lets_no_other_go_on() -> None:
    with Caller(_ENDS_SUSPENDED, env={"RINGFENCE_CGROUP": "/no/such/cgroup"}) as caller:
        assert [True] * 5 == caller.hear(60)


def test_a_live_sandbox_tells_what_it_lacks(sandbox: Sandbox) -> None:
    """What `stats` calls degraded is degraded or missing among the protections, and otherwise not."""
    weak = {each.name for each in sandbox.protections() if each.status != "enforced"}

    assert set(sandbox.stats().degraded) - {"suspend"} == weak
