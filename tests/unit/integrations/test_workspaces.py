"""The adapter of Pydantic AI: what it asks of a sandbox, and what it refuses."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.frameworks import adapter
from tests.local_sandbox import Kept, Local, complaints, local_at

from ringfence.errors import (
    InvalidRequest,
    LifecycleError,
    SandboxLost,
    SandboxNotFound,
)
from ringfence.model.execs.exec import KILLED_BY_TERMINATE, ExecResult

pytestmark = pytest.mark.anyone


@pytest.fixture
def local(tmp_path: Path) -> Local:
    return local_at(tmp_path)


@pytest.fixture(scope="module")
def pydantic() -> Iterator[Any]:
    errors = ("OutputLimitError", "TimeoutError", "UnavailableError")
    workspaces = {
        **{
            name: type(name, (Kept,), {}) for name in ("CommandResult", "FileEntry", "WorkspaceRef")
        },
        **complaints(*(f"Workspace{name}" for name in errors)),
    }
    frameworks: dict[str, dict[str, Any]] = {
        "anyio": {"Lock": asyncio.Lock},
        "pydantic_ai": {},
        "pydantic_ai.workspaces": workspaces,
    }
    with adapter("pydantic_ai", frameworks) as found:
        yield found


class TestPydantic:
    @pytest.fixture
    def workspace(self, pydantic: Any, local: Local, monkeypatch: pytest.MonkeyPatch) -> Any:
        made = pydantic.RingfenceWorkspace(output_bytes=100)
        self.begun = 0

        async def begin() -> Local:
            self.begun += 1
            await asyncio.sleep(0)
            return local

        lost: list[str] = []

        async def find(id: str) -> Local:
            lost.append(id)
            if id == "gone":
                raise SandboxNotFound("no such")
            return local

        origin = SimpleNamespace(async_lasting=begin, async_find=find)
        monkeypatch.setattr(made, "_origin", origin)
        return made

    def test_nothing_that_holds_the_working_directory_is_removed(
        self, workspace: Any, local: Local
    ) -> None:
        """Whatever leads there: another name of it, dots, a link above it, or a slash at the end."""
        above = local.home.parent
        (above / "other").symlink_to("real")
        (above / "real/home-of-another").mkdir()
        (above / "real/home/inside").mkdir()
        (above / "real/link").symlink_to("home")
        for path in ("real/home", "real", "other/../other/home", "other/home", "other/home/.", "."):
            with pytest.raises(ValueError, match="working directory or a parent"):
                asyncio.run(workspace.remove(f"{above}/{path}"))
        with pytest.raises(ValueError, match="working directory or a parent"):
            asyncio.run(workspace.remove("/"))
        assert [] == [each for each in local.files.asked if each[0] == "remove"]
        for path in ("real/home-of-another", "real/home/inside", "real/link"):
            asyncio.run(workspace.remove(f"{above}/{path}"))
            assert not os.path.lexists(above / path)
        assert (above / "real/home").is_dir(), "a link to it is another thing"
        assert {"recursive": True} == local.files.asked[-1][2]

    def test_the_first_use_makes_it_once_and_resolves_where_commands_start(
        self, workspace: Any, pydantic: Any, local: Local
    ) -> None:
        async def both() -> list[str]:
            return list(await asyncio.gather(workspace.working_dir(), workspace.working_dir()))

        assert workspace.ref is None
        assert [f"{local.home.parent}/real/home"] * 2 == asyncio.run(both())
        ref: Any = workspace.ref
        assert (1, "ringfence", "sbx-1") == (self.begun, ref.provider, ref.id)
        asyncio.run(workspace.terminate())
        with pytest.raises(pydantic.WorkspaceUnavailableError, match="sbx-1 was terminated"):
            asyncio.run(workspace.run(["true"]))
        assert 1 == self.begun, "another is not made in its stead"

    def test_a_reference_is_to_the_sandbox_that_it_names(
        self, workspace: Any, pydantic: Any, local: Local
    ) -> None:
        with pytest.raises(ValueError, match="not a Ringfence workspace"):
            pydantic.RingfenceWorkspace(pydantic.WorkspaceRef(provider="e2b", id="sbx-1"))
        workspace._ref = pydantic.WorkspaceRef(provider="ringfence", id="gone")
        with pytest.raises(pydantic.WorkspaceUnavailableError, match="no such"):
            asyncio.run(workspace.working_dir())
        asyncio.run(workspace.terminate())
        assert "running" == local.state
        workspace._ref = pydantic.WorkspaceRef(provider="ringfence", id="sbx-1")
        asyncio.run(workspace.terminate())
        assert ("terminated", 0) == (local.state, self.begun), "though it was never used here"

    def test_how_a_command_ended_is_told_in_its_words(
        self, workspace: Any, pydantic: Any, local: Local
    ) -> None:
        asyncio.run(workspace.working_dir())
        said: dict[str, Any] = {"stdout": b"out", "stderr": b"err"}

        def run(answer: ExecResult | Exception, **how: Any) -> Any:
            local.answer = answer
            return asyncio.run(workspace.run(["x"], env={"A": "1"}, **how))

        done = run(ExecResult(exit_code=3, **said), timeout=2.5)
        assert (3, "out", "err") == (done.exit_code, done.stdout, done.stderr)
        expected = {"cwd": workspace._working_dir, "env": {"A": "1"}, "timeout_s": 2.5}
        assert {**expected, "max_output_bytes": 100} == local.asked[-1][1]
        with pytest.raises(pydantic.WorkspaceTimeoutError, match=r"after 2\.5s") as late:
            run(ExecResult(signal=9, timed_out=True, duration_s=3, **said), timeout=2.5)
        assert ("out", "err") == (late.value.stdout, late.value.stderr)
        with pytest.raises(pydantic.WorkspaceOutputLimitError) as long:
            run(ExecResult(exit_code=0, truncated=True, **said))
        assert (100, "out", "err") == (long.value.limit, long.value.stdout, long.value.stderr)
        gone = ExecResult(signal=9, timed_out=True, killed_by=KILLED_BY_TERMINATE, duration_s=1)
        for answer in (gone, SandboxLost("x"), LifecycleError("x"), SandboxNotFound("x")):
            with pytest.raises(pydantic.WorkspaceUnavailableError):
                run(answer)
        with pytest.raises(InvalidRequest):
            run(InvalidRequest("a mistake of the caller's"))

    def test_what_makes_no_sense_is_refused_before_anything_is_made(self, workspace: Any) -> None:
        for timeout in (0, -1.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="positive finite"):
                asyncio.run(workspace.run(["true"], timeout=timeout))
        for command, shell in (("true", False), (["true"], True)):
            with pytest.raises(TypeError, match="shell"):
                asyncio.run(workspace.run(command, shell=shell))
        assert 0 == self.begun
        assert "$ x\n" == asyncio.run(workspace.run("echo '$' x", shell=True)).stdout

    def test_files_are_told_with_what_their_links_lead_to(
        self, workspace: Any, pydantic: Any, local: Local
    ) -> None:
        home = f"{local.home.parent}/real/home"
        asyncio.run(workspace.write_bytes(f"{home}/deep/file", b"four"))
        assert {"parents": True} == local.files.asked[-1][3]
        assert b"four" == asyncio.run(workspace.read_bytes(f"{home}/deep/file"))
        for name, target in (("to-file", "deep/file"), ("to-dir", "deep"), ("to-none", "none")):
            os.symlink(target, f"{home}/{name}")
        found = asyncio.run(workspace.list_dir(home))
        assert [
            ("deep", True, None), ("to-dir", True, None), ("to-file", False, 4), ("to-none", False, None),
        ] == [(each.name, each.is_dir, each.size) for each in found]  # fmt: skip
        assert [f"{home}/{each.name}" for each in found] == [each.path for each in found]
        entry = asyncio.run(workspace.stat(f"{home}/to-dir/"))
        assert ("to-dir", f"{home}/to-dir/", True) == (entry.name, entry.path, entry.is_dir)
        for name, there in (
            ("deep", True), ("to-file", True), ("to-none", False), ("none", False), ("deep/file/x", False),
        ):  # fmt: skip
            assert there == asyncio.run(workspace.exists(f"{home}/{name}"))
        with pytest.raises(FileNotFoundError):
            asyncio.run(workspace.stat(f"{home}/none"))
        for refusal, error in (
            (InvalidRequest("x"), ValueError), (SandboxLost("x"), pydantic.WorkspaceUnavailableError),
        ):  # fmt: skip
            local.files.refuses = refusal
            for call in (
                workspace.read_bytes, workspace.stat, workspace.list_dir, workspace.make_dir,
                workspace.remove, lambda path: workspace.write_bytes(path, b""),
            ):  # fmt: skip
                with pytest.raises(error):
                    asyncio.run(call(f"{home}/deep/file"))
        assert os.path.exists(f"{home}/deep/file")

    def test_a_path_that_cannot_be_resolved_is_an_error_and_not_an_answer(
        self, workspace: Any, local: Local
    ) -> None:
        asyncio.run(workspace.working_dir())
        local.answer = ExecResult(exit_code=1, stdout=b"/\n", stderr=b"realpath: no\n")
        with pytest.raises(OSError, match="realpath: no"):
            asyncio.run(workspace.realpath("/x"))
        local.answer = ExecResult(exit_code=0, stdout=b"/odd\n\n")
        assert "/odd\n" == asyncio.run(workspace.realpath("/x"))
