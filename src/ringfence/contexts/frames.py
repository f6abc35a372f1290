"""Wire of a context: frames out of the sandbox, lines of JSON into it.

A frame is a header `RS kind cell length name LF` and `length` bytes. No nesting, so that a reader
needs no more memory than the bytes that came:

| kind | name | payload |
|---|---|---|
| `out`, `err` | | output |
| `part` | MIME type, or field of an error | one part of the next frame of this table |
| `main`, `display`, `error` | | none: the cell's value, a value shown, its exception |
| `input` | | the prompt of `input()` |
| `done` | | execution count, bytes of output left out |
| `hello` | | the kernel is ready |
"""

from __future__ import annotations

import functools
import importlib.util
import json
import marshal
import re
import shlex
from pathlib import Path

from ..errors import InvalidRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import CodeType
    from typing import Any

MOST_FRAME_BYTES = 16 << 20
MOST_CODE_BYTES = 8 << 20
_HEADER_BYTES = 160
_HEADER = re.compile(rb"\x1e([a-z]{1,8}) ([0-9a-f]{1,32}|-) ([0-9]{1,9}) ([!-~]{1,100})\n")

# Reads the lengths of what follows: the code of the kernel's modules, their sources, the source of its part.
# The code is that of the host's interpreter; another release compiles the sources, which takes as long as
# its own start.
_BOOT = (
    "import os\nb=b''\n"
    "def more():\n"
    " global b\n"
    " d=os.read(0,1<<18)\n"
    " if not d:raise SystemExit(1)\n"
    " b+=d\n"
    "while b'\\n' not in b:more()\n"
    "h,_,b=b.partition(b'\\n')\n"
    "h=h.split();c,s,p=map(int,h[1:]);s+=c;p+=s\n"
    "while len(b)<p:more()\n"
    "try:from _frozen_importlib_external import MAGIC_NUMBER as m\n"
    "except ImportError:m=b''\n"
    "if m.hex().encode()==h[0]:\n"
    " import marshal\n"
    " k=marshal.loads(b[:c])\n"
    "else:k=[compile(e,'<ringfence kernel>','exec')for e in b[c:s].split(b'\\0')]\n"
    "n={'__name__':'ringfence_kernel','PART':b[s:p].decode(),'REST':b[p:]}\n"
    "for e in k:exec(e,n)"
)
# Node can make no pipe and move no descriptor: another program gives it a pipe each for 1 and 2, with the
# ends that read at 8 and 9, and the streams of the exec at 6 and 7. Python becomes node; a shell would
# stay as its parent, and no process with children goes on in forks.
_PIPES = (
    "import os,signal,sys\n"
    "d=os.dup2;d(1,6);d(0,7)\n"
    "for fd in (1,2):\n"
    " r,w=os.pipe();d(r,10+fd);d(w,fd);os.close(r);os.close(w)\n"
    "for fd in (1,2):d(10+fd,7+fd);os.close(10+fd)\n"
    "d(os.open('/dev/null',0),0)\n"
    "for each in (signal.SIGPIPE,signal.SIGXFSZ):signal.signal(each,signal.SIG_DFL)\n"
    "os.execvp('node',['node','--no-force-async-hooks-checks','-e',sys.argv[1]])"
)
_NODE = (
    "command -v node >/dev/null || { echo node is not installed >&2; exit 127; }\n"
    f'command -v python3 >/dev/null && exec python3 -ISc {shlex.quote(_PIPES)} "$BOOT"\n'
    "exec 6>&1 7<&0\n"
    ": | { exec 8<&0; : | {\n"
    "exec 9<&0 </dev/null >/proc/self/fd/8 2>/proc/self/fd/9\n"
    'exec node --no-force-async-hooks-checks -e "$BOOT"; }; }\n'
)
_NODE_BOOT = (
    "{const f=require('fs'),p=Buffer.alloc(65536);let b=Buffer.alloc(0),n;"
    "while((n=b.indexOf(0))<0){const c=f.readSync(7,p);if(!c)process.exit(1);"
    "b=Buffer.concat([b,p.subarray(0,c)])}"
    "const REST=b.subarray(n+1);eval(b.subarray(0,n).toString())}"
)
_MODULES = ("kernel_wire", "kernel_values", "kernel")  # run in this order, in one namespace
MARK = "ringfence-context"
_DRIVERS = {"r": "driver.R", "java": "Driver.java"}
_PARTS = {"bash": "bash", "jupyter": "jupyter", **dict.fromkeys(_DRIVERS, "driven")}
JUPYTER = "jupyter:"  # begins the language of a kernel of Jupyter's; its kernelspec follows


def argv_of(language: str) -> list[str]:
    """Build the command of a kernel; it ends with a mark and the language."""
    if language == "node":
        return ["sh", "-c", f"BOOT={shlex.quote(_NODE_BOOT)}\n{_NODE}", MARK, language]
    return ["python3", "-c", _BOOT, MARK, language]


def language_of(argv: Sequence[str]) -> str:
    """Return the language of the context that a command runs; empty if it is none."""
    return argv[-1] if len(argv) > 2 and argv[-2] == MARK else ""


def kernel_of(language: str) -> bytes:
    """Read the source that the bootstrap of a language reads first."""
    here = Path(__file__).parent
    if language == "node":
        return (here / "kernel.js").read_bytes() + b"\0"
    part = _PARTS.get(language.partition(":")[0], "charts")
    magic, code, source = _compiled()
    also = (here / f"{part}.py").read_bytes()
    if driver := _DRIVERS.get(language):
        also += f"\nSOURCE = {(here / driver).read_text('utf-8')!r}\n".encode()
    return b"%s %d %d %d\n" % (magic, len(code), len(source), len(also)) + code + source + also


@functools.cache
def _compiled() -> tuple[bytes, bytes, bytes]:
    """Return a release's mark, the code of the kernel's modules for it, and their sources."""
    codes, sources = [], []
    for name in _MODULES:
        spec = importlib.util.find_spec(f".{name}", __package__)
        loader: Any = spec and spec.loader
        code = loader.get_code(f"{__package__}.{name}")  # from its cache: compiling takes 10 ms
        codes.append(_without_path(code))
        sources.append(Path(__file__).with_name(f"{name}.py").read_bytes())
    mark = importlib.util.MAGIC_NUMBER.hex().encode()
    return mark, marshal.dumps(codes), b"\0".join(sources)


def _without_path(code: CodeType) -> CodeType:
    """Name no file of the host in code for a sandbox."""
    parts = [_without_path(each) if hasattr(each, "co_code") else each for each in code.co_consts]
    return code.replace(co_filename="<ringfence kernel>", co_consts=tuple(parts))


def request(do: str, **fields: object) -> bytes:
    """Encode a request to a kernel.

    Raises:
        InvalidRequest: It is too large.
    """
    # ASCII only: lone surrogates in code pass too, as escapes.
    # It begins a line: the one before may be incomplete, if whoever wrote it was cut off.
    line = b"\n" + json.dumps({"do": do, **fields}).encode() + b"\n"
    if len(line) > MOST_CODE_BYTES:
        raise InvalidRequest(
            f"a request of {len(line)} bytes is too large; at most {MOST_CODE_BYTES}",
            field="code",
            hint="write large data to a file of the sandbox and read it there",
        )
    return line


class BrokenFrameError(Exception):
    """Bytes came that are no frame; a program inside may have written them."""


class Reader:
    """Splits bytes into frames. Holds at most one frame.

    Args:
        in_the_middle: The bytes may begin inside a frame, whose rest is passed over.

    Attributes:
        consumed: Bytes up to the end of the frame that was yielded last.
    """

    def __init__(self, *, in_the_middle: bool = False) -> None:
        self._buffer, self.consumed = bytearray(), 0
        self._needed = 0  # bytes until which looking is in vain
        self._searches = in_the_middle

    def feed(self, data: bytes) -> Iterator[tuple[str, str, str, bytes]]:
        """Yield kind, cell, name and payload of each frame that is whole.

        Raises:
            BrokenFrameError: The stream is useless from here on.
        """
        self._buffer += data
        if len(self._buffer) < self._needed:
            return
        start, before = 0, self.consumed
        while True:
            header = _HEADER.match(self._buffer, start)
            if header is None and self._searches:
                header = _HEADER.search(self._buffer, start)
                start = header.start() if header else max(0, len(self._buffer) - _HEADER_BYTES)
            if header is None:
                break
            self._searches = False
            length = int(header[3])
            if length > MOST_FRAME_BYTES:
                raise BrokenFrameError(f"a frame of {length} bytes; at most {MOST_FRAME_BYTES}")
            self._needed = header.end() - start + length
            if len(self._buffer) - start < self._needed:
                break
            end = start + self._needed
            payload = bytes(memoryview(self._buffer)[header.end() : end])
            self.consumed = before + end
            yield header[1].decode(), header[2].decode(), header[4].decode(), payload
            start, self._needed = end, 0
        del self._buffer[:start]
        self.consumed = before + start
        if not self._needed and not self._searches and len(self._buffer) >= _HEADER_BYTES:
            raise BrokenFrameError(f"no header of a frame: {bytes(self._buffer[:40])!r}")
