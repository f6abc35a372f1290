"""Ten cells in every other backend."""

from __future__ import annotations

import pytest

from ringfence import Sandbox
from tests.conformance.test_smoke import sandbox
from tests.contexts.test_languages import CODE

__all__ = ["sandbox"]
pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]


def test_ten_cells(sandbox: Sandbox) -> None:
    with sandbox.context() as context:
        context.run("import os, subprocess, sys")
        context.run("class T:\n    def _repr_html_(self): return '<b>'")
        found = [
            context.run("6 * 7").text == "42",
            context.run("T()").results[0].html == "<b>",
            getattr(context.run("1/0").error, "name", "") == "ZeroDivisionError",
            context.run("input()", stdin="a").text == "'a'",
            context.run("import asyncio\nawait asyncio.sleep(0, 5)").text == "5",
            len(context.run("print('x' * 5_000_000)").stdout) == 5_000_001,
            context.run("subprocess.run(['echo', 'sub']);").stdout == "sub\n",
            context.run("while True: pass", timeout_s=0.5).timed_out,
        ]

        assert [True] * 8 == found
        if sandbox.exec(["sh", "-c", "command -v node"]).exit_code == 0:
            with sandbox.context("node") as node:
                node.run("const x = 41")
                assert "42" == node.run("await x + 1").text
                order = CODE["node"].order
                assert ["stdout", "stderr", "stdout"] == [
                    each.stream for each in node.run(order).logs
                ]
                for endless in CODE["node"].endless:
                    assert "variables are kept" in str(node.run(endless, timeout_s=1).error), (
                        endless
                    )
        assert "killed" in str(context.run("os.kill(os.getpid(), 9)").error)
