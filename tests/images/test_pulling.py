"""Images from a real registry on loopback, and from one that lies."""

from __future__ import annotations

import base64
import fcntl
import http.server
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from ringfence.errors import (
    ImageNotFound,
    ImageRefused,
    InvalidRequest,
    RegistryError,
    StorageFull,
)
from ringfence.images.manifest import Descriptor
from ringfence.images.reference import Reference
from ringfence.images.registry import Registry, pull
from ringfence.images.store import ImageStore
from tests.images.conftest import small
from tests.images.making import Entry, Made, digest_of, layer
from tests.images.registry import Wire, push, serving

pytestmark = pytest.mark.anyone

BIG = os.urandom(3 << 20)  # not to be compressed away


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("registry")) as host:
        push(small(Cmd=["cat", "/etc/os-release"]), host, "team/small", "1")
        push(Made([layer(Entry("big", BIG))]), host, "big", "latest")
        yield host


@pytest.mark.full
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


@pytest.mark.full
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


@pytest.mark.full
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


@pytest.mark.full
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


@pytest.mark.full
def test_what_the_registry_does_not_have(registry: str, store: ImageStore) -> None:
    for name in ("team/small:2", "nothing:1", f"team/small@sha256:{'0' * 64}"):
        with pytest.raises(ImageNotFound):
            pull(f"{registry}/{name}", store=store)
    with pytest.raises(RegistryError, match="cannot be reached"):
        pull("127.0.0.1:1/none", store=store)
    assert [] == store.images()


@pytest.mark.full
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
    keys: list[str | None] = []  # noqa: RUF012
    encodings: list[str | None] = []  # noqa: RUF012
    wants = ""
    """The challenge for requests without a key."""
    status = 200
    has_ranges = False
    storage = ""
    """Where blobs are, if it is not here."""

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.keys.append(self.headers.get("authorization"))
        self.encodings.append(self.headers.get("accept-encoding"))
        data = self.blobs.get(self.path.rpartition("/")[2].partition("?")[0])
        is_asked = self.wants and not self.keys[-1] and "/v2/" in self.path
        if self.storage and "/blobs/" in self.path:
            self.send_response(307)
            self.send_header("location", f"{self.storage}/{self.path.rpartition('/')[2]}")
            self.send_header("content-length", "0")
            self.end_headers()
            return
        begin = int(self.headers.get("range", "bytes=0-")[6:-1]) if self.has_ranges else 0
        data = data[begin:] if data else data
        status = 206 if begin else self.status
        self.send_response(401 if is_asked else 404 if data is None else status)
        if is_asked:
            self.send_header("www-authenticate", self.wants)
        self.send_header("content-length", str(len(data or b"")))
        self.end_headers()
        self.wfile.write(data or b"")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def liar() -> Iterator[str]:
    """A registry that serves `_Liar.blobs`, whatever their digests."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Liar) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
        for each in (_Liar.blobs, _Liar.asked, _Liar.keys, _Liar.encodings):
            each.clear()
        _Liar.wants, _Liar.status, _Liar.has_ranges, _Liar.storage = "", 200, False, ""


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


@pytest.mark.parametrize("is_whole", [False, True])
def test_what_has_come_is_not_asked_for_again(liar: str, store: ImageStore, is_whole: bool) -> None:
    """Of a blob that is here but for its name nothing is asked for at all."""
    _serve(made := small())
    blob, _Liar.has_ranges = made.blobs[0], True
    partial = Path(f"{store.blob(digest_of(blob))}.partial")
    partial.write_bytes(blob if is_whole else blob[:1000])
    told: list[tuple[str, int, int]] = []

    pull(f"{liar}/x:1", store=store, progress=lambda *each: told.append(each))
    name = digest_of(blob)[7:19]
    sizes = [each[1] for each in told if each[0] == name]
    assert (not is_whole) == any(digest_of(blob) in each for each in _Liar.asked) == bool(sizes)
    assert not partial.exists()
    if not is_whole:
        assert 1000 < sizes[0] <= sizes[-1] == len(blob)
        assert {len(blob)} == {each[2] for each in told if each[0] == name}
        del told[:]
    _Liar.blobs[digest_of(made.blobs[1])] = b"x" * len(made.blobs[1])
    path = Path(store.blob(digest_of(made.blobs[1])))
    path.unlink()
    with pytest.raises(ImageRefused, match="does not match"):
        pull(f"{liar}/x:1", store=store)
    assert not path.exists()
    assert not Path(f"{path}.partial").exists(), "what is not right is not gone on with"


def test_blobs_may_be_elsewhere_and_no_key_is_sent_there(liar: str, store: ImageStore) -> None:
    _serve(small())
    _Liar.blobs["tokens"] = b'{"token": "secret"}'
    _Liar.wants = f'Bearer realm="http://{liar}/tokens"'
    _Liar.storage = f"http://{liar.replace('127.0.0.1', 'localhost')}/stored"

    pull(f"{liar}/x:1", store=store)
    keys = {(path.split("/")[1], key) for path, key in zip(_Liar.asked, _Liar.keys, strict=True)}
    assert {("v2", "Bearer secret"), ("stored", None)} <= keys
    assert ("stored", "Bearer secret") not in keys


@pytest.mark.parametrize("told", [b"<html>", b"[]", b"{}", b'{"token": 7}', b"[" * 100_000])
def test_a_realm_that_gives_no_token_is_an_error_of_the_registry(
    liar: str, store: ImageStore, told: bytes
) -> None:
    _serve(small())
    _Liar.blobs["tokens"] = told
    _Liar.wants = f'Bearer realm="http://{liar}/tokens"'

    with pytest.raises(RegistryError, match="gives no token") as refused:
        pull(f"{liar}/x:1", store=store)
    assert not refused.value.retryable
    assert 2 == len(_Liar.asked), "the manifest and the token, each once"


def test_a_registry_that_breaks_off_in_a_manifest_may_be_asked_again(store: ImageStore) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(RegistryError, match="broke off") as broken:
            pull(f"127.0.0.1:{server.getsockname()[1]}/x", store=store)
        thread.join()
    assert broken.value.retryable


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


@pytest.mark.parametrize("has_service", [False, True])
@pytest.mark.parametrize("name", ["token", "access_token"])
def test_a_token_is_asked_for_where_the_registry_says(
    liar: str, store: ImageStore, name: str, has_service: bool
) -> None:
    _serve(small())
    _Liar.blobs["tokens"] = json.dumps({name: "secret"}).encode()
    service = ',service="here"' if has_service else ""
    _Liar.wants = f'Bearer realm="http://{liar}/tokens"{service}'

    pull(f"{liar}/team/x:1", store=store, credentials=("user", "password"))

    (asked,) = (each for each in _Liar.asked if "/tokens" in each)
    parts = parse_qs(urlsplit(asked).query)
    assert ["repository:team/x:pull"] == parts["scope"]
    assert (["here"] if has_service else None) == parts.get("service")
    basic = f"Basic {base64.b64encode(b'user:password').decode()}"
    first, to_the_realm, *rest = _Liar.keys
    assert (None, basic, {"Bearer secret"}) == (first, to_the_realm, {*rest})


def test_a_scope_that_the_registry_names_is_asked_for(liar: str, store: ImageStore) -> None:
    _serve(small())
    _Liar.blobs["tokens"] = b'{"token": "secret"}'
    _Liar.wants = f'Bearer realm="http://{liar}/tokens",scope="all"'

    pull(f"{liar}/x:1", store=store)
    assert ["/tokens?scope=all"] == [each for each in _Liar.asked if "/tokens" in each]
    assert None is _Liar.keys[1], "without a password none is sent"


def test_a_password_is_sent_where_the_registry_asks_for_one(liar: str, store: ImageStore) -> None:
    _serve(small())
    _Liar.wants = 'Basic realm="x"'

    with pytest.raises(RegistryError, match="without a password"):
        pull(f"{liar}/x:1", store=store)
    pull(f"{liar}/x:1", store=store, credentials=("user", "password"))
    assert f"Basic {base64.b64encode(b'user:password').decode()}" == _Liar.keys[-1]


def test_a_password_is_the_given_one_or_that_of_the_users_files(
    liar: str, store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _serve(small())
    _Liar.wants = 'Basic realm="x"'
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))
    kept, given = (base64.b64encode(each).decode() for each in (b"ann:kept", b"bob:given"))
    for host, credentials, key in (
        ("other.example", None, None),
        (liar, None, f"Basic {kept}"),
        (liar, ("bob", "given"), f"Basic {given}"),
    ):
        (tmp_path / "auth.json").write_text(json.dumps({"auths": {host: {"auth": kept}}}))
        _Liar.keys.clear()
        if key is None:
            with pytest.raises(RegistryError, match="without a password"):
                pull(f"{liar}/x:1", store=store, credentials=credentials)
        else:
            pull(f"{liar}/x:1", store=store, credentials=credentials)
        assert key == _Liar.keys[-1]


@pytest.mark.parametrize(
    ("status", "retryable"), [(400, False), (403, False), (429, True), (500, True), (503, True)]
)
def test_what_the_registry_answers_says_whether_to_ask_again(
    liar: str, store: ImageStore, status: int, retryable: bool
) -> None:
    _serve(small())
    _Liar.status = status

    with pytest.raises(RegistryError) as refused:
        pull(f"{liar}/x:1", store=store)
    assert retryable == refused.value.retryable
    assert 1 == len(_Liar.asked)
    assert (403 == status) == ("docker login" in refused.value.hint)


@pytest.mark.parametrize(
    "challenge", ['Digest realm="{}"', 'Bearer realm="ftp://x/"', "Bearer", 'Bearer realm=""']
)
def test_a_challenge_that_is_not_known_is_not_answered(
    liar: str, store: ImageStore, challenge: str
) -> None:
    _serve(small())
    _Liar.blobs["tokens"] = b'{"token": "secret"}'
    _Liar.wants = challenge.format(f"http://{liar}/tokens")

    with pytest.raises(RegistryError, match="unknown authentication scheme") as refused:
        pull(f"{liar}/x:1", store=store, credentials=("user", "password"))
    assert not refused.value.retryable
    assert {None} == {*_Liar.keys}


def test_blobs_that_are_on_their_way_are_not_collected(liar: str, store: ImageStore) -> None:
    _serve(small())
    freed: list[int] = []
    pull(f"{liar}/x:1", store=store, progress=lambda *_: freed.append(store.collect()[0]))

    assert {0} == {*freed}
    store.remove(f"{liar}/x:1")
    assert store.collect()[0] > 0, "the control"


def test_what_the_registry_lacks_is_not_found(liar: str, store: ImageStore) -> None:
    with pytest.raises(ImageNotFound):
        pull(f"{liar}/x:1", store=store)


def test_a_manifest_is_as_long_as_it_may_be_and_no_longer(
    liar: str, store: ImageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = small()
    _serve(made)
    for spare in (0, -1):
        monkeypatch.setattr("ringfence.images.manifest.MOST_BYTES", len(made.manifest) + spare)
        if spare:
            with pytest.raises(ImageRefused, match="too large"):
                pull(f"{liar}/x:1", store=store)
        else:
            pull(f"{liar}/x:1", store=store)


def test_layers_that_say_they_are_larger_than_any_are_not_fetched(
    liar: str, store: ImageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = small()
    _serve(made)
    size = sum(map(len, made.blobs))
    monkeypatch.setattr("ringfence.images.registry.MOST_BYTES", size - 1)
    with pytest.raises(ImageRefused, match="of layers"):
        pull(f"{liar}/x:1", store=store)
    assert 1 == len(_Liar.asked)
    monkeypatch.setattr("ringfence.images.registry.MOST_BYTES", size)
    pull(f"{liar}/x:1", store=store)


def test_a_blob_that_is_always_shorter_is_given_up(liar: str, store: ImageStore) -> None:
    _serve(made := small())
    digest = digest_of(made.blobs[0])
    _Liar.blobs[digest] = made.blobs[0][:-1]

    with pytest.raises(RegistryError, match="broke off 4 times"):
        pull(f"{liar}/x:1", store=store)
    assert 4 == sum(digest in each for each in _Liar.asked)


def test_a_blob_that_another_process_brings_is_not_fetched_too(
    liar: str, store: ImageStore
) -> None:
    _serve(made := small())
    path = Path(store.blob(digest_of(made.blobs[0])))
    partial = Path(f"{path}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    with partial.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        thread = threading.Thread(target=pull, args=(f"{liar}/x:1",), kwargs={"store": store})
        thread.start()
        while thread.is_alive() and not _somebody_waits_for(store):
            time.sleep(0.001)
        file.write(made.blobs[0])
        file.flush()
        partial.rename(path)
    thread.join()

    store.find(f"{liar}/x:1")
    assert not [each for each in _Liar.asked if path.name in each]
    assert not partial.exists()


def test_a_blob_that_came_before_its_lock_was_had_leaves_no_partial(
    liar: str, store: ImageStore
) -> None:
    _serve(made := small())
    blob = Descriptor(digest_of(made.blobs[0]), len(made.blobs[0]))
    path = Path(store.blob(blob.digest))
    partial = Path(f"{path}.partial")
    with Registry(Reference.parse(f"{liar}/x:1"), None, True) as registry:
        with partial.open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            thread = threading.Thread(target=registry.fetch, args=(blob, str(path), None))
            thread.start()
            while thread.is_alive() and not _somebody_waits_for(store):
                time.sleep(0.001)
            path.write_bytes(made.blobs[0])
        thread.join()
    assert [] == _Liar.asked
    assert not partial.exists()


@pytest.mark.parametrize(
    ("name", "is_plain", "url"),
    [
        ("localhost:5000/x:1", False, "http://localhost:5000/v2/x/"),
        ("127.0.0.1/x/y", False, "http://127.0.0.1/v2/x/y/"),
        ("[::1]:5000/x", False, "http://[::1]:5000/v2/x/"),
        ("ghcr.io/x", False, "https://ghcr.io/v2/x/"),
        ("localhost.example/x", False, "https://localhost.example/v2/x/"),
        ("ghcr.io/x", True, "http://ghcr.io/v2/x/"),
        ("x", False, "https://registry-1.docker.io/v2/library/x/"),
    ],
)
def test_only_registries_of_this_machine_are_asked_without_tls(
    name: str, is_plain: bool, url: str
) -> None:
    asked: list[str] = []
    with Registry(Reference.parse(name), None, is_plain) as registry:
        stream = registry._http.stream
        registry._http.stream = lambda _method, url, **_: asked.append(url)  # type: ignore[assignment]
        registry._once("manifests/1", {})
        registry._http.stream = stream  # type: ignore[method-assign]
    assert [f"{url}manifests/1"] == asked


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


@pytest.mark.parametrize("size", [100, 100_000], ids=["small", "large"])
def test_a_full_disk_is_told_as_one(liar: str, store: ImageStore, size: int) -> None:
    """A small blob is written when its file is closed."""
    _serve(made := Made([layer(Entry("x", os.urandom(size)))]))
    partial = Path(f"{store.blob(digest_of(made.blobs[0]))}.partial")
    partial.symlink_to("/dev/full")

    with pytest.raises(StorageFull, match="No space left") as full:
        pull(f"{liar}/x:1", store=store)

    assert "free disk space" in str(full.value.hint)
    partial.unlink()
    assert pull(f"{liar}/x:1", store=store).id == store.find(f"{liar}/x:1").id


def test_blobs_are_asked_for_as_they_are(liar: str, store: ImageStore) -> None:
    """A blob that came compressed once more would not be what its digest says."""
    _serve(made := small())
    pull(f"{liar}/x:1", store=store)

    encodings = dict(zip(_Liar.asked, _Liar.encodings, strict=True))
    for data in (made.configuration, *made.blobs):
        assert "identity" == encodings[f"/v2/x/blobs/{digest_of(data)}"]


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
