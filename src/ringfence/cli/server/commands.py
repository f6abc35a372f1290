"""The commands that speak to a server. Data only, as in `commands`."""

from __future__ import annotations

from ..commands import RUN
from ..options import Command, Option

_OF_THE_SANDBOX = (
    "mount", "net", "net-policy", "secret", "net-learn", "memory", "cpus", "pids", "disk", "inodes",
    "open-files", "output-bytes", "protect", "unprotect", "deny", "env", "workdir", "user",
    "memory-dir", "profile", "backend", "tier", "allow-degraded",
)  # fmt: skip

_SERVER = (
    Option(
        "server",
        "ADDRESS",
        "unix:PATH, http://HOST:PORT or https://HOST; else $RINGFENCE_SERVER, else this user's own",
    ),
    Option("key-file", "FILE", "the API key is in there; else $RINGFENCE_API_KEY", words="<files>"),
)
_JSON = Option("json", "", "print JSON instead of a table")
_HELP = Option("help", "", "show this help", short="h")
_LABEL = Option("label", "K=V", "only sandboxes with this label", repeat=True)
_ENDING = (*_SERVER, _JSON, _HELP)

_STREAMS = """\
stdin, stdout and stderr are the command's own. Ending the client does not end the command:
`ringfence logs -f` shows it again.

Exit codes: the command's own; 128+n when signal n ended it; 124 timeout; 125 Ringfence itself
failed, and stderr says why; 126 not executable; 127 not found."""


CREATE = Command(
    "create",
    "Make a sandbox on a server, and print its id.",
    arguments="[OPTIONS]",
    options=(
        Option("name", "TEXT", "for people, and instead of its id where it is the only one"),
        Option("label", "K=V", "to find it by", repeat=True, field="labels"),
        Option("ttl", "TIME", "end it after 10m, 1h, even while busy", field="ttl_s"),
        Option("idle-timeout", "TIME", "end it when it did nothing for so long"),
        Option("snapshot", "ID", "start with the files of this snapshot"),
        Option("no-pool", "", "make it for this request alone"),
        *(option for option in RUN.options if option.name in _OF_THE_SANDBOX),
        *_ENDING,
    ),
    details="Paths of mounts are the server's.",
    examples=(
        ("one to work in", "id=$(ringfence create --name build)"),
        ("limits and a label", "ringfence create --memory 1g --cpus 2 --label team=a"),
        ("from a snapshot", "ringfence create --snapshot native-0190... --ttl 1h"),
    ),
)

LIST = Command(
    "list",
    "List the sandboxes of a server.",
    arguments="[OPTIONS]",
    options=(
        _LABEL,
        Option(
            "state",
            "STATE",
            "only those; without, all that live",
            repeat=True,
            words="provisioned running suspended terminated",
        ),
        Option("quiet", "", "ids only", short="q"),
        *_ENDING,
    ),
    examples=(
        ("what there is", "ringfence list"),
        ("of one team", "ringfence list --label team=a"),
        ("ids for a script", "ringfence list -q"),
    ),
)

EXEC = Command(
    "exec",
    "Run a command in a sandbox of a server.",
    arguments="[OPTIONS] SANDBOX -- CMD ARG...",
    options=(
        Option("timeout", "TIME", "kill the whole tree after 5s, 500ms, 1m", field="timeout_s"),
        Option("env", "K=V", "add to the environment", repeat=True),
        Option("workdir", "DIR", "where the command starts", field="cwd"),
        Option("user", "NAME|UID", "run as this user of the sandbox", words="sandbox root nobody"),
        Option(
            "tty",
            "",
            "run on a terminal; the default when all three streams are one",
            short="t",
            field="pty",
        ),
        Option("detach", "", "let it run, and print its id", short="d"),
        *_SERVER,
        Option("json", "", "print one JSON object instead of passing the streams through"),
        _HELP,
    ),
    details=_STREAMS,
    examples=(
        ("a command", "ringfence exec $id -- python3 -c 'print(6 * 7)'"),
        ("with input", "ringfence exec $id -- sh -c 'cat > data' < data.txt"),
        ("in the background", "ringfence exec -d $id -- make"),
        ("a result to read by program", "ringfence exec --json $id -- ls"),
    ),
)

SHELL = Command(
    "shell",
    "Work in a sandbox of a server, on a terminal.",
    arguments="[OPTIONS] [SANDBOX] [-- CMD ARG...]",
    options=(
        Option("env", "K=V", "add to the environment", repeat=True),
        Option("workdir", "DIR", "where it starts", field="cwd"),
        Option("user", "NAME|UID", "run as this user of the sandbox", words="sandbox root nobody"),
        *_SERVER,
        _HELP,
    ),
    details="""\
Without SANDBOX, in a new one that ends with the shell. Without CMD, bash where there is one, else
sh. The exit code is the shell's own.""",
    examples=(
        ("in one that is there", "ringfence shell $id"),
        ("in one for this alone", "ringfence shell"),
        ("something else on a terminal", "ringfence shell $id -- python3"),
    ),
)

CP = Command(
    "cp",
    "Copy files and directories into and out of a sandbox.",
    arguments="[OPTIONS] SRC DST",
    options=(*_SERVER, _HELP),
    details="""\
One of SRC and DST is SANDBOX:PATH. Directories are copied with all that is in them; the copy's own
path is DST, or a name in DST where that is a directory or ends in a slash. `-` is standard input or
output.""",
    examples=(
        ("in", "ringfence cp ./src $id:work/src"),
        ("out", "ringfence cp $id:/mnt/session/outputs ./outputs"),
        ("to look at", "ringfence cp $id:report.txt -"),
    ),
)

LOGS = Command(
    "logs",
    "Show what commands in a sandbox have written.",
    arguments="[OPTIONS] SANDBOX [EXEC]",
    options=(
        Option("follow", "", "stay until it has ended", short="f"),
        Option("list", "", "list the commands instead", short="l"),
        Option("network", "", "list the network events instead"),
        *_ENDING,
    ),
    details="""\
Without EXEC, of the newest command. Output that was too much to keep is told of on stderr. With
--follow the exit code is the command's.""",
    examples=(
        ("of the newest", "ringfence logs -f $id"),
        ("what ran", "ringfence logs -l $id"),
        ("as JSON lines", "ringfence logs --json $id $exec"),
    ),
)

TOP = Command(
    "top",
    "Watch the resource usage of a server's sandboxes.",
    arguments="[OPTIONS]",
    options=(
        _LABEL,
        Option("interval", "TIME", "between two looks; 2s"),
        Option("once", "", "look once"),
        *_ENDING,
    ),
    details="Without a terminal, or with --json, it looks once. Ctrl-C ends it.",
    examples=(
        ("live", "ringfence top"),
        ("for a script", "ringfence top --json"),
    ),
)

SNAPSHOT = Command(
    "snapshot",
    "Save the files of a sandbox; list and remove snapshots.",
    arguments="create SANDBOX | list | rm ID...",
    options=(
        Option("meta", "K=V", "a note on it", repeat=True, field="metadata"),
        *_ENDING,
    ),
    words="create list rm",
    details="`ringfence create --snapshot ID` starts from one.",
    examples=(
        ("save", "ringfence snapshot create $id --meta step=3"),
        ("what there is", "ringfence snapshot list"),
        ("remove", "ringfence snapshot rm $snapshot"),
    ),
)

SESSION = Command(
    "session",
    "Lease sandboxes of a server as sessions: leave one, come back to it, let it go.",
    arguments="acquire | attach ID | list | VERB ID... | default [ID|none]",
    options=(
        Option(
            "id",
            "ID",
            "acquire: this client's sandbox of that id, or a new one",
            field="preferred_id",
        ),
        Option("fresh", "", "acquire: only an unused sandbox", field="require_fresh"),
        Option("meta", "K=V", "acquire: a note on the session", repeat=True, field="metadata"),
        Option("client", "NAME", "acquire, attach: for this client; for admins", field="client_id"),
        Option("create", "", "attach: make the sandbox where there is none of that id"),
        Option("keep-alive", "", "release: keep a fresh one of the same kind warm instead"),
        Option(
            "state", "STATE", "list: only those", repeat=True, words="active detached suspended"
        ),
        *(option for option in CREATE.options if option.name not in ("name", "snapshot")),
    ),
    words="acquire attach list show detach suspend resume touch release terminate default",
    details="""\
VERB is show, detach, suspend, resume, touch, release or terminate. ID is a session's or its
sandbox's; acquire and attach print the session's, and every command that takes a sandbox takes it.
Sandboxes are described as in `ringfence create`. `default` shows or chooses the sandbox that this
client means when it names none.""",
    examples=(
        ("one to work in", "id=$(ringfence session acquire --memory 1g)"),
        ("leave it for later", "ringfence session detach $id"),
        ("come back", "ringfence session attach $id"),
        ("done", "ringfence session release $id"),
    ),
)

RM = Command(
    "rm",
    "End sandboxes.",
    arguments="[OPTIONS] SANDBOX...",
    options=(
        Option("all", "", "all that are ours, or that have the labels"),
        _LABEL,
        *_ENDING,
    ),
    details="An id that has ended already is no error; an unknown id is.",
    examples=(
        ("one", "ringfence rm $id"),
        ("all of a team", "ringfence rm --all --label team=a"),
    ),
)

KEYS = Command(
    "keys",
    "API keys of a server; for admins.",
    arguments="create OWNER | list | rotate ID | rm ID...",
    options=(
        Option(
            "scope",
            "SCOPE",
            "permissions: user (the default), admin, read_only or metrics",
            words="user admin read_only metrics",
        ),
        Option("name", "TEXT", "for people"),
        Option("expires", "TIME", "it opens for 12h, 30d; without, until it is removed"),
        Option("max-sandboxes", "N", "it makes no more where its owner has so many"),
        Option("max-requests", "N", "served at once"),
        Option("overlap", "TIME", "rotate: the secret before opens for 1h more; 0s"),
        Option("this-key", "", "rm: the key that this very command uses may be meant"),
        *_ENDING,
    ),
    words="create list rotate rm",
    details="""\
A key is printed once, when it is made or rotated: the server keeps only a digest. Removing a key
ends the tokens that were made with it.""",
    examples=(
        ("for a team", "ringfence keys create team-a --name ci --expires 30d > key"),
        ("another secret", "ringfence keys rotate $key_id --overlap 1h > key"),
        ("which there are", "ringfence keys list"),
        ("let it open nothing more", "ringfence keys rm $key_id"),
    ),
)

POOL = Command(
    "pool",
    "Show or change a server's pool of warm sandboxes.",
    arguments="[OPTIONS] [set NAME=VALUE...]",
    options=_ENDING,
    words="set",
    details="""\
Without `set`, how it goes. NAME is enabled, min_warm, max_warm, warm_ttl_s or warm_profiles; VALUE
is JSON, or a word. A change holds over a restart; for admins.""",
    examples=(
        ("how it goes", "ringfence pool"),
        ("more", "ringfence pool set min_warm=4 max_warm=20"),
    ),
)

REMOTE = (CREATE, LIST, EXEC, SHELL, CP, LOGS, TOP, SNAPSHOT, SESSION, RM, KEYS, POOL)
