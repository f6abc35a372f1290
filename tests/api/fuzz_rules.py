"""What a server refuses although its OpenAPI document allows it."""

from __future__ import annotations

import re
from typing import Any

# The field that the answer names, its message, and the row of docs/reference/http-api.md, "Rules
# beyond the OpenAPI document", that gives the reason.
CANNOT_BE_SAID = [
    (".*", "NUL byte|lone surrogate", "text"),
    (".*", "printable|cannot be printed", "text"),
    (
        ".*",
        "bytes are more than|exceed the limit|is longer than|has a part longer",
        "sizes in bytes",
    ),
    (
        ".*",
        r"has a '\.\.' segment|root of the session|path below the mount|read-only mount|every file",
        "paths",
    ),
    (
        r".*(target|deny\[\d+\])",
        "cannot be covered|holds the sandbox's|would hide|lies in|nothing can be mounted",
        "paths",
    ),
    (
        ".*",
        "is the target of|together with|needs create_if_missing|is more than|exceeds max_warm|no profile",
        "pairs",
    ),
    (r"(.*\.)?unprotect", "is not protected by default", "paths"),
    ("into", "into itself", "pairs"),
    (
        r"denied_paths\[\d+\]|work_dir",
        "lies above|lies in a denied path",
        "pairs",
    ),
    (".*", "has no events|no list of hosts|only deny rules|a deny rule", "pairs"),
    (".*template", "has files of its own|has its own root", "pairs"),
    (".*profile", "unknown profile", "profiles"),
    (".*backend", "no backend", "profiles"),
    ("session_leader", "only a session's leader", "pairs"),
    (
        ".*",
        "needs a host path as source|is an address: methods|allows no host|refused with",
        "pairs",
    ),
    (r".*(allowed_hosts|host|ports|paths|methods|header)(\[\d+\])?", "", "rules of the network"),
    (
        ".*cursor|offset|last_event_id",
        "next_cursor|is beyond|bytes were sent so far|must be|beginning of a line",
        "cursors",
    ),
    (".*", r"must be a whole number, not \d+\.0$", "whole numbers"),
    (r"(.*\.)?user", "must be a string, not float", "whole numbers"),
    (".*", "lives in it too", "limits"),
    (".*", "choose the sandbox with options", "pairs"),
    (r"strong_runtime\..*", "no backend|must be between", "pairs"),
    (r"steps\[\d+\].*", "a step is one of|of its own|missing from a copy", "steps of templates"),
    (r"steps\[\d+\].*", "name inside|not octal|climb|not a requirement", "steps of templates"),
    (r"base\..*|name", "is not for builds|no template's name", "steps of templates"),
    ("digest", "the content's SHA-256 is", "uploads"),
    (r"(.*\.)?template", "not found", "identity"),
    (r"(.*\.)?user", "unknown user", "identity"),
    ("signal", "is not a signal", "signals"),
    ("pattern|glob|replacement|regex", "", "patterns"),
    (
        "preferred_id|id|snapshot_id|key|idempotency_key",
        "already used|used for another",
        "identity",
    ),
]


def cannot_be_said(problem: dict[str, Any]) -> bool:
    """Whether a well-formed request was refused for what no schema says.

    Only `invalid_request` is about the form: other codes tell of the state of things, such as what the
    sandbox's backend can do.
    """
    if problem.get("code") != "invalid_request":
        return True
    field, said = problem["field"], problem["detail"]
    return any(re.fullmatch(at, field) and re.search(what, said) for at, what, _ in CANNOT_BE_SAID)
