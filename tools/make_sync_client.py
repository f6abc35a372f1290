"""Make `src/ringfence/client/_sync` of `_async`: the same words without waiting.

    python tools/make_sync_client.py [--check]

With --check nothing is written; exits 1 when what is there is not what would be made.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CLIENT = Path(__file__).parent.parent / "src" / "ringfence" / "client"
WRITTEN_BY_HAND = ("__init__.py", "contexts.py", "pauses.py")
MARK = "# of the other kind"  # a line that the other kind does without
HEAD = (
    "# Made by tools/make_sync_client.py of the file of the same name in _async; change that one.\n"
)

WORDS = (
    (r"\basync (def|with|for)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\bAsyncRemote", "Remote"),
    (r"\bAsyncTransport\b", "Transport"),
    (r"\bAsyncGenerator\b", "Generator"),
    (r"\bGenerator\[(.+), None\]:", r"Generator[\1, None, None]:"),
    (r"\bAsyncIterator\b", "Iterator"),
    (r"\bAsyncClient\b", "Client"),
    (r"\bAsyncHTTPTransport\b", "HTTPTransport"),
    (r"\bAsyncSandbox\b", "Sandbox"),
    (r"\bAsyncContext\b", "Context"),
    (r"\basynccontextmanager\b", "contextmanager"),
    (r"\b__anext__\b", "__next__"),
    (r"\baclosing\b", "closing"),
    (r"\baclose\b", "close"),
    (r"\baread\b", "read"),
    (r"\baiter_(bytes|raw|lines)\b", r"iter_\1"),
    (r"\b__a(enter|exit|iter)__\b", r"__\1__"),
)


def without_waiting(text: str) -> str:
    """The synchronous counterpart of an asynchronous module."""
    kept = "".join(line for line in text.splitlines(keepends=True) if MARK not in line)
    for pattern, word in WORDS:
        kept = re.sub(pattern, word, kept)
    return HEAD + kept


def formatted(text: str) -> str:
    """As ruff would have it: shorter words make shorter lines."""
    for command in (["check", "--select", "I,F401", "--fix", "--exit-zero"], ["format"]):
        name = ["--quiet", "--stdin-filename", str(CLIENT / "_sync" / "made.py"), "-"]
        ruff = [sys.executable, "-m", "ruff", *command, *name]
        text = subprocess.run(ruff, input=text, text=True, capture_output=True, check=True).stdout
    return text


def main(arguments: list[str]) -> int:
    """Write or compare; returns the exit code."""
    stale = []
    for source in sorted((CLIENT / "_async").glob("*.py")):
        if source.name in WRITTEN_BY_HAND:
            continue
        target = CLIENT / "_sync" / source.name
        text = formatted(without_waiting(source.read_text(encoding="utf-8")))
        if target.exists() and text == target.read_text(encoding="utf-8"):
            continue
        stale.append(target.name)
        if "--check" not in arguments:
            target.write_text(text, encoding="utf-8")
    print("out of date:" if "--check" in arguments else "written:", ", ".join(stale) or "nothing")
    return int("--check" in arguments and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
