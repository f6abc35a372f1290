"""Loading a compiled filter: what is shipped is what compiling gives, and it costs nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.policy import reading, simulator

import ringfence.policy
from ringfence.errors import Unsupported
from ringfence.policy import filters
from ringfence.policy.filters import load_filter
from ringfence.policy.seccomp import FilterOptions, compile_filter, main, shipped_programs

pytestmark = pytest.mark.anyone

COMPILED = Path(ringfence.policy.__file__).parent / "compiled"
KEY = 0xFEDCBA9876543210


def test_the_shipped_programs_are_up_to_date() -> None:
    """After a change of the policy: python -m ringfence.policy.seccomp --write."""
    shipped = {path.name: path.read_bytes() for path in COMPILED.iterdir()}

    assert shipped == shipped_programs()


def test_the_command_says_whether_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == main([])
    assert "x86_64.bpf" in capsys.readouterr().out


@pytest.mark.parametrize("machine", filters.MACHINES)
@pytest.mark.parametrize("on", filters.SHIPPED, ids=lambda on: "-".join(sorted(on)) or "none")
def test_a_loaded_program_is_the_compiled_one(machine: str, on: frozenset[str]) -> None:
    options = dict.fromkeys(on, True)
    compiled = compile_filter(FilterOptions(**options, tag_key=KEY), machine=machine)

    assert compiled == load_filter(**options, tag_key=KEY, machine=machine)


def test_what_is_not_shipped_is_compiled() -> None:
    program = simulator.decode(load_filter(aio=True, machine="aarch64"))
    io_setup = reading.TABLES["aarch64"]["io_setup"]

    assert reading.ALLOW == simulator.run(program, io_setup, (), reading.ARCH["aarch64"]).value


@pytest.mark.parametrize("key", [1, 2**64 - 1])
def test_the_least_and_the_greatest_key_are_taken(key: int) -> None:
    assert key == filters.checked_key(key)


@pytest.mark.parametrize("key", [0, 2**64, -1])
def test_a_key_beyond_64_bits_is_refused(key: int) -> None:
    with pytest.raises(ValueError, match="64 bits"):
        filters.checked_key(key)


def test_without_a_key_nobody_sets_the_tag() -> None:
    """Not even who knows the placeholder of the shipped files."""
    first, second = load_filter(machine="x86_64"), load_filter(machine="x86_64")
    high, low = divmod(filters.PLACEHOLDER_KEY, 1 << 32)
    program = simulator.decode(first)
    call = (high << 32, low << 32 | 15, 0x1000)
    prlimit64 = reading.TABLES["x86_64"]["prlimit64"]

    assert first != second
    assert reading.EPERM == simulator.run(program, prlimit64, call, reading.ARCH["x86_64"]).value


@pytest.mark.parametrize("machine", filters.MACHINES)
@pytest.mark.parametrize("on", filters.SHIPPED, ids=lambda on: "-".join(sorted(on)) or "none")
def test_the_placeholder_is_there_once(machine: str, on: frozenset[str]) -> None:
    program = (COMPILED / filters.file_name(machine, on)).read_bytes()
    placeholder = filters.PLACEHOLDER_KEY.to_bytes(8, "big")

    for half in (placeholder[:4], placeholder[4:]):
        assert 1 == program.count(half[::-1])
        assert 4 == program.index(half[::-1]) % 8  # the k of an instruction
    assert not any(
        half[::-1] in filters.with_key(program, KEY) for half in (placeholder[:4], placeholder[4:])
    )


@pytest.mark.parametrize("half", [0, 1])
def test_a_key_that_could_be_in_two_places_is_not_replaced(half: int) -> None:
    """Else an instruction of the filter would be, and the isolation would be others."""
    halves = [b"\x12\x34\x56\x78", b"\x9a\xbc\xde\xf0"]
    halves[half] = load_filter(tag_key=KEY)[:4][::-1]
    key = int.from_bytes(b"".join(halves), "big")

    with pytest.raises(ValueError, match="not one place"):
        filters.with_key(load_filter(tag_key=key), KEY, key)

    unlike = int.from_bytes(b"\x12\x34\x56\x78\x9a\xbc\xde\xf0", "big")
    assert load_filter(tag_key=KEY) == filters.with_key(load_filter(tag_key=unlike), KEY, unlike)


@pytest.mark.parametrize("key", [0, -1, 1 << 64])
def test_a_key_that_everybody_has_is_refused(key: int) -> None:
    with pytest.raises(ValueError, match="tag_key"):
        load_filter(tag_key=key)
    with pytest.raises(ValueError, match="tag_key"):
        compile_filter(FilterOptions(tag_key=key))


def test_a_program_without_placeholder_is_refused() -> None:
    with pytest.raises(ValueError, match="placeholder"):
        filters.with_key(compile_filter(), KEY)


def test_an_unknown_machine_is_refused() -> None:
    with pytest.raises(Unsupported, match="riscv64"):
        load_filter(machine="riscv64")


def test_this_machine_is_the_default() -> None:
    assert load_filter(tag_key=KEY) == load_filter(tag_key=KEY, machine=os.uname().machine)
    assert filters.load_egress_filter() == filters.load_egress_filter(os.uname().machine) != b""
    assert filters.load_view_filter() == filters.load_view_filter(os.uname().machine) != b""


def test_every_other_process_has_a_program_of_its_own_for_every_machine() -> None:
    """A machine without one gets an empty program."""
    programs = [
        load(machine)
        for machine in ("x86_64", "aarch64")
        for load in (filters.load_egress_filter, filters.load_view_filter)
    ]

    assert 4 == len({*programs, b""} - {b""})
    assert b"" == filters.load_egress_filter("riscv64") == filters.load_view_filter("riscv64")


def test_loading_imports_nothing() -> None:
    """Every module here would be paid for by every start."""
    script = (
        "import __future__, os, sys; before = set(sys.modules)\n"
        "from ringfence.policy.filters import load_filter; load_filter()\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    source = str(Path(ringfence.policy.__file__).parent.parent.parent)
    loaded = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {source!r})\n{script}"],
        check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip

    assert ["ringfence", "ringfence.policy", "ringfence.policy.filters"] == loaded
