"""Where things are kept unless somebody says otherwise."""

from __future__ import annotations

import os


def state_directory() -> str:
    """Where this user's sessions are remembered, and where the daemon's socket is."""
    if os.geteuid() == 0:
        return "/var/lib/ringfence/state"
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return os.path.join(home, "ringfence")
