"""What runs first on a far host: whom it becomes, and which root it asks bubblewrap for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ringfence.guest import far_start

_NOBODY = 65534


@pytest.fixture(autouse=True)
def _newest_bubblewrap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that says what the newest says."""
    say(tmp_path / "bin", "usage: bwrap --disable-userns ...")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")


def say(directory: Path, text: str) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "bwrap").write_text(f"#!/bin/sh\necho '{text}'\n")
    (directory / "bwrap").chmod(0o755)


def command_of(python: str = "/usr/bin/python3", **told: Any) -> list[str]:
    all_told = {"uid": 1234, "links": [], "steps": [], "etc": [], "masked": [], **told}
    return far_start._bubblewrap(all_told, python)


def has(command: list[str], *words: str) -> bool:
    """Tell whether these words come one after the other."""
    return any(
        [*words] == command[at : at + len(words)] for at in range(len(command) - len(words) + 1)
    )


def test_a_root_of_its_own_with_no_rights_and_no_namespace_of_the_hosts() -> None:
    command = command_of()

    assert "bwrap" == command[0]
    assert "--" == command[-1]
    assert "--disable-userns" == command[-2]
    for name in ("user", "ipc", "pid", "net", "uts", "cgroup-try"):
        assert f"--unshare-{name}" in command
    for words in (
        ("--die-with-parent",),
        ("--as-pid-1",),
        ("--clearenv",),
        ("--cap-drop", "ALL"),
        ("--hostname", "ringfence"),
        ("--uid", "1234", "--gid", "1234"),
        ("--ro-bind", "/usr", "/usr"),
        ("--proc", "/proc"),
        ("--dev", "/dev"),
        ("--tmpfs", "/etc"),
        ("--chdir", "/"),
    ):
        assert has(command, *words), words
    writable = {command[at + 2] for at, word in enumerate(command) if word == "--bind"}
    assert set() == writable


def test_what_is_covered_is_read_only_and_comes_before_the_lock(tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    (tmp_path / "file").touch()
    masked = [str(tmp_path / name) for name in ("dir", "file", "absent")]
    command = command_of(masked=masked, etc=["passwd", "shadow", "absent"])

    assert has(command, "--tmpfs", masked[0], "--remount-ro", masked[0])
    assert has(command, "--ro-bind", "/dev/null", masked[1])
    assert masked[2] not in command
    assert has(command, "--ro-bind", os.path.realpath("/etc/passwd"), "/etc/passwd")
    assert not os.stat("/etc/shadow").st_mode & 0o004
    assert not [word for word in command if "shadow" in word or "/etc/absent" in word]
    order = [command.index(word) for word in ("/proc", "/etc/passwd", masked[0])]
    locks = [at for at, word in enumerate(command) if word == "--remount-ro"]
    assert ["/etc", "/proc"] == [command[at + 1] for at in locks[-2:]]
    assert max(order) < locks[-2]


def test_links_and_directories_of_the_far_host_are_as_there() -> None:
    links = [each for each in ("bin", "lib") if os.path.islink(f"/{each}")]
    command = command_of(links=[*links, "opt", "no-such-directory"])

    for each in links:
        assert has(command, "--symlink", os.readlink(f"/{each}"), f"/{each}")
        assert not has(command, "--ro-bind", f"/{each}", f"/{each}")
    assert has(command, "--ro-bind", "/opt", "/opt")
    assert "/no-such-directory" not in command


def test_a_python_outside_of_usr_is_shown_too() -> None:
    own = ("--ro-bind", sys.base_prefix, sys.base_prefix)
    if not sys.base_prefix.startswith("/usr"):
        assert not has(command_of(), *own)
    assert has(command_of("/opt/python/bin/python3"), *own)


def test_files_are_made_with_their_content_and_modes() -> None:
    steps = [("dir", "/home", 0o700), ("symlink", "/link", "target"), ("file", "/f", "text", 0o640)]
    command = command_of(steps=steps)

    assert has(command, "--perms", "700", "--dir", "/home")
    assert has(command, "--symlink", "target", "/link")
    at = command.index("/f")
    assert ["--perms", "640", "--file"] == command[at - 4 : at - 1]
    fd = int(command[at - 1])
    assert os.get_inheritable(fd)
    with open(fd, "rb") as file:
        assert b"text" == file.read()


def test_an_older_bubblewrap_leaves_namespaces_to_the_filter(tmp_path: Path) -> None:
    say(tmp_path / "bin", "usage: bwrap --unshare-user ...")
    assert "--disable-userns" not in command_of()
    assert "--" == command_of()[-1]


def test_one_that_is_not_installed_is_told_when_it_is_executed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert far_start._forbids_namespaces()
    with pytest.raises(
        SystemExit, match="bwrap on the far host: No such file or directory: install"
    ):
        run(launcher=[], monkeypatch=monkeypatch)


def run(*, launcher: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to where it would execute, or fails to."""
    for name in ("setgroups", "setresgid", "setresuid"):
        monkeypatch.setattr(os, name, lambda *_ids: None)
    told = {"uid": 7, "links": [], "steps": [], "etc": [], "masked": [], "inner": "pass"}
    far_start.main(json.dumps({**told, "launcher": launcher}))


def test_who_logs_in_as_root_is_nobody_from_then_on() -> None:
    """Its launcher gets the agent's Python, what that is to run, and what was seen of the host."""
    script = 'id -u; id -g; id -G; grep "^Cap[PE]" /proc/self/status; echo "$@"'
    launcher = [shutil.which("sh"), "-c", script, "name", "for {uid}"]
    told = {"uid": 77, "launcher": launcher, "inner": "INNER"}
    code = "import sys; from ringfence.guest import far_start; far_start.main(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(told)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        extra_groups=[4711] if os.geteuid() == 0 else None,
        capture_output=True,
        text=True,
        check=False,
    )

    assert "" == done.stderr
    uid, gid, groups, permitted, effective, words = done.stdout.splitlines()
    is_root = os.geteuid() == 0
    assert [uid, gid] == [str(_NOBODY)] * 2 if is_root else [str(os.getuid()), str(os.getgid())]
    assert not is_root or str(_NOBODY) == groups
    assert 0 == int(permitted.split()[1], 16) == int(effective.split()[1], 16)
    start, _, facts = words.partition(" INNER ")
    name, python, *options = start.removeprefix("for ").split()
    assert ("77", ["-I", "-S", "-X", "utf8", "-c"]) == (name, options)
    assert os.path.samefile(sys.executable, python)
    found = json.loads(facts)
    assert int(uid) == found["uid"]
    assert os.uname().release == found["kernel"]
    assert {
        name: os.stat(f"/proc/self/ns/{name}").st_ino for name in far_start.NAMESPACES
    } == found["outer"]


def test_a_python_that_is_too_old_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(far_start, "_OLDEST", (99, 0))
    with pytest.raises(SystemExit, match=r"3\.9 or newer is needed"):
        run(launcher=["/no/such/launcher"], monkeypatch=monkeypatch)
