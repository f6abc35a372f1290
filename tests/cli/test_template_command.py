"""`ringfence template`: its verbs here and at a server, the steps of a build, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.cli import template as command
from ringfence.environments.apply import store_of
from ringfence.errors import InvalidRequest
from ringfence.images.archive import load
from ringfence.model.spec import SandboxSpec
from ringfence.model.template import TemplateView
from ringfence.sandbox.template import Template
from tests.client.scripted import Answer, Request, as_json, served
from tests.images.making import Entry, Made, layer

pytestmark = pytest.mark.anyone


@pytest.fixture(autouse=True)
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFENCE_IMAGES", str(tmp_path / "images"))


class Builds:
    """What is built, in place of pip and sandboxes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[tuple[list[Any], tuple[str, ...], dict[str, Any]]] = []

        def build(template: Template, *names: str, **options: Any) -> Any:
            plan: Any = template._plan
            keys = [dict(getattr(step, "key", step)) for step in plan]
            self.done.append((keys, names, options))
            return SimpleNamespace(
                id=f"sha256:{'0' * 64}", reference="docker.io/library/ds:latest", size_bytes=7,
                created_at=1.0, name="ds", to_json=lambda: {"name": "ds"},
            )  # fmt: skip

        monkeypatch.setattr(Template, "build", build)


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> Builds:
    return Builds(monkeypatch)


@pytest.mark.parametrize(
    ("argv", "field", "hint"),
    [
        (["build"], "NAME", ""),
        (["remove"], "NAME", ""),
        (["build", "ds", "pandas"], "ARGUMENT", "did you mean --pip pandas?"),
        (["remove", "a", "b"], "ARGUMENT", "remove 'b'"),
        (["list", "a"], "ARGUMENT", "remove 'a'"),
        (["prune", "a"], "ARGUMENT", "remove 'a'"),
        (["build", "ds"], "pip", "add --pip"),
        (["build", "ds", "--copy", "data"], "copy", "as data:/srv/data"),
        (["build", "ds", "--copy", ":/srv"], "copy", "as data:/srv/data"),
        (["prune", "--server", "unix:/s"], "server", "omit --server"),
        (["remove", "none"], "template", "lists templates"),
    ],
)
def test_what_is_no_command_is_refused(
    argv: list[str], field: str, hint: str, builds: Builds
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        command.main(argv)
    assert field == refused.value.field
    assert hint in refused.value.hint
    assert [] == builds.done


def test_a_build_has_its_steps_in_an_order_of_their_own(
    builds: Builds, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Copies come first, then packages, then scripts; the last colon of a copy divides it."""
    (tmp_path / "a:b").mkdir()
    argv = ["build", "ds", "--run", "true", "--pip", "pandas", "--pip", "numpy<3"]
    argv += ["--find-links", str(tmp_path), "--copy", f"{tmp_path}/a:b:/srv/b"]
    assert 0 == command.main(argv)
    ((steps, names, options),) = builds.done
    assert (("ds",), False) == (names, "server" in options)
    kinds = [
        "copy" if "/srv/b" in str(each) else "pip" if "pandas" in str(each) else
        "run" if "true" in str(each.get("argv", each.get("run", ""))) else "more"
        for each in steps
    ]  # fmt: skip
    assert ["copy", "pip", "more", "run"] == kinds
    assert "numpy<3" in str(steps[1])
    assert str(tmp_path) in str(steps[1])
    assert "built ds\n" == capfd.readouterr().out
    assert 0 == command.main(["--json", *argv])
    assert {"name": "ds", "id": f"sha256:{'0' * 64}", "size_bytes": 7, "created_at": 1.0} == (
        json.loads(capfd.readouterr().out)
    )


@pytest.mark.parametrize("shows", [True, False])
def test_packages_of_a_run_are_a_template_without_a_name(
    builds: Builds, shows: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    spec = SandboxSpec(workdir="/tmp")
    found = command.with_packages(spec, ["pandas"], shows_output=shows)
    assert (f"sha256:{'0' * 64}", "/tmp") == (found.template, found.workdir)
    ((_, names, options),) = builds.done
    assert () == names
    if shows:
        options["on_output"](b"from pip")
    else:
        assert options["on_output"] is None
    assert ("", "from pip" if shows else "") == tuple(capfd.readouterr())
    for other, field in (
        (SandboxSpec(template="ds"), "template"),
        (SandboxSpec(image="x"), "image"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            command.with_packages(other, ["pandas"], shows_output=shows)
        assert field == refused.value.field
    assert 1 == len(builds.done)


def test_templates_here_are_listed_removed_and_their_files_freed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made = Made([layer(Entry("file", b"1234567"))])
    image = load(made.as_layout(tmp_path / "layout"), "ds", store=store_of())

    def told(*argv: str) -> str:
        assert 0 == command.main(argv)
        return capfd.readouterr().out

    head, row = told("list").splitlines()
    assert ["NAME", "ID", "SIZE", "AGE"] == head.split()
    assert ["ds", image.id[7:19], "7", "B"] == row.split()[:4]
    (form,) = json.loads(told("list", "--json"))
    assert ("ds", image.id, 7) == (form["name"], form["id"], form["size_bytes"])
    assert {"freed_bytes": 0, "in_use": []} == json.loads(told("prune", "--json"))
    held = store_of().hold(image)
    with open(held):
        assert "removed ds; `ringfence template prune` frees its files\n" == told("remove", "ds")
        assert [] == json.loads(told("list", "--json"))
        assert {"freed_bytes": 0, "in_use": [image.id]} == json.loads(told("prune", "--json"))
    assert told("prune").startswith("freed ")
    assert [] == store_of().images()


def view(name: str, owner: str, *, public: bool) -> dict[str, Any]:
    return TemplateView(
        f"tpl-{name}", name, owner, public, "ready", True, "b", size_bytes=7, updated_at=1.0
    ).to_json()


Ask = Callable[..., str]


@pytest.fixture
def ask(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Any:
    """Ask a server that has two templates; what is printed."""
    items = [view("ds", "ann", public=False), view("all", "root", public=True)]

    def script(request: Request) -> Answer:
        return as_json({"items": items}) if request.method == "GET" else Answer(b"", 204)

    with served(tmp_path / "s", script) as (_client, server):

        def told(*argv: str) -> str:
            assert 0 == command.main([*argv, "--server", f"unix:{tmp_path}/s"])
            return capfd.readouterr().out

        yield told, server


def test_templates_of_a_server_are_its_own(ask: tuple[Ask, Any], builds: Builds) -> None:
    told, server = ask
    head, ds, shared = told("list").splitlines()
    assert ["NAME", "OWNER", "STATUS", "SIZE", "AGE"] == head.split()
    assert ["ds", "ann", "ready"] == ds.split()[:3]
    assert ["all", "root", "(public)", "ready"] == shared.split()[:4]
    assert ["tpl-ds", "tpl-all"] == [each["id"] for each in json.loads(told("list", "--json"))]
    assert "removed ds\n" == told("remove", "ds")
    assert {"removed": "ds"} == json.loads(told("remove", "ds", "--json"))
    assert ["DELETE ds"] * 2 == server.asked[-2:]
    assert "built ds\n" == told("build", "ds", "--pip", "pandas")
    assert {"name": "ds"} == json.loads(told("build", "ds", "--pip", "pandas", "--json"))
    assert [True, True] == ["server" in options for _, _, options in builds.done]
    assert [] == store_of().images()
