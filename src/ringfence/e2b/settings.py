"""Settings of E2B's API: its domain, its templates and what `internet` means."""

from __future__ import annotations

import re

from ..errors import InvalidRequest
from ..model.base import checks, jsonform
from ..model.base.model import Model
from ..model.base.record import dataclass, field
from ..model.mount import READ_WRITE, Mount
from ..model.net.network import NetworkPolicy
from ..model.spec import SandboxSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

USER, HOME = "user", "/home/user"
ROOT, HOME_OF_ROOT = "root", "/root"
_OF_USER = {"HOME": HOME, "USER": USER, "LOGNAME": USER}
_OF_ROOT = {"HOME": HOME_OF_ROOT, "USER": ROOT, "LOGNAME": ROOT}
IDENTITY = "/run/e2b"
"""Directory of the files that tell programs inside which sandbox they are in."""
_MOUNTS = tuple(Mount(each, "", READ_WRITE, protect=()) for each in (HOME, IDENTITY))
# E2B's files are written by root, and OpenAI Agents makes this directory so.
# Its sudo comes before the host's, which cannot work inside.
_BUILT_IN_SPEC = SandboxSpec(
    mounts=(Mount("/workspace", "", READ_WRITE, protect=()),),
    env={
        "PATH": f"/opt/ringfence:{HOME}/.local/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin"
        ":/sbin:/bin",
        "NPM_CONFIG_PREFIX": f"{HOME}/.local",  # of `npm install -g`: /usr is read-only
    },
)
_BUILT_IN = ("base", "code-interpreter-v1")


_DOMAIN = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")


def variables_of_root(env: Mapping[str, str]) -> dict[str, str]:
    """Return the login variables of root; what a template or client has set in `env` wins, as with E2B."""
    return {
        name: value
        for name, value in _OF_ROOT.items()
        if env.get(name, _OF_USER[name]) == _OF_USER[name]
    }


@dataclass(frozen=True, eq=False, repr=False)
class E2BSettings(Model):
    """Settings of E2B's API.

    Attributes:
        templates: What an E2B template name stands for, beside `base` and `code-interpreter-v1`.
        internet: Policy of a sandbox whose client does not forbid internet access; none by default.
        domain: Sandboxes are reached at `PORT-ID.DOMAIN`, the API at `api.DOMAIN`; empty for none.
    """

    templates: Mapping[str, SandboxSpec] = field(default_factory=dict)
    internet: NetworkPolicy = field(default_factory=NetworkPolicy)
    domain: str = ""

    def __post_init__(self) -> None:
        checks.instance(self.internet, "internet", NetworkPolicy)
        for name, spec in self.templates.items():
            checks.text(name, "templates", empty=False)
            checks.instance(spec, f"templates.{name}", SandboxSpec)
        domain = checks.text(self.domain, "domain").lower().strip(".")
        if domain and not _DOMAIN.fullmatch(domain):
            checks.refuse("domain", f"{domain!r} is not a domain", "as sandboxes.example.com")
        object.__setattr__(self, "domain", domain)

    def spec_of(self, template: str) -> SandboxSpec | None:
        """Return what a template name stands for; `NAME:TAG` is the same as `NAME`.

        Each has E2B's home directory, in which the paths that clients write begin.
        """
        name = template.partition(":")[0]
        spec = self.templates.get(name)
        if spec is None:
            if name not in _BUILT_IN:
                return None
            spec = _BUILT_IN_SPEC
        targets = {each.target for each in spec.mounts}
        return spec.altered(
            mounts=(*spec.mounts, *(each for each in _MOUNTS if each.target not in targets)),
            workdir=spec.workdir or HOME,
            env={**_OF_USER, **spec.env},
        )

    def to_json(self) -> dict[str, Any]:
        templates = {name: spec.to_json() for name, spec in self.templates.items()}
        return jsonform.dump(self, templates=templates)

    @classmethod
    def _nested(cls) -> jsonform.Readers:
        return {"templates": _read_templates}


def _read_templates(value: object) -> dict[str, SandboxSpec]:
    given = jsonform.json_object(value, "templates")
    specs: dict[str, SandboxSpec] = {}
    for name, form in given.items():
        try:
            specs[name] = SandboxSpec.from_json(form)
        except InvalidRequest as exc:
            exc.field = f"{name}.{exc.field}"
            raise
    return specs
