"""Every command, its options and examples. Data only: parser, help and completion read it."""

from __future__ import annotations

from .options import Command, Option

TYPE_CHECKING = False
if TYPE_CHECKING:
    COMMANDS: tuple[Command, ...]

HELP = Option("help", "", "show this help", short="h")
JSON = Option("json", "", "print JSON instead of text")

# Options of `run` whose value may hold less than asked, and the protection that says so.
LIMITS = {
    "memory": "memory_limit",
    "cpus": "cpu_limit",
    "pids": "pids_limit",
    "disk": "disk_quota",
    "inodes": "inode_quota",
    "open-files": "open_files_limit",
}

RUN = Command(
    "run",
    "Run one command in a fresh sandbox that ends with it.",
    arguments="[OPTIONS] -- CMD ARG...",
    options=(
        Option(
            "mount",
            "SRC:DST[:ro|rw]",
            "show a host directory or file inside; read-only unless :rw",
            repeat=True,
            field="mounts",
            words="<files>",
        ),
        Option(
            "here",
            "",
            "show this directory at /work and start there; read-only unless =rw",
            words="rw ro",
        ),
        Option(
            "net",
            "none|unrestricted|HOST,...",
            "allowed hosts: name, *.domain, address or network, each with :PORTS; ! denies; default: none",
            field="network",
            words="none unrestricted",
        ),
        Option(
            "net-policy", "FILE", "allowed hosts and rules, as a policy in JSON", words="<files>"
        ),
        Option(
            "secret",
            "HOST=ENVVAR[:HEADER]",
            "write this variable's value into requests to HOST; never inside the sandbox",
            repeat=True,
            field="secrets",
        ),
        Option(
            "net-log",
            "FILE",
            "write each connection and its verdict to FILE, as JSON lines",
            words="<files>",
        ),
        Option(
            "net-learn",
            "",
            "learning mode: allow all public hosts, record them, and print a suggested --net",
            field="learn",
        ),
        Option(
            "memory", "SIZE", "memory of the whole sandbox, as 256m or 1g", field="memory_bytes"
        ),
        Option("cpus", "N", "cores' worth of processor time, as 0.5"),
        Option("pids", "N", "processes and threads"),
        Option("disk", "SIZE", "disk space outside mounts", field="disk_bytes"),
        Option("inodes", "N", "files and directories that may be made outside mounts"),
        Option("open-files", "N", "open files of each process", field="open_files"),
        Option(
            "output-bytes",
            "SIZE",
            "with --json, how much of each of stdout and stderr is kept",
            field="output_bytes",
        ),
        Option(
            "protect",
            "PATH",
            "keep a path below --mount or --here=rw read-only, besides the default set, even where it"
            " does not exist; presets: @git (all of .git), @agents (AGENTS.md, CLAUDE.md, ...), @ci",
            repeat=True,
            words="@git @agents @ci",
        ),
        Option(
            "unprotect",
            "NAME",
            "leave a path writable that is protected by default; `all` for every one",
            repeat=True,
            words="all nested .git/hooks .git/config .git/commondir .git/config.worktree"
            " .git/info/attributes .git/rebase-merge .git/sequencer .gitmodules .hg/hgrc .husky"
            " .pre-commit-config.yaml lefthook.yml lefthook-local.yml .lefthook.yml .envrc"
            " .direnv .tool-versions mise.toml .mise.toml .vscode .idea .zed .devcontainer"
            " .devcontainer.json .exrc .mcp.json .agents .aider.conf.yml .amazonq .claude .codex"
            " .continue .cursor .factory .gemini .kilocode .kiro .opencode opencode.json"
            " opencode.jsonc .qwen .roo .windsurf .yarnrc.yml .ripgreprc",
        ),
        Option(
            "deny",
            "PATH",
            "a path inside that cannot be read or written, even where it does not exist yet",
            repeat=True,
        ),
        Option(
            "image",
            "NAME",
            "start from this OCI image's files; without CMD, its default command",
        ),
        Option(
            "pull", "missing|always|never", "when to fetch --image", words="missing always never"
        ),
        Option("timeout", "TIME", "kill the whole tree after 5s, 500ms, 1m", field="timeout_s"),
        Option("env", "K=V", "add to the environment, which is otherwise made new", repeat=True),
        Option("workdir", "DIR", "where the command starts, absolute inside", field="cwd"),
        Option("user", "NAME|UID", "run as this user of the sandbox", words="sandbox root nobody"),
        Option(
            "memory-dir",
            "DIR",
            "host directory behind /mnt/memory",
            field="memory_dir",
            words="<directories>",
        ),
        Option(
            "python-env",
            "",
            "also show this Python and its packages, read-only",
            field="python_env",
        ),
        Option(
            "profile",
            "NAME",
            "hardening profile: os_hardened (default), own_root, debug or unrestricted",
            words="os_hardened own_root debug unrestricted",
        ),
        Option(
            "backend",
            "NAME",
            "isolation backend; default: the best one of the tier that works here",
            words="native gvisor microvm docker bubblewrap codex lxc",
        ),
        Option(
            "tier",
            "light|strong",
            "minimum isolation level: the host's kernel (default) or one of its own; fails if unavailable",
            words="light strong",
        ),
        Option(
            "allow-degraded",
            "NAME",
            "accept that this protection or limit is weaker here; `*` for any",
            repeat=True,
            field="allow_degraded",
        ),
        Option(
            "tty",
            "",
            "run on a terminal; the default when all three streams are one",
            short="t",
            field="pty",
        ),
        Option("json", "", "print one JSON object instead of passing the streams through"),
        HELP,
    ),
    groups={
        "Files": "mount here protect unprotect deny image pull workdir memory-dir python-env",
        "Network": "net net-policy secret net-log net-learn",
        "Limits": "timeout memory cpus pids disk inodes open-files output-bytes",
        "Isolation": "tier backend profile allow-degraded user",
    },
    details="""\
stdin, stdout and stderr are the command's own, as streams. Nothing of yours is inside but what
--mount and --here show; without them, the script to run (./step.sh, or step.py in
`python3 step.py`), read-only.

Exit codes: the command's own; 128+n when signal n ended it; 124 timeout; 125 Ringfence itself
failed, and stderr says why; 126 not executable; 127 not found.""",
    examples=(
        (
            "a script, with no network and nothing of yours but itself",
            "ringfence run -- python3 step.py",
        ),
        (
            "a build that may write this directory only",
            "ringfence run --here=rw -- make",
        ),
        ("limits", "ringfence run --timeout 5s --memory 256m --pids 64 -- ./untrusted.sh"),
        (
            "a build that reaches two hosts",
            "ringfence run --net pypi.org,files.pythonhosted.org -- make",
        ),
        ("a program of an image", "ringfence run --image alpine:3.20 -- cat /etc/os-release"),
        ("a result to read by program", "ringfence run --json -- python3 -c 'print(6 * 7)'"),
        ("a shell to look around in", "ringfence run -- bash"),
    ),
)

DOCTOR = Command(
    "doctor",
    "Say what this host allows: every protection, why, and the fix.",
    arguments="[OPTIONS]",
    options=(
        JSON,
        Option("verbose", "", "every protection of every backend, with its reason", short="v"),
        Option("attack", "", "run the bundled escape probes inside a sandbox here"),
        Option("backend", "NAME", "with --attack: the backend that is attacked"),
        HELP,
    ),
    details="Exits 0 when at least one backend is usable (with --attack: nothing escaped), else 1.",
    examples=(
        ("what holds here", "ringfence doctor"),
        ("all of it", "ringfence doctor --verbose"),
        ("for a program", "ringfence doctor --json > host.json"),
        ("see it attacked", "ringfence doctor --attack"),
    ),
)

BENCH = Command(
    "bench",
    "Measure create, exec and run beside the peers installed here.",
    arguments="[OPTIONS] [MEASURE...]",
    options=(
        JSON,
        Option("peers", "", "include other sandboxes found on PATH; nothing is installed"),
        Option("quick", "", "fewer runs: seconds, not minutes"),
        Option("full", "", "5,000 live sandboxes at once instead of 1,000"),
        Option("server", "", "measure `ringfence serve` instead"),
        Option(
            "backends",
            "",
            "measure gVisor, Docker and microVMs instead, beside their engines",
        ),
        Option("floods", "", "attack `ringfence serve` instead: other clients' p99, its memory"),
        HELP,
    ),
    words="create exec run throughput parked files images live egress adapters server backends floods",
    details="Without a MEASURE all but server, backends and floods.",
    examples=(
        ("the server", "ringfence bench --server --quick"),
        ("everything, in seconds", "ringfence bench --quick"),
        ("ratios against this machine's other sandboxes", "ringfence bench --peers create exec"),
        ("for a program", "ringfence bench --json > bench.json"),
    ),
)

SERVE = Command(
    "serve",
    "Serve sandboxes over HTTP, on a unix socket and if asked on TCP.",
    arguments="[OPTIONS]",
    options=(
        Option("state-dir", "DIR", "where it keeps what survives a restart", words="<directories>"),
        Option("backend", "NAME", "isolation backend; the first that works is used", repeat=True),
        Option("listen", "HOST:PORT", "also on TCP, where callers need a key"),
        Option("allow-public", "", "let --listen be an address that others can reach, without TLS"),
        Option("tls-certificate", "FILE", "for --listen, in PEM", words="<files>"),
        Option("tls-key", "FILE", "for --listen, in PEM", words="<files>"),
        Option(
            "allow-host",
            "NAME",
            "accept this name in Host headers, beside the address itself",
            repeat=True,
            field="allowed_hosts",
        ),
        Option(
            "allow-origin",
            "URL",
            "accept calls of web pages of this origin, as https://app.example.com; default: none",
            repeat=True,
            field="allowed_origins",
        ),
        Option(
            "max-sandboxes",
            "N",
            "maximum number of live sandboxes; default: 100",
            field="manager.max_sandboxes",
        ),
        Option(
            "outlive",
            "TIME",
            "keep sandboxes for so long after the server was killed, as 10m (default); 0: end them",
            field="outlive_s",
        ),
        Option("detach", "", "return once it listens; it logs to serve.log in the state directory"),
        Option(
            "take-over", "", "have the daemon that serves there leave, and go on with its sandboxes"
        ),
        Option(
            "stop", "", "end the daemon that serves there and all its sandboxes, and do no more"
        ),
        Option(
            "log-level",
            "LEVEL",
            "lowest level logged on stderr: debug, info, warning or error",
            words="debug info warning error",
        ),
        Option("config", "FILE", "all of it, as JSON; options win", words="<files>"),
        JSON,
        HELP,
    ),
    details="""\
The unix socket is ringfence.sock in the state directory; only this user and root may connect to it.
One daemon serves a state directory. SIGTERM ends it and its sandboxes; requests under way have 5 s.
When it is killed, or ended by SIGUSR1, they run on for the next one.""",
    examples=(
        ("for yourself", "ringfence serve --detach"),
        ("restarted, while sandboxes keep running", "ringfence serve --take-over"),
        ("for a team's machine, with keys", "ringfence serve --listen 127.0.0.1:7878"),
        (
            "for others on the network",
            "ringfence serve --listen 0.0.0.0:7878 --tls-certificate cert.pem --tls-key key.pem",
        ),
    ),
)

_STATE_DIR = Option("state-dir", "DIR", "of the server; as for `serve`", words="<directories>")

BACKUP = Command(
    "backup",
    "Copy a server's keys, records and snapshots into a new directory, while it runs.",
    arguments="[OPTIONS] DIR",
    options=(_STATE_DIR, JSON, HELP),
    words="<directories>",
    details="The copy of the database is consistent while the server runs. The output of execs is left out.",
    examples=(("every night", "ringfence backup /backups/ringfence-$(date +%F)"),),
)

RESTORE = Command(
    "restore",
    "Put a backup into an empty or new state directory.",
    arguments="[OPTIONS] DIR",
    options=(_STATE_DIR, JSON, HELP),
    words="<directories>",
    details="Sandboxes of the backup's records are marked as ended when a server starts on it.",
    examples=(("beside a running server", "ringfence restore /backups/b --state-dir ./restored"),),
)

IMAGE = Command(
    "image",
    "Fetch, list and remove OCI images that sandboxes can start from.",
    arguments="pull NAME | load PATH NAME | list | remove NAME | prune [OPTIONS]",
    options=(
        Option("plain-http", "", "pull without TLS, as registries on this machine do in any case"),
        Option("user", "NAME:PASSWORD", "for the registry; else the login of Docker or Podman"),
        Option("password-stdin", "", "with --user NAME: the password is read from stdin"),
        JSON,
        HELP,
    ),
    words="pull load list remove prune",
    details="""\
`load` takes an OCI layout (directory or tar), an archive of `docker save`, or a directory with a
root file system. `remove` forgets a name; `prune` removes files that no name means and nobody uses.""",
    examples=(
        ("from a registry", "ringfence image pull alpine:3.20"),
        ("from Docker", "docker save mine:1 -o mine.tar; ringfence image load mine.tar mine:1"),
        ("from a directory", "ringfence image load ./rootfs mine:2"),
        ("what is here", "ringfence image list"),
    ),
)

_NOT_OF_A_SANDBOX = {
    "pull",
    "net-log",
    "net-learn",
    "output-bytes",
    "timeout",
    "tty",
    "json",
    "help",
}

MCP = Command(
    "mcp",
    "Serve tools that work in a sandbox to an agent, by the Model Context Protocol.",
    arguments="[OPTIONS]",
    options=(
        Option("http", "HOST:PORT", "streamable HTTP at /mcp, on a loopback address only"),
        Option("server", "URL", "make the sandboxes on this Ringfence server, not here"),
        *(option for option in RUN.options if option.name == "pull"),
        *(option for option in RUN.options if option.name not in _NOT_OF_A_SANDBOX),
        HELP,
    ),
    details="""\
Without --http it serves one client on standard input and output, as clients start it. The options
of `run` say what its sandbox is like; --workdir is where commands start and relative paths begin.
Over HTTP every session has a sandbox of its own, and requests need a bearer token: what
RINGFENCE_MCP_TOKEN holds, else a new one, which is printed.""",
    examples=(
        ("a scratch machine without network", "ringfence mcp"),
        ("work on this directory", "ringfence mcp --mount .:/work:rw --workdir /work"),
        ("for clients that speak HTTP", "ringfence mcp --http 127.0.0.1:8765 --memory 1g"),
    ),
)

COMPLETION = Command(
    "completion",
    "Print a completion script for a shell.",
    arguments="bash|zsh|fish",
    options=(HELP,),
    words="bash zsh fish",
    examples=(
        ("bash, in ~/.bashrc", "source <(ringfence completion bash)"),
        ("zsh, in ~/.zshrc", "source <(ringfence completion zsh)"),
        ("fish", "ringfence completion fish > ~/.config/fish/completions/ringfence.fish"),
    ),
)


def __getattr__(name: str) -> object:
    """`COMMANDS`, those that speak to a server included: `run` has no time to read them (PEP 562)."""
    if name != "COMMANDS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .server.commands import REMOTE

    found = (RUN, IMAGE, SERVE, BACKUP, RESTORE, MCP, *REMOTE, DOCTOR, BENCH, COMPLETION)
    globals()[name] = found
    return found
