"""The agent as one file that a guest's Python loads, and which Python that is."""

from __future__ import annotations

import functools
import importlib.util
import marshal
import os
import sys

from ....guest import users
from ..mounts import runtime, template

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType

NAME = users.AGENT
_MODULES = (
    "__future__",
    "ringfence.guest.agent",
    "ringfence.guest.boot",
    "ringfence.guest.execs",
    "ringfence.guest.files",
    "ringfence.guest.flows",
    "ringfence.guest.groups",
    "ringfence.guest.looking",
    "ringfence.guest.room",
    "ringfence.guest.starting",
    "ringfence.guest.process_image",
    "ringfence.guest.relays",
    "ringfence.guest.tags",
    "ringfence.guest.trees",
    "ringfence.guest.users",
    "ringfence.guest.isolation",
    "ringfence.guest.watchdog",
    "ringfence.launcher.build",
    "ringfence.launcher.pid1.connects",
    "ringfence.launcher.helpers.descent",
    "ringfence.launcher.pid1.file_locks",
    "ringfence.launcher.helpers.finding",
    "ringfence.launcher.pid1.forked",
    "ringfence.launcher.pid1.init",
    "ringfence.launcher.lockdown",
    "ringfence.launcher.pid1.netlink_sockets",
    "ringfence.launcher.newroot",
    "ringfence.launcher.pid1.notifications",
    "ringfence.launcher.pid1.processes",
    "ringfence.launcher.pid1.programs",
    "ringfence.launcher.pid1.idle_pages",
    "ringfence.launcher.machine_code.process_image_elf",
    "ringfence.launcher.helpers.tars",
    "ringfence.launcher.pid1.terminals",
    "ringfence.launcher.helpers.trees",
    "ringfence.launcher.machine_code.vforked",
    "ringfence.launcher.pid1.watchdog",
    "ringfence.launcher.helpers.watching",
    "ringfence.launcher.helpers.attributes",
    "ringfence.launcher.wire",
    "ringfence.linux.cdata",
    "ringfence.linux.files",
    "ringfence.linux.inotify",
    "ringfence.linux.landlock",
    "ringfence.linux.libc",
    "ringfence.linux.mappings",
    "ringfence.linux.mounts",
    "ringfence.linux.namespaces",
    "ringfence.linux.on_behalf",
    "ringfence.linux.privileges",
    "ringfence.linux.seccomp",
    "ringfence.linux.signals",
)
# Additional modules for an agent that boots a machine.
_MACHINE = (
    "ringfence.guest.channels",
    "ringfence.guest.machine",
    "ringfence.guest.machine_agent",
    "ringfence.guest.sharing",
    "ringfence.launcher.link.channel",
    "ringfence.launcher.link.channels",
    "ringfence.launcher.link.connection_relay",
    "ringfence.launcher.helpers.layers",
    "ringfence.launcher.link.line",
    "ringfence.launcher.network",
    "ringfence.linux.destination",
    "ringfence.linux.fuse",
    "ringfence.linux.machine",
    "ringfence.linux.netlink",
)

# Additional modules for an agent at the far end of a stream.
_STREAMED = (
    "ringfence.guest.channels",
    "ringfence.guest.loader",
    "ringfence.guest.far_start",
    "ringfence.guest.streamed",
    "ringfence.launcher.link.channel",
    "ringfence.launcher.link.channels",
    "ringfence.launcher.link.line",
)


@functools.cache
def packed(*, machine: bool = False) -> bytes:
    """The agent and all it imports, compiled for a Python like the one that runs us: marshalled."""
    modules: dict[str, tuple[bool, CodeType]] = {}
    for name in _with_packages(*_MODULES, *(_MACHINE if machine else ())):
        is_package, code = _compiled(name)
        modules[name] = is_package, code
    return marshal.dumps((_compiled("ringfence.guest.loader")[1], modules))


@functools.cache
def sources() -> dict[str, tuple[bool, str]]:
    """The agent for the far end of a stream, for any Python: name to whether it is a package, and its text."""
    found: dict[str, tuple[bool, str]] = {"ringfence": (True, "")}
    for name in _with_packages(*_MODULES, *_STREAMED):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        if name.startswith("ringfence."):
            text: str = spec.loader.get_source(name)  # type: ignore[attr-defined]
            found[name] = spec.submodule_search_locations is not None, text
    return found


def _with_packages(*names: str) -> list[str]:
    split = [name.split(".") for name in names]
    packages = {".".join(parts[:n]) for parts in split for n in range(1, len(parts))}
    return sorted({*names, *packages})


def _compiled(name: str) -> tuple[bool, CodeType]:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    # From the bytecode on disk where it is there.
    code: CodeType = spec.loader.get_code(name)  # type: ignore[union-attr]
    return spec.submodule_search_locations is not None, code


@functools.cache
def interpreter() -> tuple[str, list[tuple[str, str, int]]]:
    """A Python like ours as guests see it, and what must be shown to them besides the template.

    The template shows /usr. A Python kept elsewhere is shown at its own path, as with `python_env`.
    """
    own = os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for path in (own, f"/usr/bin/{name}", f"/usr/local/bin/{name}"):
        if path.startswith("/usr/") and os.access(path, os.X_OK):
            return path, []
    prefix = os.path.realpath(sys.base_prefix)
    return own, [(prefix, prefix, template.READ_ONLY)]


def foreign_trees() -> list[tuple[str, str, int]]:
    """List the host trees that `argv` with `foreign` needs: source, target, mount attributes."""
    return [(*each, template.READ_ONLY) for each in runtime.trees(interpreter()[0])]


def argv(place: str, main: str = "boot", *, foreign: bool = False) -> list[str]:
    """The command that starts the agent from its file in directory `place`.

    Args:
        main: The module of `ringfence.guest` that begins.
        foreign: On a root that is not the template's: with nothing but what `runtime` shows.
    """
    python = runtime.command(interpreter()[0]) if foreign else [interpreter()[0]]
    return [*python, *_arguments(f"'{place}/{NAME}'", main)]


def argv_of_process_image() -> list[str]:
    """The command whose process image every copy goes on from: its file is descriptor 3."""
    return [interpreter()[0], *_arguments("3", "process_image")]


def _arguments(file: str, main: str) -> list[str]:
    code = (
        # A collection while it begins finds nothing, and takes milliseconds.
        "import gc, marshal; gc.disable(); "
        # marshal.load() calls back for every few bytes, which takes twice as long.
        f"loader, modules = marshal.loads(open({file}, 'rb').read()); "
        "there = {'__name__': 'loader'}; exec(loader, there); there['install'](modules); "
        f"from ringfence.guest.{main} import main; gc.enable(); main()"
    )
    # With UTF-8 for a fact, it needs no locale: 0.3 MB to read and look through, at every start.
    return ["-I", "-S", "-X", "utf8", "-c", code]
