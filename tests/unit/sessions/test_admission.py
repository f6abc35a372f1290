"""Slots: never more than there are, first come first served, and a refusal that says what to do."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.native.outside import until

from ringfence.errors import ResourceExhausted
from ringfence.sessions.admission import Slots

pytestmark = pytest.mark.anyone

PATIENCE_S = 20.0


def test_refused_at_once_when_nobody_may_wait() -> None:
    slots = Slots(1, 0, 600.0)  # longer than a test may take
    slots.take()

    with pytest.raises(ResourceExhausted) as refusal:
        slots.take()

    assert refusal.value.retryable
    assert refusal.value.hint
    assert 1 == slots.refused


def test_refused_when_none_came_free_in_time() -> None:
    slots = Slots(1, 1, 0.05)
    slots.take()

    with pytest.raises(ResourceExhausted):
        slots.take()

    assert 0 == slots.waiting
    slots.give_back()
    slots.take()


def test_first_come_first_served() -> None:
    slots, order = Slots(1, 10, 60.0), list[int]()
    slots.take()

    def wait(number: int) -> None:
        slots.take()
        order.append(number)
        slots.give_back()

    threads = []
    for number in range(5):
        threads.append(threading.Thread(target=wait, args=(number,)))
        threads[-1].start()
        assert until(lambda number=number: number + 1 == slots.waiting)  # type: ignore[misc]
    assert not slots.try_take()
    slots.give_back()
    for thread in threads:
        thread.join()

    assert [0, 1, 2, 3, 4] == order
    assert 0 == slots.taken


def test_a_slot_that_comes_free_is_for_those_who_wait() -> None:
    slots = Slots(1, 10, 60.0)
    slots.take()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(slots.take)
        assert until(lambda: 1 == slots.waiting)
        with slots._changed:  # so that the one who waits cannot look yet
            slots.give_back()
            is_taken = slots.try_take()
            if is_taken:
                slots.give_back()
        waiting.result(PATIENCE_S)
    assert not is_taken

    slots.give_back()
    assert slots.try_take()


def test_one_who_gives_up_lets_the_next_one_through() -> None:
    slots = Slots(1, 10, 0.2)
    slots.take()
    got: list[bool] = []

    def wait() -> None:
        try:
            slots.take()
        except ResourceExhausted:
            got.append(False)
        else:
            got.append(True)

    first = threading.Thread(target=wait)
    first.start()
    assert until(lambda: 1 == slots.waiting)
    first.join()
    second = threading.Thread(target=wait)
    second.start()
    assert until(lambda: 1 == slots.waiting)
    slots.give_back()
    second.join()

    assert [False, True] == got


@given(st.integers(1, 5), st.lists(st.booleans(), max_size=60))
def test_never_more_than_there_are(most: int, moves: list[bool]) -> None:
    slots, mine = Slots(most, 0, 0.0), 0
    for is_taking in moves:
        if is_taking and slots.try_take():
            mine += 1
        elif not is_taking and mine:
            slots.give_back()
            mine -= 1
        assert mine == slots.taken <= most


def test_never_more_than_there_are_with_many_at_once() -> None:
    slots, inside, most_seen = Slots(3, 100, 60.0), 0, 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal inside, most_seen
        for _ in range(50):
            slots.take()
            with lock:
                inside += 1
                most_seen = max(most_seen, inside)
            with lock:
                inside -= 1
            slots.give_back()

    threads = [threading.Thread(target=work) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert most_seen <= 3
    assert 0 == slots.taken == slots.waiting


def test_slots_that_come_free_at_once_go_to_all_who_wait() -> None:
    """Whichever waiter wakes first: one further back in the queue waits for those before it alone."""
    slots = Slots(4, 10, PATIENCE_S)
    for _ in range(4):
        slots.take()
    for _ in range(20):
        with ThreadPoolExecutor(4) as pool:
            waiting = [pool.submit(slots.take) for _ in range(4)]
            assert until(lambda: 4 == slots.waiting)
            with slots._changed:  # none wakes before all are free
                for _ in range(4):
                    slots.give_back()
            for each in waiting:
                each.result(PATIENCE_S / 2)

        assert (4, 0, 0) == (slots.taken, slots.waiting, slots.refused)
