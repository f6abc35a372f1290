"""Permissions: a table of all routes, and a function that judges every field.

The application does not start with a route that is missing from the table.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network

from starlette.routing import compile_path

from ...errors import Forbidden
from ...linux.routes import local_networks
from ...model.acquire import AcquireOptions, AttachRequest
from ...model.client_session import SessionTimeouts
from ...model.execs.exec import ExecRequest
from ...model.execution.execution import ExecutionRequest
from ...model.mount import Mount
from ...model.net.network import NetworkPolicy
from ...model.spec import OWN_ROOT, UNRESTRICTED, SandboxSpec
from ...model.template import TemplateRequest
from ...policy.host_networks import HostNetworks
from ...sessions.templates.steps import index_policy
from .caller import ADMIN, METRICS, READ_ONLY, TOKEN, USER
from .ceilings import Ceilings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any, TypeVar

    from ...model.base.model import Model
    from ...model.session import Snapshot
    from ...policy.addresses import Network
    from .caller import Caller

    Asked = TypeVar("Asked", bound=Model)

_EVERY_KEY = (METRICS, READ_ONLY, USER, ADMIN)
_LOOK = (READ_ONLY, USER, ADMIN)
_LOOK_INSIDE = (TOKEN, *_LOOK)
_WORK_INSIDE = (TOKEN, USER, ADMIN)
_OWNER = (USER, ADMIN)
_ADMINS = (ADMIN,)

NOTHING, JSON, STREAM = "nothing", "json", "stream"
"""Kinds of request bodies."""

ANY, WEBSOCKET = "ANY", "WS"
_MIB = 1 << 20


@dataclass(frozen=True)
class Rule:
    """Permissions of a route.

    Attributes:
        scopes: Scopes of the keys that may call it.
        body: Kind of the body: `nothing`, `json` or a `stream` of any length.
        changes: What it changes besides the files and processes of a sandbox: `policy`, `mounts`,
            `limits`, `life`, `keys`.
    """

    scopes: tuple[str, ...]
    body: str = NOTHING
    changes: tuple[str, ...] = ()


_SANDBOX = "/v1/sandboxes/{sandbox_id}"
_EXEC = f"{_SANDBOX}/execs/{{exec_id}}"
_CONTEXTS = f"{_SANDBOX}/contexts"
_CONTEXT = f"{_CONTEXTS}/{{context_id}}"
_PORT = f"{_SANDBOX}/ports/{{port}}"
_SESSION = "/v1/sessions/{session_id}"
_TEMPLATE, _UPLOAD = "/v1/templates/{template}", "/v1/uploads/{digest}"
_MAKING = ("policy", "mounts", "limits", "life")

ROUTES: dict[tuple[str, str], Rule] = {
    ("GET", "/v1/openapi.json"): Rule(_EVERY_KEY),
    ("GET", "/v1/health"): Rule(_EVERY_KEY),
    ("GET", "/v1/stats"): Rule(_EVERY_KEY),
    ("GET", "/v1/info"): Rule(_EVERY_KEY),
    ("GET", "/metrics"): Rule((METRICS, ADMIN)),
    ("POST", "/v1/sandboxes"): Rule(_OWNER, JSON, _MAKING),
    ("GET", "/v1/sandboxes"): Rule(_LOOK),
    ("GET", _SANDBOX): Rule(_LOOK_INSIDE),
    ("PATCH", _SANDBOX): Rule(_OWNER, JSON),
    ("DELETE", _SANDBOX): Rule(_OWNER, changes=("life",)),
    ("POST", f"{_SANDBOX}/extend"): Rule(_OWNER, JSON, ("life",)),
    ("POST", f"{_SANDBOX}/suspend"): Rule(_OWNER, changes=("life",)),
    ("POST", f"{_SANDBOX}/resume"): Rule(_OWNER, changes=("life",)),
    ("GET", f"{_SANDBOX}/stats"): Rule(_LOOK_INSIDE),
    ("GET", f"{_SANDBOX}/capabilities"): Rule(_LOOK_INSIDE),
    ("GET", f"{_SANDBOX}/protections"): Rule(_LOOK_INSIDE),
    ("POST", f"{_SANDBOX}/tokens"): Rule(_OWNER, JSON, ("keys",)),
    ("POST", f"{_SANDBOX}/execs"): Rule(_WORK_INSIDE, JSON, ("limits",)),
    ("GET", f"{_SANDBOX}/execs"): Rule(_LOOK_INSIDE),
    ("GET", _EXEC): Rule(_LOOK_INSIDE),
    ("GET", f"{_EXEC}/wait"): Rule(_LOOK_INSIDE),
    ("GET", f"{_EXEC}/output"): Rule(_LOOK_INSIDE),
    ("POST", f"{_EXEC}/signal"): Rule(_WORK_INSIDE, JSON),
    ("POST", f"{_EXEC}/kill"): Rule(_WORK_INSIDE),
    ("POST", f"{_EXEC}/resize"): Rule(_WORK_INSIDE, JSON),
    ("POST", f"{_EXEC}/stdin"): Rule(_WORK_INSIDE, STREAM),
    (WEBSOCKET, f"{_EXEC}/attach"): Rule(_WORK_INSIDE),
    ("POST", _CONTEXTS): Rule(_WORK_INSIDE, JSON),
    ("GET", _CONTEXTS): Rule(_LOOK_INSIDE),
    ("GET", _CONTEXT): Rule(_LOOK_INSIDE),
    ("DELETE", _CONTEXT): Rule(_WORK_INSIDE),
    ("POST", f"{_CONTEXT}/restart"): Rule(_WORK_INSIDE, JSON),
    ("POST", f"{_CONTEXT}/interrupt"): Rule(_WORK_INSIDE),
    ("POST", f"{_CONTEXT}/input"): Rule(_WORK_INSIDE, JSON),
    ("POST", f"{_CONTEXT}/cells"): Rule(_WORK_INSIDE, JSON),
    ("GET", f"{_CONTEXT}/cells/{{cell_id}}"): Rule(_LOOK_INSIDE),
    ("GET", f"{_CONTEXT}/variables"): Rule(_WORK_INSIDE),
    ("POST", _PORT): Rule(_WORK_INSIDE),
    (ANY, f"{_PORT}/http"): Rule(_WORK_INSIDE, STREAM),
    (ANY, f"{_PORT}/http/{{path:path}}"): Rule(_WORK_INSIDE, STREAM),
    (WEBSOCKET, f"{_PORT}/ws/{{path:path}}"): Rule(_WORK_INSIDE),
    (WEBSOCKET, f"{_PORT}/tcp"): Rule(_WORK_INSIDE),
    ("GET", f"{_SANDBOX}/files/content"): Rule(_LOOK_INSIDE),
    ("PUT", f"{_SANDBOX}/files/content"): Rule(_WORK_INSIDE, STREAM),
    ("GET", f"{_SANDBOX}/files/stat"): Rule(_LOOK_INSIDE),
    ("GET", f"{_SANDBOX}/files/list"): Rule(_LOOK_INSIDE),
    ("POST", f"{_SANDBOX}/files/move"): Rule(_WORK_INSIDE, JSON),
    ("POST", f"{_SANDBOX}/files/dirs"): Rule(_WORK_INSIDE, JSON),
    ("DELETE", f"{_SANDBOX}/files"): Rule(_WORK_INSIDE),
    ("GET", f"{_SANDBOX}/files/tree"): Rule(_LOOK_INSIDE),
    ("PUT", f"{_SANDBOX}/files/tree"): Rule(_WORK_INSIDE, STREAM),
    ("GET", f"{_SANDBOX}/files/glob"): Rule(_LOOK_INSIDE),
    ("GET", f"{_SANDBOX}/files/search"): Rule(_LOOK_INSIDE),
    ("POST", f"{_SANDBOX}/files/replace"): Rule(_WORK_INSIDE, JSON),
    ("GET", f"{_SANDBOX}/files/watch"): Rule(_LOOK_INSIDE),
    ("GET", f"{_SANDBOX}/network"): Rule(_LOOK_INSIDE),
    ("PUT", f"{_SANDBOX}/network"): Rule(_OWNER, JSON, ("policy",)),
    ("GET", f"{_SANDBOX}/network/log"): Rule(_LOOK_INSIDE),
    ("GET", f"{_SANDBOX}/network/learned"): Rule(_LOOK_INSIDE),
    ("GET", f"{_SANDBOX}/mounts"): Rule(_LOOK_INSIDE),
    ("POST", f"{_SANDBOX}/mounts"): Rule(_OWNER, JSON, ("mounts",)),
    ("GET", f"{_SANDBOX}/changes"): Rule(_LOOK),
    ("POST", f"{_SANDBOX}/snapshots"): Rule(_OWNER, JSON),
    ("POST", f"{_SANDBOX}/checkpoint"): Rule(_OWNER, JSON, ("life",)),
    ("POST", f"{_SANDBOX}/evict"): Rule(_ADMINS, JSON, ("life",)),
    ("POST", f"{_SANDBOX}/fork"): Rule(_OWNER, JSON, ("policy", "limits")),
    ("POST", f"{_SANDBOX}/merge"): Rule(_OWNER, JSON),
    ("GET", "/v1/snapshots"): Rule(_LOOK),
    ("GET", "/v1/snapshots/{snapshot_id}"): Rule(_LOOK),
    ("DELETE", "/v1/snapshots/{snapshot_id}"): Rule(_OWNER),
    ("POST", "/v1/templates"): Rule(_OWNER, JSON, ("policy", "mounts", "limits")),
    ("GET", "/v1/templates"): Rule(_LOOK),
    ("GET", _TEMPLATE): Rule(_LOOK),
    ("PATCH", _TEMPLATE): Rule(_OWNER, JSON),
    ("DELETE", _TEMPLATE): Rule(_OWNER),
    ("GET", f"{_TEMPLATE}/logs"): Rule(_LOOK),
    ("GET", _UPLOAD): Rule(_LOOK),
    ("PUT", _UPLOAD): Rule(_OWNER, STREAM),
    ("POST", "/v1/sessions"): Rule(_OWNER, JSON, _MAKING),
    ("GET", "/v1/sessions"): Rule(_LOOK),
    ("POST", "/v1/sessions/attach"): Rule(_OWNER, JSON, _MAKING),
    ("GET", "/v1/sessions/default"): Rule(_LOOK),
    ("PUT", "/v1/sessions/default"): Rule(_OWNER, JSON),
    ("GET", _SESSION): Rule(_LOOK),
    ("POST", f"{_SESSION}/release"): Rule(_OWNER, JSON, ("life",)),
    ("POST", f"{_SESSION}/detach"): Rule(_OWNER, changes=("life",)),
    ("POST", f"{_SESSION}/suspend"): Rule(_OWNER, changes=("life",)),
    ("POST", f"{_SESSION}/resume"): Rule(_OWNER, changes=("life",)),
    ("POST", f"{_SESSION}/touch"): Rule(_OWNER, changes=("life",)),
    ("POST", f"{_SESSION}/terminate"): Rule(_OWNER, changes=("life",)),
    ("POST", "/api/v1/sandbox/execute"): Rule(_OWNER, JSON, ("limits",)),
    ("GET", "/api/v1/sandbox/status/{execution_id}"): Rule(_LOOK),
    ("POST", "/api/v1/sandbox/kill/{execution_id}"): Rule(_OWNER, changes=("life",)),
    ("GET", "/api/v1/sandbox/info"): Rule(_LOOK),
    ("PATCH", "/api/v1/sandbox/config"): Rule(_ADMINS, JSON, _MAKING),
    ("GET", "/v1/pools"): Rule(_ADMINS),
    ("PUT", "/v1/pools"): Rule(_ADMINS, JSON, _MAKING),
    ("GET", "/v1/events"): Rule(_LOOK),
    ("GET", "/v1/keys"): Rule(_ADMINS),
    ("POST", "/v1/keys"): Rule(_ADMINS, JSON, ("keys",)),
    ("POST", "/v1/keys/{key_id}/rotate"): Rule(_ADMINS, JSON, ("keys",)),
    ("DELETE", "/v1/keys/{key_id}"): Rule(_ADMINS, changes=("keys",)),
}
"""By method and path, in the order in which they are tried; a preview answers every method."""

FIELDS: dict[str, str] = {
    "profile": "not `own_root` or `unrestricted`",
    "python_env": "`false`",
    "allow_degraded": "empty",
    "memory_dir": "below `host_roots`",
    "mounts.source": "below `host_roots`",
    "network.mode": "`limited`",
    "network.allowed_hosts": "public hosts, and what `host_networks` lists",
    "network.rules": "public hosts, and what `host_networks` lists",
    "limits": "up to `most`",
    "ttl_s": "up to `most`",
    "timeouts": "up to `most.idle_timeout_s`",
    "timeout_s": "up to `most.wall_time_s`",
    "max_output_bytes": "up to `most.output_bytes`",
    "memory_mb": "up to `most.memory_bytes`",
    "cpus": "up to `most.cpus`",
    "timeout_secs": "up to `most.wall_time_s`",
    "public": "`false`",
    "index_url": "public hosts, and what `host_networks` lists",
    "client_id": "its own",
}
"""Values that `Permissions.judge` allows callers other than admins, by field."""


@dataclass(frozen=True)
class Found:
    """The rule of a request, and the sandbox that its path names; empty where it names none."""

    path: str
    rule: Rule
    sandbox: str


def _index() -> dict[str, list[tuple[re.Pattern[str], str, Rule]]]:
    found: dict[str, list[tuple[re.Pattern[str], str, Rule]]] = {}
    for (method, path), rule in ROUTES.items():
        # As the framework reads it: two readings of one path would be a way around the table.
        found.setdefault(method, []).append((compile_path(path)[0], path, rule))
    return found


_BY_METHOD = _index()


def find(method: str, path: str) -> Found | None:
    """Find the route of a request; None where there is none."""
    for each in (method, *(() if method == WEBSOCKET else (ANY,))):
        for pattern, template, rule in _BY_METHOD.get(each, ()):
            if match := pattern.match(path):
                return Found(template, rule, match.groupdict().get("sandbox_id", ""))
    return None


_ADMINS_KEY = "use a key made with --scope admin, or the server's unix socket as its own user"


def check_complete(routes: Iterable[tuple[Iterable[str], str]]) -> None:
    """Refuse to serve a route that is not in the table.

    Args:
        routes: Methods and path of each, as the framework has them.

    Raises:
        LookupError: One is missing.
    """
    for methods, path in routes:
        for method in methods:
            if (method, path) not in ROUTES and (ANY, path) not in ROUTES:
                raise LookupError(f"{method} {path} has no entry in the table of permissions")


def check_route(caller: Caller, found: Found) -> None:
    """Refuse a route that is not open to this key.

    Raises:
        Forbidden: It is not; of a sandbox that is not the token's it is not said whether it exists.
    """
    if caller.sandbox and found.sandbox != caller.sandbox:
        raise Forbidden("this token is only valid for its own sandbox")
    if caller.scope in found.rule.scopes:
        return
    if found.rule.scopes == _ADMINS:
        raise Forbidden("only an admin may do this", hint=_ADMINS_KEY)
    allowed = ", ".join(found.rule.scopes)
    raise Forbidden(f"a {caller.scope} key may not do this", hint=f"use a key of scope {allowed}")


@dataclass(frozen=True)
class Permissions:
    """Values that callers other than admins may set in a request.

    Attributes:
        host_roots: Directories of the host that they may mount from.
        host_networks: Destinations on the host and its private networks that they may reach.
        most: Upper bounds.
        idle_s: The server's own `timeouts.idle_s`, of sandboxes that bring none.
    """

    host_roots: Sequence[str] = ()
    host_networks: HostNetworks = field(default_factory=HostNetworks)
    most: Ceilings = field(default_factory=Ceilings)
    idle_s: float | None = None

    def judge(self, caller: Caller, asked: Asked, field: str = "") -> Asked:
        """Check the caller's request and fill in its bounds; an admin's is returned unchanged.

        May read files and routes of the host, and take milliseconds: not on the event loop.

        Args:
            field: Where in the request it is; empty for the body itself.

        Raises:
            Forbidden: `field` names the part that only an admin may set.
        """
        if caller.is_admin:
            return asked
        try:
            judged: Asked = self._judged(caller, asked)
            return judged
        except Forbidden as exc:
            exc.field = f"{field}.{exc.field}".strip(".")
            raise

    def _judged(self, caller: Caller, asked: Any) -> Any:
        if isinstance(asked, SandboxSpec):
            return self._judge_spec(asked)
        if isinstance(asked, AttachRequest):
            return self._judge_attach(caller, asked)
        if isinstance(asked, NetworkPolicy):
            self._check_network(asked)
        elif isinstance(asked, Mount):
            self._check_source(asked, "source")
        elif isinstance(asked, AcquireOptions):
            self._check_timeouts(asked.timeouts)
        elif isinstance(asked, ExecRequest):
            self.most.check("timeout_s", asked.timeout_s, "wall_time_s")
            self.most.check("max_output_bytes", asked.max_output_bytes, "output_bytes")
        elif isinstance(asked, ExecutionRequest):
            self._check_execution(asked)
        elif isinstance(asked, TemplateRequest):
            return self._judge_template(caller, asked)
        else:
            raise TypeError(f"no permission check for a {type(asked).__name__}")
        return asked

    def check_life(self, caller: Caller, ttl_s: float) -> None:
        """Refuse a longer life than callers other than admins get.

        Raises:
            Forbidden: It is longer.
        """
        if not caller.is_admin:
            self.most.check("ttl_s", ttl_s, "ttl_s")

    def check_snapshots(self, caller: Caller, every: Callable[[], Sequence[Snapshot]]) -> None:
        """Refuse one more snapshot than callers other than admins may keep.

        Raises:
            QuotaExceeded: The client keeps as many.
        """
        if not caller.is_admin:
            self.most.check_snapshots(every)

    def _judge_spec(self, spec: SandboxSpec) -> SandboxSpec:
        if spec.profile == UNRESTRICTED:
            _refuse("profile", "an unrestricted sandbox")
        if spec.profile == OWN_ROOT:
            _refuse("profile", "a root with rights of its own")
        if spec.python_env:
            _refuse("python_env", "the server's own Python environment")
        if spec.allow_degraded:
            _refuse("allow_degraded", "less protection than the server has")
        self._check_network(spec.network, "network.")
        for i, mount in enumerate(spec.mounts):
            self._check_source(mount, f"mounts[{i}].source")
        if spec.memory_dir is not None:
            self._check_path(spec.memory_dir, "memory_dir")
        return self.most.apply(spec, self.idle_s)

    def client_of(self, caller: Caller, client_id: str | None) -> str:
        """Whom the caller acts for: itself, unless it names somebody.

        Raises:
            Forbidden: Another client, and the caller is no admin.
        """
        if client_id and client_id != caller.client and not caller.is_admin:
            what = "only an admin may act for another client"
            raise Forbidden(what, field="client_id", hint=_ADMINS_KEY)
        return client_id or caller.client

    def _judge_attach(self, caller: Caller, request: AttachRequest) -> AttachRequest:
        self.client_of(caller, request.client_id)
        if request.create_if_missing:
            spec = self.judge(caller, request.create_spec or SandboxSpec(), "create_spec")
            return request.altered(create_spec=spec)
        return request

    def _judge_template(self, caller: Caller, asked: TemplateRequest) -> TemplateRequest:
        if asked.public:
            _refuse("public", "a public template")
        for i, step in enumerate(asked.steps):
            if step.network is not None:
                self._check_network(step.network, f"steps[{i}].network.")
            if step.index_url:
                try:
                    self._check_network(index_policy(step.index_url), "")
                except Forbidden as exc:
                    exc.field = f"steps[{i}].index_url"
                    raise
            self.most.check(f"steps[{i}].timeout_s", step.timeout_s, "wall_time_s")
        base = self.judge(caller, asked.base, "base")
        return asked.altered(base=base.altered(ttl_s=None))

    def _check_network(self, policy: NetworkPolicy, prefix: str = "") -> None:
        if policy.is_unrestricted:
            _refuse(f"{prefix}mode", "the host's whole network")
        if not policy.allowed_hosts and not policy.rules:
            return
        if opened := self.host_networks.opened(policy, _own_networks()):
            field, what = opened
            hint = "host_networks in the server's configuration lists what other keys may reach"
            raise Forbidden(
                f"only an admin may open {what}: it is the server's host, or a network around it",
                field=f"{prefix}{field}",
                hint=hint,
            )

    def _check_source(self, mount: Mount, field: str) -> None:
        if mount.is_host_path:
            self._check_path(mount.source, field)

    def _check_path(self, path: str, field: str) -> None:
        """A directory of the host must be below one of the roots, without symlinks on the way."""
        plain = os.path.normpath(path)
        below = any(
            plain == root or plain.startswith(f"{root.rstrip('/')}/")
            for root in map(os.path.realpath, self.host_roots)
        )
        # A symlink below a root may lead out of it, and whoever may write there may make one.
        if ".." in path.split("/") or not below or os.path.realpath(plain) != plain:
            _refuse(field, "a host directory outside host_roots")

    def _check_timeouts(self, timeouts: SessionTimeouts | None) -> None:
        most = self.most.limits.idle_timeout_s
        if timeouts is None or most is None:
            return
        for name in ("idle_s", "detach_s", "suspend_s"):
            value = getattr(timeouts, name)
            forever = float("inf")
            self.most.check(
                f"timeouts.{name}", forever if value is None else value, "idle_timeout_s"
            )

    def _check_execution(self, asked: ExecutionRequest) -> None:
        memory = None if asked.memory_mb is None else asked.memory_mb * _MIB
        self.most.check("memory_mb", memory, "memory_bytes")
        self.most.check("cpus", asked.cpus, "cpus")
        self.most.check("timeout_secs", asked.timeout_secs, "wall_time_s")


def _own_networks() -> list[Network]:
    """The host's own addresses and networks, as they are now."""
    return [
        IPv4Network((address, bits)) if len(address) == 4 else IPv6Network((address, bits))
        for address, bits in local_networks()
    ]


def _refuse(field: str, what: str) -> None:
    raise Forbidden(f"only an admin may have {what}", field=field, hint=_ADMINS_KEY)
