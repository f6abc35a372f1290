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

import json
import re
import shlex
from pathlib import Path

from ..errors import InvalidRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MOST_FRAME_BYTES = 16 << 20
MOST_CODE_BYTES = 8 << 20
_HEADER_BYTES = 160
_HEADER = re.compile(rb"\x1e([a-z]{1,8}) ([0-9a-f]{1,32}|-) ([0-9]{1,9}) ([!-~]{1,100})\n")

_BOOT = (
    "import os;b=b''\n"
    "while b'\\0' not in b:\n"
    " d=os.read(0,65536)\n"
    " if not d:raise SystemExit(1)\n"
    " b+=d\n"
    "s,_,r=b.partition(b'\\0')\n"
    "exec(compile(s,'<ringfence kernel>','exec'),{'__name__':'ringfence_kernel','REST':r})"
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
MARK = "ringfence-context"
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
    source = (here / "kernel.py").read_text()
    part = "jupyter" if language.startswith(JUPYTER) else "charts"
    if language == "bash":
        part = language
    text = f"\n{part.upper()} = {(here / f'{part}.py').read_text()!r}"
    return source.replace(f'\n{part.upper()} = ""', text, 1).encode() + b"\0"


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
