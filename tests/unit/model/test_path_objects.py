"""Where a path is a string, a `pathlib.Path` is that string."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath

import pytest

from ringfence.errors import InvalidRequest
from ringfence.model.calls import make_request, make_spec
from ringfence.model.execs.exec import ExecRequest

pytestmark = pytest.mark.anyone


class _Bytes:
    """A path object whose path is bytes."""

    def __fspath__(self) -> bytes:
        return b"/bin/sh"


def test_any_word_of_a_command_and_its_directory() -> None:
    request = make_request([Path("/bin/cat"), "-", PurePosixPath("a b")], cwd=Path("/tmp"))

    assert ExecRequest(argv=("/bin/cat", "-", "a b"), cwd="/tmp") == request
    assert [str] * 4 == [type(each) for each in (*request.argv, request.cwd)]
    assert request == ExecRequest.from_json(json.loads(json.dumps(request.to_json())))


def test_directories_of_a_sandbox() -> None:
    given = {"workdir": Path("/work"), "memory_dir": Path("/usr"), "deny": [Path("/opt/x")]}
    spec = make_spec(None, (), "none", None, given)

    assert ("/work", "/usr", ("/opt/x",)) == (spec.workdir, spec.memory_dir, spec.deny)
    assert spec.to_json() == json.loads(json.dumps(spec.to_json()))


@pytest.mark.parametrize("word", [_Bytes(), 3, None, b"cat"])
def test_what_is_no_text_is_refused_by_its_place(word: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        make_request(["cat", Path("x"), word])  # type: ignore[list-item]

    assert "argv[2]" == refused.value.field


def test_a_lone_path_is_no_command() -> None:
    with pytest.raises(InvalidRequest) as refused:
        make_request(Path("/bin/cat"))  # type: ignore[arg-type]

    assert "argv" == refused.value.field
