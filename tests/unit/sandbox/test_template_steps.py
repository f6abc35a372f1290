"""What a step of a template is known by, and templates that need no sandbox to be built."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence import Limits, Sandbox, Template
from ringfence.environments.apply import COPIES
from ringfence.errors import FileNotFound, InvalidRequest
from ringfence.images.store import ImageStore
from ringfence.sandbox import template as module
from ringfence.sandbox.template import _digest_of, _key, _merged, _Step

pytestmark = pytest.mark.anyone


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(str(tmp_path / "store"))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    made = tmp_path / "files"
    (made / "sub").mkdir(parents=True)
    (made / "file").write_text("content")
    (made / "link").symlink_to("file")
    (made / "link 2").symlink_to("sub")
    (made / "file").chmod(0o644)
    return made


def key_of(template: Template, *, image: str = "sha256:1", **changes: Any) -> str:
    step = template._plan[-1]
    assert isinstance(step, _Step)
    like: Any = type("Like", (), {"id": image})
    return _key(like, changes, step)


def test_a_step_is_known_by_all_that_it_can_see() -> None:
    base = Template.from_image("x").run("true")
    own = key_of(base)
    others = [
        key_of(base, image="sha256:2"),
        key_of(base, Env={"A": "1"}),
        key_of(Template.from_image("x").run("false")),
        key_of(Template.from_image("x").run(["true"])),
        *(
            key_of(Template.from_image("x").run("true", **options))
            for options in (
                {"network": ["example.com"]},
                {"mounts": "/srv:/data"},
                {"user": "other"},
                {"env": {"A": "1"}},
                {"workdir": "/tmp"},
            )
        ),
    ]
    assert len({own, *others}) == 1 + len(others)
    assert own == key_of(Template.from_image("y").run("true"))
    for options in ({"limits": Limits(pids=9)}, {"network": "none"}, {"mounts": ()}):
        assert own == key_of(Template.from_image("x").run("true", **options)), options
    # What a host's step takes for its own time is none of what it sees.
    host = Template.from_host()
    assert key_of(host.run("true")) == key_of(host.run("true", timeout_s=5.0))


def _swap(one: Path, other: Path) -> None:
    """Let two links lead to where the other one did."""
    leads = [os.readlink(each) for each in (one, other)]
    for each, to in zip((other, one), leads, strict=True):
        each.unlink()
        each.symlink_to(to)


_CHANGES: dict[str, Callable[[Path], object]] = {
    "content": lambda at: (at / "file").write_text("CONTENT"),
    "a mode": lambda at: (at / "file").chmod(0o755),
    "a name": lambda at: (at / "file").rename(at / "other"),
    "where links lead": lambda at: _swap(at / "link", at / "link 2"),
    "an empty directory": lambda at: (at / "sub/new").mkdir(),
    "a place": lambda at: (at / "file").rename(at / "sub/file"),
    "the mode of a directory": lambda at: (at / "sub").chmod(0o700),
}


@pytest.mark.parametrize("what", _CHANGES)
def test_what_is_copied_is_known_by_names_modes_and_bytes(files: Path, what: str) -> None:
    before = _digest_of(str(files))
    os.utime(files / "file", (1, 1))
    assert before == _digest_of(str(files))
    keys = [key_of(Template.from_host().copy(str(files), "/data")) for _ in range(2)]
    _CHANGES[what](files)
    assert before != _digest_of(str(files))
    keys.append(key_of(Template.from_host().copy(str(files), "/data")))
    assert keys[0] == keys[1] != keys[2]


def test_content_and_names_are_not_taken_for_one_another(tmp_path: Path) -> None:
    for at, written in (("one", {"a": "x", "b": ""}), ("two", {"a": "", "b": "x"})):
        (tmp_path / at).mkdir()
        for name, text in written.items():
            (tmp_path / at / name).write_text(text)
    assert _digest_of(str(tmp_path / "one")) != _digest_of(str(tmp_path / "two"))
    piece = module._PIECE
    long, other = bytes(piece + 1), bytes(piece) + b"x"
    (tmp_path / "long").write_bytes(long)
    (tmp_path / "other").write_bytes(other)
    assert _digest_of(str(tmp_path / "long")) != _digest_of(str(tmp_path / "other"))
    with pytest.raises(FileNotFound) as refused:
        _digest_of(str(tmp_path / "none"))
    assert str(tmp_path / "none") == refused.value.path


def test_wheels_are_read_again_where_a_step_finds_them(tmp_path: Path) -> None:
    def key() -> str:
        step = Template.from_host().pip_install("a", find_links=str(tmp_path))._plan[0]
        assert isinstance(step, _Step)
        like: Any = type("Like", (), {"id": "sha256:1"})
        return _key(like, {}, step)

    before = key()
    assert before == key()
    (tmp_path / "a-1-py3-none-any.whl").write_text("wheel")
    assert before != key()


def test_variables_add_up_and_the_last_of_anything_else_holds() -> None:
    first = {"Env": {"A": "1", "B": "1"}, "User": "one"}
    merged = _merged(first, {"Env": {"B": "2"}, "WorkingDir": "/x"})
    assert {"Env": {"A": "1", "B": "2"}, "User": "one", "WorkingDir": "/x"} == merged
    assert {"Env": {"A": "1", "B": "1"}, "User": "two"} == _merged(first, {"User": "two"})
    assert {"A": "1", "B": "1"} == first["Env"]


def test_what_is_a_property_of_images_is_refused_over_the_hosts_files() -> None:
    host, image = Template.from_host(), Template.from_image("x")
    for name, value in (("workdir", "/x"), ("user", "u"), ("command", "true")):
        with pytest.raises(InvalidRequest) as refused:
            getattr(host, name)(value)
        assert name == refused.value.field
        assert getattr(image, name)(value)._plan
    with pytest.raises(TypeError, match="from_host"):
        Template()
    with pytest.raises(InvalidRequest, match="means no template"):
        host.build("default")


def test_a_step_has_no_network_and_pip_only_its_index() -> None:
    for base in (Template.from_host(), Template.from_image("x")):
        step = base.run("true")._plan[0]
        assert isinstance(step, _Step)
        assert "none" == step.options["network"]
        own = base.run("true", network=["a.example"])._plan[0]
        assert isinstance(own, _Step)
        assert ["a.example"] == own.options["network"]
        pip = base.pip_install("a", index_url="https://b.example/simple", timeout_s=3.0)._plan[0]
        assert isinstance(pip, _Step)
        assert ["b.example"] == pip.options["network"]
        ours = base.pip_install("a", network="none")._plan[0]
        assert isinstance(ours, _Step)
        assert "none" == ours.options["network"]
    whole = Template.from_host().pip_install("a", timeout_s=3.0)._plan
    assert isinstance(whole[0], _Step)
    assert isinstance(whole[1], _Step)
    assert 3.0 == whole[0].options["timeout_s"]
    assert {"fonts": True} == whole[1].key
    links = Template.from_image("x").pip_install("a", find_links="/w", mounts="/a:/b")._plan[0]
    assert isinstance(links, _Step)
    assert ["/a:/b", "/w:/mnt/find-links"] == links.options["mounts"]


def test_a_directory_at_the_end_of_a_copy_takes_it_in(files: Path) -> None:
    for base in (Template.from_host(), Template.from_image("x")):
        for target, at in (("/data/", "/data/file"), ("/data", "/data"), ("/", "/file")):
            step = base.copy(f"{files}/file", target)._plan[0]
            assert isinstance(step, _Step)
            assert (at, str(files / "file")) == (step.key["to"], step.key["copy"])
            assert os.path.dirname(at) == step.options["workdir"]
        with pytest.raises(InvalidRequest):
            base.copy(str(files), "data")


def test_copies_over_the_hosts_files_are_built_once_and_named(
    files: Path, store: ImageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []
    do = module._do

    def counted(step: Any, *arguments: Any, **options: Any) -> Any:
        done.append(step.key)
        return do(step, *arguments, **options)

    monkeypatch.setattr(module, "_do", counted)
    base = Template.from_host().env({"A": "1"}).copy(str(files), "/data").env({"B": "2"})
    first = base.build("one", store=store)
    assert 1 == len(done)
    assert ("1", "2") == (first.env["A"], first.env["B"])
    assert '["/data"]' == first.labels[COPIES]
    root = Path(store.root(first))
    assert "content" == (root / "data/file").read_text()
    again = base.build("two", store=store)
    assert (first.id, 1) == (again.id, len(done))
    more = base.copy(f"{files}/file", "/more").build(store=store)
    assert (2, '["/data", "/more"]') == (len(done), more.labels[COPIES])
    assert ("1", "2") == (more.env["A"], more.env["B"])
    assert "content" == (Path(store.root(more)) / "more").read_text()
    assert more.id == store.find(more.id).id


def test_a_step_of_an_image_has_its_timeout_for_its_command_and_not_for_its_sandbox(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server reads it from the options; `Sandbox.create` has no such one."""
    made: list[dict[str, Any]] = []

    class MadeError(Exception):
        pass

    def create(**options: Any) -> Any:
        made.append(options)
        raise MadeError

    monkeypatch.setattr(Sandbox, "create", create)
    step = Template.from_image("x").run("true", timeout_s=3.0, user="app")._plan[0]
    assert isinstance(step, _Step)
    assert 3.0 == step.options["timeout_s"]
    with pytest.raises(MadeError):
        module._save_layer(step, SimpleNamespace(id="sha256:1"), None, "layer")  # type: ignore[arg-type]
    assert [{"image": "sha256:1", "network": "none", "user": "app"}] == made
