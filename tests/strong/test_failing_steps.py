"""Whatever step of a create fails in a backend with an agent, nothing stays behind; see `tests.failing`.

A socket that is closed because nobody has it any more counts as closed.
"""

from __future__ import annotations

import gc
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ringfence import Limits, Mount, SandboxSpec
from ringfence.backends import registry
from ringfence.backends.command import place
from ringfence.backends.docker.backend import DockerBackend
from ringfence.backends.local.agents.guest import GuestSandbox
from tests.engine import running_engine
from tests.failing import OF_THEMSELVES, left_by_creates
from tests.features import require
from tests.native.outside import cgroups_of, children_of, until

GONE_WITHIN_S = 5.0
NEEDS = {"landlock": "landlock", "bubblewrap": "bwrap", "gvisor": "runsc", "docker": "dockerd"}
PACKAGES = {"bubblewrap": "command"}
# Steps that only fill in an object, or take over what has come: no error of the kernel is one of theirs.
IN_MEMORY = {
    "GuestSandbox.complete",
    "GuestSandbox.__init__",
    "LocalSandbox.__init__",
    "GuestFiles.__init__",
    "LocalFiles.__init__",
    "ContainedNetwork.__init__",
    "LandlockNetwork.__init__",
    "SandboxNetwork.__init__",
    "SandboxNetwork.have",
    "Group.can_freeze",
    "DockerBackend.provision",
    "DockerSandbox.__init__",
    "JailMounts._hold",
    "Mounting._hold",
    "host_id",
    "_Below.path",
    "bound_sends",
    "environment",
    "name_of",
    "session_root",
    "answer",
}


def is_exempt(name: str) -> bool:
    """Tell so of what they define inside, too."""
    return name in OF_THEMSELVES or name.partition(".<locals>")[0] in IN_MEMORY


class Held:
    """What this process has of the host for sandboxes of a backend.

    Attributes:
        kinds: Creates of a plain sandbox, and of one with a mount, limits, a directory and a name.
    """

    def __init__(self, name: str, engine: str, state_dir: Path, source: Path) -> None:
        package = PACKAGES.get(name, name)
        self.rooms = tuple({"backends/command", "backends/local", f"backends/{package}"})
        self._has_engine = bool(engine)
        backend: Any
        if engine:
            backend = DockerBackend(engine, state_dir=str(state_dir))
        else:
            backend = registry.new_backend(name, state_dir=str(state_dir))
        self.backend = backend
        self._places = [str(state_dir), str(source), place.base()]
        target, access = (str(source), "ro") if name == "landlock" else ("/data", "rw")
        mount = Mount(target, str(source), access=access)
        tier = "strong" if name == "gvisor" else "light"
        more = SandboxSpec(
            tier=tier,
            mounts=() if name == "bubblewrap" else (mount,),
            limits=Limits(memory_bytes=1 << 28, pids=50),
            workdir="/work",
            allow_degraded=("*",),  # an ordinary user may have no cgroup
            id="named",
        )
        self.kinds: list[Callable[[], GuestSandbox]] = [
            lambda: backend.provision(SandboxSpec(tier=tier)),
            lambda: backend.provision(more),
        ]
        self._ids = getattr(backend, "_ids", None) or backend.host_ids
        self._live = backend._jailed if name == "gvisor" else backend._live
        for create in (*self.kinds, *self.kinds):  # all that is found once is known
            create().terminate()

    def at_rest(self) -> dict[str, Any]:
        backend = self.backend
        if self._has_engine:
            backend.client().close()  # connections that it keeps, of which it makes new ones
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "processes": children_of(os.getpid()),
            "ids": len(self._ids()._free) if os.geteuid() == 0 else 0,
            "sandboxes": dict(self._live),
            "names": set(backend._making),
            "cgroups": sorted(cgroups_of(f".{os.getpid()}.")),
            "files": [sorted(os.listdir(each)) for each in self._places],
            "threads": [each.name for each in threading.enumerate()],
        }

    def unlike(self, before: dict[str, Any]) -> dict[str, Any]:
        """What is other than before, once all that ends by itself has ended."""
        until(lambda: self.at_rest() == before, GONE_WITHIN_S)
        now = self.at_rest()
        return {name: (before[name], now[name]) for name in now if now[name] != before[name]}


@pytest.fixture(name="held", params=NEEDS, scope="module")
def fixture_held(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Held]:
    require("user namespaces")
    require(NEEDS[request.param])
    source = Path(tempfile.mkdtemp(dir="/var/tmp"))
    source.chmod(0o755)
    with ExitStack() as stack:
        engine = ""
        if "docker" == request.param:
            require("root")
            engine = stack.enter_context(running_engine())
        held = Held(request.param, engine, tmp_path_factory.mktemp("state"), source)
        stack.callback(held.backend.close)
        yield held
    source.rmdir()
    gc.collect()  # what a failing step left is closed now, and not in the middle of another test


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # see above
def test_nothing_stays_of_a_create_of_which_a_step_fails(held: Held) -> None:
    left, count = left_by_creates(held, held.rooms, is_exempt)

    assert not left, left
    assert count > 90, "they are not seen any more"
