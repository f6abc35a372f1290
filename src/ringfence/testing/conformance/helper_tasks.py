"""Helpers that look through a tree, change text in it, and tell what happens there."""

from __future__ import annotations

import json
import os
from functools import wraps
from typing import TYPE_CHECKING, Any

import pytest

from ...errors import FileError, FileNotFound, Unsupported
from .base import ConformanceBase

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...backends.protocol import HelperTask
    from ..lab import Lab

    Test = Callable[[Any, Lab], None]


def _or_refused(test: Test) -> Test:
    """Where a backend sends no helper tasks it must say so; each refusal is counted."""

    @wraps(test)
    def run(self: ConformanceBase, sandbox: Lab) -> None:
        try:
            test(self, sandbox)
        except Unsupported as refusal:
            self.refusals.update([f"{refusal.backend}: task {refusal.operation}"])

    return run


class HelperTasks(ConformanceBase):
    one_sandbox = True

    @_or_refused
    def test_names_are_found(self, sandbox: Lab) -> None:
        sandbox.sh("mkdir -p t/in; : > t/a.py; : > t/in/b.py; : > t/c; ln -s /etc t/away.py")

        assert {"a.py", "away.py"} == self._names(sandbox, "*.py")
        assert {"a.py", "in/b.py", "away.py"} == self._names(sandbox, "**/*.py")

    @_or_refused
    def test_text_is_found(self, sandbox: Lab) -> None:
        sandbox.sh("mkdir t; printf 'one\\nneedle\\n' > t/a; printf 'needle\\0' > t/binary")
        asked = {"pattern": "NEE.LE", "regex": True, "ignore_case": True, "glob": None}

        *found, end = self._lines(sandbox, "search", "t", {**asked, "most": 9})

        assert [("a", 2, 1)] == [
            (os.path.basename(each["path"]), each["line"], each["column"]) for each in found
        ]
        assert {"done": True, "truncated": False, "too_deep": False} == end

    @_or_refused
    def test_text_is_replaced(self, sandbox: Lab) -> None:
        sandbox.sh("echo 'a.b axb' > one; chmod 750 one")
        asked = {"pattern": "a.b", "regex": False, "ignore_case": False, "replacement": "\\1"}

        one, none, _end = self._lines(sandbox, "replace", ".", {**asked, "files": ["one", "none"]})

        assert (1, None) == (one["replacements"], one["error"])
        assert none["error"]
        assert b"\\1 axb\n" == sandbox.get("one")
        assert 0o750 == sandbox.files.stat("one").mode

    @_or_refused
    def test_attributes_are_set_anew(self, sandbox: Lab) -> None:
        sandbox.sh("echo x > noted")
        asked = {"prefix": "user.rf.", "names": ["noted", "none"], "set": None}

        def answer(wanted: dict[str, str] | None) -> list[Any]:
            names = ["noted"] if wanted else asked["names"]
            *found, end = self._lines(
                sandbox, "attributes", ".", {**asked, "names": names, "set": wanted}
            )
            assert {"done": True} == end
            return [each["attributes"] for each in found]

        assert [{}, {}] == answer(None)
        try:
            assert [{"a": "1"}] == answer({"a": "1"})
        except FileError as exc:
            assert "not supported" in str(exc)  # noqa: PT017  gVisor's root has none
            return
        assert [{"b": "2"}] == answer({"b": "2"})

    @_or_refused
    def test_changes_are_told_as_they_happen(self, sandbox: Lab) -> None:
        sandbox.sh("mkdir w")
        task = _send(sandbox, "watch", "w", {"recursive": True})
        with os.fdopen(os.dup(task.stream), encoding="utf-8") as lines:
            assert "watching" == json.loads(lines.readline())["kind"]
            sandbox.sh("mkdir w/d && echo x > w/d/f && rm -r w")
            told = [json.loads(line) for line in lines]
        task.finish("w")

        seen = {(each["kind"], os.path.relpath(each["path"], told[-1]["path"])) for each in told}
        assert {("created", "d"), ("deleted", "d"), ("deleted", ".")} <= seen

    @_or_refused
    def test_a_watch_that_nobody_follows_ends(self, sandbox: Lab) -> None:
        _send(sandbox, "watch", ".", {"recursive": False}).abandon()

        assert sandbox.run("true").ok

    @_or_refused
    def test_a_helper_task_fails_as_the_kernel_says(self, sandbox: Lab) -> None:
        asked = {"pattern": "*", "most": 1}
        nowhere = _send(sandbox, "find", "nothing", asked)
        with pytest.raises(FileNotFound):
            nowhere.finish("nothing")
        senseless = _send(sandbox, "find", ".", {**asked, "pattern": "[z-a]"})
        with pytest.raises(FileError):
            senseless.finish(".")

    # -- inner ------------------------------------------------------------------------------

    def _names(self, sandbox: Lab, pattern: str) -> set[str]:
        found = self._lines(sandbox, "find", "t", {"pattern": pattern, "most": 99})[:-1]
        base = os.path.commonpath([os.path.dirname(each["path"]) for each in found])
        return {os.path.relpath(each["path"], base) for each in found}

    def _lines(self, sandbox: Lab, what: str, path: str, options: Any) -> list[dict[str, Any]]:
        """All that a helper task answers."""
        task = _send(sandbox, what, path, options)
        with os.fdopen(os.dup(task.stream), encoding="utf-8") as lines:
            said = [json.loads(line) for line in lines]
        task.finish(path)
        return said


def _send(sandbox: Lab, what: str, path: str, options: Any) -> HelperTask:
    return sandbox.files.start_helper(what, path, json.dumps(options))
