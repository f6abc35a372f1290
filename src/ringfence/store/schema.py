"""The tables, and how older files become newer ones.

A migration is never edited once it was released: what it says is what files on disks have been
through. `PRAGMA user_version` counts them. A file that counts further was written by a newer version,
which may have put things there that we would break: it is refused, not guessed at.
"""

from __future__ import annotations

from ..errors import StateTooNew

TYPE_CHECKING = False
if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Sequence

APPLICATION_ID = 0x52464E43  # "RFNC", sqlite.org/fileformat.html 1.3.15

_FIRST = """
-- A sandbox is written down before anything of it exists in the kernel, where it is found by this id.
CREATE TABLE sandboxes (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,            -- the client; '' while it is warm and nobody's
    backend TEXT NOT NULL,
    phase TEXT NOT NULL CHECK (phase IN ('planned', 'warm', 'live', 'ending', 'ended')),
    spec TEXT NOT NULL,             -- JSON, without secrets
    created_at REAL NOT NULL,       -- seconds since 1970, for people
    boot TEXT NOT NULL,             -- the boot whose clock the next column is of
    expires_ns INTEGER,             -- CLOCK_MONOTONIC; NULL: never
    ended_at REAL,
    reason TEXT NOT NULL DEFAULT '' -- why it ended
) STRICT, WITHOUT ROWID;
CREATE INDEX sandboxes_by_owner ON sandboxes (owner, id);
CREATE INDEX sandboxes_alive ON sandboxes (phase) WHERE phase != 'ended';

CREATE TABLE sessions (
    id TEXT PRIMARY KEY,
    sandbox TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    owner TEXT NOT NULL,
    backend TEXT NOT NULL,
    state TEXT NOT NULL,
    key TEXT NOT NULL DEFAULT '',   -- chosen by the client, to make creating idempotent
    request TEXT NOT NULL DEFAULT '', -- digest of what was asked for under that key
    metadata TEXT NOT NULL,
    timeouts TEXT NOT NULL,
    created_at REAL NOT NULL,
    boot TEXT NOT NULL,
    active_ns INTEGER NOT NULL,     -- CLOCK_MONOTONIC of the last activity
    active_at REAL NOT NULL,        -- the same for people
    reason TEXT NOT NULL DEFAULT ''
) STRICT, WITHOUT ROWID;
CREATE INDEX sessions_by_owner ON sessions (owner, id);
CREATE INDEX sessions_by_sandbox ON sessions (sandbox);
CREATE UNIQUE INDEX sessions_by_key ON sessions (owner, key)
    WHERE key != '' AND state != 'terminated';

CREATE TABLE defaults (
    owner TEXT PRIMARY KEY,
    sandbox TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE
) STRICT, WITHOUT ROWID;

-- Processes whose end ends every sandbox of a backend: what a later start looks for first.
CREATE TABLE anchors (
    backend TEXT NOT NULL,
    pid INTEGER NOT NULL,
    started INTEGER NOT NULL,       -- clock ticks since boot: with the pid it names a process for good
    boot TEXT NOT NULL,
    PRIMARY KEY (backend, pid, started, boot)
) STRICT, WITHOUT ROWID;
"""

_KEYS_AND_SNAPSHOTS = """
-- What opens the server: of a key only a digest, so that who reads this file has none of them.
CREATE TABLE keys (
    id TEXT PRIMARY KEY,            -- the public part of the key
    digest BLOB NOT NULL,           -- of the secret part, which is random: BLAKE2b
    owner TEXT NOT NULL,            -- the client that whoever has it is
    scope TEXT NOT NULL CHECK (scope IN ('admin', 'user', 'sandbox')),
    sandbox TEXT REFERENCES sandboxes (id) ON DELETE CASCADE, -- the only one that it opens
    name TEXT NOT NULL DEFAULT '',  -- for people
    created_at REAL NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX keys_by_sandbox ON keys (sandbox) WHERE sandbox IS NOT NULL;

-- Whose a snapshot is. The content is in the backend's catalogue, and outlives its sandbox.
CREATE TABLE snapshots (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    sandbox TEXT NOT NULL,
    backend TEXT NOT NULL,
    spec TEXT NOT NULL,             -- JSON, without secrets: what it was taken under
    created_at REAL NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX snapshots_by_owner ON snapshots (owner, id);
"""

_EXECUTIONS = """
-- What the execution service was asked for, and how it ended.
CREATE TABLE executions (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    status TEXT NOT NULL,
    request TEXT NOT NULL,          -- digest of what was asked for under that id
    result TEXT NOT NULL,           -- JSON, as clients are shown it
    created_at REAL NOT NULL,
    ended_at REAL                   -- NULL: it has not
) STRICT, WITHOUT ROWID;
CREATE INDEX executions_by_end ON executions (ended_at);
"""

_EXECS = """
-- An exec is written down before it begins; its output is in files, found by its id and its sandbox's.
CREATE TABLE execs (
    id TEXT PRIMARY KEY,
    sandbox TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    state TEXT NOT NULL,
    view TEXT NOT NULL,             -- JSON, as its owner sees it; without environment and input
    created_at REAL NOT NULL,
    ended_at REAL                   -- NULL: not known to have ended
) STRICT, WITHOUT ROWID;
CREATE INDEX execs_by_sandbox ON execs (sandbox, id);
CREATE INDEX execs_by_end ON execs (ended_at);
"""

_CLOCKS = """
-- Where the clock on the wall stood when a boot was first heard of: it may have been set since.
CREATE TABLE clocks (
    boot TEXT PRIMARY KEY,
    ahead_s REAL NOT NULL           -- of CLOCK_MONOTONIC
) STRICT, WITHOUT ROWID;
"""

_EXEC_KEYS = """
-- Keys that clients chose to start an exec once. No reference to it: a record that is written again is
-- replaced, and its key stays.
CREATE TABLE exec_keys (
    sandbox TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    key TEXT NOT NULL,
    exec TEXT NOT NULL,
    request TEXT NOT NULL,          -- digest of what was asked for
    PRIMARY KEY (sandbox, key)
) STRICT, WITHOUT ROWID;
CREATE INDEX exec_keys_by_exec ON exec_keys (exec);
"""

_SETTINGS = """
-- What was changed while a server ran, and is to hold when it is started again.
CREATE TABLE settings (
    name TEXT PRIMARY KEY,
    value TEXT NOT NULL             -- JSON
) STRICT, WITHOUT ROWID;
"""

_ANCHORS_OF = """
-- Which directory's daemon made it: a copy of this file must not end what another daemon's sandboxes hang on.
ALTER TABLE anchors ADD COLUMN directory TEXT NOT NULL DEFAULT '';
"""

_KEYS_THAT_END = """
-- More scopes, an end, and bounds. A column's check cannot be changed: the table is made anew.
CREATE TABLE new_keys (
    id TEXT PRIMARY KEY,            -- the public part of the key
    digest BLOB NOT NULL,           -- of the secret part, which is random: BLAKE2b
    owner TEXT NOT NULL,            -- the client that whoever has it is
    scope TEXT NOT NULL CHECK (scope IN ('admin', 'user', 'read_only', 'metrics', 'sandbox')),
    sandbox TEXT REFERENCES sandboxes (id) ON DELETE CASCADE, -- the only one that it opens
    name TEXT NOT NULL DEFAULT '',  -- for people
    created_at REAL NOT NULL,
    expires_at REAL,                -- seconds since 1970; NULL: never
    used_at REAL,                   -- last, to about a minute
    maker TEXT NOT NULL DEFAULT '', -- the key that a token was made with, and ends with
    max_sandboxes INTEGER,          -- that its client has when it makes one more
    max_requests INTEGER,           -- at once
    old_digest BLOB,                -- of the secret before it was rotated,
    old_until REAL                  -- which opens until then
) STRICT, WITHOUT ROWID;
INSERT INTO new_keys (id, digest, owner, scope, sandbox, name, created_at)
    SELECT id, digest, owner, scope, sandbox, name, created_at FROM keys;
DROP TABLE keys;
ALTER TABLE new_keys RENAME TO keys;
CREATE INDEX keys_by_sandbox ON keys (sandbox) WHERE sandbox IS NOT NULL;
"""

_TEMPLATES = """
-- A template is a name of its owner; a build has what it was asked for, and what came of it.
CREATE TABLE templates (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    name TEXT NOT NULL,
    public INTEGER NOT NULL,        -- 1: every client may start sandboxes from it
    tags TEXT NOT NULL,             -- JSON: a tag to the id of its build; `default` is what the name means
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL
) STRICT, WITHOUT ROWID;
CREATE UNIQUE INDEX templates_by_name ON templates (owner, name);

CREATE TABLE template_builds (
    id TEXT PRIMARY KEY,
    template TEXT NOT NULL REFERENCES templates (id) ON DELETE CASCADE,
    status TEXT NOT NULL CHECK (status IN ('reserved', 'waiting', 'building', 'ready', 'failed')),
    request TEXT NOT NULL,          -- JSON, as its owner asked and was allowed
    tags TEXT NOT NULL,             -- JSON: what it is called when it is ready
    created_at REAL NOT NULL,
    tries INTEGER NOT NULL DEFAULT 0, -- starts of the server that it was under way at
    step INTEGER NOT NULL DEFAULT 0,
    error TEXT NOT NULL DEFAULT '',
    layers TEXT NOT NULL DEFAULT '[]', -- JSON: ids of snapshots, the lowest first
    spec TEXT NOT NULL DEFAULT '',  -- JSON: what sandboxes get beside the files
    size_bytes INTEGER NOT NULL DEFAULT 0,
    ended_at REAL
) STRICT, WITHOUT ROWID;
CREATE INDEX template_builds_by_template ON template_builds (template, id);

-- Results of steps, each found by what it starts from and what it does. Of one owner.
CREATE TABLE template_layers (
    owner TEXT NOT NULL,
    key TEXT NOT NULL,
    snapshot TEXT NOT NULL,
    size_bytes INTEGER NOT NULL,
    used_at REAL NOT NULL,
    PRIMARY KEY (owner, key)
) STRICT, WITHOUT ROWID;
"""

MIGRATIONS: tuple[str, ...] = (
    _FIRST,
    _KEYS_AND_SNAPSHOTS,
    _EXECUTIONS,
    _EXECS,
    _CLOCKS,
    _EXEC_KEYS,
    _SETTINGS,
    _ANCHORS_OF,
    _KEYS_THAT_END,
    _TEMPLATES,
)


def migrate(connection: sqlite3.Connection, steps: Sequence[str] = MIGRATIONS) -> int:
    """Bring the file up to `steps`, each in a transaction of its own; the version it had.

    Raises:
        StateTooNew: It is further than `steps`, or not ours at all; nothing was changed.
    """
    found: int = connection.execute("PRAGMA user_version").fetchone()[0]
    owner: int = connection.execute("PRAGMA application_id").fetchone()[0]
    empty = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    if found > len(steps) or (owner != APPLICATION_ID and not empty):
        what = f"of version {found}" if owner == APPLICATION_ID else "of another program"
        raise StateTooNew(
            f"the state file is {what}; this Ringfence knows up to version {len(steps)}",
            field="state_dir",
            hint="use the newer Ringfence that wrote it, or another state directory",
        )
    for version, step in enumerate(steps[found:], found + 1):
        # executescript would commit whatever is open before it starts: the whole step is one script.
        connection.executescript(
            f"BEGIN IMMEDIATE; {step} PRAGMA application_id = {APPLICATION_ID};"
            f" PRAGMA user_version = {version}; COMMIT;"
        )
    return found
