"""First program on a far host, sent as source, for any Python since 3.9: becomes the agent's
confinement.

Standard library only. What it has looked at goes on to the agent as its argument; standard input is
left alone, for the agent.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

_OLDEST = (3, 9)
_NOBODY = 65534
NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts")
_VIEW = (
    *("bwrap", "--die-with-parent", "--unshare-user", "--unshare-ipc", "--unshare-pid"),
    *("--unshare-net", "--unshare-uts", "--unshare-cgroup-try", "--as-pid-1", "--hostname"),
    *("ringfence", "--clearenv", "--cap-drop", "ALL"),
)


def main(text: str) -> NoReturn:
    """Look, and execute the launcher.

    Args:
        text: JSON: `launcher` (empty for bubblewrap), `uid`, `steps` of the root, `links`, `etc`, `masked`,
            and `inner`, what the agent's Python runs.
    """
    told = json.loads(text)
    if sys.version_info < _OLDEST:
        sys.exit(f"the far Python is {sys.version.split()[0]}, and 3.9 or newer is needed")
    if os.geteuid() == 0:
        os.setgroups([])  # whoever logs in as root has no need to be root inside
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    facts = {
        "python": sys.version.split()[0],
        "machine": os.uname().machine,
        "kernel": os.uname().release,
        "uid": os.geteuid(),
        "outer": {name: os.stat(f"/proc/self/ns/{name}").st_ino for name in NAMESPACES},
    }
    python = os.path.realpath(sys.executable)
    launcher = [word.replace("{uid}", str(told["uid"])) for word in told["launcher"]]
    command = launcher or _bubblewrap(told, python)
    inner = [python, "-I", "-S", "-X", "utf8", "-c", told["inner"], json.dumps(facts)]
    try:
        os.execvp(command[0], [*command, *inner])
    except OSError as exc:
        sys.exit(f"{command[0]} on the far host: {exc.strerror}: install it there")


def _bubblewrap(told: dict[str, Any], python: str) -> list[str]:
    """A root of its own in memory, with the far host's programs, and nothing of its users."""
    uid = str(told["uid"])
    command = [*_VIEW, "--uid", uid, "--gid", uid, "--ro-bind", "/usr", "/usr"]
    for name in told["links"]:
        if os.path.islink(f"/{name}"):
            command += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        elif os.path.isdir(f"/{name}"):
            command += ["--ro-bind", f"/{name}", f"/{name}"]
    if not python.startswith("/usr/"):
        command += ["--ro-bind", sys.base_prefix, sys.base_prefix]
    command += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/etc"]
    for step in told["steps"]:
        command += _made(*step)
    for name in told["etc"]:
        path = f"/etc/{name}"
        if os.path.exists(path) and os.stat(path).st_mode & 0o004:
            command += ["--ro-bind", os.path.realpath(path), path]
    for path in told["masked"]:
        if os.path.isdir(path):
            command += ["--tmpfs", path, "--remount-ro", path]
        elif os.path.exists(path):
            command += ["--ro-bind", "/dev/null", path]
    command += ["--remount-ro", "/etc", "--remount-ro", "/proc", "--chdir", "/"]
    return [*command, *(["--disable-userns"] if _forbids_namespaces() else []), "--"]


def _forbids_namespaces() -> bool:
    """Return whether bubblewrap is 0.8 or newer; with an older one, only our filter forbids namespaces."""
    try:
        said = subprocess.run(["bwrap", "--help"], stdout=subprocess.PIPE, check=False).stdout
    except OSError:
        return True  # it is not installed: executing it raises the error
    return b"--disable-userns" in said


def _made(verb: str, path: str, *rest: Any) -> list[str]:
    if verb == "dir":
        return ["--perms", f"{rest[0]:o}", "--dir", path]
    if verb == "symlink":
        return ["--symlink", rest[0], path]
    fd = os.memfd_create("content", 0)
    os.write(fd, rest[0].encode())
    os.lseek(fd, 0, 0)
    return ["--perms", f"{rest[1]:o}", "--file", str(fd), path]
