"""Three-way merge of texts, by `git merge-file`."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from contextlib import ExitStack

MOST_TEXT_BYTES = 1 << 20
_S = 60.0  # of all texts together: guests choose them, and git's diff can be made slow
_MOST_MERGED_BYTES = 64 << 20
_NOBODY = 65534
_CLEAN, _CONFLICTS = 0, 127  # git-merge-file(1): the number of conflicts, 127 at most


class TextMerger:
    """Merges the texts of one merge, with none of the user's settings for git.

    Attributes:
        reason: Why the last text was not merged.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._git = shutil.which("git")
        self._left_s, self._left_bytes = _S, _MOST_MERGED_BYTES

    def merge(self, base: bytes | None, ours: bytes | None, theirs: bytes | None) -> bytes | None:
        """Return the merged text; None where it cannot be merged, for `reason`.

        Args:
            base, ours, theirs: None: it is larger than 1 MiB.
        """
        if base is None or ours is None or theirs is None:
            self.reason = f"both sides changed it, and it is larger than {MOST_TEXT_BYTES} bytes"
        elif any(b"\0" in each for each in (base, ours, theirs)):
            self.reason = "both sides changed it, and it is not text"
        elif self._git is None:
            self.reason = "both sides changed it, and git is not installed, which merges texts"
        else:
            return self._merge(self._git, [ours, base, theirs])
        return None

    def _merge(self, git: str, texts: list[bytes]) -> bytes | None:
        began = time.monotonic()
        try:
            with ExitStack() as stack:
                done = _run(git, [_as_file(stack, each) for each in texts], self._left_s)
        except subprocess.TimeoutExpired:
            self.reason = (
                f"both sides changed it, and git did not merge all texts within {_S:.0f} s"
            )
            return None
        finally:
            self._left_s -= time.monotonic() - began
        if done.returncode == _CLEAN:
            return self._kept(done.stdout)
        if 0 < done.returncode <= _CONFLICTS:
            self.reason = "both sides changed the same lines"
        else:
            self.reason = "both sides changed it, and git could not merge it"
        return None

    def _kept(self, merged: bytes) -> bytes | None:
        self._left_bytes -= len(merged)
        if self._left_bytes >= 0:
            return merged
        self.reason = (
            f"both sides changed it, and {_MOST_MERGED_BYTES >> 20} MiB of texts are merged already"
        )
        return None


def _as_file(stack: ExitStack, text: bytes) -> int:
    file = stack.enter_context(os.fdopen(os.memfd_create("ringfence-merge"), "wb"))
    file.write(text)
    file.flush()
    return file.fileno()


def _run(git: str, files: list[int], seconds: float) -> subprocess.CompletedProcess[bytes]:
    """Run git on open files, as nobody in particular where this process is root: guests wrote them."""
    env = {
        "PATH": os.defpath,
        "LC_ALL": "C.UTF-8",
        "HOME": "/proc",  # nothing can be put there
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CEILING_DIRECTORIES": "/",
    }
    ids = {"user": _NOBODY, "group": _NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
    done: subprocess.CompletedProcess[bytes] = subprocess.run(
        [git, "merge-file", "--stdout", "--quiet", *(f"/proc/self/fd/{fd}" for fd in files)],
        cwd="/proc",
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        pass_fds=files,
        timeout=max(0.0, seconds),
        check=False,
        **ids,  # type: ignore[call-overload]
    )
    return done
