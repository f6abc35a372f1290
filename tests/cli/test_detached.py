"""`serve --detach`: it returns once the server listens, and the server outlives it."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence.cli.main import main
from tests.cli.command import ringfence_command

pytestmark = [pytest.mark.full, pytest.mark.anyone]


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    """A state directory whose server is stopped at the end."""
    directory = tmp_path / "state"
    yield directory
    ringfence_command("serve", "--stop", "--state-dir", str(directory))


def test_it_returns_once_the_server_listens(state: Path) -> None:
    started = ringfence_command("serve", "--detach", "--json", "--state-dir", str(state))
    (address,) = json.loads(started.stdout)["listening"]

    assert (0, b"") == (started.returncode, started.stderr)
    assert f"unix:{state}/ringfence.sock" == address
    listed = ringfence_command("list", "--json", "--server", address)
    assert (0, []) == (listed.returncode, json.loads(listed.stdout))


def test_it_says_every_address(state: Path) -> None:
    started = ringfence_command(
        "serve", "--detach", "--listen", "127.0.0.1:0", "--state-dir", str(state)
    )
    unix, tcp = started.stdout.decode().splitlines()

    assert f"listening on unix:{state}/ringfence.sock" == unix
    assert tcp.startswith("listening on http://127.0.0.1:")
    port = int(tcp.rpartition(":")[2])
    socket.create_connection(("127.0.0.1", port), timeout=30).close()


def test_the_server_has_no_terminal_of_its_caller(state: Path) -> None:
    """A signal to the caller's session does not reach it, and its streams lead to the log."""
    ringfence_command("serve", "--detach", "--state-dir", str(state))
    pid = int((state / "lock").read_text().split()[0])

    assert pid == os.getsid(pid)
    assert pid != os.getsid(0)
    assert "/dev/null" == os.readlink(f"/proc/{pid}/fd/0")
    assert str(state / "serve.log") == os.readlink(f"/proc/{pid}/fd/2")
    assert 0o600 == (state / "serve.log").stat().st_mode & 0o777


def test_a_second_one_says_why_not(state: Path) -> None:
    first = ringfence_command("serve", "--detach", "--state-dir", str(state))
    second = ringfence_command("serve", "--detach", "--state-dir", str(state))

    assert (0, 125, b"") == (first.returncode, second.returncode, second.stdout)
    assert b"is held by process" in second.stderr
    assert b"--take-over" in second.stderr
    assert b"Traceback" not in second.stderr


def test_a_wrong_option_starts_nothing(state: Path) -> None:
    result = ringfence_command("serve", "--detach", "--listen", "here", "--state-dir", str(state))

    assert (125, b"") == (result.returncode, result.stdout)
    assert b"'here' is not ADDRESS:PORT" in result.stderr
    assert not state.exists()


def test_a_directory_of_something_else_gets_no_file(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    other.chmod(0o755)
    (other / "file").touch()
    refused = ringfence_command("serve", "--detach", "--state-dir", str(other))

    assert (125, b"") == (refused.returncode, refused.stdout)
    assert b"'file' in it is not a server's" in refused.stderr
    assert ["file"] == os.listdir(other)


def test_an_empty_directory_that_others_enter_is_made_private(tmp_path: Path) -> None:
    state = tmp_path / "empty"
    state.mkdir()
    state.chmod(0o755)
    started = ringfence_command("serve", "--detach", "--state-dir", str(state))
    stopped = ringfence_command("serve", "--stop", "--state-dir", str(state))

    assert (0, b"stopped\n") == (started.returncode, stopped.stdout), started.stderr
    assert 0o700 == state.stat().st_mode & 0o777


@pytest.mark.full
def test_stopping_ends_it(state: Path) -> None:
    ringfence_command("serve", "--detach", "--state-dir", str(state))
    stopped = ringfence_command("serve", "--stop", "--state-dir", str(state))
    again = ringfence_command("serve", "--stop", "--state-dir", str(state))

    assert b"stopped\n" == stopped.stdout
    assert f"nothing serves {state}\n".encode() == again.stdout
    assert not (state / "ringfence.sock").exists()


def test_without_the_extra_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also not the state directory, which a later start might find with other rights."""
    monkeypatch.setitem(sys.modules, "fastapi", None)
    for more in ([], ["--detach"]):
        argv = ["ringfence", "serve", *more, "--state-dir", str(tmp_path / "state")]
        monkeypatch.setattr(sys, "argv", argv)

        assert 125 == main()
        assert 'pip install "ringfence[server]"' in capfd.readouterr().err
        assert [] == [*tmp_path.iterdir()]
