"""Uploads of templates: several at once, one that is on its way, and room that one owner needs."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import pytest
from tests.unconfined import Unconfined

from ringfence.errors import InvalidRequest, QuotaExceeded, TooLarge
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.manager import SessionManager
from ringfence.sessions.templates.places import Places, Upload, short

pytestmark = pytest.mark.anyone
_NAME = hashlib.sha256(b"name").hexdigest()


@pytest.fixture
def places() -> Iterator[Places]:
    made = Places(None)
    yield made
    made.close()


def _begin(places: Places, owner: str) -> Upload:
    return Upload(places, owner, 1 << 20, lambda: 1 << 30)


def _put(places: Places, owner: str, content: bytes, name: str = "") -> str:
    with closing(_begin(places, owner)) as upload:
        upload.write(content)
        return upload.finish(name=name)


def test_uploads_that_end_meanwhile_are_counted_or_not(places: Places) -> None:
    kept = _put(places, "ann", b"kept")
    is_over = threading.Event()

    def work() -> None:
        while not is_over.is_set():
            _begin(places, "ann").close()

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        try:
            assert {4} == {places.uploaded_bytes("ann") for _ in range(3000)}
        finally:
            is_over.set()
        working.result()
    assert places.has("ann", kept)


class _Slow(Counter[str]):
    """Lets two that count at once read the same number, if nothing keeps them apart."""

    def __init__(self) -> None:
        super().__init__()
        self._both = threading.Barrier(2)

    def __getitem__(self, owner: str) -> int:
        found = super().__getitem__(owner)
        with suppress(threading.BrokenBarrierError):
            self._both.wait(0.05)
        return found


def test_two_uploads_that_are_counted_at_once_are_both_counted(places: Places) -> None:
    places.incoming = _Slow()
    with closing(_begin(places, "ann")) as one, closing(_begin(places, "ann")) as other:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda upload: upload.write(b"12345"), (one, other)))

        assert 10 == places.count_incoming("ann", 0)


def test_two_of_one_name_at_once_are_both_taken(places: Places) -> None:
    def work(number: int) -> set[str]:
        return {_put(places, "ann", b"%d" % number, _NAME) for _ in range(500)}

    with ThreadPoolExecutor(4) as pool:
        found = set().union(*pool.map(work, range(4)))
    assert 4 == len(found)
    assert places.named("ann", _NAME) in found


def test_one_owners_room_is_not_made_of_anothers_uploads(places: Places) -> None:
    mine, another, needed = (_put(places, who, who.encode()) for who in ("ann", "bob", "ann2"))
    own = _put(places, "ann", b"needed")
    _age(places, 10.0)
    places.tidy(0.0, {own}, "ann")

    assert [False, True] == [places.has("ann", each) for each in (mine, own)]
    assert places.has("bob", another)
    assert places.has("ann2", needed)
    places.tidy(5.0, set())  # the control: of all, what was not used for so long
    assert not places.has("bob", another)


def test_what_is_on_its_way_is_not_removed_before_it_is_abandoned(places: Places) -> None:
    with closing(_begin(places, "ann")) as upload:
        upload.write(b"some")
        _age(places, 600.0)
        places.tidy(0.0, set(), "ann")
        assert places.has("ann", upload.finish())

    with open(places.path("uploads", short("ann"), ".partial-killed"), "wb") as file:
        file.write(b"of a process that was killed")
    _age(places, 4000.0)
    places.tidy(10_000.0, set())
    assert 4 == places.uploaded_bytes("ann")


def test_bytes_on_their_way_count_until_their_upload_ends_however_it_ends(places: Places) -> None:
    room = 10

    def begin(owner: str = "ann") -> Upload:
        return Upload(places, owner, 8, lambda: room)

    def finished(upload: Upload) -> None:
        upload.write(b"12345678")
        upload.finish()

    def too_large(upload: Upload) -> None:
        with pytest.raises(TooLarge):
            upload.write(b"123456789")

    def refused(upload: Upload) -> None:
        with closing(begin()) as beside:
            beside.write(b"12345678")
            with pytest.raises(QuotaExceeded):
                upload.write(b"123")

    def another(upload: Upload) -> None:
        upload.write(b"12345678")
        with pytest.raises(InvalidRequest):
            upload.finish("0" * 64)

    for end in (finished, too_large, refused, another, lambda _: None):
        with closing(begin()) as upload:
            end(upload)
        upload.close()
        assert 0 == places.incoming["ann"]
    with closing(begin()) as first, closing(begin()) as second, closing(begin("bob")) as third:
        first.write(b"123456")
        third.write(b"123456")
        second.write(b"1234")
        with pytest.raises(QuotaExceeded):
            second.write(b"5")


def _age(places: Places, age_s: float) -> None:
    """Date all files back."""
    then = time.time() - age_s
    for here, _, names in os.walk(os.path.dirname(places.path("uploads", "x"))):
        for name in names:
            os.utime(os.path.join(here, name), (then, then))


def test_what_no_state_directory_keeps_is_gone_with_its_manager() -> None:
    config = ManagerConfig(pool=PoolConfig(enabled=False))
    with (
        closing(Unconfined()) as backend,
        SessionManager(config, backends=[backend], background=False) as manager,
    ):
        place = manager.templates.places.path("uploads", "x")
        assert os.path.isdir(os.path.dirname(place))
    assert not os.path.exists(place.removesuffix("/uploads/x"))
