"""The programs of programs.toml do their work in each backend, with and without a host directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ringfence import Sandbox
from tests.features import lack, require
from tests.programs.table import PLACES, Program, programs

pytestmark = pytest.mark.full

TIMEOUT_S = 300  # what takes a second alone waits its turn beside thousands of tests
SandboxWith = Callable[[str | None], Sandbox]


# What runs natively beside a mount depends on the user; the rest does not.
_PLACES = [
    pytest.param(name, marks=[] if name == "native+mount" else [pytest.mark.anyone])
    for name in PLACES
]


@pytest.fixture(scope="module", params=_PLACES)
def place(request: pytest.FixtureRequest) -> str:
    require("landlock" if request.param == "landlock" else "user namespaces")
    if request.param.startswith("gvisor"):
        require("runsc")
    return str(request.param)


@pytest.fixture(scope="module")
def sandbox_with(place: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SandboxWith]:
    """`sandbox_with(profile)`: one sandbox for all programs of a place and a profile."""
    backend, _, mounted = place.partition("+")
    made: dict[str | None, Sandbox] = {}
    with ExitStack() as stack:

        def of_profile(profile: str | None) -> Sandbox:
            if profile not in made:
                options: dict[str, object] = {"backend": backend}
                if profile is not None:
                    options["profile"] = profile
                if mounted:
                    options |= _mount(tmp_path_factory.mktemp("work"))
                made[profile] = stack.enter_context(Sandbox.create(**options))  # type: ignore[arg-type]
            return made[profile]

        yield of_profile


def _mount(directory: Path) -> dict[str, object]:
    directory.chmod(0o755)
    return {"mounts": [f"{directory}:/work:rw"], "workdir": "/work"}


@pytest.mark.parametrize("program", programs(), ids=lambda program: program.name)
def test_program(program: Program, place: str, sandbox_with: SandboxWith) -> None:
    if place in program.cannot:
        pytest.skip(program.cannot[place])
    if packages := program.missing():
        lack(" ".join(packages), optional=program.optional)
    sandbox = sandbox_with(program.profile)

    directory = program.name.replace(" ", "-")
    result = sandbox.exec(
        ["bash", "-euc", f"mkdir '{directory}'; cd '{directory}'\n{program.full_script()}"],
        timeout_s=TIMEOUT_S,
    )

    assert (program.expect, 0) == (result.stdout_text, result.exit_code), result.stderr_text[-4000:]
