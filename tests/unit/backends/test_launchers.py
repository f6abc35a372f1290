"""Launchers as templates, and the profile text for macOS: pure, so that no such machine is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence.backends.command import far, launchers
from ringfence.backends.command.backend import CommandBackend
from ringfence.backends.command.codex import codex as codex_launcher
from ringfence.backends.command.launchers import Launcher
from ringfence.backends.command.seatbelt import profile
from ringfence.backends.local.mounts import template
from ringfence.errors import BackendUnavailable
from ringfence.model.spec import SandboxSpec

WORDS = {"root": "/place/root", "etc": "/place/etc", "agent": "/place/agent", "uid": "1000"}


def test_a_template_is_filled_in() -> None:
    launcher = Launcher(
        name="mine",
        argv=("jail", "--root={root}", "{shown}", "--"),
        show=("--see", "{source}:{target}"),
        env={"JAIL_HOME": "{etc}"},
    )

    assert ["jail", "--root=/place/root", "--see", "/usr:/usr", "--see", "/a:/b", "--"] == (
        launcher.command(WORDS, [("/usr", "/usr"), ("/a", "/b")])
    )
    assert "/place/etc" == launcher.environment(WORDS)["JAIL_HOME"]


def test_bubblewrap_gives_nothing_of_the_hosts_network_and_no_privilege() -> None:
    command = launchers.bubblewrap().command(WORDS, [("/usr", "/usr")])

    for word in ("--unshare-net", "--unshare-pid", "--unshare-user", "--disable-userns"):
        assert word in command
    assert ["--ro-bind", "/usr", "/usr"] == command[command.index("/usr") - 1 :][:3]
    assert "--" == command[-1]


@pytest.mark.parametrize(
    "launcher", [launchers.bubblewrap(), codex_launcher("/opt/codex/bin/codex")]
)
@pytest.mark.parametrize("isolated", [False, True])
def test_all_but_the_users_own_files_is_read_only_and_no_right_or_variable_goes_in(
    launcher: Launcher, isolated: bool
) -> None:
    shown = [("/usr", "/usr"), ("/opt/x", "/opt/x")]
    command = launcher.command(WORDS, shown, isolated=isolated)

    own = command[: command.index("--")]
    for word in ("user", "ipc", "pid", "net", "uts", "cgroup-try"):
        assert f"--unshare-{word}" in own
    assert {"--as-pid-1", "--clearenv"} <= {*own}
    binds = [own[at : at + 3] for at, word in enumerate(own) if word == "--bind"]
    assert [["--bind", "/place/root", "/"]] == binds
    read_only = [own[at + 1 : at + 3] for at, word in enumerate(own) if word == "--ro-bind"]
    wanted = [["/place/etc", "/etc"], *map(list, shown), ["/place/agent", "/.ringfence"]]
    assert wanted == [each for each in read_only if each[0] != "/dev/null"]
    assert ["ALL"] == [own[at + 1] for at, word in enumerate(own) if word == "--cap-drop"]
    assert "--cap-add" not in own
    assert ["1000", "1000"] == [own[own.index(each) + 1] for each in ("--uid", "--gid")]


def test_directories_of_proc_are_hidden_by_empty_ones_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "f").touch()
    hidden = [str(tmp_path / name) for name in "df"]
    monkeypatch.setattr(template, "masked", lambda: hidden)
    directory, file = hidden
    command = launchers.bubblewrap().command(WORDS, [])

    masks = command[command.index("--chdir") + 2 :]
    assert ["--ro-bind", "/dev/null", file] == masks[:3]
    assert ["--tmpfs", directory, "--remount-ro", directory] == masks[3:7]
    assert ["--remount-ro", "/proc", "--disable-userns", "--"] == masks[7:]
    assert not {*hidden} & {*launchers.bubblewrap().command(WORDS, [], isolated=True)}


def test_codex_is_given_a_home_of_its_own() -> None:
    command = codex_launcher("/opt/codex/bin/codex").command(WORDS, [])

    inner = command[command.index("--") + 1 :]
    assert ["/opt/codex/bin/codex", "sandbox"] == inner[:2]
    assert "/run/codex" == command[command.index("CODEX_HOME") + 1]


@pytest.mark.parametrize(
    ("launcher", "why"),
    [
        (launchers.sandbox_exec(profile([], [])), "no PID namespaces"),
        (Launcher("mine", ("no-such-jail",), programs=("no-such-jail",)), "not installed"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(launcher: Launcher, why: str) -> None:
    backend = CommandBackend(launcher)

    with pytest.raises(BackendUnavailable, match=why):
        backend.provision(SandboxSpec())
    report = backend.report()
    assert not report.available
    assert why in report.reason


def test_the_argv_of_those_declared() -> None:
    there = far.ssh("box", "host", user="me", port=22, identity="/k").command(["a b", "c"])
    assert ["-p", "22", "--", "me@host", "'a b' c"] == there[-5:]
    assert ["docker", "exec", "-i", "box", "a b"] == (
        far.FarLauncher("box", ("docker", "exec", "-i", "box")).command(["a b"])
    )
    text = profile(["/data"], ["/work"])
    assert ["sandbox-exec", "-p", text] == launchers.sandbox_exec(text).command({}, [])


def test_a_profile_denies_by_default_and_denials_come_last() -> None:
    lines = profile(["/data"], ["/work"], denied=["/work/.env"]).splitlines()

    assert ["(version 1)", "(deny default)"] == lines[:2]
    assert '(allow file-read* (subpath "/data"))' in lines
    assert '(allow file-read* file-write* (subpath "/work"))' in lines
    assert "(deny network*)" in lines
    assert '(deny file-read* file-write* (subpath "/work/.env"))' == lines[-1]


def test_the_network_only_where_it_is_asked_for() -> None:
    assert "(allow network*)" in profile([], [], network=True)
    assert "(allow network*)" not in profile([], [])


def test_no_path_ends_a_string_of_the_profile() -> None:
    text = profile(['/a") (allow default) ("'], [])

    assert '(subpath "/a\\") (allow default) (\\"")' in text
    assert '(subpath "/a\\\\")' in profile(["/a\\"], []), "nor does a backslash at its end"
    assert '(subpath "/a\\\\\\"b")' in profile(['/a\\"b'], [])
    for bad in ("relative", "/a\0b", "/a\n(allow default)"):
        with pytest.raises(ValueError, match="cannot be written in a Seatbelt profile"):
            profile([], [bad])
