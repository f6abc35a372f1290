"""gVisor's `runsc`: its location, version and flags."""

from __future__ import annotations

import hashlib
import os
import re
import resource
import shutil
import subprocess

from ...errors import BackendUnavailable
from ...policy.seccomp import Condition, Rule
from ..local import launched
from ..local.agents import agent_code

KERNEL_BYTES = 256 << 20  # the sentry and the gofer, with Go's idea of memory
_KERNEL_PIDS = 4096
_OF_EACH = 40  # of the host's for one of the guest's: up to 30 were measured, with 1,000


def host_pids(guest_pids: int) -> int:
    """How many processes and threads of the host's so many of the guest's may take.

    gVisor runs each process of the guest in one of the host's, with a thread in it for each of its own
    threads that ever ran it, and keeps them for the next: in a fork bomb that is nearly the square.
    Where there are no more, gVisor as a whole ends: so this is for the host's sake alone.
    """
    return min(guest_pids * guest_pids + _KERNEL_PIDS, _most_of_the_host())


def safe_pids() -> int:
    """How many processes a guest may have whose fork bomb the host has enough processes and threads for."""
    return _most_of_the_host() // _OF_EACH


def _most_of_the_host() -> int:
    """A quarter: of threads, or of the ids that each thread needs one of, whichever there are fewer."""
    found = []
    for name in ("threads-max", "pid_max"):
        with open(f"/proc/sys/kernel/{name}", encoding="ascii") as file:
            found.append(int(file.read()))
    return min(found) // 4


# Waits for an RCU grace period take 5 to 20 ms each, and a sandbox starts `runsc` five times in a row. A
# program with one thread does not wait; one in Go has several from its start. See decision 0088.
_REGISTER_PRIVATE_EXPEDITED = 1 << 4  # include/uapi/linux/membarrier.h

# Every start registers for a barrier within its own process, before it knows what it is started for;
# the platforms that run a guest in the Sentry's own memory use it, and those fall back to the global
# barrier, which stays. What a guest asks for itself is answered by the Sentry, from the global one.
NO_REGISTERING = Rule(
    ("membarrier",), "ENOSYS", (Condition(0, 32, 0xFFFF_FFFF, (_REGISTER_PRIVATE_EXPEDITED,)),)
)
_SAYS = "] membarrier("  # in the line by which each start lets its standard error know

# A table of descriptors grows at the 65th and at the 257th, and the Sentry has both before its guest
# has run once. It is born with a table of its parents' size.
DESCRIPTORS = 512

_PLACES = ("/usr/local/bin", "/usr/bin", "/usr/local/sbin", "/usr/sbin")
_PATIENCE_S = 20.0
# Said wherever the version knows it: the defaults of some are otherwise.
_WANTED = {
    "overlay2": "none",  # the guest's root is a tmpfs with a size; an overlay would have none
    "directfs": "false",  # the sentry opens no file of the host's by itself
    "host-uds": "none",
    "host-fifo": "none",
    "net-raw": "false",
    "file-access": "exclusive",
    "file-access-mounts": "shared",
}
_AMPLE_FILES = 16 << 10
_LAST_LINE = ("panic: ", "fatal error: ", "runtime: ")  # of Go: what follows are its stacks
_NO_PROCESS = ("resource temporarily unavailable", "failed to create new OS thread")
_RELEASE = re.compile(r"(?:release-)?(?:0\.0~)?(\d{8})")


class Runsc:
    """An installed `runsc`.

    Attributes:
        version: As it reports itself.
        released: The day of its release, as YYYYMMDD; 0 where it does not say.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.version = _said(path, "--version").splitlines()[0].removeprefix("runsc version ")
        found = _RELEASE.search(self.version)
        self.released = int(found[1]) if found else 0
        self._known = frozenset(re.findall(r"^  -([a-z0-9-]+)", _said(path, "flags"), re.MULTILINE))

    def knows(self, flag: str) -> bool:
        return flag in self._known

    @property
    def words(self) -> list[str]:
        """Flags that have the Sentry's last words go where those of the program that starts it do."""
        return ["--panic-log=/proc/self/fd/2"] if self.knows("panic-log") else []

    @property
    def restores(self) -> str:
        """Name the host that a memory snapshot of this one needs.

        Saved memory has the form of one version, and `runsc restore` refuses a processor that lacks a
        feature which the guest was told of. Programs without an image run from the host's /usr.
        """
        digest = hashlib.sha256(f"{_processor_features()}\n{_system()}".encode()).hexdigest()[:12]
        return f"runsc {self.version} with processor and system {digest}"

    def flags(self, *, rootless: bool, network: bool) -> list[str]:
        """Build the flags of every command.

        Args:
            network: Sockets of the guest are the kernel's, in the network namespace that it runs in.
        """
        said = [f"--{name}={value}" for name, value in _WANTED.items() if self.knows(name)]
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        if most != resource.RLIM_INFINITY and most < _AMPLE_FILES and self.knows("dcache"):
            # It keeps 1,000 files of each mount open even after the guest closes them: under
            # `ulimit -n 1024` programs inside soon could open none. Each may be several
            # descriptors.
            said.append(f"--dcache={most // 8}")
        # Our own cgroups around it set the limits.
        said.append(f"--network={'host' if network else 'none'}")
        return [*said, "--ignore-cgroups", f"--rootless={str(rootless).lower()}"]


def _processor_features() -> str:
    """Read the features of the first processor: `flags` on x86-64, `Features` on arm64."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        lines = file.read().split("\n\n")[0].splitlines()
    return "\n".join(each for each in lines if each.startswith(("flags", "Features")))


def _system() -> str:
    """Describe the host's /usr by its release and its Python: hosts made from one image have the same."""
    python = agent_code.interpreter()[0]
    try:
        with open("/etc/os-release", encoding="utf-8") as file:
            release = file.read()
    except OSError:
        release = ""
    return f"{release}\n{python} {os.stat(python).st_size}"


def find(path: str | None = None) -> Runsc:
    """The `runsc` at `path`, or the first on PATH and in the usual places.

    Raises:
        BackendUnavailable: There is none, or it does not run.
    """
    found = path or shutil.which("runsc") or _first_of(_PLACES)
    if found is None:
        raise BackendUnavailable(
            "runsc is not installed", hint="install gVisor: `apt install runsc`, or gvisor.dev"
        )
    key = os.path.realpath(found)
    try:
        info = os.stat(key)
        stamp = (key, info.st_ino, info.st_mtime_ns)
        if stamp not in _found:
            _found[stamp] = Runsc(key)
    except (OSError, subprocess.SubprocessError, IndexError) as exc:
        raise BackendUnavailable(f"{found} does not run: {exc}") from exc
    return _found[stamp]


_found: dict[tuple[str, int, int], Runsc] = {}


def last_words(errors: int) -> str:
    """Of the file that `Runsc.words` goes to: why the Sentry panicked, or else the end of it."""
    text = os.pread(errors, launched.ROOM, 0).decode("utf-8", "replace")
    panics = (line for line in text.splitlines() if line.startswith(_LAST_LINE))
    return next(panics, "")[:1000] or launched.last_words(errors, _SAYS)


def lacks_processes(said: str) -> bool:
    """Return whether the host refused the Sentry a process or a thread."""
    return any(reason in said for reason in _NO_PROCESS)


def _first_of(places: tuple[str, ...]) -> str | None:
    paths = (f"{place}/runsc" for place in places)
    return next((path for path in paths if os.access(path, os.X_OK)), None)


def _said(path: str, argument: str) -> str:
    done = subprocess.run(
        [path, argument], capture_output=True, text=True, timeout=_PATIENCE_S, check=False, env={}
    )
    return done.stdout + done.stderr
