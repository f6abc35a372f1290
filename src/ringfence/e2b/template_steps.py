"""Steps, bases and names of E2B's templates in our form."""

from __future__ import annotations

import os
import re
import shutil
import sys
from dataclasses import replace
from typing import Any

from ..errors import InvalidRequest, RingfenceError
from ..images.store import ImageStore
from ..model.capabilities import LIMITED_BY
from ..model.limits import Limits
from ..model.spec import SandboxSpec
from ..model.template import DEFAULT_TAG, TemplateRequest, TemplateStep
from ..sessions.templates.built import Built
from ..store.templates import TemplateRecord
from . import lives
from .call import ApiError, Call
from .codec import field
from .settings import HOME

HASH = re.compile("[0-9a-f]{64}")
NAME = re.compile("[a-z0-9_][a-z0-9_.-]{0,62}")
BASE = 0
"""Number of what a build begins with, before its steps."""
_BASES = ("e2bdev/base", "e2bdev/code-interpreter")
_ROOT = ("root", "0")


class StepError(ApiError):
    """A step asks for what cannot be had here.

    Attributes:
        step: Its number; clients look up by it which line of a program is to blame.
    """

    def __init__(self, step: int, error: ApiError) -> None:
        super().__init__(error.status, str(error))
        self.step = step


def split_name(text: str) -> tuple[str, str]:
    """Name and tag of `TEAM/NAME:TAG`.

    Raises:
        ApiError: It is no name of a template.
    """
    team, _, whole = text.lower().rpartition("/")
    name, _, tag = whole.partition(":")
    if not all(NAME.fullmatch(each) for each in (team or "-", name, tag or "-") if each != "-"):
        raise ApiError(
            400, f"'{text[:200]}' is not a template name: use a-z, 0-9, '-', '_' and '.'"
        )
    return name, tag or DEFAULT_TAG


def resolve(call: Call, text: str) -> Built | None:
    """Return the meaning of a name, name with tag, or id for the caller; None: nothing."""
    try:
        name, tag = split_name(text)
    except ApiError:
        return None
    return call.service.manager.templates.resolve(name, call.caller.client, tag)


def spec_of(built: Built) -> SandboxSpec:
    """The spec of a sandbox of a template, as a client of E2B asks for it."""
    return replace(
        built.spec, template=built.build.id, image=None, limits=built.request.base.limits
    )


def request_of(
    call: Call, form: dict[str, Any], template: TemplateRecord, limits: Limits
) -> TemplateRequest:
    """The request in our form, judged.

    Raises:
        StepError: What it begins with or one of its steps cannot be had here.
    """
    settings = call.shared.settings
    asked = field(form, "steps", list, [])
    if not all(isinstance(each, dict) for each in asked):
        raise ApiError(400, "steps: must be a list of objects")
    try:
        base = _base(call, form)
    except ApiError as exc:
        raise StepError(BASE, exc) from exc
    steps = []
    for number, each in enumerate(asked, BASE + 1):
        try:
            step = _step(call, each, template.owner, base)
            steps.append(replace(step, fresh=field(each, "force", bool, False)))
        except ApiError as exc:
            raise StepError(number, exc) from exc
    bounded = _bounded(call, limits)
    wanted = replace(base, network=settings.internet, limits=bounded, id=None, ttl_s=None)
    judged = lives.tiered(call.service, lives.judged(call.service, call.caller, wanted))
    try:
        return TemplateRequest(
            name=template.name,
            steps=tuple(steps),
            base=judged.altered(ttl_s=None),  # the server's bound is for sandboxes
            start=field(form, "startCmd", str, ""),
            ready=field(form, "readyCmd", str, ""),
            keep_env=False,
            fresh=field(form, "force", bool, False),
        )
    except InvalidRequest as exc:
        raise ApiError(400, f"{exc.field}: {exc.message}" if exc.field else exc.message) from exc


def _bounded(call: Call, limits: Limits) -> Limits:
    """The limits without one on processors, which SDKs always send, where no backend has that."""
    maker = call.service.manager.maker
    can = any(maker.report(name).can(LIMITED_BY["cpus"]) for name in maker.backends)
    return limits if can else replace(limits, cpus=None)


def _base(call: Call, form: dict[str, Any]) -> SandboxSpec:
    settings = call.shared.settings
    if field(form, "fromImageRegistry", dict, {}):
        image = field(form, "fromImage", str, "")[:200]
        raise ApiError(
            400,
            f"image '{image}': this server pulls none for its clients, and uses no login of theirs:"
            f" an administrator runs `ringfence image pull --user NAME:PASSWORD {image}`; then"
            " give the image without a login",
        )
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
    except RingfenceError:
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


def _step(call: Call, form: dict[str, Any], owner: str, base: SandboxSpec) -> TemplateStep:
    """Translate an instruction into our form.

    Raises:
        ApiError: It cannot be had here.
    """
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
    digest = (
        call.service.manager.templates.places.named(owner, name) if HASH.fullmatch(name) else ""
    )
    if not digest:
        raise ApiError(400, f"the files of COPY {args[0][:200]} were not uploaded")
    source = os.path.normpath(args[0])
    return TemplateStep(
        copy=digest, source="" if source == "." else source, to=args[1], mode=args[3][-4:]
    )
