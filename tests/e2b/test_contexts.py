"""Contexts of E2B's interpreter in one process: whose they are, how many, where they begin and end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from ringfence.contexts.frames import argv_of
from ringfence.e2b import interpreter
from ringfence.e2b.notes import Notes
from ringfence.execs.run import Run
from ringfence.model.execs.exec import ExecRequest
from ringfence.sessions.live import Live
from ringfence.spool.order import OUT
from tests.e2b.here import Here

pytestmark = pytest.mark.anyone


@pytest.fixture
def here() -> Iterator[Here]:
    with ExitStack() as stack:
        yield Here(stack)


@pytest.fixture
def live(here: Here) -> Live:
    return here.live(notes=Notes(template="mine"))


@pytest.fixture
def home(here: Here, live: Live, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home directory as execs here name it, which are not below the sandbox's root."""
    found = Path(here.root(live)) / "home" / "user"
    monkeypatch.setattr(interpreter, "HOME", str(found))
    return found


class Box:
    """The interpreter of one sandbox."""

    def __init__(self, here: Here, live: Live) -> None:
        self.here, self.live = here, live
        self.headers = {
            "e2b-sandbox-id": live.sandbox_id,
            "e2b-sandbox-port": "49999",
            "x-access-token": here.shared.tokens.of(live),
        }

    async def __call__(self, method: str, path: str, form: Any = None) -> httpx.Response:
        body = {} if form is None else {"json": form}
        return await self.here.ask(method, path, headers=self.headers, **body)

    async def create(self, **form: Any) -> dict[str, str]:
        made = await self("POST", "/contexts", form)
        assert 200 == made.status_code, made.text
        found: dict[str, str] = made.json()
        return found

    async def execute(self, code: str, **form: Any) -> list[dict[str, Any]]:
        answered = await self("POST", "/execute", {"code": code, **form})
        assert 200 == answered.status_code, answered.text
        return [json.loads(line) for line in answered.text.splitlines()]

    async def said(self, code: str, **form: Any) -> str:
        lines = await self.execute(code, **form)
        return "".join(each["text"] for each in lines if each["type"] in ("stdout", "stderr"))

    async def listed(self) -> list[str]:
        return [each["id"] for each in (await self("GET", "/contexts")).json()]

    @property
    def running(self) -> list[Run]:
        return self.here.execs.running_of(self.live.sandbox_id)


@pytest.fixture
def box(here: Here, live: Live) -> Box:
    return Box(here, live)


async def test_a_context_keeps_its_id_and_directory_and_ends_when_it_is_removed(
    box: Box, home: Path
) -> None:
    made = await box.create(cwd=f"{home}/new/one", language="python")
    assert ("python", f"{home}/new/one") == (made["language"], made["cwd"])
    show = "import os; print(os.getcwd(), os.environ['E2B_TEMPLATE_ID'], globals().get('x'))"
    displays = "import sys; print(type(sys.meta_path[0]).__name__)"
    (first,) = box.running
    assert "_Finder\n" == await box.said(f"x = 1; {displays}", context_id=made["id"])
    assert f"{home}/new/one mine 1\n" == await box.said(show, context_id=made["id"])

    path = f"/contexts/{made['id']}"
    assert made == (await box("POST", f"{path}/restart")).json()
    (second,) = box.running
    assert (True, False) == (first.done.done(), second.done.done())
    assert f"{home}/new/one mine None\n" == await box.said(show, context_id=made["id"])
    assert 204 == (await box("DELETE", path)).status_code
    assert ([], True) == (box.running, second.done.done()), "it has ended once this is answered"
    for method, gone in (("DELETE", path), ("POST", f"{path}/restart")):
        assert 404 == (await box(method, gone)).status_code
    assert made["id"] not in await box.listed()


async def test_the_default_context_is_made_once_and_listed_as_it_is(box: Box, home: Path) -> None:
    assert ["python-default"] == await box.listed(), "there is no node in this sandbox"
    (form,) = (await box("GET", "/contexts")).json()
    assert str(home) == form["cwd"]
    for name in ("ruby-default", "bash-default"):
        assert 404 == (await box("POST", f"/contexts/{name}/restart")).status_code
    assert form == (await box("POST", f"/contexts/{form['id']}/restart")).json()
    assert 204 == (await box("DELETE", f"/contexts/{form['id']}")).status_code
    home.rmdir()  # as in a sandbox that another API has made
    said = await asyncio.gather(*(box.said(f"print({each})") for each in range(3)))
    assert ["0\n", "1\n", "2\n"] == said
    (run,) = box.running
    assert "python-default" == interpreter._id_of(run)
    (form,) = (await box("GET", "/contexts")).json()
    assert ("python-default", ".") == (form["id"], form["cwd"])
    both = {"code": "1", "context_id": form["id"], "language": "python"}
    assert 400 == (await box("POST", "/execute", both)).status_code
    assert 1 == len(box.running)
    assert box.here.is_idle()


async def test_contexts_are_bounded_in_each_sandbox_and_those_of_v1_are_not_told_of(
    here: Here, box: Box, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 100 == interpreter._MOST
    monkeypatch.setattr(interpreter, "_MOST", 1)
    asked = ExecRequest(tuple(argv_of("bash")), stream_stdin=True)
    of_v1 = here.execs.start(box.live, asked)
    other = Box(here, here.live(notes=Notes()))
    made = await box.create(language="bash", cwd=str(home))
    assert 429 == (await box("POST", "/contexts", {"cwd": str(home)})).status_code
    theirs = await other.create(language="bash", cwd=here.root(other.live))
    assert ["python-default", made["id"]] == await box.listed()
    assert 404 == (await box("DELETE", f"/contexts/{theirs['id']}")).status_code
    assert 404 == (await box("DELETE", "/contexts/-c")).status_code
    assert 2 == len(box.running)
    assert not of_v1.done.done()
    agent = {**box.headers, "e2b-sandbox-port": "49983"}
    listed = await here.ask("POST", "/process.Process/List", headers=agent, json={})
    assert {"processes": []} == listed.json(), "nor is any of them a client's process"
    assert 204 == (await box("DELETE", f"/contexts/{made['id']}")).status_code
    await box.create(language="bash", cwd=str(home))


async def test_a_language_needs_its_program_in_the_sandbox(
    here: Here, box: Box, home: Path
) -> None:
    refused = await box("POST", "/contexts", {"language": "ts", "cwd": str(home)})
    assert (501, True) == (refused.status_code, "needs Node.js" in refused.text)
    refused = await box("POST", "/execute", {"code": "1", "language": "r"})
    assert (501, True) == (refused.status_code, "'r' needs R" in refused.text)
    assert [] == box.running
    for directory in ("usr/local/bin", "usr/bin"):
        place = Path(here.root(box.live)) / directory
        place.mkdir(parents=True)
        (place / "node").touch()
        listed = (await box("GET", "/contexts")).json()
        assert ["python-default", "node-default"] == [each["id"] for each in listed]
        assert ["python", "javascript"] == [each["language"] for each in listed]
        (place / "node").unlink()
    (home / "file").touch()
    refused = await box("POST", "/contexts", {"cwd": f"{home}/file/x"})
    assert 400 == refused.status_code, refused.text


class SentError(Exception):
    """The cell itself was sent to a kernel."""


class Kernel:
    """A kernel whose cells are noted, and never run."""

    def __init__(self, language: str) -> None:
        self.argv, self.asked = argv_of(language), [{"do": ""}]
        self.spool = SimpleNamespace(tracks={OUT: SimpleNamespace(total=0)})

    def view(self) -> Any:
        return self

    async def send(self, _run: Any, line: bytes) -> None:
        self.asked.append(json.loads(line))
        if self.asked[-1]["do"] == "run":
            raise SentError


@pytest.mark.parametrize(
    ("language", "kernel", "code", "types"),
    [
        ("TypeScript", "node", "  1", "typescript"), ("ts", "node", "  1", "typescript"),
        ("tslab", "node", "  1", "typescript"), ("JS", "node", "  1", True), ("py", "python", "1", None),
        ("bash", "bash", "  1", None),
    ],
)  # fmt: skip
async def test_a_cell_is_of_typescript_where_it_is_named_so(
    monkeypatch: pytest.MonkeyPatch, language: str, kernel: str, code: str, types: Any
) -> None:
    found = Kernel(kernel)

    async def default(_call: Any, wanted: str) -> Kernel:
        assert kernel == wanted
        return found

    async def form() -> dict[str, Any]:
        return {"code": "  1", "language": language, "env_vars": {"A": "1"}}

    monkeypatch.setattr(interpreter, "_default", default)
    call: Any = SimpleNamespace(form=form, service=SimpleNamespace(sending=found))
    with pytest.raises(SentError):
        await interpreter.execute(call)
    assert ["", "hide", "run"] == [each["do"] for each in found.asked]
    cell: dict[str, Any] = found.asked[-1]
    assert (code, types, False) == (cell["code"], cell.get("types"), cell["input"])


def test_variables_of_one_cell_of_r_are_set_and_taken_back() -> None:
    """A variable that was not set is NA, and a name without backticks may not begin with `_`."""
    (before,), (after,) = interpreter._around("r", {"NEW": 'a"b\\', "_OLD": "é"})
    assert (
        '.__e2b <- Sys.getenv(c("NEW", "_OLD"), NA, names = TRUE);'
        ' Sys.setenv(`NEW` = "a\\"b\\\\", `_OLD` = "é")'
    ) == before
    assert (
        "for (.k in names(.__e2b)) if (is.na(.__e2b[[.k]])) Sys.unsetenv(.k) else"
        " do.call(Sys.setenv, as.list(.__e2b[.k])); rm(.__e2b, .k)"
    ) == after


def test_properties_of_one_cell_of_java_are_set_and_taken_back() -> None:
    (before,), (after,) = interpreter._around("java", {"NEW": 'a"b\\', "OLD": "é"})
    assert (
        "java.util.Map<String, String> __e2b = new java.util.HashMap<>();\n"
        'for (String k : new String[] {"NEW", "OLD"}) __e2b.put(k, System.getProperty(k));\n'
        'System.setProperty("NEW", "a\\"b\\\\");\n'
        'System.setProperty("OLD", "\\u00e9");'
    ) == before
    assert (
        "__e2b.forEach((k, v) -> { if (v == null) System.clearProperty(k);"
        " else System.setProperty(k, v); });"
    ) == after
