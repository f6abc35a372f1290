"""Files of gVisor's own processes in the jail: their program, five devices, and an OCI bundle."""

from __future__ import annotations

import json

from ..local.agents import agent_code
from ..local.mounts import template
from . import places

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .draft import Draft
    from .runsc import Runsc

ENVIRONMENT = {"PATH": template.PATH, "LC_ALL": "C"}  # of the agent
_DEVICES = ("null", "zero", "full", "random", "urandom")
# Capabilities that the agent needs of its own kernel before it enters a user namespace.
_CAPABILITIES = [
    f"CAP_{name}"
    for name in (
        "CHOWN",
        "DAC_OVERRIDE",
        "FOWNER",
        "KILL",
        "SETGID",
        "SETPCAP",
        "SETUID",
        "SYS_ADMIN",
        "SYS_RESOURCE",
    )
]


def furnish(draft: Draft, runsc: Runsc, *, starts_process_image: bool) -> None:
    """See above."""
    names = ("/bin", "/dev", "/proc", "/tmp", places.STATE, places.MOUNTS, "/bundle", places.ROOTFS)
    draft.jail += [("dir", name, 0o755, False) for name in names]
    # In the guest nobody but who mounts has the right to look into it.
    draft.jail.append(("dir", places.POINTS, 0, False))
    shown: list[tuple[str, str, int]] = [(runsc.path, places.RUNSC, template.READ_ONLY)]
    shown += [(f"/dev/{name}", f"/dev/{name}", template.DEVICE) for name in _DEVICES]
    for source, target, attributes in shown:
        draft.jail.append(("show", target, len(draft.trees), False))
        draft.trees.append(template.tree(source, attributes))
    foreign = draft.image is not None
    argv = (
        [places.PROCESS_IMAGE]
        if starts_process_image
        else agent_code.argv(places.AGENT, foreign=foreign)
    )
    bundle = json.dumps(_bundle(draft, argv)).encode()
    draft.jail.append(("file", places.CONFIG, bundle, 0o600))


def _bundle(draft: Draft, argv: list[str]) -> dict[str, Any]:
    """The OCI runtime specification of the one container in a sandbox."""
    own = ["pid", "ipc", "uts", "mount"]
    if draft.spec.network.is_none:
        own.append("network")  # else gVisor's is the jail's, which leads to our two sockets
    return {
        "ociVersion": "1.0.2",
        "hostname": template.HOSTNAME,
        "root": {"path": "rootfs", "readonly": False},
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": argv,
            "env": [f"{name}={value}" for name, value in ENVIRONMENT.items()],
            "cwd": "/",
            "noNewPrivileges": True,
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), _CAPABILITIES),
        },
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
            *draft.shown,
        ],
        "linux": {"namespaces": [{"type": name} for name in own]},
    }
