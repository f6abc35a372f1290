"""`ringfence doctor --fix` and `--undo`, on a root directory of the test's own."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ringfence import Sandbox
from ringfence.backends.native.backend import NativeBackend
from ringfence.cli.diagnosis import fix
from ringfence.errors import InvalidRequest, IoError
from ringfence.launcher import spawn
from tests.cli.command import ringfence_command

SYSCTLS = {
    "kernel/apparmor_restrict_unprivileged_userns": "1",
    "kernel/unprivileged_userns_clone": "0",
    "user/max_user_namespaces": "0",
}


def _system_python() -> str:
    """A Python that finds its library from anywhere; the tests' own may be one as well."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


@pytest.fixture
def root(tmp_path: Path) -> str:
    """A host with every obstacle, systemd and cgroup v2."""
    for name, value in SYSCTLS.items():
        path = tmp_path / "proc/sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cgroup.controllers").write_text("cpu io memory pids\n")
    return str(tmp_path)


def _files(root: str) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in Path(root).rglob("*")
        if path.is_file()
    }


@pytest.mark.root
def test_what_is_shown_is_written_and_taken_back(
    root: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = _files(root)

    assert 0 == fix.main(undo=False, yes=True, root=root)

    shown = capsys.readouterr().out
    written = {name: text for name, text in _files(root).items() if text != before.get(name)}
    assert {
        "etc/apparmor.d/ringfence",
        "etc/sysctl.d/60-ringfence.conf",
        "etc/systemd/system/user@.service.d/60-ringfence.conf",
        "usr/local/lib/ringfence/python",
        "var/lib/ringfence/doctor-fix.json",
        "proc/sys/kernel/unprivileged_userns_clone",
        "proc/sys/user/max_user_namespaces",
    } == {*written}
    assert all(f"/{name}" in shown for name in written if not name.startswith(("proc", "var")))
    profile = written["etc/apparmor.d/ringfence"].decode()
    assert f"profile ringfence {spawn.COPY} flags=(unconfined) {{\n  userns,\n" in profile
    assert all(f"  {line}\n" in shown for line in profile.splitlines() if line)
    assert b"15000" == written["proc/sys/user/max_user_namespaces"]
    assert b"user.max_user_namespaces = 15000\n" in written["etc/sysctl.d/60-ringfence.conf"]
    assert 0 == fix.main(undo=False, yes=True, root=root)
    assert "nothing to fix" in capsys.readouterr().out

    assert 0 == fix.main(undo=True, yes=True, root=root)

    after = {name: text.strip() for name, text in _files(root).items()}
    assert {name: text.strip() for name, text in before.items()} == after
    assert 0 == fix.main(undo=True, yes=True, root=root)
    assert "nothing to undo" in capsys.readouterr().out


@pytest.mark.root
def test_a_file_of_somebody_else_stays(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    profile = Path(root, "etc/apparmor.d/ringfence")
    profile.parent.mkdir(parents=True)
    profile.write_text("mine")
    before = _files(root)
    with pytest.raises(InvalidRequest, match="not written by this command"):
        fix.main(undo=False, yes=True, root=root)
    assert before == _files(root)

    profile.unlink()
    assert 0 == fix.main(undo=False, yes=True, root=root)
    profile.write_text("changed since")
    assert 1 == fix.main(undo=True, yes=True, root=root)
    assert "was changed since" in capsys.readouterr().err
    assert "changed since" == profile.read_text()
    assert not Path(root + spawn.COPY).exists()


def test_nothing_is_changed_without_consent(
    root: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _files(root)
    with open(os.devnull, encoding="utf-8") as null:
        monkeypatch.setattr(sys, "stdin", null)
        assert 1 == fix.main(undo=False, yes=False, root=root)

    said = capsys.readouterr()
    assert "user.max_user_namespaces is 0" in said.out
    assert ("only root can" if os.geteuid() else "add --yes") in said.err
    assert before == _files(root)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("answer", "may"),
    [
        ("y\n", True),
        (" YES \n", True),
        ("n\n", False),
        ("\n", False),
        ("", False),
        ("yess\n", False),
    ],
)
def test_only_a_plain_yes_is_consent(
    answer: str, may: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(sys, "stdin", _Terminal(answer))
    assert may == fix._may(yes=False)
    assert fix._may(yes=True)
    monkeypatch.setattr(os, "geteuid", lambda: 1)
    assert not fix._may(yes=True)


@pytest.fixture
def consent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs this may change the host of the test."""
    monkeypatch.setattr(fix, "_may", lambda **_: True)


@pytest.mark.usefixtures("consent")
def test_only_what_was_set_here_is_set_back_and_each_file_has_its_mode(root: str) -> None:
    assert 0 == fix.main(undo=False, yes=True, root=root)
    modes = {
        name: os.stat(f"{root}{name}").st_mode & 0o777
        for name in (spawn.COPY, "/etc/apparmor.d/ringfence", "/var/lib/ringfence/doctor-fix.json")
    }
    assert [0o755, 0o644, 0o644] == [*modes.values()]
    changed = Path(root, "proc/sys/user/max_user_namespaces")
    changed.write_text("999\n")
    assert 0 == fix.main(undo=True, yes=True, root=root)
    assert "999\n" == changed.read_text(), "somebody has set it since"
    assert "0" == Path(root, "proc/sys/kernel/unprivileged_userns_clone").read_text()


@pytest.mark.usefixtures("consent")
def test_a_profile_is_unloaded_before_its_file_goes_and_services_are_read_again_after(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, bool]] = []

    def run(commands: list[list[str]], _root: str) -> int:
        there = Path(root, "etc/apparmor.d/ringfence").exists()
        ran.extend((" ".join(each), there) for each in commands)
        return 0

    monkeypatch.setattr(fix, "_run", run)
    profile = "/etc/apparmor.d/ringfence"
    assert 0 == fix.main(undo=False, yes=True, root=root)
    assert [(f"apparmor_parser -r {profile}", True), ("systemctl daemon-reload", True)] == ran
    ran.clear()
    assert 0 == fix.main(undo=True, yes=True, root=root)
    assert [(f"apparmor_parser -R {profile}", True), ("systemctl daemon-reload", False)] == ran


def test_a_command_that_fails_or_is_missing_is_said_and_counts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert 0 == fix._run([["true"]], "")
    assert 0 == fix._run([["false"], ["no-such-program"]], "/elsewhere"), "they are only shown then"
    assert ("", "") == tuple(capsys.readouterr())
    assert 1 == fix._run([["false"], ["true"]], "")
    assert "this failed: false" in capsys.readouterr().err
    assert 1 == fix._run([["no-such-program", "x"], ["true"]], "")
    assert "this was not run: no-such-program x" in capsys.readouterr().err


@pytest.mark.usefixtures("consent")
def test_a_python_whose_copy_does_not_run_is_refused_and_removed(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(fix, "_base", lambda: str(broken))
    with pytest.raises(InvalidRequest, match="does not find its own library"):
        fix.main(undo=False, yes=True, root=root)
    assert not Path(root + spawn.COPY).exists()


@pytest.mark.usefixtures("consent")
def test_what_broke_off_in_the_middle_can_be_undone(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _files(root)

    def fail(*_: object) -> None:
        raise OSError("power is gone")

    with monkeypatch.context() as patch:
        patch.setattr(fix, "_set", fail)
        with pytest.raises(OSError, match="power is gone"):
            fix.main(undo=False, yes=True, root=root)
    assert before != _files(root)
    assert 0 == fix.main(undo=True, yes=True, root=root)
    assert before == _files(root)
    half = Path(f"{root}/var/lib/ringfence/doctor-fix.json.new")
    half.write_text("{")
    with pytest.raises(IoError, match="is there"):
        fix.main(undo=False, yes=True, root=root)
    half.unlink()
    Path(f"{root}/var/lib/ringfence/doctor-fix.json").write_text("{")
    with pytest.raises(IoError, match="cannot be read"):
        fix.main(undo=True, yes=True, root=root)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--fix", "--undo"], "--fix and --undo do not go together"),
        (["--fix", "--json"], "--fix and --json do not go together"),
        (["--yes"], "--yes needs --fix or --undo"),
    ],
)
def test_options_that_do_not_go_together_are_refused(words: list[str], said: str) -> None:
    result = ringfence_command("doctor", *words)

    assert 125 == result.returncode
    assert said in result.stderr.decode()


@pytest.mark.root
@pytest.mark.parametrize("who", ["root's", "anybody's", "stale"])
def test_a_zygote_runs_the_copy_of_root_alone(
    who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "python"
    shutil.copy2(_system_python(), copy)
    os.chmod(tmp_path, 0o755)
    os.chmod(copy, 0o775 if who == "anybody's" else 0o755)
    if who == "stale":
        os.utime(copy, (1, 1))
    if subprocess.run([copy, "-I", "-S", "-c", "import os"], check=False).returncode:
        pytest.skip("a copy of this Python does not find its library")
    monkeypatch.setattr(spawn, "COPY", str(copy))
    backend = NativeBackend()
    try:
        with Sandbox.create(backend=backend) as sandbox:
            assert "1\n" == sandbox.exec(["echo", "1"]).stdout_text
            running = os.readlink(f"/proc/{_zygote_of(sandbox)}/exe")
    finally:
        backend.close()
    assert (running == str(copy)) is (who == "root's")


def _zygote_of(sandbox: Sandbox) -> int:
    first: int = sandbox._inner.pid  # type: ignore[attr-defined]
    with open(f"/proc/{first}/stat", encoding="ascii") as file:
        return int(file.read().rpartition(")")[2].split()[1])


@pytest.mark.root
def test_what_an_earlier_call_opened_stays_open_and_the_umask_is_the_callers(root: str) -> None:
    settings = Path(root, "etc/sysctl.d/60-ringfence.conf")
    later = Path(root, "proc/sys/user/max_user_namespaces")
    later.write_text("15000\n")
    before = os.umask(0o077)
    try:
        assert 0 == fix.main(undo=False, yes=True, root=root)
        assert 0o077 == os.umask(0o077)
    finally:
        os.umask(before)
    assert "max_user_namespaces" not in settings.read_text()
    later.write_text("0\n")
    assert 0 == fix.main(undo=False, yes=True, root=root)
    assert ["kernel.unprivileged_userns_clone = 1", "user.max_user_namespaces = 15000"] == (
        settings.read_text().splitlines()[1:]
    )
