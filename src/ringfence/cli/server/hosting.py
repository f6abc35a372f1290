"""Commands that run a server on this machine or on a cluster: options and examples."""

from __future__ import annotations

from ..commands import HELP, JSON
from ..options import Command, Option

SERVE = Command(
    "serve",
    "Serve sandboxes over HTTP, on a unix socket and optionally on TCP.",
    arguments="[OPTIONS]",
    options=(
        Option(
            "state-dir",
            "DIR",
            "directory for keys, session records, snapshots and the unix socket; one server per"
            " directory; default: /var/lib/ringfence/state as root, else ~/.local/state/ringfence",
            words="<directories>",
        ),
        Option(
            "backend",
            "NAME",
            "isolation backend, in order of preference; default: native",
            repeat=True,
        ),
        Option(
            "listen",
            "HOST:PORT",
            "also listen on this TCP address; callers need an API key; default: unix socket only",
        ),
        Option(
            "allow-public",
            "",
            "allow --listen without TLS on an address that other machines can reach",
        ),
        Option(
            "tls-certificate", "FILE", "TLS certificate chain for --listen, as PEM", words="<files>"
        ),
        Option("tls-key", "FILE", "private key of --tls-certificate, as PEM", words="<files>"),
        Option("e2b", "", "also serve E2B's API on the same addresses, for its own SDKs"),
        Option(
            "domain",
            "NAME",
            "with --e2b: serve sandboxes at PORT-ID.NAME and the API at api.NAME",
            field="e2b.domain",
        ),
        Option(
            "internet",
            "none|public|HOST,...",
            "with --e2b: what sandboxes reach whose client does not forbid internet access, in the"
            " form of `run --net`; default: none",
            field="e2b.internet",
            words="none public",
        ),
        Option(
            "cluster",
            "ADDRESS",
            "serve the sandboxes of all machines of a Ray cluster: HOST:PORT of its head, or auto",
        ),
        Option(
            "cluster-name",
            "NAME",
            "with --cluster: which Ringfence cluster on it; default: default",
        ),
        Option(
            "allow-host",
            "NAME",
            "accept this name in Host headers; default: only the address of --listen",
            repeat=True,
            field="allowed_hosts",
        ),
        Option(
            "allow-origin",
            "URL",
            "accept requests from web pages of this origin, such as https://app.example.com;"
            " default: none",
            repeat=True,
            field="allowed_origins",
        ),
        Option(
            "max-sandboxes",
            "N",
            "maximum number of live sandboxes, prebuilt sandboxes included; default: 100",
            field="manager.max_sandboxes",
        ),
        Option(
            "outlive",
            "TIME",
            "keep sandboxes running for TIME after the server is killed, so that a new server can"
            " adopt them; 0 ends them at once; default: 10m",
            field="outlive_s",
        ),
        Option(
            "detach",
            "",
            "start the server in the background and return when the server listens; the log goes"
            " to serve.log in --state-dir",
        ),
        Option(
            "take-over", "", "replace the running server of --state-dir and adopt its sandboxes"
        ),
        Option(
            "stop", "", "end the running server of --state-dir and all its sandboxes, then exit"
        ),
        Option(
            "log-level",
            "LEVEL",
            "lowest level logged on stderr: debug, info, warning or error; default: info",
            words="debug info warning error",
        ),
        Option(
            "config",
            "FILE",
            "read the configuration from a JSON file; options override the file",
            words="<files>",
        ),
        JSON,
        HELP,
    ),
    details="""\
The unix socket is ringfence.sock in the state directory; only this user and root may connect.
SIGTERM ends the server and its sandboxes; open requests have 5 s to finish. After SIGUSR1 or
SIGKILL the sandboxes run on for --outlive, until a new server adopts them.""",
    examples=(
        ("start a server for this user", "ringfence serve --detach"),
        ("restart while sandboxes keep running", "ringfence serve --take-over"),
        ("listen on loopback TCP, with API keys", "ringfence serve --listen 127.0.0.1:7878"),
        (
            "listen on the network, with TLS",
            "ringfence serve --listen 0.0.0.0:7878 --tls-certificate cert.pem --tls-key key.pem",
        ),
    ),
)

_STATE_DIR = Option(
    "state-dir",
    "DIR",
    "state directory of the server; default: as for `serve`",
    words="<directories>",
)

BACKUP = Command(
    "backup",
    "Copy the keys, records and snapshots of a running or stopped server to a new directory.",
    arguments="[OPTIONS] DIR",
    options=(_STATE_DIR, JSON, HELP),
    words="<directories>",
    details="The backup is consistent even while the server runs. It does not contain the output of execs.",
    examples=(("back up every night", "ringfence backup /backups/ringfence-$(date +%F)"),),
)

RESTORE = Command(
    "restore",
    "Restore a backup into an empty or new state directory.",
    arguments="[OPTIONS] DIR",
    options=(_STATE_DIR, JSON, HELP),
    words="<directories>",
    details="When a server starts on the restored directory, it marks the sandboxes of the backup as ended.",
    examples=(
        ("restore to another directory", "ringfence restore /backups/b --state-dir ./restored"),
    ),
)

_OF_A_CLUSTER = (
    Option(
        "address", "ADDRESS", "head of the Ray cluster: HOST:PORT; default: auto, this machine's"
    ),
    Option("cluster-name", "NAME", "Ringfence cluster on it; default: default"),
)

CLUSTER = Command(
    "cluster",
    "Start, show and end a cluster of machines on Ray.",
    arguments="up|status|down [OPTIONS]",
    options=(
        *_OF_A_CLUSTER,
        Option("join", "ADDRESS", "up: join the Ray cluster of this head in place of starting one"),
        JSON,
        HELP,
    ),
    words="up status down",
    details="""\
`up` runs `ray start` on this machine unless --address names a cluster, and starts a server on every
node. `down` ends these servers with their sandboxes; Ray itself goes on until `ray stop`.""",
    examples=(
        ("start a head here", "ringfence cluster up"),
        ("join from another machine", "ringfence cluster up --join 10.0.0.5:6379"),
        ("serve the whole cluster", "ringfence serve --cluster auto --listen 127.0.0.1:7878"),
    ),
)

NODES = Command(
    "nodes",
    "List the nodes of a cluster, or drain one.",
    arguments="[drain NODE | undrain NODE] [OPTIONS]",
    options=(
        *_OF_A_CLUSTER,
        Option("wait", "TIME", "drain: wait so long for its sandboxes to end; default: 10s"),
        JSON,
        HELP,
    ),
    words="drain undrain",
    details="""\
A node that drains takes no new sandboxes; those that it has go on. With `snapshot_store`, the
files of idle ones are saved, for their owners to restore elsewhere, and what runs in gVisor or a
microVM is moved with its memory. `drain` lists what became of each, and exits with 1 if anything is
left after --wait.""",
    examples=(("before maintenance", "ringfence nodes drain 38a31f91"),),
)

HOSTING = (SERVE, BACKUP, RESTORE, CLUSTER, NODES)
