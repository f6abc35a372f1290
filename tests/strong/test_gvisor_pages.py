"""No page of a file is two tenants': what gVisor's processes map on the host, and who serves it to them."""

from __future__ import annotations

import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from ringfence import ManagerConfig, PoolConfig, Sandbox, SandboxSpec, SessionManager
from ringfence.backends.gvisor import views
from ringfence.backends.gvisor.backend import GvisorBackend
from ringfence.backends.gvisor.places import RUNSC
from ringfence.backends.gvisor.sandbox import GvisorSandbox
from ringfence.backends.local.agents.inside import descendants
from ringfence.backends.local.mounts import template
from ringfence.errors import RingfenceError
from ringfence.images.archive import load
from ringfence.images.store import ImageStore
from ringfence.model.capabilities import DEGRADED, ENFORCED, Protection
from ringfence.model.state import State
from tests.features import require
from tests.images.conftest import small

pytestmark = pytest.mark.full

_PATIENCE_S = 60.0
_PAGE = 4096
_PRESENT, _OF_A_FILE, _FRAME = (
    1 << 63,
    1 << 61,
    (1 << 55) - 1,
)  # Documentation/admin-guide/mm/pagemap.rst

Pages = set[tuple[str, ...]]


@pytest.fixture(scope="module")
def shared() -> Iterator[GvisorBackend]:
    """One server of a backend for several owners."""
    require("fuse")
    yield from _made(own_pages=True)


@pytest.fixture(scope="module")
def direct() -> Iterator[GvisorBackend]:
    """The control: all see the host's files themselves."""
    yield from _made(own_pages=False)


def _made(*, own_pages: bool) -> Iterator[GvisorBackend]:
    require("user namespaces")
    require("runsc")
    made = GvisorBackend(own_pages=own_pages)
    yield made
    made.close()


def _busy(backend: GvisorBackend, owner: str, stack: ExitStack, **options: object) -> int:
    """A sandbox of an owner's in which a program runs; PID 1 of its jail on the host."""
    name = f"{owner}-{os.urandom(4).hex()}"
    backend.belongs_to(name, owner)
    sandbox = stack.enter_context(Sandbox.create(backend=backend, id=name, **options))  # type: ignore[arg-type]
    _keep_running(sandbox)
    return _pid(backend, sandbox)


def _keep_running(sandbox: Sandbox) -> None:
    heard = threading.Event()
    process = sandbox.start(["/bin/cat"], stream_stdin=True, on_stdout=lambda _piece: heard.set())
    assert process.stdin is not None
    process.stdin.write(b"there\n")
    assert heard.wait(_PATIENCE_S)


def _pid(backend: GvisorBackend, sandbox: Sandbox) -> int:
    found = backend._jailed[sandbox.id]
    assert isinstance(found, GvisorSandbox)
    return found.pid


def _regions(pid: int) -> list[tuple[int, list[str]]]:
    """Every mapping of a file in the processes of a jail: proc_pid_maps(5). Not gVisor's own program."""
    found = []
    for each in (pid, *descendants(pid)):
        for line in Path(f"/proc/{each}/maps").read_text().splitlines():
            words = line.split(None, 5)
            if words[4] != "0" and words[5].strip() != RUNSC:
                found.append((each, words))
    return found


def _files(pid: int) -> Pages:
    """Device and inode of all."""
    return {(words[3], words[4]) for _pid, words in _regions(pid)}


def _frames(pid: int) -> Pages:
    """The physical pages of all, where they are files' and have not been written to."""
    found: Pages = set()
    for each, words in _regions(pid):
        start, _, end = words[0].partition("-")
        with open(f"/proc/{each}/pagemap", "rb", buffering=0) as pagemap:
            first, last = int(start, 16) // _PAGE, int(end, 16) // _PAGE
            pagemap.seek(first * 8)
            data = pagemap.read((last - first) * 8)
        entries = struct.unpack(f"={len(data) // 8}Q", data)
        wanted = (e & _FRAME for e in entries if e & _PRESENT and e & _OF_A_FILE)
        found |= {(str(frame),) for frame in wanted if frame}
    return found


def _in_common(read: Callable[[int], Pages], one: int, other: int) -> Pages:
    """What both have, as long as the first had it: a page that it gave up may become the other's."""
    return read(one) & read(other) & read(one)


def test_no_file_is_mapped_by_two_tenants(shared: GvisorBackend, direct: GvisorBackend) -> None:
    with ExitStack() as stack:
        ann, ben, again = (_busy(shared, owner, stack) for owner in ("ann", "ben", "ann"))
        assert _files(ann), "there is something to see"
        assert not _in_common(_files, ann, ben)
        assert _in_common(_files, ann, again), "one tenant's sandboxes have theirs together"
    with ExitStack() as stack:
        pids = [_busy(direct, owner, stack) for owner in ("ann", "ben")]
        assert _in_common(_files, *pids), "the control: the same files, the same pages"


@pytest.mark.root  # only root is told which page a page is
def test_no_page_of_an_image_is_two_tenants(
    shared: GvisorBackend,
    direct: GvisorBackend,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of an overlay the kernel names the overlay's files, not those below: so by the pages themselves."""
    if shared.views(shared.jailer()).why_images:
        pytest.skip("this kernel cannot map user ids in a FUSE mount")
    monkeypatch.setenv("RINGFENCE_IMAGES", str(tmp_path / "images"))
    load(small().as_layout(tmp_path / "layout"), "small:1", store=ImageStore())
    with ExitStack() as stack:
        ann, ben = (_busy(shared, owner, stack, image="small:1") for owner in ("ann", "ben"))
        assert not _in_common(_frames, ann, ben)
    with ExitStack() as stack:
        pids = [_busy(direct, owner, stack, image="small:1") for owner in ("ann", "ben")]
        assert _in_common(_frames, *pids), "the control"


def test_a_managers_clients_are_tenants(shared: GvisorBackend) -> None:
    config = ManagerConfig(pool=PoolConfig(enabled=False))
    with SessionManager(config, backends=(shared,)) as manager:
        leases = [
            manager.acquire(SandboxSpec(tier="strong"), client_id=client)
            for client in ("ann", "ben")
        ]
        pids = []
        for lease in leases:
            _keep_running(lease.sandbox)
            pids.append(_pid(shared, lease.sandbox))
        assert not _in_common(_files, *pids)


def _own_pages(sandbox: Sandbox) -> Protection:
    [found] = [each for each in sandbox.protections() if each.name == "own_pages"]
    return found


def test_where_it_cannot_be_had_it_is_said(
    backend: GvisorBackend, direct: GvisorBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "_DEVICE", "/dev/no-such-device")
    with Sandbox.create(backend=backend) as sandbox:
        found = _own_pages(sandbox)
        assert (DEGRADED, True) == (found.status, "/dev/no-such-device" in found.why)
        assert "/dev/fuse" in found.fix
    with Sandbox.create(backend=direct) as sandbox:
        found = _own_pages(sandbox)
        assert (DEGRADED, True) == (found.status, "RINGFENCE_OWN_PAGES" in found.fix)


def _servers(backend: GvisorBackend) -> set[int]:
    found = set()
    for pid in descendants(backend.jailer().pid):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            if Path(f"/proc/{pid}/comm").read_text() == "ringfence-view\n":
                found.add(pid)
    return found


def _server(backend: GvisorBackend) -> int:
    [found] = _servers(backend)
    return found


def _wait_until(is_so: Callable[[], bool]) -> None:
    ends = time.monotonic() + _PATIENCE_S
    while not is_so():
        assert time.monotonic() < ends, "it never was"
        time.sleep(0.02)


def test_who_serves_has_next_to_nothing(shared: GvisorBackend) -> None:
    with Sandbox.create(backend=shared) as sandbox:
        assert ENFORCED == _own_pages(sandbox).status
    pid = _server(shared)
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

    assert ("2", "1") == (status["Seccomp"], status["NoNewPrivs"])
    # CAP_DAC_READ_SEARCH, over the files of the one id that its user namespace has.
    kept = {int(status[name], 16) for name in ("CapEff", "CapPrm", "CapBnd")}
    assert ({1 << 2}, 0) == (kept, int(status["CapInh"], 16))
    if os.geteuid() == 0:
        assert "0" not in status["Uid"].split()
        assert {"proc", "shown"} == set(os.listdir(f"/proc/{pid}/root"))
        for name in ("user", "mnt", "pid", "net", "ipc", "uts"):
            assert os.readlink(f"/proc/{pid}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}")


def test_with_who_serves_its_sandboxes_end(backend: GvisorBackend) -> None:
    require("fuse")
    first = Sandbox.create(backend=backend)
    assert first.exec(["true"]).ok
    server = _server(backend)

    os.kill(server, signal.SIGKILL)

    _wait_until(lambda: first.state is State.TERMINATED)
    with pytest.raises(RingfenceError):
        first.exec(["true"])
    with Sandbox.create(backend=backend) as second:
        assert second.exec(["python3", "-c", "pass"]).ok
        assert ENFORCED == _own_pages(second).status
        assert server != _server(backend)


def test_what_the_host_has_later_is_seen_by_who_comes_later(
    backend: GvisorBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("fuse")
    first = Sandbox.create(backend=backend)
    before = _server(backend)
    more = [*views._shown(), template.tree(str(tmp_path), template.READ_ONLY)]
    monkeypatch.setattr(views, "_shown", lambda: more)

    with Sandbox.create(backend=backend) as second, Sandbox.create(backend=backend) as third:
        assert 2 == len(_servers(backend)), "one for all that come, and the one before"
        for sandbox in (first, second, third):
            assert sandbox.exec(["python3", "-c", "import json"]).ok
        first.terminate()

        _wait_until(lambda: before not in _servers(backend))
        assert 1 == len(_servers(backend))
        assert second.exec(["python3", "-c", "import email"]).ok
