"""What a built template adds to a spec: mounts of its files, its variables, and the hold on them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ringfence.environments.apply import COPIES, FONTS, VENV, apply, find, short_name
from ringfence.errors import InvalidRequest
from ringfence.images.store import ImageStore
from ringfence.model.image import Image
from ringfence.model.mount import READ_ONLY, READ_WRITE, Mount
from ringfence.model.spec import SandboxSpec

pytestmark = pytest.mark.anyone


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(str(tmp_path / "templates"))


def made(store: ImageStore, name: str, *places: str, **config: object) -> Image:
    """A template with empty files at these places."""
    image = store.name(store.scratch(json.dumps({"config": config}).encode()), name)
    for place in places:
        path = Path(store.root(image) + place)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return image


def shown(spec: SandboxSpec) -> list[tuple[str, str]]:
    return [(each.target, each.source) for each in spec.mounts]


def is_held(fd: int, store: ImageStore, image: Image) -> bool:
    return os.path.samefile(f"/proc/self/fd/{fd}", os.path.join(store.root(image), "..", "image"))


def test_a_spec_without_a_template_is_left_alone(store: ImageStore) -> None:
    for spec in (SandboxSpec(), SandboxSpec(image="alpine")):
        assert (spec, -1) == apply(spec, store)


def test_its_files_are_mounted_where_they_are_and_its_variables_give_way(store: ImageStore) -> None:
    labels = {COPIES: json.dumps(["/srv/a", "/srv/gone"])}
    image = made(store, "one", f"{VENV}/x", "/srv/a", Labels=labels, Env=["A=1", "B=1"])
    root = os.path.realpath(store.root(image))
    own = Mount("/srv/mine", "/usr")

    spec, held = apply(SandboxSpec(template="one", env={"B": "2"}, mounts=(own,)), store)

    try:
        assert "default" == spec.template
        wanted = [(VENV, root + VENV), ("/srv/a", root + "/srv/a"), ("/srv/mine", "/usr")]
        assert wanted == shown(spec), "in this order: later ones lie over earlier ones"
        assert all(each.access != READ_WRITE for each in spec.mounts)
        assert ("1", "2") == (spec.env["A"], spec.env["B"])
        assert is_held(held, store, image)
    finally:
        os.close(held)


def test_fonts_are_listed_in_a_directory_that_can_be_written_to(store: ImageStore) -> None:
    image = made(store, "plots", f"{FONTS}/fontlist-2.json", f"{FONTS}/fontlist-1.json")
    root = os.path.realpath(store.root(image))

    spec, held = apply(SandboxSpec(template="plots"), store)

    os.close(held)
    lists = [f"{FONTS}/fontlist-{n}.json" for n in (1, 2)]
    assert [(FONTS, ""), *((each, root + each) for each in lists)] == shown(spec)
    assert [READ_WRITE, READ_ONLY, READ_ONLY] == [each.access for each in spec.mounts]
    assert () == spec.mounts[0].protect


def test_another_root_is_refused_and_nothing_is_held(store: ImageStore) -> None:
    made(store, "one", f"{VENV}/x")
    before = len(os.listdir("/proc/self/fd"))
    for field, value in (("image", "alpine"), ("python_env", True)):
        spec = SandboxSpec.from_json({"template": "one", field: value})
        with pytest.raises(InvalidRequest) as refused:
            apply(spec, store)
        assert field == refused.value.field
    with pytest.raises(InvalidRequest) as refused:
        apply(SandboxSpec(template="none"), store)
    assert ("template", True) == (refused.value.field, "template list" in refused.value.hint)
    same = (Mount(VENV, "/usr"),)
    with pytest.raises(InvalidRequest):
        apply(SandboxSpec(template="one", mounts=same), store)
    assert before == len(os.listdir("/proc/self/fd"))


def test_one_is_found_by_its_name_and_its_id(store: ImageStore) -> None:
    image = made(store, "one")

    assert image == find("one", store) == find("one:latest", store)
    assert image.id == find(image.id, store).id
    assert ("one", "one:v2") == (short_name(image), short_name(made(store, "one:v2")))
    with pytest.raises(InvalidRequest):
        find("sha256:" + "0" * 64, store)


@pytest.mark.parametrize("copies", ["[", '["relative"]', '["/proc/x"]'])
def test_one_whose_record_is_wrong_is_not_held(copies: str, store: ImageStore) -> None:
    image = made(store, "odd", "/proc/x", Labels={COPIES: copies})
    (Path(store.root(image)) / "x").touch()
    os.symlink("x", f"{store.root(image)}relative")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError if copies == "[" else InvalidRequest):
        apply(SandboxSpec(template="odd"), store)
    assert before == len(os.listdir("/proc/self/fd"))


def test_a_template_is_found_by_its_id_in_a_spec_too(store: ImageStore) -> None:
    image = made(store, "one", f"{VENV}/x")
    spec, held = apply(SandboxSpec(template=image.id), store)
    os.close(held)
    assert [VENV] == [each.target for each in spec.mounts]
