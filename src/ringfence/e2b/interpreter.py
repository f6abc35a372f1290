"""E2B's code interpreter on our contexts. A context's id is a part of its command, and so outlives all."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import shlex
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from starlette.responses import JSONResponse, Response

from ..api.bodies import SHORT, loads
from ..api.streaming.breaking import BreakableResponse, BrokenOff
from ..api.streaming.cells import Events, begin, cell_offset, new_cell, sending_of
from ..api.streaming.runs import wait_for
from ..api.thread_pools import BODIES
from ..contexts.context import BASH, JAVA, NODE, PYTHON, R
from ..contexts.frames import MARK, argv_of, language_of, request
from ..errors import BadJson, FileError, RingfenceError, TooLarge
from ..execs.run import Run
from ..model.client_session import SessionState
from ..model.execs.exec import ExecRequest
from .call import ApiError, Call, Route
from .codec import field
from .entries import absolute
from .notes import variables
from .settings import HOME

_MOST = 100  # contexts of a sandbox
_ENDING_S = 30.0
_PING_S = 15.0
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TYPESCRIPT = ("typescript", "ts", "tslab")
_LANGUAGES = {
    **dict.fromkeys(("python", "py", "python3"), PYTHON),
    **dict.fromkeys(("bash", "sh"), BASH),
    **dict.fromkeys(("javascript", "js", "node", *_TYPESCRIPT), NODE),
    "r": R,
    "java": JAVA,
}
_NEEDS = {NODE: ("node", "Node.js"), R: ("Rscript", "R"), JAVA: ("jshell", "a JDK with jshell")}
_SHOWN = {NODE: "javascript"}  # as E2B names it
_DEFAULTS = (PYTHON, NODE)  # contexts that E2B lists before they are used
_DEFAULT = "default"
_FIELDS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
    "e2b/data": "data",
    "application/vnd.ringfence.chart+json": "chart",
}
_RAW = "e2b/raw"  # see `displays`
_DISPLAYS = Path(__file__).with_name("displays.py").read_text("utf-8")
_OBJECTS = ("json", "data", "chart")
_tasks: set[asyncio.Task[None]] = set()


def _language(name: str | None) -> str:
    found = _LANGUAGES.get((name or PYTHON).lower())
    if found is None:
        known = "python, javascript, bash, r or java"
        raise ApiError(501, f"language '{name}' is not supported by Ringfence: use {known}")
    return found


def _id_of(run: Run) -> str:
    """The id of a context; empty for one of `/v1`, which E2B's clients do not see."""
    argv = run.view().argv
    return argv[-3] if language_of(argv) and len(argv) > len(argv_of(PYTHON)) else ""


def _form(run: Run) -> dict[str, Any]:
    view = run.view()
    return _described(_id_of(run), language_of(view.argv), view.cwd or HOME)


def _described(context_id: str, language: str, cwd: str) -> dict[str, Any]:
    return {"id": context_id, "language": _SHOWN.get(language, language), "cwd": cwd}


def _running(call: Call) -> list[Run]:
    runs = call.shared.execs.running_of(call.inside.sandbox_id)
    return [each for each in runs if _id_of(each)]


def _find(call: Call, context_id: str) -> Run:
    for run in _running(call):
        if context_id == _id_of(run):
            return run
    raise ApiError(404, f"Context {context_id} not found")


async def _has(call: Call, language: str) -> bool:
    if language not in _NEEDS:
        return True
    exists, (program, _name) = call.inside.sandbox.files.exists, _NEEDS[language]
    paths = [f"{each}/{program}" for each in ("/usr/bin", "/usr/local/bin")]
    return any([await call.call(exists, path) for path in paths])


async def _begin(call: Call, context_id: str, language: str, cwd: str) -> Run:
    if not await _has(call, language):
        name = _SHOWN.get(language, language)
        needed = _NEEDS[language][1]
        hint = "use a template or an image with it"
        raise ApiError(
            501, f"language '{name}' needs {needed}, which is not in the sandbox: {hint}"
        )
    if len(_running(call)) >= _MOST:
        raise ApiError(429, f"{_MOST} contexts run in this sandbox: remove one")
    command = argv_of(language)
    at = command.index(MARK)
    argv = (*command[:at], context_id, *command[at:])
    asked = ExecRequest(argv, cwd=cwd, env=variables(call.inside), stream_stdin=True)
    wanted = call.service.permissions.judge(call.caller, asked)
    run: Run = await call.call(call.shared.execs.start, call.inside, wanted)
    await begin(call.service, run)
    if language == PYTHON:
        code = f"exec(compile({_DISPLAYS!r}, '<e2b displays>', 'exec'), {{}})"
        await sending_of(call.service).send(run, _hidden(run, code))
    return run


def _hidden(run: Run, code: str) -> bytes:
    return request("hide", cell=new_cell(run), code=code, input=False)


async def _need(call: Call, context_id: str) -> Run:
    """Find a context; a default one is begun when it is first needed."""
    language, _, rest = context_id.rpartition("-")
    if rest == _DEFAULT and language in _DEFAULTS:
        return await _default(call, language)
    return _find(call, context_id)


async def _default(call: Call, language: str) -> Run:
    """The context of a language that is used where none is named, made when it is first."""
    key = f"{call.inside.sandbox_id}:{language}"
    lock = call.shared.lock(key)
    async with lock:
        context_id = f"{language}-{_DEFAULT}"
        try:
            return _find(call, context_id)
        except ApiError:
            is_there = await call.call(call.inside.sandbox.files.exists, HOME)
            # A sandbox that was not made by this API need not have it.
            return await _begin(call, context_id, language, HOME if is_there else ".")


async def execute(call: Call) -> Response:
    """Run code, and stream what it shows. A client that leaves interrupts it."""
    form = await call.form()
    context_id, language = field(form, "contextId", str), field(form, "language", str)
    code, env = field(form, "code", str, ""), field(form, "envVars", dict, {})
    if context_id and language:
        raise ApiError(400, "Only one of context_id or language can be provided")
    run = await (_need(call, context_id) if context_id else _default(call, _language(language)))
    kind = language_of(run.view().argv)
    if kind == PYTHON:
        code = _dedented(code)
    before, after = _around(kind, env)
    sending, cell_id = sending_of(call.service), new_cell(run)
    for each in before:
        await sending.send(run, _hidden(run, each))
    is_typescript = (language or "").lower() in _TYPESCRIPT
    types = {"types": "typescript" if is_typescript else True} if kind == NODE else {}
    await sending.send(run, request("run", cell=cell_id, code=code, input=False, **types))
    for each in after:
        await sending.send(run, _hidden(run, each))
    events = Events(call.service, sending, run, cell_id, cell_offset(run, cell_id))
    return BreakableResponse(_lines(call, run, cell_id, events), media_type="application/json")


def _dedented(code: str) -> str:
    """Take the first line's indentation off all lines, as IPython does."""
    lines = code.split("\n")
    first = next((each for each in lines if each.strip()), "")
    indent = first[: len(first) - len(first.lstrip(" \t"))]
    return "\n".join(each.removeprefix(indent) for each in lines) if indent else code


def _around(language: str, env: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Code that sets variables of one cell, and code that puts back what was there."""
    pairs = {str(key): str(value) for key, value in env.items()}
    if not pairs:
        return [], []
    if not all(_NAME.fullmatch(key) for key in pairs):
        raise ApiError(400, "env_vars: a name of letters, digits and _ is needed")
    if language == PYTHON:
        put = "__import__('os').environ"
        names = [*pairs]
        before = f"__e2b = {{k: {put}.get(k) for k in {names!r}}}; {put}.update({pairs!r})"
        after = (
            f"[{put}.pop(k, None) if v is None else {put}.__setitem__(k, v)"
            " for k, v in globals().pop('__e2b', {}).items()] and None"
        )
        return [before], [after]
    if language == NODE:
        asked = json.dumps(pairs)
        before = (
            f"globalThis.__e2b = Object.keys({asked}).map(k => [k, process.env[k]]);"
            f" Object.assign(process.env, {asked}); undefined"
        )
        after = (
            "for (const [k, v] of globalThis.__e2b)"
            " v === undefined ? delete process.env[k] : process.env[k] = v;"
            " delete globalThis.__e2b; undefined"
        )
        return [before], [after]
    if language == R:
        quoted = {key: json.dumps(value, ensure_ascii=False) for key, value in pairs.items()}
        before = (
            f".__e2b <- Sys.getenv(c({', '.join(map(json.dumps, pairs))}), NA, names = TRUE);"
            f" Sys.setenv({', '.join(f'`{key}` = {value}' for key, value in quoted.items())})"
        )
        after = (
            "for (.k in names(.__e2b)) if (is.na(.__e2b[[.k]])) Sys.unsetenv(.k) else"
            " do.call(Sys.setenv, as.list(.__e2b[.k])); rm(.__e2b, .k)"
        )
        return [before], [after]
    if language == JAVA:  # whose environment is fixed: E2B sets properties
        sets = [f"System.setProperty({json.dumps(k)}, {json.dumps(v)});" for k, v in pairs.items()]
        before = (
            "java.util.Map<String, String> __e2b = new java.util.HashMap<>();\n"
            f"for (String k : new String[] {{{', '.join(map(json.dumps, pairs))}}})"
            " __e2b.put(k, System.getProperty(k));\n" + "\n".join(sets)
        )
        after = (
            "__e2b.forEach((k, v) -> { if (v == null) System.clearProperty(k);"
            " else System.setProperty(k, v); });"
        )
        return [before], [after]
    before = "\n".join(
        f"__e2b_{key}=${{{key}-}} __e2b_had_{key}=${{{key}+x}}; export {key}={shlex.quote(value)}"
        for key, value in pairs.items()
    )
    after = "\n".join(
        f'if [ "$__e2b_had_{key}" ]; then export {key}="$__e2b_{key}"; else unset {key}; fi'
        for key in pairs
    )
    return [before], [after]


async def _lines(call: Call, run: Run, cell_id: str, events: Events) -> AsyncIterator[bytes]:
    is_over, language = False, language_of(run.view().argv)
    try:
        async for text in events.stream(_PING_S):
            is_over = is_over or b'"type":"end"' in text
            if len(text) > SHORT:
                text = await call.service.thread_pools.call(_translate, text, language, pool=BODIES)
            else:
                text = _translate(text, language)
            if is_over and call.inside.state == SessionState.TERMINATED:
                raise BrokenOff("the sandbox has ended")  # SDKs look for a connection that breaks
            if text:
                yield text
    finally:
        if not is_over:
            task = asyncio.get_running_loop().create_task(_interrupt(call, run, cell_id))
            _tasks.add(task)
            task.add_done_callback(_tasks.discard)


async def _interrupt(call: Call, run: Run, cell_id: str) -> None:
    try:
        await sending_of(call.service).send(run, request("interrupt", cell=cell_id))
    except RingfenceError:
        pass  # it has ended


def _translate(text: bytes, language: str) -> bytes:
    """Lines of ours as those that E2B's clients read."""
    events = [json.loads(line) for line in text.splitlines()]
    lines = [each for event in events for each in _translated(event, language)]
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def _translated(event: dict[str, Any], language: str) -> list[dict[str, Any]]:
    """An event of ours as the lines that E2B's clients read."""
    kind = event["type"]
    if kind in ("stdout", "stderr"):
        text, texts = event["text"], [event["text"]]
        if language == JAVA and text[:-1] and text[-1] == "\n":
            texts = [text[:-1], "\n"]  # as E2B's kernel sends what println writes
        return [{"type": kind, "text": each, "timestamp": time.time_ns()} for each in texts]
    if kind == "result":
        return [{"type": "result", "is_main_result": event["is_main"], **_shown(event["data"])}]
    if kind == "dropped":
        text = f"[{event['bytes']} bytes of output were dropped]\n"
        return [{"type": "stderr", "text": text, "timestamp": time.time_ns()}]
    if kind == "heartbeat":
        return [{"type": "keepalive"}]
    if kind != "end":
        return []
    lines: list[dict[str, Any]] = []
    if error := event.get("error"):
        lines.append({"type": "error", **error})
    if (count := event.get("execution_count")) is not None:
        lines.append({"type": "number_of_executions", "execution_count": count})
    lines.append({"type": "end_of_execution"})
    return lines


def _shown(data: dict[str, str]) -> dict[str, Any]:
    """Values by E2B's names; MIME types that it has no name for are in `extra`."""
    found: dict[str, Any] = {}
    extra: dict[str, str] = {}
    if _RAW in data:
        data = {mime: text for mime, text in data.items() if mime not in (_RAW, "text/plain")}
    for mime, text in data.items():
        name = _FIELDS.get(mime)
        if name is None:
            extra[mime] = text
            continue
        if mime == "text/plain" and text[:1] in ("'", '"') and text[:1] == text[-1:]:
            text = text[1:-1]  # as E2B shows strings
        try:
            found[name] = loads(text.encode()) if name in _OBJECTS else text
        except (BadJson, TooLarge, UnicodeEncodeError):
            extra[mime] = text  # a program inside wrote it
    return {**found, **({"extra": extra} if extra else {})}


async def create(call: Call) -> Response:
    form = await call.form()
    language = _language(field(form, "language", str))
    cwd = absolute(field(form, "cwd", str) or HOME)
    try:
        await call.call(call.inside.sandbox.files.make_dir, cwd)  # as E2B does where it is missing
    except FileError as exc:
        raise ApiError(400, f"cwd '{cwd}': {exc.message}") from exc
    run = await _begin(call, f"{language}-{secrets.token_hex(8)}", language, cwd)
    return JSONResponse(_form(run))


async def list_(call: Call) -> Response:
    """List the contexts: the default ones first, also before they are used."""
    forms = {form["id"]: form for form in map(_form, _running(call))}
    defaults = [
        _described(f"{language}-{_DEFAULT}", language, HOME)
        for language in _DEFAULTS
        if await _has(call, language)
    ]
    return JSONResponse([*({form["id"]: form for form in defaults} | forms).values()])


async def remove(call: Call) -> Response:
    await _end(call, _find(call, call.params["context_id"]))
    return Response(status_code=204)


async def _end(call: Call, run: Run) -> None:
    await call.call(run.kill)
    await wait_for(run, _ENDING_S)


async def restart(call: Call) -> Response:
    """End a context, and begin it afresh under its id."""
    run = await _need(call, call.params["context_id"])
    form = _form(run)
    await _end(call, run)
    again = await _begin(call, form["id"], _language(form["language"]), form["cwd"])
    return JSONResponse(_form(again))


async def health(_call: Call) -> Response:
    return JSONResponse("OK")


_CONTEXT = "/contexts/{context_id}"
ROUTES = [
    Route("POST", "/execute", execute),
    Route("POST", "/contexts", create),
    Route("GET", "/contexts", list_),
    Route("DELETE", _CONTEXT, remove),
    Route("POST", f"{_CONTEXT}/restart", restart),
    Route("GET", "/health", health),
]
