"""A process that counts in a machine's memory is saved, its machine is gone, and two of it go on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence import Sandbox
from ringfence.backends.microvm import written
from ringfence.backends.microvm.backend import MicrovmBackend
from ringfence.errors import SnapshotCorrupt, Unsupported
from ringfence.model.mount import READ_WRITE, Mount
from ringfence.model.state import State
from tests.machines import machine_backend, require_machines
from tests.strong.counting import check_two, start_counting, wait_for

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MicrovmBackend]:
    require_machines()
    made = machine_backend(str(tmp_path_factory.mktemp("snapshots")))
    yield made
    made.close()


@pytest.mark.rootless  # once is enough
@pytest.mark.timeout(600)
def test_two_go_on_from_one(backend: MicrovmBackend, tmp_path: Path) -> None:
    """With a mount, and a file in it that stays open."""
    source = tmp_path / "source"
    source.mkdir()
    mount = Mount("/data", str(source), READ_WRITE, protect=())
    sandbox = Sandbox.create(backend=backend, mounts=(mount,))
    start_counting(sandbox)
    sandbox.shell("(exec 3>/data/open; sleep 1000; echo > end) >log 2>&1 </dev/null &")
    open_file = "readlink /proc/$(pgrep -xn sleep)/fd/3; ls /data; echo more >/data/$(hostname)"
    before = wait_for(sandbox, 3)
    snapshot = sandbox.checkpoint()

    assert State.TERMINATED is sandbox.session.state
    with (
        Sandbox.restore(snapshot.id, backend=backend) as first,
        Sandbox.restore(snapshot.id, backend=backend) as second,
    ):
        after = [wait_for(each, before["count"] + 10) for each in (first, second)]
        assert "/data/open\nopen\n" == first.shell(open_file).stdout_text
    check_two(before, after)
    assert {"open", after[0]["hostname"]} == {each.name for each in source.iterdir()}


def test_what_a_machine_needs_again_is_asked_for_first(tmp_path: Path) -> None:
    path = tmp_path / "machine"
    then = written.Conditions("key", ["/usr"])
    with path.open("w+b", buffering=0) as file:
        written.begin(file.fileno(), then, [b"one", b""])
        file.write(b"stream")
        file.seek(0)
        head = written.read(file.fileno())
        assert [b"one", b""] == head.known
        assert head.before is not None
        head.before.check(then)
        assert b"stream" == file.read()
        for other in (
            written.Conditions("other", ["/usr"]),
            written.Conditions("key", ["/usr", "/opt"]),
        ):
            with pytest.raises(Unsupported):
                head.before.check(other)
        for size in (0, 10, 30):
            file.seek(0)
            file.truncate(size)
            with pytest.raises(SnapshotCorrupt):
                written.read(file.fileno())
