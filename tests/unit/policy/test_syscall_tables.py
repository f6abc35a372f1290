"""The tables of system-call numbers, compared with each other and with the headers of this host."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from ringfence.policy import syscalls_aarch64, syscalls_x86_64

pytestmark = pytest.mark.anyone

X86_64, AARCH64 = syscalls_x86_64.NUMBERS, syscalls_aarch64.NUMBERS
LAST = ("rseq_slice_yield", 471)


@pytest.mark.parametrize("table", [X86_64, AARCH64], ids=["x86_64", "aarch64"])
def test_no_number_twice(table: dict[str, int]) -> None:
    assert len(table) == len(set(table.values()))


@pytest.mark.parametrize(
    ("table", "count"), [(X86_64, 385), (AARCH64, 327)], ids=["x86_64", "aarch64"]
)
def test_a_table_is_complete(table: dict[str, int], count: int) -> None:
    """A name lost or a number given twice by a run that overlaps the next would show here."""
    assert count == len(table)
    assert LAST == max(table.items(), key=lambda item: item[1])


def test_from_424_on_both_are_the_same() -> None:
    newer = [{name: n for name, n in table.items() if n >= 424} for table in (X86_64, AARCH64)]

    assert newer[0] == newer[1]
    assert set(range(424, 472)) == set(newer[0].values())


@pytest.mark.parametrize(
    ("table", "name", "number"),
    [
        (X86_64, "read", 0), (X86_64, "ioctl", 16), (X86_64, "clone", 56), (X86_64, "openat", 257),
        (X86_64, "prlimit64", 302), (X86_64, "seccomp", 317), (X86_64, "rseq", 334),
        (X86_64, "uretprobe", 335), (X86_64, "uprobe", 336), (X86_64, "clone3", 435),
        (AARCH64, "io_setup", 0), (AARCH64, "ioctl", 29), (AARCH64, "openat", 56),
        (AARCH64, "read", 63), (AARCH64, "newfstatat", 79), (AARCH64, "clone", 220),
        (AARCH64, "recvmmsg", 243), (AARCH64, "wait4", 260), (AARCH64, "prlimit64", 261),
        (AARCH64, "seccomp", 277), (AARCH64, "memfd_secret", 447), (AARCH64, "fchmodat2", 452),
    ],
)  # fmt: skip
def test_numbers_known_by_heart(table: dict[str, int], name: str, number: int) -> None:
    assert number == table[name]


@pytest.mark.parametrize("name", ["open", "fork", "select", "arch_prctl", "time", "chmod"])
def test_aarch64_has_no_old_calls(name: str) -> None:
    assert name in X86_64
    assert name not in AARCH64


@pytest.mark.parametrize(
    ("table", "header", "defines"),
    [
        (X86_64, "asm/unistd_64.h", []),
        (
            AARCH64,
            "asm-generic/unistd.h",
            ["__BITS_PER_LONG=64", "__ARCH_WANT_RENAMEAT", "__ARCH_WANT_NEW_STAT",
             "__ARCH_WANT_SET_GET_RLIMIT", "__ARCH_WANT_SYS_CLONE3", "__ARCH_WANT_MEMFD_SECRET"],
        ),
    ],
    ids=["x86_64", "aarch64"],
)  # fmt: skip
def test_the_headers_agree(table: dict[str, int], header: str, defines: list[str]) -> None:
    """As far as the headers of this host know system calls."""
    found = numbers_in(header, defines)
    if not found:
        pytest.skip(f"no <{header}> here")

    wrong = {name: n for name, n in found.items() if table.get(name) != n}

    assert {} == {name: n for name, n in wrong.items() if n <= LAST[1]}
    assert len(found) > 300


def numbers_in(header: str, defines: list[str]) -> dict[str, int]:
    if not shutil.which("gcc"):
        return {}
    macros = subprocess.run(
        ["gcc", "-E", "-dM", *[f"-D{define}" for define in defines], "-include", header, "-"],
        input="", capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    defined: dict[str, str] = dict(re.findall(r"#define (__NR\w+) (\w+)", macros))
    numbers: dict[str, int] = {}
    for macro, value in defined.items():
        while value in defined:
            value = defined[value]
        name = macro.removeprefix("__NR_")
        if name not in {macro, "syscalls", "arch_specific_syscall"} and value.isdigit():
            numbers[name] = int(value)
    return numbers
