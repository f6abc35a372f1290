"""A step over the host's files as its sandbox sees it: the commands, their limits, and the list of fonts."""

from __future__ import annotations

import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.backends.local.mounts import template
from ringfence.environments.apply import FONTS, VENV
from ringfence.errors import ExecError
from ringfence.model.limits import Limits
from ringfence.model.mount import Mount
from ringfence.sandbox import host_steps
from ringfence.sandbox.host_steps import pip_key

pytestmark = pytest.mark.anyone


class Inside:
    """A sandbox of a step, and what it was asked for.

    Args:
        fails: Number of the command that fails; 0: none.
    """

    def __init__(self, fails: int = 0) -> None:
        self.fails, self.created = fails, list[dict[str, Any]]()
        self.commands: list[tuple[list[str], dict[str, Any]]] = []
        self.spec = SimpleNamespace(limits=SimpleNamespace(disk_bytes=10))
        self.files = self
        self.found: list[Any] = []
        self.is_left = False

    def create(self, **options: Any) -> Inside:
        self.created.append(options)
        return self

    def __enter__(self) -> Inside:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.is_left = True

    def exec(self, argv: list[str], **options: Any) -> Any:
        self.commands.append(([*argv], options))
        is_ok = len(self.commands) != self.fails
        if (write := options.get("on_stdout")) and "max_output_bytes" in options:
            write(b"layer")
        return SimpleNamespace(
            ok=is_ok,
            timed_out=False,
            exit_code=0 if is_ok else 3,
            stderr_text="why",
            stdout_text="",
        )

    def list(self, path: str) -> list[Any]:
        assert FONTS == path
        return self.found

    def read(self, path: str, *, max_bytes: int) -> bytes:
        assert max_bytes == host_steps._MOST_FONTS
        return f"content of {path}".encode()


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> Inside:
    made = Inside()
    monkeypatch.setattr(host_steps, "Sandbox", made)
    return made


@pytest.fixture
def store(tmp_path: Path) -> Any:
    (tmp_path / "root").mkdir()
    return SimpleNamespace(directory=str(tmp_path), root=lambda _parent: str(tmp_path / "root"))


PARENT: Any = SimpleNamespace(labels={}, env={"A": "1"})
PIP = pip_key(["a"], "https://index.example/simple", None)


def do(inside: Inside, store: Any, key: Any, on_output: Any = None, **options: Any) -> bytes:
    path = Path(store.directory) / "layer"
    host_steps.run_step(key, options, PARENT, store, on_output, str(path))
    assert inside.is_left
    return path.read_bytes()


def scripts(inside: Inside) -> list[str]:
    return [argv[2] for argv, _ in inside.commands if argv[:2] == ["sh", "-c"]]


def test_only_the_command_has_the_timeout_and_the_variables_of_the_template(
    inside: Inside, store: Any
) -> None:
    said: list[bytes] = []
    assert b"layer" == do(inside, store, PIP, said.append, timeout_s=7.0)
    assert [None, 7.0, None, None] == [each.get("timeout_s") for _, each in inside.commands]
    plain = {"PATH": template.PATH}
    assert [plain, None, plain, None] == [each.get("env") for _, each in inside.commands]
    outputs = [each["on_stdout"] for _, each in inside.commands[:3]]
    assert [said.append] * 3 == outputs
    assert f"{VENV}/bin/python" == inside.commands[1][0][0]
    assert {"A": "1"} == inside.created[0]["env"]
    assert (VENV, host_steps._LIMITS) == (
        inside.created[0]["workdir"],
        inside.created[0]["limits"],
    )


def test_a_build_of_packages_sees_none_of_the_system_and_a_program_all(
    inside: Inside, store: Any
) -> None:
    """What is left for sandboxes has them in each case."""
    do(inside, store, PIP)
    begin, end = scripts(inside)
    assert begin.endswith(host_steps._CLOSED)
    assert end.endswith(host_steps._OPEN)
    inside.commands.clear()
    do(inside, store, {"run": ["make", "x"]})
    begin, end = scripts(inside)
    assert begin.endswith(host_steps._OPEN)
    assert "include-system" not in end
    assert ["make", "x"] == inside.commands[1][0]


def test_the_limits_of_the_caller_go_before_those_of_a_build(inside: Inside, store: Any) -> None:
    own = Limits(memory_bytes=1 << 30)
    do(inside, store, PIP, limits=own)
    assert own is inside.created[0]["limits"]


@pytest.mark.parametrize("fails", [1, 2, 3, 4])
def test_whatever_fails_the_step_has_failed_and_its_sandbox_is_gone(
    fails: int, inside: Inside, store: Any
) -> None:
    inside.fails = fails
    with pytest.raises(ExecError, match="why"):
        do(inside, store, PIP)
    assert (True, fails) == (inside.is_left, len(inside.commands))


def test_fonts_of_an_earlier_step_lie_over_a_place_that_may_be_written(
    inside: Inside, store: Any
) -> None:
    Path(store.root(None) + FONTS).mkdir(parents=True)
    do(inside, store, PIP)
    mounts = {each.target: each for each in inside.created[0]["mounts"] if isinstance(each, Mount)}
    assert (True, "") == (mounts[FONTS].is_writable, mounts[FONTS].source)


def font_file(name: str = "fontlist-v390.json", kind: str = "file", size_bytes: int = 3) -> Any:
    return SimpleNamespace(name=name, kind=kind, size_bytes=size_bytes)


def fonts(inside: Inside, store: Any) -> dict[str, Any] | None:
    return host_steps.fonts_step(PARENT, store, None, f"{store.directory}/fonts.tar")


def test_a_list_of_fonts_is_a_layer_of_one_file(inside: Inside, store: Any) -> None:
    assert fonts(inside, store) is None
    assert [] == inside.created, "there is no matplotlib"
    place = Path(store.root(None) + VENV) / "lib/python3.11/site-packages/matplotlib"
    place.mkdir(parents=True)
    (place / "font_manager.py").touch()
    inside.found = [font_file(), font_file("other.json"), font_file("fontlist-../x.json")]
    assert {"Env": {"MPLCONFIGDIR": FONTS}} == fonts(inside, store)
    (created,) = inside.created
    assert {"A": "1", "MPLCONFIGDIR": FONTS} == created["env"]
    assert {VENV: False, FONTS: True} == {m.target: m.is_writable for m in created["mounts"]}
    assert host_steps._FONTS_S == inside.commands[0][1]["timeout_s"]
    name = f"{FONTS}/fontlist-v390.json"
    with tarfile.open(f"{store.directory}/fonts.tar") as tar:
        (member,) = tar.getmembers()
        content = tar.extractfile(member)
        assert content is not None
        assert (name, f"content of {name}".encode()) == (member.name, content.read())


@pytest.mark.parametrize(
    "found",
    [
        [],
        [font_file(), font_file("fontlist-v391.json")],
        [font_file(kind="symlink")],
        [font_file(kind="directory")],
        [font_file(size_bytes=host_steps._MOST_FONTS + 1)],
        [font_file("xfontlist-v390.json")],
        [font_file("fontlist-v390.json.new")],
    ],
)
def test_what_a_package_wrote_instead_is_no_list_of_fonts(
    found: list[Any], inside: Inside, store: Any
) -> None:
    place = Path(store.root(None) + VENV) / "lib/python3.11/site-packages/matplotlib"
    place.mkdir(parents=True)
    (place / "font_manager.py").touch()
    inside.found = found
    assert fonts(inside, store) is None
    inside.found = [font_file(size_bytes=host_steps._MOST_FONTS)]
    assert fonts(inside, store) is not None, "the control"
