"""Attacks on the host's own operations, with names that the sandbox chose."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import tempfile
import time

from ...errors import RingfenceError
from ...model.mount import READ_ONLY, READ_WRITE, Mount
from ..canaries import RO, RW, write
from ..lab import first_line, run, start
from ..probes.kit import PATIENCE_S, Outcome, escaped, first_escape, held, inconclusive
from .register import NAIVE, NETWORK, NOT_PROTECTED, WRITABLE, probe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ...sandbox.sync import Sandbox
    from ..lab import Lab

_MIB = 1 << 20
_LIVE = "/mnt/live"


# -- single files ----------------------------------------------------------------------------


@probe("files.host-reads-through-link", "critical", NAIVE)
def reads_through_link(lab: Lab) -> Outcome:
    """Reading for the caller must not follow a link of the sandbox to a file of the host."""
    secret, token = lab.canaries.secret, lab.canaries.token.encode()
    directory, name = os.path.split(secret)
    if not lab.protected:
        return _reads_naively(secret, token)
    with lab.mounted() as sandbox:
        rw = lab.places(sandbox)["rw"]
        run(sandbox, "tasks", "links", secret, "link", f"{rw}/linked")
        run(sandbox, "tasks", "links", directory, "directory")
        paths = ("link", f"{rw}/linked", f"directory/{name}", f"/proc/1/root{secret}")
        outcomes = [_read(sandbox.files.read, path, token) for path in paths]
        outcomes.append(_read(sandbox.files.list, "directory", token))
    lab.canaries.plant_writable()
    return first_escape(outcomes)


def _reads_naively(secret: str, token: bytes) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="ringfence-attack-") as directory:
        os.symlink(secret, f"{directory}/link")
        with open(f"{directory}/link", "rb") as file:
            return escaped("open followed it") if token in file.read() else held("not followed")


def _read(action: Callable[[str], object], path: str, token: bytes) -> Outcome:
    try:
        result = action(path)
    except RingfenceError as exc:
        return held(f"{path}: {exc.code}")
    if not result or (isinstance(result, bytes) and token not in result):
        return held(f"{path}: nothing of the host's")
    return escaped(f"{path}: {result!r:.80}")


@probe("files.host-writes-through-link", "critical", NAIVE)
def writes_through_link(lab: Lab) -> Outcome:
    """Writing, moving or removing for the caller must not touch a file of the host."""
    target = f"{lab.canaries.directory}/target"
    write(target, "as it was")
    if lab.protected:
        with lab.mounted() as sandbox:
            run(sandbox, "tasks", "links", target, "link")
            run(sandbox, "tasks", "links", os.path.dirname(target), "dir")
            _write_all_ways(sandbox)
    else:
        with tempfile.TemporaryDirectory(prefix="ringfence-attack-") as directory:
            os.symlink(target, f"{directory}/link")
            _write_naively(f"{directory}/link")
    with open(target, encoding="utf-8") as file:
        now = file.read()
    return held("it is as it was") if now == "as it was" else escaped(f"it holds {now!r}")


def _write_all_ways(sandbox: Sandbox) -> None:
    files = sandbox.files
    actions: tuple[Callable[[], None], ...] = (
        lambda: files.write("link", "changed"),
        lambda: files.write("dir/target", "changed"),
        lambda: files.remove("dir/target"),
        lambda: files.remove("dir", recursive=True),
        lambda: files.move("dir/target", "dir/moved"),
        lambda: files.make_dir("dir/made"),
    )
    for action in actions:
        with contextlib.suppress(RingfenceError):
            action()


def _write_naively(path: str) -> None:
    """Write as a program does that trusts names."""
    with open(path, "w", encoding="utf-8") as file:
        file.write("changed")


@probe("files.host-waits", "medium", "none: a control would wait for ever")
def host_waits(lab: Lab) -> Outcome:
    """Reading for the caller must not wait for a FIFO, nor read a device without end."""
    with lab.sandbox() as sandbox:
        run(sandbox, "tasks", "endless", "/home/sandbox")
        began = time.monotonic()
        for name in ("fifo", "zero", "tty"):
            try:
                sandbox.files.read(name)
            except RingfenceError:
                continue
            return escaped(f"{name} was read")
        took_s = time.monotonic() - began
    return held(f"refused in {took_s:.2f} s") if took_s < 20 else escaped(f"it took {took_s:.1f} s")


@probe("lifecycle.deep-tree", "medium", "none: a control would break what it should not")
def deep_tree(lab: Lab) -> Outcome:
    """Removing a very deep tree for the caller must not end the sandbox."""
    with lab.sandbox() as sandbox:
        if not run(sandbox, "tasks", "deep", "d").ok:
            return inconclusive("no such tree could be made")
        with contextlib.suppress(RingfenceError):
            sandbox.files.remove("d", recursive=True)
        try:
            alive = sandbox.exec(["true"], timeout_s=60).ok
        except RingfenceError as exc:
            return escaped(f"after it: {exc}")
    return held("it runs on") if alive else escaped("it no longer runs commands")


# -- trees -----------------------------------------------------------------------------------


@probe("files.download-links", "critical", NAIVE)
def download_links(lab: Lab) -> Outcome:
    """Copying a tree out must neither follow its links nor go through those of an earlier copy."""
    outside = f"{lab.canaries.directory}/outside"
    os.makedirs(outside, exist_ok=True)
    with _download_place() as local, lab.sandbox() as sandbox:
        sandbox.files.make_dir("t")
        run(sandbox, "tasks", "links", outside, "t/a", cwd="/home/sandbox")
        run(sandbox, "tasks", "links", lab.canaries.secret, "t/b", cwd="/home/sandbox")
        sandbox.files.download("t", local)
        if os.path.exists(f"{local}/b") and not os.path.islink(f"{local}/b"):
            return escaped("the link's target was copied")
        run(sandbox, "tasks", "replace_link", "t/a", cwd="/home/sandbox")
        if lab.protected:
            with contextlib.suppress(RingfenceError):
                sandbox.files.download("t", local, overwrite=True)
        else:
            _write_naively(f"{local}/a/x")
    left = os.listdir(outside)
    return escaped(f"made outside: {left}") if left else held("nothing was made outside")


def _download_place() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="ringfence-attack-")


@probe("files.download-kinds", "high", "none: nothing privileged can be made to be copied")
def download_kinds(lab: Lab) -> Outcome:
    """A tree copied out must hold no device, FIFO, socket or set-id bit."""
    with _download_place() as local, lab.sandbox() as sandbox:
        run(sandbox, "tasks", "odd_tree", "/home/sandbox/t")
        try:
            sandbox.files.download("t", local)
            said = "copied"
        except RingfenceError as exc:
            said = f"{exc.code}: {exc}"
        modes = {name: os.lstat(f"{local}/{name}").st_mode for name in os.listdir(local)}
    bad = [name for name, mode in modes.items() if not _is_plain(mode)]
    return escaped(f"{bad}; {said}") if bad else held(f"{len(modes)} plain entries; {said}")


def _is_plain(mode: int) -> bool:
    kinds = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)
    return stat.S_IFMT(mode) in kinds and not mode & 0o6000


@probe("resources.download-sparse", "medium", NAIVE)
def download_sparse(lab: Lab) -> Outcome:
    """A file that is larger than the sandbox's disk, mostly a hole, must not fill the host's."""
    size = 192 * _MIB
    with _download_place() as local:
        if lab.protected:
            with lab.sandbox(limits={"disk_bytes": 16 * _MIB}) as sandbox:
                sandbox.files.make_dir("t")
                made = run(sandbox, "tasks", "hole", "/home/sandbox/t/hole", str(size))
                if not made.ok:
                    return held(f"it cannot be made: {made.stderr_text.strip()[-60:]}")
                with contextlib.suppress(RingfenceError):
                    sandbox.files.download("t", local)
        else:
            with open(f"{local}/hole", "wb") as file:
                for _ in range(size // _MIB):
                    file.write(bytes(_MIB))
        blocks = sum(os.lstat(f"{local}/{name}").st_blocks for name in os.listdir(local))
    taken = f"{blocks * 512 // _MIB} MiB of the host's disk"
    return escaped(taken) if blocks * 512 > 64 * _MIB else held(taken)


# -- mounts ----------------------------------------------------------------------------------


@probe("files.read-only-unchanged", "critical", WRITABLE)
def read_only_unchanged(lab: Lab) -> Outcome:
    """Whatever runs inside, a directory mounted read-only must be as it was."""
    lab.canaries.plant_read_only()
    before = _listing(lab.canaries.ro)
    access = READ_ONLY if lab.protected else READ_WRITE
    with lab.sandbox(mounts=lab.mounts(access=access)) as sandbox:
        run(sandbox, "tasks", "vandalise", lab.at(RO, lab.canaries.ro))
    after = _listing(lab.canaries.ro)
    lab.canaries.plant_read_only()
    return held(f"{len(after)} entries as they were") if before == after else escaped("changed")


def _listing(directory: str) -> dict[str, tuple[int, int, int]]:
    found = {}
    for name in sorted(os.listdir(directory)):
        info = os.lstat(f"{directory}/{name}")
        found[name] = (info.st_mode, info.st_size, info.st_mtime_ns)
    return found


@probe("files.owner-of-new-files", "medium", "none: the kernel refuses any other owner")
def owner_of_new_files(lab: Lab) -> Outcome:
    """Files made in a writable mount must be its owner's, and have no set-id bit."""
    with lab.mounted() as sandbox:
        run(sandbox, "tasks", "make", lab.at(RW, lab.canaries.rw))
    expected = os.stat(lab.canaries.rw).st_uid
    try:
        found = [os.lstat(f"{lab.canaries.rw}/{name}") for name in ("made", "made-directory")]
    except FileNotFoundError as exc:
        return inconclusive(f"nothing was made: {exc}")
    finally:
        lab.canaries.plant_writable()
    if all(info.st_uid == expected and not info.st_mode & 0o6000 for info in found):
        return held(f"uid {expected}, as the mount")
    return escaped(f"uid {found[0].st_uid}, mode {found[0].st_mode:o}")


def _rewritten(how: str) -> Callable[[Lab], Outcome]:
    def attack(lab: Lab) -> Outcome:
        path = f"{lab.canaries.rw}/program"
        write(path, "good\n" * 10)
        os.chmod(path, 0o4755)
        with lab.mounted() as sandbox:
            run(sandbox, "tasks", how, f"{lab.at(RW, lab.canaries.rw)}/program")
        with open(path, "rb") as file:
            changed = file.read(4) == b"evil"
        mode = os.stat(path).st_mode
        os.unlink(path)
        said = f"{'changed' if changed else 'unchanged'}, mode {stat.S_IMODE(mode):o}"
        return escaped(said) if changed and mode & stat.S_ISUID else held(said)

    return attack


probe(
    "files.set-id-file-written",
    "high",
    "none: the kernel takes the bit from whoever writes without capabilities",
    about="A set-id program in a writable mount must lose that bit when it is written.",
)(_rewritten("overwrite"))
probe(
    "files.set-id-file-mapped",
    "low",
    "none: it fires: no kernel takes the bit when a shared mapping is written",
    about="A set-id program in a writable mount must not be changed through a mapping and keep it.",
)(_rewritten("overwrite_mapped"))


@probe("files.live-mount-protected", "high", NOT_PROTECTED)
def live_mount_protected(lab: Lab) -> Outcome:
    """A directory added to a live sandbox must be protected like any other."""
    options: dict[str, Any] = {} if lab.protected else {"unprotect": ("*",)}
    with _download_place() as directory, lab.sandbox(**options) as sandbox:
        os.chmod(directory, 0o755)
        os.makedirs(f"{directory}/.git/hooks")
        sandbox.mount(Mount(_LIVE, directory, READ_WRITE))
        result = run(sandbox, "tasks", "write_new", f"{_LIVE}/.git/hooks/pre-commit")
    return escaped("a hook was written") if result.ok else held(_last_line(result.stderr_text))


@probe("files.protected-for-two", "high", NOT_PROTECTED)
def protected_for_two(lab: Lab) -> Outcome:
    """When one of two sandboxes on a directory ends, the other one's protection must stay."""
    options: dict[str, Any] = {} if lab.protected else {"unprotect": ("*",)}
    with _download_place() as directory:
        os.chmod(directory, 0o755)
        mounts = (Mount(_LIVE, directory, READ_WRITE),)
        with lab.sandbox(mounts=mounts, **options) as first:
            second = lab.sandbox(mounts=mounts, **options)
            first.terminate()
        with second:
            result = run(second, "tasks", "write_new", f"{_LIVE}/.envrc")
        left = os.listdir(directory) if lab.protected else []
    if left:
        return escaped(f"left on the host: {left}")
    return escaped("it could be written") if result.ok else held(_last_line(result.stderr_text))


@probe("files.protected-and-replaced", "low", "none: it fires: a mount on a file follows no rename")
def protected_and_replaced(lab: Lab) -> Outcome:
    """A protected file that the host replaces meanwhile, as editors do, must stay protected."""
    lab.canaries.plant_writable()
    path = f"{lab.canaries.rw}/.mcp.json"
    with lab.mounted() as sandbox:
        write(f"{path}.new", "{}\n")
        os.rename(f"{path}.new", path)
        result = run(sandbox, "tasks", "overwrite", f"{RW}/.mcp.json")
    lab.canaries.plant_writable()
    return escaped("it could be written") if result.ok else held(_last_line(result.stderr_text))


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no word"])[-1]


@probe(
    "ipc.live-mount-socket", "critical", "none: the probes of sockets in mounts have the control"
)
def live_mount_socket(lab: Lab) -> Outcome:
    """A socket in a directory added to a live sandbox must not be reachable."""
    lab.canaries.plant_sockets()
    with lab.sandbox() as sandbox:
        try:
            sandbox.mount(Mount(_LIVE, lab.canaries.ro, READ_ONLY))
        except RingfenceError as exc:
            return held(f"{exc.code}: {exc}")
        result = run(sandbox, "tasks", "connect", f"{_LIVE}/stream.socket")
    return escaped("connected") if result.ok else held(_last_line(result.stderr_text))


@probe("files.live-mount-target", "high", "none: a control would mount over the host's files")
def live_mount_target(lab: Lab) -> Outcome:
    """A mount added to a live sandbox must not land where a link of the sandbox points."""
    with _download_place() as directory, lab.sandbox() as sandbox:
        write(f"{directory}/mounted", "x")
        run(sandbox, "tasks", "links", "/usr", "/home/sandbox/link")
        try:
            sandbox.mount(Mount("/home/sandbox/link/share", directory, READ_ONLY))
        except RingfenceError as exc:
            return held(f"{exc.code}: {exc}")
        landed = sandbox.files.exists("/usr/share/mounted")
    return escaped("it covers /usr/share") if landed else held("the link was not followed")


# -- network ---------------------------------------------------------------------------------


@probe("network.inbound", "high", NETWORK)
def inbound(lab: Lab) -> Outcome:
    """A service inside must not be reachable from the host."""
    word = os.urandom(16).hex()
    with lab.sandbox(network="none" if lab.protected else "unrestricted") as sandbox:
        port = int(first_line(start(sandbox, "tasks", "serve", word)) or 0)
        if not port:
            return inconclusive("it did not listen")
        with socket.socket() as sock:
            sock.settimeout(PATIENCE_S)
            answer = sock.connect_ex(("127.0.0.1", port))
            # A program of the host may have the same port.
            is_inside = answer == 0 and _says(sock, word.encode())
    if answer in (errno.EAGAIN, errno.ETIMEDOUT):
        return inconclusive("nobody takes the connection, and nobody refuses it")
    if is_inside:
        return escaped(f"connected to port {port}")
    return held(os.strerror(answer) if answer else "the port is another program's")


def _says(sock: socket.socket, word: bytes) -> bool:
    """Return whether this is the first that the other end sends."""
    try:
        return sock.recv(len(word), socket.MSG_WAITALL) == word
    except OSError:
        return False
