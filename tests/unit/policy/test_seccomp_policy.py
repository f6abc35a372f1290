"""The compiled default policy against a reading of it by hand, for every system call."""

from __future__ import annotations

import functools
import random
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.policy import reading, simulator

from ringfence.policy import bpf
from ringfence.policy.seccomp import SWITCHES, FilterOptions, SeccompPolicy, compile_filter

pytestmark = pytest.mark.anyone

MACHINES = sorted(reading.TABLES)
KEY = 0x0123456789ABCDEF
POLICY = SeccompPolicy.default()

GARBAGE = [0, 0, 0, 1, 0xFFFFFFFF, 0x80000000, KEY >> 32, KEY & 0xFFFFFFFF]


def telling_words() -> dict[str, list[int]]:
    """For each call with rules for its arguments: words on both sides of every one of them."""
    words: dict[str, set[int]] = {}
    for rule in [*POLICY.guards, *POLICY.rules]:
        for condition in rule.args:
            low = condition.mask & 0xFFFFFFFF
            found = {value & 0xFFFFFFFF for value in condition.values}
            found |= {value + 1 for value in found} | {value - 1 for value in found if value}
            found |= {1 << bit for bit in range(32) if low >> bit & 1 and low != 0xFFFFFFFF}
            found |= {value | 0x80800 for value in found}  # SOCK_CLOEXEC, SOCK_NONBLOCK and others
            for name in rule.names:
                words.setdefault(name, set()).update(v for v in found if v < 1 << 32)
    for name in ("open", "openat"):
        words[name] |= {0o101, 0o644, 0o4755, 0o2000, 0x410002}
    return {name: sorted(found) for name, found in words.items()}


TELLING = telling_words()
ANYTHING = sorted({0, 1, *(word for words in TELLING.values() for word in words)})


def word(rng: random.Random, name: str | None) -> int:
    """An argument for call `name`: most often one that a rule looks at, with a dirty upper half."""
    low = rng.choice(TELLING.get(name or "", ANYTHING))
    kind = rng.random()
    if kind < 0.4:
        return low if kind < 0.3 else 0
    if kind < 0.5:
        low = rng.choice([low ^ 1 << rng.randrange(32), rng.getrandbits(32)])
    high = rng.choice(GARBAGE) if rng.random() < 0.9 else rng.getrandbits(32)
    return high << 32 | low


Configuration = tuple[str, tuple[str, ...], bool]


@functools.cache
def programs() -> dict[Configuration, list[simulator.Instruction]]:
    """Every machine with every combination of options, with and without a key."""
    compiled = {}
    for machine in MACHINES:
        for bits in range(1 << len(SWITCHES)):
            on = tuple(name for i, name in enumerate(SWITCHES) if bits >> i & 1)
            for key in (None, KEY):
                options = FilterOptions(**dict.fromkeys(on, True), tag_key=key)
                program = compile_filter(options, policy=POLICY, machine=machine)
                compiled[machine, on, key is not None] = simulator.decode(program)
    return compiled


@pytest.mark.full
@pytest.mark.parametrize("machine", MACHINES)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32), bits=st.integers(0, 31), keyed=st.booleans())
def test_every_system_call_with_any_arguments(
    machine: str, seed: int, bits: int, keyed: bool
) -> None:
    on = tuple(name for i, name in enumerate(SWITCHES) if bits >> i & 1)
    program = programs()[machine, on, keyed]
    options: dict[str, Any] = {**dict.fromkeys(on, True), "tag_key": KEY if keyed else None}
    rng = random.Random(seed)

    for number in [*range(600), rng.getrandbits(32), 0x40000000 | rng.randrange(600), 0xFFFFFFFF]:
        name = reading.NAMES[machine].get(number)
        args = tuple(word(rng, name) for _ in range(6))
        expected = reading.judge(machine, reading.ARCH[machine], number, args, **options)
        found = simulator.run(program, number, args, reading.ARCH[machine]).value
        assert hex(expected) == hex(found), (name, number, args)


# The calls that have rules of their own get far more arguments than the sweep above gives them.
@pytest.mark.full
@pytest.mark.parametrize("name", sorted(TELLING))
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_calls_with_rules_for_their_arguments(name: str, seed: int) -> None:
    rng = random.Random(seed)
    configurations = [c for c in programs() if name in reading.TABLES[c[0]]]
    for _ in range(600):
        args = tuple(word(rng, name) for _ in range(6))
        agree(rng.choice(configurations), name, args)


def agree(configuration: Configuration, name: str, args: tuple[int, ...]) -> None:
    """The compiled program says of this call what the reading says."""
    machine, on, keyed = configuration
    options: dict[str, Any] = {**dict.fromkeys(on, True), "tag_key": KEY if keyed else None}
    number, arch = reading.TABLES[machine][name], reading.ARCH[machine]
    expected = reading.judge(machine, arch, number, args, **options)
    found = simulator.run(programs()[configuration], number, args, arch)
    assert hex(expected) == hex(found.value), (configuration, name, args)


@pytest.mark.parametrize("on", [(), ("allow_af_unix",)])
@pytest.mark.parametrize("name", ["socket", "socketpair"])
def test_every_family_type_and_protocol(name: str, on: tuple[str, ...]) -> None:
    for family in [*range(48), 1 << 32 | 40]:
        for kind in [*range(17), 0x80001, 0x80802, 0x80803, 1 << 32 | 3]:
            for protocol in (0, 1, 2, 4, 6, 15, 16, 17, 132, 136, 255, 262, 1 << 32, 1 << 32 | 262):
                agree(("x86_64", on, False), name, (family, kind, protocol))


@pytest.mark.parametrize("high", [0, 1 << 32, 0xFFFFFFFF << 32])
def test_every_small_ioctl(high: int) -> None:
    """Terminals and sockets number theirs 0x54xx and 0x89xx."""
    for request in [*range(0x5400, 0x5500), *range(0x8900, 0x8A00), *reading.IOCTLS]:
        agree(("x86_64", (), False), "ioctl", (0, high | request))


@given(arch=st.integers(0, 0xFFFFFFFF), number=st.integers(0, 0xFFFFFFFF))
def test_another_architecture_ends_the_process(arch: int, number: int) -> None:
    for machine, native in reading.ARCH.items():
        program = programs()[machine, (), True]
        if arch != native:
            assert reading.KILL == simulator.run(program, number, (), arch).value


@pytest.mark.parametrize("arch", [0x40000003, 0x40000028, 0xC000003E, 0xC00000B7])
@pytest.mark.parametrize("machine", MACHINES)
def test_compat_architectures_end_the_process(machine: str, arch: int) -> None:
    """i386 on x86_64, 32-bit ARM on aarch64, and each of ours on the other."""
    if arch != reading.ARCH[machine]:
        for number in (0, 1, 3, 4, 11, 221):
            program = programs()[machine, (), False]
            assert reading.KILL == simulator.run(program, number, (), arch).value


@given(number=st.integers(0, 0xFFFFFFFF))
def test_x32_ends_the_process_whatever_the_number(number: int) -> None:
    found = simulator.run(programs()["x86_64", (), False], number, (), reading.ARCH["x86_64"]).value

    assert (reading.KILL == found) == bool(number & 0x40000000 and number != 0xFFFFFFFF)


def test_a_call_that_a_tracer_cancels_does_not_end_the_process() -> None:
    """PTRACE_SETREGS with number -1 skips a call; the filter sees that number."""
    program = programs()["x86_64", ("debug",), False]

    assert reading.ENOSYS == simulator.run(program, -1, (), reading.ARCH["x86_64"]).value


@pytest.mark.parametrize("key", [pytest.param(None, id="no key"), KEY])
def test_only_the_key_sets_the_tag(key: int | None) -> None:
    program = programs()["x86_64", (), key is not None]
    prlimit64 = reading.TABLES["x86_64"]["prlimit64"]
    high, low = KEY >> 32, KEY & 0xFFFFFFFF

    def verdict(pid: int, resource: int, new: int = 0x7FFF0000) -> int:
        return simulator.run(program, prlimit64, (pid, resource, new), 0xC000003E).value

    assert (reading.ALLOW if key else reading.EPERM) == verdict(high << 32, low << 32 | 15)
    for pid, resource in [
        (0, 15),
        (high << 32, 15),
        (0, low << 32 | 15),
        (low << 32, high << 32 | 15),
        (high << 32 | 2, low << 32 | 15),  # not even the key changes the tag of another
        (high << 32 | 1, low << 32 | 15),
    ]:
        assert reading.EPERM == verdict(pid, resource)
    assert reading.EPERM == verdict(0, 15, new=1 << 32)  # a pointer above 4 GiB is not NULL
    assert reading.ALLOW == verdict(0, 15, new=0)
    assert reading.ALLOW == verdict(1, 15, new=0)
    assert reading.EPERM == verdict(1, 7)
    assert reading.ALLOW == verdict(0, 7)


@pytest.mark.parametrize("name", ["keyctl", "bpf", "perf_event_open", "userfaultfd", "ptrace",
    "process_vm_readv", "pidfd_getfd", "kcmp", "open_by_handle_at", "name_to_handle_at", "mount",
    "umount2", "pivot_root", "chroot", "fsopen", "fsmount", "fsconfig", "fspick", "move_mount",
    "open_tree", "open_tree_attr", "mount_setattr", "setns", "fanotify_init", "fanotify_mark",
    "quotactl", "quotactl_fd", "acct", "swapon", "reboot", "kexec_load", "kexec_file_load",
    "init_module", "finit_module", "delete_module", "syslog", "settimeofday", "clock_settime",
    "sethostname", "setdomainname", "add_key", "request_key", "vhangup", "mbind", "migrate_pages",
    "move_pages", "remap_file_pages", "process_mrelease", "set_mempolicy_home_node",
    "file_setattr", "sync"])  # fmt: skip
@pytest.mark.parametrize("machine", MACHINES)
def test_denied_by_name(machine: str, name: str) -> None:
    number = reading.TABLES[machine][name]

    found = simulator.run(programs()[machine, (), False], number, (0, 0, 0), reading.ARCH[machine])

    assert reading.EPERM == found.value


@pytest.mark.parametrize("name", ["modify_ldt", "iopl", "ioperm", "sysfs", "ustat"])
def test_denied_by_name_on_x86_64(name: str) -> None:
    number = reading.TABLES["x86_64"][name]
    program = programs()["x86_64", (), False]

    assert reading.EPERM == simulator.run(program, number, (), reading.ARCH["x86_64"]).value


def test_programs_are_valid_short_and_without_dead_code() -> None:
    for (_machine, on, _keyed), program in programs().items():
        simulator.check(program)
        assert set() == simulator.unreachable(program)
        assert len(program) < (450 if "by_init" in on else 430)


# -- the way through the program ---------------------------------------------------------------


def constant_verdict(program: list[simulator.Instruction], number: int) -> int | None:
    """What the kernel's cache finds: the verdict if it depends on number and architecture alone.

    As seccomp_is_const_allow() in kernel/seccomp.c.
    """
    accumulator, here = 0, 0
    while True:
        code, yes, no, k = program[here]
        here += 1
        if code == bpf.LOAD_WORD:
            if k not in (bpf.NUMBER, bpf.ARCH):
                return None
            accumulator = number if k == bpf.NUMBER else reading.ARCH["x86_64"]
        elif code == bpf.AND:
            accumulator &= k
        elif code == bpf.RETURN:
            return k
        elif code == bpf.JUMP:
            here += k
        else:
            taken = {
                bpf.JUMP_EQ: accumulator == k,
                bpf.JUMP_GE: accumulator >= k,
                bpf.JUMP_SET: bool(accumulator & k),
            }[code]
            here += yes if taken else no


@pytest.mark.parametrize(
    # mmap, too, but for huge pages: of 10 us for a pair with munmap a look at its flags takes 0.3.
    "name",
    ["read", "write", "futex", "close", "munmap", "epoll_wait", "execve"],
)
def test_the_kernel_answers_the_hot_calls_from_its_cache(name: str) -> None:
    program = programs()["x86_64", (), True]

    assert reading.ALLOW == constant_verdict(program, reading.TABLES["x86_64"][name])


def test_no_call_takes_a_long_way() -> None:
    """The longest way through any program, whatever the arguments."""
    for (_machine, on, _keyed), program in programs().items():
        longest = [0] * len(program)
        for here in reversed(range(len(program))):
            code, yes, no, k = program[here]
            if code == bpf.RETURN:
                longest[here] = 1
            elif code == bpf.JUMP:
                longest[here] = 1 + longest[here + 1 + k]
            elif code in (bpf.JUMP_EQ, bpf.JUMP_GE, bpf.JUMP_SET):
                longest[here] = 1 + max(longest[here + 1 + yes], longest[here + 1 + no])
            else:
                longest[here] = 1 + longest[here + 1]
        assert longest[0] < (60 if "by_init" in on else 50)


# -- the policy's data --------------------------------------------------------------------------


def test_guards_only_refuse() -> None:
    """A guard that allowed something would take that decision from a user's profile."""
    assert not {"allow", "log"} & {rule.action for rule in POLICY.guards}


def test_every_rule_says_why() -> None:
    assert [] == [rule.names for rule in [*POLICY.guards, *POLICY.rules] if not rule.about]


def test_no_rule_is_behind_one_that_always_matches() -> None:
    decided: set[str] = set()
    dead = deque[tuple[str, str]]()
    for rule in POLICY.rules:
        dead.extend((name, rule.action) for name in rule.names if name in decided)
        if not (rule.args or rule.needs or rule.unless):
            decided.update(rule.names)

    assert [] == list(dead)
