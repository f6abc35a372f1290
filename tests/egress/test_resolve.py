"""Names in threads: shares, turns, answers that are waited for together."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from ringfence.egress.dns.resolve import _SHARE, MOST_THREADS, Found, Resolver, system_look_up
from ringfence.egress.io.loop import Deadline, Loop, Task, sleep

pytestmark = pytest.mark.anyone

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
        if name.startswith("worse"):
            raise UnicodeError("not a name at all")
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


@pytest.mark.parametrize(
    ("name", "why"),
    [("bad.test", "not known"), ("empty.test", "no address"), ("worse.test", "not a name")],
)
def test_no_answer(names: Names, name: str, why: str) -> None:
    with pytest.raises(OSError, match=why):
        names.wait(names.ask("one", name))
    assert [ANSWER] == names.wait(names.ask("one", "a.test")), "its thread has ended with it"


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
    names.wait(names.ask("two", "a.test"))
    assert 2 == len(names.asked)
    names.wait(names.ask("one", "a.test"))
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


def test_an_old_answer_is_asked_for_again(names: Names) -> None:
    names.wait(names.ask("one", "a.test"))
    asked_at, answer = names.resolver._kept["one", "a.test"]
    names.resolver._kept["one", "a.test"] = asked_at - 2.0, answer

    assert [ANSWER] == names.wait(names.ask("one", "a.test"))
    assert ["a.test"] * 2 == names.asked


@pytest.mark.parametrize("name", ["empty.test", "bad.test"])
def test_that_there_is_no_answer_is_not_kept(names: Names, name: str) -> None:
    for _ in range(2):
        with pytest.raises(OSError, match=r"no address|not known"):
            names.wait(names.ask("one", name))
    assert [name] * 2 == names.asked
    assert {} == names.resolver._kept


def test_so_many_answers_are_kept_and_no_more(names: Names) -> None:
    for start in range(0, 1200, 100):
        names.wait(*(names.ask("one", f"{start + n}.test") for n in range(100)))

    assert 1024 == len(names.resolver._kept)
    assert ("one", "1199.test") in names.resolver._kept


def test_who_asks_again_for_what_was_given_up_is_answered(names: Names) -> None:
    """It had not had its turn: what was given up must not be waited for."""
    held = [names.ask("one", f"slow-{number}.test") for number in range(_SHARE)]

    async def impatient() -> None:
        with pytest.raises(TimeoutError), Deadline(0.01):
            await names.resolver.resolve("one", "late.test")

    names.wait(names.loop.spawn(impatient()))
    again = names.ask("one", "late.test")
    names.go_on.set()

    assert [ANSWER] * (_SHARE + 1) == names.wait(*held, again)


def test_who_waits_gets_a_turn_when_another_ends(names: Names) -> None:
    tasks = [names.ask("one", f"slow-{number}.test") for number in range(40)]
    names.go_on.set()

    assert [ANSWER] * 40 == names.wait(*tasks)


def test_the_last_threads_are_for_sandboxes_that_have_none(names: Names) -> None:
    for sandbox in range(5):
        for number in range(2 * _SHARE):
            names.ask(f"greedy-{sandbox}", f"slow-{sandbox}-{number}.test")
    running = names.resolver._running
    left = MOST_THREADS - sum(running.values())
    assert left > 0
    for sandbox in range(left):
        names.ask(f"modest-{sandbox}", f"slow-{sandbox}.test")
    assert [1] * left == [running[f"modest-{sandbox}"] for sandbox in range(left)]
    names.ask("late", "slow-late.test")
    assert "late" not in running
    names.go_on.set()
    names.wait(*names.tasks)
    assert ({}, {}, {}) == (running, names.resolver._queues, names.resolver._lookups)


def test_sandboxes_have_a_free_thread_in_turn(names: Names) -> None:
    running = names.resolver._running
    running["others"] = MOST_THREADS
    tasks = [names.ask(one, f"{one}{number}.test") for one in "ab" for number in range(3)]
    assert [] == names.asked
    running["others"] -= 1
    names.resolver._hand_out()
    assert [ANSWER] * 6 == names.wait(*tasks)
    assert ["a0", "b0", "a1", "b1", "a2", "b2"] == [each.partition(".")[0] for each in names.asked]
    del running["others"]
    assert {} == running


def test_too_many_at_once_are_refused(names: Names) -> None:
    while not (names.tasks and names.tasks[-1].done):
        names.ask("one", f"slow-{len(names.tasks)}.test")
    assert 1024 == len(names.tasks) - 1 - names.resolver._running["one"]

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


def test_one_who_gives_up_takes_nothing_from_who_waits_for_the_same(names: Names) -> None:
    held = [names.ask("one", f"slow-{number}.test") for number in range(_SHARE)]

    async def impatient() -> None:
        with pytest.raises(TimeoutError), Deadline(0.01):
            await names.resolver.resolve("one", "late.test")

    gives_up = names.loop.spawn(impatient())
    patient = names.ask("one", "late.test")
    names.wait(gives_up)
    names.go_on.set()

    assert [ANSWER] * (_SHARE + 1) == names.wait(*held, patient)


def test_nothing_is_kept_of_sandboxes_that_wait_for_no_name(names: Names) -> None:
    for number in range(20):
        names.wait(*(names.ask(f"sbx-{number}", f"{each}.test") for each in range(3)))
        names.resolver.forget(f"sbx-{number}")
    resolver = names.resolver

    assert ({}, {}, {}, {}) == (
        resolver._queues, resolver._running, resolver._lookups, resolver._kept,
    )  # fmt: skip


def test_other_threads_have_stacks_as_before(names: Names) -> None:
    before = threading.stack_size(3 << 20)
    names.wait(names.ask("one", "a.test"))

    assert 3 << 20 == threading.stack_size(before)


def test_the_system_s_own() -> None:
    assert {"127.0.0.1", "::1"} & {address for _, address in system_look_up("localhost")}


def test_of_many_addresses_the_first_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [(socket.AF_INET, 1, 6, "", (f"192.0.2.{n // 2}", 0)) for n in range(80)]
    monkeypatch.setattr("_socket.getaddrinfo", lambda *_: many)

    assert tuple((socket.AF_INET, f"192.0.2.{n}") for n in range(16)) == system_look_up("a.test")


@pytest.mark.parametrize("names_asked", [0, 1, 20])
def test_it_leaves_no_descriptor_and_is_not_called_again(names_asked: int) -> None:
    names = Names()
    event = names.resolver._event
    names.wait(*(names.ask("one", f"{number}.test") for number in range(names_asked)))
    names.resolver.close()

    assert event not in names.loop._handlers
    over = threading.Event()
    while is_open(event):  # the last of the threads closes it, a moment after it is told
        over.wait(0.01)
    names.loop.close()


def is_open(event: int) -> bool:
    try:
        return "eventfd" in os.readlink(f"/proc/self/fd/{event}")
    except FileNotFoundError:
        return False
