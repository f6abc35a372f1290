"""The code interpreter as E2B's SDK calls it."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from ringfence.e2b import interpreter
from tests.api.conftest import Daemon
from tests.e2b.conftest import Box, Client, MakeClient

pytestmark = pytest.mark.anyone

SCIENCE = Path("/usr/local/lib/ringfence-tests/science")  # tools/needs.sh
PORT = {"E2b-Sandbox-Port": "49999"}


def _execute(box: Box, code: str, **form: Any) -> list[dict[str, Any]]:
    answer = box.call("POST", "/execute", json={"code": code, **form}, headers=PORT)
    assert 200 == answer.status_code, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def _of(lines: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in lines if each["type"] == kind]


@pytest.mark.full
def test_a_cell_tells_output_results_and_its_count(box: Box) -> None:
    lines = _execute(box, "x = 20\nprint('out')\nx + 1")

    assert "out\n" == "".join(each["text"] for each in _of(lines, "stdout"))
    (result,) = _of(lines, "result")
    assert ("21", True) == (result["text"], result["is_main_result"])
    assert 1 == _of(lines, "number_of_executions")[0]["execution_count"]
    assert "20" == _of(_execute(box, "x"), "result")[0]["text"]
    (error,) = _of(_execute(box, "1/0"), "error")
    assert ("ZeroDivisionError", "division by zero") == (error["name"], error["value"])


def test_values_come_by_their_type(box: Box) -> None:
    code = "class V:\n _repr_html_ = lambda s: '<b>'\n _repr_json_ = lambda s: {'a': [1]}\nV()"
    (result,) = _of(_execute(box, code), "result")

    assert ("<b>", {"a": [1]}) == (result["html"], result["json"])


@pytest.mark.skipif(not shutil.which("node"), reason="node is not installed")
def test_an_object_shows_itself_by_the_name_of_e2bs_kernel(box: Box) -> None:
    code = """
       {
      [Symbol.for("Jupyter.display")]() {
        return { "text/plain": "Hello", "text/html": "<h1>Hello</h1>" }
      }
    }
    """
    (result,) = _of(_execute(box, code, language="tslab"), "result")

    assert ("Hello", "<h1>Hello</h1>") == (result["text"], result["html"])


@pytest.mark.full
@pytest.mark.skipif(not (SCIENCE / "matplotlib").exists(), reason=f"no matplotlib in {SCIENCE}")
def test_the_chart_of_a_plot_that_fails(client: Client) -> None:
    """E2B's own test of a scale of dates plots ten dates against a hundred values."""
    code = (
        f"import sys; sys.path.append({str(SCIENCE)!r})\n"
        "import datetime, matplotlib.pyplot as plt\n"
        "plt.plot([datetime.date(2023, 9, 1)] * 10, range(100))"
    )
    box = client.create()  # its own: other tests import modules of these names
    lines = _execute(box, code)
    client.api("DELETE", f"/sandboxes/{box.id}")

    assert "ValueError" == _of(lines, "error")[0]["name"]
    chart = _of(lines, "result")[0]["chart"]
    assert ("line", "datetime", "linear") == (chart["type"], chart["x_scale"], chart["y_scale"])


@pytest.mark.parametrize("language", ["python", "bash"])
def test_variables_of_one_cell_are_taken_back(box: Box, language: str) -> None:
    show = {"python": "import os; print(os.environ.get('GREETING'), os.environ.get('NEW'))"}
    show["bash"] = "echo $GREETING ${NEW:-None}"
    env = {"GREETING": "it's", "NEW": "1"}
    inside = _execute(box, show[language], language=language, env_vars=env)
    after = _execute(box, show[language], language=language)

    assert "it's 1" == _of(inside, "stdout")[0]["text"].strip()
    assert "hi None" == _of(after, "stdout")[0]["text"].strip()


def test_contexts_are_apart_and_keep_their_id(box: Box) -> None:
    made = box.call("POST", "/contexts", json={"cwd": "/tmp"}, headers=PORT).json()
    assert ("python", "/tmp") == (made["language"], made["cwd"])
    _execute(box, "y = 1", context_id=made["id"])
    assert _of(_execute(box, "y"), "error")

    again = box.call("POST", f"/contexts/{made['id']}/restart", headers=PORT)
    assert made == again.json()
    assert _of(_execute(box, "y", context_id=made["id"]), "error")
    listed = box.call("GET", "/contexts", headers=PORT).json()
    assert made in listed
    path = f"/contexts/{made['id']}"
    gone = [box.call("DELETE", path, headers=PORT).status_code for _ in range(2)]
    assert [204, 404] == gone


def test_a_client_that_leaves_interrupts_its_cell(box: Box) -> None:
    form = {"code": "import time\nfor _ in range(600): time.sleep(0.1)"}
    with pytest.raises(httpx.ReadTimeout):
        box.call("POST", "/execute", json=form, headers=PORT, timeout=0.5)
    began = time.monotonic()

    assert "2" == _of(_execute(box, "1 + 1"), "result")[0]["text"]
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("language", ["ruby", "deno"])
def test_a_language_that_is_missing_is_named(box: Box, language: str) -> None:
    answer = box.call("POST", "/execute", json={"code": "1", "language": language}, headers=PORT)

    assert 501 == answer.status_code
    assert f"'{language}'" in answer.json()["message"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("language", "program", "greeting", "new", "shown", "unset"),
    [
        ("r", "Rscript", "Sys.getenv('GREETING')", "Sys.getenv('NEW', NA)", '[1] "{}"', "[1] NA"),
        (
            "java",
            "jshell",
            'System.getProperty("GREETING")',
            'System.getProperty("NEW")',
            "{}",
            "null",
        ),
    ],
)
def test_r_and_java_take_back_the_variables_of_one_cell(
    client: Client, language: str, program: str, greeting: str, new: str, shown: str, unset: str
) -> None:
    box = client.create(envVars={"GREETING": "hi"})  # a fork copies no Java
    if not shutil.which(program):
        answer = box.call(
            "POST", "/execute", json={"code": "1", "language": language}, headers=PORT
        )
        assert 501 == answer.status_code
        assert f"'{language}' needs" in answer.text
        assert "use a template or an image with it" in answer.text
        return
    env = {"GREETING": 'it\'s "é" \\', "NEW": "1"}

    def text(code: str, **more: Any) -> str:
        found: str = _of(_execute(box, code, language=language, **more), "result")[0]["text"]
        return found

    assert shown.format("hi") == text(greeting)
    assert "é" in text(greeting, env_vars=env)
    assert shown.format("1") == text(new, env_vars=env)
    assert (shown.format("hi"), unset) == (text(greeting), text(new))
    client.api("DELETE", f"/sandboxes/{box.id}")


def test_println_of_java_comes_as_e2b_sends_it() -> None:
    event = {"type": "stdout", "text": "Hello\n"}

    assert ["Hello", "\n"] == [each["text"] for each in interpreter._translated(event, "java")]
    assert ["Hello\n"] == [each["text"] for each in interpreter._translated(event, "python")]


def test_a_token_is_needed(client: Client, box: Box) -> None:
    named = {"E2b-Sandbox-Id": box.id, **PORT}
    for headers in (named, {**named, "X-Access-Token": "0" * 64}):
        assert 401 == client.http.get("/contexts", headers=headers).status_code
    traffic = {**named, "E2B-Traffic-Access-Token": box.made["trafficAccessToken"]}
    assert 200 == client.http.get("/contexts", headers=traffic).status_code


def test_javascript_keeps_variables_and_takes_back_those_of_one_cell(box: Box) -> None:
    show = "`${process.env.GREETING} ${process.env.NEW}`"
    env = {"GREETING": "it's", "NEW": "1"}
    _execute(box, "const kept = 20", language="js")

    assert "it's 1" == _of(_execute(box, show, language="js", env_vars=env), "result")[0]["text"]
    assert "hi undefined" == _of(_execute(box, show, language="js"), "result")[0]["text"]
    assert "21" == _of(_execute(box, "kept + 1", language="javascript"), "result")[0]["text"]


def test_annotations_of_typescript_are_left_out(box: Box) -> None:
    cells = {
        "const m: string = 'a: b'; console.log(m)": "a: b\n",
        "function sub(x: number, y?: Array<number>, ...z: any[]): number {\n return x - 1\n}\n"
        "console.log(sub(3))": "2\n",
        "let both: string | null = null\nconst f = (a: number = 1): number => a\n"
        "console.log(both, f(), f(5))": "null 1 5\n",
        "await 0; const o = { b: true ? 'x' : 'y' }; console.log(`${o.b}: string`)": "x: string\n",
        "await 0; if (true) { for (const [k] of [[1]]) { console.log('(x: number) {') } }": (
            "(x: number) {\n"
        ),
    }

    for code, shown in cells.items():
        lines = _execute(box, code, language="ts")
        assert [shown] == [each["text"] for each in _of(lines, "stdout")], lines
    assert "SyntaxError" == _of(_execute(box, "const = 1", language="ts"), "error")[0]["name"]


@pytest.mark.skipif(not shutil.which("node"), reason="node is not installed")
def test_typescript_that_is_code_runs_where_node_knows_it(box: Box) -> None:
    knows = "typeof require('module').stripTypeScriptTypes === 'function'"
    asked = subprocess.run(["node", "-p", knows], capture_output=True, text=True, check=True)
    code = (
        "interface Named { name: string }\nenum Size { Small, Large }\n"
        "class Box implements Named { name = 'b'; constructor(private size: Size) {}\n"
        " get() { return this.size as number } }\nnew Box(Size.Large).get()"
    )
    lines = _execute(box, code, language="ts")

    if "true" == asked.stdout.strip():
        assert ("1", []) == (_of(lines, "result")[0]["text"], _of(lines, "stderr"))
        _execute(box, "function same<T>(x: T): T { return x }", language="ts")
        called = _execute(box, "same<number>(3)", language="ts")
        assert "3" == _of(called, "result")[0]["text"]
    else:
        (error,) = _of(lines, "error")
        assert "SyntaxError" == error["name"]
        assert "needs Node.js 22.13 or newer" in error["value"]
    plain = _of(_execute(box, "const = 1", language="js"), "error")[0]["value"]
    assert "Node.js" not in plain


def test_default_contexts_are_listed_before_they_are_used(client: Client) -> None:
    box = client.create()
    listed = box.call("GET", "/contexts", headers=PORT).json()
    assert ["python", "javascript"] == [each["language"] for each in listed]

    lines = _execute(box, "'quoted'", context_id=listed[0]["id"])
    assert ("quoted", 1) == (
        _of(lines, "result")[0]["text"],
        _of(lines, "number_of_executions")[0]["execution_count"],
    )
    made = box.call("POST", "/contexts", json={"cwd": "new/one"}, headers=PORT).json()
    assert made == box.call("GET", "/contexts", headers=PORT).json()[-1]
    assert "/home/user/new/one" == made["cwd"]
    client.api("DELETE", f"/sandboxes/{box.id}")


_MODULES = {
    "IPython/__init__.py": "",
    "IPython/core/__init__.py": "",
    "IPython/core/display_functions.py": "def display(*values, raw=False): print(values)\n",
    "IPython/display.py": "from IPython.core.display_functions import *\n",
    "pandas.py": "import json\nclass DataFrame:\n def to_json(self, **options):\n"
    "  return json.dumps({'columns': ['a'], 'data': [[1], [2]]})\n",
    "PIL/__init__.py": "",
    "PIL/Image.py": "class Image:\n def save(self, target): open(target, 'w').close()\n"
    " def _repr_png_(self): return b'png'\n",
}


def test_libraries_show_what_they_show_in_e2b(box: Box) -> None:
    for path, text in _MODULES.items():
        box.call("POST", "/files", params={"path": f"libraries/{path}"}, content=text.encode())
    _execute(box, "import sys; sys.path.insert(0, '/home/user/libraries')")
    raw = "  from IPython.display import display\n  display({'text/latex': 'x'}, raw=True)"
    frame = "import pandas\npandas.DataFrame()"
    image = "from PIL import Image\nImage.Image().save('a.png')\nImage.Image().show()"

    assert [{"latex": "x"}] == _values(box, raw)
    assert {"a": [1, 2]} == _values(box, frame)[0]["data"]
    assert ["cG5n", "cG5n"] == [each["png"] for each in _values(box, image)]


def _values(box: Box, code: str) -> list[dict[str, Any]]:
    left_out = ("type", "is_main_result")
    results = _of(_execute(box, code), "result")
    return [{k: v for k, v in each.items() if k not in left_out} for each in results]


def test_the_end_of_a_sandbox_breaks_the_stream_of_a_cell(client: Client) -> None:
    box = client.create()
    asked = {"code": "print(1, flush=True)\nimport time; time.sleep(60)"}

    def follow() -> None:
        headers = {**box.headers, **PORT}
        with box.http.stream("POST", "/execute", json=asked, headers=headers) as answer:
            for line in answer.iter_lines():
                if "stdout" in line:
                    client.api("DELETE", f"/sandboxes/{box.id}")

    with pytest.raises(httpx.RemoteProtocolError):
        follow()
    assert 502 == box.call("GET", "/health").status_code, "the SDKs ask at once"


@pytest.mark.full
def test_a_fork_has_the_variables_and_processes(client: Client, box: Box) -> None:
    """A context under its id, and a process under its pid and tag; each goes on by itself."""
    made = box.call("POST", "/contexts", json={"cwd": "/tmp"}, headers=PORT).json()
    _execute(box, "import random; random.seed(1); x = [1]", context_id=made["id"])
    script = "while read -r line; do echo $line >> said; done"
    process = {"cmd": "/bin/bash", "args": ["-c", script]}
    with pytest.raises(httpx.ReadTimeout):  # the client leaves, and the process stays
        box.stream(
            "/process.Process/Start",
            {"process": process, "stdin": True, "tag": "reader"},
            timeout=1,
        )

    answer = client.api("POST", f"/sandboxes/{box.id}/fork", json={"count": 2, "timeout": 60})

    assert 201 == answer.status_code, answer.text
    forks = [Box(client.http, each["sandbox"]) for each in answer.json()]
    listed = [each.rpc("/process.Process/List", {}).json()["processes"] for each in (box, *forks)]
    assert [[("reader", listed[0][0]["pid"])]] * 3 == [
        [(each["tag"], each["pid"]) for each in found] for found in listed
    ]
    drawn = set()
    for number, each in enumerate((box, *forks)):
        code = f"x.append({number}); print(x, random.random())"
        (said,) = _of(_execute(each, code, context_id=made["id"]), "stdout")
        text, _, random = said["text"].strip().rpartition(" ")
        drawn.add(random)
        assert f"[1, {number}]" == text
        given = {"stdin": base64.b64encode(b"line\n").decode()}
        form = {"process": {"tag": "reader"}, "input": given}
        assert 200 == each.rpc("/process.Process/SendInput", form).status_code
    assert 3 == len(drawn)
    for each in forks:
        assert "exit status 0" in str(each.run("until grep -q line said; do sleep 0.01; done"))
        assert 204 == client.api("DELETE", f"/sandboxes/{each.id}").status_code


def test_a_sandbox_that_another_api_made_has_an_interpreter(
    daemon: Daemon, make_client: MakeClient
) -> None:
    """Without the home of E2B's user it begins where the sandbox's programs do."""
    admin = make_client(scope="admin")
    with daemon.client() as local:
        made = local.post("/v1/sandboxes", json={}).raise_for_status().json()
        shown = admin.api("POST", f"/sandboxes/{made['id']}/connect", json={"timeout": 60})
        assert shown.is_success, shown.text
        box = Box(admin.http, shown.json())
        argv = {"argv": ["pwd"], "wait": True}
        ran = local.post(f"/v1/sandboxes/{made['id']}/execs", json=argv).raise_for_status().json()
        lines = _execute(box, "import os; os.getcwd()")
        local.delete(f"/v1/sandboxes/{made['id']}")

    assert ran["result"]["stdout"].strip() == _of(lines, "result")[0]["text"]
