"""Protocol detection from a client's first bytes, without I/O.

A server behind an allowed name may answer for other names at its address, too. Only in HTTP and TLS
does the client send a name, so both are parsed, and input that a lenient server might still read as
one of them is refused. The rest is passed on unchanged, and at once: a request that no server has
in full yet can still be cut.
"""

from __future__ import annotations

HOLD, TLS, HTTP, PASS, RAW = "hold", "tls", "http", "pass", "raw"
_LONGEST_LINE = 1 << 20  # longer than any server reads a request line
_LONGEST_HELD = 16384

_LETTERS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_TOKEN = frozenset(_LETTERS + b"!#$%&'*+-.^_`|~0123456789")  # RFC 9110, 5.6.2
_LONGEST_METHOD = 64
_BLANK = b" \t"
# These are HTTP even without a version behind the target, as 0.9 had it.
_USUAL = b"GET HEAD POST PUT DELETE OPTIONS PATCH CONNECT TRACE PRI".split()
# IANA's registry of methods, and those of caches and UPnP.
_OTHERS = (
    b"ACL BASELINE-CONTROL BIND CHECKIN CHECKOUT COPY LABEL LINK LOCK MERGE MKACTIVITY MKCALENDAR"
    b" MKCOL MKREDIRECTREF MKWORKSPACE MOVE ORDERPATCH PROPFIND PROPPATCH QUERY REBIND REPORT SEARCH"
    b" UNBIND UNCHECKOUT UNLINK UNLOCK UPDATE UPDATEREDIRECTREF VERSION-CONTROL"
    b" M-SEARCH NOTIFY PURGE SUBSCRIBE UNSUBSCRIBE"
).split()
_METHODS = frozenset((*_USUAL, *_OTHERS))
_BEGINNINGS = frozenset(method[:size] for method in _METHODS for size in range(len(method) + 1))
_PROXY_2 = b"\r\n\r\n\0\r\nQUIT\n"  # HAProxy's PROXY protocol, version 2


class Opening:
    """The beginning of what one client says.

    Attributes:
        data: All of it up to now, until the first verdict other than `HOLD`.
        verdict: `TLS`, `HTTP`: look closer. `RAW`: neither, for good. `PASS`: neither as yet; what
            came may be passed on, and what comes is still to be looked at. `HOLD`: too little to say.
        objection: Why it must be cut instead; empty most of the time.
    """

    def __init__(self) -> None:
        self.data = b""
        self.verdict = HOLD
        self.objection = ""
        self._seen = b""  # the first of all
        self._line = bytearray()  # the first that is not blank, as far as it has come

    def feed(self, more: bytes) -> str:
        """Look at what came; returns the verdict. Not to be called once it is final."""
        if self.verdict == HOLD:
            self.data += more
            self.verdict = self._judge_start(self.data)
            if self.verdict == PASS:
                more = self.data
        if self.verdict == PASS:
            self._watch(more)
        return self.verdict

    def _judge_start(self, data: bytes) -> str:
        if not data:
            return HOLD
        if data[0] == 0x16:
            return HOLD if len(data) < 2 else TLS if data[1] == 3 else RAW
        if data[0] >= 0x80:
            return _old_tls(data)
        return _method(data)

    def _watch(self, more: bytes) -> None:
        """Follow the first line to its end: as long as it has none, no server acts on it."""
        line = self._line
        if len(self._seen) < len(_PROXY_2):
            self._seen += more[: len(_PROXY_2) - len(self._seen)]
        if self._seen == _PROXY_2:
            self._object("the PROXY protocol")
            return
        if not line:
            more = more.lstrip(b"\r\n \t")  # servers skip blank lines before a request
        if not more:
            return
        end = more.find(b"\n")
        line += more if end < 0 else more[:end]
        if not 0x21 <= line[0] <= 0x7E:  # more than RFC 9110 allows: some servers read any word
            # It may still become what nothing but its beginning gives away.
            self.verdict = PASS if _PROXY_2.startswith(self._seen) else RAW
        elif b"HTTP/" in line[-len(more) - len(b"HTTP") :].upper():
            self._object("HTTP that starts like no client's")
        elif end >= 0 and line.startswith(b"PROXY "):
            self._object("the PROXY protocol")
        elif end >= 0 or len(line) > _LONGEST_LINE:
            self.verdict = RAW

    def _object(self, reason: str) -> str:
        self.objection = f"{reason}, where a server name is required"
        self.verdict = RAW
        return RAW


def _old_tls(data: bytes) -> str:
    """A ClientHello in the form of SSL 2: RFC 5246, E.2. It has no room for a name."""
    if len(data) < 4:
        return HOLD if data[2:] in (b"", b"\1") else RAW
    return TLS if data[2] == 1 and data[3] in (0, 2, 3) else RAW


def _method(data: bytes) -> str:
    """Detect an HTTP method at the start; HOLD while it could become one."""
    size = 0
    while size < len(data) and size < _LONGEST_METHOD and data[size] in _TOKEN:
        size += 1
    word = data[:size]
    if size == len(data):
        return HOLD if word in _BEGINNINGS else PASS
    if word not in _METHODS or data[size] not in _BLANK:
        return PASS
    line, newline, _ = data.partition(b"\n")
    if not newline and len(data) < _LONGEST_HELD:
        return HOLD
    return HTTP if word in _USUAL or b"HTTP/" in line.upper() else PASS
