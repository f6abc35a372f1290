"""Answers to a newcomer's mistakes: options of other tools, and commands that cannot have worked."""

from __future__ import annotations

import os
import shutil

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from ..model.spec import SandboxSpec

_MOUNT = "use --mount SRC:DST[:rw], or --here for this directory"
_NOTHING = "nothing to say: a sandbox ends with its command"
_NET = "use --net HOST,...; --net unrestricted for all of the network"
OPTIONS = {
    **dict.fromkeys(("-v", "--volume", "--bind", "--ro-bind", "--dir"), _MOUNT),
    **dict.fromkeys(
        ("-it", "-ti", "-i", "--interactive"), "use -t; on a terminal it is the default"
    ),
    **dict.fromkeys(("--gpus", "--gpu", "--device"), "GPUs and other devices are not supported"),
    **dict.fromkeys(("--rm", "--detach", "-d", "--init"), _NOTHING),
    **dict.fromkeys(("--network", "--allow-net", "--share-net", "--internet"), _NET),
    **dict.fromkeys(("-m", "--mem", "--memory-limit", "--ram"), "use --memory 256m"),
    **dict.fromkeys(("--cpu", "--cpuset-cpus", "-c"), "use --cpus 0.5"),
    **dict.fromkeys(("-e", "--environment", "--setenv"), "use --env NAME=VALUE"),
    **dict.fromkeys(("-w", "--cwd", "--chdir", "-C"), "use --workdir DIR"),
    **dict.fromkeys(("-u", "--uid"), "use --user NAME|UID"),
    **dict.fromkeys(
        ("-p", "--publish", "--port", "--expose"),
        "in Python: sandbox.expose(PORT); docs/how-to/network.md",
    ),
    **dict.fromkeys(("--time", "--time-limit", "--wall-time"), "use --timeout 5s"),
    **dict.fromkeys(("--pids-limit", "--nproc"), "use --pids 64"),
    **dict.fromkeys(("--runtime", "--driver", "--sandbox"), "use --backend NAME"),
    **dict.fromkeys(("--unsafe", "--no-sandbox", "--privileged"), "use --profile unrestricted"),
    **dict.fromkeys(("--entrypoint", "--cmd"), "the command follows `--`"),
    **dict.fromkeys(("-f", "--file", "-s", "--script"), "name it behind `--`: -- python3 FILE"),
    "--name": "`ringfence create --name` gives a name; `run` needs none",
    "--label": "`ringfence create --label` takes labels; `run` needs none",
    "--pip": "use --python-env for this Python's packages",
}
"""What is meant by options that `run` does not have."""

_ON_FILES = {
    "make", "cmake", "ninja", "meson", "bazel", "just", "task", "pytest", "py.test", "tox", "nox",
    "ruff", "mypy", "pyright", "black", "flake8", "npm", "npx", "yarn", "pnpm", "bun", "deno",
    "tsc", "jest", "vitest", "eslint", "cargo", "go", "mvn", "gradle", "./gradlew", "rake",
    "bundle", "composer", "dotnet", "swift", "uv", "poetry", "hatch", "pdm", "pre-commit", "git",
}  # fmt: skip
"""Programs that work on the files of a directory."""
_ON_NETWORK = frozenset(["curl", "wget", "ssh", "scp", "rsync", "ping", "telnet", "nc"])
_FETCHING = {
    "pip": ("install", "download"),
    "pip3": ("install", "download"),
    "npm": ("install", "i", "ci"),
    "git": ("clone", "fetch", "pull", "push"),
    "go": ("get", "install"),
    "cargo": ("install", "fetch"),
    "gem": ("install",),
    "uv": ("pip", "sync", "add"),
}
_NOT_FOUND = 127


def hints(argv: Sequence[str], code: int, spec: SandboxSpec, given: dict[str, Any]) -> list[str]:
    """Say why a command that ended with `code` cannot have worked, as far as that can be seen from here."""
    found = []
    if code in (126, _NOT_FOUND) and "/" not in argv[0].split(" ")[0]:
        found = _of_a_name(argv[0], is_shown=bool(spec.image))
    program = argv[0].rpartition("/")[2]
    if spec.network.is_none and _asks_the_network(program, argv[1:]):
        host = next((_host(word) for word in argv if "://" in word), "HOST")
        found.append(f"there is no network inside: allow it with --net {host}:443")
    elif not found and not spec.image and _misses_files(program, argv[1:], spec, given):
        found.append("your files are not inside: add --here (this directory, read-only; --here=rw)")
    if program == "git" and "commit" in argv[1:] and ".git" in (spec.protect or ()):
        found.append("--protect .git keeps git from writing: commit outside, or leave it out")
    return found


def _of_a_name(name: str, *, is_shown: bool) -> list[str]:
    if " " in name:
        return [f"do not quote the whole command: -- {name}; or: -- sh -c '{name}'"]
    if is_shown:
        return []
    if os.path.isfile(name):
        how = "python3 " if name.endswith(".py") else "sh " if name.endswith(".sh") else "./"
        return [f"did you mean {how}{name}?"]
    if where := shutil.which(name):
        own = "; your own Python and its programs: --python-env" if "python" in where else ""
        return [f"{where} is not inside: only programs of /usr are{own}"]
    return []


def _asks_the_network(program: str, arguments: Sequence[str]) -> bool:
    if program in _ON_NETWORK or any("://" in word for word in arguments):
        return True
    words = [word for word in arguments if not word.startswith("-")]
    if program.startswith("python") and words[:1] == ["pip"]:
        program, words = "pip", words[1:]
    return bool(words) and words[0] in _FETCHING.get(program, ())


def _misses_files(
    program: str, arguments: Sequence[str], spec: SandboxSpec, given: dict[str, Any]
) -> bool:
    if "mount" in given or "here" in given:
        return False
    shown = {each.target.rpartition("/")[2] for each in spec.mounts}
    named = [word for word in arguments if not word.startswith(("-", "/")) and word not in shown]
    return program in _ON_FILES or any(
        os.path.basename(word) not in shown and os.path.exists(word)
        for word in named
        if word.strip("./")
    )


def _host(url: str) -> str:
    return url.partition("://")[2].partition("/")[0].rpartition("@")[2].partition(":")[0] or "HOST"
