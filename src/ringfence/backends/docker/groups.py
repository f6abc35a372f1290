"""Resource usage of a container, read from its cgroups; only limits that the engine lacks are written."""

from __future__ import annotations

from ...launcher import cgroups
from ..local.host.cgroups import for_sockets

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_ROOT = "/sys/fs/cgroup"
_SOCKETS = "memory.kmem.tcp.limit_in_bytes"


class Group:
    """The cgroups of a process, of either version; each value is None where nobody counts it."""

    def __init__(self, pid: int) -> None:
        self._places: dict[str, str] = {}
        for line in _text(f"/proc/{pid}/cgroup").splitlines():
            _number, controllers, path = line.split(":", 2)
            if not controllers:
                self._places.setdefault("", f"{_ROOT}{path}")
            for name in controllers.split(","):
                self._places[name] = f"{_ROOT}/{name}{path}"

    def cpu_ns(self) -> int | None:
        v1 = self._number("cpuacct", "cpuacct.usage")
        v2 = self._field("", "cpu.stat", "usage_usec")
        return v1 if v1 is not None else v2 * 1000 if v2 is not None else None

    def memory_bytes(self) -> int | None:
        """In use now, files in memory included."""
        return self._either(("memory", "memory.usage_in_bytes"), ("", "memory.current"))

    def peak_memory_bytes(self) -> int | None:
        return self._either(("memory", "memory.max_usage_in_bytes"), ("", "memory.peak"))

    def memory_limit(self) -> int | None:
        return self._either(("memory", "memory.limit_in_bytes"), ("", "memory.max"))

    @property
    def counts_sockets_apart(self) -> bool:
        """True if the memory limit excludes socket buffers, as in cgroup version 1."""
        return "memory" in self._places

    def sockets_limit(self) -> int | None:
        """As the kernel has it; only of version 1."""
        return self._number("memory", _SOCKETS)

    def limit_sockets(self) -> None:
        """Have what sockets hold counted, too: engines do not know of it. Who may not leaves it at that.

        Precondition: nothing of the user's has run; what is open already is not counted.
        """
        place, limit = self._places.get("memory"), self.memory_limit()
        if place is None or limit is None:
            return
        try:
            cgroups.write(f"{place}/{_SOCKETS}", str(for_sockets(limit)))
        except OSError:
            return  # an engine of somebody else's, or on another machine: the report says so

    def pids_limit(self) -> int | None:
        return self._either(("pids", "pids.max"), ("", "pids.max"))

    def oom_kills(self) -> int | None:
        """How often something in it was killed for lack of memory."""
        v1 = self._field("memory", "memory.oom_control", "oom_kill")
        return v1 if v1 is not None else self._field("", "memory.events", "oom_kill")

    def _either(self, *places: Sequence[str]) -> int | None:
        found = (self._number(controller, name) for controller, name in places)
        return next((value for value in found if value is not None), None)

    def _number(self, controller: str, name: str) -> int | None:
        text = self._read(controller, name).strip()
        return int(text) if text.isdigit() else None

    def _field(self, controller: str, name: str, field: str) -> int | None:
        for line in self._read(controller, name).splitlines():
            if line.split()[:1] == [field]:
                return int(line.split()[1])
        return None

    def _read(self, controller: str, name: str) -> str:
        place = self._places.get(controller)
        return _text(f"{place}/{name}") if place else ""


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""
