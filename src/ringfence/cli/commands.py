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
            "mount the host path SRC at DST in the sandbox; default access: ro; with ,nofollow refuse a"
            " symlink in SRC",
            repeat=True,
            field="mounts",
            words="<files>",
        ),
        Option(
            "here",
            "",
            "mount the current directory at /work and start the command there; default access: ro",
            words="rw ro",
        ),
        Option(
            "net",
            "none|public|unrestricted|HOST,...",
            "hosts that the sandbox may reach, comma-separated: name, *.domain, address, network or"
            " public (every public host), each with optional :PORTS; !HOST denies; default: none",
            field="network",
            words="none public unrestricted",
        ),
        Option(
            "net-policy",
            "FILE",
            "read the network policy from a JSON file; replaces --net",
            words="<files>",
        ),
        Option(
            "secret",
            "HOST=ENVVAR[:HEADER]",
            "insert the value of this host variable into requests to HOST, in HEADER; the sandbox sees only a"
            " placeholder; default: Authorization: Bearer",
            repeat=True,
            field="secrets",
        ),
        Option(
            "net-log",
            "FILE",
            "write each connection and whether it was allowed to FILE, as JSON lines",
            words="<files>",
        ),
        Option(
            "net-learn",
            "",
            "learning mode: allow and record all public hosts that no rule denies; `run` then prints a --net"
            " value that allows the hosts used",
            field="learn",
        ),
        Option(
            "memory",
            "SIZE",
            "memory of the whole sandbox, such as 256m or 1g; default: half of the host's, at"
            " most 1g in a microVM",
            field="memory_bytes",
        ),
        Option("cpus", "N", "CPU time in cores, such as 0.5 or 2; default: no limit"),
        Option("pids", "N", "processes and threads in the sandbox; default: 512"),
        Option(
            "disk",
            "SIZE",
            "disk space outside mounts, such as 64m; default: three quarters of --memory, at most"
            " 8g and a quarter of the host's memory",
            field="disk_bytes",
        ),
        Option(
            "disk-root",
            "",
            "keep files outside mounts on the host's disk, not in memory; --disk then defaults to 4g,"
            " reserved at the start; a --disk above --memory implies it",
            field="disk_root",
        ),
        Option(
            "inodes",
            "N",
            "files and directories outside mounts; default: one per 4 KiB of --disk, at most"
            " 262144",
        ),
        Option("open-files", "N", "open files per process; default: 4096", field="open_files"),
        Option(
            "output-bytes",
            "SIZE",
            "output to keep of each of stdout and stderr, such as 64k; `run` keeps output only with"
            " --json; default: 4m",
            field="output_bytes",
        ),
        Option(
            "protect",
            "PATH",
            "make a path in a writable mount read-only, whether it exists or not, in addition to"
            " the default"
            " paths; presets: @git (all of .git), @agents (AGENTS.md, CLAUDE.md, ...), @ci",
            repeat=True,
            words="@git @agents @ci",
        ),
        Option(
            "unprotect",
            "NAME",
            "make a path writable that is protected by default; all: every such path",
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
            "make a path in the sandbox unreadable and unwritable, whether it exists or not",
            repeat=True,
        ),
        Option(
            "image",
            "NAME",
            "use the files of this OCI image; without CMD, run the image's default command;"
            " default: the host's programs",
        ),
        Option(
            "pull",
            "missing|always|never",
            "when to fetch --image from its registry; default: missing",
            words="missing always never",
        ),
        Option(
            "timeout",
            "TIME",
            "kill the command and all its processes after TIME, such as 5s, 500ms or 1m; default:"
            " no limit",
            field="timeout_s",
        ),
        Option(
            "env",
            "K=V",
            "set an environment variable; the environment of the host is not passed on",
            repeat=True,
        ),
        Option(
            "workdir",
            "DIR",
            "working directory, absolute, in the sandbox; default: /home/sandbox, or /work with"
            " --here",
            field="cwd",
        ),
        Option(
            "user",
            "NAME|UID",
            "run the command as this user of the sandbox; default: sandbox",
            words="sandbox root nobody",
        ),
        Option(
            "memory-dir",
            "DIR",
            "host directory to mount read-write at /mnt/memory; default: a new empty directory",
            field="memory_dir",
            words="<directories>",
        ),
        Option(
            "python-env",
            "",
            "make the Python that runs Ringfence, and its packages, visible read-only",
            field="python_env",
        ),
        Option(
            "pip",
            "PACKAGE",
            "add this Python package, as pip names it; installed once in a sandbox of its own, then"
            " shared read-only",
            field="pip_install",
            repeat=True,
        ),
        Option(
            "template",
            "NAME",
            "add the packages of this template, read-only; `ringfence template list` lists them",
        ),
        Option(
            "profile",
            "NAME",
            "hardening profile: os_hardened, own_root, debug or unrestricted; default: os_hardened",
            words="os_hardened own_root debug unrestricted",
        ),
        Option(
            "backend",
            "NAME",
            "isolation backend; default: the first backend of --tier that works",
            words="native gvisor microvm docker bubblewrap codex lxc landlock",
        ),
        Option(
            "anywhere",
            "",
            "where the host refuses a new /proc, show this one's; where it refuses namespaces, use the backend"
            " landlock, which has none",
        ),
        Option(
            "tier",
            "light|strong",
            "minimum isolation level: light shares the host's kernel, strong has its own; fails"
            " if unavailable; default: the level of --backend, else light",
            words="light strong",
        ),
        Option(
            "allow-degraded",
            "NAME",
            "start although this protection or limit is weaker on this host; *: any of them but"
            " namespaces, without which the backend landlock is used",
            repeat=True,
            field="allow_degraded",
        ),
        Option(
            "tty",
            "",
            "run the command on a pseudo-terminal; default: if stdin, stdout and stderr are"
            " terminals",
            short="t",
            field="pty",
        ),
        Option("json", "", "print the result, with stdout and stderr, as one JSON object"),
        HELP,
    ),
    groups={
        "Files": "mount here protect unprotect deny image pull workdir memory-dir python-env pip template",
        "Network": "net net-policy secret net-log net-learn",
        "Limits": "timeout memory cpus pids disk disk-root inodes open-files output-bytes",
        "Isolation": "tier backend anywhere profile allow-degraded user",
    },
    details="""\
The command reads and writes stdin, stdout and stderr directly. Of your files, the sandbox has only
those of --mount and --here. Without these options it has the script to run (./step.sh, or step.py
in `python3 step.py`), read-only.

Exit codes: that of the command; 128+n if signal n ended the command; 124 timeout; 125 error of
Ringfence, explained on stderr; 126 command not executable; 127 command not found.""",
    examples=(
        (
            "run a script without network and without your other files",
            "ringfence run -- python3 step.py",
        ),
        ("run a build that may write only to this directory", "ringfence run --here=rw -- make"),
        ("set limits", "ringfence run --timeout 5s --memory 256m --pids 64 -- ./untrusted.sh"),
        (
            "run a build that may reach two hosts",
            "ringfence run --net pypi.org,files.pythonhosted.org -- make",
        ),
        (
            "run a program of an OCI image",
            "ringfence run --image alpine:3.20 -- cat /etc/os-release",
        ),
        ("run a script with packages of PyPI", "ringfence run --pip pandas -- python3 plot.py"),
        ("print the result as JSON", "ringfence run --json -- python3 -c 'print(6 * 7)'"),
        ("open an interactive shell", "ringfence run -- bash"),
    ),
)

DOCTOR = Command(
    "doctor",
    "Check which backends and protections work on this host, and print fixes for the rest.",
    arguments="[OPTIONS]",
    options=(
        JSON,
        Option(
            "verbose",
            "",
            "list every protection of every backend, with the reason for its status",
            short="v",
        ),
        Option("attack", "", "run the bundled escape probes in a sandbox on this host"),
        Option("backend", "NAME", "with --attack: backend to attack; default: native"),
        Option(
            "fix",
            "",
            "let ordinary users make sandboxes on this host: AppArmor profile, sysctls and"
            " delegation of cgroups, where needed; shows the changes first; needs root",
        ),
        Option("undo", "", "take back what --fix changed; needs root"),
        Option("yes", "", "with --fix and --undo: do not ask"),
        HELP,
    ),
    details="Exit code: 0 if a backend other than landlock works (with --attack: if no probe"
    " escaped), else 1.",
    examples=(
        ("check this host", "ringfence doctor"),
        ("list every protection", "ringfence doctor --verbose"),
        ("print JSON", "ringfence doctor --json > host.json"),
        ("try to escape", "ringfence doctor --attack"),
        ("let ordinary users in", "sudo ringfence doctor --fix"),
    ),
)

BENCH = Command(
    "bench",
    "Measure the speed of Ringfence, and of other sandboxes that are installed.",
    arguments="[OPTIONS] [MEASURE...]",
    options=(
        JSON,
        Option("peers", "", "also measure other sandboxes found on PATH; nothing is installed"),
        Option("quick", "", "measure fewer runs: takes seconds instead of minutes"),
        Option("full", "", "with the measure live: start 5,000 sandboxes at once instead of 1,000"),
        Option("server", "", "measure `ringfence serve` instead"),
        Option(
            "backends",
            "",
            "measure gVisor, Docker and microVMs instead, each against the bare engine",
        ),
        Option(
            "floods",
            "",
            "flood `ringfence serve` with requests instead; measure p99 of other clients and"
            " server memory",
        ),
        HELP,
    ),
    words="create exec run throughput parked files images snapshots forks live egress adapters "
    "placement ray server cluster backends landlock floods",
    details="""\
Default MEASURE: all except server, cluster, backends, landlock and floods.

Measures:
  create      create, first exec and terminate, compared with bubblewrap
  exec        /bin/true in a live sandbox, compared with a subprocess
  run         the whole process of `ringfence run -- true`, compared with `python3 -c pass`
  throughput  create and terminate by eight callers
  parked      memory of a waiting sandbox (needs root)
  files       copy a file of 1 GiB and 10,000 small files, compared with cp and tar
  images      unpack an image of 500 MiB, compared with tar x
  snapshots   restore, save and fork a tree of 280 MB, compared with an empty create
  forks       forks, marks and rewinds of a live context, compared with os.fork()
  live        live sandboxes at once: 1,000, with --full 5,000
  egress      cost and throughput of a network policy, compared with the host's network
  adapters    import time of each adapter beyond its framework
  placement   a decision of placement over 1,000 nodes
  ray         sandboxes in a Ray program, compared with an empty actor and with the library
  server      latency, memory, streams and restart of the server
  cluster     overhead and throughput of a gateway over two Ray nodes on this machine
  backends    gVisor, Docker and microVMs, compared with runsc, docker exec and a plain boot
  landlock    the backend without namespaces, compared with sandlock, bubblewrap and bare programs
  floods      p99 of other clients and the server's memory while each listener is attacked""",
    examples=(
        ("measure the server", "ringfence bench --server --quick"),
        ("measure everything in seconds", "ringfence bench --quick"),
        ("compare with other sandboxes on this host", "ringfence bench --peers create exec"),
        ("print JSON", "ringfence bench --json > bench.json"),
    ),
)

TEMPLATE = Command(
    "template",
    "Build, list and remove templates: Python packages over the host's programs.",
    arguments="build NAME | list | remove NAME | prune [OPTIONS]",
    options=(
        Option(
            "pip",
            "PACKAGE",
            "build: a Python package, as pip names it",
            field="pip_install",
            repeat=True,
        ),
        Option(
            "run", "SCRIPT", "build: run a shell script, after packages are installed", repeat=True
        ),
        Option(
            "copy",
            "SOURCE:TARGET",
            "build: copy a file or directory of this machine, before everything else",
            repeat=True,
        ),
        Option(
            "server",
            "ADDRESS",
            "build, list, remove: templates of a server: unix:PATH, http://HOST:PORT or https://HOST;"
            " default: those of this machine",
        ),
        Option(
            "key-file",
            "FILE",
            "read the API key of --server from FILE; default: $RINGFENCE_API_KEY",
            words="<files>",
        ),
        Option(
            "find-links",
            "DIR",
            "build: directory of wheels to install from, in place of the package index",
            words="<directories>",
        ),
        Option(
            "index-url",
            "URL",
            "build: package index; default: the variable PIP_INDEX_URL, else PyPI",
        ),
        JSON,
        HELP,
    ),
    words="build list remove prune",
    details="""\
`build` installs wheels in a sandbox that reaches the package index alone. `remove` removes a name;
`prune` deletes files without a name and not in use.""",
    examples=(
        ("build a template", "ringfence template build ds --pip pandas --pip matplotlib"),
        ("use it", "ringfence run --template ds -- python3 plot.py"),
    ),
)

IMAGE = Command(
    "image",
    "Fetch, list and remove OCI images that sandboxes can start from.",
    arguments="pull NAME | load PATH NAME | list | remove NAME | prune [OPTIONS]",
    options=(
        Option(
            "plain-http",
            "",
            "pull: allow HTTP without TLS; registries on this machine are allowed without the"
            " option",
        ),
        Option(
            "user",
            "NAME:PASSWORD",
            "pull: login at the registry; default: the login of Docker or Podman",
        ),
        Option("password-stdin", "", "pull: read the password for --user NAME from stdin"),
        JSON,
        HELP,
    ),
    words="pull load list remove prune",
    details="""\
`load` reads an OCI layout (directory or tar), an archive of `docker save`, or a directory with a
root file system. `remove` removes a name; `prune` deletes files without a name and not in use.""",
    examples=(
        ("pull from a registry", "ringfence image pull alpine:3.20"),
        (
            "load from Docker",
            "docker save mine:1 -o mine.tar; ringfence image load mine.tar mine:1",
        ),
        ("load a directory", "ringfence image load ./rootfs mine:2"),
        ("list images", "ringfence image list"),
    ),
)

_NOT_OF_A_SANDBOX = {
    "anywhere",
    "pip",
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
    "Offer a sandbox to an agent as tools, by the Model Context Protocol (MCP).",
    arguments="[OPTIONS]",
    options=(
        Option(
            "http",
            "HOST:PORT",
            "serve streamable HTTP at /mcp on this loopback address; default: standard input and"
            " output",
        ),
        Option(
            "server", "URL", "create the sandboxes on this Ringfence server; default: on this host"
        ),
        *(option for option in RUN.options if option.name == "pull"),
        *(option for option in RUN.options if option.name not in _NOT_OF_A_SANDBOX),
        HELP,
    ),
    details="""\
Without --http the command serves one client on standard input and output. The other options
describe the sandbox, as for `run`; --workdir is also the base of relative paths. Over HTTP every
session has its own sandbox, and requests need a bearer token: the value of RINGFENCE_MCP_TOKEN,
else a new token, printed on stderr.""",
    examples=(
        ("offer a sandbox without network", "ringfence mcp"),
        ("work on this directory", "ringfence mcp --mount .:/work:rw --workdir /work"),
        ("serve MCP over HTTP", "ringfence mcp --http 127.0.0.1:8765 --memory 1g"),
    ),
)

COMPLETION = Command(
    "completion",
    "Print a completion script for a shell.",
    arguments="bash|zsh|fish",
    options=(HELP,),
    words="bash zsh fish",
    examples=(
        ("bash: add to ~/.bashrc", "source <(ringfence completion bash)"),
        ("zsh: add to ~/.zshrc", "source <(ringfence completion zsh)"),
        ("fish: run once", "ringfence completion fish > ~/.config/fish/completions/ringfence.fish"),
    ),
)


def __getattr__(name: str) -> object:
    """Make `COMMANDS` on first use (PEP 562): `run` has no time to read those of a server."""
    if name != "COMMANDS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .server.commands import REMOTE
    from .server.hosting import HOSTING

    found = (RUN, IMAGE, TEMPLATE, *HOSTING, MCP, *REMOTE, DOCTOR, BENCH, COMPLETION)
    globals()[name] = found
    return found
