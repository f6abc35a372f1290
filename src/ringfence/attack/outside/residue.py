"""Residue of a sandbox: for the next one, in a snapshot, and after a restore."""

from __future__ import annotations

import contextlib
import os
import tempfile

from ...errors import RingfenceError
from ...model.net.rules import Credential, NetworkRule
from ...sandbox.sync import Sandbox
from ..lab import first_line, make, run, start
from ..probes.kit import Outcome, escaped, held, inconclusive
from ..scope import OWN_KERNEL
from .register import NAIVE, SAME_SANDBOX, UNTOUCHED, probe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...backends.protocol import Backend
    from ..lab import Lab

_MOST_TRIES = 140  # a slot of host ids comes round again after 128 sandboxes


@probe("lifecycle.recycled-id", "critical", SAME_SANDBOX)
def recycled_id(lab: Lab) -> Outcome:
    """A sandbox that gets the host ids of an earlier one must find nothing of it."""
    with lab.sandbox() as first:
        ids = _host_ids(first)
        made = first_line(start(first, "planted", "plant", "20")).split()[1:]
        if not lab.protected:
            return _residue(first, made, "the same sandbox")
    # The data of a guest's own kernel ends with it, whatever ids the emulator around it has.
    alone = lab.backend.name in OWN_KERNEL
    for tries in range(_MOST_TRIES):
        with lab.sandbox() as later:
            if alone:
                return _residue(later, made, "the next one")
            if _host_ids(later) == ids:
                return _residue(later, made, f"sandbox {tries + 2}, which has the same ids")
    return inconclusive("the ids did not come round again")


def _host_ids(sandbox: Sandbox) -> int:
    """The first host id of its slot; 0 where all sandboxes have the caller's."""
    return int(getattr(sandbox._inner, "first_host_id", 0))


def _residue(sandbox: Sandbox, made: list[str], where: str) -> Outcome:
    found = run(sandbox, "planted", "look", *made).stdout_text.split()
    if found[-1:] != ["looked"]:
        return inconclusive("it did not look")
    return escaped(f"{' '.join(found[:-1])} in {where}") if found[:-1] else held(f"none in {where}")


# -- snapshots -----------------------------------------------------------------------------------


@contextlib.contextmanager
def _snapshots(lab: Lab) -> Iterator[tuple[Backend, str]]:
    """A backend with a catalogue of its own."""
    with tempfile.TemporaryDirectory(prefix="ringfence-attack-") as directory:
        backend = lab.other_backend(directory)
        try:
            yield backend, directory
        finally:
            backend.close()


def _files(directory: str) -> list[str]:
    return [os.path.join(top, name) for top, _names, files in os.walk(directory) for name in files]


def _holder(directory: str, token: bytes) -> str:
    """The name of a file that holds `token`."""
    for path in _files(directory):
        with open(path, "rb") as file:
            if token in file.read():
                return os.path.basename(path)
    return ""


@probe("leaks.snapshot-secret", "high", "the same word in a file of the sandbox")
def snapshot_secret(lab: Lab) -> Outcome:
    """A secret given to a sandbox must not be in its snapshot."""
    token = lab.canaries.token[4:24]
    rule = NetworkRule("api.example.com", credential=Credential("KEY"))
    secret = {"secrets": {"KEY": token}, "network": [rule]} if lab.protected else {}
    with _snapshots(lab) as (backend, directory):
        with make(backend, **secret) as sandbox:
            if not lab.protected:
                sandbox.files.write("key", token)
            sandbox.snapshot()
        found = _holder(directory, token.encode())
    return escaped(f"it is in {found}") if found else held("it is nowhere in it")


@probe("leaks.snapshot-of-mount", "high", "the same file in the sandbox itself")
def snapshot_of_mount(lab: Lab) -> Outcome:
    """Files in a host directory must not be in a snapshot."""
    token = lab.canaries.token[2:22].encode()
    planted = f"{lab.canaries.ro}/only-mounted"
    with _snapshots(lab) as (backend, directory):
        with open(planted, "wb") as file:
            file.write(token)
        try:
            with make(backend, mounts=lab.mounts()) as sandbox:
                if not lab.protected:
                    sandbox.files.write("copied", token)
                sandbox.snapshot()
        finally:
            os.unlink(planted)
        found = _holder(directory, token)
    return escaped(f"it is in {found}") if found else held("only the sandbox's own files are saved")


@probe("leaks.snapshot-readable", "high", NAIVE)
def snapshot_readable(lab: Lab) -> Outcome:
    """Other users of the host must not be able to read a snapshot."""
    with _snapshots(lab) as (backend, directory):
        os.chmod(directory, 0o755)  # as a home directory is
        with make(backend) as sandbox:
            sandbox.snapshot()
        if not lab.protected:
            with open(f"{directory}/content.tar", "wb") as file:
                os.chmod(file.fileno(), 0o644)
        shown = [path for path in _files(directory) if _is_open(path, directory)]
    return escaped(f"{os.path.basename(shown[0])} is readable") if shown else held("mode 0700")


def _is_open(path: str, top: str) -> bool:
    """Return whether every user may read `path`, with all directories from `top` on."""
    if not os.stat(path).st_mode & 0o004:
        return False
    while path != top:
        path = os.path.dirname(path)
        if not os.stat(path).st_mode & 0o001:
            return False
    return True


@probe("lifecycle.snapshot-damaged", "critical", UNTOUCHED)
def snapshot_damaged(lab: Lab) -> Outcome:
    """A snapshot whose content was changed must not be restored."""
    with _snapshots(lab) as (backend, directory):
        with make(backend) as sandbox:
            sandbox.files.write("file", "as it was")
            snapshot = sandbox.snapshot()
        if lab.protected:
            _change(directory, b"as it was", b"as it wos")
        try:
            with Sandbox.restore(snapshot.id, backend=backend) as again:
                return escaped(f"restored: {again.files.read('file')!r}")
        except RingfenceError as exc:
            return held(f"{exc.code}: {exc}")


def _change(directory: str, old: bytes, new: bytes) -> None:
    for path in _files(directory):
        with open(path, "rb") as file:
            content = file.read()
        if old in content:
            with open(path, "wb") as file:
                file.write(content.replace(old, new))


@probe("lifecycle.snapshot-shared", "critical", SAME_SANDBOX)
def snapshot_shared(lab: Lab) -> Outcome:
    """Two sandboxes restored from one snapshot must not share a file."""
    with _snapshots(lab) as (backend, _directory):
        with make(backend) as sandbox:
            sandbox.files.write("file", "as it was")
            snapshot = sandbox.snapshot()
        with (
            Sandbox.restore(snapshot.id, backend=backend) as one,
            Sandbox.restore(snapshot.id, backend=backend) as other,
        ):
            one.files.write("file", "changed")
            found = (other if lab.protected else one).files.read("file")
    return held("each has its own") if found == b"as it was" else escaped(f"it reads {found!r}")


@probe("lifecycle.snapshot-privileges", "high", "none: nothing privileged can be made to be saved")
def snapshot_privileges(lab: Lab) -> Outcome:
    """Restoring must give no set-id bit and no device, and nothing to another owner."""
    with _snapshots(lab) as (backend, _directory):
        with make(backend) as sandbox:
            run(sandbox, "tasks", "odd_tree", "/home/sandbox/tree")
            before = run(sandbox, "tasks", "modes", "/home").stdout_text.splitlines()
            snapshot = sandbox.snapshot()
        with Sandbox.restore(snapshot.id, backend=backend) as again:
            after = run(again, "tasks", "modes", "/home").stdout_text.splitlines()
    given = sorted(set(after) - set(before))
    return escaped(f"{given[:2]}") if given else held(f"{len(after)} entries, none with more")
