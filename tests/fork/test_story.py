"""A search over a data frame: a hundred branches of one Python context with pandas and 100 MiB of state."""

from __future__ import annotations

import ast
from contextlib import ExitStack
from pathlib import Path

import pytest

from ringfence import Sandbox, Template
from ringfence.errors import ExecError
from ringfence.linux import libc

pytestmark = [
    pytest.mark.full,
    pytest.mark.anyone,
    pytest.mark.skipif(libc.MACHINE != "x86_64", reason="processes are copied on x86-64 only"),
]
_FORKS = 100
_BEGIN = """
import hashlib, numpy, pandas, random, secrets, ssl, tempfile, uuid
frame = pandas.DataFrame(numpy.arange(13 << 20, dtype='int64').reshape(-1, 13))
numpy.random.rand(), random.random(), ssl.RAND_bytes(2), tempfile.mktemp()
own = [numpy.random.default_rng(), numpy.random.RandomState(), numpy.random.Generator(numpy.random.Philox())]
first, second, third = own
seeded = numpy.random.default_rng(7)
"""
_DRAW = (
    "numpy.random.rand(), random.random(), secrets.token_hex(), str(uuid.uuid4()),"
    " ssl.RAND_bytes(8).hex(), tempfile.mktemp(), first.random(), second.rand(), third.random()"
)


@pytest.fixture
def template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("RINGFENCE_IMAGES", str(tmp_path))
    try:
        Template.from_host().pip_install("pandas==2.3.3").build("frames")
    except ExecError as exc:
        pytest.skip(f"pandas cannot be installed here: {exc}")
    return "frames"


def test_a_hundred_branches_of_a_data_frame(template: str) -> None:
    with Sandbox.create(template=template) as source, ExitStack() as stack:
        begun = source.run_code(_BEGIN, timeout_s=120)
        assert begun.error is None
        digest = "hashlib.md5(frame.values).hexdigest()"
        before = source.run_code(digest).text
        forks = [stack.enter_context(each) for each in source.fork(_FORKS, processes="required")]
        assert {before} == {each.run_code(digest).text for each in (source, *forks[::10])}
        rows = []
        for number, each in enumerate((source, *forks)):
            change = f"frame.iloc[0, 0] = {number}; total = int(frame.sum().sum())"
            drawn = each.run_code(f"{change}; {_DRAW}", timeout_s=60)
            assert drawn.error is None
            rows.append(ast.literal_eval(drawn.text or ""))
        assert [_FORKS + 1] * 9 == [len(set(column)) for column in zip(*rows, strict=True)]
        assert 1 == len({each.run_code("seeded.random()").text for each in (source, *forks[::10])})
        totals = [int(each.run_code("total").text or "") for each in (source, *forks)]
        assert list(range(_FORKS + 1)) == [each - totals[0] for each in totals]
