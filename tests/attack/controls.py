"""Where each probe must fire: the same probe, with the protection it tests left out."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ringfence.attack.canaries import PROTECTED, RO, RO_FILE, RW, Canaries
from ringfence.attack.inside import Found, archive, command, read_answers, request, run_inside
from ringfence.attack.lab import Lab
from ringfence.attack.probes import egress, kit, network
from ringfence.backends.native.backend import NativeBackend
from ringfence.backends.native.profiles import Profile
from ringfence.model.mount import READ_WRITE

PROFILES = {
    "no-seccomp": Profile("no-seccomp", seccomp=False),
    "bare": Profile(
        "bare",
        seccomp=False,
        landlock=False,
        no_new_privs=False,
        drop_capabilities=False,
        forbid_user_namespaces=False,
    ),
    "sockets": Profile("sockets", unix_sockets=True, landlock=False),
}
AM_ROOT = 0 == os.geteuid()


class ControlMissingError(Exception):
    """This control needs what is not here; the message says what."""


class Controls:
    """Runs probes where they must fire; each group once."""

    def __init__(self, canaries: Canaries) -> None:
        self.canaries = canaries
        self.backend = NativeBackend(profiles=PROFILES)
        self.found: dict[str, Found] = {}

    def close(self) -> None:
        self.backend.close()

    def outcome(self, probe: kit.Probe) -> tuple[str, str]:
        """What `probe` found under its control.

        Raises:
            ControlMissingError: The control is impossible here.
        """
        if probe.control not in self.found:
            run = GROUPS[probe.control]
            group = [p.id for p in kit.PROBES.values() if p.control == probe.control]
            self.found[probe.control] = run(self, group)
        return self.found[probe.control][probe.id]

    # -- in sandboxes -----------------------------------------------------------------------

    def lab(self) -> Lab:
        return Lab(self.backend, self.canaries)

    def in_profile(self, name: str, probes: Sequence[str]) -> Found:
        lab = self.lab()
        self.canaries.plant_writable()
        self.canaries.plant_sockets()
        options: dict[str, Any] = {"profile": name, "allow_degraded": ("*",)}
        with lab.sandbox(mounts=lab.mounts(), protect=PROTECTED, **options) as sandbox:
            return run_inside(sandbox, probes, self.context_inside())

    def in_plain_sandbox(self, probes: Sequence[str]) -> Found:
        with self.lab().sandbox() as sandbox:
            return run_inside(sandbox, probes, self.context_inside())

    def with_network(self, probes: Sequence[str]) -> Found:
        with self.lab().sandbox(network="unrestricted") as sandbox:
            return run_inside(sandbox, probes, self.context_inside())

    def with_route(self, probes: Sequence[str]) -> Found:
        routes = Path("/proc/net/route").read_text().splitlines()[1:]
        if not any("00000000" == line.split()[1] for line in routes):
            raise ControlMissingError("this host has no default route")
        return self.with_network(probes)

    def with_wider_policy(self, probes: Sequence[str]) -> Found:
        with self.lab().limited(wider=True) as sandbox:
            return run_inside(sandbox, probes, self.context_inside())

    def in_loose_mounts(self, probes: Sequence[str]) -> Found:
        """Each probe in directories as new: what one of them breaks, the next would miss."""
        lab = self.lab()
        found: Found = {}
        for probe in probes:
            self.canaries.plant_read_only()
            self.canaries.plant_writable()
            mounts = lab.mounts(access=READ_WRITE)
            with lab.sandbox(mounts=mounts, unprotect=("*",)) as sandbox:
                found |= run_inside(sandbox, [probe], self.context_inside())
        self.canaries.plant_read_only()
        self.canaries.plant_writable()
        return found

    def context_inside(self) -> dict[str, Any]:
        return {**self.canaries.context, "targets": [RO, RW, RO_FILE]}

    # -- on the host --------------------------------------------------------------------------

    def on_host(self, probes: Sequence[str], *prefix: str, **options: Any) -> Found:
        """As plain processes, in a session of their own."""
        path = f"{self.canaries.directory}/probes.zip"
        Path(path).write_bytes(archive())
        self.canaries.plant_writable()
        context = {
            **self.canaries.context,
            "ro": self.canaries.ro,
            "rw": self.canaries.rw,
            "ro_file": self.canaries.ro_file,
            # PID 1 of the host has more capabilities than we: any other process stands for it.
            "init": self.canaries.context["marker_pid"],
        }
        done = subprocess.run(
            [*prefix, *command("main", "main", path=path)],
            input=request(probes, context).encode(),
            capture_output=True,
            timeout=100,
            check=False,
            start_new_session=True,
            **options,
        )
        problem = f"{done.returncode} {done.stderr.decode(errors='replace')[-300:]}"
        return read_answers(probes, done.stdout.decode(), problem)

    def as_root(self, probes: Sequence[str], *prefix: str) -> Found:
        if not AM_ROOT:
            raise ControlMissingError("needs root")
        return self.on_host(probes, *prefix)

    def as_nobody(self, probes: Sequence[str]) -> Found:
        if not AM_ROOT:
            return self.on_host(probes)
        become = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
        return self.on_host(probes, *become)

    def in_user_namespace(self, probes: Sequence[str]) -> Found:
        new = (
            "unshare",
            "--user",
            "--map-root-user",
            "--mount",
            "--net",
            "--uts",
            "--ipc",
            "--pid",
        )
        if subprocess.run([*new, "--fork", "true"], capture_output=True, check=False).returncode:
            raise ControlMissingError("this host lets nobody make user namespaces")
        return self.on_host(probes, *new, "--fork", "--mount-proc")

    def with_open_directory(self, probes: Sequence[str]) -> Found:
        fd = os.open(self.canaries.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return self.on_host(probes, pass_fds=(fd,))
        finally:
            os.close(fd)


GROUPS: dict[str, Callable[[Controls, Sequence[str]], Found]] = {
    kit.NO_SECCOMP: lambda c, p: c.in_profile("no-seccomp", p),
    kit.BARE: lambda c, p: c.in_profile("bare", p),
    kit.UNIX_SOCKETS: lambda c, p: c.in_profile("sockets", p),
    kit.LOOSE_MOUNTS: Controls.in_loose_mounts,
    kit.NETWORK: Controls.with_network,
    network.ROUTED: Controls.with_route,
    network.WITHOUT_MOUNTS: Controls.in_plain_sandbox,
    egress.WIDER: Controls.with_wider_policy,
    kit.HOST: Controls.on_host,
    kit.HOST_ROOT: Controls.as_root,
    kit.HOST_NOBODY: Controls.as_nobody,
    kit.HOST_USERNS: Controls.in_user_namespace,
    kit.HOST_AMBIENT: lambda c, p: c.as_root(
        p, "setpriv", "--inh-caps=+chown", "--ambient-caps=+chown"
    ),
    kit.HOST_GROUPS: lambda c, p: c.as_root(p, "setpriv", "--groups=4"),
    kit.HOST_FD: Controls.with_open_directory,
}
