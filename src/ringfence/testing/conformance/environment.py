"""Environment of a command: variables, directory, user."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ...errors import InvalidRequest, RingfenceError
from ...model.mount import ALWAYS_THERE
from .base import ConformanceBase

if TYPE_CHECKING:
    from ..lab import Lab
    from .base import MakeSandbox

CANARY = "RINGFENCE_TEST_CANARY"


class Environment(ConformanceBase):
    one_sandbox = True

    def test_the_spec_sets_variables(self, make_sandbox: MakeSandbox) -> None:
        lab = make_sandbox(env={"COLOUR": "green"})

        assert "green" == lab.sh('printf %s "$COLOUR"').text

    def test_the_request_adds_and_overrides(self, make_sandbox: MakeSandbox) -> None:
        lab = make_sandbox(env={"COLOUR": "green", "SHAPE": "round"})

        result = lab.sh(
            'printf "%s %s %s" $COLOUR $SHAPE $SIZE', env={"COLOUR": "red", "SIZE": "9"}
        )

        assert "red round 9" == result.text
        assert "green" == lab.sh('printf %s "$COLOUR"').text

    def test_values_arrive_as_they_are(self, sandbox: Lab) -> None:
        value = " a=b\n'\"$HOME`;ü "

        assert value == sandbox.sh('printf %s "$V"', env={"V": value}).text

    def test_the_host_environment_stays_outside(
        self, sandbox: Lab, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(CANARY, "leaked")

        assert CANARY not in sandbox.run("env").text
        assert CANARY in sandbox.run("env", env={CANARY: "given"}).text

    def test_home_and_path_are_set(self, sandbox: Lab) -> None:
        lines = sandbox.run("env").text.splitlines()

        assert any(line.startswith("PATH=/") for line in lines)
        assert any(line.startswith("HOME=/") for line in lines)

    def test_the_always_there_directories(self, sandbox: Lab) -> None:
        """Named by variables, at the same path inside as in the contract, and writable."""
        for variable, path in ALWAYS_THERE.items():
            result = sandbox.sh(f'printf %s "${variable}"; echo from inside > "${variable}/note"')

            assert (path, 0) == (result.text, result.exit_code)
            assert b"from inside\n" == sandbox.get(f"{path}/note")
            assert ["note"] == [entry.name for entry in sandbox.files.list(path)]

    def test_commands_start_in_the_session_root(self, sandbox: Lab) -> None:
        sandbox.put("here", b"found")

        assert b"found" == sandbox.run("cat", "here").stdout
        assert sandbox.run("pwd").text == sandbox.sh('cd "$HOME"; pwd').text

    def test_cwd_is_relative_to_the_session_root(self, sandbox: Lab) -> None:
        sandbox.files.make_dir("a/b")
        root = sandbox.run("pwd").text.strip()

        assert f"{root}/a/b\n" == sandbox.run("pwd", cwd="a/b").text
        assert f"{root}/a\n" == sandbox.run("pwd", cwd="./a/b/..").text

    def test_cwd_may_be_absolute(self, sandbox: Lab) -> None:
        assert "/tmp\n" == sandbox.run("pwd", cwd="/tmp").text

    def test_workdir_moves_the_session_root(self, make_sandbox: MakeSandbox) -> None:
        lab = make_sandbox(workdir="/tmp")
        lab.put("file", b"x")

        assert "/tmp\n" == lab.run("pwd").text
        assert "/tmp/file" == lab.files.stat("file").path

    @pytest.mark.parametrize("cwd", ["no/such/directory", "/no/such/directory", "a-file"])
    def test_a_cwd_that_is_no_directory_is_refused(self, sandbox: Lab, cwd: str) -> None:
        sandbox.put("a-file", b"")

        with pytest.raises(InvalidRequest) as refusal:
            sandbox.run("pwd", cwd=cwd)

        assert "cwd" == refusal.value.field

    def test_commands_are_not_root(self, sandbox: Lab) -> None:
        assert int(sandbox.run("id", "-u").text) > 0

    def test_the_default_user_by_number(self, sandbox: Lab) -> None:
        uid = sandbox.run("id", "-u").text.strip()

        assert uid == sandbox.run("id", "-u", user=uid).text.strip()

    def test_an_unknown_user_is_refused(self, sandbox: Lab) -> None:
        with pytest.raises(RingfenceError) as refusal:
            sandbox.run("true", user="no-such-user")

        assert "user" == refusal.value.field
