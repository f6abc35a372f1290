"""Machines that have booted, written down: every sandbox is continued from one.

They are kept by what they were made from. A file of memory is read, never mapped: two machines have no
page in common. The directory is the user's alone, as whoever could write there would be in every machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile

from ...errors import IsolationError
from ..local.agents import agent_code
from . import initramfs, qemu

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .kernel import Kernel
    from .qemu import Qemu

_FORM = "3"  # to be changed with anything that a machine is put together from
_MEMORY, _INITRD = "memory", "initrd"


def default_directory() -> str:
    """Where this user's booted machines are kept."""
    if os.geteuid() == 0:
        return "/var/cache/ringfence/machines"
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(home, "ringfence", "machines")


class Machines:
    """The machines in one directory, made (mode 0700) on first use."""

    def __init__(self, directory: str, kernel: Kernel, program: Qemu, accelerator: str) -> None:
        self.directory, self.kernel = directory, kernel
        self.program, self.accelerator = program, accelerator

    def key(self, mib: int) -> str:
        """Of a machine with so much memory: everything that it is made from."""
        python = agent_code.interpreter()[0]
        info = os.stat(python)
        said = "\n".join(
            (
                *(_FORM, self.kernel.stamp(), self.program.stamp(), self.accelerator, str(mib)),
                *(python, str(info.st_size), str(info.st_mtime_ns)),
                *qemu.argv(
                    self.program.path,
                    self.accelerator,
                    mib,
                    line=0,
                    monitor=3,
                    network=4,
                    shares=(5, 6),
                ),
                # A processor of another model may lack what the guest has found in this one.
                _processor() if self.accelerator == qemu.KVM else "",
            )
        ).encode()
        return hashlib.sha256(said + agent_code.packed(machine=True)).hexdigest()[:32]

    @property
    def restores(self) -> str:
        """Name the host that a memory snapshot of this one needs."""
        key = self.key(0)[:12]
        return f"QEMU {self.program.version} with kernel, Python and processor {key}"

    def machine(self, mib: int, boot: Callable[[str, int], None]) -> tuple[str, str]:
        """The paths of a machine's memory, and of what stands for its initial RAM file system.

        Args:
            boot: Called where there is no such machine yet, with the path of an initial RAM file
                system, and a descriptor to write the memory to.
        """
        self.prepare()
        place = os.path.join(self.directory, self.key(mib))
        if not os.path.exists(place):
            with self._locked(place):
                if not os.path.exists(place):
                    self._make(place, boot)
        return os.path.join(place, _MEMORY), os.path.join(place, _INITRD)

    def _make(self, place: str, boot: Callable[[str, int], None]) -> None:
        partial = tempfile.mkdtemp(prefix=".partial-", dir=self.directory)
        try:
            initrd = self.initrd(partial)
            with open(os.path.join(partial, _MEMORY), "xb") as file:
                boot(initrd, file.fileno())
            with open(initrd, "wb") as file:
                file.write(b"\n")  # the emulator wants to see one, and nobody reads it any more
            os.rename(partial, place)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def initrd(self, directory: str) -> str:
        """A new initial RAM file system in a directory, which its reader need not own."""
        path = os.path.join(directory, _INITRD)
        content = initramfs.build(self.kernel, directory)
        with open(path, "xb") as file:
            file.write(content)
        os.chmod(path, 0o644)
        return path

    def prepare(self) -> None:
        """Make the directory.

        Raises:
            IsolationError: Others may write there.
        """
        os.makedirs(self.directory, mode=0o700, exist_ok=True)
        info = os.stat(self.directory)
        if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o022:
            raise IsolationError(
                f"{self.directory}: other users can write to this directory, from which every machine starts",
                hint="remove it, or make it writable only for this user",
            )

    @contextlib.contextmanager
    def _locked(self, place: str) -> Iterator[None]:
        """Several processes may want the same machine first: one boots it, the others wait."""
        fd = os.open(f"{place}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def _processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        lines = file.read().split("\n\n")[0].splitlines()
    return "\n".join(
        line for line in lines if line.startswith(("model name", "flags", "microcode"))
    )
