"""Default paths of state and settings.

Kept separate: the daemon, its client and the command line must agree, and import only this of each other.
"""

from __future__ import annotations

import os


def state_directory() -> str:
    """Where this user's sessions are remembered, and where the daemon's socket is."""
    if os.geteuid() == 0:
        return "/var/lib/ringfence/state"
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return os.path.join(home, "ringfence")


def backends_file() -> str:
    """Where this user describes backends of their own, and sets options of ours."""
    if chosen := os.environ.get("RINGFENCE_BACKENDS"):
        return chosen
    if os.geteuid() == 0:
        return "/etc/ringfence/backends.toml"
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return os.path.join(home, "ringfence", "backends.toml")
