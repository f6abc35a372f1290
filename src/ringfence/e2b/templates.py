"""E2B's API of templates: builds by the SDK's `Template`, mapped to ours."""

from __future__ import annotations

import hmac
import json
import os
import re
import shutil
import sys
import time
from dataclasses import replace
from typing import Any

from starlette.responses import JSONResponse, Response

from ..api.routes.templates import store
from ..errors import ImageNotFound, InvalidRequest, NotFound, RingfenceError
from ..images.store import ImageStore
from ..model.capabilities import LIMITED_BY
from ..model.limits import Limits
from ..model.spec import SandboxSpec
from ..model.template import DEFAULT_TAG, TemplateRequest, TemplateStep
from ..sessions.templates.catalogue import Built, Templates
from ..store.templates import FAILED, READY, RESERVED, WAITING, BuildRecord, TemplateRecord
from . import lives
from .call import ApiError, Call, Route
from .codec import field, timestamp
from .settings import HOME

_STATUS = {RESERVED: "waiting", WAITING: "waiting", READY: "ready", FAILED: "error"}
_LEVELS = ("debug", "info", "warn", "error")
_MOST_ENTRIES = 100
_SIGNED_S = 3600
_MIB = 1 << 20
_HASH = re.compile("[0-9a-f]{64}")
_NAME = re.compile("[a-z0-9_][a-z0-9_.-]{0,62}")
_BASES = ("e2bdev/base", "e2bdev/code-interpreter")
_ROOT = ("root", "0")


def _templates(call: Call) -> Templates:
    return call.service.manager.templates


def _split(text: str) -> tuple[str, str]:
    """Name and tag of `TEAM/NAME:TAG`.

    Raises:
        ApiError: It is no name of a template.
    """
    name, _, tag = text.rpartition("/")[2].lower().partition(":")
    if not _NAME.fullmatch(name) or (tag and not _NAME.fullmatch(tag)):
        raise ApiError(
            400, f"'{text[:200]}' is not a template name: use a-z, 0-9, '-', '_' and '.'"
        )
    return name, tag or DEFAULT_TAG


def resolve(call: Call, text: str) -> Built | None:
    """What a template's name, name with tag, or id means to the caller; None: nothing."""
    try:
        name, tag = _split(text)
    except ApiError:
        return None
    return _templates(call).resolve(name, call.caller.client, tag)


def spec_of(built: Built) -> SandboxSpec:
    """The spec of a sandbox of a template, as a client of E2B asks for it."""
    return replace(
        built.spec, template=built.build.id, image=None, limits=built.request.base.limits
    )


def _find(call: Call, *, is_mine: bool = True) -> TemplateRecord:
    text = call.params["template_id"]
    try:
        return _templates(call).find(_split(text)[0], call.caller.sees, is_mine=is_mine)
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
    name, tag = _split(field(form, "name", str, "") or field(form, "alias", str, ""))
    tags = field(form, "tags", list, [])
    if not all(isinstance(each, str) and _NAME.fullmatch(each) for each in tags) or len(tags) > 50:
        raise ApiError(400, "tags: must be up to 50 names")
    cpus, memory = field(form, "cpuCount", int, 0), field(form, "memoryMB", int, 0)
    wanted = list(dict.fromkeys([*([tag] if tag != DEFAULT_TAG or not tags else []), *tags]))
    limits = {"cpus": cpus, "memory_bytes": memory * _MIB}

    def reserve() -> tuple[TemplateRecord, BuildRecord]:
        if name in _configured(call):
            raise ApiError(403, f"template '{name}' is the server's own: choose another name")
        templates = _templates(call)
        template, build = templates.reserve(name, call.caller.client, wanted)
        given = {key: value for key, value in limits.items() if value}
        templates.records.change_build(build.id, request=json.dumps({"limits": given}))
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


def _configured(call: Call) -> list[str]:
    return sorted({"base", "code-interpreter-v1", *call.shared.settings.templates})


async def begin(call: Call) -> Response:
    """Begin a reserved build with these steps."""
    form = await call.form()
    template = await call.call(_find, call)

    def start() -> None:
        templates, build = _templates(call), _build(call, template)
        limits = Limits(**json.loads(build.request).get("limits", {}))
        request = _request(call, form, template, limits)
        templates.start(build.id, request, template.owner)

    await call.call(start)
    return Response(status_code=202)


def _request(
    call: Call, form: dict[str, Any], template: TemplateRecord, limits: Limits
) -> TemplateRequest:
    """The request in our form, judged."""
    settings = call.shared.settings
    base = _base(call, form)
    steps = [_step(call, each, template.owner, base) for each in field(form, "steps", list, [])]
    wanted = replace(base, network=settings.internet, limits=_bounded(call, limits), id=None)
    try:
        request = TemplateRequest(
            name=template.name,
            steps=tuple(steps),
            base=lives.tiered(call.service, lives.judged(call.service, call.caller, wanted)),
            start=field(form, "startCmd", str, ""),
            ready=field(form, "readyCmd", str, ""),
            fresh=field(form, "force", bool, False),
        )
    except InvalidRequest as exc:
        raise ApiError(400, f"{exc.field}: {exc.message}" if exc.field else exc.message) from exc
    return request.altered(base=request.base.altered(ttl_s=None))


def _bounded(call: Call, limits: Limits) -> Limits:
    """The limits without one on processors, which SDKs always send, where no backend has that."""
    maker = call.service.manager.maker
    can = any(maker.report(name).can(LIMITED_BY["cpus"]) for name in maker.backends)
    return limits if can else replace(limits, cpus=None)


def _base(call: Call, form: dict[str, Any]) -> SandboxSpec:
    """The spec that a build begins with."""
    settings = call.shared.settings
    if name := field(form, "fromTemplate", str, ""):
        if (spec := settings.spec_of(name)) is not None:
            return spec
        built = resolve(call, name)
        if built is None:
            raise ApiError(404, f"template '{name[:200]}' not found")
        return SandboxSpec(template=built.build.id)
    image = field(form, "fromImage", str, "") or _BASES[0]
    name, _, tag = image.removeprefix("docker.io/").removeprefix("library/").partition(":")
    # The operator's word: an image's name among the templates.
    spec = settings.templates.get(image) or (None if tag else settings.templates.get(name))
    host = settings.spec_of("base")
    assert host is not None  # it is built in
    if spec is not None:
        return replace(spec, env={**host.env, **spec.env}, workdir=spec.workdir or HOME)
    if name in _BASES:
        return host
    try:
        ImageStore().find(image)
        mounts = tuple(each for each in host.mounts if each.target == HOME)
        env = {key: host.env[key] for key in ("HOME", "USER", "LOGNAME")}
        return SandboxSpec(image=image, mounts=mounts, workdir=HOME, env=env)
    except (ImageNotFound, RingfenceError):
        if _is_hosts(name, tag):
            return host
    raise ApiError(
        400,
        f"image '{image[:200]}' is not on this server, which pulls none for its clients: an"
        f" administrator runs `ringfence image pull {image[:200]}`, or use from_base_image()",
    )


def _is_hosts(name: str, tag: str) -> bool:
    """Return whether the host's own programs are what an official image stands for."""
    version = tag.partition("-")[0]
    if name == "python":
        here = f"{sys.version_info[0]}.{sys.version_info[1]}"
        linked = os.path.realpath("/usr/bin/python3").rpartition("python")[2]
        here = linked if linked[:1].isdigit() else here
        return version in ("", "latest", here.partition(".")[0], here)
    return name == "node" and version in ("", "latest", "lts") and bool(shutil.which("node"))


def _step(call: Call, form: Any, owner: str, base: SandboxSpec) -> TemplateStep:
    """One instruction in our form.

    Raises:
        ApiError: It cannot be had here.
    """
    if not isinstance(form, dict):
        raise ApiError(400, "steps: must be a list of objects")
    kind, args = field(form, "type", str, ""), field(form, "args", list, [])
    if not args or not all(isinstance(each, str) for each in args):
        raise ApiError(400, f"step {kind}: args must be strings")
    try:
        if kind == "RUN":
            shell = "bash" if base.image is None else "sh"
            user = args[1] if len(args) > 1 else ""
            return TemplateStep(run=(shell, "-c", args[0]), user=_user(user, base))
        if kind == "ENV":
            return TemplateStep(env=dict(zip(args[::2], args[1::2], strict=True)))
        if kind == "WORKDIR":
            return TemplateStep(workdir=os.path.normpath(os.path.join(HOME, args[0])))
        if kind == "USER":
            if user := _user(args[0], base):
                return TemplateStep(user=user)
            return TemplateStep(env={"USER": base.env.get("USER", "user")})
        if kind == "COPY":
            return _copy(call, form, [*args, "", "", ""], owner)
    except InvalidRequest as exc:
        raise ApiError(400, f"step {kind}: {exc.field}: {exc.message}") from exc
    except ValueError:
        raise ApiError(400, f"step {kind}: args are not pairs") from None
    raise ApiError(501, f"step {kind[:40]} is not supported by Ringfence")


def _user(name: str, base: SandboxSpec) -> str:
    """The user of a step: `root` is the ordinary user where there is no other, as with `sudo`."""
    if base.profile == "own_root" or base.image is not None:
        return "" if name == "user" else name
    return "" if name in ("user", *_ROOT) else name


def _copy(call: Call, form: dict[str, Any], args: list[str], owner: str) -> TemplateStep:
    name = field(form, "filesHash", str, "")
    digest = _templates(call).places.named(owner, name) if _HASH.fullmatch(name) else ""
    if not digest:
        raise ApiError(400, f"the files of COPY {args[0][:200]} were not uploaded")
    source = os.path.normpath(args[0])
    return TemplateStep(
        copy=digest, source="" if source == "." else source, to=args[1], mode=args[3][-4:]
    )


# -- files -----------------------------------------------------------------------------------------


async def files(call: Call) -> Response:
    """Tell where the files of a COPY step are to be put, and whether they are there."""
    name = call.params["hash"]
    if not _HASH.fullmatch(name):
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
    """Store files by a signed URL."""
    query, name = call.request.query_params, call.params["hash"]
    until, shown = query.get("until", ""), query.get("signature", "")
    is_time = until.isdecimal() and len(until) < 12
    wanted = _signature(call, call.params["template_id"], name, int(until) if is_time else 0)
    if not is_time or not hmac.compare_digest(shown.encode(), wanted.encode()):
        raise ApiError(401, "the signature is not valid")
    if int(until) < time.time():
        raise ApiError(401, "the signature has expired")
    template = await call.call(_templates(call).records.get, call.params["template_id"])
    if template is None or not _HASH.fullmatch(name):
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
            form["reason"] = {"message": build.error, "step": str(build.step), "logEntries": []}
        return form

    return JSONResponse(await call.call(read))


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
    """The log of a build."""

    def read() -> list[dict[str, Any]]:
        build = _build(call, _find(call))
        return _entries(_templates(call).places.log(build.id), 0)

    return JSONResponse({"logs": await call.call(read)})


def _shown(call: Call, template: TemplateRecord) -> dict[str, Any]:
    builds = _templates(call).records.builds(template.id)
    newest = builds[-1] if builds else None
    request = json.loads(newest.request) if newest else {}
    limits = request.get("base", {}).get("limits") or request.get("limits") or {}
    current = template.tags.get(DEFAULT_TAG) or next(iter(template.tags.values()), "")
    return {
        "templateID": template.id,
        "buildID": current or (newest.id if newest else ""),
        "cpuCount": max(1, round(limits.get("cpus") or 1)),
        "memoryMB": (limits.get("memory_bytes") or 0) // _MIB,
        "diskSizeMB": (limits.get("disk_bytes") or 0) // _MIB,
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
    templates = _templates(call)
    views = templates.list(call.caller.sees)
    found = [templates.records.get(each.id) for each in views]
    return [_shown(call, each) for each in found if each is not None]


async def get(call: Call) -> Response:
    """A template with its builds."""

    def read() -> dict[str, Any]:
        template = _find(call)
        builds = [
            {
                "buildID": each.id,
                "status": _STATUS.get(each.status, "building"),
                "createdAt": timestamp(each.created_at),
                "updatedAt": timestamp(each.ended_at or each.created_at),
                "finishedAt": timestamp(each.ended_at) if each.ended_at else None,
                "cpuCount": 1,
                "memoryMB": 0,
            }
            for each in _templates(call).records.builds(template.id)
        ]
        return {**_shown(call, template), "builds": builds}

    return JSONResponse(await call.call(read))


async def alias(call: Call) -> Response:
    """Whether there is a template of this name."""
    text = call.params["alias"]
    if call.shared.settings.spec_of(text) is not None:
        return JSONResponse({"templateID": text, "public": True})
    call.params["template_id"] = text
    template = await call.call(_find, call, is_mine=False)
    return JSONResponse({"templateID": template.id, "public": bool(template.public)})


# -- changing --------------------------------------------------------------------------------------


async def update(call: Call) -> Response:
    """Let every client use a template, or its owner alone."""
    public = field(await call.form(), "public", bool, False)
    if public and not call.caller.is_admin:
        raise ApiError(403, "only an administrator may make a template public")
    template = await call.call(_find, call)
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
    """The tags of a template."""

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
    name, tag = _split(field(form, "target", str, ""))
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
    """Let tags mean nothing."""
    form = await call.form()
    call.params["template_id"] = field(form, "name", str, "")
    wanted = _given_tags(form)

    def change() -> None:
        _templates(call).tag(_find(call), "", wanted)

    await call.call(change)
    return Response(status_code=204)


def _given_tags(form: dict[str, Any]) -> list[str]:
    found: list[str] = field(form, "tags", list, [])
    if not found or not all(isinstance(each, str) and _NAME.fullmatch(each) for each in found):
        raise ApiError(400, "tags: must be names")
    return found[:50]


_TEMPLATE = "/templates/{template_id}"
_BUILD = f"{_TEMPLATE}/builds/{{build_id}}"
FILES = Route("PUT", f"{_TEMPLATE}/files/{{hash}}", put_files, is_stream=True)
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
