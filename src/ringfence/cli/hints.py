"""Answers to a newcomer's mistakes: options of other tools, and commands that cannot have worked."""

from __future__ import annotations

import os
import shutil

from ..model.mistakes import spread
from .scripts import missing_script

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from ..model.spec import SandboxSpec

_MOUNT = "use --mount SRC:DST[:rw], or --here for this directory"
_NOTHING = "remove the option: a sandbox always ends with its command"
_ALWAYS = (
    "remove the option: every sandbox has this protection; `ringfence doctor --verbose` lists all"
)
_NONE = "remove the option: Ringfence has no such setting"
_NET = "use --net HOST,... for these hosts, --net public for every public host"
OPTIONS = spread(
    {
        "-v --volume --bind --ro-bind --dir": _MOUNT,
        "-it -ti": "use -t; -t is the default on a terminal",
        "-i --interactive --stdin": "remove the option: standard input is passed on",
        "--gpus --gpu --device": "GPUs and other devices are not supported",
        "--rm --detach -d --init": _NOTHING,
        "--network --allow-net --share-net --internet": _NET,
        "-m --mem --memory-limit --ram": "use --memory 256m",
        "--cpu --cpuset-cpus": "use --cpus 0.5",
        "-e --environment --setenv": "use --env NAME=VALUE",
        "-w --cwd --chdir -C": "use --workdir DIR",
        "-u --uid": "use --user NAME|UID",
        "-p --publish --port --expose": "in Python: sandbox.expose(PORT); docs/how-to/network.md",
        "--read-only --cap-drop --security-opt --die-with-parent --new-session --proc --dev "
        "--as-pid-1 --clearenv --private --private-tmp --private-dev --seccomp --noroot "
        "--caps.drop --nonewprivs --disable-userns --userns --ipc --pid --uts --cgroupns "
        "--unsetenv": _ALWAYS,
        "--cap-add --privileged": "use --profile unrestricted, which drops protections",
        "--tmpfs --shm-size": "/tmp and /dev/shm are writable; --disk bounds them",
        "--whitelist --read --write": _MOUNT,
        "--allow": "use --net HOST,... for hosts, --mount SRC:DST[:rw] for files",
        "--blacklist": "use --deny PATH",
        "--env-file": "use --env NAME=VALUE for each",
        "--ulimit --rlimit-nofile": "use --open-files N, --pids N or --memory SIZE",
        "--rlimit-as --memory-swap --memory-reservation": "use --memory 256m",
        "--cpu-shares --cpu-quota": "use --cpus 0.5",
        "--dns --add-host --ip --link": "use --net HOST:PORT",
        "--restart --hostname --platform --log-driver --quiet -q --noprofile": _NONE,
        "--time --time-limit --wall-time": "use --timeout 5s",
        "--pids-limit --nproc": "use --pids 64",
        "--runtime --driver --sandbox": "use --backend NAME",
        "--unsafe --no-sandbox": "use --profile unrestricted",
        "--fork": "use `ringfence create`, then `ringfence fork SANDBOX --n 3`",
        "--pool": "use `ringfence create`: a server keeps sandboxes warm",
        "--entrypoint --cmd": "the command follows `--`",
        "-f --file -s --script": "write the script after `--`: -- python3 FILE",
        "--name": "use `ringfence create --name`: sandboxes of `run` have no name",
        "--label": "use `ringfence create --label`: sandboxes of `run` have no labels",
        "--ttl --idle-timeout": "use --timeout 5m: the sandbox ends with its command",
        "--snapshot": "use `ringfence create --snapshot ID`",
        "--verbose -V": "use --json for what happened, or `ringfence doctor`",
        "--debug": "use --profile debug for debuggers inside; RINGFENCE_DEBUG=1 shows tracebacks",
        "--shell --bash": "use -- sh -c SCRIPT",
        "--no-net --no-network --offline": "remove the option: without --net there is none",
        "--command --exec": "the command follows `--`",
        "-c": "use --cpus 0.5; for a script: -- sh -c SCRIPT",
        "-o --output": "redirect it in the shell: -- CMD > FILE",
        "--stdin-file --input": "redirect it in the shell: -- CMD < FILE",
        "--server --key-file": (
            "`run` needs no server; on one: `ringfence create --server ADDRESS`, then `ringfence exec`"
        ),
    }
)
"""Options of Docker, bubblewrap, firejail and others, and what `run` has in their place."""

_OF_SERVE = spread(
    {
        "--port --host --bind -p --address": "use --listen 127.0.0.1:7878",
        "--socket --unix --uds": "the unix socket is in --state-dir: ringfence.sock",
        "--daemon -d --background -D": "use --detach",
        "--data-dir --dir": "use --state-dir DIR",
        "--verbose -v --debug": "use --log-level debug",
        "--cert --ssl-certfile --tls-cert": "use --tls-certificate FILE",
        "--key --ssl-keyfile": "use --tls-key FILE",
        "--api-key --token": "`ringfence keys create OWNER` makes keys",
        "--workers --reload": "remove the option: one server uses all processors it needs",
        "--shards": 'give "shards" in the file of --config, with --cluster',
    }
)
_OF_OTHERS = spread(
    {
        "mcp": {"--port": "use --http 127.0.0.1:PORT", "--host": "use --http 127.0.0.1:PORT"},
        "rm": {"-f --force": "remove the option: it asks nothing"},
        "cp": {"-r -a -R --recursive": "remove the option: directories are copied whole"},
        "template": {
            "--image --python --env --from": "in Python: Template.from_image(NAME), env(...)",
            "-r --requirement": "use --pip PACKAGE for each",
        },
        "list exec create keys logs top code fork": {
            "--key --api-key --token": "use --key-file FILE, or RINGFENCE_API_KEY"
        },
    }
)
COMMANDS_OF_OTHERS = spread(
    {
        "ps": "did you mean list?",
        "ls": "did you mean list?",
        "kill": "did you mean rm?",
        "stop": "`ringfence rm ID` ends a sandbox, `ringfence serve --stop` the server",
        "delete": "did you mean rm?",
        "start": "did you mean create?",
        "server": "did you mean serve?",
        "pull": "did you mean image pull?",
        "images": "did you mean image list?",
        "build": "build with another tool, then: ringfence image load PATH NAME",
        "install": "installation is complete; `ringfence doctor` shows what works on this host",
        "pause freeze": "use `ringfence session suspend ID`",
        "unpause resume": "use `ringfence session resume ID`",
        "inspect show describe": "use `ringfence session show ID`",
        "attach ssh console enter": "use `ringfence shell SANDBOX`",
        "stats info status": "use `ringfence top`, or `ringfence doctor`",
        "test check attack": "use `ringfence doctor --attack`",
        "expose port preview forward": "in Python: sandbox.expose(PORT); docs/how-to/network.md",
        "volume mount": "use --mount SRC:DST[:rw] of `ringfence run` and `create`",
        "network": "use --net HOST,... of `ringfence run` and `create`",
        "system prune": "use `ringfence image prune` or `ringfence template prune`",
        "events": "use `ringfence logs SANDBOX`",
        "config": "use `ringfence serve --config FILE`; docs/reference/http-api.md lists its keys",
        "diff": "did you mean changes?",
        "branch clone": "did you mean fork?",
        "init": "setup is complete; `ringfence doctor` shows what works on this host",
        "login": "`ringfence image pull` takes --user, or the login of Docker or Podman",
    }
)
VERBS = spread(
    {
        "add new make save": ("create", "acquire", "load"),
        "delete remove rm del revoke": ("rm", "remove", "release"),
        "ls ps images get": ("list", "show"),
        "import build": ("load",),
        "fetch download": ("pull",),
        "gc clean": ("prune",),
        "stop kill end": ("terminate", "rm"),
        "pause": ("suspend",),
        "start unpause": ("resume", "create"),
    }
)
"""Words of other tools by the verbs of ours that they may mean."""

ELSEWHERE = {
    ("snapshot", "restore"): "use `ringfence create --snapshot ID`",
    ("template", "run"): "use `ringfence run --template NAME`",
    ("pool", "get"): "`ringfence pool` shows all",
    ("image", "run"): "use `ringfence run --image NAME`",
    ("image", "inspect"): "`ringfence image list --json` shows all that is known of each",
    **dict.fromkeys(
        (("image", "push"), ("image", "tag"), ("image", "save")),
        "Ringfence keeps images for its sandboxes only: do it with the tool that built the image",
    ),
    ("template", "show"): "`ringfence template list --json` shows all that is known of each",
    ("keys", "show"): "a key is shown once, when it is created: use `ringfence keys rotate ID`",
}
"""Verbs that a command does not have, and where to find what they mean."""

_SHELL_WORDS = frozenset(
    [
        "cd",
        "source",
        "unset",
        "umask",
        "trap",
        "exec",
        "wait",
        ".",
        "export",
        "alias",
        "set",
        "ulimit",
        "exit",
        "if",
        "for",
        "while",
        "eval",
    ]
)

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
_IMAGES = frozenset(["alpine", "busybox", "debian", "fedora", "ubuntu"])
_PACKAGERS = frozenset(["apt", "apt-get", "dnf", "yum", "apk", "pacman", "zypper", "brew"])
_SHELL_SYNTAX = frozenset("|&;<>$`*")
_NOT_FOUND = 127


def option_of_others(command: str, flag: str) -> str:
    """Say what is meant by an option that this command does not have; empty where that is not known."""
    if command == "serve":
        return _OF_SERVE.get(flag, "")
    if hint := spread(_OF_OTHERS.get(command, {})).get(flag, ""):
        return hint
    if command not in ("run", "mcp", "create", "exec", "shell"):
        return ""
    if flag.startswith(("--unshare-", "--caps.", "--private-")):
        return _ALWAYS
    hint = OPTIONS.get(flag, "")
    if command == "exec" and hint.startswith(("use --", "`")) and "--env" not in hint:
        return (
            ""
            if "-t" in hint
            else "use this option with `ringfence create`, which creates the sandbox"
        )
    return hint


def hints(argv: Sequence[str], code: int, spec: SandboxSpec, given: dict[str, Any]) -> list[str]:
    """Say why a command that ended with `code` cannot have worked, as far as that can be seen from here."""
    found = []
    if os.path.isdir(argv[0]) and code == 126:
        other = (
            "; --here mounts this directory, --mount DIR:/work another directory"
            if "here" in given
            else ""
        )
        found = [f"{argv[0]} is a directory, not a command{other}"]
    elif code in (126, _NOT_FOUND):
        found = _of_a_name(argv[0], is_shown=bool(spec.image))
    program = argv[0].rpartition("/")[2]
    fetches = spec.network.is_none and _asks_the_network(program, argv[1:])
    if program in _PACKAGERS and not spec.image and not found:
        found = ["the host's programs are read-only inside: install on the host, or use --image"]
    elif fetches:
        host = next((_host(word) for word in argv if "://" in word), "HOST")
        found.append(f"the sandbox has no network: allow the host with --net {host}:443")
    # `npm install` alone reads a file of the project.
    if not spec.image and (len(argv) == 2 if fetches else not found):
        if _misses_files(program, argv[1:], spec, given):
            found.append(
                "the sandbox does not have your files: add --here (read-only) or --here=rw"
            )
        elif (script := missing_script(argv)) and not _is_mounted(script, spec):
            found.append(f"{script} does not exist on this host")
    if program == "go" and argv[1:2] in (["build"], ["install"]) and _shows_new_git(spec):
        # cmd/go/internal/vcs takes any directory of that name for a repository, and asks git.
        found.append(
            "go asks git about .git, which is empty and protected: add -buildvcs=false, or run"
            " `git init` on the host"
        )
    if program == "git" and "commit" in argv[1:] and ".git" in (spec.protect or ()):
        found.append(
            "--protect .git makes .git read-only: commit on the host, or remove the option"
        )
    return found


def _shows_new_git(spec: SandboxSpec) -> bool:
    """Return whether a writable mount has a .git inside that is not on the host."""
    return any(
        each.is_writable and each.is_host_path and not os.path.exists(f"{each.source}/.git")
        for each in spec.mounts
    )


def _of_a_name(name: str, *, is_shown: bool) -> list[str]:
    variable, equals, _value = name.partition("=")
    if equals and variable.isidentifier():
        return [f"set a variable before `--`: --env {name.partition(' ')[0]}"]
    if _SHELL_SYNTAX & {*name}:
        return [f"only a shell reads this: -- sh -c '{name}'"]
    if " " in name:
        return [f"do not quote the whole command: -- {name}; or: -- sh -c '{name}'"]
    if name in _SHELL_WORDS:
        return [f"{name} is a shell builtin: use -- sh -c '{name} ...'"]
    return [] if is_shown else _of_no_program(name)


def _of_no_program(name: str) -> list[str]:
    if "/" in name:
        if not os.path.exists(name):
            return [f"{name} does not exist on this host"]
        how = "python3" if name.endswith(".py") else "sh"
        return [] if os.access(name, os.X_OK) else [f"chmod +x {name}, or use -- {how} {name}"]
    if "\\" in name or name.endswith(".exe"):
        return [f"programs in a sandbox are those of Linux, and {name} is one of Windows"]
    if ":" in name or name in _IMAGES:
        return [f"an image is an option: --image {name} -- CMD ARG..."]
    if os.path.isdir(name):
        return [f"{name} is a directory, not a command"]
    if os.path.isfile(name):
        how = "python3 " if name.endswith(".py") else "sh " if name.endswith(".sh") else "./"
        return [f"did you mean {how}{name}?"]
    if where := shutil.which(name):
        if where.startswith(("/usr/", "/bin/", "/sbin/")):
            return []  # it ran, and ended so itself
        own = "; --python-env adds your Python and its programs" if "python" in where else ""
        return [f"{where} is not in the sandbox, which has only programs of /usr{own}"]
    from ..model.mistakes import closest

    near = closest(name, _programs(), cutoff=0.8)
    return [
        near
        or f"{name} is not installed on this host: install the program, or use an --image that has it"
    ]


def _programs() -> list[str]:
    found: list[str] = []
    for directory in ("/usr/bin", "/usr/local/bin"):
        try:
            found += os.listdir(directory)
        except OSError:
            continue
    return found


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


def _is_mounted(path: str, spec: SandboxSpec) -> bool:
    return any(path == each.target or path.startswith(f"{each.target}/") for each in spec.mounts)


def _host(url: str) -> str:
    return url.partition("://")[2].partition("/")[0].rpartition("@")[2].partition(":")[0] or "HOST"
