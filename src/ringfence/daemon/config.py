"""How the daemon is set up."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from ..api.access.ceilings import Ceilings
from ..api.bounds import Bounds
from ..backends.registry import DEFAULT
from ..e2b.settings import E2BSettings
from ..model.base import checks, jsonform
from ..model.base.model import Model
from ..model.places import state_directory
from ..policy.host_networks import HostNetworks
from ..sessions.config import ManagerConfig
from .logs import LEVELS
from .membership import Membership, Scaling
from .sockets import check_address

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SOCKET = "ringfence.sock"
_DAY_S = 86_400.0
_MOST_SHARDS = 32


@dataclass(frozen=True, eq=False, repr=False)
class DaemonConfig(Model):
    """Where the daemon keeps its state, where it listens, and what it makes sandboxes with.

    Attributes:
        state_dir: Private to this user; one daemon each.
        backends: Names; the first that can make a sandbox does.
        backends_file: Describes backends of one's own; empty for this user's `backends.toml`.
        listen: `HOST:PORT` of a TCP socket beside the unix socket; empty for none.
        allow_public: Let `listen` be an address that others can reach, without TLS.
        tls_certificate, tls_key: PEM files for `listen`.
        allowed_hosts: Names, beside the address itself, that a `Host` header may say.
        allowed_origins: Of web pages that may call.
        outlive_s: How long sandboxes and what runs in them live on after the daemon was killed, or told
            to leave, until the next one goes on with them; 0: they end with it.
        host_roots: Directories that users' keys may mount from; admins may from any.
        host_networks: What users' keys may reach of this host and its private networks, as rules
            `HOST[:PORTS]`; admins may reach any.
        most: Ceilings of what users' keys may ask for.
        bounds: How much is taken in, and how patiently.
        e2b: E2B's API on the same sockets, as its SDKs call it; None: it is not served.
        membership: In a cluster, whose node actor starts the daemon; None: it is of none.
        shards: In a cluster: servers of each node, each a node of its own to gateways; 0: one for every
            four processors.
        snapshot_store: In a cluster: where snapshots outlive their node, as fsspec reads it: a directory
            that all nodes share, or `s3://BUCKET/PREFIX`; empty for none.
        scaling: In a cluster: how it asks Ray for nodes and releases them; None: it does neither.
        log_level: `debug` has every request, `info` what happens to sandboxes, `warning` what was refused.
    """

    state_dir: str = ""
    backends: tuple[str, ...] = (DEFAULT,)
    backends_file: str = ""
    listen: str = ""
    allow_public: bool = False
    tls_certificate: str = ""
    tls_key: str = ""
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    host_roots: tuple[str, ...] = ()
    host_networks: tuple[str, ...] = ()
    most: Ceilings = field(default_factory=Ceilings)
    outlive_s: float = 600.0
    e2b: E2BSettings | None = None
    membership: Membership | None = None
    shards: int = 0
    snapshot_store: str = ""
    scaling: Scaling | None = None
    log_level: str = "info"
    bounds: Bounds = field(default_factory=Bounds)
    manager: ManagerConfig = field(default_factory=ManagerConfig)

    def __post_init__(self) -> None:
        object.__setattr__(self, "state_dir", os.path.abspath(self.state_dir or state_directory()))
        for name in ("backends", "allowed_hosts", "allowed_origins", "host_roots", "host_networks"):
            object.__setattr__(self, name, checks.texts(getattr(self, name), name))
        if not self.backends:
            checks.refuse("backends", "must not be empty", 'as ["native"], or omit the field')
        for i, root in enumerate(self.host_roots):
            checks.absolute_path(root, f"host_roots[{i}]")
        HostNetworks(self.host_networks)
        checks.text(self.backends_file, "backends_file")
        checks.text(self.snapshot_store, "snapshot_store")
        checks.integer(self.shards, "shards", 0, _MOST_SHARDS)
        checks.choice(self.log_level, "log_level", LEVELS, "debug, info, warning or error")
        checks.flag(self.allow_public, "allow_public")
        checks.number(self.outlive_s, "outlive_s", 0.0, _DAY_S)
        if bool(self.tls_certificate) != bool(self.tls_key):
            missing = "tls_key" if self.tls_certificate else "tls_certificate"
            checks.refuse(missing, "is missing", "give both the certificate and the key")
        for i, origin in enumerate(self.allowed_origins):
            scheme, _, host = origin.rstrip("/").partition("://")
            if (not scheme or not host or "/" in host) and origin != "null":
                hint = "use only scheme and host, such as https://app.example.com"
                checks.refuse(f"allowed_origins[{i}]", f"{origin!r} is not an origin", hint)
        for i, name in enumerate(self.allowed_hosts):
            if not name or not name.isascii() or set("/*@ \t\n") & {*name}:
                hint = "use only a host name, such as api.example.com"
                checks.refuse(f"allowed_hosts[{i}]", f"{name!r} is not a host name", hint)
        if self.listen:
            check_address(self.listen, public=self.allow_public or bool(self.tls_certificate))

    @property
    def socket_path(self) -> str:
        return os.path.join(self.state_dir, SOCKET)

    def to_json(self) -> dict[str, Any]:
        return jsonform.dump(self)
