"""Runs tests marked `in_world` in a process of their own, which lives in the world.

It is forked before the first test, when this process has one thread and no sandbox yet, and runs its
tests as they come, with fixtures of every scope. Namespaces are for good, so this cannot be a fixture.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
from typing import Any, Literal

import pytest

from tests.egress.world import CannotEnterError, World, enter

MARK = "in_world"
_PATIENCE_S = 600.0
_HERE: list[World] = []


def world_here() -> World:
    """The world that this process lives in."""
    assert _HERE, f"only tests marked {MARK} run in the world"
    return _HERE[0]


class Elsewhere:
    """The parent's side, as a plugin: sends tests there one by one, and reports what came back.

    Args:
        session: With every test collected.
    """

    def __init__(self, session: pytest.Session) -> None:
        self._items = [item for item in session.items if item.get_closest_marker(MARK)]
        self._numbers = {item: number for number, item in enumerate(self._items)}
        self._alive = True
        there_in, self._out = os.pipe()
        self._in, there_out = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if 0 == self._pid:
            os.close(self._out)
            os.close(self._in)
            _live_there(session, self._items, there_in, there_out)
        os.close(there_in)
        os.close(there_out)
        self._rest = b""
        # Its servers are there from the beginning: no test shall take them for what it left behind.
        self._hear()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Literal[True] | None:
        if item not in self._numbers:
            return None
        # The process there has a timer of its own for this test.
        signal.setitimer(signal.ITIMER_REAL, 0)
        hook = item.ihook
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for form in self._run(self._numbers[item]):
            if isinstance(form["longrepr"], list):
                form["longrepr"] = tuple(form["longrepr"])  # of a skip; JSON has no tuples
            report = item.config.hook.pytest_report_from_serializable(config=item.config, data=form)
            hook.pytest_runtest_logreport(report=report)
        if not self._alive:
            hook.pytest_runtest_logreport(report=self._lost(item))
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if nextitem is not None:
            # What the last test here left set up for this one's directory may be none of the next one's.
            item.session._setupstate.teardown_exact(nextitem)
        return True

    def _run(self, number: int) -> list[dict[str, Any]]:
        """Every report of one test; what came before the process was lost, if it was."""
        reports: list[dict[str, Any]] = []
        with contextlib.suppress(BrokenPipeError):
            os.write(self._out, b"%d\n" % number)
        while self._alive and (form := self._hear()):
            if "done" in form:
                break
            reports.append(form)
        return reports

    def _hear(self) -> dict[str, Any]:
        poll = select.poll()
        poll.register(self._in, select.POLLIN)
        while b"\n" not in self._rest:
            piece = os.read(self._in, 1 << 20) if poll.poll(_PATIENCE_S * 1000) else b""
            if not piece:
                self._alive = False
                return {}
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        form: dict[str, Any] = json.loads(line)
        return form

    def _lost(self, item: pytest.Item) -> pytest.TestReport:
        return pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords={},
            outcome="failed",
            longrepr="the process that lives in the world was lost, or said nothing for too long",
            when="call",
        )

    def close(self) -> None:
        """End the process there; its servers end with it."""
        os.close(self._out)
        if not self._alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._in)


def _live_there(session: pytest.Session, items: list[pytest.Item], read: int, write: int) -> None:
    """The other process: never returns."""
    servers, why = None, ""
    try:
        try:
            world, servers = enter()
            _HERE.append(world)
        except CannotEnterError as exc:
            why = str(exc)
        os.write(write, b"{}\n")
        _run_there(session, items, read, write, why)
    except BaseException:  # noqa: BLE001  told on standard error, as the last thing it does
        sys.excepthook(*sys.exc_info())
    finally:
        if servers is not None:
            servers.close()
        sys.stdout.flush()
        os._exit(0)


def _run_there(
    session: pytest.Session, items: list[pytest.Item], read: int, write: int, why: str
) -> None:
    plugins = session.config.pluginmanager
    for plugin in list(plugins.get_plugins()):
        if type(plugin).__name__ in ("TerminalReporter", "LogXML"):
            plugins.unregister(plugin)
    plugins.register(_There(session.config, write, why))
    with os.fdopen(read, encoding="ascii") as requests:
        ready = requests.readline()
        while ready:
            item, ready = items[int(ready)], ""
            nextitem = _next(items, item)
            # The other pass may have taken what was thought to be next.
            session._setupstate.teardown_exact(item)
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
            os.write(write, b'{"done":true}\n')
            ready = requests.readline()
        session._setupstate.teardown_exact(None)


def _next(items: list[pytest.Item], item: pytest.Item) -> pytest.Item | None:
    place = items.index(item) + 1
    return items[place] if place < len(items) else None


class _There:
    def __init__(self, config: pytest.Config, write: int, why_not: str) -> None:
        self._config, self._write, self._why_not = config, write, why_not

    def pytest_runtest_setup(self) -> None:
        if self._why_not and os.environ.get("CI"):
            pytest.fail(self._why_not, pytrace=False)
        if self._why_not:
            pytest.skip(self._why_not)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        form = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        data = memoryview(json.dumps(form, default=str).encode() + b"\n")
        while data:
            data = data[os.write(self._write, data) :]
