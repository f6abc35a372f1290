"""Run a command where /proc is masked, as in a container: `python masked.py COMMAND…`.

It is root of a user namespace, in a PID namespace of its own, and may not mount a /proc in another one:
engines cover the same parts. Source: moby, daemon/pkg/oci/defaults.go, MaskedPaths and ReadonlyPaths.
"""

from __future__ import annotations

import os
import subprocess
import sys

MASKED_FILES = ("keys", "timer_list", "interrupts")
READ_ONLY = ("bus", "fs", "irq", "sys")
# Another root's, who may have made it: a container has one of its own.
OF_ROOT = "/var/lib/ringfence"
_BIND = "mount --bind /proc/{0} /proc/{0} && mount -o remount,bind,ro,nosuid,nodev,noexec /proc/{0}"


def argv(*command: str) -> list[str]:
    """The command line that runs `command` there."""
    return [sys.executable, __file__, *command]


def main() -> int:
    lines = [f"mount --bind /dev/null /proc/{name}" for name in MASKED_FILES]
    lines += [_BIND.format(name) for name in READ_ONLY]
    if os.path.isdir(OF_ROOT):
        lines.append(f"mount -t tmpfs tmpfs {OF_ROOT}")
    script = " && ".join([*lines, 'exec "$@"'])
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    unshare += ["--mount", "--mount-proc", "sh", "-c", script, "sh", *sys.argv[1:]]
    return subprocess.run(unshare, check=False, env={**os.environ}).returncode


if __name__ == "__main__":
    sys.exit(main())
