"""Images from a real registry on loopback, and from one that lies."""

from __future__ import annotations

import base64
import http.server
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence.errors import ImageNotFound, ImageRefused, InvalidRequest, RegistryError
from ringfence.images.reference import Reference
from ringfence.images.registry import Registry, pull
from ringfence.images.store import ImageStore
from tests.images.conftest import small
from tests.images.making import Entry, Made, digest_of, layer
from tests.images.registry import Wire, push, serving

pytestmark = [pytest.mark.anyone, pytest.mark.full]

BIG = os.urandom(3 << 20)  # not to be compressed away


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("registry")) as host:
        push(small(Cmd=["cat", "/etc/os-release"]), host, "team/small", "1")
        push(Made([layer(Entry("big", BIG))]), host, "big", "latest")
        yield host


def test_pull_again_by_tag_and_by_digest(registry: str, store: ImageStore) -> None:
    told: list[tuple[str, int, int]] = []

    image = pull(f"{registry}/team/small:1", store=store, progress=lambda *a: told.append(a))
    fetched = len(told)
    again = pull(
        f"{registry}/team/small@{image.digest}", store=store, progress=lambda *a: told.append(a)
    )

    assert ("cat", "/etc/os-release") == image.command
    assert "ID=small\n" == Path(store.root(image), "etc/os-release").read_text()
    assert fetched
    assert told[-1][1] == told[-1][2]
    assert (image.id, fetched) == (again.id, len(told)), "nothing was fetched twice"
    assert 2 == len(store.images())


def test_an_interrupted_pull_goes_on_where_it_broke_off(registry: str, store: ImageStore) -> None:
    wire = Wire(registry, cut_after=1 << 20)
    try:
        image = pull(f"{wire.host}/big", store=store)
    finally:
        wire.close()

    assert BIG == Path(store.root(image), "big").read_bytes()
    assert 1 == wire.cuts
    ranges = [line for line in wire.requests.split(b"\r\n") if line.lower().startswith(b"range:")]
    assert 1 == len(ranges)
    assert 0 < int(ranges[0].partition(b"=")[2].rstrip(b"-")) < len(BIG)


def test_two_pulls_at_once_fetch_it_once(registry: str, store: ImageStore) -> None:
    others: list[threading.Thread] = []
    images: list[str] = []
    fetched: tuple[set[str], set[str]] = (set(), set())

    def other() -> None:
        image = pull(f"{registry}/big", store=store, progress=lambda what, *_: fetched[1].add(what))
        images.append(image.id)

    def meanwhile(what: str, *_: object) -> None:
        fetched[0].add(what)
        if not others:
            others.append(threading.Thread(target=other))
            others[0].start()
            while others[0].is_alive() and not _somebody_waits_for(store):
                time.sleep(0.01)

    image = pull(f"{registry}/big", store=store, progress=meanwhile)
    others[0].join()

    assert [image.id] == images
    assert fetched[0]
    assert not fetched[0] & fetched[1]
    assert BIG == Path(store.root(image), "big").read_bytes()
    assert not list(Path(store.directory, "blobs").glob("*.partial"))


def _somebody_waits_for(store: ImageStore) -> bool:
    """Whether there is a lock on what is being fetched that somebody does not get: proc_locks(5)."""
    here = {str(path.stat().st_ino) for path in Path(store.directory, "blobs").iterdir()}
    lines = Path("/proc/locks").read_text().splitlines()
    return any("->" in line and line.split()[6].split(":")[2] in here for line in lines)


def test_what_comes_is_not_collected(registry: str, store: ImageStore) -> None:
    freed: list[int] = []
    image = pull(
        f"{registry}/big", store=store, progress=lambda *_: freed.append(store.collect()[0])
    )

    assert freed
    assert {0} == set(freed)
    assert BIG == Path(store.root(image), "big").read_bytes()
    # The control: what nobody fetches goes.
    store.remove(f"{registry}/big")
    assert store.collect()[0] >= 2 * len(BIG)
    assert [] == list(Path(store.directory, "blobs").iterdir())


def test_what_the_registry_does_not_have(registry: str, store: ImageStore) -> None:
    for name in ("team/small:2", "nothing:1", f"team/small@sha256:{'0' * 64}"):
        with pytest.raises(ImageNotFound):
            pull(f"{registry}/{name}", store=store)
    with pytest.raises(RegistryError, match="cannot be reached"):
        pull("127.0.0.1:1/none", store=store)
    assert [] == store.images()


def test_a_private_registry(
    tmp_path: Path, store: ImageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker = tmp_path / "docker"
    docker.mkdir()
    monkeypatch.setenv("DOCKER_CONFIG", str(docker))
    (place := tmp_path / "registry").mkdir()
    with serving(place, private=True) as host:
        push(small(), host, "mine", "1", auth=("user", "password"))
        name = f"{host}/mine:1"
        with pytest.raises(RegistryError, match="without a password") as refused:
            pull(name, store=store)
        with pytest.raises(RegistryError, match="with this name"):
            pull(name, store=store, credentials=("user", "wrong"))
        given = pull(name, store=store, credentials=("user", "password"))
        store.remove(name)
        auth = base64.b64encode(b"user:password").decode()
        (docker / "config.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}))
        assert given.id == pull(name, store=store).id
    assert not refused.value.retryable
    assert "docker login" in refused.value.hint


class _Liar(http.server.BaseHTTPRequestHandler):
    blobs: dict[str, bytes] = {}  # noqa: RUF012
    asked: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.asked.append(self.path)
        data = self.blobs.get(self.path.rpartition("/")[2])
        self.send_response(404 if data is None else 200)
        self.send_header("content-length", str(len(data or b"")))
        self.end_headers()
        self.wfile.write(data or b"")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def liar() -> Iterator[str]:
    """A registry that serves `_Liar.blobs`, whatever their digests."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Liar) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
        _Liar.blobs.clear()
        _Liar.asked.clear()


def _serve(made: Made) -> None:
    every = (made.configuration, *made.blobs)
    _Liar.blobs.update({digest_of(data): data for data in every})
    _Liar.blobs["1"] = made.manifest


def test_the_control_that_does_not_lie(liar: str, store: ImageStore) -> None:
    _serve(small())

    assert pull(f"{liar}/x:1", store=store).id == store.find(f"{liar}/x:1").id


def test_what_has_come_is_fetched_again_from_a_registry_without_ranges(
    liar: str, store: ImageStore
) -> None:
    _serve(made := small())
    partial = Path(f"{store.blob(digest_of(made.blobs[0]))}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    partial.write_bytes(made.blobs[0][:10])

    assert pull(f"{liar}/x:1", store=store).id == store.find(f"{liar}/x:1").id


@pytest.mark.parametrize("is_plain", [False, True], ids=["with TLS", "the control without"])
def test_a_registry_with_tls_has_its_password_sent_nowhere_without(
    liar: str, is_plain: bool
) -> None:
    reference = Reference.parse("registry.test/x:1")
    challenge = f'Bearer realm="http://{liar}/token",service="registry.test"'

    with Registry(reference, ("user", "password"), is_plain) as registry:
        if is_plain:
            registry._authorize(challenge)
        else:
            with pytest.raises(RegistryError, match="unknown authentication scheme"):
                registry._authorize(challenge)

    assert is_plain == bool(_Liar.asked)


def test_a_layer_that_is_not_its_digest(liar: str, store: ImageStore) -> None:
    _serve(made := small())
    _Liar.blobs[digest_of(made.blobs[0])] = made.blobs[0][:-1] + b"!"

    with pytest.raises(ImageRefused, match="does not match sha256"):
        pull(f"{liar}/x:1", store=store)
    assert [] == [name for name in os.listdir(f"{store.directory}/blobs") if "partial" in name]


def test_a_layer_that_is_longer_than_it_says(liar: str, store: ImageStore) -> None:
    _serve(made := small())
    _Liar.blobs[digest_of(made.blobs[0])] = made.blobs[0] + b"more"

    with pytest.raises(ImageRefused, match="longer"):
        pull(f"{liar}/x:1", store=store)


def test_blobs_stay_as_long_as_their_image_is_in_use(liar: str, store: ImageStore) -> None:
    _serve(small())
    image = pull(f"{liar}/x:1", store=store)
    blobs = set(os.listdir(f"{store.directory}/blobs"))
    held = store.hold(image)
    store.remove(f"{liar}/x:1")

    assert (0, [image.id]) == store.collect()
    assert blobs == set(os.listdir(f"{store.directory}/blobs"))
    os.close(held)
    assert (True, []) == ((ended := store.collect())[0] > 0, ended[1])
    assert [] == os.listdir(f"{store.directory}/blobs")


def test_a_layer_that_is_no_archive_leaves_no_root(liar: str, store: ImageStore) -> None:
    _serve(Made([layer(Entry("x", b"1")), b"no archive" * 100]))

    with pytest.raises(ImageRefused, match="not a tar archive"):
        pull(f"{liar}/x:1", store=store)

    assert [] == os.listdir(f"{store.directory}/roots")
    assert [] == store.images()


def test_a_manifest_that_is_not_its_digest(liar: str, store: ImageStore) -> None:
    digest = f"sha256:{'1' * 64}"
    _Liar.blobs[digest] = small().manifest

    with pytest.raises(ImageRefused, match="expected digest"):
        pull(f"{liar}/x@{digest}", store=store)


def test_another_machine(liar: str, store: ImageStore) -> None:
    _serve(Made([layer(Entry("x"))], machine="s390x"))
    index = {"manifests": [{"digest": f"sha256:{'0' * 64}", "size": 1,
                            "platform": {"os": "linux", "architecture": "s390x"}}]}  # fmt: skip

    with pytest.raises(ImageRefused, match="is for s390x"):
        pull(f"{liar}/x:1", store=store)
    _Liar.blobs["2"] = json.dumps(index).encode()
    with pytest.raises(ImageNotFound, match="only linux/s390x"):
        pull(f"{liar}/x:2", store=store)


def test_an_index_names_the_one_for_this_machine(liar: str, store: ImageStore) -> None:
    _serve(made := small())
    others = [{"digest": f"sha256:{'0' * 64}", "size": 1, "platform": {"os": o, "architecture": a}}
              for o, a in (("linux", "s390x"), ("windows", made.machine))]  # fmt: skip
    mine = {"digest": digest_of(made.manifest), "size": len(made.manifest),
            "platform": {"os": "linux", "architecture": made.machine}}  # fmt: skip
    _Liar.blobs["2"] = json.dumps({"schemaVersion": 2, "manifests": [*others, mine]}).encode()
    _Liar.blobs[digest_of(made.manifest)] = made.manifest

    assert digest_of(made.manifest) == pull(f"{liar}/x:2", store=store).digest


@pytest.mark.parametrize(
    "document",
    [b"", b"[]", b"{}", b'{"schemaVersion": 1}', b'{"layers": 1, "config": 2}',
     b'{"config": {"digest": "../../etc/passwd", "size": 1}, "layers": []}',
     b'{"config": {"digest": "sha256:' + b"0" * 64 + b'", "size": -1}, "layers": []}'],
)  # fmt: skip
def test_manifests_that_are_none(liar: str, store: ImageStore, document: bytes) -> None:
    _Liar.blobs["1"] = document

    with pytest.raises(ImageRefused):
        pull(f"{liar}/x:1", store=store)


@pytest.mark.parametrize(
    "name",
    ["", "UPPER", "a b", "x:", "x@sha256:12", "x@md5:" + "0" * 32, "-x", "x/../y", "http://x/y",
     "x:" + "y" * 129, "a" * 600, "host:99999999/x", "x\0y"],
)  # fmt: skip
def test_names_that_are_none(store: ImageStore, name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        pull(name, store=store)
    assert "image" == refused.value.field
