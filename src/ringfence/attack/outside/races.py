"""Directories of the host that a sandbox may write to, changed by it while the host copies.

A name on the way becomes a symlink and a directory again, over and over. Who resolves whole paths is led
out of what it was to copy sooner or later; each probe tries for a while.
"""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import contextmanager, suppress

from ...errors import RingfenceError
from ..canaries import write
from ..lab import first_line, run, start
from ..probes.kit import Outcome, escaped, held
from .register import NAIVE, probe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ...sandbox.sync import Sandbox
    from ..lab import Lab

_HERE = "/mnt/swapped"
_TIME_S, _LEAST, _TRIES, _PATIENCE_S = 2.0, 4, 60, 20.0
_FILES = 60  # so that copying takes longer than what is there stays


@contextmanager
def _swapped(lab: Lab, target: str, *more: str) -> Iterator[tuple[str, Sandbox]]:
    """A directory of the host whose `tree/dir` is a link to `target` every other moment, and who does that."""
    with tempfile.TemporaryDirectory(prefix="ringfence-attack-") as place:
        os.chmod(place, 0o755)
        os.makedirs(f"{place}/aside")
        os.makedirs(f"{place}/tree/dir")
        for name in (*map(str, range(_FILES)), *more):
            write(f"{place}/tree/dir/{name}", "as it was")
        os.symlink(target, f"{place}/aside/link")
        with lab.sandbox(mounts=(lab.mount(_HERE, place),)) as sandbox:
            swapper = start(sandbox, "tasks", "swap", lab.at(_HERE, place))
            try:
                if first_line(swapper) != "swapping":
                    raise RuntimeError(f"nothing is swapped: {swapper.stderr.read()[-200:]!r}")
                yield place, sandbox
            finally:
                swapper.kill()


def _tried(lab: Lab, attack: Callable[[int], str]) -> Outcome:
    """Escaped with what `attack` says, as soon as it says something."""
    enough = time.monotonic() + (_TIME_S if lab.protected else _PATIENCE_S)
    number = 0
    # An emulated machine takes seconds for one: a few it is tried all the same.
    while number < _LEAST or (time.monotonic() < enough and (number < _TRIES or not lab.protected)):
        number += 1
        if found := attack(number):
            return escaped(f"at the {number}th time: {found}")
    return held(f"not in {number} times")


@probe("files.upload-swapped", "critical", NAIVE)
def upload_swapped(lab: Lab) -> Outcome:
    """Copying in a directory that the sandbox can write to must not read through what it swaps there."""
    directory, name = os.path.split(lab.canaries.secret)
    token = lab.canaries.token.encode()
    with _swapped(lab, directory, name) as (place, sandbox):

        def copy_in(number: int) -> str:
            with suppress(RingfenceError):
                sandbox.files.upload(f"{place}/tree", f"copy{number}")
            with suppress(RingfenceError):
                found = sandbox.files.read(f"copy{number}/dir/{name}")
                return "a file of the host's is inside" if token in found else ""
            return ""

        def read(_number: int) -> str:
            with suppress(OSError):
                for each in sorted(os.listdir(f"{place}/tree/dir")):
                    with suppress(OSError), open(f"{place}/tree/dir/{each}", "rb") as file:
                        if token in file.read():
                            return "a file of the host's was read"
            return ""

        return _tried(lab, copy_in if lab.protected else read)


@probe("files.download-swapped", "critical", NAIVE)
def download_swapped(lab: Lab) -> Outcome:
    """Copying out to a directory that the sandbox can write to must not write through what it swaps there."""
    outside = f"{lab.canaries.directory}/beside"
    os.makedirs(outside, exist_ok=True)
    with _swapped(lab, outside) as (place, sandbox):
        run(sandbox, "tasks", "fill", "out/dir", str(_FILES), cwd="/home/sandbox")

        def copy_out(_number: int) -> str:
            with suppress(RingfenceError):
                sandbox.files.download("out", f"{place}/tree", overwrite=True)
            return f"made outside: {left[0]}" if (left := os.listdir(outside)) else ""

        def write_there(_number: int) -> str:
            for number in range(_FILES):
                with suppress(OSError):
                    write(f"{place}/tree/dir/{number}", "changed")
            return f"made outside: {left[0]}" if (left := os.listdir(outside)) else ""

        return _tried(lab, copy_out if lab.protected else write_there)


@probe("files.planted-link", "critical", NAIVE)
def planted_link(lab: Lab) -> Outcome:
    """Copying to and from a mounted directory must not be led by a link that the sandbox left there."""
    outside, token = f"{lab.canaries.directory}/behind", lab.canaries.token.encode()
    os.makedirs(outside, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ringfence-attack-") as place:
        os.chmod(place, 0o755)
        with lab.sandbox(mounts=(lab.mount(_HERE, place),)) as sandbox:
            here = lab.at(_HERE, place)
            run(sandbox, "tasks", "links", lab.canaries.secret, f"{here}/secret")
            run(sandbox, "tasks", "links", outside, f"{here}/out")
            run(sandbox, "tasks", "fill", "tree", "1", cwd="/home/sandbox")
            if not lab.protected:
                write(f"{place}/out/0", "x")
            for source, target in (("tree", "out"), ("tree", "out/below"), ("tree/0", "out/0")):
                with suppress(RingfenceError):
                    sandbox.files.download(source, f"{place}/{target}")
            with suppress(RingfenceError):
                sandbox.files.upload(f"{place}/secret", "copy")
            with suppress(RingfenceError):
                if token in sandbox.files.read("copy"):
                    return escaped("a file of the host's is inside")
    made = os.listdir(outside)
    return escaped(f"made outside: {made}") if made else held("nothing was read or made outside")
