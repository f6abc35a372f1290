"""The adapter of OpenAI Agents: sessions, their files and processes, and the client that makes them."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.frameworks import adapter
from tests.local_sandbox import Kept, Local, complaints, local_at

from ringfence.errors import (
    FileNotFound,
    InvalidRequest,
    NotADirectory,
    RingfenceError,
    SandboxLost,
    SandboxNotFound,
)
from ringfence.model.execs.exec import KILLED_BY_TERMINATE, ExecResult
from ringfence.model.mount import READ_ONLY, READ_WRITE, Mount

pytestmark = pytest.mark.anyone


@pytest.fixture
def local(tmp_path: Path) -> Local:
    return local_at(tmp_path)


class UnsafeError(Exception):
    member = "../x"


class Base:
    """What the framework's classes have."""

    def __class_getitem__(cls, _of: Any) -> Any:
        return cls

    def __init__(self, **content: Any) -> None:
        self.__dict__ |= content


def _validate(payload: bytes, *, allow_external_symlink_targets: bool) -> None:
    assert not allow_external_symlink_targets
    if payload.startswith(b"unsafe"):
        raise UnsafeError("it leads out")


@pytest.fixture(scope="module")
def openai() -> Iterator[Any]:
    in_errors = (
        *("ExecTimeoutError", "ExecTransportError", "ExposedPortUnavailableError"),
        *("WorkspaceArchiveReadError", "WorkspaceArchiveWriteError", "WorkspaceReadNotFoundError"),
        *("WorkspaceStartError", "WorkspaceWriteTypeError"),
    )
    place = "agents.sandbox"
    frameworks: dict[str, dict[str, Any]] = {
        "agents": {},
        place: {},
        f"{place}.errors": complaints(*in_errors),
        f"{place}.session": {"SandboxSessionState": Base},
        f"{place}.session.base_sandbox_session": {"BaseSandboxSession": Base},
        f"{place}.session.runtime_helpers": {},
        f"{place}.types": {name: type(name, (Kept,), {}) for name in ("ExecResult", "ExposedPortEndpoint")},
        f"{place}.session.pty_types": {
            "PTY_PROCESSES_MAX": 2,
            "PtyExecUpdate": type("PtyExecUpdate", (Kept,), {}),
            "allocate_pty_process_id": lambda taken: max(taken, default=0) + 1,
            "clamp_pty_yield_time_ms": lambda ms: ms,
            "process_id_to_prune_from_meta": lambda ages: min(ages, key=lambda each: each[1])[0],
            "resolve_pty_write_yield_time_ms": lambda *, yield_time_ms, input_empty: yield_time_ms,
        },
        f"{place}.session.pty_output": {},
        f"{place}.session.tar_workspace": {
            "shell_tar_exclude_args": lambda skip: [f"--exclude={each}" for each in skip],
        },
        f"{place}.session.manager": {"Instrumentation": Base},
        f"{place}.session.sandbox_client": {"BaseSandboxClient": Base, "BaseSandboxClientOptions": Base},
        f"{place}.manifest": {"Manifest": Base},
        f"{place}.snapshot": {"resolve_snapshot": lambda snapshot, name: (snapshot, name)},
        f"{place}.util": {},
        f"{place}.util.tar_utils": {"UnsafeTarMemberError": UnsafeError, "validate_tar_bytes": _validate},
        f"{place}.workspace_paths": {"sandbox_path_grant_host_path": lambda grant: grant.host_path},
    }  # fmt: skip
    with adapter("openai_agents.session", frameworks) as found:
        yield found


def grant(path: str, host_path: str | None, *, read_only: bool = True) -> Any:
    return SimpleNamespace(path=path, host_path=host_path, read_only=read_only)


class TestOpenAI:
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        root = tmp_path / "workspace"
        root.mkdir()
        (root / "kept").write_text("as it was")
        return root

    @pytest.fixture
    def session(self, openai: Any, local: Local, root: Path) -> Any:
        async def resolve() -> dict[str, str]:
            return {"A": "1"}

        manifest = SimpleNamespace(
            root=str(root), environment=SimpleNamespace(resolve=resolve), extra_path_grants=()
        )
        state = openai.RingfenceSandboxSessionState(
            manifest=manifest, sandbox_id="sbx-1", exposed_ports=(80,), create={}, server=None,
            session_id=SimpleNamespace(hex=f"{root.parent.name}-{os.getpid()}"),
        )  # fmt: skip
        made = openai.RingfenceSandboxSession(state, local)
        made.cleared = 0
        made.dependencies = None
        made._workspace_root_path = lambda: root
        made._persist_workspace_skip_relpaths = set

        async def clear() -> None:
            made.cleared += 1
            shutil.rmtree(root)
            root.mkdir()

        made._clear_workspace_root_on_resume = clear
        return made

    def _restored(self, session: Any, content: bytes | str) -> io.IOBase:
        archive: Any = io.StringIO(content) if isinstance(content, str) else io.BytesIO(content)

        async def restore(*, dependencies: Any) -> io.IOBase:
            found: io.IOBase = archive
            return found

        session.state.snapshot = SimpleNamespace(restore=restore)
        try:
            asyncio.run(session._restore_snapshot_into_workspace_on_resume())
        finally:
            assert archive.closed
        found: io.IOBase = archive
        return found

    def test_a_snapshot_that_is_refused_leaves_the_files_that_are_there(
        self, openai: Any, session: Any, root: Path
    ) -> None:
        with pytest.raises(openai.WorkspaceArchiveWriteError) as refusal:
            self._restored(session, b"unsafe")
        assert ("../x", 0) == (refusal.value.context["member"], session.cleared)
        assert "as it was" == (root / "kept").read_text()
        with pytest.raises(openai.WorkspaceArchiveWriteError) as refusal:
            asyncio.run(session.hydrate_workspace(io.BytesIO(b"unsafe")))
        assert "../x" == refusal.value.context["member"]

    def test_a_workspace_comes_back_as_it_was_saved(
        self, openai: Any, session: Any, local: Local, root: Path
    ) -> None:
        os.link(root / "kept", root / "same")
        saved = asyncio.run(session.persist_workspace()).read()
        assert local.files.asked[-1][0] == "remove", "the archive is not left inside"
        assert not Path(local.files.asked[-1][1]).exists()
        (root / "kept").unlink()
        (root / "later").touch()
        self._restored(session, saved)
        assert ["kept", "same"] == sorted(os.listdir(root))
        assert (1, 1) == (session.cleared, (root / "same").stat().st_nlink)
        assert "--no-same-owner" in local.asked[-1][0]
        with pytest.raises(openai.WorkspaceArchiveWriteError) as failure:
            asyncio.run(session.hydrate_workspace(io.BytesIO(b"no tar at all")))
        assert 2 == failure.value.context["exit_code"]
        shutil.rmtree(root)
        with pytest.raises(openai.WorkspaceArchiveReadError) as unread:
            asyncio.run(session.persist_workspace())
        assert unread.value.context["exit_code"]
        local.answer = SandboxLost("x")
        with pytest.raises(openai.WorkspaceArchiveReadError):
            asyncio.run(session.persist_workspace())
        with pytest.raises(openai.WorkspaceArchiveWriteError):
            asyncio.run(session.hydrate_workspace(io.BytesIO(b"")))

    def test_what_is_mounted_from_outside_is_neither_saved_nor_cleared(
        self, openai: Any, session: Any, root: Path
    ) -> None:
        (root / "shared").mkdir()
        (root / "shared/theirs").touch()
        session.state.create = {
            "mounts": [Mount(f"{root}/shared", "/srv"), Mount("/other", "/srv")]
        }
        skipped = {Path("shared")}
        assert skipped == session._from_outside()
        openai.BaseSandboxSession._workspace_resume_mount_skip_relpaths = lambda _: {Path("x")}
        assert {Path("x"), *skipped} == session._workspace_resume_mount_skip_relpaths()
        del openai.BaseSandboxSession._workspace_resume_mount_skip_relpaths
        script = openai.workspace.packing(skipped)
        assert " --exclude=shared -cf" in script
        session.state.create = {"mounts": [Mount(str(root), "/srv")]}
        assert {Path()} == session._from_outside()
        empty = asyncio.run(session.persist_workspace()).read()
        assert openai.workspace.empty_tar() == empty

    def test_a_manifest_grants_of_this_host_what_it_says(self, openai: Any) -> None:
        granted, mounts_of = openai.workspace.granted, openai.workspace.mounts_of
        manifest = SimpleNamespace(
            root="/w",
            extra_path_grants=[
                grant("/data", "/srv/data"), grant("/out", "/srv/out", read_only=False), grant("/n", None),
            ],
        )  # fmt: skip
        found = granted(None, manifest)
        assert [("/data", READ_ONLY), ("/out", READ_WRITE)] == [
            (each.target, each.access) for each in found
        ]
        with pytest.raises(InvalidRequest) as refusal:
            granted("http://x", manifest)
        assert "host_path" == refusal.value.field
        manifest.extra_path_grants = manifest.extra_path_grants[2:]
        assert [] == granted("http://x", manifest), "it is of the sandbox's own"
        (own,) = mounts_of({}, None, manifest)
        assert ("/w", "", True, ()) == (own.target, own.source, own.is_writable, own.protect)
        mine = Mount("/w", "/srv")
        assert [mine] == mounts_of({"mounts": [mine]}, "http://x", manifest)

    def test_how_a_command_ended_is_told_in_its_words(
        self, openai: Any, session: Any, local: Local
    ) -> None:
        def run(*command: str, **how: Any) -> Any:
            return asyncio.run(session._exec_internal(*command, **how))

        local.answer = ExecResult(exit_code=3, stdout=b"o", stderr=b"e")
        for timeout, given in ((2.0, 2.0), (None, None), (0, 0.001), (-1, 0.001)):
            done = run("cmd", "a", timeout=timeout)
            assert (3, b"o", b"e") == (done.exit_code, done.stdout, done.stderr)
            assert given == local.asked[-1][1]["timeout_s"]
        command, how = local.asked[-1]
        assert (["cmd", "a"], None, {"A": "1"}) == (command, how["user"], how["env"])
        assert session.state.manifest.root == how["cwd"]
        run("sudo", "-u", "other", "--", "cmd")
        assert (["cmd"], "other") == (local.asked[-1][0], local.asked[-1][1]["user"])
        run("sudo", "-u", "other", "cmd", "x")
        assert "sudo" == local.asked[-1][0][0], "it is the caller's own"
        local.answer = ExecResult(exit_code=0, stdout=b"o", truncated=True, stdout_dropped_bytes=7)
        assert b"o\n[7 bytes dropped]" == run("cmd").stdout
        local.answer = ExecResult(signal=9, timed_out=True, duration_s=1)
        with pytest.raises(openai.ExecTimeoutError):
            run("cmd", timeout=1)
        for answer in (ExecResult(signal=9, killed_by=KILLED_BY_TERMINATE), SandboxLost("x")):
            local.answer = answer
            with pytest.raises(openai.ExecTransportError):
                run("cmd")

    def test_files_are_refused_in_its_words(self, openai: Any, session: Any, local: Local) -> None:
        asked: list[Any] = []

        async def validate(path: Path, *, for_write: bool) -> Path:
            asked.append(for_write)
            return path

        async def check(path: Path, *, user: str) -> None:
            asked.append(user)

        session._validate_remote_path_access = validate
        session._check_read_with_exec = session._check_write_with_exec = check
        path = Path(session.state.manifest.root) / "deep/x"
        for data in ("text", b"text", bytearray(b"text")):
            stream = SimpleNamespace(read=lambda data=data: data)
            asyncio.run(session.write(path, stream, user="u"))
            assert b"text" == asyncio.run(session.read(path, user="u")).read()
            assert ["u", True, "u", False] == asked
            asked.clear()
        assert b"text" == asyncio.run(session._read_bounded(path, max_bytes=9))
        assert ("read", str(path), 9) == local.files.asked[-1]
        with pytest.raises(openai.WorkspaceWriteTypeError) as wrong:
            asyncio.run(session.write(path, SimpleNamespace(read=lambda: 3)))
        assert "int" == wrong.value.actual_type
        for refusal, error in (
            (FileNotFound("x"), openai.WorkspaceReadNotFoundError),
            (NotADirectory("x"), openai.WorkspaceReadNotFoundError),
            (SandboxLost("x"), openai.WorkspaceArchiveReadError),
        ):
            local.files.refuses = refusal
            with pytest.raises(error):
                asyncio.run(session.read(path))
            with pytest.raises(openai.WorkspaceArchiveWriteError):
                asyncio.run(session.write(path, io.BytesIO(b"x")))
            with pytest.raises(openai.WorkspaceStartError):
                asyncio.run(session._prepare_backend_workspace())

    def test_a_port_is_exposed_once_and_a_refusal_says_which_there_are(
        self, openai: Any, session: Any, local: Local
    ) -> None:
        local.answer = RingfenceError("no")
        with pytest.raises(openai.ExposedPortUnavailableError) as refusal:
            asyncio.run(session._resolve_exposed_port(80))
        assert (80, (80,)) == (refusal.value.port, refusal.value.exposed_ports)
        local.answer = None
        first, again, other = (
            asyncio.run(session._resolve_exposed_port(port)) for port in (80, 80, 81)
        )
        assert ("127.0.0.1", 40_080) == (first.host, first.port)
        assert (True, 40_081) == (first is again, other.port)
        assert 3 == len(local.asked)


class Program:
    """A process of a sandbox, which says what it is given and waits to be killed."""

    def __init__(self, *said: bytes, ends: bool = True) -> None:
        self.killed, self.typed = 0, list[bytes]()
        self.over = asyncio.Event()
        if ends:
            self.over.set()
        self.stdout, self.stderr = self._lines(said), self._lines(())

        async def write(data: bytes) -> None:
            self.typed.append(data)

        self.stdin = SimpleNamespace(write=write)
        self.problem: Exception | None = None

    async def _lines(self, said: tuple[bytes, ...]) -> Any:
        for each in said:
            yield each
        await self.over.wait()

    async def wait(self) -> ExecResult:
        if self.problem is not None:
            raise self.problem
        return ExecResult(signal=9) if self.killed else ExecResult(exit_code=3)

    async def kill(self) -> None:
        self.killed += 1
        self.over.set()


class TestProcesses:
    @pytest.fixture
    def module(self, openai: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
        found = sys.modules["ringfence.integrations.openai_agents.processes"]

        async def collect(
            *, output_chunks: Any, is_done: Callable[[], bool], yield_time_ms: int, **_: Any
        ) -> Any:
            for _turn in range(20):
                await asyncio.sleep(0)
            said = b"".join(output_chunks)
            output_chunks.clear()
            return said, yield_time_ms, is_done()

        monkeypatch.setattr(found, "collect_pty_output", collect)
        return found

    async def test_one_that_has_ended_is_told_with_its_code_and_forgotten(
        self, module: Any
    ) -> None:
        processes = module.Processes()
        said = await processes.begin(Program(b"all ", b"of it"), False, None, None)
        assert (None, b"all of it", 3) == (said.process_id, said.output, said.exit_code)
        assert ({}, 10_000) == (processes.entries, said.original_token_count)
        lost = Program()
        lost.problem = SandboxLost("x")
        said = await processes.begin(lost, False, 1.5, None)
        assert (125, 1500) == (said.exit_code, said.original_token_count)

    async def test_one_that_runs_is_typed_to_where_it_has_a_terminal(self, module: Any) -> None:
        processes = module.Processes()
        programs = [Program(b"began", ends=False) for _ in range(2)]
        first, second = [
            await processes.begin(each, tty, None, None)
            for each, tty in zip(programs, (True, False), strict=True)
        ]
        assert ([1, 2], None, b"began") == (
            [first.process_id, second.process_id], first.exit_code, first.output,
        )  # fmt: skip
        entries = processes.entries
        said = await processes.write(1, entries[1], "hello", None, None)
        assert ([b"hello"], 250, 1) == (
            programs[0].typed, said.original_token_count, said.process_id,
        )  # fmt: skip
        with pytest.raises(RuntimeError, match="stdin"):
            await processes.write(2, entries[2], "hello", None, None)
        await processes.write(2, entries[2], "", None, None)
        assert [] == programs[1].typed
        third = Program(ends=False)
        await processes.begin(third, False, None, None)
        assert [1, 0] == [each.killed for each in programs], "the oldest makes room"
        await processes.end_all()
        assert ({}, 1, 1) == (processes.entries, programs[1].killed, third.killed)

    async def test_one_whose_number_nobody_got_is_killed(self, module: Any) -> None:
        processes, program = module.Processes(), Program(ends=False)
        starting = asyncio.create_task(processes.begin(program, False, None, None))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert (1, {}) == (program.killed, processes.entries)


class TestClient:
    @pytest.fixture
    def client(self, openai: Any, local: Local, monkeypatch: pytest.MonkeyPatch) -> Any:
        module: Any = sys.modules["ringfence.integrations.openai_agents.client"]
        made: list[Any] = []

        class Origin:
            def __init__(self, options: Any = None, server: str | None = None) -> None:
                self.options, self.server = options, server

            async def async_find(self, id: str) -> Any:
                made.append(("find", id, self.server))
                if id == "gone":
                    raise SandboxNotFound("x")
                return local

            async def async_lasting(self) -> Any:
                made.append(("make", self.options, self.server))
                return local

        monkeypatch.setattr(module, "Origin", Origin)
        local.spec = SimpleNamespace(mounts=())  # type: ignore[attr-defined]
        client = module.RingfenceSandboxClient(server=None, tier="light")
        client._wrap_session = lambda inner, instrumentation: SimpleNamespace(_inner=inner)
        client._validate_manifest_for_create = lambda manifest: manifest
        client.made = made
        return client

    @staticmethod
    def _manifest(*grants: Any) -> Any:
        return SimpleNamespace(root="/w", extra_path_grants=grants)

    async def test_one_that_lives_is_taken_up_and_one_that_is_gone_made_anew(
        self, openai: Any, client: Any, local: Local, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told: list[Any] = []
        monkeypatch.setattr(
            openai.RingfenceSandboxSession, "_set_start_state_preserved",
            lambda _self, lives, system: told.append((lives, system)), raising=False,
        )  # fmt: skip

        def state(id: str, *grants: Any) -> Any:
            return openai.RingfenceSandboxSessionState(
                sandbox_id=id, server="http://x", create={"tier": "strong"}, workspace_root_ready=True,
                manifest=self._manifest(*grants), assert_path_grants_rebound=lambda: told.append("rebound"),
            )  # fmt: skip

        lives, gone = state("sbx-0"), state("gone")
        await client.resume(lives)
        assert ([("find", "sbx-0", "http://x")], ["rebound", (True, True)]) == (client.made, told)
        assert ("sbx-0", True) == (lives.sandbox_id, lives.workspace_root_ready)
        await client.resume(gone)
        kind, options, server = client.made[-1]
        assert ("make", "strong", "http://x") == (kind, options["tier"], server)
        assert (False, False) == told[-1]
        assert ("sbx-1", False) == (gone.sandbox_id, gone.workspace_root_ready)
        changed = state("sbx-0", grant("/data", "/srv"))
        changed.server = None
        with pytest.raises(ValueError, match="/data changed"):
            await client.resume(changed)
        with pytest.raises(TypeError):
            await client.resume(SimpleNamespace())

    async def test_a_new_one_has_the_options_of_the_client_and_of_the_run(
        self, openai: Any, client: Any, local: Local
    ) -> None:
        options = SimpleNamespace(create={"network": "none"}, exposed_ports=(80,))
        session = await client.create(manifest=self._manifest(), options=options, snapshot="snap")
        _, made, _ = client.made[-1]
        assert ("light", "none") == (made["tier"], made["network"])
        state = session._inner.state
        assert ("sbx-1", (80,), ("snap", str(state.session_id))) == (
            state.sandbox_id, state.exposed_ports, state.snapshot,
        )  # fmt: skip
        assert {"tier": "light", "network": "none"} == state.create, "what it is resumed from"
        session._inner.shutdown = session._inner._shutdown_backend
        assert await client.delete(session) is session
        assert "terminated" == local.state
        assert not await session._inner.running()
        with pytest.raises(TypeError):
            await client.delete(SimpleNamespace(_inner=None))
