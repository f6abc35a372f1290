"""Names in threads: shares, turns, answers that are waited for together."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from ringfence.egress.loop import Deadline, Loop, Task, sleep
from ringfence.egress.resolve import _SHARE, MOST_THREADS, Found, Resolver, system_look_up

ANSWER: Found = ((socket.AF_INET, "192.0.2.1"),)


class Names:
    """A resolver whose answers the test gives out."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.asked: list[str] = []
        self.go_on = threading.Event()
        self.resolver = Resolver(self.loop, self._look_up)
        self.tasks: list[Task] = []

    def _look_up(self, name: str) -> Found:
        self.asked.append(name)
        if name.startswith("slow"):
            self.go_on.wait(20)
        if name.startswith("bad"):
            raise socket.gaierror(-2, "Name or service not known")
        return () if name.startswith("empty") else ANSWER

    def ask(self, sandbox_id: str, name: str) -> Task:
        task = Task(self.loop, self.resolver.resolve(sandbox_id, name))
        task.on_done = lambda: None
        task.step()
        self.tasks.append(task)
        return task

    def wait(self, *tasks: Task) -> list[Any]:
        while not all(task.done for task in tasks):
            self.loop.turn()
        return [task.result() for task in tasks]


@pytest.fixture(name="names")
def fixture_names() -> Iterator[Names]:
    made = Names()
    yield made
    made.go_on.set()
    for task in made.tasks:
        while not task.done:
            made.loop.turn()
    made.resolver.close()
    made.loop.close()


def test_an_answer(names: Names) -> None:
    assert [ANSWER] == names.wait(names.ask("one", "a.test"))


@pytest.mark.parametrize(("name", "why"), [("bad.test", "not known"), ("empty.test", "no address")])
def test_no_answer(names: Names, name: str, why: str) -> None:
    with pytest.raises(OSError, match=why):
        names.wait(names.ask("one", name))


def test_those_who_ask_for_the_same_wait_together(names: Names) -> None:
    tasks = [names.ask("one", "slow.test") for _ in range(50)]
    names.go_on.set()

    assert [ANSWER] * 50 == names.wait(*tasks)
    assert ["slow.test"] == names.asked


def test_an_answer_serves_for_a_moment_and_only_its_sandbox(names: Names) -> None:
    for sandbox_id in ("one", "one", "two", "one"):
        names.wait(names.ask(sandbox_id, "a.test"))
    assert 2 == len(names.asked)

    names.resolver.forget("one")
    names.wait(names.ask("one", "a.test"), names.ask("two", "a.test"))
    assert 3 == len(names.asked)


def test_one_sandbox_cannot_have_every_thread(names: Names) -> None:
    for number in range(500):
        names.ask("greedy", f"slow-{number}.test")
    for sandbox in range(6):
        names.ask(f"greedy-{sandbox}", f"slow-{sandbox}.test")
        names.ask(f"greedy-{sandbox}", f"slow-{sandbox}-too.test")

    assert [ANSWER] == names.wait(names.ask("modest", "a.test"))
    assert len([name for name in names.asked if name.count("-") == 1]) <= _SHARE + 6
    assert len(names.asked) < MOST_THREADS


def test_who_waits_gets_a_turn_when_another_ends(names: Names) -> None:
    tasks = [names.ask("one", f"slow-{number}.test") for number in range(40)]
    names.go_on.set()

    assert [ANSWER] * 40 == names.wait(*tasks)


def test_too_many_at_once_are_refused(names: Names) -> None:
    for number in range(1100):
        names.ask("one", f"slow-{number}.test")

    with pytest.raises(OSError, match="too many"):
        names.wait(names.ask("one", "a.test"))


def test_who_gives_up_leaves_the_queue(names: Names) -> None:
    async def impatient(number: int) -> None:
        with pytest.raises(TimeoutError), Deadline(0.01):
            await names.resolver.resolve("one", f"slow-{number}.test")

    for number in range(30):
        task = names.loop.spawn(impatient(number))
        names.tasks.append(task)
    names.loop.run_until_done(sleep(0.1))
    assert all(task.done for task in names.tasks)
    names.go_on.set()

    assert [ANSWER] == names.wait(names.ask("one", "a.test"))
    assert len(names.asked) <= _SHARE + 1


def test_the_system_s_own() -> None:
    assert {"127.0.0.1", "::1"} & {address for _, address in system_look_up("localhost")}
