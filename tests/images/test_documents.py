"""Names, manifests, configurations and archives of images: what is read of each, and what is refused."""

from __future__ import annotations

import errno
import io
import json
import os
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest

from ringfence.errors import ImageNotFound, ImageRefused, InvalidRequest, StorageFull
from ringfence.images import archive, config, manifest
from ringfence.images.config import account_of, architecture, place_of
from ringfence.images.reference import Reference, is_digest
from ringfence.images.store import ImageStore
from tests.images.making import Entry, Made, digest_of, layer

pytestmark = pytest.mark.anyone

DIGEST = f"sha256:{'0123456789abcdef' * 4}"
OTHER = f"sha256:{'f' * 64}"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("alpine", "docker.io/library/alpine:latest"),
        ("alpine:3.20", "docker.io/library/alpine:3.20"),
        ("owner/name", "docker.io/owner/name:latest"),
        ("index.docker.io/x", "docker.io/library/x:latest"),
        ("docker.io/x/y:1", "docker.io/x/y:1"),
        ("ghcr.io/owner/name", "ghcr.io/owner/name:latest"),
        ("localhost/x", "localhost/x:latest"),
        ("localhost:5000/x:1", "localhost:5000/x:1"),
        ("host:5000/x", "host:5000/x:latest"),
        ("[::1]:5000/x", "[::1]:5000/x:latest"),
        ("a/b/c", "docker.io/a/b/c:latest"),
        (f"x@{DIGEST}", f"docker.io/library/x@{DIGEST}"),
        (f"x:1@{DIGEST}", f"docker.io/library/x:1@{DIGEST}"),
        ("x:" + "y" * 128, "docker.io/library/x:" + "y" * 128),
        ("a.b_c__d---e", "docker.io/library/a.b_c__d---e:latest"),
        ("ghcr.io/x.tar", "ghcr.io/x.tar:latest"),
        ("x.tar:1", "docker.io/library/x.tar:1"),
        ("a" * 512, f"docker.io/library/{'a' * 512}:latest"),
    ],
)
def test_a_name_is_read_as_docker_reads_it(text: str, shown: str) -> None:
    found = Reference.parse(text)

    assert shown == str(found)
    assert (found.digest or found.tag) == found.wanted
    if len(shown) <= 512:
        assert found == Reference.parse(shown), "what is shown means the same"


@pytest.mark.parametrize(
    "text",
    [
        "", "UPPER", "a b", "x:", "x@", "x@sha256:12", f"x@{DIGEST}0", f"x@{DIGEST.upper()}", "-x",
        f"x@{DIGEST[:-1]}g", "x@md5:" + "0" * 32, "x/../y", "x//y", "/x", "x/", "http://x/y", "x..y",
        "x:" + "y" * 129, "x:-y", "x:a/b", "a" * 513, "host:99999999/x", "x\0y", "x\n", "x:1\n", "_x",
        "ho st.example/x", ".example/x", "x.tar", "x.tgz", "x.oci", "./x", "~/x", "x\\y", "x___y",
        f"x@{DIGEST}\n", "localhost:/x", "a.b-/x",
    ],
)  # fmt: skip
def test_what_names_no_image_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Reference.parse(text)
    assert "image" == refused.value.field


def test_a_digest_is_a_safe_name_of_a_file() -> None:
    assert is_digest(DIGEST)
    for wrong in (DIGEST[:-1], f"{DIGEST}0", f"{DIGEST}\n", DIGEST.upper(), DIGEST[7:], "../x", ""):
        assert not is_digest(wrong), wrong


# -- manifests -------------------------------------------------------------------------------------


def _index(*platforms: tuple[Any, ...]) -> bytes:
    listed = []
    for number, platform in enumerate(platforms):
        told = dict(zip(("os", "architecture"), platform, strict=False))
        digest = f"sha256:{number:064x}"
        listed.append({"digest": digest, "size": 1, "platform": told})
    return json.dumps({"schemaVersion": 2, "manifests": listed}).encode()


@pytest.mark.parametrize(
    ("platforms", "chosen"),
    [
        ([("linux", architecture())], 0),
        ([("linux", "s390x"), ("windows", architecture()), ("linux", architecture())], 2),
        ([("linux", "s390x"), ()], 1),
        ([("linux",), ("linux", architecture())], 0),
        ([("linux", "s390x")], None),
        ([("windows", architecture())], None),
        ([("windows",)], None),
        ([], None),
    ],
)
def test_an_index_has_an_image_for_this_machine_or_none(
    platforms: list[tuple[str, ...]], chosen: int | None
) -> None:
    if chosen is None:
        with pytest.raises(ImageNotFound):
            manifest.choose(_index(*platforms), "x")
    else:
        assert f"sha256:{chosen:064x}" == manifest.choose(_index(*platforms), "x")


def test_a_manifest_is_no_index() -> None:
    assert None is manifest.choose(b'{"layers": []}', "x")


def _manifest(**changes: Any) -> bytes:
    blob = {"digest": DIGEST, "size": 0}
    return json.dumps({"config": blob, "layers": [blob], **changes}).encode()


def test_a_manifest_has_as_many_layers_as_it_may_and_no_more() -> None:
    blob = {"digest": DIGEST, "size": 7}
    assert 512 == len(manifest.read(_manifest(layers=[blob] * 512)).layers)
    with pytest.raises(ImageRefused, match="513 layers"):
        manifest.read(_manifest(layers=[blob] * 513))
    assert manifest.Descriptor(DIGEST, 7) == manifest.read(_manifest(layers=[blob])).layers[0]


@pytest.mark.parametrize(
    "document",
    [
        b"", b"[]", b"{}", b'"x"', b'{"schemaVersion": 1}', _manifest(schemaVersion=1), b"[" * 100_000,
        _manifest(config=None), _manifest(layers=None), _manifest(layers=[1]), _manifest(config={}),
        *(
            _manifest(**{name: value if name == "config" else [value]})
            for name in ("config", "layers")
            for value in (
                {"digest": DIGEST, "size": -1}, {"digest": DIGEST, "size": "1"},
                {"digest": DIGEST, "size": 1.5}, {"digest": DIGEST}, {"size": 1},
                {"digest": 1, "size": 1}, {"digest": "../../etc/passwd", "size": 1},
                {"digest": f"{DIGEST}/../x", "size": 1},
            )
        ),
    ],
)  # fmt: skip
def test_manifests_that_cannot_be_read_are_refused(document: bytes) -> None:
    with pytest.raises(ImageRefused):
        manifest.read(document)


def test_digests_of_an_index_are_looked_at() -> None:
    document = json.dumps({"manifests": [{"digest": "../x", "size": 1}]}).encode()
    with pytest.raises(ImageRefused):
        manifest.choose(document, "x")


# -- configurations --------------------------------------------------------------------------------


def test_every_part_of_a_configuration_is_read() -> None:
    inner = {
        "User": "app:app", "WorkingDir": "/srv", "Env": ["A=b=c", "EMPTY=", "NAKED"],
        "Entrypoint": ["tool"], "Cmd": ["-x"], "Labels": {"l": "v"},
    }  # fmt: skip
    told = {"architecture": architecture(), "config": inner, "rootfs": {"diff_ids": [DIGEST]}}
    found = config.read(json.dumps(told).encode())

    assert (architecture(), (DIGEST,)) == (found.architecture, found.diff_ids)
    assert ("app:app", "/srv", ("tool",), ("-x",)) == (
        found.user,
        found.workdir,
        found.entrypoint,
        found.command,
    )
    assert ({"A": "b=c", "EMPTY": "", "NAKED": ""}, {"l": "v"}) == (found.env, found.labels)
    empty = config.read(b'{"config": null, "rootfs": {}}')
    assert ("/", "", {}, ()) == (empty.workdir, empty.user, empty.env, empty.command)


@pytest.mark.parametrize(
    "told",
    [
        [], 1, "x", {"config": 1}, {"config": [1]}, {"architecture": 1}, {"architecture": "s390x"},
        {"rootfs": 1}, {"rootfs": {"diff_ids": "x"}}, {"rootfs": {"diff_ids": [1]}},
        {"config": {"User": 0}}, {"config": {"User": "a\0b"}}, {"config": {"WorkingDir": ["/"]}},
        {"config": {"Env": "A=b"}}, {"config": {"Env": {"A": "b"}, "Cmd": 1}},
        {"config": {"Env": ["A=\0"]}}, {"config": {"Entrypoint": "tool"}}, {"config": {"Cmd": "x"}},
        {"config": {"Labels": ["x"]}}, {"config": {"Labels": {"l": 1}}}, {"config": {"Cmd": [1]}},
    ],
)  # fmt: skip
def test_configurations_that_cannot_be_read_are_refused(told: Any) -> None:
    with pytest.raises(ImageRefused):
        config.read(json.dumps(told).encode())


def test_a_configuration_is_no_deeper_than_can_be_read() -> None:
    for wrong in (b"[" * 100_000, b'{"config": ' * 100_000):
        with pytest.raises(ImageRefused, match="cannot be read"):
            config.read(wrong)


def test_a_configuration_is_as_long_as_it_may_be_and_no_longer() -> None:
    most = 4 << 20
    config.read(b"{}".ljust(most))
    with pytest.raises(ImageRefused, match="too large"):
        config.read(b"{}".ljust(most + 1))


def test_what_a_template_changes_is_added_to_what_there_is() -> None:
    base = {"config": {"Env": ["A=1", "B=2"], "User": "app"}, "rootfs": {"diff_ids": [DIGEST]}}
    changed = config.derived(
        json.dumps(base).encode(), {"Env": {"B": "3", "C": "4"}, "WorkingDir": "/srv"}, [OTHER]
    )
    found = config.read(changed)

    assert {"A": "1", "B": "3", "C": "4"} == found.env
    assert ("app", "/srv", (DIGEST, OTHER)) == (found.user, found.workdir, found.diff_ids)
    assert architecture() == found.architecture


PASSWD = (
    "root:x:0:0:root:/root:/bin/sh\napp:x:1234:1:::/bin/sh\nhome:x:7:7::/srv/app:/bin/sh\n"
    "up:x:8:8::/srv/../etc:/bin/sh\nbig:x:65535:1::/x:/bin/sh\nshort:x:9:9:\nodd:x:-1:1::/x:/bin/sh\n"
    "nobody:x:65534:65534::/none:/bin/sh\nsuper:x:²:1::/x:/bin/sh\n"
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "root"
    (made / "etc").mkdir(parents=True)
    (made / "etc" / "passwd").write_text(PASSWD)
    return made


@pytest.mark.parametrize(
    ("user", "account"),
    [
        ("", (0, "root", "/root")),
        ("0", (0, "root", "/root")),
        ("0:5", (0, "root", "/root")),
        ("app", (1234, "app", "/")),
        ("app:other", (1234, "app", "/")),
        ("1234", (1234, "app", "/")),
        ("home", (7, "home", "/srv/app")),
        ("up", (8, "up", "/")),
        ("4321", (4321, "4321", "/")),
        ("65534", (65534, "nobody", "/none")),
        ("65535", None),
        ("big", None),
        ("short", None),
        ("odd", None),
        ("super", None),
        ("²", None),
        ("none", None),
        ("-1", None),
    ],
)
def test_a_user_is_looked_up_in_the_image(
    root: Path, user: str, account: tuple[int, str, str] | None
) -> None:
    if account is None:
        with pytest.raises(InvalidRequest) as refused:
            account_of(user, str(root))
        assert "user" == refused.value.field
        assert (None, "/") == ((found := account_of(user, str(root), unknown=True)).uid, found.home)
    else:
        found = account_of(user, str(root))
        assert account == (found.uid, found.name, found.home)


def test_uids_that_no_list_has_are_taken_up_to_the_last(tmp_path: Path) -> None:
    assert 65534 == account_of("65534", str(tmp_path)).uid
    with pytest.raises(InvalidRequest, match="out of range"):
        account_of("65535", str(tmp_path))


def test_the_list_of_users_is_the_images_own(root: Path, tmp_path: Path) -> None:
    """A link in it leads nowhere else, and a FIFO in its place is not waited for."""
    (tmp_path / "outside").write_text("evil:x:66:66::/:/bin/sh\n")
    listed = root / "etc" / "passwd"
    for target in ("../../outside", str(tmp_path / "outside")):
        listed.unlink()
        listed.symlink_to(target)
        with pytest.raises(InvalidRequest):
            account_of("evil", str(root))
    assert (0, "/root") == ((found := account_of("root", str(root))).uid, found.home)
    (root / "real").write_text("inner:x:5:5::/in:/bin/sh\n")
    listed.unlink()
    listed.symlink_to("/real")
    assert 5 == account_of("inner", str(root)).uid
    listed.unlink()
    os.mkfifo(listed)
    before = len(os.listdir("/proc/self/fd"))
    assert 0 == account_of("0", str(root)).uid
    assert before == len(os.listdir("/proc/self/fd"))


def test_a_place_in_an_image_is_found_behind_its_links(root: Path) -> None:
    (root / "run" / "app").mkdir(parents=True)
    (root / "var").mkdir()
    (root / "var" / "run").symlink_to("/run")
    (root / "up").symlink_to("../../../run")
    before = len(os.listdir("/proc/self/fd"))

    assert {
        "/var/run/app": "/run/app",
        "/var/run/none/deeper": "/run/none/deeper",
        "/up/app": "/run/app",
        "/none": "/none",
        "/none/x/": "/none/x",
        "/": "/",
        "/run/": "/run",
    } == {path: place_of(path, str(root)) for path in (
        "/var/run/app", "/var/run/none/deeper", "/up/app", "/none", "/none/x/", "/", "/run/"
    )}  # fmt: skip
    assert before == len(os.listdir("/proc/self/fd"))


# -- archives --------------------------------------------------------------------------------------


def test_files_of_a_layout_are_below_it(tmp_path: Path) -> None:
    assert f"{tmp_path}/a/b" == archive._inside(str(tmp_path), "./a//b")
    assert f"{tmp_path}/..a" == archive._inside(str(tmp_path), "..a")
    for wrong in ("/a", "../a", "a/../b", "a\0", None, 1, ["a"]):
        with pytest.raises(ImageRefused, match="not a file of an image"):
            archive._inside(str(tmp_path), wrong)


def test_no_file_of_a_layout_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("x")
    (tmp_path / "link").symlink_to("plain")
    assert b"x" == archive._read(str(tmp_path), "plain")
    assert f"{tmp_path}/plain" == archive._there(str(tmp_path), "plain")
    for read in (archive._read, archive._there):
        with pytest.raises(ImageRefused, match="missing"):
            read(str(tmp_path), "link")


def test_a_document_of_a_layout_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(manifest.MOST_BYTES))
    assert manifest.MOST_BYTES == len(archive._read(str(tmp_path), "x"))
    (tmp_path / "x").write_bytes(bytes(manifest.MOST_BYTES + 1))
    with pytest.raises(ImageRefused, match="too large"):
        archive._read(str(tmp_path), "x")


def test_an_archive_is_bounded_and_has_plain_files_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, scratch = tmp_path / "x.tar", tmp_path / "scratch"
    file.write_bytes(
        layer(
            *(Entry("a", b"123"), Entry("d/b", b"45")),
            *(Entry(kind.decode(), kind=kind, link="/etc/passwd") for kind in (b"1", b"2", b"6")),
        )
    )
    monkeypatch.setattr(archive, "MOST_BYTES", 4)
    scratch.mkdir()
    with pytest.raises(ImageRefused, match="larger"):
        archive._unpack_archive(str(file), str(scratch))
    monkeypatch.setattr(archive, "MOST_BYTES", 5)
    (scratch / "a").unlink()
    archive._unpack_archive(str(file), str(scratch))
    assert {"a", "d"} == {*os.listdir(scratch)}
    assert "45" == (scratch / "d" / "b").read_text()


def test_an_archive_has_each_file_once(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(layer(Entry("a", b"1"), Entry("a", b"2")))
    with pytest.raises(ImageRefused, match="not an archive"):
        archive._unpack_archive(str(tmp_path / "x.tar"), str(tmp_path))


def test_a_directory_is_taken_without_what_a_kernel_makes(tmp_path: Path) -> None:
    root, store = tmp_path / "root", ImageStore(str(tmp_path / "store"))
    for name in ("proc/1", "sys/kernel", "dev/pts", "process/kept", "srv/proc/kept"):
        (root / name).mkdir(parents=True)
    found = Path(store.root(archive.load(str(root), "x", store=store)))

    assert [[], [], []] == [os.listdir(found / name) for name in ("proc", "sys", "dev")]
    assert (found / "process" / "kept").is_dir()
    assert (found / "srv" / "proc" / "kept").is_dir()


def test_an_index_may_name_another_one(tmp_path: Path) -> None:
    store = ImageStore(str(tmp_path / "store"))
    layout = Path(Made([layer(Entry("x", b"1"))]).as_layout(tmp_path / "layout"))
    for depth in range(5):
        index = (layout / "index.json").read_bytes()
        if depth < 4:
            image = archive.load(str(layout), "x", store=store)
            assert image.id == store.find("x").id
        else:
            with pytest.raises(ImageRefused):
                archive.load(str(layout), "x", store=store)
        (layout / "blobs" / "sha256" / digest_of(index)[7:]).write_bytes(index)
        told = [{"digest": digest_of(index), "size": len(index)}]
        (layout / "index.json").write_text(json.dumps({"manifests": told}))


def test_of_the_images_of_an_archive_the_named_one_is_taken(tmp_path: Path) -> None:
    store = ImageStore(str(tmp_path / "store"))
    content = layer(Entry("x", b"1"))
    configurations = [json.dumps({"config": {"User": str(n)}}).encode() for n in range(3)]
    listed = [
        {"Config": f"{n}.json", "RepoTags": tags, "Layers": ["layer.tar"]}
        for n, tags in enumerate((None, ["other:1"], ["mine:1", "also:1"]))
    ]
    (tmp_path / "x.tar").write_bytes(
        layer(
            Entry("manifest.json", json.dumps(listed).encode()),
            Entry("layer.tar", content),
            *(Entry(f"{n}.json", each) for n, each in enumerate(configurations)),
        )
    )
    found = {
        name: archive.load(str(tmp_path / "x.tar"), name, store=store).uid
        for name in ("also:1", "other:1", "third:1")
    }
    assert {"also:1": 2, "other:1": 1, "third:1": 0} == found


def test_blobs_of_a_layout_are_what_their_digests_say(tmp_path: Path) -> None:
    store = ImageStore(str(tmp_path / "store"))
    made = Made([layer(Entry("x", b"1"))])
    layout = Path(made.as_layout(tmp_path / "layout"))
    for data in (made.configuration, made.manifest, made.blobs[0]):
        blob = layout / "blobs" / "sha256" / digest_of(data)[7:]
        blob.write_bytes(data[:-1] + b"!")
        with pytest.raises(ImageRefused, match="should be"):
            archive.load(str(layout), "x", store=store)
        blob.unlink()
        blob.symlink_to("/etc/passwd")
        with pytest.raises(ImageRefused, match="is missing"):
            archive.load(str(layout), "x", store=store)
        blob.unlink()
        blob.write_bytes(data)
    assert not os.path.exists(store.directory), "nothing was made of any"
    image = archive.load(str(layout), "x", store=store)
    assert digest_of(made.manifest) == image.digest


def test_layers_of_an_archive_are_what_its_configuration_says(tmp_path: Path) -> None:
    """It names no digest of them anywhere else; also where the image is here already."""
    store = ImageStore(str(tmp_path / "store"))
    path = Path(Made([layer(Entry("x", b"old"))]).as_docker_archive(tmp_path / "x.tar", "x:1"))
    whole = path.read_bytes()
    damaged = whole.replace(b"old" + bytes(400), b"bad" + bytes(400))
    for data in (whole, damaged):
        path.write_bytes(data)
        if data == damaged:
            with pytest.raises(ImageRefused, match="should be"):
                archive.load(str(path), "x:1", store=store)
        else:
            image = archive.load(str(path), "x:1", store=store)
            assert "old" == Path(store.root(image), "x").read_text()
    assert image.id == store.find("x:1").id


@pytest.mark.parametrize(
    "members",
    [
        [Entry("manifest.json", b"[]")],
        [Entry("manifest.json", b"{}")],
        [Entry("manifest.json", b"[1]")],
        [Entry("manifest.json", b"{")],
        [Entry("manifest.json", b"[" * 100_000)],
        [Entry("manifest.json", b'[{"Config": "x"}]')],
        [Entry("manifest.json", b'[{"Config": "/etc/passwd", "Layers": []}]')],
        [Entry("manifest.json", b'[{"Config": "x", "Layers": ["../../x"]}]')],
        [Entry("manifest.json", b'[{"Config": "x", "Layers": ["none"]}]'), Entry("x", b"{}")],
        [Entry("../index.json", b"{}")],
        [Entry("nothing", b"")],
        [Entry("index.json", b"{}"), Entry("index.json", b"{}")],
        [Entry("index.json", b"{}"), Entry("index.json/x", b"{}")],
    ],
)
def test_archives_that_are_none_of_an_image_are_refused(
    members: list[Entry], tmp_path: Path
) -> None:
    store = ImageStore(str(tmp_path / "store"))
    (tmp_path / "x.tar").write_bytes(layer(*members))
    with pytest.raises(ImageRefused):
        archive.load(str(tmp_path / "x.tar"), "x", store=store)
    assert [] == store.images()


def test_what_no_image_can_be_made_of_is_said_at_once(tmp_path: Path) -> None:
    store = ImageStore(str(tmp_path / "store"))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("no archive")
    (tmp_path / "layout").mkdir()
    (tmp_path / "layout" / "oci-layout").write_text("{}")
    for name, error, said, hint in (
        ("none", InvalidRequest, "no such file", "docker save"),
        ("empty", InvalidRequest, "is empty", "debootstrap"),
        ("pipe", InvalidRequest, "neither a regular file nor a directory", ""),
        ("text", ImageRefused, "no complete tar", ""),
        ("layout", ImageRefused, "neither an OCI layout nor", ""),
    ):
        with pytest.raises(error, match=said) as refused:
            archive.load(str(tmp_path / name), "x", store=store)
        assert str(tmp_path / name) in str(refused.value)
        assert hint in str(getattr(refused.value, "hint", ""))
    with pytest.raises(InvalidRequest) as refused:
        archive.load(str(tmp_path / "text"), "NO NAME", store=store)
    assert "image" == refused.value.field
    assert not os.path.exists(store.directory)


@pytest.mark.parametrize(
    ("number", "error"), [(errno.EACCES, InvalidRequest), (errno.ENOSPC, StorageFull)]
)
def test_what_the_disk_says_is_an_error_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type
) -> None:
    """Nothing of what was taken apart stays."""
    store = ImageStore(str(tmp_path / "store"))
    made = Made([layer(Entry("x", b"1"))]).as_docker_archive(tmp_path / "x.tar", "x")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), "/there")

    with monkeypatch.context() as patch:
        patch.setattr(store, "add", fail)
        with pytest.raises(error, match="/there") as refused:
            archive.load(made, "x", store=store)
    assert getattr(refused.value, "hint", "")
    assert [] == os.listdir(tmp_path / "temporary")


def test_an_archive_writes_through_no_link(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (scratch := tmp_path / "scratch").mkdir()
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        Entry("up", kind=tarfile.SYMTYPE, link="../outside").add_to(tar)
        Entry("up/x", b"x").add_to(tar)
    (tmp_path / "x.tar").write_bytes(made.getvalue())
    archive._unpack_archive(str(tmp_path / "x.tar"), str(scratch))
    assert [] == os.listdir(tmp_path / "outside")
