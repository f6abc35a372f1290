"""The commands that speak to a server. Data only, as in `commands`."""

from __future__ import annotations

from ..commands import RUN
from ..options import Command, Option

_OF_THE_SANDBOX = (
    "mount", "net", "net-policy", "secret", "net-learn", "memory", "cpus", "pids", "disk",
    "disk-root", "inodes",
    "open-files", "output-bytes", "protect", "unprotect", "deny", "env", "workdir", "user",
    "memory-dir", "template", "profile", "backend", "tier", "allow-degraded",
)  # fmt: skip

_SERVER = (
    Option(
        "server",
        "ADDRESS",
        "address of the server: unix:PATH, http://HOST:PORT or https://HOST; default:"
        " $RINGFENCE_SERVER, else the unix socket of this user's `ringfence serve`",
    ),
    Option(
        "key-file",
        "FILE",
        "read the API key from FILE; default: $RINGFENCE_API_KEY",
        words="<files>",
    ),
)
_RUN = {option.name: option for option in RUN.options}
_OF_A_COMMAND = (
    Option("env", "K=V", "set an environment variable of the command", repeat=True),
    Option("workdir", "DIR", "working directory; default: that of the sandbox", field="cwd"),
    Option(
        "user",
        "NAME|UID",
        "run the command as this user; default: that of the sandbox",
        words="sandbox root nobody",
    ),
)
_JSON = Option("json", "", "print JSON instead of a table")
_HELP = Option("help", "", "show this help", short="h")
_LABEL = Option("label", "K=V", "select sandboxes with this label", repeat=True)
_ENDING = (*_SERVER, _JSON, _HELP)

_STREAMS = """\
The command reads and writes stdin, stdout and stderr directly. It keeps running if this client
ends; `ringfence logs -f` follows its output.

Exit codes: that of the command; 128+n if signal n ended the command; 124 timeout; 125 error of
Ringfence, explained on stderr; 126 command not executable; 127 command not found."""


CREATE = Command(
    "create",
    "Create a sandbox on a server and print its id.",
    arguments="[OPTIONS]",
    options=(
        Option(
            "name",
            "TEXT",
            "name of the sandbox; commands accept it instead of the id while it is unique",
        ),
        Option(
            "label",
            "K=V",
            "attach a label to the sandbox, for list, top and rm",
            repeat=True,
            field="labels",
        ),
        Option(
            "ttl",
            "TIME",
            "end the sandbox after TIME, such as 10m or 1h, even while busy; default: no limit",
            field="ttl_s",
        ),
        Option(
            "idle-timeout",
            "TIME",
            "end the sandbox after TIME without activity, such as 10m; default: the server's, 5m",
        ),
        Option(
            "snapshot",
            "ID",
            "start with the files of this snapshot; excludes options that describe a sandbox",
        ),
        Option(
            "no-pool", "", "create a new sandbox instead of taking a prebuilt sandbox from the pool"
        ),
        *(_RUN[name] for name in _RUN if name in _OF_THE_SANDBOX),
        *_ENDING,
    ),
    details="Paths in --mount and --memory-dir are paths on the server.",
    examples=(
        ("create a sandbox with a name", "id=$(ringfence create --name build)"),
        ("set limits and a label", "ringfence create --memory 1g --cpus 2 --label team=a"),
        ("start from a snapshot", "ringfence create --snapshot native-0190... --ttl 1h"),
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
            "only sandboxes in this state; default: every state except terminated",
            repeat=True,
            words="provisioned running suspended terminated",
        ),
        Option("quiet", "", "print ids only", short="q"),
        *_ENDING,
    ),
    examples=(
        ("list live sandboxes", "ringfence list"),
        ("list the sandboxes of a team", "ringfence list --label team=a"),
        ("print ids for a script", "ringfence list -q"),
    ),
)

EXEC = Command(
    "exec",
    "Run a command in a sandbox of a server.",
    arguments="[OPTIONS] SANDBOX -- CMD ARG...",
    options=(
        _RUN["timeout"],
        *_OF_A_COMMAND,
        _RUN["tty"],
        Option(
            "detach", "", "run the command in the background and print the exec's id", short="d"
        ),
        *_SERVER,
        _RUN["json"],
        _HELP,
    ),
    details=_STREAMS,
    examples=(
        ("run a command", "ringfence exec $id -- python3 -c 'print(6 * 7)'"),
        ("pass input", "ringfence exec $id -- sh -c 'cat > data' < data.txt"),
        ("run in the background", "ringfence exec -d $id -- make"),
        ("print the result as JSON", "ringfence exec --json $id -- ls"),
    ),
)

SHELL = Command(
    "shell",
    "Open a terminal in a sandbox of a server.",
    arguments="[OPTIONS] [SANDBOX] [-- CMD ARG...]",
    options=(*_OF_A_COMMAND, *_SERVER, _HELP),
    details="""\
Without SANDBOX the command creates a sandbox and ends it after the shell. The default CMD is bash,
else sh. The exit code is that of the shell.""",
    examples=(
        ("open a shell in a sandbox", "ringfence shell $id"),
        ("open a shell in a new sandbox", "ringfence shell"),
        ("run another program on a terminal", "ringfence shell $id -- python3"),
    ),
)

CP = Command(
    "cp",
    "Copy files and directories into and out of a sandbox.",
    arguments="[OPTIONS] SRC DST",
    options=(*_SERVER, _HELP),
    details="""\
One of SRC and DST is SANDBOX:PATH, the other a local path. Directories are copied recursively. If
DST is a directory or ends in a slash, the copy is created in DST under the name of SRC. `-` is
standard input or output.""",
    examples=(
        ("copy in", "ringfence cp ./src $id:work/src"),
        ("copy out", "ringfence cp $id:/mnt/session/outputs ./outputs"),
        ("print a file", "ringfence cp $id:report.txt -"),
    ),
)

CODE = Command(
    "code",
    "Run code in a context of a sandbox, which keeps its variables.",
    arguments="[OPTIONS] SANDBOX [CODE]",
    options=(
        Option(
            "context", "ID", "context to use; default: the oldest of the language, else a new one"
        ),
        Option(
            "language",
            "NAME",
            "python, bash, node, r or java; default: python",
            words="python bash node r java",
        ),
        Option("new", "", "begin a new context"),
        Option("timeout", "TIME", "interrupt the code after TIME, such as 10s; default: no limit"),
        Option("list", "", "list the contexts of the sandbox instead", short="l"),
        Option("interrupt", "", "interrupt what runs in --context instead"),
        Option("close", "", "end --context instead"),
        *_ENDING,
    ),
    details="""\
Without CODE, the code is read from stdin. A context outlives this client and the server. Exit
codes: 0; 1 if the code ended with an error; 124 timeout; 125 error of Ringfence.""",
    examples=(
        ("set a variable", "ringfence code $id 'x = 41'"),
        ("use it", "ringfence code $id 'x + 1'"),
        ("run a file", "ringfence code --timeout 1m $id < analysis.py"),
    ),
)

LOGS = Command(
    "logs",
    "Show the output of a command in a sandbox.",
    arguments="[OPTIONS] SANDBOX [EXEC]",
    options=(
        Option("follow", "", "follow the output until the command ends", short="f"),
        Option("list", "", "list the commands of the sandbox instead", short="l"),
        Option("network", "", "list the network events of the sandbox instead"),
        *_ENDING,
    ),
    details="""\
The default EXEC is the newest command. If early output was dropped, stderr says how many bytes.
With --follow the exit code is that of the command.""",
    examples=(
        ("follow the newest command", "ringfence logs -f $id"),
        ("list commands", "ringfence logs -l $id"),
        ("print JSON lines", "ringfence logs --json $id $exec"),
    ),
)

TOP = Command(
    "top",
    "Watch the resource usage of a server's sandboxes.",
    arguments="[OPTIONS]",
    options=(
        _LABEL,
        Option("interval", "TIME", "time between two updates; default: 2s"),
        Option("once", "", "print one table and exit; default: if stdout is no terminal"),
        *_ENDING,
    ),
    details="With --json the command also prints once and exits. Ctrl-C ends the live view.",
    examples=(("watch", "ringfence top"), ("print JSON", "ringfence top --json")),
)

CHANGES = Command(
    "changes",
    "List the files that were added, changed or removed in a sandbox.",
    arguments="[OPTIONS] SANDBOX",
    options=(
        Option("since", "ID", "compare with this snapshot; default: with a new sandbox"),
        Option("diff", "", "print the changes of text files as a unified diff instead"),
        *_ENDING,
    ),
    details="""\
Mounts of the host are left out. A change of a modification time alone is none. With --json the
answer has the list and the diff.""",
    examples=(
        ("list what a sandbox has written", "ringfence changes $id"),
        ("show the difference to a snapshot", "ringfence changes --diff --since $snapshot $id"),
    ),
)

SNAPSHOT = Command(
    "snapshot",
    "Save the files of a sandbox; list and remove snapshots.",
    arguments="create SANDBOX | list | rm ID...",
    options=(
        Option(
            "meta", "K=V", "create: attach metadata to the snapshot", repeat=True, field="metadata"
        ),
        *_ENDING,
    ),
    words="create list rm",
    details="`ringfence create --snapshot ID` starts a sandbox from a snapshot.",
    examples=(
        ("save files", "ringfence snapshot create $id --meta step=3"),
        ("list snapshots", "ringfence snapshot list"),
        ("remove a snapshot", "ringfence snapshot rm $snapshot"),
    ),
)

FORK = Command(
    "fork",
    "Make new sandboxes with the files of a sandbox and what runs in it now.",
    arguments="[OPTIONS] SANDBOX",
    options=(
        Option("n", "N", "number of forks, 1 to 1000; default: 1", short="n"),
        Option(
            "processes",
            "WHAT",
            "none: copy files only; required: fail where running processes cannot be copied; default:"
            " auto",
            words="auto none required",
        ),
        Option("label", "K=V", "label of the forks; default: those of SANDBOX", repeat=True),
        *_ENDING,
    ),
    details="""\
SANDBOX goes on unchanged. The forks have its owner, limits and network policy. The command prints
their ids, and to standard error what was left out and why. Directories of the host that are mounted
writable are shared, and not copied.""",
    examples=(("make three forks", "ringfence fork --n 3 $id"),),
)

MERGE = Command(
    "merge",
    "Merge the changes of a fork into another sandbox or a directory of this machine.",
    arguments="[OPTIONS] SANDBOX",
    options=(
        Option("base", "ID", "snapshot that both sides come from"),
        Option("into", "SANDBOX", "merge into the same directory of this sandbox"),
        Option("to", "DIR", "merge into this directory of this machine"),
        Option(
            "path", "DIR", "directory of SANDBOX to merge; default: the one where commands start"
        ),
        Option(
            "prefer",
            "SIDE",
            "where there is a conflict: keep ours (the target's) or take theirs (SANDBOX's)",
            words="ours theirs",
        ),
        Option("dry-run", "", "only show what would change"),
        *_ENDING,
    ),
    details="""\
Where both sides changed the same lines, or one removed what the other changed, nothing is written,
the conflicts are listed, and the exit code is 1.""",
    examples=(
        (
            "show what a merge would change",
            "ringfence merge --base $snapshot --to repo --dry-run $id",
        ),
        ("merge a directory", "ringfence merge --base $snapshot --path repo --to repo $id"),
    ),
)

TREE = Command(
    "tree",
    "Show the live sandboxes, each fork below the sandbox that it comes from.",
    arguments="[OPTIONS]",
    options=(*_ENDING,),
    examples=(("show the forks", "ringfence tree"),),
)

SESSION = Command(
    "session",
    "Lease sandboxes of a server as sessions: acquire, detach, attach again, release.",
    arguments="acquire | attach ID | list | VERB ID... | default [ID|none]",
    options=(
        Option(
            "id",
            "ID",
            "acquire: use this client's sandbox with this id; create it if missing",
            field="preferred_id",
        ),
        Option(
            "fresh", "", "acquire: take only a sandbox that was never used", field="require_fresh"
        ),
        Option(
            "meta", "K=V", "acquire: attach metadata to the session", repeat=True, field="metadata"
        ),
        Option(
            "client",
            "NAME",
            "acquire, attach: act for this client; needs an admin key; default: the owner of the"
            " key",
            field="client_id",
        ),
        Option("create", "", "attach: create the sandbox if it does not exist"),
        Option(
            "keep-alive", "", "release: keep a new sandbox of the same kind prebuilt in the pool"
        ),
        Option(
            "state",
            "STATE",
            "list: only sessions in this state; default: every state except terminated",
            repeat=True,
            words="active detached suspended",
        ),
        *(option for option in CREATE.options if option.name not in ("name", "snapshot")),
    ),
    words="acquire attach list show detach suspend resume touch release terminate default",
    details="""\
VERB is show, detach, suspend, resume, touch, release or terminate. ID is the id of a session or of
its sandbox. acquire and attach print the session's id, which every command accepts as SANDBOX.
acquire and attach --create take the sandbox options of `ringfence create`. `default` shows or sets
the default sandbox of this client.""",
    examples=(
        ("acquire a session", "id=$(ringfence session acquire --memory 1g)"),
        ("detach, and keep the sandbox running", "ringfence session detach $id"),
        ("attach again", "ringfence session attach $id"),
        ("end the session and its sandbox", "ringfence session release $id"),
    ),
)

UPDATE = Command(
    "update",
    "Change the name and the labels of a sandbox.",
    arguments="[OPTIONS] SANDBOX",
    options=(
        Option("name", "TEXT", "set the name; an empty one removes it"),
        Option("label", "K=V", "set this label; others stay", repeat=True, field="labels"),
        Option("unlabel", "K", "remove this label", repeat=True),
        *_ENDING,
    ),
    examples=(
        ("give it a name", "ringfence update --name build $id"),
        ("set and remove labels", "ringfence update --label team=b --unlabel draft $id"),
    ),
)

RM = Command(
    "rm",
    "End sandboxes.",
    arguments="[OPTIONS] SANDBOX...",
    options=(Option("all", "", "end all your sandboxes, or those with --label"), _LABEL, *_ENDING),
    details="Ending a sandbox that has ended is not an error; an unknown id is an error.",
    examples=(
        ("end a sandbox", "ringfence rm $id"),
        ("end all sandboxes of a team", "ringfence rm --all --label team=a"),
    ),
)

KEYS = Command(
    "keys",
    "Create, list, rotate and remove API keys of a server; needs an admin key.",
    arguments="create OWNER | list | rotate ID | rm ID...",
    options=(
        Option(
            "scope",
            "SCOPE",
            "create: permissions of the key: user, admin, read_only or metrics; default: user",
            words="user admin read_only metrics",
        ),
        Option("name", "TEXT", "create: name of the key, shown by list"),
        Option(
            "expires",
            "TIME",
            "create: the key is valid for TIME, such as 12h or 30d; default: until removed",
        ),
        Option(
            "max-sandboxes",
            "N",
            "create: refuse new sandboxes while the owner has N; default: no limit",
        ),
        Option(
            "max-requests",
            "N",
            "create: concurrent requests with this key; default: 512, shared by the owner's keys",
        ),
        Option("e2b", "", "create, rotate: print the key in the form that E2B's SDKs take"),
        Option(
            "overlap",
            "TIME",
            "rotate: the old secret stays valid for TIME, such as 1h; default: 0s",
        ),
        Option("this-key", "", "rm: allow removing the key that this command uses"),
        *_ENDING,
    ),
    words="create list rotate rm",
    details="""\
A key is printed once, when it is created or rotated: the server stores only a digest. Removing a
key revokes the tokens that were created with it.""",
    examples=(
        ("create a key for a team", "ringfence keys create team-a --name ci --expires 30d > key"),
        ("replace the secret of a key", "ringfence keys rotate $key_id --overlap 1h > key"),
        ("list keys", "ringfence keys list"),
        ("remove a key", "ringfence keys rm $key_id"),
    ),
)

POOL = Command(
    "pool",
    "Show or change a server's pool of prebuilt sandboxes.",
    arguments="[OPTIONS] [set NAME=VALUE...]",
    options=_ENDING,
    words="set",
    details="""\
Without `set` the command prints the configuration and statistics. NAME is enabled, min_warm,
max_warm, warm_ttl_s or warm_profiles; VALUE is JSON, or a word. A change survives a restart of the
server and needs an admin key.""",
    examples=(
        ("show the pool", "ringfence pool"),
        ("keep more sandboxes prebuilt", "ringfence pool set min_warm=4 max_warm=20"),
    ),
)

REMOTE = (
    CREATE,
    LIST,
    UPDATE,
    EXEC,
    SHELL,
    CP,
    CODE,
    LOGS,
    TOP,
    CHANGES,
    SNAPSHOT,
    FORK,
    MERGE,
    TREE,
    SESSION,
    RM,
    KEYS,
    POOL,
)
