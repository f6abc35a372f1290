"""The models are dataclasses to everybody who asks, and cost nothing to those who do not."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from ringfence.errors import InvalidRequest
from ringfence.model.base import record
from ringfence.model.base.words import StrEnum
from ringfence.model.execs.exec import ExecResult
from ringfence.model.limits import Limits
from ringfence.model.mount import Mount
from ringfence.model.spec import SandboxSpec
from ringfence.model.state import State

pytestmark = pytest.mark.anyone


class _Point:
    x: int
    y: int = 2
    tags: list[str] = record.field(default_factory=list)


_Point.__name__ = _Point.__qualname__ = "Point"
Point: Any = record.dataclass(frozen=True, eq=False, repr=False)(_Point)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Reference:
    x: int
    y: int = 2
    tags: list[str] = dataclasses.field(default_factory=list)


BAD_CALLS: list[tuple[Any, Any]] = [
    ((), {}),
    ((1, 2, [], 4), {}),
    ((1,), {"x": 2}),
    ((1,), {"z": 2}),
]


def test_defaults_are_filled_in() -> None:
    one, other = Point(1), Point(1, y=3)

    assert (1, 2, []) == (one.x, one.y, one.tags)
    assert 3 == other.y
    assert one.tags is not other.tags


@pytest.mark.parametrize(("args", "kwargs"), BAD_CALLS)
def test_calls_that_dataclasses_refuses_are_refused(args: Any, kwargs: Any) -> None:
    """The control: the library's own class refuses them too."""
    with pytest.raises(TypeError):
        Reference(*args, **kwargs)
    with pytest.raises(TypeError, match=r"Point\.__init__\(\)"):
        Point(*args, **kwargs)


def test_nothing_can_be_changed() -> None:
    point: Any = Point(1)

    with pytest.raises(FrozenInstanceError):
        point.x = 2
    with pytest.raises(FrozenInstanceError):
        point.w = 2
    with pytest.raises(FrozenInstanceError):
        del point.x


def test_dataclasses_functions_see_a_dataclass() -> None:
    assert [True] == [dataclasses.is_dataclass(each) for each in (Point,)]
    assert ["x", "y", "tags"] == [each.name for each in dataclasses.fields(Point)]
    assert {"x": 5, "y": 2, "tags": []} == dataclasses.asdict(Point(5))
    assert 7 == dataclasses.replace(Point(1), y=7).y
    assert inspect.signature(Point) == inspect.signature(Reference)


@pytest.mark.parametrize("model", [Limits(), Mount("/x"), SandboxSpec(), ExecResult(exit_code=0)])
def test_models_are_dataclasses(model: Any) -> None:
    kind: Any = type(model)

    assert [True] == [dataclasses.is_dataclass(each) for each in (model,)]
    assert kind.__match_args__ == tuple(each.name for each in dataclasses.fields(model))
    assert set(kind.__match_args__) == set(inspect.signature(kind).parameters)
    copied: Any = dataclasses.replace(model)
    assert model == copied


class Colour(StrEnum):
    """Two words."""

    RED = "red"
    BLUE = "blue"


def test_words_behave_as_a_str_enum() -> None:
    assert Colour.RED is Colour("red")
    assert "red" == Colour.RED == Colour.RED.value == f"{Colour.RED}"
    assert ["red", "blue"] == list(Colour)
    assert "RED" == Colour.RED.name
    assert "<Colour.RED: 'red'>" == repr(Colour.RED)
    with pytest.raises(ValueError, match="green"):
        Colour("green")


def test_words_are_single_objects() -> None:
    assert State.RUNNING is pickle.loads(pickle.dumps(State.RUNNING))
    assert State.RUNNING is copy.deepcopy(State.RUNNING)


def test_what_is_altered_is_a_model_like_any_other_and_the_old_one_stays() -> None:
    """Control: the constructor, given the same values."""
    before = Limits(pids=10, cpus=1.0)

    after = before.altered(pids=20)

    assert Limits(pids=20, cpus=1.0) == after
    assert Limits(pids=10, cpus=1.0) == before


def test_only_fields_are_altered() -> None:
    with pytest.raises(InvalidRequest, match="no parameter 'cores'"):
        Limits().altered(cores=1)
