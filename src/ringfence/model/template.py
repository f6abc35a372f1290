"""Templates of a server: what a client asks to build, and what it is told of it."""

from __future__ import annotations

from .base import checks, jsonform
from .base.checks import FrozenMap
from .base.model import Model
from .base.record import dataclass, field
from .net.network import NetworkPolicy
from .spec import SandboxSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Self

MOST_STEPS = 200
DEFAULT_TAG = "default"
_KINDS = ("run", "pip_install", "copy", "env", "workdir", "user")
_LONGEST_S = 86_400.0
_DIGEST = 64
_HEX = frozenset("0123456789abcdef")


@dataclass(frozen=True, eq=False, repr=False)
class TemplateStep(Model):
    """A step: `run`, `pip_install`, `copy`, `env`, `workdir` or `user`, and its options.

    Attributes:
        run: A command; in JSON a string is a script for `sh`.
        pip_install: Requirements, installed from wheels.
        index_url: Package index of `pip_install`; empty for the server's.
        copy: SHA-256 of an uploaded tar stream, perhaps gzipped.
        source: What of it is copied, by its name or a pattern; empty for all.
        to: Where to; with a slash at its end the directory that it comes into.
        mode: Permissions of what is copied, in octal; empty leaves them.
        env: Variables of later steps and of sandboxes; see `keep_env`.
        workdir: Where later steps and commands of sandboxes start.
        user: Of this step; alone, of later steps and of sandboxes.
        network: Policy of this step; None for that of `base`, and the index for `pip_install`.
        timeout_s: Of this step.
        fresh: Do this step and those after it anew.
    """

    run: tuple[str, ...] = ()
    pip_install: tuple[str, ...] = ()
    index_url: str = ""
    copy: str = ""
    source: str = ""
    to: str = ""
    mode: str = ""
    env: Mapping[str, str] = field(default_factory=FrozenMap)
    workdir: str = ""
    user: str = ""
    network: NetworkPolicy | None = None
    timeout_s: float | None = None
    fresh: bool = False

    def __post_init__(self) -> None:
        checks.flag(self.fresh, "fresh")
        given = [name for name in _KINDS if getattr(self, name)]
        if len(given) != 1 and (len(given) != 2 or given[0] not in ("run", "pip_install", "copy")):
            checks.refuse("", f"a step is one of {', '.join(_KINDS)}", 'as {"run": "make"}')
        if len(given) == 2 and given[1] != "user":
            checks.refuse(given[1], "is a step of its own", f"put it before the {given[0]} step")
        put = object.__setattr__
        put(self, "run", checks.arguments(self.run, "run"))
        put(self, "env", checks.env_map(self.env, "env"))
        for i, each in enumerate(checks.arguments(self.pip_install, "pip_install")):
            if not each.strip() or each.lstrip().startswith("-"):
                checks.refuse(f"pip_install[{i}]", f"{each!r} is not a requirement", "as pandas>=2")
        self._check_copy()
        if self.workdir:
            checks.absolute_path(self.workdir, "workdir")
        if self.user:
            checks.user(self.user, "user")
        if self.timeout_s is not None:
            checks.number(self.timeout_s, "timeout_s", 0.001, _LONGEST_S)

    def _check_copy(self) -> None:
        if not self.copy:
            return
        check_digest(self.copy, "copy")
        if not self.to:
            checks.refuse("to", "is missing from a copy", "as /srv/data")
        for name in ("source", "to"):
            if ".." in checks.text(getattr(self, name), name).split("/"):
                checks.refuse(name, "must not climb by '..'", "name the place itself")
        if self.source.startswith("/"):
            checks.refuse("source", "must be a name inside the tar stream", "as src/app.py")
        if self.mode and (len(self.mode) > 4 or not set(self.mode) <= set("01234567")):
            checks.refuse("mode", f"{self.mode!r} is not octal", "as 0755")

    @property
    def kind(self) -> str:
        """The kind of the step."""
        return next(name for name in _KINDS if getattr(self, name))

    @property
    def title(self) -> str:
        """A line for logs."""
        if self.run:
            shell = self.run[:2] in (("sh", "-c"), ("bash", "-c")) and len(self.run) == 3
            return "RUN " + (self.run[2] if shell else " ".join(self.run))
        if self.pip_install:
            return "PIP INSTALL " + " ".join(self.pip_install)
        if self.copy:
            return f"COPY {self.source or '.'} {self.to}"
        shown = " ".join(self.env) if self.env else self.workdir or self.user
        return f"{self.kind.upper()} {shown}"

    def to_json(self) -> dict[str, Any]:
        """The JSON object of what is set."""
        form = jsonform.dump(self)
        return {
            name: value for name, value in form.items() if value not in ("", [], {}, None, False)
        }

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Read `to_json`'s form; `run` may be a script."""
        given = jsonform.json_object(data, cls.__name__)
        if isinstance(given.get("run"), str):
            given["run"] = ["sh", "-c", given["run"]]
        return cls(**jsonform.take(cls, given))


def check_digest(value: object, field: str) -> str:
    """A SHA-256 in hexadecimal digits."""
    given = checks.text(value, field)
    if len(given) != _DIGEST or not _HEX.issuperset(given):
        checks.refuse(field, "is not a SHA-256 in lower-case hexadecimal digits")
    return given


@dataclass(frozen=True, eq=False, repr=False)
class TemplateRequest(Model):
    """A template to be built.

    Attributes:
        name: Of its owner; a template of the same name is replaced when the build is ready.
        steps: In this order; each is a layer, and one that is known is not done again.
        base: Spec of the sandboxes that the steps run in: image or host, network, limits, tier, ...
            Sandboxes of the template have the same image, tier, mounts and variables.
        backend: Its name; empty for the first that can.
        start: Script that is started in each sandbox of the template.
        ready: Script that exits with 0 once `start` is ready to be used.
        keep_env: Whether sandboxes have the variables of `env` steps; without, only the steps and
            `start` have them.
        public: Every client may start sandboxes from it; admins only.
        fresh: Do every step anew.
        timeout_s: For all steps together; None for the server's bound.
    """

    name: str
    steps: tuple[TemplateStep, ...] = ()
    base: SandboxSpec = field(default_factory=SandboxSpec)
    backend: str = ""
    start: str = ""
    ready: str = ""
    keep_env: bool = True
    public: bool = False
    fresh: bool = False
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        checks.name(self.name, "name")
        if self.name == "default":
            checks.refuse("name", "'default' is no template's name", "choose another one")
        steps = checks.items(self.steps, "steps")
        if len(steps) > MOST_STEPS:
            checks.refuse("steps", f"more than {MOST_STEPS}", "join commands with &&")
        for i, each in enumerate(steps):
            checks.instance(each, f"steps[{i}]", TemplateStep)
        object.__setattr__(self, "steps", steps)
        checks.instance(self.base, "base", SandboxSpec)
        for name in ("id", "secrets", "memory_dir", "python_env", "ttl_s"):
            if getattr(self.base, name):
                checks.refuse(f"base.{name}", "is not for builds", "give it to the sandbox")
        if self.backend:
            checks.name(self.backend, "backend")
        if self.timeout_s is not None:
            checks.number(self.timeout_s, "timeout_s", 0.001, _LONGEST_S)
        checks.flag(self.keep_env, "keep_env")
        checks.flag(self.public, "public")
        checks.flag(self.fresh, "fresh")

    @property
    def variables(self) -> dict[str, str]:
        """Variables of the `env` steps."""
        return {name: value for each in self.steps for name, value in each.env.items()}


@dataclass(frozen=True, eq=False, repr=False)
class TemplateView(Model):
    """A template, and its newest build.

    Attributes:
        status: Of the newest build: `reserved`, `waiting`, `building`, `ready` or `failed`.
        is_ready: Whether sandboxes can be started from it: a failed build leaves the one before.
        step: Number of the step that it is at, or failed at; the start command comes after the last.
        steps: How many there are.
        error: Why the newest build failed.
        size_bytes: Of the layers that its steps added.
        tags: A tag to the id of its build.
    """

    id: str
    name: str
    owner: str
    public: bool
    status: str
    is_ready: bool
    build_id: str
    step: int = 0
    steps: int = 0
    error: str = ""
    size_bytes: int = 0
    created_at: float = 0.0
    updated_at: float = 0.0
    tags: Mapping[str, str] = field(default_factory=FrozenMap)
