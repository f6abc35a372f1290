"""Initial file system of a guest: our PID 1, its Python, and kernel modules.

Source: Documentation/driver-api/early-userspace/buffer-format.rst.
"""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess

from ...errors import BackendUnavailable
from ..local.agents import agent_code

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .kernel import Kernel

_AGENT = "/agent"
_MODULES = "/modules"  # as guest.machine knows it
_PATIENCE_S = 60.0
# Run by the guest's Python on the host: everything that the agent will import, and what that maps.
# `opened` finds modules that put another in their place, as collections.abc does since Python 3.13.
_LISTING = """
import dis, importlib.util, json, marshal, sys
opened = []
sys.addaudithook(lambda event, args: opened.append(args[0]) if event == 'open' else None)
loader, modules = marshal.load(open(sys.argv[1], 'rb'))
there = {'__name__': 'loader'}
exec(loader, there)
there['install'](modules)
def imports(code):
    for step in dis.get_instructions(code):
        if step.opname == 'IMPORT_NAME':
            yield step.argval
    for each in code.co_consts:
        if hasattr(each, 'co_code'):
            yield from imports(each)
for name, (_is_package, code) in list(modules.items()):
    __import__(name)
    for wanted in imports(code):
        if wanted.partition('.')[0] in sys.stdlib_module_names:
            __import__(wanted)
import encodings.ascii, encodings.latin_1, encodings.utf_8
files = [f for m in list(sys.modules.values()) if (f := getattr(m, '__file__', None))]
files += [c for m in list(sys.modules.values()) if (c := getattr(m, '__cached__', None))]
compiled = [f for f in opened if isinstance(f, str) and f.endswith('.pyc')]
files += [*compiled, *map(importlib.util.source_from_cache, compiled)]
maps = [line.split()[-1] for line in open('/proc/self/maps') if '/' in line]
print(json.dumps([sys.executable, sorted({*files, *maps})]))
"""


class Archive:
    """A cpio archive in the `newc` form, with parent directories as they are needed."""

    def __init__(self) -> None:
        self._out = bytearray()
        self._seen: set[str] = {""}

    def add(
        self, path: str, mode: int, data: bytes = b"", device: tuple[int, int] = (0, 0)
    ) -> None:
        """Add an entry at an absolute path; the first at a path wins."""
        name = path.strip("/")
        if name in self._seen:
            return
        parent = os.path.dirname(name)
        if parent not in self._seen:
            self.add(parent, stat.S_IFDIR | 0o755)
        self._seen.add(name)
        self._put(name, mode, data, device)

    def _put(self, name: str, mode: int, data: bytes, device: tuple[int, int] = (0, 0)) -> None:
        encoded = os.fsencode(name) + b"\0"
        links = 2 if stat.S_ISDIR(mode) else 1
        fields = (len(self._seen), mode, 0, 0, links, 0, len(data), 0, 0, *device, len(encoded), 0)
        self._out += b"070701" + b"".join(b"%08X" % field for field in fields) + encoded
        self._out += bytes(-len(self._out) % 4)
        self._out += data
        self._out += bytes(-len(self._out) % 4)

    def finished(self) -> bytes:
        self._put("TRAILER!!!", 0, b"")
        return bytes(self._out)


def build(kernel: Kernel, scratch: str) -> bytes:
    """The archive for a kernel.

    Args:
        scratch: A directory to write in.
    """
    archive = Archive()
    for name in ("/dev", "/proc", "/sys", "/share", "/groups", "/root", _MODULES):
        archive.add(name, stat.S_IFDIR | 0o755)
    archive.add("/dev/console", stat.S_IFCHR | 0o600, device=(5, 1))
    archive.add("/dev/null", stat.S_IFCHR | 0o666, device=(1, 3))
    for i, (name, content) in enumerate(kernel.modules()):
        archive.add(f"{_MODULES}/{i:02}-{name}", stat.S_IFREG | 0o600, content)
    python, options, code = _start()
    archive.add(f"{_AGENT}/{agent_code.NAME}", stat.S_IFREG | 0o600, _agent())
    archive.add(f"{_AGENT}/start", stat.S_IFREG | 0o600, code.encode())
    archive.add(
        "/init",
        stat.S_IFREG | 0o700,
        f"#!{python} {options}\nexec(open('{_AGENT}/start').read())\n".encode(),
    )
    for path in _files_of_python(scratch):
        _copy(archive, path)
    _add_loader(archive, python)
    return archive.finished()


def _agent() -> bytes:
    return agent_code.packed(machine=True)


def _start() -> tuple[str, str, str]:
    """The interpreter, its options as one word (a script's first line has only one), what it runs."""
    python, *options, _c, code = agent_code.argv(_AGENT, "machine")
    return python, "-" + "".join(each.lstrip("-") for each in options), code


def _files_of_python(scratch: str) -> list[str]:
    """Every file of the host's that the guest's interpreter will open."""
    place = os.path.join(scratch, "agent")
    with open(place, "wb") as file:
        file.write(_agent())
    python = agent_code.interpreter()[0]
    try:
        done = subprocess.run(
            [python, "-I", "-S", "-c", _LISTING, place],
            capture_output=True,
            timeout=_PATIENCE_S,
            check=True,
            env={},
        )
    except (OSError, subprocess.SubprocessError) as exc:
        raise BackendUnavailable(f"{python} does not run the agent: {exc}") from exc
    finally:
        os.unlink(place)
    executable, files = json.loads(done.stdout)
    return [executable, *files]


def _copy(archive: Archive, path: str) -> None:
    """A file of the host's, where it really lies, and every name in its directory that leads to it."""
    real = os.path.realpath(path)
    try:
        with open(real, "rb") as file:
            archive.add(real, stat.S_IFREG | 0o755, file.read())
    except OSError:
        return  # bytecode that nobody has written, or a name of the kernel's own
    _link_parents(archive, path)
    if ".so" in real:
        directory = os.path.dirname(real)
        for name in os.listdir(directory):
            link = os.path.join(directory, name)
            if os.path.islink(link) and os.path.realpath(link) == real:
                archive.add(link, stat.S_IFLNK | 0o777, os.fsencode(os.path.basename(real)))


def _add_loader(archive: Archive, python: str) -> None:
    """The dynamic loader under the name that the program itself has for it."""
    with open(python, "rb") as file:
        found = re.search(rb"/lib[^\0]*/ld-[^\0]*(?=\0)", file.read(1 << 13))
    if found is not None:
        name = os.fsdecode(found[0])
        real = os.path.join(os.path.realpath(os.path.dirname(name)), os.path.basename(name))
        with open(name, "rb") as file:
            archive.add(real, stat.S_IFREG | 0o755, file.read())


def _link_parents(archive: Archive, path: str) -> None:
    """The symlinks on the way, such as /lib, and the file's own name where that is one."""
    for top in ("/lib", "/lib64", "/bin"):
        if os.path.islink(top):
            archive.add(top, stat.S_IFLNK | 0o777, os.fsencode(os.readlink(top)))
    if os.path.islink(path) and os.path.realpath(os.path.dirname(path)) == os.path.dirname(path):
        archive.add(path, stat.S_IFLNK | 0o777, os.fsencode(os.path.realpath(path)))
