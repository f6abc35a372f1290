"""Three-way merge of texts, by `git merge-file`."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile

MOST_BYTES = 1 << 20
_S = 20.0
_CLEAN, _CONFLICTS = 0, 127  # git-merge-file(1): the number of conflicts, 127 at most


class TextMerger:
    """Merges texts in a directory of its own, with none of the user's settings for git.

    Attributes:
        reason: Why the last text was not merged.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._git = shutil.which("git")

    def merge(self, base: bytes | None, ours: bytes | None, theirs: bytes | None) -> bytes | None:
        """Return the merged text; None where it cannot be merged, for `reason`.

        Args:
            base, ours, theirs: None: it is larger than 1 MiB.
        """
        if base is None or ours is None or theirs is None:
            self.reason = f"both sides changed it, and it is larger than {MOST_BYTES} bytes"
        elif any(b"\0" in each for each in (base, ours, theirs)):
            self.reason = "both sides changed it, and it is not text"
        elif self._git is None:
            self.reason = "both sides changed it, and git is not installed, which merges texts"
        else:
            return self._merge(self._git, [ours, base, theirs])
        return None

    def _merge(self, git: str, texts: list[bytes]) -> bytes | None:
        with tempfile.TemporaryDirectory(prefix="ringfence-merge-") as directory:
            names = ["ours", "base", "theirs"]
            for name, text in zip(names, texts, strict=True):
                with open(os.path.join(directory, name), "xb") as file:
                    file.write(text)
            settings = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null"}
            env = {"PATH": os.defpath, "LC_ALL": "C.UTF-8", "HOME": directory, **settings}
            env["GIT_CEILING_DIRECTORIES"] = os.path.dirname(directory)
            try:
                done = subprocess.run(
                    [git, "merge-file", "--stdout", "--quiet", *names],
                    cwd=directory,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                self.reason = f"both sides changed it, and git did not merge it within {_S:.0f} s"
                return None
        if done.returncode == _CLEAN:
            return done.stdout
        if 0 < done.returncode <= _CONFLICTS:
            self.reason = "both sides changed the same lines"
        else:
            self.reason = "both sides changed it, and git could not merge it"
        return None
