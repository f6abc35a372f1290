"""How a client asks for a session: what it needs, and what it would rather have."""

from __future__ import annotations

from .base import checks
from .base.checks import FrozenMap
from .base.ids import check_id
from .base.model import Model
from .base.record import dataclass, field
from .client_session import SessionTimeouts
from .spec import SandboxSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_MOST_BYTES = 2**46  # as `Limits.memory_bytes`
_LONGEST_KEY = 255


@dataclass(frozen=True, eq=False, repr=False)
class RequiredCapabilities(Model):
    """Capabilities that a sandbox must have, as read back from the kernel.

    Attributes:
        network: True: some destination must be reachable; False: none may be; None: no requirement.
        write_access: The same for writing files.
        minimum_memory_bytes: The memory limit is at least this.
        readable_paths, writable_paths: Absolute inside; each must exist and be readable or writable.
    """

    network: bool | None = None
    write_access: bool | None = None
    minimum_memory_bytes: int | None = None
    readable_paths: tuple[str, ...] = ()
    writable_paths: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("network", "write_access"):
            if getattr(self, name) is not None:
                checks.flag(getattr(self, name), name)
        if self.minimum_memory_bytes is not None:
            checks.integer(self.minimum_memory_bytes, "minimum_memory_bytes", 1, _MOST_BYTES)
        for name in ("readable_paths", "writable_paths"):
            given = enumerate(checks.at_most(getattr(self, name), name, checks.MOST_PATHS))
            paths = tuple(checks.absolute_path(path, f"{name}[{i}]") for i, path in given)
            object.__setattr__(self, name, paths)

    @property
    def is_anything(self) -> bool:
        """True if anything is required."""
        return self != RequiredCapabilities()


@dataclass(frozen=True, eq=False, repr=False)
class AcquireOptions(Model):
    """How to find the sandbox of a new session.

    Attributes:
        preferred_id: A sandbox of this client with this id is taken again; where there is none, a
            new one gets the id, or another id where this one is or was somebody's.
        require_fresh: Only a sandbox that nobody has used, this client included.
        required: What it must be able to do.
        preferred_backend: Its name; no other one is taken instead. Empty: the first that can.
        required_labels: A sandbox that is taken again must have them; a new one gets them.
        use_pool: Whether a warm sandbox will do.
        timeouts: None takes the manager's. Of `idle_s` and `limits.idle_timeout_s` the shorter is meant.
        key: Chosen by the client: asking again under the same key gives the same session.
        metadata: The client's own notes on the session.
        snapshot_id: Start with the files of this snapshot, which must be this client's.
    """

    preferred_id: str | None = None
    require_fresh: bool = False
    required: RequiredCapabilities = field(default_factory=RequiredCapabilities)
    preferred_backend: str = ""
    required_labels: Mapping[str, str] = field(default_factory=FrozenMap)
    use_pool: bool = True
    timeouts: SessionTimeouts | None = None
    key: str = ""
    metadata: Mapping[str, str] = field(default_factory=FrozenMap)
    snapshot_id: str | None = None

    def __post_init__(self) -> None:
        for name in ("preferred_id", "snapshot_id"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check_id(getattr(self, name), name))
        checks.flag(self.require_fresh, "require_fresh")
        checks.flag(self.use_pool, "use_pool")
        checks.instance(self.required, "required", RequiredCapabilities)
        if self.preferred_backend:
            checks.name(self.preferred_backend, "preferred_backend")
        if self.timeouts is not None:
            checks.instance(self.timeouts, "timeouts", SessionTimeouts)
        if len(checks.text(self.key, "key")) > _LONGEST_KEY or not self.key.isprintable():
            checks.refuse("key", f"must be up to {_LONGEST_KEY} printable characters")
        put = object.__setattr__
        put(self, "required_labels", checks.labels(self.required_labels, "required_labels"))
        put(self, "metadata", checks.string_map(self.metadata, "metadata"))
        checks.weigh("metadata", checks.NOTES_BYTES, self.metadata)


@dataclass(frozen=True, eq=False, repr=False)
class AttachRequest(Model):
    """A wish to work with a certain sandbox.

    Attributes:
        sandbox_id: Or its session's.
        client_id: Empty is whoever asks a server; a manager has to be told.
        create_if_missing: Make it, with `create_spec`, where this client has none of that id.
    """

    sandbox_id: str
    client_id: str = ""
    create_if_missing: bool = False
    create_spec: SandboxSpec | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sandbox_id", check_id(self.sandbox_id, "sandbox_id"))
        if self.client_id != "":
            check_client(self.client_id)
        checks.flag(self.create_if_missing, "create_if_missing")
        if self.create_spec is not None:
            checks.instance(self.create_spec, "create_spec", SandboxSpec)
            if not self.create_if_missing:
                checks.refuse("create_spec", "needs create_if_missing=true")


def check_client(value: object, field_name: str = "client_id") -> str:
    """A client's name: who owns what is made for it. Any text of up to 255 characters."""
    given = checks.text(value, field_name, empty=False)
    if len(given) > _LONGEST_KEY or not given.isprintable():
        checks.refuse(field_name, f"must be up to {_LONGEST_KEY} printable characters")
    return given
