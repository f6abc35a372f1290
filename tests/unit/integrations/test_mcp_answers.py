"""What an MCP client is told: of processes, of commands that race, of files and of cells, within bounds."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from tests.frameworks import adapter

from ringfence.errors import ExecError, ResourceExhausted, RingfenceError
from ringfence.model.base.ids import derived_id
from ringfence.model.execs.exec import ExecResult

pytestmark = pytest.mark.anyone


class ToolError(Exception):
    """The SDK's."""


class Kept:
    """A content of the SDK's, which keeps what it is made of."""

    def __init__(self, **content: Any) -> None:
        self.__dict__ |= content


_CONTENTS = (
    *("BlobResourceContents", "CallToolResult", "EmbeddedResource", "ImageContent", "TextContent"),
    *("TextResourceContents", "ToolAnnotations"),
)
FRAMEWORKS: dict[str, dict[str, Any]] = {
    "mcp": {},
    "mcp.server": {},
    "mcp.server.mcpserver": {},
    "mcp.server.mcpserver.exceptions": {"ToolError": ToolError},
    "mcp.server.mcpserver.tools": {},
    "mcp.server.mcpserver.tools.base": {},
    "mcp_types": {name: type(name, (Kept,), {}) for name in _CONTENTS},
    "mcp_types.version": {"MODERN_PROTOCOL_VERSIONS": ()},
}


@pytest.fixture(scope="module")
def modules() -> Iterator[Any]:
    """Those of the adapter, by their names."""
    with ExitStack() as stack:
        names = ("results", "watching", "racing", "tools")
        found = {each: stack.enter_context(adapter(f"mcp.{each}", FRAMEWORKS)) for each in names}
        yield SimpleNamespace(**found)


class Stream:
    """A stream of which pieces arrive; `None` is a wait in vain."""

    def __init__(self, *pieces: bytes | None) -> None:
        self.pieces, self.waited = list(pieces), list[float]()

    async def read(self, wait_s: float) -> bytes:
        self.waited.append(wait_s)
        piece = self.pieces.pop(0) if self.pieces else b""
        if piece is None:
            raise TimeoutError
        return piece


class Process:
    def __init__(self, id: str = "e1", *, running: bool = True) -> None:
        self.id, self.running = id, running
        self.stdout, self.stderr = Stream(), Stream()
        self.result = ExecResult(exit_code=3)

    async def wait(self) -> ExecResult:
        return self.result


def held_of(**processes: Process) -> Any:
    return SimpleNamespace(name="its name", processes=dict(processes), sandbox=None)


class TestProcesses:
    def test_each_has_a_name_of_its_own_and_only_running_ones_count(self, modules: Any) -> None:
        held = held_of()
        remember, most = modules.watching.remember, modules.watching.MOST_PROCESSES
        made: list[Any] = [Process() for _ in range(most)]
        assert [f"p{i + 1}" for i in range(most)] == [remember(held, each) for each in made]
        with pytest.raises(ResourceExhausted, match=f"{most} processes") as refusal:
            remember(held, Process())
        assert "stop one" in str(refusal.value.hint)
        assert most == len(held.processes)
        made[0].running = False
        assert f"p{most + 1}" == remember(held, Process()), "a name is not used again"
        assert {"p1", f"p{most + 1}"} <= {*held.processes}, "one that ended can still be looked at"

    def test_one_that_runs_is_waited_for_and_one_that_ended_is_heard_out(
        self, modules: Any
    ) -> None:
        process = Process()
        held = held_of(p1=process)
        process.stdout = Stream(b"a", b"b", None)
        process.stderr = Stream(b"c", None)
        found = asyncio.run(modules.watching.look(held, "p1", 5.0))
        assert ("its name", "p1", True) == (found.sandbox, found.process, found.running)
        assert ("ab", "c", None) == (found.stdout, found.stderr, found.exit_code)
        assert [5.0, 0, 0] == process.stdout.waited, "once there is something, for no more"
        process.running = False
        process.stdout = Stream(b"x", None, b"last")
        process.stderr = Stream(None, b"words")
        found = asyncio.run(modules.watching.look(held, "p1", 5.0))
        assert ("xlast", "words", False, 3) == (
            found.stdout, found.stderr, found.running, found.exit_code,
        )  # fmt: skip
        assert 5.0 not in process.stdout.waited, "nothing more comes of it"

    def test_news_are_bounded_and_the_rest_comes_next(self, modules: Any) -> None:
        piece = b"x" * (modules.watching._NEWS_BYTES // 2)
        process = Process()
        process.stdout = Stream(piece, piece, b"rest")
        found = asyncio.run(modules.watching.look(held_of(p1=process), "p1", 0.0))
        assert modules.watching._NEWS_BYTES == len(found.stdout)
        assert [b"rest"] == process.stdout.pieces

    def test_an_unknown_one_is_refused_with_those_there_are(self, modules: Any) -> None:
        for held, there in ((held_of(p1=Process(), p2=Process()), "p1, p2"), (held_of(), "none")):
            with pytest.raises(RingfenceError) as refusal:
                asyncio.run(modules.watching.look(held, "p9", 0.0))
            assert f"there are {there}" == refusal.value.hint

    def test_the_last_line_is_what_is_told_while_something_runs(
        self, modules: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        last: list[str] = []
        keep = modules.watching.jailer_of(last)
        for data in (b"one\ntwo\n", b"\n", b"  \n"):
            keep(data)
        assert ["two"] == last
        keep(b"\xff" + b"y" * 500)
        assert [200] == [len(each) for each in last]
        last[:] = ["a line"]
        monkeypatch.setattr(modules.watching, "_EVERY_S", 0.0)

        async def scene() -> None:
            told = asyncio.Event()
            texts: list[str] = []

            async def report_progress(_elapsed: float, _total: None, text: str) -> None:
                texts.append(text)
                told.set()

            ctx: Any = SimpleNamespace(report_progress=report_progress)

            async def fails() -> None:
                async with modules.watching.progress(ctx, "running", last):
                    await told.wait()
                    raise ExecError("as it is")

            with pytest.raises(ExecError, match="as it is"):
                await fails()
            assert "running: a line" == texts[0]
            last.clear()
            told.clear()
            texts.clear()
            async with modules.watching.progress(ctx, "running", last):
                await told.wait()
            assert "running" == texts[0]
            count = len(texts)
            await asyncio.sleep(0)
            assert count == len(texts), "nobody tells of one that has ended"

        asyncio.run(scene())


class Branch:
    """A fork in which commands end as they say."""

    def __init__(self, name: str, **outcomes: Any) -> None:
        self.id, self.outcomes = name, outcomes
        self.state, self.asked = "running", list[Any]()
        self.fork_report: Any = None

    async def exec(self, argv: Any, **how: Any) -> ExecResult:
        self.asked.append((argv[-1], how))
        found = self.outcomes[argv[-1]]
        if found is None:
            await asyncio.Event().wait()
        if isinstance(found, Exception):
            raise found
        return ExecResult(stdout=argv[-1].encode(), exit_code=found)

    async def terminate(self) -> None:
        self.state = "terminated"

    async def process(self, id: str) -> str:
        return f"{id} in {self.id}"

    async def fork(self, count: int) -> list[Branch]:
        self.branches = [Branch(f"b{i}", **self.outcomes) for i in range(count)]
        for each in self.branches:
            each.fork_report = self.fork_report
        return [*self.branches]


class TestRaces:
    def race(self, modules: Any, held: Any, *commands: str) -> Any:
        return asyncio.run(modules.racing.race(held, commands, 7.0))

    def test_the_first_to_succeed_is_the_sandbox_from_then_on(self, modules: Any) -> None:
        held = held_of(p1=Process("e1"), p2=Process("e2"), p3=Process("e3"))
        held.sandbox = old = Branch("old", fails=1, wins=0, hangs=None)
        old.fork_report = SimpleNamespace(processes={"e1", derived_id("e3", "b1")})
        found = self.race(modules, held, "fails", "wins", "hangs")
        assert ("its name", 1) == (found.sandbox, found.winner)
        assert "b1" == held.sandbox.id
        assert ["terminated", "running", "terminated"] == [each.state for each in old.branches]
        assert "terminated" == old.state
        assert {"p1": "e1 in b1", "p3": f"{derived_id('e3', 'b1')} in b1"} == held.processes
        assert "" == found.outputs[2], "it was ended"
        assert found.outputs[0].startswith("fails")
        [(_, how)] = old.branches[0].asked
        assert (7.0, modules.racing._OUTPUT_BYTES) == (how["timeout_s"], how["max_output_bytes"])
        assert "[command 1 won" in found.text()
        assert "[sandbox: its name]" == found.text().splitlines()[-1]

    def test_where_none_succeeds_it_is_as_it_was(self, modules: Any) -> None:
        held = held_of(p1=Process())
        held.sandbox = old = Branch("old", fails=1)
        found = self.race(modules, held, "fails", "fails")
        assert found.winner is None
        assert ("running", {"terminated"}) == (old.state, {each.state for each in old.branches})
        assert held.sandbox is old
        assert {"p1"} == {*held.processes}
        assert "[no command exited with 0" in found.text()
        assert "[command 1]\nfails" in found.text()

    def test_a_sandbox_that_fails_meanwhile_is_told_as_it_is(self, modules: Any) -> None:
        held = held_of()
        held.sandbox = old = Branch("old", breaks=ExecError("lost"), hangs=None)
        with pytest.raises(ExecError, match="lost"):
            self.race(modules, held, "hangs", "breaks")
        assert held.sandbox is old
        assert {"terminated"} == {each.state for each in old.branches}

    def test_the_old_sandbox_ends_also_where_its_processes_are_not_found_in_the_new(
        self, modules: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def lost(_branch: Branch, _id: str) -> None:
            raise ExecError("lost")

        monkeypatch.setattr(Branch, "process", lost)
        held = held_of(p1=Process("e1"))
        held.sandbox = old = Branch("old", wins=0)
        old.fork_report = SimpleNamespace(processes={"e1"})
        with pytest.raises(ExecError, match="lost"):
            self.race(modules, held, "wins")
        assert ("b0", "running", "terminated") == (held.sandbox.id, held.sandbox.state, old.state)
        assert {} == held.processes, "those of the old one have ended"


class TestAnswers:
    def test_how_a_command_ended(self, modules: Any) -> None:
        of = modules.results.CommandAnswer.of
        plain = of("s", ExecResult(stdout=b"out\n", stderr=b"err\n", exit_code=0))
        assert "out\nerr\n[sandbox: s]" == plain.text()
        assert "[no output]" == of("", ExecResult(exit_code=0)).text()
        failed = of("", ExecResult(exit_code=2))
        assert "[exit code 2]" == failed.text()
        killed = of("", ExecResult(signal=9, oom_killed=True))
        assert (137, True) == (killed.exit_code, "memory was used up" in killed.note)
        late = of("", ExecResult(signal=9, timed_out=True, duration_s=2.0))
        assert (124, True, True) == (late.exit_code, late.timed_out, "2.0 s" in late.note)
        cut = of("", ExecResult(exit_code=0, stdout_dropped_bytes=3, stderr_dropped_bytes=4))
        assert cut.note.startswith("7 bytes from the middle")

    def test_a_cell_is_cut_in_its_middle_and_says_why_it_ended(self, modules: Any) -> None:
        def cell(**changes: Any) -> Any:
            facts: dict[str, Any] = {
                "stdout": "", "stderr": "", "results": [], "error": None, "dropped_bytes": 0,
                "timed_out": False,
            }  # fmt: skip
            made = SimpleNamespace(**{**facts, **changes})
            return modules.results.CommandAnswer.of_cell("s", made, 10)

        texts = [SimpleNamespace(text="a", png=None), SimpleNamespace(text="b", png=b"x")]
        texts.append(SimpleNamespace(text=None, png=None))
        assert ("a", 0) == (cell(results=texts).result, cell(results=texts).exit_code)
        assert "0123456789" == cell(stdout="0123456789").stdout
        assert "01234\n[1 characters are left out here]\n6789x" == cell(stdout="0123456789x").stdout
        error = SimpleNamespace(name="E", value="v", traceback="trace")
        found = cell(error=error, stderr="said", dropped_bytes=5)
        assert ("said\ntrace"[:5], 1) == (found.stderr[:5], found.exit_code)
        assert "5 bytes of output were dropped" == found.note, "the trace says the rest"
        error.traceback = ""
        assert "E: v" == cell(error=error).note
        error.traceback = "trace"
        late = cell(error=error, timed_out=True)
        assert (124, "E: v", True) == (late.exit_code, late.note, late.timed_out)

    def test_files_and_directories(self, modules: Any) -> None:
        answer = modules.results.FileAnswer
        assert "text" == answer(path="/a", content="text", size_bytes=4).text()
        part = answer(path="/a", content="te", size_bytes=4, next_offset=2).text()
        assert "te\n[4 bytes in all; the rest from offset 2]" == part
        assert "[base64, 4 bytes]" in answer(path="/a", encoding="base64", size_bytes=4).text()
        entry = modules.results.Entry

        def info(**facts: Any) -> Any:
            usual = {"name": "n", "kind": "file", "size_bytes": 7, "link_target": None}
            return entry.of(SimpleNamespace(**{**usual, **facts}))

        assert "n 7" == info().line()
        assert "n/" == info(kind="directory").line()
        assert "n -> t" == info(kind="symlink", link_target="t").line()
        assert "n (fifo) 0" == info(kind="fifo").line()
        listed = modules.results.ListAnswer(path="/", entries=[info()], left_out=2)
        assert "n 7\n[2 more entries: list a directory below]" == listed.text()
        assert "[empty]" == modules.results.ListAnswer(path="/", entries=[]).text()
        assert "/a: 4 bytes" == modules.results.ChangeAnswer(path="/a", size_bytes=4).text()
        ended = modules.results.ProcessAnswer(
            process="p1", running=False, stdout="o\n", exit_code=1
        )
        assert "o\n[p1 ended with exit code 1]" == ended.text()
        assert "[p1 runs]" == modules.results.ProcessAnswer(process="p1", running=True).text()


class TestContents:
    def test_text_is_told_from_bytes_and_a_cut_character_is_the_next_parts(
        self, modules: Any
    ) -> None:
        readable = modules.tools._readable
        assert ("aé", "utf-8", 3) == readable("aé".encode())
        assert ("a", "utf-8", 1) == readable("aé".encode()[:2], is_whole=False)
        whole = readable("aé".encode()[:2])
        assert (base64.b64encode("aé".encode()[:2]).decode(), "base64", 2) == whole
        assert "base64" == readable(b"a\xffbcdef", is_whole=False)[1]
        assert "base64" == readable(b"\xff", is_whole=False)[1], "else no part would ever end"

    def test_images_are_known_by_their_first_bytes(self, modules: Any) -> None:
        known = {
            b"\x89PNG\r\n\x1a\nx": "image/png", b"\xff\xd8\xffx": "image/jpeg", b"GIF89ax": "image/gif",
            b"RIFF1234WEBPx": "image/webp", b"RIFF1234WAVEx": "", b"<svg/>": "", b"": "",
        }  # fmt: skip
        assert known == {data: modules.tools._image_type(data) for data in known}
        image = modules.tools._image(b"x", "image/png")
        assert ("image/png", base64.b64encode(b"x").decode()) == (image.mime_type, image.data)

    def test_what_is_written_is_text_or_base64_and_nothing_else(self, modules: Any) -> None:
        of = modules.tools._bytes_of
        assert ("é".encode(), b"x") == (of("é", "utf-8"), of("eA==", "base64"))
        for content, encoding in (("eA=", "base64"), ("e A==", "base64"), ("x", "latin-1")):
            with pytest.raises(modules.tools.ToolError):
                of(content, encoding)

    def test_outputs_are_fetched_as_far_as_they_fit(self, modules: Any) -> None:
        most = modules.tools.FETCH_BYTES
        contents = {
            "/o/a.png": b"\x89PNG\r\n\x1a\n",
            "/o/b": b"text",
            "/o/c": b"\xff" * (most - 10),
        }

        def info(path: str, kind: str = "file", size: int | None = None) -> Any:
            size = len(contents.get(path, b"")) if size is None else size
            return SimpleNamespace(path=path, kind=kind, size_bytes=size)

        async def listed(_path: str) -> Any:
            return [info("/o/d", "directory"), *(info(each) for each in contents)]

        async def read(path: str, max_bytes: int) -> Any:
            return contents[path][:max_bytes]

        held = held_of()
        held.sandbox = SimpleNamespace(files=SimpleNamespace(list=listed, read=read))

        class Serving:
            async def __aenter__(self) -> Any:
                return held

            async def __aexit__(self, *_exc: object) -> None:
                pass

        tools = modules.tools.Tools(SimpleNamespace(serving=lambda *_: Serving()))
        found = asyncio.run(tools.fetch_outputs(None))
        assert "sandbox: its name" == found[0].text
        assert "/o/d: not fetched (directory, 0 bytes)" == found[1].text
        assert ("/o/a.png", "image/png") == (found[2].text, found[3].mime_type)
        assert ("text", "ringfence:///o/b") == (found[4].resource.text, found[4].resource.uri)
        assert f"/o/c: not fetched (file, {most - 10} bytes)" == found[5].text, (
            "beside those before"
        )

    def test_a_text_is_replaced_where_it_is_meant(self, modules: Any) -> None:
        content, written = [b"a b a"], list[Any]()

        async def read(_path: str) -> bytes:
            return content[0]

        async def stat(_path: str, follow: bool) -> Any:
            assert follow
            return SimpleNamespace(mode=0o755)

        async def write(path: str, data: bytes, mode: int) -> None:
            written.append((path, data, mode))

        held = held_of()
        files = SimpleNamespace(read=read, stat=stat, write=write)
        held.sandbox = SimpleNamespace(files=files)

        class Serving:
            async def __aenter__(self) -> Any:
                return held

            async def __aexit__(self, *_exc: object) -> None:
                pass

        tools = modules.tools.Tools(SimpleNamespace(serving=lambda *_: Serving()))
        for old in ("x", "a"):
            with pytest.raises(modules.tools.ToolError, match="times"):
                asyncio.run(tools.edit_file(None, "/f", old, "new"))
        assert [] == written
        asyncio.run(tools.edit_file(None, "/f", "b", "B"))
        answer = asyncio.run(tools.edit_file(None, "/f", "a", "A", every=True))
        assert [("/f", b"a B a", 0o755), ("/f", b"A b A", 0o755)] == written
        assert ("its name", 5) == (answer.sandbox, answer.size_bytes)
