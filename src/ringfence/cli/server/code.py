"""`code`: cells in a context of a sandbox, which keeps its variables between two commands."""

from __future__ import annotations

import os
import sys

from ...errors import ExecNotFound, InvalidRequest
from ...model.base.checks import parse_duration
from .. import tables
from . import attached, remote
from .commands import CODE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from ...client import RemoteSandbox
    from ...contexts import Context, Execution

_HEADS = ("CONTEXT", "LANGUAGE")
_PYTHON = "python"
_ACTS = ("list", "close", "interrupt")  # in place of running code


def code(argv: Sequence[str]) -> int:
    """Run a cell; 1 if it ended with an error, 124 if it took too long."""
    given, words, after = remote.read(CODE, argv)
    words += after
    remote.no_more(words, 2)
    _refuse_together(given, has_code=len(words) > 1)
    with remote.client_of(given) as client:
        sandbox = remote.sandbox_of(client, remote.word(words, "SANDBOX", CODE))
        if "list" in given:
            _list(sandbox, given)
            return 0
        if "close" in given:
            _named(sandbox, given).close()
            return 0
        if "interrupt" in given:
            _named(sandbox, given).interrupt()
            return 0
        text = words[1] if len(words) > 1 else sys.stdin.read()
        code = _run(_context(sandbox, given), text, given, may_ask=len(words) > 1)
        if code and len(words) > 1 and os.path.isfile(text):
            _write(
                sys.stderr,
                f"ringfence: did you mean the file? ringfence code {words[0]} < {text}\n",
            )
        return code


def _refuse_together(given: dict[str, Any], *, has_code: bool) -> None:
    """Refuse options of which one would be without effect."""
    acts = [name for name in _ACTS if name in given]
    others = [*acts[1:], *(["CODE"] if has_code else [])] if acts else []
    if "context" in given:
        others += [name for name in ("new", "language") if name in given]
    if others:
        with_what = f"--{acts[0]}" if acts else "--context"
        other = others[0] if others[0] == "CODE" else f"--{others[0]}"
        hint = f"remove {other} or {with_what}"
        raise InvalidRequest(f"has no effect with {with_what}", field=others[0], hint=hint)


def _named(sandbox: RemoteSandbox, given: dict[str, Any]) -> Context:
    hint = "list contexts with --list"
    if "context" not in given:
        raise InvalidRequest("is missing", field="context", hint=hint)
    try:
        return sandbox.context(id=given["context"])
    except ExecNotFound:
        raise ExecNotFound(f"no context {given['context']!r}", hint=hint) from None


def _context(sandbox: RemoteSandbox, given: dict[str, Any]) -> Context:
    """Find the context that the options name, or begin one; it stays."""
    if "context" in given:
        return _named(sandbox, given)
    language = given.get("language", _PYTHON)
    known = [] if "new" in given else [sandbox.context(id=each) for each in sandbox.contexts()]
    found = next((each for each in known if each.language == language), None)
    return found or sandbox.context(language)


def _run(context: Context, text: str, given: dict[str, Any], *, may_ask: bool) -> int:
    from ...contexts.context import check_cell

    timeout_s = parse_duration(given["timeout"], "timeout") if "timeout" in given else None
    check_cell(text, timeout_s, "timeout")
    if "json" in given:
        execution = context.run(text, timeout_s=timeout_s)
        remote.print_json({"context": context.id, **execution.to_json()})
        return _code(execution)
    execution = context.run(
        text,
        timeout_s=timeout_s,
        on_stdout=lambda text: _write(sys.stdout, text),
        on_stderr=lambda text: _write(sys.stderr, text),
        on_input=_ask if may_ask else None,
    )
    for result in execution.results:
        if (shown := result.text) is not None:
            _write(sys.stdout, f"{shown}\n")
    if execution.error is not None:
        error = execution.error
        _write(sys.stderr, error.traceback or f"{error.name}: {error.value}\n")
        if execution.timed_out:
            _write(sys.stderr, f"{error.value}\n")
    return _code(execution)


def _code(execution: Execution) -> int:
    return attached.TIMED_OUT if execution.timed_out else int(execution.error is not None)


def _write(file: Any, text: str) -> None:
    file.write(text)
    file.flush()


def _ask(prompt: str) -> str | None:
    _write(sys.stdout, prompt)
    line = sys.stdin.readline()
    return line.removesuffix("\n") if line else None


def _list(sandbox: RemoteSandbox, given: dict[str, Any]) -> None:
    found = [sandbox.context(id=each) for each in sandbox.contexts()]
    if "json" in given:
        remote.print_json([{"id": each.id, "language": each.language} for each in found])
    else:
        tables.show(_HEADS, [(each.id, each.language) for each in found])
