"""Steps of a template as a server takes them: data, and uploads by their digest."""

from __future__ import annotations

import os

from ..errors import InvalidRequest
from ..model.calls import make_spec
from ..model.spec import SandboxSpec
from ..model.template import TemplateRequest, TemplateStep

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from ..client import Client
    from ..model.template import TemplateView
    from .template import Template

_CONFIGURED = {"Env": "env", "WorkingDir": "workdir", "User": "user"}
_OPTIONS = {"network", "timeout_s", "user", "workdir"}


def build(
    template: Template, name: str, client: Client, on_output: Callable[[bytes], None] | None
) -> TemplateView:
    """Have a server build a template.

    Raises:
        InvalidRequest: A step has an option that only this machine could keep.
        ExecError: A step failed.
    """
    steps = [each for step in template._plan for each in _steps(step, client)]
    base = SandboxSpec(image=template.image or None)

    def show(line: dict[str, Any]) -> None:
        if on_output is not None:
            on_output(f"{line['message']}\n".encode())

    return client.templates.build(TemplateRequest(name, tuple(steps), base), on_log=show)


def _steps(step: Any, client: Client) -> list[TemplateStep]:
    key: Mapping[str, Any] | None = getattr(step, "key", None)
    if key is None:
        return [_configured(name, value) for name, value in step.items()]
    if "fonts" in key:
        return []  # a server sees to that itself
    more = _options(step.options, is_copy="copy" in key)
    if "run" in key:
        return [TemplateStep(run=tuple(map(os.fspath, key["run"])), **more)]
    if "pip" in key:
        if key["find_links"]:
            hint = "copy the directory, and run pip with --no-index --find-links"
            raise InvalidRequest("is a directory of this machine", field="find_links", hint=hint)
        more.pop("network")  # the server's, for its index
        index = key["given_index"] or ""
        return [TemplateStep(pip_install=tuple(key["pip"]), index_url=index, **more)]
    source, digest = key["copy"], client.templates.upload(key["copy"])
    file = "" if os.path.isdir(source) else os.path.basename(source)
    return [TemplateStep(copy=digest, source=file, to=key["to"])]


def _configured(name: str, value: Any) -> TemplateStep:
    if name not in _CONFIGURED:
        hint = "build it on this machine, with Template.from_image"
        raise InvalidRequest("is a property of images", field=name, hint=hint)
    return TemplateStep(**{_CONFIGURED[name]: value})


def _options(options: Mapping[str, Any], *, is_copy: bool) -> dict[str, Any]:
    if is_copy:
        return {}
    for name in options:
        if name not in _OPTIONS - {"workdir"}:
            hint = "give it to Sandbox.create, or build the template on this machine"
            raise InvalidRequest("is not for steps on a server", field=name, hint=hint)
    policy = make_spec(None, (), options.get("network") or "none", None, {}).network
    return {
        "network": policy,
        "timeout_s": options.get("timeout_s"),
        "user": str(options.get("user") or ""),
    }
