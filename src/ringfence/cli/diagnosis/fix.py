"""`ringfence doctor --fix`: files and settings by which ordinary users can make sandboxes on this host.

Three things are mended, each only where this host needs it: an AppArmor profile for a copy of Python that
only Ringfence runs, sysctls that forbid user namespaces, and cgroups that systemd does not delegate.
`--undo` takes back what `--fix` did. Sources: apparmor.d(5), sysctl.d(5), systemd.resource-control(5).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field

from ...errors import InvalidRequest, IoError
from ...launcher import spawn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

_RECORD = "/var/lib/ringfence/doctor-fix.json"
_PROFILE = "/etc/apparmor.d/ringfence"
_SYSCTLS = "/etc/sysctl.d/60-ringfence.conf"
_DELEGATION = "/etc/systemd/system/user@.service.d/60-ringfence.conf"
_RESTRICTED = "kernel/apparmor_restrict_unprivileged_userns"
_PROFILE_TEXT = f"""\
# Written by `ringfence doctor --fix`; `ringfence doctor --undo` removes it.
abi <abi/4.0>,
include <tunables/global>

profile ringfence {spawn.COPY} flags=(unconfined) {{
  userns,
  include if exists <local/ringfence>
}}
"""
_DELEGATION_TEXT = """\
# Written by `ringfence doctor --fix`; `ringfence doctor --undo` removes it.
[Service]
Delegate=cpu io memory pids
"""
_OPENED = {"kernel/unprivileged_userns_clone": "1", "user/max_user_namespaces": "15000"}
_CLOSED = "0"
_S = 60.0


@dataclass
class Fix:
    """Changes to this host, in order.

    Args:
        files: Contents by path; bytes that are no text are those of a copy.
        sysctls: New values by name below /proc/sys, which hold at once.
        reasons: Sentences for the reader.
        commands: Commands that load what was written; each is left out where its program is missing.
        before_undo, after_undo: Commands around the removal of the files.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    sysctls: dict[str, str] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    commands: list[list[str]] = field(default_factory=list)
    before_undo: list[list[str]] = field(default_factory=list)
    after_undo: list[list[str]] = field(default_factory=list)


def main(*, undo: bool, yes: bool, root: str = "") -> int:
    """Show what would change, ask, and change it.

    Args:
        undo: Take back what an earlier call did.
        yes: Do not ask.
        root: Directory in place of /, for tests; commands are only shown then.

    Returns:
        0 when it is done or nothing was to be done, 1 when it was not done.

    Raises:
        InvalidRequest: A file is there that this command did not write; nothing has changed.
    """
    record = _read_record(root)
    if undo:
        return _undo(record, root, yes=yes)
    fix = _needed(root, record)
    if not fix.files and not fix.sysctls:
        print("nothing to fix: this host has no switch that `ringfence doctor --fix` turns")
        return 0
    _show(fix)
    if not _may(yes=yes):
        return 1
    # First the record: what a crash leaves behind can be undone.
    for path, content in fix.files.items():
        record["files"][path] = hashlib.sha256(content).hexdigest()
    for name in fix.sysctls:
        record["sysctls"].setdefault(name, _sysctl(root, name))
    for when in ("before_undo", "after_undo"):
        record[when] += [each for each in getattr(fix, when) if each not in record[when]]
    _write(root + _RECORD, json.dumps(record, indent=2).encode())
    for path, content in fix.files.items():
        _write(root + path, content, like=_base() if path == spawn.COPY else None)
        if path == spawn.COPY:
            _try_copy(root + path)
    for name, value in fix.sysctls.items():
        _set(root, name, value)
    return _run(fix.commands, root)


def _needed(root: str, record: dict[str, Any]) -> Fix:
    fix = Fix()
    if _sysctl(root, _RESTRICTED) == "1":
        fix.reasons.append(
            "AppArmor refuses user namespaces to ordinary users. The profile allows them to a copy of this"
            f" Python, {spawn.COPY}. Every user of this host can run that copy, and so have them, too."
        )
        with open(_base(), "rb") as file:
            fix.files |= {spawn.COPY: file.read(), _PROFILE: _PROFILE_TEXT.encode()}
        fix.commands.append(["apparmor_parser", "-r", _PROFILE])
        fix.before_undo.append(["apparmor_parser", "-R", _PROFILE])
    for name, value in _OPENED.items():
        if _sysctl(root, name) == _CLOSED:
            fix.sysctls[name] = value
            fix.reasons.append(f"{name.replace('/', '.')} is 0: no ordinary user gets a namespace.")
    known = {name for name in record["sysctls"] if name in _OPENED} | set(fix.sysctls)
    if known:
        lines = [
            f"{name.replace('/', '.')} = {_OPENED[name]}\n" for name in _OPENED if name in known
        ]
        fix.files[_SYSCTLS] = f"# Written by `ringfence doctor --fix`.\n{''.join(lines)}".encode()
    if _is_systemd_with_cgroup_v2(root):
        fix.files[_DELEGATION] = _DELEGATION_TEXT.encode()
        fix.reasons.append(
            "systemd delegates memory and pids alone to users. All four controllers make limits exact,"
            " from the next login on."
        )
        fix.commands.append(["systemctl", "daemon-reload"])
        fix.after_undo.append(["systemctl", "daemon-reload"])
    fix.files = dict(_changed(root, fix.files, record["files"]))
    return fix


def _changed(
    root: str, files: dict[str, bytes], written: dict[str, str]
) -> Iterator[tuple[str, bytes]]:
    """Yield the files that are not there yet.

    Raises:
        InvalidRequest: One is there, with another content, that this command did not write.
    """
    for path, content in files.items():
        found = _digest(root + path)
        if found == hashlib.sha256(content).hexdigest():
            continue
        if found and found != written.get(path):
            raise InvalidRequest(
                f"{path} is there already and was not written by this command",
                field="fix",
                hint="move it away, or set up this host by hand: docs/how-to/rootless-hosts.md",
            )
        yield path, content


def _try_copy(path: str) -> None:
    """Refuse a Python whose copy does not find its own library, and remove the copy."""
    argv = [path, "-I", "-S", "-c", "import os, _socket, _ctypes"]
    done = subprocess.run(argv, env={}, capture_output=True, timeout=_S, check=False)
    if done.returncode:
        os.unlink(path)
        raise InvalidRequest(
            f"a copy of {_base()} elsewhere does not find its own library",
            field="fix",
            hint="run Ringfence by the distribution's Python, such as /usr/bin/python3",
        )


def _show(fix: Fix) -> None:
    print("\n".join(f"- {reason}" for reason in fix.reasons))
    for path, content in fix.files.items():
        if path == spawn.COPY:
            print(f"\nwrite {path}: a copy of {_base()}, {len(content)} bytes")
        else:
            print(
                f"\nwrite {path}:\n"
                + "".join(f"  {each}\n" for each in content.decode().splitlines())
            )
    for name, value in fix.sysctls.items():
        print(f"set {name.replace('/', '.')} = {value}")
    for command in fix.commands:
        print("run " + " ".join(command))


def _may(*, yes: bool) -> bool:
    sys.stdout.flush()
    if os.geteuid() != 0:
        print("nothing was changed: only root can (sudo ringfence doctor --fix)", file=sys.stderr)
        return False
    if yes:
        return True
    if not sys.stdin.isatty():
        print("nothing was changed: there is no terminal to ask at (add --yes)", file=sys.stderr)
        return False
    print("Change this host? [y/N] ", end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _undo(record: dict[str, Any], root: str, *, yes: bool) -> int:
    if not record["files"] and not record["sysctls"]:
        print("nothing to undo: `ringfence doctor --fix` has changed nothing here")
        return 0
    for path in record["files"]:
        print(f"remove {path}")
    for name, value in record["sysctls"].items():
        print(f"set {name.replace('/', '.')} = {value}")
    if not _may(yes=yes):
        return 1
    failed = _run(record["before_undo"], root)
    for path, digest in list(record["files"].items()):
        found = _digest(root + path)
        if found and found != digest:
            print(f"{path} was changed since, and stays", file=sys.stderr)
            failed = 1
        elif found:
            os.unlink(root + path)
    for name, value in record["sysctls"].items():
        if _sysctl(root, name) == _OPENED.get(name):  # else somebody has changed it since
            _set(root, name, value)
    os.unlink(root + _RECORD)
    return failed | _run(record["after_undo"], root)


def _run(commands: list[list[str]], root: str) -> int:
    failed = 0
    for command in commands:
        if root:
            continue
        if shutil.which(command[0]) is None:
            print(
                f"{command[0]} is not installed: this was not run: {' '.join(command)}",
                file=sys.stderr,
            )
            failed = 1
        elif subprocess.run(command, check=False, timeout=_S).returncode:
            print(f"this failed: {' '.join(command)}", file=sys.stderr)
            failed = 1
    return failed


# -- the host -----------------------------------------------------------------------------------------


def _base() -> str:
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable) or sys.executable)


def _is_systemd_with_cgroup_v2(root: str) -> bool:
    return os.path.isdir(f"{root}/run/systemd/system") and os.path.exists(
        f"{root}/sys/fs/cgroup/cgroup.controllers"
    )


def _sysctl(root: str, name: str) -> str:
    """Return a value below /proc/sys; empty where this kernel has no such setting."""
    try:
        with open(f"{root}/proc/sys/{name}", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _set(root: str, name: str, value: str) -> None:
    with open(f"{root}/proc/sys/{name}", "w", encoding="ascii") as file:
        file.write(value)


def _digest(path: str) -> str:
    """Return the SHA-256 of a file; empty where there is none."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return ""


def _read_record(root: str) -> dict[str, Any]:
    empty: dict[str, Any] = {"files": {}, "sysctls": {}, "before_undo": [], "after_undo": []}
    try:
        with open(root + _RECORD, encoding="utf-8") as file:
            return {**empty, **json.load(file)}
    except FileNotFoundError:
        return empty
    except ValueError as exc:
        raise IoError(
            f"{_RECORD} cannot be read: {exc}", hint="remove it, and undo by hand"
        ) from exc


def _write(path: str, content: bytes, like: str | None = None) -> None:
    """Write a file of root's at once; `like` gives it the mode and times of another."""
    temporary = f"{path}.new"
    before = os.umask(0o022)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        with open(fd, "wb") as file:
            file.write(content)
            os.fchmod(fd, 0o755 if like else 0o644)
            file.flush()
            os.fsync(fd)
        if like:
            found = os.stat(like)
            os.utime(temporary, ns=(found.st_atime_ns, found.st_mtime_ns))
        os.rename(temporary, path)
    except FileExistsError as exc:
        raise IoError(
            f"{temporary} is there", hint="remove it: an earlier run was cut off"
        ) from exc
    finally:
        os.umask(before)
