"""The bash tool: commands of agents, in sandboxes that come and go by themselves."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ringfence import Sandbox, SandboxSpec
from ringfence.backends.command.backend import CommandBackend
from ringfence.backends.native.backend import NativeBackend
from ringfence.errors import InvalidRequest, LifecycleError, RegistryError, Unsupported
from ringfence.images.archive import load
from ringfence.model import capabilities as can
from ringfence.model.mount import READ_WRITE
from ringfence.model.net.network import NetworkPolicy
from ringfence.sessions import BashConfig, BashTool, PoolConfig, SandboxBash
from ringfence.sessions.shells.bash import BashOutput
from ringfence.sessions.shells.shell import _Collector
from ringfence.testing.unconfined.sandbox import UnconfinedSandbox
from tests.features import require
from tests.images.conftest import small
from tests.native.conftest import has_cgroups
from tests.native.outside import PATIENCE_S, init_pid, new_length, pids_with, pin, survivors, until
from tests.sessions.conftest import ALLOWED, MakeManager
from tests.unconfined import Unconfined

pytestmark = pytest.mark.anyone

MakeBash = Callable[..., SandboxBash]
MIB = 1 << 20


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    made = tmp_path / "project"
    made.mkdir(mode=0o755)
    return made


@pytest.fixture
def make_bash(native: NativeBackend, workspace: Path) -> Iterator[MakeBash]:
    with ExitStack() as stack:

        def make(**config: Any) -> SandboxBash:
            options: dict[str, Any] = {
                name: config.pop(name) for name in ("manager", "client_id") if name in config
            }
            chosen = BashConfig(image="default", allow_degraded=ALLOWED, **config)
            if "manager" not in options:
                options["backend"] = native
            return stack.enter_context(SandboxBash(str(workspace), chosen, **options))

        yield make


def running(tool: SandboxBash) -> Sandbox:
    assert tool.sandbox is not None
    return tool.sandbox


def test_the_defaults_are_the_contract() -> None:
    config = BashConfig()

    assert ("alpine:latest", 512, 1.0, False, {}) == (
        config.image,
        config.memory_mib,
        config.cpus,
        config.network,
        config.env,
    )


def test_a_sandbox_is_made_of_the_whole_config(tmp_path: Path) -> None:
    config = BashConfig(
        image="default",
        memory_mib=64,
        cpus=0.5,
        network=True,
        env={"A": "1"},
        tier="strong",
        user="1000",
        allow_degraded=("cpu_limit",),
    )
    spec = config.spec(str(tmp_path))

    assert (None, "strong", "1000") == (spec.image, spec.tier, spec.user)
    assert ("/workspace", {"A": "1"}, ("cpu_limit",)) == (
        spec.workdir,
        dict(spec.env),
        spec.allow_degraded,
    )
    assert (64 * MIB, 0.5) == (spec.limits.memory_bytes, spec.limits.cpus)
    assert [("/workspace", str(tmp_path), READ_WRITE)] == [
        (each.target, each.source, each.access) for each in spec.mounts
    ]
    assert spec.network.is_unrestricted
    policy = NetworkPolicy(allowed_hosts=("example.org",))
    assert policy == BashConfig(network=policy).spec(None).network
    own = BashConfig().spec(None)
    assert ("alpine:latest", True, "") == (own.image, own.network.is_none, own.mounts[0].source)


@pytest.mark.parametrize(
    ("field", "refused", "taken"),
    [
        ("image", "", "a"),
        ("memory_mib", 0, 1),
        ("cpus", 0.0, 0.001),
        ("tier", "none", "strong"),
        ("timeout_s", 0.0, 0.001),
        ("network", "yes", True),
        ("persistent", 1, True),
        ("user", "a b", "a"),
        ("env", {"A=": "b"}, {"A": "b"}),
        ("allow_degraded", ("nothing",), ("cpu_limit",)),
    ],
)
def test_a_config_is_checked(field: str, refused: Any, taken: Any) -> None:
    BashConfig(**{field: taken})
    with pytest.raises(InvalidRequest) as caught:
        BashConfig(**{field: refused})
    assert field == caught.value.field.partition("[")[0].partition(".")[0]


def test_an_image_that_cannot_be_had_is_said_with_the_first_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGFENCE_IMAGES", str(tmp_path / "images"))

    with SandboxBash(config=BashConfig(image="127.0.0.1:1/none")) as tool:
        with pytest.raises(RegistryError):
            tool.exec_command("true")
        assert tool.sandbox is None


def test_a_backend_without_images_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFENCE_IMAGES", str(tmp_path / "images"))
    load(small().as_layout(tmp_path / "layout"), "small:1")

    with (
        SandboxBash(config=BashConfig(image="small:1"), backend=Unconfined()) as tool,
        pytest.raises(Unsupported) as refusal,
    ):
        tool.exec_command("true")
    assert ("image", "image") == (refusal.value.operation, refusal.value.field)


def test_a_command_says_what_it_says(make_bash: MakeBash) -> None:
    output = make_bash().exec_command("echo out; echo err >&2; exit 3")

    assert BashOutput("out\n", "err\n", 3) == output


def test_it_is_bash(make_bash: MakeBash) -> None:
    output = make_bash().exec_command('a=(1 2 3); [[ ${#a[@]} == 3 ]] && echo "$BASH_VERSION"')

    assert output.stdout.strip()


def test_not_found_is_127(make_bash: MakeBash) -> None:
    output = make_bash().exec_command("no-such-command-anywhere")

    assert 127 == output.exit_code
    assert "no-such-command-anywhere" in output.stderr


def test_the_workspace_is_the_host_s(make_bash: MakeBash, workspace: Path) -> None:
    (workspace / "given").write_text("from the host\n")
    tool = make_bash()

    output = tool.exec_command("pwd; cat given; echo made > made; mkdir sub")

    assert "/workspace\nfrom the host\n" == output.stdout
    assert "made\n" == (workspace / "made").read_text()
    assert "/workspace/sub\n" == tool.exec_command("pwd", "/workspace/sub").stdout
    assert "/tmp\n" == tool.exec_command("pwd", "/tmp").stdout
    with pytest.raises(InvalidRequest):
        tool.exec_command("pwd", "/no/such/place")


def test_a_relative_workspace_is_of_the_host(
    native: NativeBackend, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workspace / "given").write_text("from the host\n")
    monkeypatch.chdir(workspace.parent)
    config = BashConfig(image="default", allow_degraded=ALLOWED)

    with SandboxBash("project", config, backend=native) as tool:
        assert "from the host\n" == tool.exec_command("cat given").stdout
    with SandboxBash("none-such", config, backend=native) as tool, pytest.raises(InvalidRequest):
        tool.exec_command("true")


def test_nothing_boots_before_the_first_command(make_bash: MakeBash, native: NativeBackend) -> None:
    before = set(native._live)
    tool = make_bash()
    assert before == set(native._live)
    assert tool.sandbox is None

    tool.exec_command("true")

    assert 1 == len(set(native._live) - before)


def test_ten_first_commands_at_once_boot_one(make_bash: MakeBash, native: NativeBackend) -> None:
    before, tool, barrier = set(native._live), make_bash(), threading.Barrier(10)

    def run(number: int) -> str:
        barrier.wait(20)
        return tool.exec_command(f"echo {number}").stdout

    with ThreadPoolExecutor(10) as hands:
        said = list(hands.map(run, range(10)))

    assert [f"{number}\n" for number in range(10)] == said
    assert 1 == len(set(native._live) - before)


def test_commands_run_at_the_same_time(make_bash: MakeBash) -> None:
    """Each waits for a file that only the next one makes."""
    tool = make_bash()
    wait = "for i in $(seq 600); do [ -e {0} ] && break; sleep 0.02; done; touch {1}; [ -e {0} ]"

    with ThreadPoolExecutor(2) as hands:
        first = hands.submit(tool.exec_command, "touch a; " + wait.format("b", "c"))
        second = hands.submit(tool.exec_command, wait.format("a", "b"))
        assert (0, 0) == (first.result(60).exit_code, second.result(60).exit_code)


def test_each_command_has_a_shell_of_its_own(make_bash: MakeBash) -> None:
    tool = make_bash()
    tool.exec_command("cd /tmp; X=1; export Y=2")

    assert "/workspace []\n" == tool.exec_command('echo "$PWD [$X$Y]"').stdout


def test_a_timeout_keeps_what_was_said_and_kills_the_rest(make_bash: MakeBash) -> None:
    tool, length = make_bash(timeout_s=0.5), new_length()

    output = tool.exec_command(f"echo before; setsid sleep {length} & sleep {length}")

    assert ("before\n", True, None) == (output.stdout, output.timed_out, output.exit_code)
    assert [] == pids_with(length)
    assert 0 == tool.exec_command("sleep 0.7", timeout_s=20).exit_code


def test_after_shutdown_it_begins_anew(make_bash: MakeBash) -> None:
    tool = make_bash()
    tool.exec_command("echo x > /tmp/left; setsid sleep 600 >/dev/null 2>&1 &")
    pinned = pin([init_pid(running(tool))])

    tool.shutdown()
    tool.shutdown()

    assert [] == survivors(pinned, PATIENCE_S)
    assert "no\n" == tool.exec_command("[ -e /tmp/left ] || echo no").stdout


def test_a_tool_that_cannot_begin_leaves_no_sandbox() -> None:
    class Asleep(Unconfined):
        """Starts nothing in its sandboxes, which are suspended."""

        lacks: ClassVar = {n: why for n, why in Unconfined.lacks.items() if n != can.MOUNT}

        def provision(self, spec: SandboxSpec) -> UnconfinedSandbox:
            made = super().provision(spec)
            made.suspend()
            began.append(made.session.id)
            return made

    backend, began = Asleep(), list[str]()
    config = BashConfig(image="default", allow_degraded=("*",))
    with SandboxBash(None, config, backend=backend) as tool:
        for number in range(2):
            with pytest.raises(LifecycleError):
                tool.exec_command("true")
            assert (number + 1, {}) == (len(began), backend.sandboxes)
        assert tool.sandbox is None
    backend.close()


def test_shutdown_never_raises(make_bash: MakeBash) -> None:
    tool = make_bash()
    tool.exec_command("true")
    real = running(tool)
    real.terminate = lambda: 1 / 0  # type: ignore[method-assign, assignment]

    tool.shutdown()

    Sandbox.terminate(real)
    assert tool.sandbox is None
    assert 0 == tool.exec_command("true").exit_code


def test_what_was_lost_is_replaced(make_bash: MakeBash) -> None:
    tool = make_bash()
    tool.exec_command("true")
    os.kill(init_pid(running(tool)), signal.SIGKILL)

    assert until(lambda: "terminated" == running(tool).state)
    assert 0 == tool.exec_command("true").exit_code


def test_who_drops_it_ends_it(native: NativeBackend, workspace: Path) -> None:
    tool = SandboxBash(
        str(workspace), BashConfig(image="default", allow_degraded=ALLOWED), backend=native
    )
    tool.exec_command("true")
    pinned = pin([init_pid(running(tool))])

    del tool
    gc.collect()

    assert [] == survivors(pinned, PATIENCE_S)


def test_limits_hold(make_bash: MakeBash) -> None:
    tool = make_bash(memory_mib=64, cpus=0.5)
    tool.exec_command("true")

    limits = running(tool)._inner.granted().limits

    assert 64 * MIB == limits.memory_bytes
    if has_cgroups():
        assert 0.5 == limits.cpus


def test_there_is_no_network_unless_asked_for(make_bash: MakeBash) -> None:
    names = "cut -d: -f1 < /proc/net/dev | tail -n +3 | tr -d ' '"

    assert "lo\n" == make_bash().exec_command(names).stdout
    host = set(os.listdir("/sys/class/net"))
    assert host <= set(make_bash(network=True).exec_command(names).stdout.split())


def test_environment(make_bash: MakeBash) -> None:
    tool = make_bash(env={"TOKEN": "abc"})

    assert "abc\n" == tool.exec_command("echo $TOKEN").stdout


@pytest.mark.parametrize("persistent", [False, True])
def test_without_bash_sh_does(make_bash: MakeBash, workspace: Path, persistent: bool) -> None:
    (workspace / "bin").mkdir()
    for name in ("sh", "rm", "sleep"):
        (workspace / "bin" / name).symlink_to("/usr/bin/" + name)
    tool = make_bash(env={"PATH": "/workspace/bin"}, persistent=persistent)

    output = tool.exec_command('echo "v=$BASH_VERSION"; exit 5')

    assert ("v=\n", 5) == (output.stdout, output.exit_code)
    assert 127 == tool.exec_command("cat /dev/null").exit_code


def test_any_backend_will_do() -> None:
    config = BashConfig(image="default", allow_degraded=("*",))
    require("bwrap")
    backend = CommandBackend()
    with SandboxBash(None, config, backend=backend) as tool:
        assert "hello\n" == tool.exec_command("echo hello").stdout
    backend.close()


def test_from_a_manager_s_pool(make_manager: MakeManager, make_bash: MakeBash) -> None:
    manager = make_manager(pool=PoolConfig(min_warm=1))
    assert until(lambda: 1 == manager.pool.size)
    tool = make_bash(manager=manager, client_id="ann")

    assert "/workspace\n" == tool.exec_command("pwd -P").stdout

    (session,) = manager.list("ann")
    assert 1 == manager.stats().pool_hits
    tool.shutdown()
    assert "terminated" == manager.get(session.session_id).reason
    assert 0 == tool.exec_command("true").exit_code
    assert 1 == manager.stats().active_sessions


def test_anybody_may_write_another_one() -> None:
    class Mine:
        def exec_command(self, command: str, guest_workspace: str = "/workspace") -> BashOutput:
            return BashOutput(command, guest_workspace, 0)

        def shutdown(self) -> None:
            pass

    def use(tool: BashTool) -> str:
        return tool.exec_command("x").stdout

    assert "x" == use(Mine())


# -- a persistent shell ----------------------------------------------------------------------------


@pytest.fixture
def shell(make_bash: MakeBash) -> SandboxBash:
    return make_bash(persistent=True)


def test_a_persistent_shell_remembers(shell: SandboxBash) -> None:
    shell.exec_command("cd /tmp; X=5; export Y=6; f() { echo f$1; }; alias g='echo g'; set -- a b")

    output = shell.exec_command('pwd; echo "$X $Y $# $2"; f 1')

    assert "/tmp\n5 6 2 b\nf1\n" == output.stdout


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("printf no-newline", BashOutput("no-newline", "", 0)),
        ("echo err >&2; false", BashOutput("", "err\n", 1)),
        ("(exit 7)", BashOutput("", "", 7)),
        ("cat", BashOutput("", "", 0)),  # there is no input to read: ours is not the command's
        ("read x; echo [$x]", BashOutput("[]\n", "", 0)),
        ("# nothing but a comment", BashOutput("", "", 0)),
        ("", BashOutput("", "", 0)),
        ("cat <<'END'\nof\n  here\nEND", BashOutput("of\n  here\n", "", 0)),
        ("echo 'quoted \"both\" ways' \\\n  and continued", None),
    ],
)
def test_every_command_ends_where_it_ends(
    shell: SandboxBash, command: str, expected: BashOutput | None
) -> None:
    expected = expected or BashOutput('quoted "both" ways and continued\n', "", 0)

    assert expected == shell.exec_command(command)
    assert BashOutput("next\n", "", 0) == shell.exec_command("echo next")


def test_files_of_commands_are_gone_when_they_have_ended(shell: SandboxBash) -> None:
    shell.exec_command("true")

    assert "/tmp/.command-2\n" == shell.exec_command("ls -d /tmp/.command-*").stdout


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_a_mark_is_found_however_it_arrives(size: int) -> None:
    mark = b"m" * 8
    collector = _Collector()
    for text, status in ((b"out mmm\nm", b"0"), (b"", b"3"), (b"mmmmmmm", b"127")):
        collector.expect(mark)
        said = text + mark + b" " + status + b"\n"
        for start in range(0, len(said), size):
            assert not collector.status
            collector.feed(said[start : start + size])
        collector.feed(b"of what runs in the background")
        assert (text.decode(), status) == (collector.text(), collector.status)
    collector.expect(mark)
    collector.feed(b"no mark mmm")
    assert ("no mark mmm", False) == (collector.text(), collector.wait(lambda: True, 0.0))


@pytest.mark.parametrize("command", ["if then", "echo 'never closed", "cat <<END\nnever ended"])
def test_a_broken_command_breaks_nothing_else(shell: SandboxBash, command: str) -> None:
    shell.exec_command("X=1")
    shell.exec_command(command)

    assert "1\n" == shell.exec_command("echo $X").stdout


def test_what_runs_in_the_background_does_not_hold_it_up(shell: SandboxBash) -> None:
    output = shell.exec_command("sleep 600 & echo started")

    assert ("started\n", 0) == (output.stdout, output.exit_code)
    assert "running\n" == shell.exec_command("kill -0 $! && echo running").stdout


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("X=1; exit 4", BashOutput("", "", 4)),
        ("exec true", BashOutput("", "", 0)),
        ("kill -9 $$", BashOutput("", "", None, signal=9)),
    ],
)
def test_who_ends_the_shell_gets_a_new_one(
    shell: SandboxBash, command: str, expected: BashOutput
) -> None:
    shell.exec_command("cd /tmp; X=1")

    assert expected == shell.exec_command(command)
    assert "/workspace []\n" == shell.exec_command('echo "$PWD [$X]"').stdout


def test_a_persistent_shell_s_timeout(shell: SandboxBash) -> None:
    length = new_length()
    output = shell.exec_command(f"X=1; echo before; sleep {length}", timeout_s=0.5)

    assert ("before\n", True, None, 9) == (
        output.stdout,
        output.timed_out,
        output.exit_code,
        output.signal,
    )
    assert [] == pids_with(length)
    assert "[]\n" == shell.exec_command("echo [$X]").stdout


def test_much_output_is_whole(shell: SandboxBash) -> None:
    output = shell.exec_command("seq 200000; seq 100000 >&2")

    assert "".join(f"{n}\n" for n in range(1, 200_001)) == output.stdout
    assert "".join(f"{n}\n" for n in range(1, 100_001)) == output.stderr


def test_commands_of_many_threads_wait_for_each_other(shell: SandboxBash) -> None:
    shell.exec_command("N=0")
    with ThreadPoolExecutor(8) as hands:
        list(hands.map(shell.exec_command, ["M=$N; sleep 0.01; N=$((M+1))"] * 16))

    assert "16\n" == shell.exec_command("echo $N").stdout


def test_a_cancelled_command_takes_no_other_one_along(shell: SandboxBash, workspace: Path) -> None:
    """Its caller may hear of the end only when the next command runs."""
    _, _, persistent = shell.begin()
    assert persistent is not None
    over, runs = threading.Event(), threading.Event()
    assert 0 == persistent.run("X=1", "/workspace", None, over).exit_code
    for cancelled, expected in ((over, 0), (runs, None)):
        os.mkfifo(workspace / "begun")
        os.mkfifo(workspace / "go")
        with ThreadPoolExecutor(1) as hands:
            waits = "echo >begun; read -r line <go"
            running = hands.submit(persistent.run, waits, "/workspace", None, runs)
            (workspace / "begun").read_bytes()
            persistent.cancel(cancelled)
            if cancelled is over:
                (workspace / "go").write_text("on\n")
            assert expected == running.result(PATIENCE_S).exit_code
        (workspace / "begun").unlink()
        (workspace / "go").unlink()
    assert BashOutput("", "", None) == persistent.run("echo said", "/workspace", None, runs)
