"""Ten cells in every other backend."""

from __future__ import annotations

import pytest

from ringfence import Sandbox
from tests.conformance.test_smoke import sandbox
from tests.contexts.ten import check_ten_cells
from tests.contexts.test_languages import CODE

__all__ = ["sandbox"]
pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]


def test_ten_cells(sandbox: Sandbox) -> None:
    with sandbox.context() as context:
        check_ten_cells(context)
        assert context.run("while True: pass", timeout_s=0.5).timed_out
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
