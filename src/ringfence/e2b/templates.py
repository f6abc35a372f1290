"""E2B's API of templates: builds by the SDK's `Template`, mapped to ours."""

from __future__ import annotations

import hmac
import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response

from ..api.access.caller import READ_ONLY
from ..api.routes.templates import store
from ..errors import NotFound
from ..model.limits import Limits
from ..model.template import DEFAULT_TAG, TemplateRequest
from ..sessions.templates.catalogue import Templates
from ..store.templates import FAILED, READY, RESERVED, BuildRecord, TemplateRecord
from . import template_steps
from .call import ApiError, Call, Route
from .codec import field, timestamp
from .metering import sizes
from .rpc import unknown_user
from .template_steps import HASH, NAME, split_name

# A build that waits for its turn is begun for E2B's clients; "waiting" is for its steps.
_STATUS = {RESERVED: "waiting", READY: "ready", FAILED: "error"}
_START = "finalize"
_LEVELS = ("debug", "info", "warn", "error")
_MOST_ENTRIES = 100
_SIGNED_S = 3600
_MIB = 1 << 20
_UNKNOWN_USER = re.compile("unknown user '([^']*)'")


def _templates(call: Call) -> Templates:
    return call.service.manager.templates


def _find(call: Call, *, is_mine: bool = True) -> TemplateRecord:
    text = call.params["template_id"]
    try:
        return _templates(call).find(split_name(text)[0], call.caller.sees, is_mine=is_mine)
    except (NotFound, ApiError):
        raise ApiError(404, f"template '{text[:200]}' not found") from None


def _build(call: Call, template: TemplateRecord) -> BuildRecord:
    try:
        return _templates(call).build_of(template, call.params["build_id"])
    except NotFound as exc:
        raise ApiError(404, f"build '{call.params['build_id'][:63]}' not found") from exc


# -- building --------------------------------------------------------------------------------------


async def request_build(call: Call) -> Response:
    """Reserve a build: its files and steps come later."""
    form = await call.form()
    name, tag = split_name(field(form, "name", str, "") or field(form, "alias", str, ""))
    tags = field(form, "tags", list, [])
    if not all(isinstance(each, str) and NAME.fullmatch(each) for each in tags) or len(tags) > 50:
        raise ApiError(400, "tags: must be up to 50 names")
    cpus, memory = field(form, "cpuCount", int, 0), field(form, "memoryMB", int, 0)
    wanted = list(dict.fromkeys([*([tag] if tag != DEFAULT_TAG or not tags else []), *tags]))
    asked = {"cpus": cpus, "memory_bytes": memory * _MIB}
    limits = {key: value for key, value in asked.items() if value}
    Limits(**limits)  # checks them

    def reserve() -> tuple[TemplateRecord, BuildRecord]:
        if name in configured(call):
            raise ApiError(403, f"template '{name}' is the server's own: choose another name")
        templates = _templates(call)
        template, build = templates.reserve(name, call.caller.client, wanted)
        templates.records.change_build(build.id, request=json.dumps({"limits": limits}))
        return template, build

    template, build = await call.call(reserve)
    return JSONResponse(
        {
            "templateID": template.id,
            "buildID": build.id,
            "public": bool(template.public),
            "names": [name],
            "aliases": [name],
            "tags": wanted,
        },
        202,
    )


def configured(call: Call) -> list[str]:
    """Return the names that the server's operator has given a meaning."""
    return sorted({"base", "code-interpreter-v1", *call.shared.settings.templates})


async def begin(call: Call) -> Response:
    """Begin a reserved build with these steps.

    One that cannot begin has failed, as with E2B: the SDKs show the line of the step in its status.
    """
    form = await call.form()
    template = await call.call(_find, call)

    def start() -> None:
        templates, build = _templates(call), _build(call, template)
        limits = Limits(**json.loads(build.request).get("limits", {}))
        try:
            request = template_steps.request_of(call, form, template, limits)
        except template_steps.StepError as exc:
            templates.refuse(build.id, exc.step, str(exc))
        else:
            templates.start(build.id, request, template.owner)

    await call.call(start)
    return Response(status_code=202)


# -- files -----------------------------------------------------------------------------------------


async def files(call: Call) -> Response:
    """Tell where the files of a COPY step are to be put, and whether they are there."""
    name = call.params["hash"]
    if call.caller.scope == READ_ONLY:  # the URL in the answer needs no key
        raise ApiError(403, "a read_only key may not upload files")
    if not HASH.fullmatch(name):
        raise ApiError(400, "the hash is not a SHA-256 in hexadecimal digits")
    template = await call.call(_find, call)
    present = bool(await call.call(_templates(call).places.named, template.owner, name))
    until = int(time.time()) + _SIGNED_S
    signature = _signature(call, template.id, name, until)
    base = str(call.request.base_url).rstrip("/")
    url = f"{base}/templates/{template.id}/files/{name}?until={until}&signature={signature}"
    return JSONResponse({"present": present, "url": url}, 201)


def _signature(call: Call, template_id: str, name: str, until: int) -> str:
    return call.shared.tokens.upload(template_id, name, until)


async def put_files(call: Call) -> Response:
    query, name = call.request.query_params, call.params["hash"]
    until, shown = query.get("until", ""), query.get("signature", "")
    is_time = until.isdecimal() and len(until) < 12
    wanted = _signature(call, call.params["template_id"], name, int(until) if is_time else 0)
    if not is_time or not hmac.compare_digest(shown.encode(), wanted.encode()):
        raise ApiError(401, "the signature is not valid")
    if int(until) < time.time():
        raise ApiError(401, "the signature has expired")
    template = await call.call(_templates(call).records.get, call.params["template_id"])
    if template is None or not HASH.fullmatch(name):
        raise ApiError(404, "template not found")
    stream = call.request.stream()
    await store(call.service, template.owner, stream, name=name)
    return Response(status_code=200)


# -- looking ---------------------------------------------------------------------------------------


async def status(call: Call) -> Response:
    """How a build stands, and its log from an entry on."""
    offset = call.request.query_params.get("logsOffset", "0")
    if not offset.isdecimal() or len(offset) > 9:
        raise ApiError(400, "logsOffset: must be a number")

    def read() -> dict[str, Any]:
        template = _find(call)
        build = _build(call, template)
        entries = _entries(_templates(call).places.log(build.id), int(offset))
        form: dict[str, Any] = {
            "templateID": template.id,
            "buildID": build.id,
            "status": _STATUS.get(build.status, "building"),
            "logs": [],
            "logEntries": entries,
        }
        if build.status == FAILED:
            form["reason"] = {"message": _why(build), "step": _step(build), "logEntries": []}
        return form

    return JSONResponse(await call.call(read))


def _step(build: BuildRecord) -> str:
    """The step of a build in E2B's words: the start command comes after the last one."""
    steps = json.loads(build.request).get("steps")  # None: it was refused
    return str(build.step) if steps is None or build.step <= len(steps) else _START


def _why(build: BuildRecord) -> str:
    """Why a build failed; of a step with an unknown user first in E2B's words, which programs look for."""
    if (found := _UNKNOWN_USER.match(build.error)) is None:
        return build.error
    steps = TemplateRequest.from_json(json.loads(build.request)).steps[: build.step]
    command = steps[-1].run[-1] if steps and steps[-1].run else ""
    refused = unknown_user(found[1])
    what = f"{refused.code}: {refused.message}"
    return f"failed to run command '{command}': command failed: {what} ({build.error})"


def _entries(path: str, skip: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file):
                if number < skip or not line.endswith(b"\n"):
                    continue
                if len(found) == _MOST_ENTRIES:
                    break
                form = json.loads(line)
                level = form["level"] if form["level"] in _LEVELS else "info"
                found.append(
                    {
                        "timestamp": timestamp(form["at"]),
                        "message": form["message"],
                        "level": "info" if level == "debug" else level,
                        "step": str(form["step"]),
                    }
                )
    except FileNotFoundError:
        pass
    return found


async def logs(call: Call) -> Response:
    def read() -> list[dict[str, Any]]:
        build = _build(call, _find(call))
        return _entries(_templates(call).places.log(build.id), 0)

    return JSONResponse({"logs": await call.call(read)})


def _shown(template: TemplateRecord, builds: Sequence[BuildRecord]) -> dict[str, Any]:
    newest = builds[-1] if builds else None
    request = json.loads(newest.request) if newest else {}
    limits = request.get("base", {}).get("limits") or request.get("limits") or {}
    current = template.tags.get(DEFAULT_TAG) or next(iter(template.tags.values()), "")
    return {
        "templateID": template.id,
        "buildID": current or (newest.id if newest else ""),
        **sizes(limits),
        "public": bool(template.public),
        "names": [template.name],
        "aliases": [template.name],
        "createdAt": timestamp(template.created_at),
        "updatedAt": timestamp(template.updated_at),
        "createdBy": None,
        "lastSpawnedAt": None,
        "spawnCount": 0,
        "buildCount": len(builds),
        "envdVersion": "0.6.4",
        "buildStatus": _STATUS.get(newest.status, "building") if newest else "waiting",
    }


def own(call: Call) -> list[dict[str, Any]]:
    """The caller's templates, and public ones."""
    return [_shown(*each) for each in _templates(call).every(call.caller.sees)]


async def get(call: Call) -> Response:
    """A template with its builds."""

    def read() -> dict[str, Any]:
        template = _find(call)
        every = _templates(call).records.builds(template.id)
        builds = [
            {
                "buildID": each.id,
                "status": _STATUS.get(each.status, "building"),
                "createdAt": timestamp(each.created_at),
                "updatedAt": timestamp(each.ended_at or each.created_at),
                "finishedAt": timestamp(each.ended_at) if each.ended_at else None,
                **sizes({}),
            }
            for each in every
        ]
        return {**_shown(template, every), "builds": builds}

    return JSONResponse(await call.call(read))


async def alias(call: Call) -> Response:
    text = call.params["alias"]
    if call.shared.settings.spec_of(text) is not None:
        return JSONResponse({"templateID": text, "public": True})
    try:
        look = _templates(call).look
        view = await call.call(look, split_name(text)[0], call.caller.sees)
    except (NotFound, ApiError):
        raise ApiError(404, f"template '{text[:200]}' not found") from None
    return JSONResponse({"templateID": view.id, "public": view.public})


# -- changing --------------------------------------------------------------------------------------


async def update(call: Call) -> Response:
    """Let every client use a template, or its owner alone."""
    public = field(await call.form(), "public", bool, False)
    template = await call.call(_find, call)
    if public and not call.caller.is_admin:
        raise ApiError(403, "only an administrator may make a template public")
    change = _templates(call).publish
    await call.call(change, template.id, public=public, sees=call.caller.sees)
    return JSONResponse({"names": [template.name]})


async def delete(call: Call) -> bool:
    """Remove a template of the caller's; False where there is none."""
    try:
        template = await call.call(_find, call)
    except ApiError:
        return False
    await call.call(_templates(call).delete, template.id, call.caller.sees)
    return True


async def tags(call: Call) -> Response:
    def read() -> list[dict[str, Any]]:
        template = _find(call, is_mine=False)
        at = timestamp(template.updated_at)
        return [
            {"tag": tag, "buildID": build, "createdAt": at} for tag, build in template.tags.items()
        ]

    return JSONResponse(await call.call(read))


async def assign_tags(call: Call) -> Response:
    """Let tags mean the build that another tag means."""
    form = await call.form()
    name, tag = split_name(field(form, "target", str, ""))
    wanted = _given_tags(form)

    def change() -> str:
        call.params["template_id"] = name
        template = _find(call)
        if (build_id := template.tags.get(tag)) is None:
            raise ApiError(404, f"template '{name}' has no tag '{tag}'")
        _templates(call).tag(template, build_id, wanted)
        return build_id

    return JSONResponse({"buildID": await call.call(change), "tags": wanted}, 201)


async def remove_tags(call: Call) -> Response:
    form = await call.form()
    call.params["template_id"] = field(form, "name", str, "")
    wanted = _given_tags(form)

    def change() -> None:
        _templates(call).tag(_find(call), "", wanted)

    await call.call(change)
    return Response(status_code=204)


def _given_tags(form: dict[str, Any]) -> list[str]:
    found: list[str] = field(form, "tags", list, [])
    if not found or not all(isinstance(each, str) and NAME.fullmatch(each) for each in found):
        raise ApiError(400, "tags: must be names")
    return found[:50]


_TEMPLATE = "/templates/{template_id}"
_BUILD = f"{_TEMPLATE}/builds/{{build_id}}"
FILES = Route("PUT", f"{_TEMPLATE}/files/{{hash}}", put_files, is_stream=True)


def is_upload(method: str, path: str, headers: Mapping[str, str]) -> bool:
    """Return whether a request puts files where a signed URL says, for which no key is sent."""
    is_put = method == "PUT" and FILES.pattern.match(path)
    return bool(is_put) and "x-api-key" not in headers


ROUTES = [
    Route("POST", "/v3/templates", request_build),
    Route("POST", f"/v2{_BUILD}", begin),
    Route("GET", f"{_BUILD}/status", status),
    Route("GET", f"{_BUILD}/logs", logs),
    Route("GET", f"{_TEMPLATE}/files/{{hash}}", files),
    Route("GET", "/templates/aliases/{alias:path}", alias),
    Route("POST", "/templates/tags", assign_tags),
    Route("DELETE", "/templates/tags", remove_tags),
    Route("GET", f"{_TEMPLATE}/tags", tags),
    Route("GET", _TEMPLATE, get),
    Route("PATCH", _TEMPLATE, update),
    Route("PATCH", f"/v2{_TEMPLATE}", update),
    FILES,
]
