"""The system-call filter of a sandbox, ready to install: compiled ahead of time where possible.

This is on the way of every start, so it reads a file and imports nothing; `seccomp.py` compiles.
"""

from __future__ import annotations

import os

MACHINES = ("x86_64", "aarch64")
# Option sets shipped compiled for each machine; other combinations are compiled on request.
SHIPPED: tuple[frozenset[str], ...] = (
    frozenset(),
    frozenset({"allow_af_unix"}),
    frozenset({"allow_af_unix", "by_init"}),
    frozenset({"debug"}),
    frozenset({"debug", "allow_af_unix"}),
    frozenset({"debug", "allow_af_unix", "by_init"}),
    frozenset({"strict"}),
    frozenset({"strict", "allow_af_unix"}),
)
# Shipped programs hold this where a sandbox's own key goes. It is public: never install it.
PLACEHOLDER_KEY = int.from_bytes(b"ringfenc", "big")
_DIRECTORY = os.path.join(os.path.dirname(__file__), "compiled")


def load_filter(
    *,
    debug: bool = False,
    aio: bool = False,
    allow_af_unix: bool = False,
    by_init: bool = False,
    strict: bool = False,
    tag_key: int | None = None,
    machine: str | None = None,
) -> bytes:
    """The default policy's program, packed `struct sock_filter`.

    Args:
        debug: Tracing inside the sandbox: ptrace, process_vm_readv and process_vm_writev.
        aio: The io_submit family.
        allow_af_unix: Unix sockets by path; only where no host directory can be reached.
        by_init: Besides, PID 1 makes every connection: no datagrams, and nobody becomes undumpable.
        strict: No advisory file locks, for sandboxes that share files.
        tag_key: 64 bits, not 0: who puts the upper half into the upper half of prlimit64's `pid`
            (its lower half 0) and the lower half into the upper half of its `resource` may set the
            tag, RLIMIT_RTTIME. None: nobody may.
        machine: As uname(2) says it; this machine's by default.

    Raises:
        Unsupported: There is no filter for this machine.
    """
    machine = machine or os.uname().machine
    given = {
        "debug": debug,
        "aio": aio,
        "allow_af_unix": allow_af_unix,
        "by_init": by_init,
        "strict": strict,
    }
    options = frozenset(name for name, on in given.items() if on)
    if machine in MACHINES and options in SHIPPED:
        return with_key(_shipped(file_name(machine, options)), tag_key)
    from .seccomp import FilterOptions, compile_filter

    return compile_filter(FilterOptions(**given, tag_key=tag_key), machine=machine)


def load_egress_filter(machine: str | None = None) -> bytes:
    """The program of the egress process; empty for a machine that there is none for."""
    machine = machine or os.uname().machine
    return _shipped(egress_file_name(machine)) if machine in MACHINES else b""


def egress_file_name(machine: str) -> str:
    return f"{machine}-of-egress.bpf"


def load_view_filter(machine: str | None = None) -> bytes:
    """The program of who serves files to guests; empty for a machine that there is none for."""
    machine = machine or os.uname().machine
    return _shipped(view_file_name(machine)) if machine in MACHINES else b""


def view_file_name(machine: str) -> str:
    return f"{machine}-of-view.bpf"


def _shipped(name: str) -> bytes:
    if name not in _programs:
        with open(os.path.join(_DIRECTORY, name), "rb") as file:
            _programs[name] = file.read()
    return _programs[name]


_programs: dict[str, bytes] = {}


def file_name(machine: str, options: frozenset[str]) -> str:
    """The name of the file that holds the program compiled with `options`."""
    return "-".join([machine, *sorted(options)]) + ".bpf"


def with_key(program: bytes, tag_key: int | None, instead_of: int = PLACEHOLDER_KEY) -> bytes:
    """`program` with its placeholder, or another key, replaced by `tag_key`, or by bits that nobody knows.

    Raises:
        ValueError: It is not there, or could be in two places.
    """
    key = os.urandom(8) if tag_key is None else checked_key(tag_key).to_bytes(8, "big")
    placeholder = instead_of.to_bytes(8, "big")
    for half in (slice(0, 4), slice(4, 8)):
        # A key is drawn: once in some 300,000 times there are four bytes like a half of it elsewhere.
        if program.count(placeholder[half][::-1]) != 1:
            raise ValueError("this program has not one place, a placeholder's, for the key")
        program = program.replace(placeholder[half][::-1], key[half][::-1])
    return program


def checked_key(tag_key: int) -> int:
    """`tag_key`, which must be 64 bits and not 0: 0 is what everybody passes."""
    if not 0 < tag_key < 1 << 64:
        raise ValueError("tag_key must be 64 bits and not 0")
    return tag_key
