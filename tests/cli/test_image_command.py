"""`image` and its options of `run`: which verb does what to the store, and when an image is fetched."""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ringfence.cli import image
from ringfence.cli.commands import IMAGE
from ringfence.errors import ImageNotFound, InvalidRequest
from ringfence.images.store import ImageStore
from tests.images.making import Entry, Made, layer

pytestmark = pytest.mark.anyone

Capture = pytest.CaptureFixture[str]


@pytest.fixture(name="store")
def fixture_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageStore:
    monkeypatch.setenv("RINGFENCE_IMAGES", str(tmp_path / "images"))
    return ImageStore()


@pytest.fixture(name="layouts")
def fixture_layouts(tmp_path: Path) -> list[str]:
    """Two images."""
    return [
        Made([layer(Entry("file", name.encode()))], {"Cmd": [name]}).as_layout(tmp_path / name)
        for name in ("one", "two")
    ]


@pytest.fixture(name="fetched")
def fixture_fetched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was asked of a registry; what it gives is no image."""
    found: list[Any] = []

    def fetch(name: str, _store: Any, credentials: Any, *, plain_http: bool) -> Any:
        found.append((name, credentials, plain_http))
        return "fetched"

    monkeypatch.setattr(image, "_fetch", fetch)
    return found


def test_an_image_from_its_arrival_to_its_removal(
    store: ImageStore, layouts: list[str], capsys: Capture
) -> None:
    def told(*words: str) -> str:
        assert 0 == image.main(words)
        return capsys.readouterr().out

    for layout, name in zip(layouts, ("one:1", "two:1"), strict=True):
        made = json.loads(told("load", "--json", layout, name))
        assert store.find(name).id == made["id"]
    ids = [each.id for each in store.images()]
    assert [each.id for each in store.images()] == [
        each["id"] for each in json.loads(told("list", "--json"))
    ]
    head, *rows = told("list").splitlines()
    assert ["NAME", "ID", "SIZE", "AGE"] == head.split()
    assert sorted(each[7:19] for each in ids) == sorted(row.split()[1] for row in rows)
    assert "one:1" in json.loads(told("remove", "--json", "one:1"))["removed"]
    with pytest.raises(ImageNotFound):
        store.find("one:1")
    assert store.find("two:1").id in ids
    assert 0 < json.loads(told("prune", "--json"))["freed_bytes"]
    assert {"freed_bytes": 0, "in_use": []} == json.loads(told("--json", "prune"))
    assert store.find("two:1").id in ids
    assert "freed 0 B\n" == told("prune")
    with pytest.raises(ImageNotFound):
        image.main(["remove", "one:1"])


@pytest.mark.parametrize(
    "words",
    [
        ["list", "x"],
        ["pull"],
        ["pull", "a", "b"],
        ["load", "a"],
        ["remove"],
        ["prune", "x"],
        ["pul", "x"],
    ],
)
def test_a_verb_has_its_words_and_no_more(
    words: list[str], store: ImageStore, fetched: list[Any]
) -> None:
    with pytest.raises(InvalidRequest):
        image.main(words)
    assert [] == fetched
    assert not Path(store.directory).exists()


def test_without_a_verb_the_help_is_a_mistake(capsys: Capture) -> None:
    assert (125, 0) == (image.main([]), image.main(["--help"]))
    first, second = capsys.readouterr().out.split("ringfence image")[1:3]
    assert first
    assert second


@pytest.mark.parametrize(
    ("policy", "is_there", "result"),
    [
        (None, True, "found"), (None, False, "fetched"), ("missing", True, "found"),
        ("missing", False, "fetched"), ("always", True, "fetched"), ("always", False, "fetched"),
        ("never", True, "found"), ("never", False, ImageNotFound), ("newer", True, InvalidRequest),
    ],
)  # fmt: skip
def test_an_image_is_fetched_as_pull_says(
    policy: str | None,
    is_there: bool,
    result: Any,
    store: ImageStore,
    layouts: list[str],
    fetched: list[Any],
) -> None:
    if is_there:
        image.main(["load", layouts[0], "one:1"])
    given = {"image": "one:1"} | ({"pull": policy} if policy else {})
    if not isinstance(result, str):
        with pytest.raises(result):
            image.needed(given)
        assert [] == fetched
        return
    found: Any = image.needed(given)
    if result == "fetched":
        assert ("fetched", [("one:1", None, False)]) == (found, fetched)
    else:
        assert ([], store.find("one:1").id) == (fetched, found.id)
    with pytest.raises(InvalidRequest, match="needs --image"):
        image.needed({"pull": "always"})


def test_the_command_is_the_callers_or_that_of_the_image(
    store: ImageStore, layouts: list[str], tmp_path: Path
) -> None:
    image.main(["load", layouts[0], "one:1"])
    image.main(["load", Made([layer(Entry("f"))]).as_layout(tmp_path / "bare"), "bare:1"])
    assert ["one"] == image.command_of({"image": "one:1"}, [])
    assert ["mine"] == image.command_of({"image": "one:1"}, ["mine"])
    assert ["mine"] == image.command_of({"image": "bare:1"}, ["mine"])
    with pytest.raises(InvalidRequest, match="names no command"):
        image.command_of({"image": "bare:1"}, [])


@pytest.mark.parametrize(
    ("options", "line", "credentials"),
    [
        ([], "", None),
        (["--user", "me:secret"], "", ("me", "secret")),
        (["--user", "me:se:cret"], "", ("me", "se:cret")),
        (["--user", "me:"], "", ("me", "")),
        (["--user", "me", "--password-stdin"], "secret \r\nmore\n", ("me", "secret ")),
        (["--user", "me", "--password-stdin"], "secret", ("me", "secret")),
        (["--user", "me"], "secret\n", "--user"),
        (["--password-stdin"], "secret\n", "--password-stdin"),
        (["--user", "me:x", "--password-stdin"], "secret\n", "--password-stdin"),
        (["--user", "me", "--password-stdin"], "\n", "--password-stdin"),
        (["--user", "me", "--password-stdin"], "", "--password-stdin"),
    ],
)
def test_a_password_is_taken_from_one_place(
    options: list[str], line: str, credentials: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(line))
    given, words = image.parse_all(IMAGE, ["pull", *options, "name"])
    assert ["pull", "name"] == words
    if isinstance(credentials, str):
        with pytest.raises(InvalidRequest) as refused:
            image._credentials(given)
        assert credentials == refused.value.field
        assert "secret" not in str(refused.value)
    else:
        assert credentials == image._credentials(given)


@pytest.mark.parametrize("plain", [False, True])
def test_a_registry_without_tls_is_asked_for(
    plain: bool, monkeypatch: pytest.MonkeyPatch, fetched: list[Any]
) -> None:
    monkeypatch.setattr(image, "_say_one", lambda *_: None)
    assert 0 == image.main(["pull", "name", *["--plain-http"] * plain, "--user", "a:b"])
    assert [("name", ("a", "b"), plain)] == fetched


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1 << 20, "1.0 MiB"), ((1 << 20) - 1, "1024.0 KiB"),
        (1 << 30, "1.0 GiB"), (1 << 40, "1024.0 GiB"),
    ],
)  # fmt: skip
def test_a_size_has_its_unit(count: int, text: str) -> None:
    assert text == image.text_of_size(count)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5.0, "0 s"), (59.0, "59 s"), (60.0, "1 min"), (3599.0, "60 min"), (3600.0, "1 h"), (86399.0, "24 h"),
        (86400.0, "1 d"), (864000.0, "10 d"),
    ],
)  # fmt: skip
def test_an_age_has_its_unit(seconds: float, text: str) -> None:
    assert text == image.text_of_age(seconds)


def test_the_bar_is_drawn_seldom_and_at_the_end(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([10.0, 10.05, 10.06, 10.2, 10.21])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    bar = image._Bar()
    for done in (0, 50, 100, 60, 61):
        bar("blob", done, 100)
    bar.clear()
    drawn = capsys.readouterr().err
    assert ["0 B", "100 B", "60 B"] == [
        each.split("] ")[1].split(" of")[0] for each in drawn.split("\r\x1b[K") if each
    ]
    assert drawn.endswith("\r\x1b[K")
    assert "#" * 30 in drawn


def test_a_table_steers_no_terminal(capsys: Capture) -> None:
    image.print_table([("NAME", "OWNER"), ("a", "x\x1b[2J\ny"), ("bcd", "z")])
    assert "NAME  OWNER\na     x?[2J?y\nbcd   z\n" == capsys.readouterr().out


def test_the_bar_goes_also_where_nothing_could_be_fetched(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, store: ImageStore
) -> None:
    from ringfence.images import registry

    def pull(_name: str, *, progress: Any, **_how: Any) -> None:
        progress("blob", 1, 2)
        raise ImageNotFound("no such image")

    monkeypatch.setattr(registry, "pull", pull)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with pytest.raises(ImageNotFound):
        image._fetch("one", store, None, plain_http=False)
    drawn = capsys.readouterr().err
    assert ("blob [" in drawn, True) == (True, drawn.endswith("\r\x1b[K"))
