"""Main loop of the interpreter inside: one request a line with code; its output and status are
returned.

Standard library only, Python 3.8 or newer: the sandbox's own interpreter runs it.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import traceback
from typing import Any

RESULT_CHARS = 1 << 20


def main() -> None:
    """Serve requests `{"code": ..., "mark": ...}`; after the output comes the mark and what happened."""
    # The code has neither our requests on its standard input nor an own end of them.
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(1, 2)
    # In order with standard error.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    for line in requests:
        request = json.loads(line)
        answer = run(request["code"], namespace)
        sys.stdout.flush()
        sys.stderr.flush()
        _write(("\n" + request["mark"] + json.dumps(answer) + "\n").encode())


def run(code: str, namespace: dict[str, Any]) -> dict[str, Any]:
    """Execute `code`; a last expression's value is the result, as in a notebook."""
    try:
        tree = ast.parse(code, "<code>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<code>", "exec"), namespace)
        value = None
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<code>", "eval"), namespace)
        return {"result": None if value is None else _shown(repr(value))}
    except BaseException as exc:  # noqa: BLE001  SystemExit too: the interpreter stays
        text = "".join(traceback.format_exception(type(exc), exc, exc.__traceback__))
        return {"error": type(exc).__name__, "value": str(exc), "traceback": _shown(text)}


def _write(data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(1, left) :]  # a pipe may take a part: in gVisor it does


def _shown(text: str) -> str:
    """As much as output may be; its middle is dropped."""
    half = RESULT_CHARS // 2
    if len(text) <= RESULT_CHARS:
        return text
    left_out = len(text) - RESULT_CHARS
    return f"{text[:half]}\n[{left_out} characters are left out here]\n{text[-half:]}"


if __name__ == "__main__":
    main()
