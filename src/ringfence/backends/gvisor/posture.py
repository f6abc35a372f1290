"""Reads the protections of a gVisor sandbox; see `local.protections`."""

from __future__ import annotations

import datetime
import os

from ...model.capabilities import ENFORCED
from ..local.host.facts import host
from ..local.host.readback import memory_limit_bytes, pids_limit
from ..local.netns import of_network
from ..local.protections import (
    DELEGATE,
    PAGE,
    BoundsReader,
    degraded,
    enforced,
    mib,
    missing,
    no_cgroup,
    paths_of,
)
from . import views
from .inspection import Inspection
from .places import ROOTFS
from .runsc import KERNEL_BYTES, host_pids

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..local.protections import Verdict
    from .sandbox import GvisorSandbox

_NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")
_OLD_DAYS = 365


class GvisorReader(BoundsReader):
    """Reads of both kernels: the host's about gVisor, the guest's about the guest."""

    sandbox: GvisorSandbox

    def __init__(self, sandbox: GvisorSandbox) -> None:
        super().__init__(sandbox)
        if sandbox.disk is not None:
            self.files = "image on disk"
        self.seen = seen = Inspection(sandbox)
        self.bounds = seen.pids, seen.open_files, seen.disk_bytes, seen.inodes

    def guest_kernel(self) -> Verdict:
        """The guest asks another kernel: it says that it is another one than the host's."""
        guest = " ".join(self.seen.inside("/proc/version").split()[:3])
        if guest.endswith(os.uname().release):
            return missing(f"the guest sees the host's: {guest}")
        version = self.sandbox.program.version
        return enforced(f"gVisor {version}, which calls itself {guest}")

    def gvisor_release(self) -> Verdict:
        """How old the program is: its fixes are the boundary."""
        released = self.sandbox.program.released
        fix = "install a current runsc from gvisor.dev; the first on PATH is used"
        try:
            day = datetime.datetime.strptime(str(released), "%Y%m%d").date()
        except ValueError:
            return degraded("its version has no release date", fix)
        age = (datetime.datetime.now(datetime.UTC).date() - day).days
        if age > _OLD_DAYS:
            return degraded(f"of {day}: it lacks fixes released since then", fix)
        return enforced(f"of {day}")

    def seccomp(self) -> Verdict:
        """Second line: what the guest's kernel may ask of the host's."""
        loose = [p for p in (*self.seen.kernel, *self.seen.server) if not p.is_filtered]
        if loose or not self.seen.kernel or not self.seen.server:
            return missing(f"no filter on {len(loose)} of gVisor's processes")
        count = len(self.seen.kernel) + len(self.seen.server)
        why = f"mode 2 on every thread of gVisor's {count} processes that a guest can reach"
        return enforced(why)

    def no_new_privs(self) -> Verdict:
        everybody = (self.seen.launcher, *self.seen.kernel, *self.seen.server)
        if any(p.status["NoNewPrivs"] != "1" for p in everybody):
            return missing("NoNewPrivs is 0")
        return enforced(f"NoNewPrivs is 1 in all {len(everybody)} processes")

    # -- the jail ----------------------------------------------------------------------------------

    def namespaces(self) -> Verdict:
        shared = [
            name
            for name in _NAMESPACES
            if any(
                p.shares(name) for p in (self.seen.launcher, *self.seen.kernel, *self.seen.server)
            )
        ]
        return self.of_namespaces(shared, _NAMESPACES)

    def host_identity(self) -> Verdict:
        if any(first == 0 for first, _count in self.seen.host_ids):
            return missing("an id of gVisor's is host root", "report this")
        if not host().trusted_root:
            return enforced("your own uid, the only one that may be mapped without root")
        kernels = {process.uid for process in self.seen.kernel}
        if kernels & {process.uid for process in self.seen.server}:
            return degraded("the guest's kernel and its file server share an id")
        first, last = self.seen.host_ids[0][0], sum(self.seen.host_ids[-1]) - 1
        why = f"host ids {first} to {last}, which no other sandbox has; another for its file server"
        return enforced(why)

    def read_only_mounts(self) -> Verdict:
        """Check which host files the file server, and so the guest, can reach."""
        asked = [m for m in self.sandbox.mounts if m.access == "read_write" and m.host_path]
        own = {m.device for m in self.seen.mounts if m.target in ("/", ROOTFS)}
        shared = [m for m in self.seen.mounts if m.device not in own and m.kind != "proc"]
        writable = [m.target for m in shared if "ro" not in m.options]
        tops = [target for target in writable if target.count("/") == 2]
        if len(tops) > len(asked) or any(not t.startswith("/mounts/") for t in tops):
            return missing(f"writable: {', '.join(tops)}")
        read_only = sum("ro" in m.options for m in shared)
        return enforced(f"{read_only} trees of the host, read-only by the host's kernel")

    def own_pages(self) -> Verdict:
        """Check from the jail's mounts whether page-cache pages of read-only files are the tenant's own
        or shared.
        """
        why = self.sandbox.shares_pages
        if why:
            said = f"read-only host files share page-cache pages with all their readers: {why}"
            return degraded(said, views.fix_of(why))
        asked = {m.target for m in self.seen.mounts if m.target.startswith("/mounts/")}
        below = [
            m
            for m in self.seen.mounts
            if m.target.startswith(f"{ROOTFS}/") and m.target not in asked
        ]
        own = {m.device for m in self.seen.mounts if m.target in ("/", ROOTFS)}
        direct = [m.target for m in below if m.kind != "fuse" and m.device not in own]
        if direct:
            return missing(f"the host's own: {', '.join(direct)}", "report this")
        why = (
            f"{len(below)} trees through this tenant's own file system; only runsc itself is shared"
        )
        return enforced(why)

    def protected_paths(self) -> Verdict:
        steps = paths_of(self.sandbox.protected)
        if not any(m.access == "read_write" and m.host_path for m in self.sandbox.mounts):
            return None
        below = [
            m
            for m in self.seen.mounts
            if m.target.startswith("/mounts/") and m.target.count("/") > 2
        ]
        read_only = sum("ro" in m.options for m in below)
        if read_only < len(steps):
            return missing(f"{len(steps) - read_only} are writable")
        return enforced(f"{len(steps)} paths in writable mounts")

    def network(self) -> Verdict:
        sandbox, flags = self.sandbox, self.seen.kernel[0].command if self.seen.kernel else []
        if sandbox.has_network and "--network=host" in flags and sandbox.network is not None:
            if not all(process.has_same("net", self.seen.launcher) for process in self.seen.kernel):
                return missing("gVisor's network is not the one made for it")
            return of_network(self.seen.launcher.network, sandbox.network, sandbox.spec.network)
        names = {name for process in self.seen.kernel for name in process.interfaces}
        if names - {"lo"}:
            return missing(f"interfaces: {', '.join(sorted(names))}")
        if "--network=none" not in flags:
            return missing("gVisor runs without --network=none")
        return enforced("gVisor's own loopback, in a namespace with nothing but lo")

    # -- limits ------------------------------------------------------------------------------------

    def memory_limit(self) -> Verdict:
        group, wanted = self.sandbox.group, self.sandbox.sizes.memory_bytes
        sampled = f"{mib(wanted)} for the guest, sampled every 50 ms"
        if not group.version:
            return degraded(f"{sampled}; {self._no_cgroup()}", DELEGATE)
        found = memory_limit_bytes(group)
        if found is None or found > wanted + KERNEL_BYTES + PAGE:
            return missing(f"the cgroup says {found}")
        why = f"{sampled}; {mib(found)} with gVisor itself, by cgroup v{group.version}"
        return enforced(why)

    def _no_cgroup(self) -> str:
        return no_cgroup(self.sandbox.owner.layout().why)

    def cpu_limit(self) -> Verdict:
        return self.of_cpus(self.sandbox.group, self._no_cgroup())

    def most(self) -> tuple[int, int, int, int]:
        sizes = self.sandbox.sizes
        return sizes.pids, sizes.open_files, sizes.disk_bytes, sizes.inodes

    def pids_limit(self) -> Verdict:
        verdict, found = super().pids_limit(), pids_limit(self.sandbox.group)
        if found is None or found > host_pids(self.sandbox.sizes.pids) + 1:
            return verdict
        if not verdict or verdict[0] != ENFORCED:
            return verdict
        return enforced(f"{verdict[1]}; {found} of the host's by cgroup")
